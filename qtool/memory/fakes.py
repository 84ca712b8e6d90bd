"""What fake tensors are told where torch gives up on them, or goes wrong.

* A number that is asked for (``loss.item()``) is what it is where it follows from constants (``qtool.memory.known``),
  else what it was when the model was run for real (``qtool.memory.trial``), else one; True for ``allclose``, for
  ``all`` (``x.isfinite().all()``, say), and for ``any`` of what compares whole numbers (``(expert == 3).any()``).
* A selection by a mask takes as much as it did then, else everything: the most that it can be.
* A product of groups of rows, each with a matrix of its own (experts), is one in every dtype; torch's own fake
  one knows bfloat16 alone.
* A product of matrices of different types is none, nor is a sum into rows of another type (experts in autocast);
  torch's own fake one is made, and what chooses by a prediction would choose a precision that the model does not take.
* Group normalisation on the CPU leaves channels where they are; torch's own fake one puts them first in some versions.
* Some operators give a result that lies otherwise on the CPU than torch's own fake one does (``LAID_AS``). What comes
  behind copies what does not lie as it wants it, which is as much as the result once more.
* A model that is made in 16 bits (``.bfloat16()``) is converted where it is; torch would swap its weights for others,
  which fake ones refuse.
* Packed sequences are padded without writing into memory (``qtool.memory.packed``).
* A deep copy is a copy. torch's own takes the mode along, and all that this remembers, which ends the process now and
  then. Constructors copy layers (``nn.TransformerEncoder``), and so does whoever tries a model out. What a model holds
  in plain attributes stays real, and so does its copy, which torch's own would fail to make.

Other operators whose result's size depends on values are refused where the model was not run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._guards import active_fake_mode
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_impls import op_implementations_dict as IMPLEMENTATIONS
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from qtool.errors import one_line
from qtool.memory import packed
from qtool.memory.known import Known, is_known, known
from qtool.memory.trial import SELECTING, Oracle, asks, masks

ONE_TYPE = {
    "mm": (0, 1), "addmm": (0, 1, 2), "convolution": (0, 1), "index_add": (0, 3), "index_copy": (0, 3),
    "index_put": (0, 2),
}  # fmt: skip
"""Operators whose fake ones run on operands of different types, and real ones do not; which of them have to agree."""
LAID_AS = {
    **dict.fromkeys(("roll", "channel_shuffle", "max_unpool2d", "reflection_pad3d", "replication_pad3d"), 0),
    **{f"{kind}_pad{n}d_backward": 1 for kind in ("reflection", "replication") for n in (2, 3)},
    "native_batch_norm_backward": 1,
    **dict.fromkeys(("log_sigmoid_forward", "_log_softmax_backward_data", "glu_backward"), None),
    **dict.fromkeys(("rrelu_with_noise", "rrelu_with_noise_backward"), None),
}
"""Operators whose results lie on the CPU as one of their operands does, channels first or last, and which one; None for
those whose results lie in the order of their dimensions, whatever they are made of."""
_COMPARISONS = ("eq", "ne", "gt", "ge", "lt", "le")
_REAL_ALONE = ("no fake impl", ".numpy() is not supported for tensor subclasses")
"""Of what torch says where code takes real tensors alone: an operator of its own without a fake one, numpy."""
_SELECTED = WeakIdKeyDictionary()
"""How much a mask selects, where that is known."""


@contextmanager
def answered() -> Iterator[None]:
    """Inside the block fake tensors know all of that. Operators within it are seen by :class:`Known` last."""
    own = {
        torch.ops.aten.nonzero.default: _nonzero,
        torch.ops.aten.masked_select.default: _selected,
        torch.ops.aten._grouped_mm.default: _grouped,
        torch.ops.aten.native_group_norm.default: _group_norm,
    }
    copying = mock.patch.object(FakeTensor, "__deepcopy__", _copied, create=True)
    apart = faked(Tensor, "__deepcopy__", _apart)
    converting, padding = faked(nn.Module, "_apply", _converted), faked(torch._VF, "_pad_packed_sequence", packed.pad)
    with mock.patch.dict(IMPLEMENTATIONS, own), copying, apart, converting, padding, Known(), Scalars():
        yield


def faked(owner: Any, name: str, own: Callable[..., Any]) -> Any:
    """Has ``owner.name`` be ``own`` under a fake mode, and what it was for other threads, which are under none."""
    original = getattr(owner, name)

    def either(*args: Any, **kwargs: Any) -> Any:
        return (original if active_fake_mode() is None else own)(*args, **kwargs)

    return mock.patch.object(owner, name, either)


def sized_by_values(error: BaseException | None) -> str | None:
    """The operator that fake tensors could not run for lack of values, if that is behind an error."""
    while error is not None:
        if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
            return str(error.func)
        error = error.__cause__
    return None


def real_alone(error: BaseException | None) -> str | None:
    """What asked for real tensors, if that is behind an error."""
    while error is not None:
        if isinstance(error, UnsupportedOperatorException):
            return f"'{error.func}', which has no implementation for tensors without values"
        if any(words in str(error) for words in _REAL_ALONE) and error.__cause__ is None:
            return one_line(error)[:300].rstrip(". ")
        error = error.__cause__
    return None


class Scalars(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers whoever asks a tensor for its value, or for a size that follows from values."""

    def __init__(self, oracle: Oracle | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._oracle = oracle or Oracle()
        self._true = WeakIdKeyDictionary()
        self._whole = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].device  # asked for more often than all else, through every mode below this one
        if func is torch.ops.aten._local_scalar_dense.default:
            return self._value(args[0])
        if func is torch.ops.aten.allclose.default:
            return True
        name = func.overloadpacket.__name__
        _require_one_type(func, args)
        if asks(func, args) and (found := self._asked(name, args)) is not None:
            return found
        result = func(*args, **(kwargs or {}))
        if name in LAID_AS:
            result = tree_map_only(Tensor, partial(_laid, LAID_AS[name], args), result)
        self._mark(name, args, result)
        return result

    def _value(self, asked: Tensor) -> Any:
        here, certain = known(asked), asked in self._true
        found = self._oracle.ask("_local_scalar_dense", needed=here is None and not certain)
        if here is not None:
            return here.item()
        if found is not None:
            return found
        if asked.dtype == torch.bool:
            return certain or asked in self._whole
        return 1.0 if asked.is_floating_point() else 1

    def _asked(self, name: str, args: Any) -> Any:
        """What an operator gave for real, as a fake result; None where it did not run, and where it selects."""
        operands = [leaf for leaf in tree_flatten(args)[0] if isinstance(leaf, Tensor)]
        wanted = masks(name, args) if name in SELECTING else operands
        found = self._oracle.ask(name, needed=not all(map(is_known, wanted)))
        if found is None or name not in SELECTING:
            return tree_map_only(Tensor, lambda like: _placed(like, operands[0]), found)
        for mask, count in zip(wanted, found, strict=True):
            _SELECTED[mask] = count
        return None

    def _mark(self, name: str, args: Any, result: Any) -> None:
        """Remembers of which results of comparisons the truth is likely."""
        if name == "all":
            self._true[result] = True
        elif (name in _COMPARISONS and not args[0].is_floating_point()) or (name == "any" and args[0] in self._whole):
            self._whole[result] = True


def _require_one_type(func: Any, args: Any) -> None:
    """Raises RuntimeError, much in torch's words, for operands of different types that it does not bring together."""
    name = func.overloadpacket.__name__.removesuffix("_")
    if name not in ONE_TYPE:
        return
    met = [args[i] for i in ONE_TYPE[name]]
    if len({t.dtype for t in met}) > 1:
        got = " and ".join(str(t.dtype).removeprefix("torch.") for t in met[-2:])
        operands = "mat1 and mat2" if name.endswith("mm") else f"operands of {name}"
        raise RuntimeError(f"{operands} must have the same dtype, but got {got}")


def _laid(of: int | None, args: Any, made: Tensor) -> Tensor:
    """A result as it lies for real: as the operand at ``of`` does, or in the order of its dimensions."""
    layout = torch.contiguous_format if of is None else suggest_memory_format(args[of])
    if made.device.type != "cpu" or made.dim() < args[of or 0].dim() or made.is_contiguous(memory_format=layout):
        return made
    return torch.empty_like(made, memory_format=layout)


def _placed(like: Tensor, operand: Tensor) -> Tensor:
    """A result of that shape where an operand is, in its floating-point type; what has values stays what it is."""
    if not like.is_meta:
        return like
    dtype = operand.dtype if like.is_floating_point() and operand.is_floating_point() else like.dtype
    return torch.empty_strided(like.shape, like.stride(), dtype=dtype, device=operand.device)


def _count(mask: Tensor, most: int) -> int:
    count: int = _SELECTED.get(mask, most)  # type: ignore[no-untyped-call]
    return count


def _nonzero(mode: Any, func: Any, tensor: Tensor) -> Tensor:
    return tensor.new_empty((_count(tensor, tensor.numel()), tensor.dim()), dtype=torch.int64)


def _selected(mode: Any, func: Any, tensor: Tensor, mask: Tensor) -> Tensor:
    shape = torch.broadcast_shapes(tensor.shape, mask.shape)  # type: ignore[no-untyped-call]
    return tensor.new_empty((_count(mask, shape.numel()),))


def _grouped(
    mode: Any, func: Any, a: Tensor, b: Tensor, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> Tensor:
    """Rows of ``a`` by columns of ``b``; one for each group, where neither rows nor columns have groups."""
    groups = [] if a.dim() != b.dim() else [len(offs) if a.dim() == 2 else len(a)]
    return a.new_empty((*groups, a.shape[-2], b.shape[-1]), dtype=out_dtype)


def _group_norm(mode: Any, func: Any, x: Tensor, weight: Tensor | None, bias: Any, *sizes: Any) -> tuple[Tensor, ...]:
    """The result, and for each sample and group its mean and the inverse of its deviation."""
    layout = suggest_memory_format(x) if x.device.type == "cpu" else torch.contiguous_format
    samples, _, _, groups, _ = sizes
    told = x.new_empty((samples, groups), dtype=x.dtype if weight is None else weight.dtype)
    return torch.empty_like(x, memory_format=layout), told, torch.empty_like(told)


def _converted(module: nn.Module, convert: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    for child in module.children() if recurse else ():
        child._apply(convert)  # type: ignore[no-untyped-call]
    for parameter in module.parameters(recurse=False):
        parameter.data = convert(parameter.data)
    for name, buffer in module.named_buffers(recurse=False):
        module._buffers[name] = convert(buffer)
    return module


def _apart(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    with _disable_current_modes():
        memo[id(tensor)] = made = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    return made


def _copied(tensor: FakeTensor, memo: dict[int, Any]) -> Tensor:
    made: Tensor = tensor.detach().clone()
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(made, tensor.requires_grad)
    memo[id(tensor)] = made
    return made
