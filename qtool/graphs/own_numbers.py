"""Numbers that a model reads from tensors of its own: ``int(self.stride)``, ``self.scale.item()``, ``if self.flag:``.

``torch.export`` takes what is in any tensor for unknown, and cannot go on where code asks for it. What a captured model
holds is known, though, and stays: a number that was read from it, or from what was computed of nothing else, is that
number in the graph. A graph has no checks of values, which are left out (``value_checks.py``).
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import SymInt, Tensor, nn
from torch.export import ExportedProgram
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from qtool.graphs.operators import aten
from qtool.graphs.value_checks import check_at
from qtool.nested import map_tensors, tensors
from qtool.system.quiet import quiet_export

NOTES = "own_numbers"
"""Where a program's graph module has sentences about the numbers that were read, and the checks left out."""

UNKNOWN = "data-dependent"
"""What ``torch.export`` calls what depends on a number that it does not know."""

READING = (aten.item.default, aten._local_scalar_dense.default)
"""What a graph has where code asked for a number that is not known."""

_READS: dict[Any, Callable[[Tensor], Any]] = {
    Tensor.item: Tensor.item, Tensor.__int__: int, Tensor.__float__: float, Tensor.__bool__: bool,
    Tensor.__index__: operator.index,
}  # fmt: skip

_SIZED = ("pad", "view", "reshape", "expand", "repeat")
"""Functions whose lists are of sizes, even where no item is a number yet."""

_COMPUTED = frozenset({
    "abs", "add", "all", "and", "any", "bool", "ceil", "clone", "cpu", "detach", "div", "double", "eq", "exp", "float",
    "floor", "floordiv", "ge", "gt", "int", "invert", "le", "log", "logical_and", "logical_not", "logical_or",
    "long", "lt", "max", "maximum", "mean", "min", "minimum", "mod", "mul", "ne", "neg", "or", "pow", "radd", "rdiv",
    "reshape", "rfloordiv", "rmul", "round", "rpow", "rsub", "rtruediv", "sigmoid", "sqrt", "squeeze", "sub", "sum",
    "to", "truediv", "view",
})  # fmt: skip
"""Functions whose result is known where what they are given is: they draw nothing."""


def exported(export: Callable[[], ExportedProgram], model: nn.Module) -> ExportedProgram:
    """What ``export`` gives: of code that asks for numbers in a second run, which knows those of the model's own."""
    first: ExportedProgram | Exception
    try:
        with quiet_export():  # what a run that fails says is not what there is to say
            first = export()
        if not any(node.target in READING for node in first.graph.nodes):
            return first
    except Exception as error:
        if UNKNOWN not in str(error):
            raise
        first = error
    known = _Known(model)
    try:
        with known:
            again = export()
    except Exception as error:
        if known.notes():  # what lies behind them is in the way
            raise error from None
    else:
        if notes := known.notes():
            again.graph_module.meta[NOTES] = notes
            return again
    if isinstance(first, Exception):
        raise first
    return first


class _Known(TorchFunctionMode):
    """Answers reading by what a model's tensors of one number hold, and by what is computed of nothing else.

    Checks of other values pass.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._read, self._passed = set[str](), set[str]()
        self._model = model
        self._values = {name: value.detach().cpu().clone() for name, value in _named(model) if value.numel() == 1}
        self._made: dict[int, tuple[Tensor, Tensor | None, frozenset[str]]] = {}

    def notes(self) -> tuple[str, ...]:
        """What there is to tell: which tensors' numbers were read, and where checks are left out."""
        told = {
            "what the code reads as numbers stays as it is": self._read,
            "checks of values are left out": self._passed,
        }
        return tuple(f"{words}: {', '.join(sorted(names))}" for words, names in told.items() if names)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS and (found := self._known(args[0])) is not None:
            return self._told(found, _READS[func])
        if func is Tensor.__bool__ and (check := check_at(sys._getframe(1))):
            answer, place = check
            self._passed.add(place)
            return answer
        args = tuple(self._sizes(func, value) for value in args)
        kwargs = {name: self._sizes(func, value) for name, value in (kwargs or {}).items()}
        made = func(*args, **kwargs)
        if isinstance(made, Tensor):
            self._note(made, func, args, kwargs)
        elif func is Tensor.__setitem__:
            self._made[id(args[0])] = args[0], None, frozenset()
        return made

    def _sizes(self, func: Any, value: Any) -> Any:
        """Puts the numbers that torch would read by itself into a list of sizes: ``F.pad(x, (0, self.n))``."""
        if type(value) not in (list, tuple):
            return value
        if func.__name__ not in _SIZED and not any(isinstance(item, int | SymInt) for item in value):
            return value
        found = [(item, self._known(item) if _is_size(item) else None) for item in value]
        return type(value)(item if known is None else self._told(known, operator.index) for item, known in found)

    def _told(self, found: tuple[Tensor, frozenset[str]], read: Callable[[Tensor], Any]) -> Any:
        number, names = found
        self._read |= names
        with _disable_current_modes():
            return read(number)

    def _known(self, value: Tensor) -> tuple[Tensor, frozenset[str]] | None:
        """The number in a tensor of the trace, and what it comes from."""
        if id(value) in self._made:
            _, number, names = self._made[id(value)]
            return None if number is None else (number, names)
        name = next((name for name, own in _named(self._model) if own is value), None)
        return (self._values[name], frozenset((name,))) if name in self._values else None

    def _note(self, made: Tensor, func: Any, args: Any, kwargs: Any) -> None:
        """Computes what was made of known numbers; what was written over in place is known no more."""
        number, names = None, frozenset[str]()
        given = list(tensors((args, kwargs)))
        computed = func.__name__.strip("_") in _COMPUTED and not any(made is value for value in given)
        if given and computed and all(isinstance(size, int) and size == 1 for size in made.shape):  # none that is open
            found = [self._known(value) for value in given]
            if all(found):
                names = frozenset().union(*(source for _, source in filter(None, found)))
                left = iter([value for value, _ in filter(None, found)])
                with _disable_current_modes():
                    args, kwargs = map_tensors(lambda _: next(left), (args, kwargs))
                    number = func(*args, **kwargs)
        self._made[id(made)] = made, number, names


def _is_size(item: Any) -> bool:
    return isinstance(item, Tensor) and item.dtype in (torch.int64, torch.int32) and not item.dim()


def _named(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]
