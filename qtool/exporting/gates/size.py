"""The size gate: the file's tensors take the bytes that the plan predicts.

The prediction is arithmetic over the quantized graph: each constant in the type it is stored in there, zero
points in a byte, the positions that an affine grid is computed from, and the weights of resizings that are products in
the file. Integers of 64 bits are positions and sizes, of which an exporter may need more: they do not count. A weight
that the exporter kept in float, or stored twice, shows at once. What the file spends on nodes and names is reported
beside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import Tensor
from torch.fx import Node

from qtool.exporting.gates.gate import Gate
from qtool.exporting.operators.plain_forms import AVERAGED
from qtool.form import QuantizedModel, unit_of
from qtool.form import quantized as quantized_ops
from qtool.nested import raw_bytes

TOLERANCE = 0.05
SMALL_BYTES = 4096
"""What the file may differ by in any case: shapes and positions that the exporter computes beforehand."""
RESIZED = (*AVERAGED, torch.ops.aten.upsample_bicubic2d.vec)
"""Resizings that a target's runtime may not have."""
SHARED_VALUES = 1024
"""Of the largest constant that the exporter compares with others, as it is stored."""


def predicted_bytes(quantized: QuantizedModel, shared_values: float = SHARED_VALUES) -> int:
    """Bytes of all constants of the quantized graph; zero points of weights as int8, of biases and rows as nothing.

    Constants of up to ``shared_values`` that are equal are stored once, as the exporter does: norms that were not
    trained, zero points; not so the scales of block products.
    Weights of four bits take half a byte; their zero points, which the file leaves out, are within the tolerance. The
    scales of a table are stored twice where a layer multiplies its integers too.
    """
    graph = quantized.graph
    tensors = dict(graph.named_parameters(remove_duplicate=True)) | dict(graph.named_buffers(remove_duplicate=True))
    packed = {str(node.args[0].target) for node in graph.graph.nodes if _is_int4(node)}
    bare = {str(node.args[2].target) for node in graph.graph.nodes if _is_grouped(node)}
    readers, found = _readers_of_scales(quantized), dict[Any, int]()
    blocks = {unit.name for unit in quantized.plan.units if unit.block}
    own = {name for name, units in readers.items() if units & blocks}
    for name, tensor in tensors.items():
        if name in bare:
            continue
        stored = _as_stored(name, tensor.detach())
        if stored is not None:
            shared = stored.numel() <= shared_values and name not in own
            key = bytes(raw_bytes(stored)) if shared else name
            size = stored.numel() * stored.element_size()
            found[stored.dtype, stored.shape, key] = (size + 1) // 2 if name in packed else size
    twice = sum(tensors[name].numel() * 4 for name in own if len(readers[name]) > 1)
    return sum(found.values()) + twice + _grid_bytes(quantized) + _resize_bytes(quantized)


def _grid_bytes(quantized: QuantizedModel) -> int:
    """What affine grids of fixed size store: each position (two or three coordinates and a 1) in float32."""
    found: dict[Any, int] = {}
    for node in quantized.graph.graph.nodes:
        if node.target is torch.ops.aten.affine_grid_generator.default:
            sizes = node.args[1][2:]
            if all(isinstance(size, int) for size in sizes):
                found[(*sizes, node.args[2])] = math.prod(sizes) * (len(sizes) + 1) * 4
    return sum(found.values())


def _resize_bytes(quantized: QuantizedModel) -> int:
    """What resizings that are products in the file store: float32 weights for each axis that they change."""
    found = 0
    for node in quantized.graph.graph.nodes:
        if node.target in RESIZED:
            axes = list(zip(_sizes(node.args[0]), _sizes(node), strict=True))
            known = all(isinstance(size, int) for axis in axes for size in axis)
            if known and _is_product(node.target, axes, quantized.plan.target):
                found += sum(4 * before * after for before, after in axes if after != before)
    return found


def _sizes(node: Any) -> torch.Size:
    """The last two sizes of a value, which quantizing leaves as they are."""
    while "val" not in node.meta:
        node = node.args[0]
    shape: torch.Size = node.meta["val"].shape[-2:]
    return shape


def _is_product(kind: Any, axes: Sequence[tuple[int, int]], target: str) -> bool:
    """Whether a resizing is one (:mod:`.passes.smooth_resizes`, :mod:`.passes.cubic_reductions`)."""
    smaller = any(after < before for before, after in axes)
    if kind in AVERAGED:
        return target == "openvino" and (smaller or kind is AVERAGED[1])
    return target != "openvino" and smaller


def _readers_of_scales(quantized: QuantizedModel) -> dict[str, set[str]]:
    """The units that read each tensor of scales of weights."""
    readers: dict[str, set[str]] = {}
    for node in quantized.graph.graph.nodes:
        if node.target is quantized_ops.dequantize_per_channel.default:
            readers.setdefault(str(node.args[1].target), set()).update(unit_of(user) for user in node.users)
    return readers


def _as_stored(name: str, tensor: Tensor) -> Tensor | None:
    """A constant as the file has it; None for zero points that it leaves out, and for positions."""
    if "zero_point" not in name:
        return None if tensor.dtype is torch.int64 else tensor
    return None if "bias" in name or "rows" in name else tensor.to(torch.int8)


def _is_int4(node: Node) -> bool:
    if node.target is not quantized_ops.dequantize_per_channel.default:
        return False
    qmin, qmax = (int(str(end)) for end in node.args[4:6])
    return qmin >= -8 and qmax <= 7


def _is_grouped(node: Node) -> bool:
    """Whether a node dequantizes groups, whose zero points are left out."""
    reshaped = any(user.target is torch.ops.aten.reshape.default for user in node.users)
    return node.target is quantized_ops.dequantize_per_channel.default and reshaped


def size(quantized: QuantizedModel, path: Path) -> Gate:
    """Compares the bytes of the file's tensors with the prediction."""
    model = onnx.load(str(path))
    stored = sum(_bytes(tensor) for tensor in model.graph.initializer)
    expected = predicted_bytes(quantized)
    allowance = max(TOLERANCE * expected, SMALL_BYTES)
    least = expected
    if stored < expected - allowance:  # equal weights of several layers, which are one in the file if both are turned
        least = predicted_bytes(quantized, math.inf)
    return Gate(
        "size", least - allowance <= stored <= expected + allowance,
        f"{expected} bytes of tensors, within {TOLERANCE:.0%}",
        f"{stored} bytes of tensors in a file of {path.stat().st_size}",
        "report this model: a weight is stored in another type",
        {"predicted_bytes": expected, "tensor_bytes": stored, "file_bytes": path.stat().st_size},
    )  # fmt: skip


def _bytes(tensor: onnx.TensorProto) -> int:
    if tensor.data_type == onnx.TensorProto.INT64:
        return 0
    array = onnx.numpy_helper.to_array(tensor)
    return (array.size + 1) // 2 if tensor.data_type == onnx.TensorProto.INT4 else int(array.nbytes)
