"""Forward passes over what a user gives: what the model cannot take is told in one line, wherever it shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from qtool.errors import OWN, QtoolError, reason_of, says_that_another_ended
from qtool.nested import misnamed
from qtool.system.devices import out_of_memory

CHECK = "check the type and the values of the inputs; --debug shows where it failed"
_BEYOND_TABLE = "index out of range in self"
"""What torch's embedding says of an index that its table has no row for, on the CPU."""


@contextmanager
def passes_told(
    where: str, expected: str = "inputs that it takes", do: str = CHECK, model: Callable[..., Any] | None = None
) -> Iterator[None]:
    """Raises QtoolError where a model's forward pass, the block, does not take its input, whatever its code raises.

    What to call arguments is told better of a ``model`` that is known. The end of memory is raised as it is, and so is
    what says that another process has ended.
    """
    try:
        yield
    except OWN as error:
        if out_of_memory(error) or says_that_another_ended(error):
            raise
        raise QtoolError(
            where, expected, reason_of(error),
            misnamed(error, model) or made_in_inference(error) or _beyond_table(error) or do,
        ) from error  # fmt: skip


def _beyond_table(error: BaseException) -> str | None:
    """What to do where an embedding has no row for an index; None of any other error."""
    if _BEYOND_TABLE not in str(error):
        return None
    return (
        "give indices that the model's embedding tables have rows for: sequences no longer than its positions "
        "(--data text:FILE:LENGTH), tokens of its own vocabulary"
    )


def made_in_inference(error: BaseException) -> str | None:
    """What to do where torch takes no tensor that was made in inference mode; None of any other error."""
    return "make the model outside of torch.inference_mode()" if "nference tensor" in str(error) else None
