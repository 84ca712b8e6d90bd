"""``torch.compile``: the model compiled in place, so that parameters keep their names.

The first steps take longer, up to minutes, and a batch of another size (the short last one) compiles a
second, dynamic version. A compiler is needed: C++ on the CPU, Triton on a GPU.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from typing import Any

import torch

from qtool.errors import QtoolError
from qtool.step import Setup

_COMPILERS = ("c++", "g++", "clang++", "clang", "gcc")


def apply(setup: Setup, example: Any) -> None:
    """Compiles the model in place. Raises QtoolError where the compiler that it needs is not there."""
    require_compiler(setup.device.type)
    model = setup.model

    def call(*args: Any, **kwargs: Any) -> Any:
        return model._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    # As nn.Module.compile, but with a frame of our own on top: dynamo skips those of torch's own modules, so that a
    # model that is an nn.Sequential would stay as it is, without a word.
    model._compiled_call_impl = torch.compile(call)
    setup.on_close.append(lambda: setattr(model, "_compiled_call_impl", None))


def require_compiler(device: str, where: str = "--compile") -> None:
    """Raises QtoolError naming the missing compiler: C++ for the CPU, Triton for CUDA."""
    if device == "cuda" and importlib.util.find_spec("triton") is None:
        raise QtoolError(where, "Triton", "no module 'triton'", f"install triton, or leave {where} out")
    wanted = (os.environ["CXX"],) if os.environ.get("CXX") else _COMPILERS
    if not any(shutil.which(name) for name in wanted):
        raise QtoolError(
            where, "a C++ compiler", f"none of {', '.join(wanted)} on the path",
            f"install one (g++ or clang++) or set CXX, or leave {where} out",
        )  # fmt: skip
