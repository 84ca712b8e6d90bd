"""Fills the channels of depthwise convolutions up to whole vectors of 16.

ONNX Runtime's integer depthwise kernel takes 16 channels at a time and any rest one by one: 72 channels take over
twice the time of 80. The channels added here are zeros in every weight that makes them and in every weight that reads
them, so that no sum changes and nothing of them leaves the block:

    y = W₂ · f(W₁ x) = [W₂ 0] · f([W₁; 0] x).

Channels run from the convolutions that make them, through whatever works channel by channel (the depthwise convolution,
activations, pools, a gate), to the convolutions that read them; all of these are widened together. Where such a run
meets anything else (an output, a Reshape, a Concat, a constant for each channel), it stays as it is.

The other layers of the run get as much larger as the channels do, so a run is filled up only where that is a fifth at
most, and a file by 2 % of its constants at most, the first layers first: they have the fewest weights and the most to
compute.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from qtool.exporting.passes.biases import drop_unused
from qtool.exporting.passes.parts import MOST_GROWTH, constant, dequantized, num_stored, zeros_of

VECTOR = 16
MOST_ADDED = 0.2

CHANNELWISE = (
    "QuantizeLinear", "DequantizeLinear", "Relu", "LeakyRelu", "Elu", "Clip", "HardSigmoid", "HardSwish", "Sigmoid",
    "Tanh", "Identity", "Add", "Sub", "Mul", "AveragePool", "MaxPool", "GlobalAveragePool",
)  # fmt: skip
PLAIN = (ir.DataType.INT8, ir.DataType.INT32, ir.DataType.FLOAT)
"""Types of constants beside which a kernel works in integers, or in float by choice: four bits it would widen first."""


@dataclass
class _Run:
    """Values that have the same channels, the convolutions at its ends and the depthwise ones between."""

    channels: int
    values: dict[ir.Value, None] = field(default_factory=dict)
    makers: dict[ir.Node, None] = field(default_factory=dict)
    readers: dict[ir.Node, None] = field(default_factory=dict)
    depthwise: dict[ir.Node, None] = field(default_factory=dict)

    @property
    def added(self) -> int:
        """Channels that are missing to whole vectors."""
        return -self.channels % VECTOR

    @property
    def growth(self) -> int:
        """Values of weights that would be added."""
        return sum(
            _numel(node.inputs[1]) * self.added // self.channels
            for ends in (self.makers, self.readers, self.depthwise)
            for node in ends
        )


def apply(model: ir.Model) -> int:
    """Rewrites in place; returns how many depthwise convolutions were widened."""
    left = MOST_GROWTH * num_stored(model)
    done: set[ir.Node] = set()
    changed = 0
    for node in list(model.graph):
        if node in done or not _is_depthwise(node):
            continue
        run = _run_of(node)
        if run is None:
            continue
        done |= run.depthwise.keys()
        if 0 < run.added <= MOST_ADDED * run.channels and run.growth <= left:
            left -= run.growth
            _widen(model, run)
            changed += len(run.depthwise)
    drop_unused(model)
    return changed


def _is_depthwise(node: ir.Node) -> bool:
    shape = _shape(node.inputs[1]) if node.op_type == "Conv" else []
    return len(shape) == 4 and shape[:2] == [node.attributes.get_int("group", 1), 1] and shape[0] > 1


def _run_of(start: ir.Node) -> _Run | None:
    """All that has the channels of a depthwise convolution; None where something among it cannot be widened."""
    run = _Run(_shape(start.inputs[1])[0])
    waiting = [start.inputs[0]]
    while waiting:
        value = waiting.pop()
        if value is None or value in run.values:
            continue
        if value.is_graph_input() or value.is_graph_output() or _shape(value)[1:2] != [run.channels]:
            return None
        run.values[value] = None
        for node in (value.producer(), *value.consumers()):
            tied = _tied(run, node, value) if node is not None else None
            if tied is None:
                return None
            waiting += tied
    return run


def _tied(run: _Run, node: ir.Node, value: ir.Value) -> list[ir.Value] | None:
    """The values that ``node`` ties to ``value``, noting what it is in the run; None where it cannot be widened."""
    if node.op_type != "Conv":
        return _tied_channelwise(node) if node.op_type in CHANNELWISE else None
    if value in node.inputs[1:] or not all(map(_is_stored, node.inputs[1:])):
        return None
    if _is_depthwise(node):
        run.depthwise[node] = None
        return [v for v in (node.inputs[0], node.outputs[0]) if v is not None]
    if node.attributes.get_int("group", 1) != 1:
        return None
    (run.readers if value is node.inputs[0] else run.makers)[node] = None
    return []


def _tied_channelwise(node: ir.Node) -> list[ir.Value] | None:
    """All that has channels of what an operator reads and writes; single numbers have none."""
    tied = [value for value in (*node.inputs, *node.outputs) if value is not None and not _is_single(value)]
    same_rank = len({len(_shape(value)) for value in tied}) == 1
    return tied if same_rank and len(node.outputs) == 1 else None


def _is_stored(value: ir.Value | None) -> bool:
    """Whether a weight or bias is a constant, behind a DequantizeLinear or not."""
    stored = _stored(value) if value is not None else None
    return value is None or (stored is not None and stored.dtype in PLAIN)


def _stored(value: ir.Value) -> ir.Value | None:
    """The constant that a value is or is dequantized from, zero from zero and by output channel; None for others."""
    source = value.producer()
    if source is not None and source.op_type == "DequantizeLinear":
        zeros = zeros_of(source)
        if zeros is None or zeros.any():
            return None
        if len(_shape(source.inputs[1])) == 1 and source.attributes.get_int("axis", 1) != 0:
            return None
        value = source.inputs[0] or value
    return value if value.const_value is not None else None


def _widen(model: ir.Model, run: _Run) -> None:
    for node in dict.fromkeys([*run.makers, *run.depthwise]):
        for index in range(1, len(node.inputs)):
            _pad_input(model, node, index, 0, run.added)
    for node in run.readers:
        _pad_input(model, node, 1, 1, run.added)
    for node in run.depthwise:
        node.attributes["group"] = ir.AttrInt64("group", run.channels + run.added)
    for value in run.values:
        dims = list(value.shape or [])
        value.shape = ir.Shape([dims[0], run.channels + run.added, *dims[2:]])


def _pad_input(model: ir.Model, node: ir.Node, index: int, axis: int, added: int) -> None:
    """Gives a convolution's weight or bias zeros along an axis; new output channels have the last one's scale."""
    value = node.inputs[index]
    if value is None:
        return
    source = value.producer()
    if source is None:
        node.replace_input_with(index, _longer(model, value, f"{value.name}/even", axis, added, "constant"))
        return
    stored, *factors = source.inputs
    assert stored is not None
    base = f"{stored.name}/{node.name or node.outputs[0].name}/even"
    inputs = [_longer(model, stored, base, axis, added, "constant")]
    for place, factor in enumerate(factors):
        longer = axis == 0 and factor is not None and _numel(factor) > 1
        inputs.append(_longer(model, factor, f"{base}/{place}", 0, added, "edge") if longer and factor else factor)
    dequantized(model, node, index, inputs, f"{value.name}/even")


def _longer(model: ir.Model, value: ir.Value, name: str, axis: int, added: int, mode: str) -> ir.Value:
    """A new constant: ``value`` with ``added`` more along ``axis``, zeros or its last entry."""
    assert value.const_value is not None
    numbers = value.const_value.numpy()
    amounts = [(0, added if place == axis else 0) for place in range(numbers.ndim)]
    return constant(model, name, np.pad(numbers, amounts, mode))  # type: ignore[call-overload]


def _is_single(value: ir.Value) -> bool:
    """Whether a value is one stored number, quantized or not."""
    source = value.producer()
    stored = source.inputs[0] if source is not None and source.op_type == "DequantizeLinear" else value
    return stored is not None and stored.const_value is not None and stored.const_value.size == 1


def _shape(value: ir.Value | None) -> list[int | ir.SymbolicDim]:
    return list(value.shape) if value is not None and value.shape is not None else []


def _numel(value: ir.Value | None) -> int:
    """How many numbers a constant has; 0 where a value is none."""
    stored = _stored(value) if value is not None else None
    return stored.const_value.size if stored is not None and stored.const_value is not None else 0
