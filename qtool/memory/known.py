"""Fake tensors whose values follow from constants, and what those values are.

Models compute sizes with tensors while they are made and while they run: widths of stages, rates of drop paths,
lengths to split by. An operator on small tensors whose values are known, with nothing random in it, is run a second
time for real beside the fake one, in place and on views as there, and its values are kept with the fake result. Whoever
asks for such a value, or for a selection by it, gets the real one.

Weights and batches are never known: a prediction holds for all of their values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

LARGEST = 4096
"""Values of the largest tensor whose values are kept."""
_RANDOM = (torch.Tag.nondeterministic_seeded, torch.Tag.nondeterministic_bitwise)
_SIZED_BY_VALUES = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)
_VALUES = WeakIdKeyDictionary()


def know(fake: Tensor, like: Tensor) -> None:
    """Has ``fake`` hold what ``like`` does, where that is known."""
    if isinstance(fake, FakeTensor) and (value := known(like)) is not None:
        _VALUES[fake] = value


def known(tensor: Tensor) -> Tensor | None:
    """What ``tensor`` holds, if that is known and small; of a fake one shared with its views, of a real one a copy."""
    if not is_known(tensor):
        return None
    if isinstance(tensor, FakeTensor):
        value: Tensor = _VALUES[tensor]
        return value
    with _disable_current_modes():
        return tensor.detach().clone()


def is_known(tensor: Tensor) -> bool:
    """Whether ``known`` has an answer; asking copies nothing."""
    if isinstance(tensor, FakeTensor):
        value: Tensor | None = _VALUES.get(tensor)  # type: ignore[no-untyped-call]
        return value is not None and not _is_forgotten(value)
    return not isinstance(tensor, nn.Parameter) and tensor.device.type == "cpu" and tensor.numel() <= LARGEST


class Known(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows what is known through every operator; entered over a FakeTensorMode."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operands = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        followed = _is_followed(func) and all(map(is_known, operands))
        if followed and any(tag in func.tags for tag in _SIZED_BY_VALUES):
            return _faked(_for_real(func, args, kwargs), operands)
        result = func(*args, **kwargs)
        results = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor)]
        if followed and results and all(isinstance(r, FakeTensor) and _is_small(r) for r in results):
            _keep(results, _for_real(func, args, kwargs))
        elif func._schema.is_mutable:
            _forget(func, args, kwargs)
        return result


def _is_followed(func: Any) -> bool:
    return not any(tag in func.tags for tag in _RANDOM) and "empty" not in func.overloadpacket.__name__


def _is_small(fake: FakeTensor) -> bool:
    return fake.fake_device.type == "cpu" and fake.numel() <= LARGEST


def _for_real(func: Any, args: Any, kwargs: Any) -> Any:
    """What the operator gives for the values of its operands, which it changes where it is one in place."""
    with _disable_current_modes(), torch.autocast("cpu", enabled=False):
        args, kwargs = tree_map_only(Tensor, known, (args, kwargs))
        return func(*args, **kwargs)


def _faked(found: Any, operands: list[Tensor]) -> Any:
    """Fake tensors in the place of real ones, whose values are known."""
    mode = next((operand.fake_mode for operand in operands if isinstance(operand, FakeTensor)), None)
    if mode is None:
        return found

    def fake(value: Tensor) -> Tensor:
        made: Tensor = mode.from_tensor(value)
        _VALUES[made] = value
        return made

    return tree_map_only(Tensor, fake, found)


def _keep(results: list[Any], found: Any) -> None:
    values = [leaf for leaf in tree_flatten(found)[0] if isinstance(leaf, Tensor)]
    if len(values) == len(results):
        for fake, value in zip(results, values, strict=True):
            _VALUES[fake] = value


def _forget(func: Any, args: Any, kwargs: Any) -> None:
    """What is written with values that are not known is no longer known, nor is any view of its memory."""
    schema = func._schema.arguments
    given = [*zip(schema, args, strict=False), *((a, kwargs[a.name]) for a in schema if a.name in kwargs)]
    written = [value for argument, value in given if argument.alias_info and argument.alias_info.is_write]
    for leaf in tree_flatten(written)[0]:
        if isinstance(leaf, FakeTensor) and (value := known(leaf)) is not None:
            value.untyped_storage().resize_(0)


def _is_forgotten(value: Tensor) -> bool:
    return bool(value.numel()) and not value.untyped_storage().nbytes()
