"""The quantized graph as the gates run it: to the same bits as the graph itself, without its waste.

A quantized graph dequantizes its weights in every call, and each of its quantizers makes four temporary tensors of the
activation's size. Here weights are dequantized once, and a quantizer works in one tensor:

    q = clamp(round(x · (1 / scale)) + zero_point),    x' = (q − zero_point) · scale

which are the operators' own steps in their own order, so that no bit differs. Where no bit has to be the same, but what
the graph does over many samples, convolutions are added up in integers where the CPU can, and what a block product
reads is rounded as the runtime rounds it (:func:`fast_simulation`).

Integers make equal values of near ones, and which of these ``topk`` and ``sort`` name first torch leaves open. ONNX
takes them in order. So it is here, or gates would compare what stands at different places.

What a quantizer was given lies half-way between two steps now and then (a tie), and then arithmetic in another order
may take the other one: :class:`QuantizerRecorder` keeps which values these were, beside the integers.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.fx import Interpreter, Node

from qtool.exporting.block_products import rounded_in_blocks
from qtool.exporting.gates.choices import CHOOSING, places_of
from qtool.form import DEQUANTIZE, QUANTIZE, QuantizedModel, check_inputs, quantize_nodes, unit_of
from qtool.form import quantized as quantized_ops
from qtool.forward import passes_told
from qtool.graphs.polynomials import LOGISTIC_RESOLUTION, logistic
from qtool.graphs.programs import arguments
from qtool.runtimes.torch_integer_conv import is_exact_here, with_integer_convolutions

Array = npt.NDArray[Any]
TIE = 2.0**-12
"""How near the middle between two steps is undecided: 255 steps come with errors of some 2⁻²⁴ each."""


class Simulation(Interpreter):
    """A quantized model as a function of a batch of inputs, integers simulated in float32."""

    def __init__(self, quantized: QuantizedModel, *, blocks: bool = False) -> None:
        """With ``blocks``, what a block product reads is rounded as the runtime rounds it."""
        super().__init__(quantized.graph)
        self.blocks = block_products(quantized) if blocks else {}
        self.constants: dict[Node, Tensor] = {}
        for node in quantized.graph.graph.nodes:
            if node.target in DEQUANTIZE and all(operand.op == "get_attr" for operand in node.all_input_nodes):
                operands = [self.fetch_attr(str(a.target)) if isinstance(a, Node) else a for a in node.args]
                with torch.no_grad():
                    self.constants[node] = node.target(*operands, **node.kwargs)

    def __call__(self, inputs: Any) -> Any:
        """The outputs for a batch. Raises QtoolError for inputs of another number, size or type than the graph's."""
        check_inputs(self.module, inputs, "inputs")  # type: ignore[arg-type]
        with passes_told("the quantized model on the samples"):
            return interpret(self, inputs)

    def run_node(self, n: Node) -> Any:
        """Runs one node: a constant is there already, and what is quantized or dequantized is so in place."""
        if n in self.constants:
            return self.constants[n]
        if n in self.blocks:
            x, *others = self.fetch_args_kwargs_from_env(n)[0]
            return n.target(rounded_in_blocks(x, self.blocks[n]), *others)  # type: ignore[operator]
        if n.target is quantized_ops.quantize_per_tensor.default:
            return quantize(*self.fetch_args_kwargs_from_env(n)[0])
        if n.target is quantized_ops.dequantize_per_tensor.default and not n.kwargs:
            return dequantize(*self.fetch_args_kwargs_from_env(n)[0])
        if n.target in RANKED:
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            return RANKED[n.target](*args, **kwargs)  # type: ignore[operator]
        return super().run_node(n)


def _topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Tensor, ...]:
    """``aten.topk``, the first of equal values first."""
    return tuple(part.narrow(dim, 0, k) for part in torch.sort(x, dim=dim, descending=largest, stable=True))


def _sort(x: Tensor, dim: int = -1, descending: bool = False) -> tuple[Tensor, ...]:
    """``aten.sort``, the first of equal values first."""
    return tuple(torch.sort(x, dim=dim, descending=descending, stable=True))


def _argsort(x: Tensor, dim: int = -1, descending: bool = False) -> Tensor:
    """``aten.argsort``, the first of equal values first."""
    return torch.argsort(x, dim=dim, descending=descending, stable=True)


RANKED = {
    torch.ops.aten.topk.default: _topk, torch.ops.aten.sort.default: _sort, torch.ops.aten.argsort.default: _argsort,
}  # fmt: skip


@torch.no_grad()
def interpret(interpreter: Interpreter, inputs: Any) -> Any:
    """What an interpreter makes of a batch, given by place or by name."""
    args, kwargs = arguments(inputs)
    names = inspect.signature(interpreter.module.forward).parameters  # in the order of the trace
    return interpreter.run(*args, *(kwargs[name] for name in names if name in kwargs))


def fast_simulation(quantized: QuantizedModel) -> Simulation:
    """The simulation as the runtime rounds: with exact integer convolutions where this CPU has them, and in blocks."""
    if not is_exact_here():
        return Simulation(quantized, blocks=True)
    graph = with_integer_convolutions(quantized.graph)[0]
    return Simulation(dataclasses.replace(quantized, graph=graph), blocks=True)


def block_products(quantized: QuantizedModel) -> dict[Node, int]:
    """The linear layers that the target runs as block products, each with the inputs that are rounded together."""
    blocks = {unit.name: unit.block for unit in quantized.plan.units if unit.block}
    linears = [node for node in quantized.graph.graph.nodes if node.target is torch.ops.aten.linear.default]
    return {node: block for node in linears if (block := blocks.get(unit_of(node)))}


def quantize(x: Tensor, scale: float, zero_point: int, low: int, high: int, dtype: torch.dtype) -> Tensor:
    """``quantized_decomposed.quantize_per_tensor``, step by step in one tensor."""
    steps = torch.mul(x, 1.0 / scale).round_()
    return (steps.add_(zero_point) if zero_point else steps).clamp_(low, high).to(dtype)


def dequantize(x: Tensor, scale: float, zero_point: int, low: int, high: int, dtype: torch.dtype) -> Tensor:
    """``quantized_decomposed.dequantize_per_tensor``, step by step in one tensor."""
    steps = x.to(torch.float32)
    return (steps.sub_(zero_point) if zero_point else steps).mul_(scale)


class QuantizerRecorder(Simulation):
    """Keeps the integers that each activation quantizer gave, the places of those that are ties, and what was chosen.

    A sigmoid that gives float is the runtime's polynomial: where all results are small, as those of rare clicks, torch
    and the runtime would differ in what there is of them. They are as exact as that is, to ``resolution``.
    """

    def __init__(self, quantized: QuantizedModel) -> None:
        super().__init__(quantized)
        self.wanted = {node: index for index, node in enumerate(quantize_nodes(quantized.graph))}
        self.integers: list[Array] = []
        self.ties: list[Array] = []
        self.chosen: dict[Node, tuple[Tensor, Tensor]] = {}
        """The scores and the places of each choice by value."""
        self.resolution = 0.0

    def record(self, inputs: Any) -> tuple[list[Array], Any]:
        """The integers of every quantizer, in graph order, and the graph's output, for one batch."""
        self.integers, self.ties = [np.empty(0)] * len(self.wanted), [np.empty(0)] * len(self.wanted)
        output = self(inputs)
        return self.integers, output

    def run_node(self, n: Node) -> Any:
        """Runs one node, keeping its value when it is a quantizer."""
        if n.target is torch.ops.aten.sigmoid.default and any(user.target not in QUANTIZE for user in n.users):
            value, self.resolution = logistic(self.fetch_args_kwargs_from_env(n)[0][0]), LOGISTIC_RESOLUTION
        else:
            value = super().run_node(n)
        if n.target in CHOOSING:
            self.chosen[n] = self.fetch_args_kwargs_from_env(n)[0][0], places_of(value)
        if n in self.wanted:
            real, scale = self.fetch_args_kwargs_from_env(n)[0][:2]
            self.integers[self.wanted[n]] = value.cpu().numpy()
            self.ties[self.wanted[n]] = ties(real, scale).cpu().numpy()
        return value


def ties(values: Tensor, scale: float) -> Tensor:
    """The places (int64, in the flattened tensor) of ties: looked for in float32, and looked at in float64.

    Float32 overlooks none among 2,048 steps on either side of zero; further out every value is clamped.
    """
    steps = values.flatten() * (1.0 / scale)
    near = steps.sub_(steps.floor()).sub_(0.5).abs_() < 2 * TIE
    places = near.nonzero().flatten()
    return places[is_tie(values.flatten()[places], scale)]


def is_tie(values: Tensor, scale: float) -> Tensor:
    """Where a value lies so near the middle between two steps that float32 arithmetic cannot tell its side."""
    steps = values.double() / scale
    return ((steps - steps.floor()) - 0.5).abs() < TIE
