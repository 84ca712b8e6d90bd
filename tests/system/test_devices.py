import os
import types
from contextlib import suppress

import pytest
import torch

import qtool
from qtool.errors import QtoolError, UsageError
from qtool.system import control_groups, devices
from qtool.system.devices import (
    grow_in_place,
    killed_since,
    limited_memory,
    memory_free,
    memory_kills,
    memory_used,
    out_of_memory,
    resolve_device,
)  # fmt: skip


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
    with pytest.raises(QtoolError, match=r"'cuda:2'.*got 2 CUDA device\(s\); name one below cuda:2"):
        resolve_device("cuda:2")
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(QtoolError, match="start 2 processes on this machine at most"):
        resolve_device("cuda")


def test_more_processes_than_gpus_are_refused_before_any_is_started(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr("qtool.system.launcher.launch", None)
    with pytest.raises(UsageError, match="--devices: expected at most 2, the CUDA devices of this machine; got 3"):
        qtool.train("resnet", "fashion-mnist", device="cuda", devices=3)


def test_memory_is_measured():
    assert memory_used(torch.device("cpu")) >= 0


@pytest.mark.parametrize(
    ("error", "short"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
            True,
        ),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("CUDA error: out of memory"), False),
    ],
)
def test_the_end_of_memory_is_known_whoever_tells_it(error, short):
    assert out_of_memory(error) is short


MIB = 2**20
CPU = torch.device("cpu")
FIRST = {
    "memory/job/memory.limit_in_bytes": 900 * MIB, "memory/job/memory.usage_in_bytes": 700 * MIB,
    "memory/job/memory.stat": f"inactive_file 1\ntotal_inactive_file {300 * MIB}\ntotal_active_file {50 * MIB}\n",
    "memory/job/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 4\n",
    "memory/memory.limit_in_bytes": 2**63 - 4096, "memory/memory.usage_in_bytes": 5000 * MIB,
}  # fmt: skip
SECOND = {
    "slice/memory.max": 1500 * MIB, "slice/memory.current": 1250 * MIB,
    "slice/job/memory.max": "max\n", "slice/job/memory.current": 10 * MIB,
    "slice/memory.stat": f"active_file {100 * MIB}\ninactive_file {50 * MIB}\n",
    "slice/job/memory.events": "low 0\noom 5\noom_kill 4\n",
}  # fmt: skip
PERIOD = {"cpu/job/cpu.cfs_period_us": "100000\n"}
CONTAINER = {
    "memory.max": 500 * MIB, "memory.current": 100 * MIB, "memory.stat": "inactive_file 0\n",
    "memory.events": "oom_kill 4\n",
}  # fmt: skip


@pytest.fixture
def system(monkeypatch, tmp_path):
    """Has this process be in control groups with the files given, of a system with 8 GiB available and 6 kills."""

    def made(groups, files):
        known = {
            "/proc/self/cgroup": groups, "/proc/meminfo": f"MemTotal: 1 kB\nMemAvailable:    {8 * MIB} kB\n",
            "/proc/vmstat": "oom_kill 6\n",
        }  # fmt: skip
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(str(text))
        read = control_groups.read
        monkeypatch.setattr(control_groups, "_ROOT", str(tmp_path))
        for module in (control_groups, devices):
            monkeypatch.setattr(module, "read", lambda path: known.get(path) or read(path))
        return known

    return made


@pytest.mark.parametrize(
    ("groups", "files", "free"),
    [
        ("0::/\n", {}, 8192),
        ("", {}, 8192),
        ("4:memory:/job\n0::/\n", FIRST, 900 - 700 + 300),
        ("0::/slice/job\n", SECOND, 1500 - 1250 + 50),
        ("0::/\n", CONTAINER, 400),
        ("4:memory:/elsewhere/of/the/host\n", {k.replace("/job", ""): v for k, v in [*FIRST.items()][:4]}, 500),
    ],
)
def test_free_memory_is_what_the_nearest_limit_leaves_without_unused_files(system, groups, files, free):
    system(groups, files)
    assert memory_free(CPU) == free * MIB


@pytest.mark.parametrize(("which", "limit", "free"), [("space ", 700, 100), ("data size", 450, 150)])
def test_free_memory_is_what_the_process_s_own_limits_leave(system, which, limit, free):
    known = system("0::/\n", {})
    known["/proc/self/status"] = f"VmPeak:\t 1 kB\nVmSize:\t  {600 * 1024} kB\nVmData:\t  {300 * 1024} kB\n"
    rows = [f"Max {name:<22}{'unlimited':<21}{'unlimited':<21}bytes" for name in ("data size", "address space")]
    known["/proc/self/limits"] = "\n".join(rows)
    assert memory_free(CPU) == 8192 * MIB
    rows = [row.replace("unlimited", str(limit * MIB), 1) if which in row else row for row in rows]
    known["/proc/self/limits"] = "\n".join(rows)
    assert memory_free(CPU) == free * MIB


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        ("0::/\n", {}, 64),
        ("", {}, 64),
        ("0::/\n", {"cpu.max": "200000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 64),
        ("0::/\n", {"cpu.max": "9000000 100000\n"}, 64),
        ("0::/pods/own\n", {"pods/cpu.max": "250000 100000\n", "pods/own/cpu.max": "400000 100000\n"}, 3),
        ("0::/pods/own\n", {"pods/own/cpu.max": "10000 100000\n"}, 1),
        ("4:cpu,cpuacct:/job\n0::/\n", {"cpu/job/cpu.cfs_quota_us": "50000\n", **PERIOD}, 1),
        ("4:cpu,cpuacct:/job\n0::/\n", {"cpu/job/cpu.cfs_quota_us": "-1\n", **PERIOD}, 64),
        ("4:cpuacct:/job\n0::/\n", {"cpu/job/cpu.cfs_quota_us": "50000\n", **PERIOD}, 64),
    ],
)
def test_cores_are_those_that_a_control_group_gives_the_time_of(system, monkeypatch, groups, files, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(64), raising=False)
    system(groups, files)
    assert control_groups.bound_cores() == 64
    assert control_groups.usable_cores() == cores


def test_kills_are_counted_in_the_own_group_and_in_the_system(system, tmp_path):
    known = system("0::/slice/job\n", SECOND)
    begun = memory_kills()
    assert list(begun.values()) == [4, 6]
    assert not killed_since(begun)
    known["/proc/vmstat"] = "oom_kill 7\n"
    assert not killed_since(begun), "that of another group"
    (tmp_path / "slice/job/memory.events").write_text("oom_kill 5\n")
    assert killed_since(begun)


def test_in_a_new_group_the_count_of_the_system_tells(system, tmp_path):
    """A container that is started again is another one, whose count begins with zero."""
    known = system("0::/slice/job\n", SECOND)
    begun = memory_kills()
    (tmp_path / "slice/job2").mkdir()
    (tmp_path / "slice/job2/memory.events").write_text("oom_kill 0\n")
    known["/proc/self/cgroup"] = "0::/slice/job2\n"
    assert not killed_since(begun)
    known["/proc/vmstat"] = "oom_kill 7\n"
    assert killed_since(begun)
    known["/proc/vmstat"] = "nothing\n"
    assert not killed_since(begun)


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


def test_what_the_allocator_keeps_is_free(monkeypatch):
    for name, size in (("mem_get_info", (5 * MIB, 8 * MIB)), ("memory_reserved", 3 * MIB), ("memory_allocated", MIB)):
        monkeypatch.setattr(torch.cuda, name, lambda device, size=size: size)
    assert memory_free(GPU) == 7 * MIB


def test_pages_are_of_the_size_that_the_system_says(monkeypatch):
    monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": 2**16}.__getitem__)
    monkeypatch.setattr(devices, "read", {"/proc/self/statm": "900 50 1 1 0 1 0\n"}.__getitem__)
    assert memory_used(CPU) == 50 * 2**16


def test_a_limit_ends_with_what_it_was_set_for(monkeypatch):
    fractions = [1.0]
    properties = types.SimpleNamespace(total_memory=8 * MIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: fractions[-1])
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: fractions.append(share))
    with suppress(torch.OutOfMemoryError), limited_memory(GPU, 2 * MIB):
        raise torch.OutOfMemoryError
    with limited_memory(GPU, None), limited_memory(CPU, 1):
        assert fractions == [1.0, 0.25, 1.0]
