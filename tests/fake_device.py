"""A device that is none: tensors "on" it hide their values from all but operators among themselves, as a GPU's do.

What computes on a device has to bring everything there. ``Fake`` has torch believe that its tensors are on the device
``meta``; their values are ordinary ones behind the scenes, so that results can be compared with the CPU's. An operator
that gets a tensor of the CPU (of one dimension or more) beside one of the device is refused, as CUDA refuses it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("meta")
_COPIES = ("aten::_to_copy", "aten::copy_", "aten::to.")


class Hidden(Tensor):
    """A tensor of the device; ``value`` is what it hides."""

    value: Tensor
    is_meta = False

    @staticmethod
    def __new__(cls, value: Tensor) -> Hidden:
        made = Tensor._make_wrapper_subclass(
            cls, value.size(), strides=value.stride(), dtype=value.dtype, device=DEVICE,
            storage_offset=value.storage_offset(),
        )  # fmt: skip
        made.value = value
        return made

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})


class Fake(TorchDispatchMode):
    """Under it factories make tensors of the device where it is asked for, and copies cross over."""

    def __init__(self) -> None:
        super().__init__()
        self.crossed = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.crossed += str(func).startswith("aten._to_copy") and (kwargs or {}).get("device") == DEVICE
        return computed(func, args, kwargs or {})


def computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The result of an operator: of the device where it reads something there or is asked for it."""
    given = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
    hidden = [value for value in given if isinstance(value, Hidden)]
    plain = [value for value in given if not isinstance(value, Hidden) and value.dim()]
    if hidden and plain and not func._schema.name.startswith(_COPIES):
        raise RuntimeError(f"{func}: expected all tensors to be on the same device")
    asked = kwargs.get("device")
    args, kwargs = tree_map(lambda v: v.value if isinstance(v, Hidden) else v, (args, kwargs))
    there = bool(hidden) if asked is None else torch.device(asked) == DEVICE
    if asked is not None:
        kwargs |= {"device": torch.device("cpu")}
    result = func(*args, **kwargs)
    changed = [value for value in given if isinstance(value, Hidden) and value.value is result]
    if changed:
        return changed[0]  # an operator in place
    return tree_map(lambda v: Hidden(v) if there and isinstance(v, Tensor) else v, result)
