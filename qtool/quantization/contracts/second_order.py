"""Second-order sensitivity: every unit's effect from one pass forward and a few back, instead of a pass for each unit.

With only unit u quantized its output changes by ``δ_u``, which is computed where the unit stands. What that does to
the network's output z is, to first order, ``J_u δ_u``; and to second order, the first vanishing at the float network,

    KL_u ≈ ½ (J_u δ_u)ᵀ F (J_u δ_u),    F = diag(p) − p pᵀ,    p = softmax z

the Fisher matrix of the answer (the Hessian of the KL divergence, as in HAWQ-V2, arXiv 1911.03852, with the loss taken
against the network's own answers, so that no labels are needed). Both need J_u, a matrix, only through random probes
(Hutchinson 1990): for ``E[v vᵀ] = I`` and ``E[w wᵀ] = F``

    ‖J_u δ_u‖² = E (vᵀ J_u δ_u)²,    KL_u ≈ ½ E (wᵀ J_u δ_u)²,    w = √p ∘ r − p (√pᵀ r),  r ~ N(0, I)

and ``vᵀ J_u`` of every unit at once is one backward pass for each output, and one for KL. One probe for each sample: a
sum of squares over N samples is within about √(2/N) of what it estimates. Unlike Fisher's or the Hessian's diagonal,
errors of different values of one output are not taken for independent.

Left out on purpose: what is beyond the second order. A unit that turns the answer over is understated, though still
first; and agreement, which is no smooth function.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from qtool.errors import UsageError
from qtool.nested import map_tensors, num_samples, samples_of, tensors
from qtool.quantization.contracts.sensitivity import SLICE, Sensitivities, added, energy

SLOW = 300.0
"""Seconds that the exact measurement may take before the estimate is taken instead, where that is left open."""


class SecondOrder(Sensitivities):
    """Estimates what ``Sensitivities`` measures, but for agreement; the same results otherwise."""

    kind = "second-order"
    empty: Mapping[str, float] = {"kl": 0.0}

    def _add(self, piece: Any) -> None:
        ends = [alone.placed.output for alone in self.units]
        with torch.enable_grad():
            values = self._float_pass(piece)
            outputs = self._outputs(values)
        if not outputs[0].is_floating_point():
            raise UsageError(
                "--sensitivity", "exact, for a model that gives whole numbers", "second-order, which has no gradients",
                "measure it unit by unit",
            )  # fmt: skip
        probes, fisher = self._probes([output.detach() for output in outputs])
        reached = [value for node in ends for value in tensors(values[node])]
        slopes = [_backward(output, probe, reached) for output, probe in zip(outputs, probes, strict=True)]
        of_kl = None if fisher is None else _backward(outputs[0], fisher, reached)
        self.state["signal"] = added(self.state["signal"], (energy(output.detach()) for output in outputs))
        values = {node: map_tensors(Tensor.detach, value) for node, value in values.items()}
        size, start = num_samples(piece), 0
        for alone, end in zip(self.units, ends, strict=True):
            pairs = zip(tensors(self._within(alone, values)[end]), tensors(values[end]), strict=True)
            errors = [made - wanted for made, wanted in pairs]
            own = slice(start, start := start + len(errors))
            sums = self.state["units"][alone.placed.unit.name]
            sums["noise"] = added(sums["noise"], (_squares(slope[own], errors, size) for slope in slopes))
            if of_kl is not None:
                sums["kl"] += _squares(of_kl[own], errors, size) / 2

    def _seen(self, node: Node, value: Any) -> Any:
        """Lets gradients reach the output of every unit, and each of several."""
        return map_tensors(_reachable, value) if node in self._ends else value

    @property
    def _ends(self) -> set[Node]:
        return {alone.placed.output for alone in self.units}

    def _probes(self, outputs: list[Tensor]) -> tuple[list[Tensor], Tensor | None]:
        """A random direction in each output, and one for KL in the first; the same each time for the same samples."""
        draw = torch.Generator().manual_seed(int(self.state["num_samples"]))
        probes = [torch.randn(t.shape, generator=draw).to(t) for t in outputs]
        axis = self._class_axis(outputs)
        if axis is None:
            return probes, None
        p = outputs[0].softmax(axis)
        r = torch.randn(p.shape, generator=draw).to(p)
        rows = p[0].numel() // p.shape[axis]  # of which KL is the mean
        return probes, (p.sqrt() * r - p * (p.sqrt() * r).sum(axis, keepdim=True)) / math.sqrt(rows)


def _reachable(value: Tensor) -> Tensor:
    wanted = value.is_floating_point() and not value.requires_grad
    return value.detach().requires_grad_() if wanted else value


def _backward(output: Tensor, probe: Tensor, values: list[Tensor]) -> tuple[Tensor | None, ...]:
    """The gradients of one output in the probe's direction, None for values that it does not depend on."""
    if not output.requires_grad:
        return (None,) * len(values)
    return torch.autograd.grad(output, values, probe, retain_graph=True, allow_unused=True)


def _squares(slopes: Sequence[Tensor | None], errors: Sequence[Tensor], samples: int) -> float:
    """The sum over samples of (slope · error)²; a first dimension of several per sample counts as that sample's.

    Of several results, whose samples need not stand first, the samples are added up before: on average the same.
    """
    found = [(slope * error).double() for slope, error in zip(slopes, errors, strict=True) if slope is not None]
    if not found or len(errors) > 1:
        return float(sum(float(products.sum()) for products in found)) ** 2
    (products,) = found
    rows = products.reshape(samples, -1) if len(products) % samples == 0 else products.flatten(1)
    return float(rows.sum(1).square().sum())


def is_slow(exact: Sensitivities, example: Any, samples: int) -> bool:
    """Whether measuring so many samples unit by unit would take more than ``SLOW`` seconds, by one float pass."""
    piece = samples_of(example, 0, min(SLICE, num_samples(example)))
    start = time.perf_counter()
    with torch.no_grad():
        exact._float_pass(piece)
    each = (time.perf_counter() - start) / num_samples(piece)
    return each * samples * (1 + len(exact.units) / 2) > SLOW
