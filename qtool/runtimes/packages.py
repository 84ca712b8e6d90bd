"""Which ONNX Runtime is installed, and what is missing for a provider.

``onnxruntime`` and ``onnxruntime-gpu`` (and a few more) are separate packages that write the same
Python module. With two of them installed the files of one lie over those of the other, and which one
runs depends on the order of installation. That is told through the packages' metadata, which both
keep, before anything is measured with the mixture.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from qtool.runtimes.base import ProviderError

_FLAVOURS = (
    "onnxruntime",
    "onnxruntime-gpu",
    "onnxruntime-openvino",
    "onnxruntime-directml",
    "onnxruntime-qnn",
    "onnxruntime-rocm",
)


def installed_flavours() -> dict[str, str]:
    """The installed packages that provide the module ``onnxruntime``, with their versions."""
    found = {}
    for name in _FLAVOURS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def conflict() -> str | None:
    """A sentence on two ONNX Runtime packages installed over each other, or None."""
    found = installed_flavours()
    if len(found) < 2:
        return None
    names = " and ".join(f"{name} {version}" for name, version in found.items())
    return (
        f"{names} are both installed; they write the same module over each other, so which one runs is chance: "
        f"pip uninstall -y {' '.join(found)}, then pip install one of them"
    )


def refuse_conflict(provider: str) -> None:
    """Raises ProviderError for an accelerator asked of two packages installed over each other."""
    if conflict() and provider != "cpu":
        found = installed_flavours()
        raise ProviderError(
            f"provider '{provider}'",
            "one ONNX Runtime package",
            " and ".join(f"{name} {version}" for name, version in found.items()) + ", which overwrite each other",
            f"run: pip uninstall -y {' '.join(found)} && pip install onnxruntime-gpu",
        )


def missing_library(provider_library: Path) -> str | None:
    """The shared library without which ONNX Runtime's provider library cannot be loaded, or None.

    Loading it here repeats what ONNX Runtime did, and the loader's message names the culprit, which
    ONNX Runtime only logs.
    """
    import ctypes

    try:
        shared = provider_library.with_name(
            provider_library.name.replace("_cuda", "_shared").replace("_tensorrt", "_shared")
        )
        ctypes.CDLL(str(shared), mode=ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(provider_library))
    except OSError as error:
        return str(error).split(":")[0]
    return None
