"""Batch-norm re-estimation: the statistics that a folded batch-norm stood for are taken again, behind quantization.

Quantization changes the mean of a layer's output channels, and their variance too: noise adds to it, clipping and
coarse weights take from it. A batch-norm would normalise that away had its statistics been taken from the quantized
network (arXiv 2106.08295, section 4.2.3). Folded into the weights it still can: with ``ŷ = Ŵ x̂`` what the integers make
of what the layer really gets, and ``y`` the float model's output,

    s_c ← s_c · √(Var[y_c] / Var[ŷ_c]),      b̂_c = E[y_c] − E[ŷ_c]

for each channel ``c``, ``s`` the scales of its weights: no integer changes, and nothing is added to the graph. Layers
are settled in order, each on what the settled ones before it give, at the cost of one pass through each model
(``layers.py``).

Noise that is independent of the signal adds variance too, and then shrinking the channel to the variance it had takes
from the signal. So a channel is only rescaled where that lowers its error on batches that the variances were not taken
from; with a single batch nothing is. Left out on purpose: layers that never had a batch-norm are treated alike.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qtool.quantization.algorithms.layers import Layer, Moments, in_order
from qtool.quantization.algorithms.subject import Subject
from qtool.units import many

LEAST = 0.5
"""A channel is rescaled by a factor from this to its inverse; more is no matter of rounding."""


@torch.no_grad()
def renormalize(subject: Subject) -> None:
    """Matches the mean and variance of every integer layer's output channels, in order, in place; notes how many."""
    counts = [_settle(layer) for layer in in_order(subject)]
    subject.note(
        f"renorm: rescaled {many(sum(counts), 'channel')} of {many(len(counts), 'layer')} and corrected their biases"
    )


def _settle(layer: Layer) -> int:
    """Rescales those channels of one layer that gain by it, and corrects its bias; returns how many there were."""
    seen, unseen = layer.observe()
    if unseen is None:
        layer.keep_mean(seen)
        return 0
    both = seen + unseen
    gains = channel_errors(layer, unseen, factors(layer, seen)) < channel_errors(layer, unseen)
    chosen = torch.where(gains, factors(layer, both), 1.0)
    layer.rescale(chosen[:, :, None])
    layer.keep_mean(both)
    return int(gains.sum())


def _variances(layer: Layer, moments: Moments) -> tuple[Tensor, Tensor, Tensor]:
    """Var[y], Cov[y, ŷ] and Var[ŷ] of each output channel, G × outputs."""
    s, c, h = moments.centred()
    made = layer.nearest * layer.scale
    return ((layer.real @ s) * layer.real).sum(2), ((layer.real @ c) * made).sum(2), ((made @ h) * made).sum(2)


def factors(layer: Layer, moments: Moments) -> Tensor:
    """√(Var[y] / Var[ŷ]) of each output channel, G × outputs; 1 where there is no variance to match."""
    wanted, _, got = _variances(layer, moments)
    ratio = (wanted / got.clamp(min=1e-300)).sqrt()
    fit = (got > 0) & (ratio >= LEAST) & (ratio <= 1 / LEAST)
    return torch.where(fit, ratio, 1.0)


def channel_errors(layer: Layer, moments: Moments, factor: Tensor | float = 1.0) -> Tensor:
    """Var[y − a·ŷ] of each output channel, G × outputs, ``a`` its factor."""
    wanted, both, got = _variances(layer, moments)
    return wanted - 2 * factor * both + factor * factor * got
