"""Takes products with stored numbers behind an integer convolution into the scales of its weight.

    ((s · W) x + s_b · b + k) · γ = ((s · |γ|) · ±W) x + (s_b · |γ|) · ±b + k · γ

OpenVINO (2026.4) multiplies the weight itself by what a convolution's result is multiplied by, so that it is no longer
one of integers, and convolves in float. In the scale a factor costs nothing, and the integers of a weight that several
convolutions share stay shared (one head for all levels, and a scale for each: FCOS, arXiv 1904.01355); those behind a
factor below zero change their sign. What is added on the way is added behind.

Left out on purpose: results that something else reads too, which OpenVINO leaves as well.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from qtool.exporting.passes.biases import drop_unused
from qtool.exporting.passes.names import DEQUANTIZE
from qtool.exporting.passes.parts import constant, dequantized, integer_taps

_PRODUCTS = ("Mul", "Div")
_LINEAR = (*_PRODUCTS, "Add", "Sub")

Numbers = npt.NDArray[np.float64]


def apply(model: ir.Model) -> int:
    """Rewrites in place; returns how many convolutions took a factor in."""
    changed = sum(_take_in(model, node) for node in list(model.graph))
    drop_unused(model)
    return changed


def _take_in(model: ir.Model, conv: ir.Node) -> bool:
    taps = integer_taps(conv)
    steps, factor, shift = _behind(conv) if taps is not None else ([], np.ones(1), np.zeros(1))
    if taps is None or not steps:
        return False
    factor = np.broadcast_to(factor, taps.shape[0])
    stored = [_scaled(conv, index, factor) for index in range(1, len(conv.inputs))]
    if not np.isfinite(shift).all() or any(found is None for found in stored):
        return False
    result, last = conv.outputs[0], steps[-1].outputs[0]
    for index, found in enumerate(stored, 1):
        assert found is not None
        name = f"{conv.name or result.name}/scaled_{index}"
        constants = [constant(model, f"{name}/{part}", n) if n is not None else None for part, n in enumerate(found)]
        old = conv.inputs[index]
        source = old.producer() if old is not None else None
        assert source is not None
        inputs = [new if new is not None else kept for new, kept in zip(constants, source.inputs, strict=False)]
        dequantized(model, conv, index, [*inputs, *source.inputs[2:]], f"{name}/dequantized")
    made = []
    if shift.any():
        numbers = shift.astype(np.float32).reshape(-1, *[1] * (taps.ndim - 2))
        made = [ir.node("Add", [result, constant(model, f"{last.name}/added", numbers)], name=steps[-1].name)]
    ends = made[-1].outputs if made else [result]
    ir.convenience.replace_nodes_and_values(model.graph, steps[-1], steps, made, [last], ends)
    return True


def _behind(conv: ir.Node) -> tuple[list[ir.Node], Numbers, Numbers]:
    """The steps up to the last that multiplies by stored numbers, by what they do in all, and what they add then."""
    value, steps = conv.outputs[0], list[ir.Node]()
    factor, shift = np.ones(1), np.zeros(1)
    found = steps, factor, shift
    while len(value.uses()) == 1 and not value.is_graph_output():
        ((step, index),) = value.uses()
        numbers = _numbers(step, 1 - index, conv) if step.op_type in _LINEAR else None
        if numbers is None or (step.op_type == "Div" and index == 1):
            break
        steps = [*steps, step]
        if step.op_type in _PRODUCTS:
            numbers = 1 / numbers if step.op_type == "Div" else numbers
            factor, shift = factor * numbers, shift * numbers
        elif step.op_type == "Add":
            shift = shift + numbers
        else:
            factor, shift = (factor, shift - numbers) if index == 0 else (-factor, numbers - shift)
        if step.op_type in _PRODUCTS or (step.op_type == "Sub" and index == 1):  # which multiplies by −1
            found = steps, factor, shift
        value = step.outputs[0]
    return found


def _numbers(step: ir.Node, index: int, conv: ir.Node) -> Numbers | None:
    """Stored numbers that a step reads, one for each channel of a convolution or one for all; None of anything else."""
    value, weight = step.inputs[index], conv.inputs[1]
    assert weight is not None
    if value is None or value.const_value is None or weight.shape is None:
        return None
    stored, rank = value.const_value.numpy(), len(weight.shape)
    sizes = [*[1] * (rank - stored.ndim), *stored.shape]
    if stored.ndim > rank or sizes[1] not in (1, weight.shape[0]) or any(n != 1 for n in (sizes[0], *sizes[2:])):
        return None
    numbers: Numbers = stored.astype(np.float64).reshape(-1)
    return numbers


def _scaled(
    conv: ir.Node, index: int, factor: Numbers
) -> tuple[npt.NDArray[np.generic] | None, npt.NDArray[np.float32]] | None:
    """A weight's or a bias's integers, None where they stay, and scales for results times ``factor``; None if none."""
    value = conv.inputs[index]
    source = value.producer() if value is not None else None
    stored = [part.const_value if part is not None else None for part in source.inputs[:2]] if source else []
    if source is None or source.op_type != DEQUANTIZE or None in stored:
        return None
    integers, scales = (part.numpy() for part in stored if part is not None)
    scaled = (scales * np.abs(factor)).astype(np.float32)
    signs = np.sign(factor).astype(integers.dtype).reshape(-1, *[1] * (integers.ndim - 1))
    normal = (np.isfinite(scaled) & (scaled >= np.finfo(np.float32).tiny)).all() and scales.shape == factor.shape
    if not normal or integers.min() == np.iinfo(integers.dtype).min:
        return None
    return (integers * signs if (signs < 0).any() else None), scaled
