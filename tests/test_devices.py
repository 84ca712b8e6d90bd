import pytest
import torch

from qtool.devices import memory_used, resolve_device
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
