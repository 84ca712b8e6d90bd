"""Fills up the channels of an input to a multiple of four, with zeros that change no sum.

ONNX Runtime's integer convolution copies the patch under each output and multiplies four bytes at a time. A patch of
three channels ends within such a word, row for row: a 3×3 convolution of stride 1 over an RGB image takes 1.5 to 2.2
times as long as over four channels. A fourth channel that holds the zero point, and weights of zero for it, cost a
copy of the input's bytes:

    x'[c] = x[c], z for the channels that are new;    W'[o, c] = W[o, c], 0 for these.

No product changes. Left alone: layers behind the first, where channels lie side by side and filling them up takes
longer than it saves; fewer than 16 outputs, which gain less than the copy; pointwise and grouped convolutions; 16
channels and more; and a single channel under more than 3×3 taps, which would become four times the products. A file
grows by 2 % of its constants at most. Of stride 2, an image's first layer is rewritten by ``stem.py`` already.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from qtool.exporting.passes.biases import drop_unused
from qtool.exporting.passes.parts import MOST_GROWTH, constant, dequantized, integer_taps, room, zeros_of

WORD = 4
MAX_CHANNELS = 16
MAX_SINGLE_TAPS = 9
MIN_OUTPUTS = 16


def apply(model: ir.Model) -> int:
    """Rewrites in place; returns how many convolutions read more channels now."""
    left = room(model, MOST_GROWTH)
    changed = 0
    for node in list(model.graph):
        taps = _suitable(node)
        if taps is None:
            continue
        missing = -taps.shape[1] % WORD
        growth = taps.size // taps.shape[1] * missing
        if growth <= left:
            _rewrite(model, node, taps, missing)
            left -= growth
            changed += 1
    drop_unused(model)
    return changed


def _suitable(node: ir.Node) -> npt.NDArray[np.int8] | None:
    """The integer weight of a convolution that this rule applies to; None for any other."""
    taps = integer_taps(node)
    if taps is None or node.attributes.get_int("group", 1) != 1 or not _reads_an_input(node):
        return None
    num_taps = int(np.prod(taps.shape[2:]))
    few = taps.shape[1] < MAX_CHANNELS and (taps.shape[1] > 1 or num_taps <= MAX_SINGLE_TAPS)
    return taps if num_taps > 1 and few and taps.shape[1] % WORD and len(taps) >= MIN_OUTPUTS else None


def _reads_an_input(conv: ir.Node) -> bool:
    """Whether a convolution reads an input of the file, of known rank, with one zero point."""
    source = conv.inputs[0].producer() if conv.inputs[0] is not None else None
    integers = source.inputs[0] if source is not None else None
    if source is None or integers is None or integers.shape is None:
        return False
    zeros, image = zeros_of(source), _image(integers)
    return zeros is not None and not zeros.ndim and image is not None and image.is_graph_input()


def _image(value: ir.Value | None) -> ir.Value | None:
    """What integers are of, before it was shifted by stored numbers, quantized, and had a channel put to it."""
    for kind in ("Pad", "QuantizeLinear", "Add"):
        node = value.producer() if value is not None else None
        if node is not None and node.op_type == kind and all(other and other.const_value for other in node.inputs[1:]):
            value = node.inputs[0]
    return value


def _rewrite(model: ir.Model, node: ir.Node, taps: npt.NDArray[np.int8], missing: int) -> None:
    name = node.name or str(node.outputs[0].name)
    wide = np.pad(taps, [(0, 0), (0, missing)] + [(0, 0)] * (taps.ndim - 2))
    weight = node.inputs[1].producer() if node.inputs[1] is not None else None
    assert weight is not None
    stored = constant(model, f"{name}/weight/even", wide)
    dequantized(model, node, 1, [stored, *weight.inputs[1:]], f"{name}/weight/even/dequantized")
    source = node.inputs[0].producer() if node.inputs[0] is not None else None
    assert source is not None
    filled = _filled(model, source, missing, name)
    dequantized(model, node, 0, [filled, *source.inputs[1:]], f"{name}/input/even")


def _filled(model: ir.Model, source: ir.Node, missing: int, name: str) -> ir.Value:
    """The integers that a dequantizer reads with channels more, all of them its zero point."""
    integers, zeros = source.inputs[0], zeros_of(source)
    assert integers is not None
    assert integers.shape is not None
    assert zeros is not None
    batch, channels, *sizes = list(integers.shape)
    ends = [0] * (2 * len(integers.shape))
    ends[len(integers.shape) + 1] = missing
    dtype = np.int8 if integers.dtype == ir.DataType.INT8 else np.uint8
    amounts = constant(model, f"{name}/channels/amounts", np.array(ends, np.int64))
    origin = constant(model, f"{name}/channels/zero", zeros.astype(dtype))
    pad = ir.node("Pad", [integers, amounts, origin], name=f"{name}/channels")
    made = pad.outputs[0]
    made.name, made.dtype = f"{name}/channels", integers.dtype
    made.shape = ir.Shape([batch, int(str(channels)) + missing, *sizes])
    model.graph.insert_before(source, pad)
    return made
