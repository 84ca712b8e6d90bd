"""The machine and the packages that a figure was made with: what a number depends on beside the code.

How its devices are written, too, whether it has them or not.
"""

from __future__ import annotations

import importlib.metadata
import platform
import re
from pathlib import Path
from typing import Any

from qtool.errors import UsageError
from qtool.system.control_groups import usable_cores

_PACKAGES = (
    "qtool", "torch", "torchao", "onnx", "onnxscript", "onnxruntime", "onnxruntime-gpu",
    "bitsandbytes", "safetensors", "numpy", "openvino", "torchvision", "timm", "transformers",
)  # fmt: skip


def environment() -> dict[str, Any]:
    """Versions, platform and CPU features of this process: what a number depends on."""
    packages = {}
    for name in _PACKAGES:
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": cpu_info(),
        "packages": packages,
    }


VNNI = ("avx512_vnni", "avx_vnni")
"""Features with either of which an x86 CPU adds products of bytes in 32 bits."""


_X86 = ("x86_64", "amd64")


def is_x86() -> bool:
    """Whether this is an x86 CPU, of which none has kernels in float16 that ONNX Runtime knows."""
    return platform.machine().lower() in _X86


def sums_in_32_bits() -> bool:
    """Whether this CPU is known to add products of bytes in 32 bits; x86 without VNNI keeps the sum of two in 16."""
    return not is_x86() or bool(set(VNNI) & set(cpu_info()["features"]))


def is_slow_in_bfloat16() -> bool:
    """Whether this CPU computes in bfloat16 several times more slowly than in float32 (x86 without AVX-512)."""
    features = cpu_info()["features"]
    return "avx2" in features and "avx512f" not in features


def quick_precision() -> str:
    """Of the precisions that keep weights in float32, the one that this machine trains in most quickly."""
    has_gpu = Path("/proc/driver/nvidia/version").exists()
    return "32-true" if is_slow_in_bfloat16() and not has_gpu else "bf16-mixed"


def cpu_info() -> dict[str, Any]:
    """The CPU's name, the cores this process may use, and the features that integer kernels depend on."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    lines = (line.partition(":") for line in text.splitlines())
    fields = {key.strip(): value.strip() for key, colon, value in lines if colon}
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    known = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8", "avx512_bf16", "asimddp", "i8mm")
    return {
        "name": fields.get("model name", platform.processor() or platform.machine()),
        "cores": usable_cores(),
        "features": [flag for flag in known if flag in flags],
    }


def require_device(where: str, text: str) -> None:
    """Raises UsageError, in the name of ``where``, for what names no device, on any machine."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", text):
        raise UsageError(where, "auto, cpu, cuda or cuda:N", repr(text), "correct the device")
