import pytest
import torch

from qtool.devices import grow_in_place, memory_used, resolve_device
from qtool.errors import QtoolError, UsageError


def test_cpu_and_auto():
    assert resolve_device("cpu") == torch.device("cpu")
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("text", ["gpu", "cuda:x", "", "cuda:-1", "mps"])
def test_unknown_names_are_usage_errors(text):
    with pytest.raises(UsageError, match="cuda:N"):
        resolve_device(text)


def test_an_absent_gpu_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for text in ("cuda", "cuda:0"):
        with pytest.raises(QtoolError, match="--device cpu"):
            resolve_device(text)


def test_one_gpu_too_few_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(QtoolError, match="cuda:2"):
        resolve_device("cuda:2")


def test_memory_is_measured():
    assert memory_used(torch.device("cpu")) >= 0


@pytest.fixture
def allocator(monkeypatch):
    """What the allocator of a GPU that is none is told."""
    told = []
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append)
    monkeypatch.setattr("ctypes.CDLL", lambda name: None)
    monkeypatch.setattr(torch, "empty", lambda *size, device: None)
    return told


GPU = torch.device("cuda", 0)


def test_segments_grow_in_place(allocator):
    assert grow_in_place(GPU)
    assert allocator == ["expandable_segments:True"]


def test_they_do_not_where_the_driver_cannot(allocator, monkeypatch):
    def refuse(*size, device):
        raise RuntimeError("CUDA driver error: operation not supported")

    monkeypatch.setattr(torch, "empty", refuse)
    assert not grow_in_place(GPU)
    assert allocator == ["expandable_segments:True", "expandable_segments:False"]


def test_they_are_left_alone_on_the_cpu_by_choice_and_in_use(allocator, monkeypatch):
    assert not grow_in_place(torch.device("cpu"))
    with monkeypatch.context() as chosen:
        chosen.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:128")
        assert not grow_in_place(GPU)
    with monkeypatch.context() as used:
        used.setattr(torch.cuda, "memory_reserved", lambda device: 2**21)
        assert not grow_in_place(GPU)
    assert allocator == []


def test_they_are_left_alone_where_torch_would_crash(allocator, monkeypatch):
    def absent(name):
        raise OSError(name)

    monkeypatch.setattr("ctypes.CDLL", absent)
    assert not grow_in_place(GPU)
    assert allocator == []
