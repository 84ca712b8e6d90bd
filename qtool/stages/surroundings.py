"""What a caller's process has set, which no stage is to be changed by, or to change.

Inside a stage torch is as it is when a process starts: gradients are recorded, nothing is autocast, what is made is
float32 on the host. Behind it all is as the caller had it, random generators included.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
_INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"  # which torch sets when it first asks where its cache is


def apart(stage: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """A stage that neither meets nor changes what the caller's process has set."""

    @functools.wraps(stage)
    def shielded(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        if "torch" not in sys.modules:  # then nothing is set, and a wrong argument is told without waiting for it
            return stage(*args, **kwargs)
        with _own_surroundings():
            return stage(*args, **kwargs)

    return shielded


@contextmanager
def _own_surroundings() -> Iterator[None]:
    import torch

    from qtool.checkpoint import generators_kept

    before, named = torch.get_default_dtype(), os.environ.get(_INDUCTOR)
    with ExitStack() as stack:
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        for context in (generators_kept(), torch.inference_mode(False), torch.enable_grad()):
            stack.enter_context(context)
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(before)
            if named is None:
                os.environ.pop(_INDUCTOR, None)
