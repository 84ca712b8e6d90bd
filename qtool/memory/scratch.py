"""What an operator allocates for itself and gives back before it returns: oneDNN's packed operands, partial sums.

Fake tensors see inputs and outputs alone. On the CPU the operators that do most of the work take more for a moment, how
much depends on shapes, strides, dtype and the CPU's instruction set, and for a small batch in 16 bits it has been a
fifth of the peak. There is no formula to ask, so the operator itself is asked: each kind of call of a step is made
once, alone, on zeros of the same shapes, with torch's allocations counted.

Calls whose operands are larger than ``LARGEST`` are not made: that would take what a prediction is there to spare. Of
those on values one by one some rows are tried, and the whole takes as many times more: weights may be as large, and are
converted as a whole. Left out on purpose: the others, whose scratch is small next to the activations of such a batch.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from qtool.memory.measure import allocations, highest_sum
from qtool.memory.trial import Trials

LARGEST = 64 * 2**20
"""Bytes of operands up to which a call is tried."""
LSTM = "mkldnn_rnn_layer"
HEAVY = (
    "mm", "addmm", "bmm", "baddbmm", "addbmm", "convolution", "convolution_backward", "update_8bit", LSTM,
    f"{LSTM}_backward", "_scaled_dot_product_flash_attention_for_cpu_backward", "_trilinear",
    "_cdist_forward", "_cdist_backward", "_euclidean_dist",
    "mean", "sum", "logsumexp", "mse_loss", "binary_cross_entropy_with_logits", "linalg_vector_norm",
    "_softmax_backward_data", "_log_softmax_backward_data",
    "sort", "kthvalue", "median", "nanmedian", "mode", "scatter", "scatter_", "scatter_add", "scatter_add_",
    "scatter_reduce",
    "embedding_dense_backward", "_embedding_bag_backward", "im2col", "channel_shuffle", "pixel_shuffle",
    "pixel_unshuffle",
    *(f"{name}{ending}" for ending in ("", "_backward") for name in (
        *(f"{kind}_pad{n}d" for kind in ("reflection", "replication") for n in (1, 2, 3)),
        "avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_max_pool2d",
        "adaptive_max_pool3d", "max_pool2d_with_indices", "max_pool3d_with_indices", "fractional_max_pool2d",
        "fractional_max_pool3d", "upsample_nearest2d", "upsample_nearest3d", "upsample_bilinear2d",
        "upsample_bicubic2d", "upsample_trilinear3d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa",
        "grid_sampler_2d", "grid_sampler_3d",
    )),
    "_fft_r2c", "_fft_c2r", "_fft_c2c",
    "linalg_qr", "linalg_inv_ex", "linalg_cholesky_ex", "linalg_lu_factor_ex", "_linalg_solve_ex", "_linalg_svd",
    "_linalg_eigh", "linalg_matrix_exp",
)  # fmt: skip
"""Matrix products, convolutions, the update of 8-bit states, which widens its moments, means and sums (those of 16 bits
are taken in float32), what sorts, Fourier transforms, a few dimensions at a time, LAPACK's, which have a workspace, and
others that copy an operand where it does not lie in order. They check their operands. So do those that work on values
one by one, which are tried where these have several dtypes."""
BATCH_NORM = "native_batch_norm_backward"
IN_FLOAT32 = ("native_layer_norm_backward", "native_group_norm_backward")
"""Tried in float32 alone: they do not check, and given a dtype that only a fake one returned, read past its end.
Batch-norm's is tried with statistics that its forward pass has saved for real."""

BY_MASK = ("index", "index_put", "index_put_", "_index_put_impl_")
PLACE = 8
"""Operators that look up the places that a mask selects, and the bytes of a place, in each dimension."""
FUSED = ("_fused_adamw_", "_fused_adam_", "_fused_sgd_")
"""Updates of many weights, which take gradients that do not lie in the order of their dimensions as copies, each in its
turn."""
COPIED = {"_allgather_base_": 0, "_reduce_scatter_base_": 1}
"""Exchanges of which gloo has a copy of its own while they last: of what is gathered, of what is summed."""


class Scratch:
    """Remembers what each kind of call took, and what a model answered that was run."""

    def __init__(self) -> None:
        self.trials = Trials()
        self.known: dict[Any, tuple[int, int]] = {}

    def of(self, function: Any, args: Any, kwargs: Any) -> int:
        """Bytes that a call of ``function`` with operands like these on the CPU takes beyond what it returns."""
        name = function.overloadpacket.__name__
        if name in BY_MASK:
            masks = (leaf for leaf in tree_flatten(args[1])[0] if isinstance(leaf, Tensor) and leaf.dtype == torch.bool)
            return sum(PLACE * mask.dim() * mask.numel() for mask in masks)
        if name in FUSED:
            return max((g.nbytes for g in args[1] if g.device.type == "cpu" and not g.is_contiguous()), default=0)
        if name in COPIED:
            exchanged: Tensor = args[COPIED[name]]
            return exchanged.nbytes if exchanged.device.type == "cpu" else 0
        return self._tried(function, args, kwargs)[0]

    def kept(self, function: Any, args: Any, kwargs: Any) -> int:
        """Bytes of an LSTM layer's fourth result, kept for its backward pass, which a fake layer has empty."""
        return self._tried(function, args, kwargs)[1]

    def _tried(self, function: Any, args: Any, kwargs: Any) -> tuple[int, int]:
        name = function.overloadpacket.__name__
        leaves, tree = tree_flatten((args, kwargs or {}))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        times = 1.0
        if not _may_be_called(name, tensors):
            if not _converts(function, tensors):
                return 0, 0
            leaves = [_first_rows(leaf, math.ceil(_size(tensors) / LARGEST)) for leaf in leaves]
            fewer = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            if not _are_small(fewer):
                return 0, 0
            times = _size(tensors) / max(_size(fewer), 1)
        key = (function, *(_kind(leaf) for leaf in leaves))
        if key not in self.known:
            self.known[key] = _taken(function, leaves, tree)
        taken, kept = self.known[key]
        return round(times * taken), kept


def _may_be_called(name: str, tensors: list[Tensor]) -> bool:
    if name not in (*HEAVY, BATCH_NORM) and (name not in IN_FLOAT32 or any(t.dtype != torch.float32 for t in tensors)):
        return False
    if name == f"{LSTM}_backward" and not tensors[-1].numel():  # what it kept, where that is not known; it would crash
        return False
    return _are_small(tensors)


def _converts(function: Any, tensors: list[Tensor]) -> bool:
    """Whether it works on values one by one, in another dtype than all of them have, in which it takes copies."""
    one_by_one = torch.Tag.pointwise in function.tags or function.overloadpacket.__name__.startswith("_foreach_")
    return one_by_one and len({t.dtype for t in tensors if t.dim()}) > 1


def _are_small(tensors: list[Tensor]) -> bool:
    return _size(tensors) <= LARGEST and all(t.device.type == "cpu" for t in tensors)


def _size(tensors: list[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _first_rows(leaf: Any, times: int) -> Any:
    """One of ``times`` parts of an operand, along the dimension that is outermost in memory."""
    if times <= 1 or not isinstance(leaf, Tensor) or not leaf.dim():
        return leaf
    dim = max(range(leaf.dim()), key=leaf.stride)
    with _disable_current_modes():
        return leaf.narrow(dim, 0, min(leaf.shape[dim], max(1, leaf.shape[dim] // times)))


def _kind(leaf: Any) -> Any:
    return (tuple(leaf.shape), leaf.stride(), leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf)


@torch.enable_grad()  # without, an LSTM keeps nothing; no operand asks for a gradient
def _taken(function: Any, leaves: list[Any], tree: Any) -> tuple[int, int]:
    """What the call takes beside its results, and the bytes of the last of those."""
    with _disable_current_modes(), torch.autocast("cpu", enabled=False):
        real = [_like(leaf, function) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = tree_unflatten(real, tree)
        try:
            if function.overloadpacket.__name__ == BATCH_NORM:
                args = _with_saved(args)
            changes, result = allocations(lambda: function(*args, **kwargs))
        except RuntimeError:  # a fake operator before it returned a dtype that the real one does not
            return 0, 0
        last = tree_flatten(result)[0][-1]
        return highest_sum(changes) - sum(changes), last.nbytes if isinstance(last, Tensor) else 0


def _with_saved(args: Any) -> tuple[Any, ...]:
    """The operands of batch-norm's backward pass with the statistics that its forward pass saves of such an input."""
    _, x, weight, mean, variance, _, _, train, eps, *_ = args
    saved = torch.ops.aten.native_batch_norm(x, weight, None, mean, variance, train, 0.0, eps)[1:]
    return (*args[:5], *saved, *args[7:])


def _like(operand: Tensor, function: Any) -> Tensor:
    """Zeros, but for an exponential of a matrix, which takes more for a larger one: one that takes most."""
    fill = 8.0 if function is torch.ops.aten.linalg_matrix_exp.default else 0.0
    return torch.empty_strided(operand.shape, operand.stride(), dtype=operand.dtype).fill_(fill)
