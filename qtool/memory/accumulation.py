"""What torch does in place, but not while operators are watched.

Gradients that come back from several readers of a tensor are added up.

The engine writes into the sum so far if nobody else holds it or its memory (``torch/csrc/autograd/input_buffer.cpp``).
While operators are watched it never does, and a sum takes memory of its own beside both of its parts: one more of the
gradients of a tensor that is read step by step, or by many layers. So it is made up for: an addition of the engine's is
known by its operands, which have no holders but the engine and those that hand them over here. How many those are
depends on the version of torch and on who else watches; it is counted once, on an addition that is known to be one.

The backward formulas of indexing, ``gather`` and what selects values (``max``, ``topk``) write into zeros that they
have made, and watched, into a copy of those.

A linear layer adds its bias to a product of its own where its input does not lie in order (a transposed one, as of
layers that mix places), and watched, into memory beside it. That addition is known by its holders too.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

ADD = torch.ops.aten.add.Tensor
IN_PLACE = {
    ADD: torch.ops.aten.add_.Tensor,
    torch.ops.aten.index_put.default: torch.ops.aten.index_put_.default,
    torch.ops.aten.scatter_add.default: torch.ops.aten.scatter_add_.default,
    torch.ops.aten.scatter.src: torch.ops.aten.scatter_.src,
    torch.ops.aten.index_add.default: torch.ops.aten.index_add_.default,
    torch.ops.aten.masked_scatter.default: torch.ops.aten.masked_scatter_.default,
}
Holders = tuple[int, int, int]


class Accumulation:
    """Tells what is done in place. :meth:`learn` is called first, under the same modes."""

    def __init__(self) -> None:
        self.alone: Holders | None = None
        self.biased: Holders | None = None
        self.learning = False

    def learn(self, device: torch.device) -> None:
        """Has the engine add up two gradients that only it holds, and a linear layer its bias."""
        value = torch.empty(2, 3, device=device, requires_grad=True)
        result = value * 2 + value * 3
        out_of_order, weight = (torch.empty(shape, device=device) for shape in ((2, 3, 4), (5, 3)))
        self.learning = True
        try:
            F.linear(out_of_order.transpose(1, 2), weight, weight[:, 0])
            with torch.autograd.set_multithreading_enabled(False):
                result.sum().backward()  # type: ignore[no-untyped-call]
        finally:
            self.learning = False

    def operator(self, func: Any, args: Any) -> Any:
        """``func``, or what would run in its place."""
        if func is ADD and self._is_a_bias(args):
            return IN_PLACE[ADD]
        if func not in IN_PLACE or torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled():
            return func
        return IN_PLACE[func] if func is not ADD or self._is_the_engines(args, _holders(args)) else func

    def _is_a_bias(self, args: Any) -> bool:
        """Whether an addition is made by a linear layer, in place."""
        if not isinstance(args[1], Tensor) or args[1].dim() != 1 or args[0].dim() < 3:
            return False
        found = _holders(args)
        if self.learning:
            self.biased = found
        return found == self.biased

    def _is_the_engines(self, args: Any, found: Holders) -> bool:
        """Whether an addition to an operand with such holders is made by the engine, in place."""
        if not isinstance(args[1], Tensor) or args[0].shape != args[1].shape:
            return False
        if self.learning:
            self.alone = found
        return found == self.alone and _is_dense(args[0])


def _holders(args: Any) -> Holders:
    """Of the first operand, of its memory, and of what Python has of it."""
    storage = args[0].untyped_storage()._cdata
    return args[0]._use_count(), torch._C._storage_Use_Count(storage), sys.getrefcount(args[0])


def _is_dense(tensor: Tensor) -> bool:
    """Whether a tensor's values lie side by side, each once, in whatever order of its dimensions."""
    expected = 1
    for stride, size in sorted(pair for pair in zip(tensor.stride(), tensor.shape, strict=True) if pair[1] != 1):
        if stride != expected:
            return False
        expected *= size
    return True
