"""Keeping large CPU blocks in the process, instead of handing them back to the kernel after every operator.

PyTorch's CPU tensors come from ``malloc``. glibc serves a block above 128 KiB (a threshold that grows to
32 MiB) with ``mmap`` and unmaps it when it is freed, and it gives the top of the heap back as soon as
enough of it is free. An activation is such a block: every operator maps fresh zero pages, touches each of
them for the first time (one page fault per 4 KiB), and unmaps them again. In the forward pass of a
MobileNetV2 on 224-pixel images that is most of the time.

Two settings of ``mallopt(3)`` end it: ``M_MMAP_MAX = 0`` serves every block from the heap, and
``M_TRIM_THRESHOLD = 2**31 - 1`` keeps the heap. A third, ``THP_MEM_ALLOC_ENABLE=1`` in the environment, is torch's
own: blocks of 2 MiB and more are aligned to that size and offered to the kernel as huge pages. First touches cost a
512th of the faults, and since such a block no longer begins a few bytes into a gap, the heap reaches its size
within the first batches and stays there (``tests/benchmarks/bench_allocator.py`` and ``bench_calibration.py --memory``
show time and peak; gaps between blocks of many sizes cost about a third more memory). Training does without it: such a
block fits no gap of its own size, since aligned it needs up to 2 MiB more. Where many of one size come and go, as
activations do that are kept for a backward pass, the heap grew to more than twice what was in use, and no step was
faster.

What is kept can be given back where one kind of work ends and another begins (:func:`release`): gaps that the one
left are of no use to the other, whose blocks have other sizes.

That takes a full garbage collection, which looks at every object of torch, sympy and onnx each time, for a fifth of a
second; :func:`settled` lets it look at new ones only. Python begins several by itself while those libraries are
imported, half a second of all that a command takes, and finds nothing: it is told to begin a tenth as many.

The settings belong to the whole process, so only the command line calls :func:`tune`, before torch
allocates. ``import qtool`` never does. ``QTOOL_MALLOC=0`` in the environment switches it off. Other C
libraries (musl, macOS, Windows) have other allocators and are left alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
from collections.abc import Iterator

VARIABLE = "QTOOL_MALLOC"
_HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"  # read once by torch, at its first allocation
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h
_NEVER = 2**31 - 1
_RARELY = 100  # collections of younger objects before a full one may begin; Python's own is 10
_tuned = False


def tune(huge_pages: bool = True) -> bool:
    """Makes this process keep freed memory, and look for garbage less often; True where it did.

    False off glibc, or where the environment variable ``QTOOL_MALLOC`` set to ``0`` switches it off. ``huge_pages``
    offers large blocks as such, for work whose blocks do not live long.
    """
    if os.environ.get(VARIABLE, "1") == "0" or not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    if huge_pages:
        os.environ.setdefault(_HUGE_PAGES, "1")
    global _tuned
    _tuned = bool(libc.mallopt(_M_MMAP_MAX, 0)) and bool(libc.mallopt(_M_TRIM_THRESHOLD, _NEVER))
    gc.set_threshold(*gc.get_threshold()[:2], _RARELY)
    return _tuned


def release() -> bool:
    """Gives free memory back to the kernel once, where :func:`tune` keeps it; True where any was given back.

    Graphs whose nodes know their graph are freed only by the garbage collector, so that goes first. Call it between
    kinds of work, not between operators.
    """
    if not _tuned:
        return False
    gc.collect()
    return bool(ctypes.CDLL(None).malloc_trim(0))


@contextlib.contextmanager
def settled() -> Iterator[None]:
    """Where :func:`tune` did: what there is now is passed over by the garbage collector for the block."""
    if not _tuned:
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Lets the garbage collector wait for the end of a block that makes many objects and drops few, as tracing does."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
