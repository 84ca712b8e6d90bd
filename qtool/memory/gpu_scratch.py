"""What a GPU's kernels take beside their inputs and outputs, where it is known by rule.

* cuBLAS works in a piece of memory that torch gives it once and for all: 32 MiB from compute capability 9.0 on,
  8.1 MiB before, or what ``CUBLAS_WORKSPACE_CONFIG`` says (``:SIZE:COUNT`` in KiB, repeated).
* A sum over the rows of an R×C matrix, a bias's gradient, is split over k groups of threads to keep the device busy.
  They meet in a buffer of 4·C bytes times k, and times the columns that a group has at once, 128 in general: more than
  a hundred megabytes on a large GPU for a wide layer. k is what torch's ``ATen/native/cuda/Reduce.cuh`` makes of it.

Left out on purpose: cuDNN's workspaces and those of flash attention's backward pass, which no peak has been at.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

KIB = 1024
THREADS, WARP = 512, 32
"""Threads of a group at most; of a warp."""
LEAST, MOST = 16, 256
"""Values that one thread sums: not fewer if that can be, and not more."""


@dataclass(frozen=True)
class Gpu:
    """What of a device its scratch memory follows from."""

    capability: tuple[int, int]
    multiprocessors: int
    threads: int

    @classmethod
    def of(cls, device: torch.device) -> Gpu | None:
        """The device's properties; None for the CPU."""
        if device.type != "cuda":
            return None
        known = torch.cuda.get_device_properties(device)
        return cls((known.major, known.minor), known.multi_processor_count, known.max_threads_per_multi_processor)

    def workspace(self) -> int:
        """Bytes that cuBLAS holds."""
        if told := os.environ.get("CUBLAS_WORKSPACE_CONFIG"):
            numbers = [int(number) for number in told.split(":")[1:]]
            return KIB * sum(a * b for a, b in zip(numbers[::2], numbers[1::2], strict=False))
        return 32 * KIB**2 if self.capability >= (9, 0) else (2 * 4096 + 8 * 16) * KIB

    def summed(self, args: Any) -> int:
        """Bytes of the buffer of ``sum(tensor, dims)``; 0 where the innermost dimension is summed too."""
        tensor: Tensor = args[0]
        dims = [dim % tensor.dim() for dim in (args[1] if len(args) > 1 and args[1] else range(tensor.dim()))]
        if not tensor.numel() or not tensor.dim() or tensor.dim() - 1 in dims:
            return 0
        rows = 1
        for dim in set(dims):
            rows *= tensor.shape[dim]
        return self.reduction(rows, tensor.numel() // rows)

    def reduction(self, rows: int, columns: int) -> int:
        """Bytes of the buffer in which partial sums over ``rows`` meet, for each of ``columns``."""
        each = next(n for n in (4, 2, 1) if columns % n == 0)
        across = _power(columns // each)
        height = min(_power(rows), THREADS // each // min(across, WARP))
        width = min(across, THREADS // each // height)
        if rows < min(LEAST * height, MOST):
            return 0
        values, grid = -(-rows // height), -(-columns // each // width)
        target = self.multiprocessors * (self.threads // (width * height))
        if values < MOST or grid > target:
            return 0
        groups = max(min(-(-target // grid), -(-values // LEAST)), -(-values // MOST))
        return 4 * columns * groups * width * each if groups > 1 else 0


def _power(value: int) -> int:
    """The largest power of two that is not more."""
    return 1 << (max(1, value).bit_length() - 1)
