"""``torch.compile``: the model compiled in place, so that parameters keep their names.

The first steps take longer, up to minutes, and a batch of another size (the short last one) compiles a
second, dynamic version. A compiler is needed: C++ on the CPU, Triton on a GPU.

Under FSDP weights come and go between blocks, by hooks around each block's forward pass. So there the forward pass of
each block is compiled, which the hooks stay outside of; equal blocks are compiled once. Where weights are updated in
the backward pass it is the same: that of a whole model would end with all gradients at once.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable
from typing import Any

from torch import nn

from qtool.errors import QtoolError
from qtool.recipe import TrainConfig
from qtool.steps import forwards
from qtool.steps.setup import Setup
from qtool.system.devices import require_compilation, resolve_device
from qtool.training.checkpointing import blocks

_COMPILERS = ("c++", "g++", "clang++", "clang", "gcc")


def apply(setup: Setup, example: Any) -> None:
    """Compiles the model in place, or its blocks."""
    model = setup.model
    if setup.config.strategy == "fsdp" or setup.config.step_in_backward:
        for block in blocks(model).values() or [model]:
            setup.on_close.append(_compile_forward(block))
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        return model._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    # As nn.Module.compile, but with a frame of our own on top: dynamo skips those of torch's own modules, so that a
    # model that is an nn.Sequential would stay as it is, without a word.
    model._compiled_call_impl = forwards.compiled(call, model)
    setup.on_close.append(lambda: setattr(model, "_compiled_call_impl", None))


def require(model: nn.Module, config: TrainConfig) -> None:
    """Raises QtoolError where the compiler that it needs is not there."""
    require_compiler(resolve_device(config.device).type)


def _compile_forward(block: nn.Module) -> Callable[[], None]:
    """Compiles a block's forward pass, with the checkpointing that may be there already; what takes it back."""
    return forwards.take_place(block, forwards.compiled(block.forward, block))


def require_compiler(device: str, where: str = "--compile") -> None:
    """Raises QtoolError naming the missing compiler: C++ for the CPU, Triton for CUDA, or what switches both off."""
    require_compilation(where)
    if device == "cuda" and importlib.util.find_spec("triton") is None:
        raise QtoolError(where, "Triton", "no module 'triton'", f"install triton, or leave {where} out")
    wanted = (os.environ["CXX"],) if os.environ.get("CXX") else _COMPILERS
    if not any(shutil.which(name) for name in wanted):
        raise QtoolError(
            where, "a C++ compiler", f"none of {', '.join(wanted)} on the path",
            f"install one (g++ or clang++) or set CXX, or leave {where} out",
        )  # fmt: skip
