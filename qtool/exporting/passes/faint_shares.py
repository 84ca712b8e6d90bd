"""Keeps attention's shares of what it never sees from passing through denormal numbers, which CPUs are slow with.

A place is hidden by float32's lowest number in its score, so that its share is exp(−∞) = 0. ONNX Runtime's kernel gets
there by way of floats below 2^−126, and a softmax of which half is hidden takes ten times as long as one that sees all:
4.2 ns for each share instead of 0.4 (256 × 256, ONNX Runtime 1.31, AVX-512, one thread), over a third of a small
language model's time. Behind

    max(s, m − 60),    m the most in the row

it takes 1.9, the maxima included. A share of exp(−60) = 9e-27 is a float as any other, and nothing beside one of at
least 1 / n: float32 has 24 bits. A row that is hidden whole stays as it is.

Written where places are hidden whatever the inputs are: what comes later, or by a stored mask, be it added to scores
or telling which of them to replace. Where the inputs alone say what is hidden, as behind the end of a text, it is often
nothing. (Stored masks of −100 are mended before, see ``qtool.quantization.capturing.faint_masks``.)
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from qtool.exporting.passes.parts import constant

FAINT, LEAST = -80.0, 60.0
_LAYERS = ("MatMul", "Gemm", "Conv", "Softmax")
_COMPARISONS = ("Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal", "Trilu")


def apply(model: ir.Model) -> int:
    """Rewrites in place; returns before how many softmaxes."""
    inputs = set(model.graph.inputs)
    found = [node for node in model.graph if node.op_type == "Softmax" and _hides(node, inputs)]
    for node in found:
        _lift(model, node)
    return len(found)


def _hides(softmax: ir.Node, inputs: set[ir.Value]) -> bool:
    scores = softmax.inputs[0]
    total = scores.producer() if scores is not None else None
    rank = len(scores.shape) if scores is not None and scores.shape is not None else 0
    last = softmax.attributes.get_int("axis", -1) in (-1, rank - 1)
    if not last or total is None:
        return False
    if total.op_type == "Add":
        return any(_is_low(value) and _is_told(value, inputs) for value in total.inputs)
    return total.op_type == "Where" and any(map(_is_low, total.inputs[1:])) and _is_told(total.inputs[0], inputs)


def _is_low(value: ir.Value | None) -> bool:
    """Whether some of what scores are given, or what is added to them, is very low."""
    return value is not None and any(_least(source) < FAINT for source in _sources(value))


def _is_told(value: ir.Value | None, inputs: set[ir.Value]) -> bool:
    """Whether it is not by the inputs alone which places are hidden."""
    made = _sources(value) if value is not None else {}
    compared = [v for v in made if (node := v.producer()) is not None and node.op_type in _COMPARISONS]
    apart = any(inputs.isdisjoint(_sources(told)) for told in (value, *compared) if told is not None)
    return apart or any(map(_is_order, made))


def _is_order(value: ir.Value) -> bool:
    """Whether it is stored and hides some places and not others: what comes later, beside what the inputs hide."""
    stored = value.const_value
    if stored is None or not (stored.dtype == ir.DataType.BOOL or stored.dtype.is_floating_point()):
        return False
    numbers = stored.numpy()
    hidden = ~numbers if stored.dtype == ir.DataType.BOOL else numbers < FAINT
    return bool(hidden.any() and not hidden.all())


def _sources(value: ir.Value) -> dict[ir.Value, None]:
    """All that a value's numbers are computed from, itself included, up to layers; of what tells its sizes, nothing."""
    found: dict[ir.Value, None] = {}
    waiting = [value]
    while waiting:
        current = waiting.pop()
        node = current.producer()
        if current not in found and node is not None and node.op_type not in ("Shape", *_LAYERS):
            waiting += [source for source in node.inputs if source is not None]
        found[current] = None
    return found


def _least(value: ir.Value) -> float:
    """The least of the floats that are stored or filled in; infinity for any other value."""
    node, stored = value.producer(), value.const_value
    if stored is None and node is not None and node.op_type == "ConstantOfShape":
        stored = node.attributes["value"].as_tensor() if "value" in node.attributes else None
    floats = stored is not None and stored.size > 0 and stored.dtype.is_floating_point()
    return float(stored.numpy().min()) if stored is not None and floats else float("inf")


def _lift(model: ir.Model, softmax: ir.Node) -> None:
    scores, name = softmax.inputs[0], softmax.name or str(softmax.outputs[0].name)
    assert scores is not None
    most = ir.node("ReduceMax", [scores, constant(model, f"{name}/last", np.array([-1]))], name=f"{name}/most")
    below = constant(model, f"{name}/below", np.float32(LEAST))
    least = ir.node("Sub", [most.outputs[0], below], name=f"{name}/least")
    lifted = ir.node("Max", [scores, least.outputs[0]], name=f"{name}/lifted")
    for node in (most, least, lifted):
        node.outputs[0].name, node.outputs[0].dtype = node.name, scores.dtype
    lifted.outputs[0].shape = scores.shape
    model.graph.insert_before(softmax, [most, least, lifted])
    softmax.replace_input_with(0, lifted.outputs[0])
