"""Under which sizes of its inputs a captured graph is the model's.

``torch.export`` writes down each comparison of sizes that was made on the way (its guards): by the model's code, by a
view, by torch itself asking how a tensor lies in memory. Where all of them hold, the graph is the model. Most hold at
any size, or fail where the model fails as well. What is left is for the user to know: code that goes two ways by a
size, of which the graph has one.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterable, Mapping
from operator import not_
from types import CodeType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from qtool.graphs.programs import arguments
from qtool.nested import map_tensors

BATCHES = (*range(2, 65), *(size + more for size in (100, 128, 256, 1000, 1024, 4096) for more in (-1, 0, 1)))
"""What sizes of batches are asked about. That a batch of one is another matter is known to all who export."""
_FUNCTIONS = {
    "__builtins__": {}, "max": max, "min": min, "abs": abs, "round": round, "int": int, "float": float, "math": math,
    "torch": SimpleNamespace(sym_max=max, sym_min=min, sym_float=float, sym_not=not_, _sym_sqrt=math.sqrt),
}  # fmt: skip
"""What guards call, by the names that torch writes; of torch no more, since a guard may come from a file."""
_BATCH = re.compile(r"L\['\w+'\](\[[^\]]+\])*\.size\(\)\[0\]")


def guards_of(program: torch.export.ExportedProgram) -> tuple[str, ...]:
    """The comparisons of sizes under which a program was captured, as Python code, each once."""
    return tuple(dict.fromkeys(getattr(program, "_guards_code", ())))


def of_batches(guards: Iterable[str], model: nn.Module, example: Any) -> tuple[str, ...]:
    """The guards that do not hold for a batch of every size."""
    asked = [guard for guard in guards if _BATCH.search(guard)]
    return tuple(broken(asked, model, (resized(example, 0, size) for size in BATCHES))) if asked else ()


def broken(guards: Iterable[str], model: nn.Module, examples: Iterable[Any]) -> list[str]:
    """The guards that do not hold for some of the inputs, in their order; one that cannot be judged does not."""
    left: dict[str, CodeType] = {guard: compile(guard, "guard", "eval") for guard in guards}
    found: set[str] = set()
    for example in examples:
        known = {**_FUNCTIONS, "L": _bound(model, example)}
        found |= {guard for guard, code in left.items() if guard not in found and not _holds(code, known)}
    return [guard for guard in left if guard in found]


def _holds(guard: CodeType, known: dict[str, Any]) -> bool:
    try:
        return bool(eval(guard, known))
    except Exception:  # a division by a size of 0, or an input that guards call by another name
        return False


def resized(example: Any, axis: int, size: int) -> Any:
    """An input of which every tensor that has the axis has this size there, without values."""
    return map_tensors(lambda value: _sized(value, axis, size), example)


def _sized(value: Tensor, axis: int, size: int) -> Tensor:
    sizes = [size if index == axis else before for index, before in enumerate(value.shape)]
    return torch.empty(sizes, dtype=value.dtype, device="meta")


def _bound(model: nn.Module, example: Any) -> Mapping[str, Any]:
    """The model's arguments by name, as guards call them."""
    args, kwargs = arguments(example)
    given = inspect.signature(model.forward).bind(*args, **kwargs)
    return {**given.arguments, **given.arguments.get("kwargs", {})}
