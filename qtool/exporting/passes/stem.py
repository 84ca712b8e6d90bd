"""Rewrites a stride-2 convolution over few channels as a stride-1 convolution over 2×2 blocks of them.

A runtime that gathers patches channel by channel copies 3 bytes at a time for an image's first layer, and spends
more time on that than on the products. With ``n = 2(i + a) + r``, where r is the parity of a row or column,

    y[i] = Σ_u w[u] x[2i + u − p] = Σ_a Σ_r w[2a + r + p] x_r[i + a]

is a convolution of stride 1 over the four parity planes (SpaceToDepth), with ``a`` from ``⌊−p/2⌋`` to
``⌊(k − 1 − p)/2⌋`` and zeros where ``2a + r + p`` is no tap. The products and their sum are the same integers: the
output does not change. The copies become four times longer and, for 3×3, nine become four.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from qtool.exporting.passes.parts import integer_taps

MAX_CHANNELS = 4


def apply(model: ir.Model) -> int:
    """Rewrites in place; returns how many convolutions changed."""
    changed = 0
    for node in list(model.graph):
        if (taps := _suitable(node)) is not None:
            _rewrite(model, node, taps)
            changed += 1
    return changed


def _suitable(node: ir.Node) -> npt.NDArray[np.int8] | None:
    """The integer weight of a convolution that this rule applies to; None for any other."""
    taps = integer_taps(node)
    if taps is None:
        return None
    source, weight = (value.producer() if value is not None else None for value in node.inputs[:2])
    assert source is not None
    assert weight is not None
    stored = weight.inputs[0]
    if stored is None or len(stored.uses()) != 1 or len(weight.outputs[0].uses()) != 1:
        return None
    shape = source.outputs[0].shape
    even = shape is not None and len(shape) == 4 and all(isinstance(d, int) and d % 2 == 0 for d in list(shape)[2:])
    plain = _ints(node, "strides", [1, 1]) == [2, 2] and _ints(node, "dilations", [1, 1]) == [1, 1]
    ungrouped = (
        node.attributes.get_int("group", 1) == 1 and node.attributes.get_string("auto_pad", "NOTSET") == "NOTSET"
    )
    fits = taps.ndim == 4 and taps.shape[1] <= MAX_CHANNELS and min(taps.shape[2:]) > 1
    return taps if even and plain and ungrouped and fits and len(source.outputs[0].uses()) == 1 else None


def _ints(node: ir.Node, name: str, default: list[int]) -> list[int]:
    return list(node.attributes.get_ints(name, default))


def _rewrite(model: ir.Model, node: ir.Node, taps: npt.NDArray[np.int8]) -> None:
    source = node.inputs[0].producer() if node.inputs[0] is not None else None
    weight = node.inputs[1].producer() if node.inputs[1] is not None else None
    assert source is not None
    assert weight is not None
    pads = _ints(node, "pads", [0, 0, 0, 0])
    height, width = (int(str(d)) for d in list(source.outputs[0].shape or [])[2:])
    rows, columns = (_split(k, p) for k, p in zip(taps.shape[2:], pads[:2], strict=True))
    ends = [
        _pad_end(size, taps.shape[2 + axis], pads[axis], pads[axis + 2], part)
        for axis, (size, part) in enumerate(((height, rows), (width, columns)))
    ]
    node.attributes["strides"] = ir.AttrInt64s("strides", [1, 1])
    node.attributes["pads"] = ir.AttrInt64s("pads", [-rows[0], -columns[0], *ends])
    node.attributes["kernel_shape"] = ir.AttrInt64s(
        "kernel_shape", [rows[1] - rows[0] + 1, columns[1] - columns[0] + 1]
    )
    stored = weight.inputs[0]
    assert stored is not None
    stored.const_value = ir.tensor(_gathered(taps, pads, rows, columns), name=stored.name)
    stored.shape = weight.outputs[0].shape = ir.Shape(stored.const_value.shape)
    _insert_blocks(model, source, node.name or "stem")


def _split(kernel: int, pad: int) -> tuple[int, int]:
    """The least and the greatest ``a``."""
    return -pad // 2, (kernel - 1 - pad) // 2


def _pad_end(size: int, kernel: int, begin: int, end: int, part: tuple[int, int]) -> int:
    outputs = (size + begin + end - kernel) // 2 + 1
    return outputs - size // 2 + part[0] + (part[1] - part[0])


def _gathered(
    taps: npt.NDArray[np.int8], pads: list[int], rows: tuple[int, int], columns: tuple[int, int]
) -> npt.NDArray[np.int8]:
    """The taps by block: output × (row parity, column parity, channel) × a × a."""
    outputs, channels, height, width = taps.shape
    shape = (outputs, 2, 2, channels, rows[1] - rows[0] + 1, columns[1] - columns[0] + 1)
    result = np.zeros(shape, dtype=taps.dtype)
    for u in range(height):
        a, r = divmod(u - pads[0], 2)
        for v in range(width):
            b, s = divmod(v - pads[1], 2)
            result[:, r, s, :, a - rows[0], b - columns[0]] = taps[:, :, u, v]
    return result.reshape(outputs, 4 * channels, *shape[4:])


def _insert_blocks(model: ir.Model, dequantize: ir.Node, name: str) -> None:
    """Puts SpaceToDepth between the quantizer and the dequantizer, where it moves bytes."""
    before = dequantize.inputs[0]
    assert before is not None
    assert before.shape is not None
    batch, channels, height, width = list(before.shape)
    shape = ir.Shape([batch, 4 * int(str(channels)), int(str(height)) // 2, int(str(width)) // 2])
    blocks = ir.node("SpaceToDepth", [before], {"blocksize": 2}, name=f"{name}/blocks")
    blocks.outputs[0].name = blocks.name
    blocks.outputs[0].dtype, blocks.outputs[0].shape = before.dtype, shape
    model.graph.insert_before(dequantize, blocks)
    dequantize.replace_input_with(0, blocks.outputs[0])
    dequantize.outputs[0].shape = shape
