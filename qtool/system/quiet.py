"""Keeps libraries from talking of themselves to qtool's users: loggers and warnings, each named, each for a block."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

_KINETO = "KINETO_LOG_LEVEL"


@contextlib.contextmanager
def quiet_loggers(*names: str, below: int = logging.ERROR) -> Iterator[None]:
    """Drops what these loggers say below a level."""

    def is_loud(record: logging.LogRecord) -> bool:
        return record.levelno >= below

    loggers = [logging.getLogger(name) for name in names]
    for logger in loggers:
        logger.addFilter(is_loud)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_loud)


@contextlib.contextmanager
def quiet_export() -> Iterator[None]:
    """Drops what ``torch.export`` logs, its advice on what a model keeps (as an LSTM does), and its partial graph."""
    said = io.StringIO()
    names = (
        "torch.fx.experimental.symbolic_shapes", "torch.export", "torch._export", "torch._subclasses.fake_tensor",
        "torch._guards", "torch._export.non_strict_utils",
    )  # fmt: skip
    with quiet_loggers(*names, below=logging.CRITICAL), contextlib.redirect_stderr(said), warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=r"The tensor attributes? .* assigned during export", category=UserWarning
        )
        warnings.filterwarnings("ignore", message="While compiling, we found certain side", category=UserWarning)
        yield
    if sys.stderr is not None:  # a service may have none
        sys.stderr.write(said.getvalue())  # a model's own words, where all went well


@contextlib.contextmanager
def quiet_choices() -> Iterator[None]:
    """Drops inductor's tables of the kernels that it chooses from, and that some of them do not fit the device."""
    name = "torch._inductor.select_algorithm"
    with quiet_loggers(name, below=logging.CRITICAL), contextlib.redirect_stderr(io.StringIO()):
        yield


@contextlib.contextmanager
def quiet_profiler() -> Iterator[None]:
    """Keeps builds of torch's profiler from telling each start on standard error; it reads this at the first one."""
    if _KINETO in os.environ:
        yield
        return
    os.environ[_KINETO] = "99"
    try:
        yield
    finally:
        os.environ.pop(_KINETO, None)


@contextlib.contextmanager
def quiet_torch_ao() -> Iterator[None]:
    """Drops what torch.ao and its kernels say of their own removal."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.ao.quantization is deprecated", category=DeprecationWarning)
        warnings.filterwarnings("ignore", message=".*quantized tensor creation functions", category=UserWarning)
        yield


def bar_console() -> Console:
    """Standard error for a progress bar of rich's: as a notebook's where ipywidgets are there, else as a terminal's.

    In a notebook without them rich advises to install them each time that the bar moves, in the bar's place.
    """
    from rich.console import Console

    return Console(file=sys.stderr, force_jupyter=None if find_spec("ipywidgets") else False)
