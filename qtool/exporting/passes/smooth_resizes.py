"""Writes a resizing that averages what it makes smaller (``antialias``) as matrix products, one for each axis.

OpenVINO (2026.4) takes no notice of ``antialias`` in a Resize, and samples: 3 dB, in floats too. Nor of
``exclude_outside``: a cubic one that makes nothing smaller has other edges. Along an axis that takes another
size by the factor s, number i of the result is the mean of the numbers j with the weights

    W[i, j] = f(min(s, 1) · (j + 1/2 − (i + 1/2) / s)),    over the sum of its row,

f being the triangle of a linear Resize or the cubic (Keys, 1981) of the node's ``cubic_coeff_a``. So torch, Pillow and
ONNX Runtime have it.

Left out on purpose: sizes that are not known, and what torch has not, which is other coordinates, numbers outside, and
axes before the last two. A linear one that makes no axis smaller OpenVINO computes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from qtool.exporting.passes.biases import drop_unused
from qtool.exporting.passes.parts import constant

_WIDTH, _HEIGHT = -1, -2
Weights = dict[int, npt.NDArray[np.float32]]
"""A matrix of after × before for each axis, counted from the last."""


def apply(model: ir.Model) -> int:
    """Rewrites in place; returns how many resizings are products now."""
    return multiply(model, _weights)


def multiply(model: ir.Model, weights_of: Callable[[ir.Node], Weights]) -> int:
    """Writes the resizings that ``weights_of`` gives weights for as products; returns how many those are."""
    found = [(node, weights) for node in model.graph if node.op_type == "Resize" and (weights := weights_of(node))]
    for node, weights in found:
        _rewrite(model, node, weights)
    if found:
        RemoveUnusedNodesPass()(model)
        drop_unused(model)
    return len(found)


def _weights(node: ir.Node) -> Weights:
    """The weights for each axis that an averaging Resize changes; none for anything else."""
    changes = changed(node) if _averages(node) else {}
    cubic = coefficient(node)
    if cubic is None and min((factor for _, _, factor in changes.values()), default=1) >= 1:
        return {}
    return {axis: matrix(*change, cubic) for axis, change in changes.items()}


def changed(node: ir.Node) -> dict[int, tuple[int, int, float]]:
    """The axes that a Resize changes, counted from the last: the sizes before and after, and the factor.

    None where one of those sizes is not known, or other axes than the last two are changed.
    """
    value, result = node.inputs[0], node.outputs[0]
    if value is None or value.shape is None or result.shape is None or len(value.shape) != len(result.shape):
        return {}
    factors, found, rank = _factors(node), dict[int, tuple[int, int, float]](), len(value.shape)
    for axis, (before, after) in enumerate(zip(value.shape, result.shape, strict=True)):
        if before != after:
            if axis - rank < _HEIGHT or not isinstance(before, int) or not isinstance(after, int):
                return {}
            found[axis - rank] = before, after, after / before if factors is None else factors[axis]
    return found


def coefficient(node: ir.Node) -> float | None:
    """The a of a cubic Resize's filter; None for any other."""
    return node.attributes.get_float("cubic_coeff_a", -0.75) if text(node, "mode") == "cubic" else None


def _averages(node: ir.Node) -> bool:
    """Whether a node is an antialiased Resize as torch writes one."""
    told = node.attributes
    if not told.get_int("antialias", 0) or not told.get_int("exclude_outside", 0):
        return False
    plain = text(node, "coordinate_transformation_mode", "half_pixel") == "half_pixel"
    return plain and is_plain(node) and text(node, "mode") in ("linear", "cubic")


def is_plain(node: ir.Node) -> bool:
    """Whether a Resize's sizes and factors are those of all its axes."""
    return text(node, "keep_aspect_ratio_policy", "stretch") == "stretch" and "axes" not in node.attributes


def text(node: ir.Node, name: str, default: str = "") -> str:
    """An attribute that is a word."""
    return str(node.attributes.get_string(name, default))


def _factors(node: ir.Node) -> list[float] | None:
    """By what each axis is scaled where a Resize tells that, and no sizes."""
    scales = node.inputs[2] if len(node.inputs) > 2 else None
    if scales is None or scales.const_value is None or not scales.const_value.size:
        return None
    factors: list[float] = scales.const_value.numpy().tolist()
    return factors


def matrix(before: int, after: int, scale: float, cubic: float | None = None) -> npt.NDArray[np.float32]:
    """The weights of ``before`` numbers in each of ``after``; ``cubic`` is a cubic's coefficient a, None a triangle."""
    places = np.arange(before) + 0.5 - (np.arange(after)[:, None] + 0.5) / scale
    x = np.abs(places * min(scale, 1))
    weights = np.maximum(1 - x, 0) if cubic is None else keys(x, cubic)
    means: npt.NDArray[np.float32] = (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)
    return means


def keys(x: npt.NDArray[np.float64], a: float) -> npt.NDArray[np.float64]:
    """Keys' cubic at the distances ``x`` of at least 0."""
    near = ((a + 2) * x - (a + 3)) * x**2 + 1
    return np.select([x < 1, x < 2], [near, a * (((x - 5) * x + 8) * x - 4)])


def _rewrite(model: ir.Model, node: ir.Node, weights: Weights) -> None:
    """Multiplies by each axis' weights: the last axis from behind, the one before it from the front."""
    result, value = node.outputs[0], node.inputs[0]
    assert value is not None
    assert value.shape is not None
    assert result.shape is not None
    made, shape = list[ir.Node](), list(value.shape)
    for axis in sorted(weights, reverse=True):
        name = f"{node.name or result.name}/{'width' if axis == _WIDTH else 'height'}"
        turned = weights[axis].T if axis == _WIDTH else weights[axis]
        stored = constant(model, f"{name}/weights", np.ascontiguousarray(turned))
        made.append(ir.node("MatMul", [value, stored] if axis == _WIDTH else [stored, value], name=name))
        shape[axis], dtype = result.shape[axis], value.dtype
        value = made[-1].outputs[0]
        value.name, value.dtype, value.shape = name, dtype, ir.Shape(shape)
    ir.convenience.replace_nodes_and_values(model.graph, node, [node], made, [result], [value])
