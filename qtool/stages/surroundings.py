"""What a caller's process has set, which no stage is to be changed by, or to change.

Inside a stage torch is as it is when a process starts: gradients are recorded, nothing is autocast, what is made is
float32 on the host, and a module that moves changes its parameters instead of swapping them; numpy warns of an
overflow, and raises nothing. Behind it all is as the caller had it, random generators included. What belongs to the
thread is set for each stage; what all threads share, by the first of those that go on at once, and put back by the
last.

Left out on purpose: the precision of float32 products in a training, which is the caller's to choose.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any, ParamSpec, TypeVar

from qtool.system.turns import shared

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
_INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"  # which torch sets when it first asks where its cache is


def apart(stage: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """A stage that neither meets nor changes what the caller's process has set."""
    return _within(_own_surroundings, stage)


def exact(stage: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """A stage that multiplies float32 as float32, though the caller has lowered the precision of such products."""
    return _within(_float32_products, stage)


def _within(
    context: Callable[[], AbstractContextManager[None]], stage: Callable[Parameters, Result]
) -> Callable[Parameters, Result]:
    @functools.wraps(stage)
    def shielded(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        if "torch" not in sys.modules:  # then nothing is set, and a wrong argument is told without waiting for it
            return stage(*args, **kwargs)
        with context():
            return stage(*args, **kwargs)

    return shielded


@contextmanager
def _own_surroundings() -> Iterator[None]:
    import numpy as np
    import torch

    from qtool.system.generators import generators_kept

    with ExitStack() as stack:
        stack.enter_context(np.errstate(all="warn", under="ignore"))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        for context in (_of_the_process(), generators_kept(), torch.inference_mode(False), torch.enable_grad()):
            stack.enter_context(context)
        yield


@shared
@contextmanager
def _of_the_process() -> Iterator[None]:
    import torch

    from qtool.system.generators import generators_kept

    with ExitStack() as stack:
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        stack.callback(torch.__future__.set_swap_module_params_on_conversion, swaps)
        if _INDUCTOR not in os.environ:
            stack.callback(os.environ.pop, _INDUCTOR, None)
        stack.enter_context(generators_kept())
        torch.__future__.set_swap_module_params_on_conversion(False)
        torch.set_default_dtype(torch.float32)
        yield


@contextmanager
def _float32_products() -> Iterator[None]:
    """Float32 products of matrices, and the CPU's convolutions and recurrent layers, as they are by default.

    torch has one setting for all products, and newer ones for everything, each backend and each kind of operator; it
    does not tell the former where a caller has used the latter.
    """
    import torch

    backends: Any = torch.backends
    settings = [(backends, "none"), (backends.cudnn, "none"), (backends.cuda.matmul, "ieee")]
    settings += [(getattr(backends.mkldnn, kind), "ieee") for kind in ("matmul", "conv", "rnn")]
    with ExitStack() as stack:
        with suppress(RuntimeError):
            before = torch.get_float32_matmul_precision()
            if before != "highest":
                stack.callback(torch.set_float32_matmul_precision, before)
                torch.set_float32_matmul_precision("highest")
        for setting, plain in settings:  # from the whole to the parts: what follows the whole is not set by itself
            if (lowered := setting.fp32_precision) not in ("none", "ieee"):
                stack.callback(setattr, setting, "fp32_precision", lowered)
                setting.fp32_precision = plain
        yield
