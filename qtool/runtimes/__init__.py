"""Open a model file on the runtime that will serve it, and run it.

One file per runtime: ``ort`` (ONNX Runtime: cpu, cuda, tensorrt), ``openvino`` (its own runtime) and
``torch`` (a ``.pt2`` as PyTorch runs it). All give the same :class:`~qtool.runtimes.base.Session`, so
that benchmarking and the export gates do not know which one they hold. Nothing is imported until asked.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from qtool.errors import UsageError, nearest
from qtool.runtimes.base import Kernel, ProviderError, Session, TensorInfo

__all__ = ["RUNTIMES", "Kernel", "ProviderError", "Session", "TensorInfo", "open_session", "require"]

RUNTIMES = {
    "cpu": "ort",
    "cuda": "ort",
    "tensorrt": "ort",
    "openvino": "openvino",
    "torch": "torch",
    "torch-compile": "torch",
}


def open_session(
    path: Path | str,
    *,
    provider: str = "cpu",
    threads: int = 1,
    optimize: bool = True,
    precision: str | None = None,
    device: str | None = None,
) -> Session:
    """Opens a model file on one provider, or says why it cannot.

    ``threads`` is the number of threads within an operator; ``optimize`` is the runtime's own graph
    optimisation. ``precision`` (``fp16``, ``bf16``) recasts a float model where the runtime is torch, and
    ``device`` says where that runs it (by default CUDA where there is one); an ONNX file carries its own
    precision, and the other providers their device.

    Raises UsageError for an unknown provider, ProviderError where it is not installed, is half
    installed or would be replaced by the CPU, and QtoolError for a file that it cannot load.
    """
    runtime = _runtime(provider)
    if threads < 1:
        raise UsageError("threads", "at least 1", str(threads), "give a positive number")
    path = Path(path)
    if not path.is_file():
        raise ProviderError.no_file(path)
    session: Session = runtime.open_file(
        path, provider=provider, threads=threads, optimize=optimize, precision=precision, device=device
    )
    return session


def require(provider: str, device: str = "auto") -> None:
    """Raises what opening any file on ``provider`` would: UsageError for an unknown one, ProviderError where it is not.

    ``device`` is torch's.
    """
    _runtime(provider).require(provider, device)


def _runtime(provider: str) -> Any:
    if provider not in RUNTIMES:
        raise UsageError(f"provider '{provider}'", "a known provider", "an unknown name", nearest(provider, RUNTIMES))
    return importlib.import_module(f"qtool.runtimes.{RUNTIMES[provider]}")
