"""FP16 baselines: the float file with its weights and arithmetic in half precision, inputs and outputs kept.

Half precision reaches 65,504. What reads a constant beyond it stays in float32, save float32's own limits, which stand
for "no limit" in masks and become half's limits, and what else hides places from a softmax (``half_masks.py``). An
activation beyond it is looked for in the float graph on samples, and told: ONNX Runtime's CPU provider, which keeps in
float32 what lies between two operators, would not show it. Time steps and positions (``positions.py``) and sums of
squares and the like (``sums.py``) stay in float32. Whether the arithmetic is really done in half is the
runtime's affair: that provider mostly converts back to float32, so that FP16 is only storage there.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from qtool.errors import QtoolError
from qtool.evaluate import unlike
from qtool.exporting import onnx_file
from qtool.exporting.gates.gate import Gate
from qtool.exporting.gates.parity import feeds_of
from qtool.exporting.gates.simulation import interpret
from qtool.exporting.half_masks import LARGEST, LIMIT, HalfMasks, beyond_in
from qtool.exporting.passes import turned_batches
from qtool.exporting.reference.integer_reference import CONTROL_FLOW
from qtool.exporting.to_onnx import save
from qtool.graphs.captured import call_captured
from qtool.graphs.operators import packet_of
from qtool.graphs.positions import is_layer, is_product, lasting, positions
from qtool.graphs.sums import Kind, kind_of, reached, sums, wide_sums
from qtool.nested import tensors
from qtool.runtimes import open_session

LEAST = float(np.finfo(np.float16).smallest_subnormal)
_PACKAGE = "onnxruntime.transformers"
_ENDS = ("Sin", "Cos", "Tan")
_PRODUCTS = ("MatMul", "Gemm", "Einsum")
_SHAPES = ("Shape", "Size")
_EMPTY = (torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.new_empty)
"""What gives any values at all, which nothing is made of before they are filled."""
_FLOATS = (None, ir.DataType.FLOAT)
_SUMS = ("ReduceSum", "ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceLogSum", "ReduceLogSumExp", "CumSum")
_AVERAGES = ("ReduceMean", "GlobalAveragePool")
_POINTWISE = (
    "Add", "Sub", "Div", "Sqrt", "Reciprocal", "Clip", "Max", "Min", "Log", "Neg", "Abs", "Reshape", "Unsqueeze",
    "Squeeze", "Expand", "Identity", "Where",
)  # fmt: skip
_LAYERS = ("Conv", "ConvTranspose", "LSTM", "GRU", "RNN", "Attention")


def overflowing(model: ir.Model) -> dict[str, float]:
    """The float32 constants beyond half precision's range and their greatest value, infinities and limits aside."""
    found = {}
    for name, value in model.graph.initializers.items():
        if value.const_value is not None and value.const_value.dtype == ir.DataType.FLOAT:
            values = np.abs(value.const_value.numpy())
            if values.size and (peak := float(values.max(where=values < LIMIT, initial=0))) > LARGEST:
                found[name] = peak
    return found


def write_fp16(model: ir.Model, path: Path, extra: Mapping[str, str] | None = None) -> str:
    """Writes the half-precision twin of a float model, which it changes; or nothing, and returns why.

    ``extra`` goes into its metadata, beside what the model's own holds.
    """
    if branching := sorted({node.op_type for node in model.graph} & CONTROL_FLOW):
        return f"the converter does not reach into {' and '.join(branching)}"
    if turned := turned_batches.apply(model):
        return f"{', '.join(turned[:3])} multiply what was transposed, which ends ONNX Runtime's process on a CPU"
    _compute_constant_outputs(model)
    beyond = overflowing(model)
    weights = {
        name: value for name, value in onnx_file.large_initializers(model).items()
        if value.const_value.dtype == ir.DataType.FLOAT and name not in beyond
    }  # fmt: skip
    half = _converted(model, weights, beyond)
    for value in [value for value in half.graph.inputs if value.name in weights]:
        half.graph.inputs.remove(value)
        value.const_value = _in_half(weights[str(value.name)].const_value)
        half.graph.register_initializer(value)
    half.graph.sort()  # the converter puts its casts behind everything
    save(half, path, {**model.metadata_props, **(extra or {}), "qtool.variant": "fp16"})
    return ""


def _compute_constant_outputs(model: ir.Model) -> None:
    """Puts an operator before each output that is a constant: the converter gives the result of its cast that name."""
    for index, value in enumerate(list(model.graph.outputs)):
        if not value.is_initializer():
            continue
        node, name = ir.node("Identity", [value]), value.name
        made = node.outputs[0]
        made.shape, made.dtype = value.shape, value.dtype
        model.graph.append(node)
        model.graph.outputs[index] = made
        value.name = f"{name}/constant"
        made.name = name


def _converted(model: ir.Model, weights: Mapping[str, ir.Value], beyond: Collection[str]) -> ir.Model:
    """The model in half precision by ONNX Runtime's converter, which is told that ``weights`` are inputs.

    What reads constants ``beyond`` its range stays in float32.
    """
    path, known = list(sys.path), _PACKAGE in sys.modules
    from onnxruntime.transformers.float16 import convert_float_to_float16

    single = _single(model, beyond)

    sys.path[:] = path  # to which that package adds its own folder, and has to again for whoever imports it next
    if not known:
        sys.modules.pop(_PACKAGE, None)  # from the second time on the module alone is there
    with onnx_file.stand_ins(dict(weights)):
        proto = ir.serde.serialize_model(model)
    kept = [value.name for value in (*proto.graph.input, *proto.graph.output)]
    others = [tensor for tensor in proto.graph.initializer if tensor.name not in weights]
    del proto.graph.initializer[:]
    proto.graph.initializer.extend(others)
    for name, value in weights.items():
        shape = list(value.const_value.shape)
        proto.graph.input.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it tells of values below half's least, which become that
        converted = convert_float_to_float16(proto, keep_io_types=kept, node_block_list=single)
    _drop_repeats(converted.graph)
    _drop_roundings(converted.graph)
    _drop_constants_types(converted.graph)
    return ir.serde.deserialize_model(converted)


def _single(model: ir.Model, beyond: Collection[str]) -> list[str]:
    """The names of the nodes that are to stay in float32, which those get that have none."""

    def reads(node: ir.Node) -> list[ir.Node]:
        return [made for value in node.inputs if value and (made := value.producer())]

    def reads_floats(node: ir.Node) -> list[ir.Node]:
        return [one for one in reads(node) if one.outputs[0].dtype in _FLOATS]

    def is_product(node: ir.Node) -> bool:
        return node.op_type in _PRODUCTS

    def is_layer(node: ir.Node) -> bool:
        return node.op_type in _LAYERS or node.op_type.endswith("Normalization") or _looks_up(node)

    def end(node: ir.Node) -> int:
        return 2 if node.op_type in _ENDS else int(node.op_type == "Sub" or _gives_integers(node))

    def starts(node: ir.Node) -> bool:
        return any(value is not None and value.name in beyond for value in node.inputs)

    kept = lasting(model.graph, reads, end, is_product, is_layer)
    kept |= wide_sums(model.graph, reads_floats, _kind)
    kept |= reached(model.graph, reads_floats, starts, _kind, lambda node: is_product(node) or node.op_type in _LAYERS)
    for index, node in enumerate(kept):
        node.name = node.name or f"single_{index}"
    return [str(node.name) for node in kept]


def _kind(node: ir.Node) -> Kind:
    if node.outputs[0].dtype not in _FLOATS:
        return Kind.OTHER
    reduction = node.attributes.get("reduction")  # a scatter's
    if node.op_type in _SUMS or (reduction is not None and reduction.as_string() == "add"):
        return Kind.SUM
    if node.op_type in _AVERAGES:
        return Kind.AVERAGE
    if node.op_type in ("Pow", "Exp") or (node.op_type == "Mul" and node.inputs[0] is node.inputs[1]):
        return Kind.POWER
    return Kind.PRODUCT if node.op_type == "Mul" else Kind.POINTWISE if node.op_type in _POINTWISE else Kind.OTHER


def _looks_up(node: ir.Node) -> bool:
    """Whether a node is an embedding."""
    table = node.inputs[0] if node.op_type == "Gather" else None
    if table is None or not table.is_initializer():
        return False
    return table.dtype == ir.DataType.FLOAT and len(table.shape or ()) > 1


def _gives_integers(node: ir.Node) -> bool:
    """Whether a node makes integers or truth values of floats, and not of their shape."""
    reads = any(value is not None and value.dtype == ir.DataType.FLOAT for value in node.inputs)
    gives = [value.dtype for value in node.outputs]
    return reads and node.op_type not in _SHAPES and not {None, ir.DataType.FLOAT} & {*gives}


def _drop_repeats(graph: onnx.GraphProto) -> None:
    """Keeps one cast of each value: the converter writes it for every reader that has to have float32."""
    made: set[str] = set()
    for node in list(graph.node):
        if node.op_type == "Cast" and node.output[0] in made:
            graph.node.remove(node)
        made.update(node.output)


def _drop_roundings(graph: onnx.GraphProto) -> None:
    """Leaves in float32 what goes from one node that stays in it to another: the converter's casts would round it."""
    rounded = {
        node.output[0]: node.input[0] for node in graph.node
        if node.name.endswith("_cast_to_fp16_node") or node.name.startswith("graph_input_cast")
    }  # fmt: skip
    rounded |= {one.name: one.name for one in graph.initializer if one.data_type == onnx.TensorProto.FLOAT}
    back = {
        node.output[0]: rounded[node.input[0]] for node in graph.node
        if node.name.endswith("_cast_to_fp32_node") and node.input[0] in rounded
    }  # fmt: skip
    for node in graph.node:
        own = rounded if node.name.startswith("graph_output_cast") else back
        for index, name in enumerate(node.input):
            node.input[index] = own.get(name, name)
    for casts in (back, rounded):
        read = {name for node in graph.node for name in node.input} | {value.name for value in graph.output}
        for node in [node for node in graph.node if node.output[0] in casts and node.output[0] not in read]:
            graph.node.remove(node)


def _drop_constants_types(graph: onnx.GraphProto) -> None:
    """Leaves constants to tell their own types: the converter calls those half precision that it keeps in float32."""
    stored = {tensor.name for tensor in graph.initializer}
    kept = [value for value in graph.value_info if value.name not in stored]
    del graph.value_info[:]
    graph.value_info.extend(kept)


def _in_half(tensor: ir.TensorProtocol) -> ir.LazyTensor:
    """The tensor in half precision once it is asked for, with the converter's rules at both ends of the range."""

    def convert() -> ir.Tensor:
        values = tensor.numpy()
        with np.errstate(over="ignore"):
            made = values.astype(np.float16)
        made[np.isinf(made) & np.isfinite(values)] = LARGEST
        made[(made == LARGEST) & (values < 0)] = -LARGEST
        made[(made == 0) & (values != 0)] = LEAST
        made[(made == LEAST) & (values < 0)] = -LEAST
        return ir.Tensor(made, name=tensor.name)

    return ir.LazyTensor(convert, dtype=ir.DataType.FLOAT16, shape=tensor.shape, name=tensor.name)


class _Beyond(Interpreter):
    """Runs a float graph and keeps the greatest finite value beyond half precision's range of each node.

    Nodes that masks have ``hidden`` places in may have any value below it there, and what stays in float32 any at all.
    """

    def __init__(self, graph: GraphModule, hidden: Collection[str] = ()) -> None:
        super().__init__(graph)
        self.found: dict[str, float] = {}
        self.hidden = hidden
        self.single = positions(graph) | sums(graph) | _beyond(graph)

    def run_node(self, n: Node) -> Any:
        """Runs one node; infinities and float32's own limits, which masks are made of, do not count."""
        value = super().run_node(n)
        halved = n.op in ("placeholder", "call_function") and self._is_halved(n)
        if halved and isinstance(value, Tensor) and value.is_floating_point():
            low, high = torch.aminmax(value.detach()) if value.numel() else (value.new_zeros(()),) * 2
            if not (low >= -LARGEST and high <= LARGEST):
                size = value.relu() if n.name in self.hidden else value.abs()
                peak = float(size.masked_fill_(~(size < float(LIMIT) / 2), 0.0).max())
                if peak > LARGEST:
                    self.found[n.name] = max(peak, self.found.get(n.name, 0.0))
        return value

    def _is_halved(self, n: Node) -> bool:
        if packet_of(n) in _EMPTY:
            return False
        return n not in self.single or any(user not in self.single and user.op != "output" for user in n.users)


def _beyond(graph: GraphModule) -> set[Node]:
    """What stays in float32 in the file since it reads constants beyond half precision's range."""

    def starts(node: Node) -> bool:
        held = (one for one in node.all_input_nodes if one.op == "get_attr")
        return any(beyond_in(graph, one) for one in (node, *held))

    return reached(
        graph.graph.nodes, lambda node: node.all_input_nodes, lambda node: node.op == "call_function" and starts(node),
        kind_of, lambda node: node.op == "output" or is_product(node) or is_layer(node),
    )  # fmt: skip


def beyond_half(masks: HalfMasks, samples: Sequence[Any]) -> dict[str, float]:
    """The nodes of a float graph whose values half precision cannot hold on the samples, with the greatest of each."""
    watched = _Beyond(masks.graph, masks.hidden)
    for batch in samples:
        interpret(watched, batch)
    return watched.found


def answers(path: Path, graph: GraphModule, samples: Sequence[Any]) -> tuple[bool, str]:
    """Whether a half-precision file's outputs for the first batch are finite where ``graph``'s are, or why it fails."""
    model = onnx.load(str(path), load_external_data=False)
    try:
        session = open_session(path, threads=torch.get_num_threads())
        found = [out for batch in samples[:1] for out in session.run(feeds_of(model, batch))]
    except QtoolError as error:
        return False, f"it cannot be run: {error.got}"
    session.close()
    with torch.no_grad():
        wanted = [value.cpu() for batch in samples[:1] for value in tensors(call_captured(graph, batch))]
    pairs = zip(wanted, found, strict=True)
    return not any(unlike(want, torch.from_numpy(np.array(out))).any() for want, out in pairs), ""


def fp16_gate(masks: HalfMasks, samples: Sequence[Any], finite: bool, refused: str) -> Gate:
    """Whether the samples stay within half precision's range; reported, not required.

    They are looked for in the float graph with the masks that the file has; whether the file's outputs are ``finite``
    is known.
    """
    expected = f"weights and activations within ±{LARGEST:.0f}"
    if refused:
        return Gate("fp16 range", None, expected, f"no FP16 file: {refused}")
    beyond = beyond_half(masks, samples)
    if beyond:
        most = max(beyond, key=lambda name: beyond[name])
        found = f"activations overflow half precision where it is computed in: {most} reaches {beyond[most]:.3g}"
    else:
        found = "finite outputs" if finite else "infinite or NaN outputs: an activation overflows half precision"
    if masks.constants:
        told = ", ±".join(f"{value:.3g}" for value in masks.constants)
        found += f"; masks of ±{told} hide by ±{LARGEST:.0f}, which changes no output for the samples"
    if masks.refused:
        found += f"; masks beyond half precision are computed in float32: {masks.refused}"
    details = {"beyond": beyond, "masks": list(masks.constants)}
    return Gate("fp16 range", True if finite and not beyond else None, expected, found, details=details)
