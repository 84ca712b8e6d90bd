"""A quantized graph as a function of its activations' scales and its biases, with gradients; integers stay.

What is learned is one vector: changes of ln s of each scale, then of each channel's bias, counted in tenths (``UNIT``)
of the deviation of the channel's outputs, so that one rate suits all. At 0 the graph's own numbers come out. Gradients
pass rounding as in learned step sizes (LSQ, arXiv 1902.08153): with z the zero point and x̂ the rounded value,

    ∂x̂/∂x = 1 inside the range, 0 beyond it        ∂x̂/∂s = (x̂ − x)/s inside it, x̂/s beyond it

``learned.py`` has the same for training, out of single operators; here it is one, which keeps nothing but x.
Quantizers of one scale and zero point share them: an operator that only moves values keeps those of its input. A scale
that an operator decides (softmax) stays, and none grows beyond where the quantizer clips at an activation's own limit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Interpreter, Node

from qtool.form import quantized
from qtool.graphs.operators import aten
from qtool.graphs.pixels import PIXELS
from qtool.quantization.algorithms.bias import bias_entry, bias_of, channel_axis, set_bias, take_biases
from qtool.quantization.algorithms.subject import Declined, Subject
from qtool.quantization.algorithms.walk import interpret
from qtool.quantization.rewrites.constants import constant_nodes

UNIT = 0.1
_QUANTIZE = quantized.quantize_per_tensor.default
_DEQUANTIZE = quantized.dequantize_per_tensor.default


class Rounded(torch.autograd.Function):
    """``x`` on the grid ``step`` · (low … high), as float32; ``scale`` is ``step`` as a tensor, for its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, step: float, low: int, high: int) -> Tensor:
        """Rounds as ``quantize_per_tensor`` and ``dequantize_per_tensor`` do."""
        ctx.save_for_backward(x)
        ctx.grid = step, low, high
        return _on_grid(x, step, low, high)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of ``x`` and ``scale``."""
        (x,), (step, low, high) = ctx.saved_tensors, ctx.grid
        inside = aten.hardtanh_backward(gradients[0], x, (low - 0.5) * step, (high + 0.5) * step)
        slope = (_dot(gradients[0], _on_grid(x, step, low, high)) - _dot(inside, x)) / step
        return inside, slope, None, None, None


def _on_grid(x: Tensor, step: float, low: int, high: int) -> Tensor:
    return x.mul(1.0 / step).round_().clamp_(low, high).mul_(step)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """The sum of products; tensors that lie alike need no third for that."""
    if a.stride() == b.stride() and a.permute(order := _order(a)).is_contiguous():
        return torch.dot(a.permute(order).reshape(-1), b.permute(order).reshape(-1))
    return (a * b).sum()


def _order(value: Tensor) -> list[int]:
    return sorted(range(value.dim()), key=value.stride, reverse=True)


@dataclass
class Group:
    """Quantizers that share a scale, which may be learned up to ``most``."""

    scale: float
    most: float = math.inf
    fixed: bool = False
    nodes: list[Node] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The unit that makes the first of the values, or the graph's input."""
        return tensor_of(self.nodes[0])


class Student(Interpreter):
    """The graph of a subject; see the module's text. ``prepare`` comes before running it."""

    def __init__(self, subject: Subject) -> None:
        super().__init__(subject.graph)
        self.subject, self.layers, self.groups = subject, list(subject.anchors()), _groups(subject)
        if not self.groups:
            raise Declined("no activation has a range that could be learned")
        self._constants, self._known = constant_nodes(subject.graph), dict[Node, Any]()
        self._place = {node: index for index, group in enumerate(self.groups) for node in group.nodes}
        self.first = torch.tensor([group.scale for group in self.groups]).to(subject.device)
        self._most = torch.tensor([group.most for group in self.groups]).to(subject.device)
        self._spreads: dict[Node, Tensor] = {}
        self.learned = torch.zeros_like(self.first)
        self._arrange()

    @torch.no_grad()
    def prepare(self, piece: Any) -> None:
        """Sees on some samples how much the outputs of each layer's channels vary, and starts ``learned`` at 0."""
        self._spreads = dict.fromkeys(self.layers, self.first)
        interpret(self, piece)
        count = len(self.groups) + sum(map(len, self._spreads.values()))
        self.learned = torch.zeros(count).to(self.first.device).requires_grad_()

    def __call__(self, piece: Any) -> Any:
        """The outputs for a piece of samples, as what is learned is now."""
        self._arrange()
        return interpret(self, piece)

    def limit(self) -> None:
        """Takes scales back that grew beyond what is allowed."""
        grown = self.learned.detach()[: len(self.groups)]
        grown.clamp_(max=(self._most / self.first).log().clamp(min=0))

    def run_node(self, n: Node) -> Any:
        """The result of one node; quantizers give real numbers."""
        if n in self._constants:
            if n not in self._known:
                self._known[n] = _detached(super().run_node(n))
            return self._known[n]
        if n in self._place:
            return self._round(n, self.env[n.args[0]])  # type: ignore[index]
        if n.target is _DEQUANTIZE and n.args[0] in self._place:
            return self.env[n.args[0]]  # type: ignore[index]
        if n in self._shifts:
            return self._shifted(n)
        result = super().run_node(n)
        if n in self._spreads:
            axis = channel_axis(n) % result.dim()
            self._spreads[n] = result.std([d for d in range(result.dim()) if d != axis], correction=0)
        return result

    def _round(self, n: Node, x: Tensor) -> Any:
        index, zero = self._place[n], int(str(n.args[2]))
        low, high = int(str(n.args[3])) - zero, int(str(n.args[4])) - zero
        return Rounded.apply(x, self._scales[index], self._steps[index], low, high)  # type: ignore[no-untyped-call]

    def _shifted(self, n: Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        before = args[2] if len(args) > 2 and args[2] is not None else 0.0
        return n.target(*args[:2], before + self._shifts[n], *args[3:], **kwargs)  # type: ignore[operator]

    def _arrange(self) -> None:
        """Cuts what is learned into scales and shifts of biases."""
        count = len(self.groups)
        scales = self.first * self.learned[:count].exp()
        self._scales, self._steps = scales.unbind(), scales.tolist()
        self._shifts: dict[Node, Tensor] = {}
        if len(self.learned) > count:
            parts = torch.split(self.learned[count:], [len(spread) for spread in self._spreads.values()])
            self._shifts = {n: UNIT * part * s for (n, s), part in zip(self._spreads.items(), parts, strict=True)}

    @torch.no_grad()
    def store(self) -> None:
        """Writes what was learned into the graph, and beside the ranges that were calibrated."""
        self._arrange()
        for group, scale in zip(self.groups, self._steps, strict=True):
            _write(group, scale)
            self._entry(group.name)["scale"] = scale
        for layer, shift in self._shifts.items():
            set_bias(self.subject.graph, layer, bias_of(self.subject.graph, layer) + shift)
            self._entry(str(layer.meta["unit"])).update(bias_entry(self.subject.graph, layer))
        self.subject.graph.recompile()

    def restore(self) -> bool:
        """Writes what was saved beside the ranges; changes nothing and is False unless all was, for these integers."""
        saved = [self._saved(group.name) for group in self.groups]
        biases = {layer: self._saved(str(layer.meta["unit"])) for layer in self.layers}
        if any("scale" not in entry for entry in saved) or not take_biases(self.subject.graph, biases):
            return False
        for group, entry in zip(self.groups, saved, strict=True):
            _write(group, entry["scale"])
        self.subject.graph.recompile()
        return True

    def _saved(self, name: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.subject.ranges.get(name, {}).get("learned", {})
        return found

    def _entry(self, name: str) -> dict[str, Any]:
        entry: dict[str, Any] = self.subject.ranges.setdefault(name, {}).setdefault("learned", {})
        return entry


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def tensor_of(quantizer: Node) -> str:
    """The tensor that a quantizer of activations reads, by its name among the ranges."""
    source = quantizer.args[0]
    assert isinstance(source, Node)
    return str(source.meta.get("unit", source.name))


def _groups(subject: Subject) -> list[Group]:
    """The quantizers of activations by scale and zero point, without those that an operator decides."""
    placed = {each.unit.name: each for each in subject.placement.placed if each.pattern is not None}
    found: dict[tuple[Any, ...], Group] = {}
    constants = constant_nodes(subject.graph)
    for node in subject.graph.graph.nodes:
        if node.target is not _QUANTIZE or node in constants:
            continue
        group = found.setdefault(node.args[1:], Group(float(node.args[1])))
        group.nodes.append(node)
        group.fixed |= getattr(node.args[0], "target", None) is PIXELS
        unit = placed.get(tensor_of(node))
        if unit is not None and unit.pattern is not None and not unit.pattern.shares:
            group.fixed |= bool(unit.pattern.fixed)
            if unit.limits is not None:
                group.most = min(group.most, _greatest(unit.limits, *node.args[2:5]))
    return [group for group in found.values() if not group.fixed]


def _greatest(limits: tuple[float, float], zero_point: int, qmin: int, qmax: int) -> float:
    """The scale with which the range ends where the activation clips: above, or below if nothing is above zero."""
    return limits[1] / (qmax - zero_point) if zero_point < qmax else -limits[0] / (zero_point - qmin)


def _write(group: Group, scale: float) -> None:
    for node in group.nodes:
        node.update_arg(1, scale)
        for user in list(node.users):
            if user.target is _DEQUANTIZE:
                user.update_arg(1, scale)
