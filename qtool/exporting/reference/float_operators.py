"""Operators that stay in float32 in a quantised graph, and the ones that only move numbers.

``EXACT`` holds operators whose float32 result leaves no choice: one correctly rounded operation per element, or a
fixed sequence that the runtime's kernel follows too (sigmoid's polynomial, tanh's, ``alpha·x + beta`` of HardSigmoid).
They equal ONNX Runtime's CPU provider bit for bit. ``APPROXIMATE`` sum in an order of PyTorch's own, and everything
else goes to ONNX's reference operators: the same numbers up to rounding.

Each function takes ``(attributes, *inputs)`` with tensors, ``None`` for an input left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import torch
import torch.nn.functional as F
from onnx.reference import ReferenceEvaluator
from torch import Tensor

from qtool.errors import QtoolError
from qtool.exporting.reference.integer_kernels import (
    largest_in_windows,
    leaky_relu,
    padding,
    places_of_largest,
    required,
    spatial,
    window_means,
)
from qtool.graphs.polynomials import logistic, tanh

Attributes = Mapping[str, Any]
Operator = Callable[..., Tensor | tuple[Tensor, ...]]


def hard_sigmoid(attributes: Attributes, x: Tensor) -> Tensor:
    """``alpha·x + beta`` within [0, 1]: a product, then a sum."""
    alpha = torch.tensor(attributes.get("alpha", 0.2), dtype=torch.float32)
    beta = torch.tensor(attributes.get("beta", 0.5), dtype=torch.float32)
    return (x * alpha.to(x.device) + beta.to(x.device)).clamp(0.0, 1.0)


def hard_swish(attributes: Attributes, x: Tensor) -> Tensor:
    """``x`` times its HardSigmoid with slope 1/6, as the operator's own definition has it."""
    return x * hard_sigmoid({"alpha": 1.0 / 6.0, "beta": 0.5}, x)


def conv(attributes: Attributes, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Convolution in float32."""
    kernel = weight.shape[2:]
    strides, dilations = spatial(attributes, "strides", len(kernel)), spatial(attributes, "dilations", len(kernel))
    pads = padding(attributes, x.shape[2:], kernel, strides, dilations)
    x = F.pad(x, [p for i in reversed(range(len(kernel))) for p in (pads[i], pads[i + len(kernel)])])
    function = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[len(kernel)]
    result: Tensor = function(x, weight, bias, strides, 0, dilations, int(attributes.get("group", 1)))
    return result


def conv_transpose(attributes: Attributes, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Transposed convolution in float32: the whole of it, less the padding at both ends of each axis."""
    axes = weight.ndim - 2
    if attributes.get("output_shape") or attributes.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        raise QtoolError("ConvTranspose", "padding given as numbers", "an output_shape or auto_pad", "give its pads")
    strides, dilations = spatial(attributes, "strides", axes), spatial(attributes, "dilations", axes)
    added = list(attributes.get("output_padding") or [0] * axes)
    pads = list(attributes.get("pads") or [0] * 2 * axes)
    function = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}[axes]
    whole: Tensor = function(x, weight, bias, strides, 0, added, int(attributes.get("group", 1)), dilations)
    for axis, (begin, end) in enumerate(zip(pads[:axes], pads[axes:], strict=True)):
        whole = whole.narrow(axis + 2, begin, whole.shape[axis + 2] - begin - end)
    return whole


def gemm(attributes: Attributes, a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    """``alpha·A·B + beta·C`` in float32."""
    a = a.T if attributes.get("transA", 0) else a
    b = b.T if attributes.get("transB", 0) else b
    product = (a @ b) * float(attributes.get("alpha", 1.0))
    return product if c is None else product + c * float(attributes.get("beta", 1.0))


def reshape(attributes: Attributes, x: Tensor, shape: Tensor) -> Tensor:
    """The same numbers under another shape; 0 keeps a dimension unless ``allowzero``."""
    sizes = [int(n) for n in shape]
    if not attributes.get("allowzero", 0):
        sizes = [x.shape[i] if n == 0 else n for i, n in enumerate(sizes)]
    return x.reshape(sizes)


def flatten(attributes: Attributes, x: Tensor) -> Tensor:
    """Two dimensions: everything before ``axis``, everything from it on."""
    axis = int(attributes.get("axis", 1)) % (x.ndim + 1)
    return x.reshape(math.prod(x.shape[:axis]), -1)


def transpose(attributes: Attributes, x: Tensor) -> Tensor:
    """Axes in the order of ``perm``, reversed where there is none."""
    return x.permute(*(attributes.get("perm") or reversed(range(x.ndim)))).contiguous()


def resize_nearest(attributes: Attributes, x: Tensor, *rest: Any) -> Tensor:
    """Every output the input at the nearest coordinate, worked out in float32 axis by axis."""
    scales, sizes = (rest[i] if len(rest) > i else None for i in (1, 2))
    for axis in range(x.ndim):
        old = x.shape[axis]
        if sizes is not None and sizes.numel():
            new = int(sizes[axis])
            scale = np.float32(new) / np.float32(old)
        else:
            scale = np.float32(required(scales)[axis])
            new = math.floor(old * scale)
        if new != old:
            x = x.index_select(axis, torch.from_numpy(nearest_index(attributes, old, new, scale)).to(x.device))
    return x


def nearest_index(attributes: Attributes, old: int, new: int, scale: np.float32) -> npt.NDArray[np.int64]:
    """For every index along an axis of length ``new``, the index in one of length ``old``."""
    mode = attributes.get("coordinate_transformation_mode", "half_pixel")
    at, half = np.arange(new, dtype=np.float32), np.float32(0.5)
    if mode == "align_corners":
        at = at * np.float32(old - 1) / np.float32(new - 1) if new > 1 else at * 0
    elif mode == "asymmetric":
        at = at / scale
    elif mode == "half_pixel" or (mode == "pytorch_half_pixel" and new > 1):
        at = (at + half) / scale - half
    else:
        at = at * 0
    rounding = attributes.get("nearest_mode", "round_prefer_floor")
    if rounding.startswith("round"):
        at = np.ceil(at - half) if rounding == "round_prefer_floor" else np.floor(at + half)
    index: npt.NDArray[np.int64] = (np.ceil(at) if rounding == "ceil" else np.floor(at)).astype(np.int64)
    return index.clip(0, old - 1)


def space_to_depth(attributes: Attributes, x: Tensor) -> Tensor:
    """Blocks of b×b pixels as channels, the place within the block first: N×C×H×W to N×b²C×H/b×W/b."""
    b = int(attributes["blocksize"])
    n, c, h, w = x.shape
    return x.reshape(n, c, h // b, b, w // b, b).permute(0, 3, 5, 1, 2, 4).reshape(n, b * b * c, h // b, w // b)


def grid_sample(attributes: Attributes, x: Tensor, grid: Tensor) -> Tensor:
    """Values between pixels; onnx's reference goes from number to number, a minute for those of a small detector."""
    mode = str(attributes.get("mode", "linear"))
    mode = {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode)  # as opset 16 has it, and torch
    aligned = bool(attributes.get("align_corners", 0))
    return F.grid_sample(x, grid, mode, str(attributes.get("padding_mode", "zeros")), aligned)


def rnn(
    attributes: Attributes, x: Tensor, weight: Tensor, recurrent: Tensor, bias: Tensor | None = None,
    lengths: Tensor | None = None, states: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """A plain recurrent layer as qtool writes it; onnx's reference knows no other activation than tanh."""
    directions, hidden = recurrent.shape[:2]
    parts = [weight, recurrent] + ([] if bias is None else list(bias.chunk(2, 1)))
    params = [part[way] for way in range(directions) for part in parts]
    layer = torch.rnn_relu if "Relu" in attributes.get("activations", ()) else torch.rnn_tanh
    begun = x.new_zeros(directions, x.shape[1], hidden) if states is None else states
    given, last = layer(x, begun, params, bias is not None, 1, 0.0, False, directions == 2, False)
    return given.reshape(*x.shape[:2], directions, hidden).transpose(1, 2), last


def moves_only(op: str, attributes: Attributes) -> bool:
    """Whether an operator copies numbers without computing new ones (a Resize by nearest neighbours does)."""
    if op != "Resize":
        return op in WHOLE or op in MOVERS
    usual = {"half_pixel", "asymmetric", "pytorch_half_pixel", "align_corners"}
    mode = attributes.get("coordinate_transformation_mode", "half_pixel")
    plain = not attributes.get("axes") and attributes.get("keep_aspect_ratio_policy", "stretch") == "stretch"
    return attributes.get("mode", "nearest") == "nearest" and mode in usual and plain


def _cropped(x: Tensor, amounts: Tensor, *rest: Tensor | None) -> list[Tensor | None]:
    """The inputs of a Pad, what amounts below zero cut off cut off already: onnx's reference knows no such amounts."""
    axes = rest[1].tolist() if len(rest) > 1 and rest[1] is not None else range(x.ndim)
    for axis, begin, end in zip(axes, *(-amounts.clamp_max(0)).reshape(2, -1).tolist(), strict=True):
        x = x.narrow(axis, begin, x.shape[axis] - begin - end)
    return [x, amounts.clamp_min(0), *rest]


def gather_elements(attributes: Attributes, x: Tensor, indices: Tensor) -> Tensor:
    """The element of ``x`` at each index along ``axis``; onnx's reference fails where they are fewer."""
    axis = int(attributes.get("axis", 0))
    return x.gather(axis, torch.where(indices < 0, indices + x.shape[axis], indices).long())


MOVERS: dict[str, Operator] = {
    "Flatten": flatten,
    "GatherElements": gather_elements,
    "Identity": lambda attributes, x: x,
    "MaxPool": lambda attributes, x: largest_in_windows(x, attributes),
    "Reshape": reshape,
    "SpaceToDepth": space_to_depth,
    "Transpose": transpose,
}
EXACT: dict[str, Operator] = {
    "Abs": lambda attributes, x: x.abs(),
    "Add": lambda attributes, x, y: x + y,
    "Div": lambda attributes, x, y: x / y,
    "HardSigmoid": hard_sigmoid,
    "HardSwish": hard_swish,
    "LeakyRelu": lambda attributes, x: leaky_relu(x, attributes),
    "Mul": lambda attributes, x, y: x * y,
    "Neg": lambda attributes, x: -x,
    "Relu": lambda attributes, x: x.clamp_min(0.0),
    "Sigmoid": lambda attributes, x: logistic(x),
    "Sub": lambda attributes, x, y: x - y,
    "Tanh": lambda attributes, x: tanh(x),
}
APPROXIMATE: dict[str, Operator] = {
    "AveragePool": lambda attributes, x: window_means(x, attributes),
    "Conv": conv,
    "ConvTranspose": conv_transpose,
    "Gemm": gemm,
    "GridSample": grid_sample,
    "MatMul": lambda attributes, a, b: a @ b,
    "RNN": rnn,
}
"""Float32 sums, in PyTorch's order."""

WHOLE = frozenset(
    {"ArgMax", "Cast", "Concat", "ConstantOfShape", "Pad", "ReduceMax", "ReduceMin", "Shape", "Size", "Where"}
)
"""Operators that round nothing, whoever evaluates them."""


FLOATS = {
    onnx.TensorProto.FLOAT: torch.float32, onnx.TensorProto.DOUBLE: torch.float64,
    onnx.TensorProto.FLOAT16: torch.float16, onnx.TensorProto.BFLOAT16: torch.bfloat16,
}  # fmt: skip
"""What any number is converted to here: numpy, which the reference operators give, has no bfloat16."""


def evaluate(
    op: str, attributes: Attributes, inputs: Sequence[Tensor | None], *, outputs: int, opsets: Mapping[str, int]
) -> list[Tensor]:
    """The outputs of one operator, by this module where it has it, otherwise by ONNX's reference operator.

    That has also the float average of windows beyond a counted padding, which count otherwise than in integers.
    """
    present = [x for x in inputs if x is not None]
    own: Operator | None = resize_nearest if op == "Resize" and moves_only(op, attributes) else MOVERS.get(op)
    beyond = op == "AveragePool" and attributes.get("ceil_mode", 0) and attributes.get("count_include_pad", 0)
    if own is None and not beyond and all(x.dtype == torch.float32 for x in present):
        own = EXACT.get(op) or APPROXIMATE.get(op)
    if own is not None:
        made = own(attributes, *inputs)
        results = [made] if isinstance(made, Tensor) else list(made)
        return [*results, places_of_largest(present[0], attributes)] if outputs > len(results) else results
    if op == "Cast" and attributes["to"] in FLOATS:
        return [present[0].to(FLOATS[attributes["to"]])]
    if op == "Pad":
        inputs = _cropped(*inputs)  # type: ignore[arg-type]
    return by_reference(op, attributes, inputs, outputs=outputs, opsets=opsets)


def by_reference(
    op: str, attributes: Attributes, inputs: Sequence[Tensor | None], *, outputs: int, opsets: Mapping[str, int]
) -> list[Tensor]:
    """One operator through :class:`onnx.reference.ReferenceEvaluator`."""
    arrays = [None if x is None else x.cpu().numpy() for x in inputs]
    names = ["" if x is None else f"x{i}" for i, x in enumerate(arrays)]
    results = [f"y{i}" for i in range(outputs)]
    typed = [
        onnx.helper.make_tensor_value_info(n, onnx.helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
        for n, x in zip(names, arrays, strict=True)
        if x is not None
    ]
    given = {key: onnx.numpy_helper.from_array(a) if isinstance(a, np.ndarray) else a for key, a in attributes.items()}
    node = onnx.helper.make_node(op, names, results, **given)
    graph = onnx.helper.make_graph([node], op, typed, [onnx.ValueInfoProto(name=name) for name in results])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid(d, v) for d, v in opsets.items()])
    feeds = {n: x for n, x in zip(names, arrays, strict=True) if x is not None}
    return [torch.from_numpy(np.array(y)) for y in ReferenceEvaluator(model).run(None, feeds)]
