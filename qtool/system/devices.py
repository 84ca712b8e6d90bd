"""Which device a run uses: what was asked for, or an error. A GPU that was asked for is never the CPU in silence."""

from __future__ import annotations

import ctypes
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.fx import GraphModule
from torch.fx.node import map_aggregate

from qtool.errors import QtoolError, UsageError
from qtool.system.control_groups import control_groups, kills_in, read
from qtool.system.machine import require_device

_NO_MEMORY = ("allocate memory", "CUDA error: out of memory", "STATUS_ALLOC_FAILED")
"""What those say who allocate beside torch's allocator of a GPU: the host's, the driver, cuBLAS and cuDNN."""


def resolve_device(text: str) -> torch.device:
    """The device that ``cpu``, ``cuda``, ``cuda:N`` or ``auto`` (CUDA where there is one, else the CPU) names.

    Plain ``cuda`` is this process's own where it was launched as one of several, and else the current one.

    Raises UsageError for any other text, QtoolError for a CUDA device that this machine does not have.
    """
    require_device(f"device '{text}'", text)
    if text == "auto":
        text = "cuda" if torch.cuda.is_available() else "cpu"
    if text == "cpu":
        return torch.device("cpu")
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = int(text.partition(":")[2] or os.environ.get("LOCAL_RANK") or (torch.cuda.current_device() if found else 0))
    if index >= found:
        kind = (
            "a build of torch without CUDA" if not found and torch.version.cuda is None else f"{found} CUDA device(s)"
        )
        do = "ask for --device cpu, or install a CUDA build and NVIDIA's driver"
        if found:
            do = f"name one below cuda:{found}" if ":" in text else f"start {found} processes on this machine at most"
        raise QtoolError(f"device '{text}'", "that CUDA device", kind, do)
    return torch.device("cuda", index)


def require_gpus(device: str, processes: int) -> None:
    """Raises UsageError where ``processes`` on this machine would each take a GPU, and it has fewer."""
    if resolve_device(device).type == "cuda" and processes > (found := torch.cuda.device_count()):
        raise UsageError(
            "--devices", f"at most {found}, the CUDA devices of this machine", str(processes),
            "lower it, or start processes on several machines with torchrun",
        )  # fmt: skip


def current(device: torch.device) -> AbstractContextManager[object]:
    """Inside it a GPU is the one that is meant where none is named: by events, generators and other libraries."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def move_graph(graph: GraphModule, device: torch.device) -> None:
    """Moves a captured graph, in place: its tensors, its constants and the devices that its operators name.

    A model is captured on the CPU, and a graph remembers that: an ``arange`` or a conversion has the device among its
    arguments, and a tensor that is neither a parameter nor a buffer is among its attributes.
    """
    graph.to(device)
    named = False
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            holder, _, name = str(node.target).rpartition(".")
            held = vars(graph.get_submodule(holder))
            if isinstance(held.get(name), torch.Tensor):
                held[name] = held[name].to(device)
        found = map_aggregate((node.args, node.kwargs), lambda a: device if isinstance(a, torch.device) else a)
        if found != (node.args, node.kwargs):
            node.args, node.kwargs = found
            named = True
    if named:
        graph.recompile()


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that an allocation failed, on a GPU or in host memory."""
    said = isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)
    return said or isinstance(error, torch.OutOfMemoryError | MemoryError)


def memory_free(device: torch.device) -> int:
    """Bytes that this process can still allocate: on a GPU the free ones, torch's unused blocks among them.

    On the CPU what the system says is available, or what is left of a limit of one of its control groups or of its own
    (``ulimit -v`` and ``-d``, which batch systems set), where that is less. Pages of files that are not in use are
    counted: they give way. Raises QtoolError where nothing is known.
    """
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    try:
        known = [int(re.findall(r"^MemAvailable: *(\d+) kB$", read("/proc/meminfo"), re.MULTILINE)[0]) * 1024]
        known += [left for group in control_groups("memory") if (left := group.memory_left()) is not None]
        known += _own_limits_left()
        return max(0, min(known))
    except (IndexError, ValueError) as error:
        raise QtoolError("free memory", "that the system tells it", str(error), "pass a --memory-budget") from error


def _own_limits_left() -> list[int]:
    """Bytes that the limits of this process itself leave: of its addresses, and of the memory that it asks for."""
    limits, used = read("/proc/self/limits"), read("/proc/self/status")
    left = []
    for limit, size in (("Max address space", "VmSize"), ("Max data size", "VmData")):
        most = re.search(rf"^{limit} +(\d+) ", limits, re.MULTILINE)
        taken = re.search(rf"^{size}:\s+(\d+) kB$", used, re.MULTILINE)
        left += [int(most[1]) - int(taken[1]) * 1024] if most and taken else []
    return left


def memory_kills() -> dict[str, int]:
    """How many processes the system has killed for lack of host memory, by where it counts (Linux's ``oom_kill``).

    In this process's control group, where that is known, and in the whole system. Empty where it does not tell.
    """
    found = {}
    for group in control_groups("memory"):
        if (count := group.memory_kills()) is not None:
            found[group.identity()] = count
            break
    count = kills_in(read("/proc/vmstat"))
    return found | ({} if count is None else {"system": count})


def killed_since(before: Mapping[str, int]) -> bool:
    """Whether the system has killed for lack of host memory since it had counted ``before``.

    Whoever was started again in another control group goes by the count of the whole system.
    """
    return next((count > before[place] for place, count in memory_kills().items() if place in before), False)


@contextmanager
def limited_memory(device: torch.device, size: float | None) -> Iterator[None]:
    """Inside it torch's allocator on a GPU refuses what would take it beyond ``size`` bytes. No effect on the CPU."""
    if device.type != "cuda" or size is None:
        yield
        return
    total = torch.cuda.get_device_properties(device).total_memory
    before = torch.cuda.get_per_process_memory_fraction(device)
    torch.cuda.set_per_process_memory_fraction(min(1.0, size / total), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)


def grow_in_place(device: torch.device) -> bool:
    """Has torch's allocator on a GPU grow its segments in place, so that blocks of many sizes leave few gaps.

    A tenth of what a small training holds is saved so. True where it does; False on the CPU, where the user has chosen
    (``PYTORCH_ALLOC_CONF``), where this process has memory on the device already, and where the driver cannot.
    """
    chosen = any(os.environ.get(name) for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    if device.type != "cuda" or chosen or torch.cuda.memory_reserved(device) or not _has_management_library():
        return False
    settle: Callable[[str], None] | None = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if settle is None:
        return False
    settle("expandable_segments:True")
    try:
        torch.empty(1, device=device)
    except RuntimeError:  # no virtual memory management: some virtual GPUs have none
        settle("expandable_segments:False")
        return False
    return True


def _has_management_library() -> bool:
    """Whether the library is there that torch 2.13 asks about the device first, and without which it crashes."""
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return True


def memory_used(device: torch.device) -> int:
    """Bytes in use: allocated tensors on CUDA, the resident set of this process on the CPU (0 where unknown)."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    pages = read("/proc/self/statm").split()
    return int(pages[1]) * os.sysconf("SC_PAGE_SIZE") if pages else 0


def require_compilation(where: str) -> None:
    """Raises QtoolError where the environment makes torch.compile do nothing, which torch says no word of."""
    for name in ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE"):
        if os.environ.get(name) == "1":
            got = f"{name}=1 in the environment, with which it compiles nothing"
            raise QtoolError(where, "torch.compile to compile", got, f"unset it, or leave {where} out")


def load_inductor() -> None:
    """Imports the compiler, whose modules use torch.jit, which is deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        import torch._inductor.compile_fx  # noqa: F401
