"""A QDQ graph as its runtime reads it: which nodes become one integer operator, decided without asking the runtime.

ONNX Runtime rewrites *DequantizeLinear → operator → QuantizeLinear* groups by rules, and a group that misses one rule
runs in float32. The rules are stated here again, from the runtime's transformer sources:

* ``MatMul`` and the ``Add`` of a vector behind it become one ``Gemm`` where shapes are known (:func:`join_biases`);
* two quantise–dequantise pairs in a row become one pair over the overlap of both ranges (:func:`merge_double_pairs`);
* a quantiser behind a reshape, a transpose or a maximum pool moves in front of it (:func:`raise_quantizers`);
* int8 between a quantiser and its only dequantiser becomes uint8 (:func:`make_unsigned`);
* a ReLU or Clip in front of a quantiser that clamps at least as much is dropped (:func:`is_redundant`);
* then an operator joins the dequantisers before it and the quantiser behind it (:class:`Planner`) if every input is
  dequantised, nothing else reads its output, and the types fit; a ``Gemm`` or ``MatMul`` may do without a quantiser;
* a float32 bias of such an operator is rounded to int32 with the scale ``sx·sw``.

Left out on purpose: quantisers of the ``com.microsoft`` domain, 16-bit types, subgraphs, models of local functions.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import torch
from onnx import numpy_helper

from qtool.exporting.block_products import from_blocks
from qtool.exporting.reference.integer_arithmetic import Affine
from qtool.exporting.reference.integer_kernels import KERNELS
from qtool.exporting.reference.known_shapes import known_shapes

QUANTIZE, DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"
PROPAGATED = frozenset({"MaxPool", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Slice"})
MOVES = PROPAGATED | {"Expand", "Flatten", "Gather", "GatherElements", "Tile", "Split", "Identity"}
CLAMPS = frozenset({"Relu", "Clip"})
BYTES = frozenset({torch.uint8, torch.int8})


@dataclass
class Node:
    """One operator: an ONNX node with its attributes as Python values."""

    op: str
    name: str
    inputs: list[str]
    outputs: list[str]
    attributes: dict[str, Any] = field(default_factory=dict)
    domain: str = ""


@dataclass(frozen=True)
class Unit:
    """What is evaluated in one step: a node, with the dequantisers before it and the quantiser behind it if fused."""

    node: Node
    output: str
    fused: bool = False
    affine: Affine | None = None


def _array(tensor: onnx.TensorProto) -> npt.NDArray[Any]:
    """A constant as PyTorch knows it: four bits are handed on as sixteen, which no integer kernel takes either."""
    array = numpy_helper.to_array(tensor)
    return array.astype(np.int16) if tensor.data_type == onnx.TensorProto.INT4 else array


class Graph:
    """Nodes, constants, inputs and outputs of an ONNX model, with the questions the rules ask."""

    def __init__(self, model: onnx.ModelProto) -> None:
        graph = model.graph
        self.opsets = {entry.domain or "": entry.version for entry in model.opset_import}
        self.constants = {tensor.name: _array(tensor) for tensor in graph.initializer}
        self.inputs = [value.name for value in graph.input if value.name not in self.constants]
        self.outputs = [value.name for value in graph.output]
        self.shapes = known_shapes(model) if any(n.op_type == "MatMul" for n in graph.node) else {}
        self.nodes: list[Node] = []
        self.blocks: dict[str, int] = {}
        for index, proto in enumerate(graph.node):
            attributes = {a.name: read_attribute(a) for a in proto.attribute}
            if self._is_stored(proto) and (value := self._constant(proto, attributes)) is not None:
                self.constants[proto.output[0]] = value
                continue
            name = proto.name or f"{proto.op_type}_{index}"
            self.nodes.append(
                Node(proto.op_type, name, list(proto.input), list(proto.output), attributes, proto.domain)
            )

    def _is_stored(self, proto: onnx.NodeProto) -> bool:
        return all(name in self.constants for name in proto.input)

    def _constant(self, proto: onnx.NodeProto, attributes: dict[str, Any]) -> npt.NDArray[Any] | None:
        """What an operator makes of constants, where the runtime computes it as it opens the file and rules ask."""
        stored = [self.constants[name] for name in proto.input if name]
        if proto.op_type == "Cast" and attributes["to"] == onnx.TensorProto.INT8:
            return stored[0].astype(np.int8)
        if "block_size" in attributes:
            self.blocks[proto.output[0]] = attributes["block_size"]
            return from_blocks(stored, **attributes)
        if proto.op_type not in ("Constant", "ConstantOfShape"):
            return None
        value = np.asarray(next(iter(attributes.values()), np.zeros(1, np.float32)))
        return np.full(stored[0].tolist(), value[0]) if stored else value

    def link(self) -> None:
        """Work out again who produces and who reads what; call after a change to ``nodes``."""
        self.producers = {output: node for node in self.nodes for output in node.outputs if output}
        self.readers: dict[str, list[Node]] = defaultdict(list)
        for node in self.nodes:
            for name in node.inputs:
                self.readers[name].append(node)

    def only_reader(self, name: str) -> Node | None:
        """The one node that reads ``name``, if there is just one and the caller of the model does not read it too."""
        readers = self.readers[name]
        return readers[0] if len(readers) == 1 and name not in self.outputs else None

    def affine(self, node: Node) -> Affine | None:
        """The constant meaning that a quantiser or dequantiser gives; ``None`` where it is not constant."""
        names = node.inputs[1:]
        if any(name and name not in self.constants for name in names) or node.attributes.get("block_size"):
            return None
        scale = self.constants[names[0]].astype(np.float32)
        has_zero = len(names) > 1 and names[1]
        zero_point = self.constants[names[1]] if has_zero else np.zeros(scale.shape, self._type_without_zero(node))
        dtype = torch.from_numpy(zero_point.reshape(-1)[:1].copy()).dtype
        axis = int(node.attributes.get("axis", 1)) if scale.size > 1 else None
        zero = torch.tensor(zero_point.astype(np.int32))
        return Affine(torch.tensor(scale), zero if scale.size > 1 else zero.reshape(()), dtype, axis)

    def _type_without_zero(self, node: Node) -> np.dtype[Any]:
        value = self.constants.get(node.inputs[0]) if node.op == DEQUANTIZE else None
        return np.dtype(np.uint8) if value is None else value.dtype


def read_attribute(attribute: onnx.AttributeProto) -> Any:
    """An ONNX attribute as a Python value: text decoded, tensors as arrays, lists as lists."""
    value = onnx.helper.get_attribute_value(attribute)
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, onnx.TensorProto):
        return numpy_helper.to_array(value)
    return list(value) if attribute.type in LIST_TYPES else value


LIST_TYPES = (onnx.AttributeProto.INTS, onnx.AttributeProto.FLOATS, onnx.AttributeProto.STRINGS)


def join_biases(graph: Graph) -> None:
    """MatMul → Add of a vector, to Gemm: for matrices, and for stacked operands whose shape is wholly known."""
    graph.link()
    for product in [node for node in graph.nodes if node.op == "MatMul" and not node.domain]:
        addition = graph.only_reader(product.outputs[0])
        if addition is None or addition.op != "Add" or addition.inputs[0] == addition.inputs[1]:
            continue
        bias = addition.inputs[1 if addition.inputs[0] == product.outputs[0] else 0]
        left, right, added = (graph.shapes.get(name) for name in (*product.inputs, bias))
        if left is None or right is None or len(right) != 2 or right[1] is None or added is None:
            continue
        if added != [right[1]] and not (len(left) == 2 and added == [1, right[1]]):
            continue
        if len(left) != 2 and None in left:
            continue
        joined = Node("Gemm", product.name, [*product.inputs, bias], addition.outputs)
        graph.nodes[graph.nodes.index(addition)] = joined
        graph.nodes.remove(product)
        graph.link()


def merge_double_pairs(graph: Graph) -> None:
    """Q → DQ → Q → DQ, each read by the next alone, to Q → DQ over the overlap of the two ranges."""
    graph.link()
    for second in [node for node in graph.nodes if node.op == DEQUANTIZE]:
        first, third = graph.producers.get(second.inputs[0]), graph.only_reader(second.outputs[0])
        last = graph.only_reader(third.outputs[0]) if third is not None and third.op == QUANTIZE else None
        if first is None or first.op != QUANTIZE or last is None or last.op != DEQUANTIZE:
            continue
        if third is None or graph.only_reader(first.outputs[0]) is not second:
            continue
        pairs = [graph.affine(node) for node in (first, second, third, last)]
        if any(a is None or a.scale.numel() > 1 for a in pairs) or not _pairs_agree(pairs):
            continue
        inner, outer = pairs[1], pairs[2]
        assert inner is not None
        assert outer is not None
        if inner.dtype not in BYTES or inner.dtype != outer.dtype:
            continue
        if not inner.same_as(outer):
            _set_affine(graph, first, last, *overlap(inner, outer))
        last.inputs[0] = first.outputs[0]
        graph.nodes = [node for node in graph.nodes if node is not second and node is not third]
        graph.link()


def _pairs_agree(pairs: list[Affine | None]) -> bool:
    first, second, third, last = (a for a in pairs if a is not None)
    return first.same_as(second) and third.same_as(last)


def overlap(first: Affine, second: Affine) -> tuple[np.float32, int]:
    """Scale and zero point of the range that both cover, in float32 as the runtime computes them."""
    low, high = first.low, first.high
    ends = [
        [np.float32(end - int(a.zero_point)) * np.float32(a.scale.item()) for end in (low, high)]
        for a in (first, second)
    ]
    bottom, top = max(ends[0][0], ends[1][0]), min(ends[0][1], ends[1][1])
    scale = np.float32((top - bottom) / np.float32(high - low))
    exact = np.float32(np.float32(low) - bottom / scale)
    return scale, int(np.copysign(np.floor(np.abs(exact) + np.float32(0.5)), exact))


def _set_affine(graph: Graph, first: Node, last: Node, scale: np.float32, zero_point: int) -> None:
    dtype = graph.constants[first.inputs[2]].dtype
    for node in (first, last):
        node.inputs[1:] = [f"{first.name}.merged.scale", f"{first.name}.merged.zero_point"]
    graph.constants[first.inputs[1]] = np.asarray(scale)
    graph.constants[first.inputs[2]] = np.asarray(zero_point, dtype)


def raise_quantizers(graph: Graph) -> None:
    """operator → move → Q to operator → Q → move: the quantiser joins the operator, the move handles integers."""
    graph.link()
    for quantizer in [node for node in graph.nodes if node.op == QUANTIZE]:
        affine = graph.affine(quantizer)
        move = graph.producers.get(quantizer.inputs[0])
        while affine is not None and affine.scale.numel() == 1 and move is not None and move.op in PROPAGATED:
            above = graph.producers.get(move.inputs[0])
            if graph.only_reader(move.outputs[0]) is not quantizer or above is None or above.op == DEQUANTIZE:
                break
            if graph.only_reader(move.inputs[0]) is not move:
                break
            source, middle, output = move.inputs[0], f"{move.name}.raised", quantizer.outputs[0]
            quantizer.inputs[0], quantizer.outputs[0] = source, middle
            move.inputs[0], move.outputs[0] = middle, output
            i, j = graph.nodes.index(move), graph.nodes.index(quantizer)
            graph.nodes.insert(i, graph.nodes.pop(j))
            graph.link()
            move = above


def make_unsigned(graph: Graph) -> None:
    """Q → DQ of int8, read once, to uint8 with everything 128 higher: the type the x86 kernels are for."""
    graph.link()
    for quantizer in [node for node in graph.nodes if node.op == QUANTIZE and len(node.inputs) > 2]:
        back = graph.only_reader(quantizer.outputs[0])
        if back is None or back.op != DEQUANTIZE or len(graph.readers[back.outputs[0]]) > 1:
            continue
        first, second = graph.affine(quantizer), graph.affine(back)
        if first is None or second is None or first.dtype != torch.int8 or first.scale.numel() > 1:
            continue
        if not torch.equal(first.zero_point, second.zero_point):
            continue
        name = f"{quantizer.name}.unsigned"
        graph.constants[name] = np.asarray(int(first.zero_point) + 128, np.uint8)
        quantizer.inputs[2] = back.inputs[2] = name


def is_redundant(graph: Graph, clamp: Node, affine: Affine) -> bool:
    """Whether quantising with ``affine`` clamps at least as much as this Relu or Clip does."""
    if affine.scale.numel() != 1 or affine.dtype not in BYTES:
        return False
    zero_point, scale = int(affine.zero_point), np.float32(affine.scale.item())
    if clamp.op == "Relu":
        return zero_point == affine.low
    limits = clip_limits(graph, clamp)
    if limits is None:
        return False
    low, high = (float(np.clip(np.rint(np.float32(end) / scale), -(2.0**31), 2.0**31)) + zero_point for end in limits)
    return low <= affine.low and high >= affine.high


def clip_limits(graph: Graph, clamp: Node) -> tuple[float, float] | None:
    """The constant limits of a Clip (attributes before opset 11, inputs since), or ``None``."""
    limits = [float(clamp.attributes.get("min", -np.inf)), float(clamp.attributes.get("max", np.inf))]
    for i, name in enumerate(clamp.inputs[1:3]):
        if name and name not in graph.constants:
            return None
        if name:
            limits[i] = float(graph.constants[name])
    return limits[0], limits[1]


class Planner:
    """Turns a graph into units in order of evaluation."""

    def __init__(self, graph: Graph) -> None:
        merge_double_pairs(graph)
        join_biases(graph)
        raise_quantizers(graph)
        make_unsigned(graph)
        self.graph = graph

    def plan(self) -> list[Unit]:
        """Every node of the graph once: inside a fused unit, or as a unit of its own."""
        swallowed: set[str] = set()
        fused: dict[str, Unit] = {}
        for node in self.graph.nodes:
            found = self.group(node) if node.op in KERNELS and not node.domain else None
            if found is not None:
                unit, absorbed = found
                fused[node.outputs[0]] = unit
                swallowed.update(absorbed)
        return [
            fused.get(node.outputs[0], Unit(node, node.outputs[0]))
            for node in self.graph.nodes
            if node.outputs[0] not in swallowed
        ]

    def group(self, node: Node) -> tuple[Unit, list[str]] | None:
        """The fused unit around ``node`` and the outputs of the nodes it takes in; ``None`` if a rule fails."""
        if len(node.outputs) > 1:
            return None
        inputs = [self.meaning(name) for name in node.inputs if name]
        reader = self.graph.only_reader(node.outputs[0])
        clamp = reader if reader is not None and reader.op in CLAMPS and self._single(reader) else None
        last = clamp or node
        quantizer = self.graph.only_reader(last.outputs[0])
        if quantizer is not None and quantizer.op == QUANTIZE:
            affine = self.graph.affine(quantizer)
            if affine is None or (clamp is not None and not is_redundant(self.graph, clamp, affine)):
                return None
            if not self.fits(node, inputs, affine):
                return None
            self._quantize_bias(node, inputs)
            absorbed = [quantizer.outputs[0], *([clamp.outputs[0]] if clamp else [])]
            return Unit(node, quantizer.outputs[0], True, affine), absorbed
        if clamp is not None or any(r.op == QUANTIZE for r in self.graph.readers[node.outputs[0]]):
            return None
        if node.op in ("Gemm", "MatMul") and self.fits(node, inputs, None):
            return Unit(node, node.outputs[0], True), []
        return None

    def _single(self, clamp: Node) -> bool:
        return self.graph.only_reader(clamp.outputs[0]) is not None

    def meaning(self, name: str) -> Affine | None:
        """What the integers behind ``name`` mean, if a dequantiser (or a move behind one) produces it."""
        node, moved = self.graph.producers.get(name), False
        while node is not None and node.op in PROPAGATED:
            node, moved = self.graph.producers.get(node.inputs[0]), True
        affine = self.graph.affine(node) if node is not None and node.op == DEQUANTIZE else None
        return None if affine is not None and moved and affine.axis is not None else affine

    def fits(self, node: Node, inputs: list[Affine | None], output: Affine | None) -> bool:
        """The runtime's conditions on types and granularity for this operator."""
        first = inputs[0]
        if first is None or first.dtype not in BYTES or first.scale.numel() != 1:
            return False
        if output is not None and (output.scale.numel() != 1 or output.dtype != first.dtype):
            return False
        if node.op in ("Conv", "Gemm", "MatMul"):
            return self._weighted(node, first, inputs[1:], output)
        if node.op == "MaxPool":
            return output is not None and first.same_as(output)
        alike = [a is not None and a.dtype == first.dtype and a.scale.numel() == 1 for a in inputs]
        return all(alike)

    def _quantize_bias(self, node: Node, inputs: list[Affine | None]) -> None:
        if node.op not in ("Conv", "Gemm") or len(inputs) < 3 or inputs[2] is not None:
            return
        x, w = inputs[0], inputs[1]
        assert x is not None
        assert w is not None
        exact = self.graph.constants[node.inputs[2]] / (x.scale * w.scale).numpy()
        node.inputs[2] = f"{node.name}.bias"
        self.graph.constants[node.inputs[2]] = np.rint(exact).astype(np.int32)

    def _weighted(self, node: Node, first: Affine, rest: list[Affine | None], output: Affine | None) -> bool:
        weight, biases = rest[0], rest[1:]
        if weight is None or weight.dtype not in BYTES:
            return False
        if first.dtype == torch.int8 and (node.op != "Gemm" or weight.dtype != torch.int8):
            return False
        if not biases:
            return True
        if node.op == "Gemm" and any(node.attributes.get(name, 1.0) != 1.0 for name in ("alpha", "beta")):
            return False
        if biases[0] is None:
            constant = self.graph.constants.get(node.inputs[2])
            return output is not None and constant is not None and constant.ndim == 1
        return biases[0].dtype == torch.int32
