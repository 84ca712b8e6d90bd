"""Small QDQ models, built node by node and run by ONNX Runtime: what the integer reference is held against."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

Array = np.ndarray[Any, Any]


def has(*flags: str) -> bool:
    """Whether this CPU has one of these features."""
    info = Path("/proc/cpuinfo")
    return info.exists() and any(flag in info.read_text().split() for flag in flags)


VNNI = ("avx512_vnni", "avx_vnni")
needs_x86 = pytest.mark.skipif(not has("avx2", *VNNI), reason="bit equality is promised for x86 CPUs")
needs_vnni = pytest.mark.skipif(not has(*VNNI), reason="no option makes this library add products in 32 bits here")


def options() -> ort.SessionOptions:
    """Those of a session on one thread, in which no product of bytes saturates."""
    made = ort.SessionOptions()
    made.intra_op_num_threads = 1
    made.log_severity_level = 3
    if not has(*VNNI):
        made.add_session_config_entry("session.x64quantprecision", "1")
    return made


class Builder:
    """Writes a graph of operators; every method returns the name of what it adds."""

    def __init__(self, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.scales: Array = np.ones(1, np.float32)

    def constant(self, value: Any, dtype: Any = None) -> str:
        """An initialiser."""
        name = f"c{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def input(self, name: str, shape: list[int | str | None], dtype: int = TensorProto.FLOAT) -> str:
        """An input of the model."""
        self.inputs.append(helper.make_tensor_value_info(name, dtype, shape))
        return name

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """One operator with one output."""
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], f"{kind}_{len(self.nodes)}", **attributes))
        return name

    def quantize(self, x: str, scale: float, zero_point: int, dtype: Any = np.uint8) -> str:
        """A quantiser alone."""
        return self.op("QuantizeLinear", x, self.constant(scale, np.float32), self.constant(zero_point, dtype))

    def dequantize(self, x: str, scale: float, zero_point: int, dtype: Any = np.uint8) -> str:
        """A dequantiser alone."""
        return self.op("DequantizeLinear", x, self.constant(scale, np.float32), self.constant(zero_point, dtype))

    def pair(self, x: str, scale: float, zero_point: int, dtype: Any = np.uint8) -> str:
        """A quantiser and its dequantiser."""
        return self.dequantize(self.quantize(x, scale, zero_point, dtype), scale, zero_point, dtype)

    def weight(self, *shape: int, axis: int = 0) -> str:
        """Random int8 weights behind a dequantiser with one scale per index of ``axis``."""
        self.scales = self.random.uniform(0.002, 0.02, shape[axis]).astype(np.float32)
        values = self.random.integers(-127, 128, shape, dtype=np.int8)
        zeros = self.constant(np.zeros(shape[axis], np.int8))
        return self.op("DequantizeLinear", self.constant(values), self.constant(self.scales), zeros, axis=axis)

    def bias(self, scale: float) -> str:
        """A random int32 bias for the latest weights and an input with ``scale``."""
        values = self.random.integers(-20000, 20000, self.scales.size).astype(np.int32)
        scales = np.float32(scale) * self.scales
        return self.op("DequantizeLinear", self.constant(values), self.constant(scales), axis=0)

    def model(self, *outputs: str, opset: int = 21) -> onnx.ModelProto:
        """The finished model."""
        values = [onnx.ValueInfoProto(name=name) for name in outputs]
        graph = helper.make_graph(self.nodes, "qdq", self.inputs, values, self.weights)
        inferred = onnx.shape_inference.infer_shapes(
            helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
        )
        known = {v.name: v for v in inferred.graph.value_info}
        for value in inferred.graph.output:
            if not value.type.WhichOneof("value"):
                value.CopyFrom(known[value.name])
        return inferred


def run(model: onnx.ModelProto, feeds: dict[str, Array], folder: Path) -> tuple[list[Array], list[str]]:
    """ONNX Runtime's outputs, fully optimised on one thread, and the operators of its optimised graph."""
    path = folder / "optimised.onnx"
    told = options()
    told.optimized_model_filepath = str(path)
    session = ort.InferenceSession(model.SerializeToString(), told, providers=["CPUExecutionProvider"])
    return session.run(None, feeds), [node.op_type for node in onnx.load(path).graph.node]


def rewritten_by(apply: Callable[[ir.Model], int], model: onnx.ModelProto) -> tuple[int, onnx.ModelProto]:
    """What a pass returns for a file, and the file that it makes of it."""
    rewritten = ir.serde.deserialize_model(model)
    return apply(rewritten), ir.serde.serialize_model(rewritten)


def first_layer(channels, kernel, pads, size, stride=2, seed=0, outputs=5):
    """A quantizer, a convolution with int8 weights and int32 bias, a quantizer, and the way back to float."""
    rng = np.random.default_rng(seed)
    weight = rng.integers(-127, 128, (outputs, channels, *kernel), dtype=np.int8)
    constants = {
        "xs": np.float32(0.03), "xz": np.uint8(117), "w": weight, "ws": np.full(outputs, 0.01, np.float32),
        "b": rng.integers(-500, 500, outputs).astype(np.int32), "bs": np.full(outputs, 0.0003, np.float32),
        "ys": np.float32(0.2), "yz": np.uint8(120),
    }  # fmt: skip
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "xs", "xz"], ["x_q"], name="x/quantize"),
        helper.make_node("DequantizeLinear", ["x_q", "xs", "xz"], ["x_d"]),
        helper.make_node("DequantizeLinear", ["w", "ws"], ["w_d"], axis=0),
        helper.make_node("DequantizeLinear", ["b", "bs"], ["b_d"], axis=0),
        helper.make_node("Conv", ["x_d", "w_d", "b_d"], ["c"], name="stem", strides=[stride, stride], pads=pads),
        helper.make_node("QuantizeLinear", ["c", "ys", "yz"], ["c_q"]),
        helper.make_node("DequantizeLinear", ["c_q", "ys", "yz"], ["y"]),
    ]
    shape = ["n", channels, *size]
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [onnx.numpy_helper.from_array(np.asarray(v), k) for k, v in constants.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return onnx.shape_inference.infer_shapes(model)
