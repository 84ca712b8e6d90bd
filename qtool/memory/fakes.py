"""What fake tensors are told where torch gives up on them, or goes wrong.

* A number that is asked for (``loss.item()``) is what it is where it follows from constants (``qtool.memory.known``),
  else one, and True for ``all`` (``x.isfinite().all()``, say).
* A selection by a mask takes everything: what is predicted of it is the most that it can be.
* A product of groups of rows, each with a matrix of its own (experts), is one in every dtype; torch's own fake
  one knows bfloat16 alone.
* A deep copy is a copy. torch's own takes the mode along, and all that this remembers, which ends the process now and
  then. Constructors copy layers (``nn.TransformerEncoder``), and so does whoever tries a model out.

Other operators whose result's size depends on values stay refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_impls import op_implementations_dict as IMPLEMENTATIONS
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from qtool.memory.known import Known, known


@contextmanager
def answered() -> Iterator[None]:
    """Inside the block fake tensors know all of that. Operators within it are seen by :class:`Known` last."""
    own = {
        torch.ops.aten.nonzero.default: _nonzero,
        torch.ops.aten.masked_select.default: _selected,
        torch.ops.aten._grouped_mm.default: _grouped,
    }
    copying = mock.patch.object(FakeTensor, "__deepcopy__", _copied, create=True)
    with mock.patch.dict(IMPLEMENTATIONS, own), copying, Known(), Scalars():
        yield


class Scalars(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers whoever asks a tensor for its value."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._true = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            asked = args[0]
            if (value := known(asked)) is not None:
                return value.item()
            return asked in self._true if asked.dtype == torch.bool else 1.0 if asked.is_floating_point() else 1
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten.all:
            self._true[result] = True
        return result


def _nonzero(mode: Any, func: Any, tensor: Tensor) -> Tensor:
    return tensor.new_empty((tensor.numel(), tensor.dim()), dtype=torch.int64)


def _selected(mode: Any, func: Any, tensor: Tensor, mask: Tensor) -> Tensor:
    shape = torch.broadcast_shapes(tensor.shape, mask.shape)  # type: ignore[no-untyped-call]
    return tensor.new_empty((shape.numel(),))


def _grouped(
    mode: Any, func: Any, a: Tensor, b: Tensor, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> Tensor:
    """Rows of ``a`` by columns of ``b``; one for each group, where neither rows nor columns have groups."""
    groups = [] if a.dim() != b.dim() else [len(offs) if a.dim() == 2 else len(a)]
    return a.new_empty((*groups, a.shape[-2], b.shape[-1]), dtype=out_dtype)


def _copied(tensor: FakeTensor, memo: dict[int, Any]) -> Tensor:
    made: Tensor = tensor.detach().clone()
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(made, tensor.requires_grad)
    memo[id(tensor)] = made
    return made
