"""``qtool::lstm``: an LSTM over integers whose activations are rounded by their own range at run time.

The arithmetic is that of ONNX Runtime's ``DynamicQuantizeLSTM``, so that a graph that holds this operator means what a
file with that one computes. Weights are int8 with a scale for each unit of a gate; whatever is multiplied by them is
rounded to uint8 by its least and greatest value, zero included,

    s = (max − min) / 255,    z = round(−min / s),    q = round(x / s) + z,

a layer's whole input at once, its hidden state step by step: the samples of a batch share these scales. Products are
summed exactly, then

    g = s_x s_w Σ (q_x − z_x) q_w + s_h s_r Σ (q_h − z_h) q_r + b,
    c = σ(g_i) tanh(g_c) + σ(g_f) c,    h = σ(g_o) tanh c.

Several threads of the runtime share a batch out, and each rounds its part by itself: bit for bit the same are one
thread, and one sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from qtool.graphs.polynomials import logistic, tanh

EXACT = 2**24
"""Up to here float32 holds every integer."""
OPERATOR = "DynamicQuantizeLSTM"
PARTS = 5
"""Tensors of a layer: int8 D×K×4H, scales D×4H, likewise for the hidden state, float biases D×8H; gates i, o, f, c."""
Seen = Callable[[Tensor, Tensor], None]
"""Told of each product: uint8 rows × K, int8 K × 4H."""


def dynamically(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """D × … in steps of 1/255 of the range of each of D: unsigned integers in float32, D scales, D zero points."""
    low, high = x.flatten(1).aminmax(dim=1)
    low, high = (end.reshape(-1, *[1] * (x.dim() - 1)) for end in (low.clamp_max(0.0), high.clamp_min(0.0)))
    scale = torch.where(high == low, 1.0, (high - low) / 255)
    zero_point = (0.0 - low / scale).clamp(0.0, 255.0).round()
    steps = (x / scale).maximum(-zero_point).minimum(255 - zero_point).round()
    return steps + zero_point, scale, zero_point


def product(x: Tensor, weight: Tensor, scales: Tensor, seen: Seen | None = None) -> Tensor:
    """D × rows × K times int8 D × K × N, in integers; ``scales`` are the columns', D × N."""
    steps, scale, zero_point = dynamically(x)
    if seen is not None:
        for read, read_by in zip(steps, weight, strict=True):
            seen(read.to(torch.uint8), read_by)
    exact = torch.float32 if 255 * 127 * weight.shape[1] < EXACT else torch.float64
    total = (steps - zero_point).to(exact) @ weight.to(exact)
    return total.to(torch.float32) * (scale * scales[:, None])


def layer(
    x: Tensor, parts: Sequence[Tensor], h: Tensor, c: Tensor, seen: Seen | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """A layer as ONNX has it: of L × N × K the hidden states L × D × N × H, then D × N × H each; ``h``, ``c`` likewise.

    The second of two directions goes from the end; they take their steps together.
    """
    weight, weight_scales, hidden, hidden_scales, biases = parts
    size = hidden.shape[1]
    bias = (biases[:, : 4 * size] + biases[:, 4 * size :])[:, None]
    read = torch.stack([x, x.flip(0)][: len(h)])
    steps = product(read.flatten(1, 2), weight, weight_scales, seen).reshape(*read.shape[:3], -1)
    found = []
    for gates in steps.unbind(1):
        gates = gates + product(h, hidden, hidden_scales, seen) + bias
        i, o, f = logistic(gates[..., : 3 * size]).chunk(3, -1)
        c = i * tanh(gates[..., 3 * size :]) + f * c
        h = tanh(c) * o
        found.append(h)
    forward, *backward = torch.stack(found, 1).unbind()
    return torch.stack([forward, *(states.flip(0) for states in backward)], 1), h, c


@torch.library.custom_op(
    "qtool::lstm", mutates_args=(),
    schema="(Tensor x, Tensor[] hx, Tensor[] weights, bool bidirectional, bool batch_first)"
    " -> (Tensor, Tensor, Tensor)",
)  # fmt: skip
def lstm(
    x: Tensor, hx: Sequence[Tensor], weights: Sequence[Tensor], bidirectional: bool, batch_first: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """As ``aten::lstm``: ``x`` is L × N × K (or batch first), ``hx`` and the last states are D·layers × N × H each.

    ``weights`` are ``PARTS`` tensors for each layer.
    """
    width = 2 if bidirectional else 1
    value, hidden, cells = x.transpose(0, 1) if batch_first else x, [], []
    for index in range(len(weights) // PARTS):
        own = slice(width * index, width * (index + 1))
        parts = weights[PARTS * index : PARTS * (index + 1)]
        states, last, cell = layer(value, parts, hx[0][own], hx[1][own])
        value = states.transpose(1, 2).flatten(2)
        hidden.append(last)
        cells.append(cell)
    return (value.transpose(0, 1) if batch_first else value).contiguous(), torch.cat(hidden), torch.cat(cells)


@lstm.register_fake
def _shapes(
    x: Tensor, hx: Sequence[Tensor], weights: Sequence[Tensor], bidirectional: bool, batch_first: bool
) -> tuple[Tensor, Tensor, Tensor]:
    states = x.new_empty((*x.shape[:-1], hx[0].shape[-1] * (2 if bidirectional else 1)))
    return states, torch.empty_like(hx[0]), torch.empty_like(hx[1])
