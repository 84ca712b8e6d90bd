"""Small ONNX files for the tests of runtimes, benchmarking and reporting, built node by node.

None of them comes from qtool's own exporter: what is tested is that any valid file can be opened.
"""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


def residual_net(size: int = 8, batch: int | str = "N", seed: int = 0) -> onnx.ModelProto:
    """conv-relu-conv-add-relu-pool-linear on 3×size×size images, ten classes."""
    generator = np.random.default_rng(seed)
    weights = {
        "w0": generator.normal(size=(16, 3, 3, 3)) * 0.2,
        "w1": generator.normal(size=(16, 16, 3, 3)) * 0.08,
        "w2": generator.normal(size=(10, 16)) * 0.3,
    }
    nodes = [
        helper.make_node("Conv", ["x", "w0"], ["a"], "c0", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["a"], ["b"], "r0"),
        helper.make_node("Conv", ["b", "w1"], ["c"], "c1", pads=[1, 1, 1, 1]),
        helper.make_node("Add", ["c", "b"], ["d"], "add"),
        helper.make_node("Relu", ["d"], ["e"], "r1"),
        helper.make_node("GlobalAveragePool", ["e"], ["f"], "pool"),
        helper.make_node("Flatten", ["f"], ["g"], "flat"),
        helper.make_node("Gemm", ["g", "w2"], ["y"], "fc", transB=1),
    ]
    return model(
        nodes,
        inputs={"x": [batch, 3, size, size]},
        outputs={"y": [batch, 10]},
        weights={name: value.astype(np.float32) for name, value in weights.items()},
    )


def model(
    nodes: list[onnx.NodeProto],
    inputs: dict[str, list[int | str | None]],
    outputs: dict[str, list[int | str | None]],
    weights: dict[str, np.ndarray] | None = None,
    dtype: int = TensorProto.FLOAT,
    domains: dict[str, int] | None = None,
) -> onnx.ModelProto:
    """An ONNX model of opset 17 with float inputs and outputs."""
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info(name, dtype, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, dtype, shape) for name, shape in outputs.items()],
        [numpy_helper.from_array(value, name) for name, value in (weights or {}).items()],
    )
    opsets = [helper.make_opsetid(name, version) for name, version in {"": 17, **(domains or {})}.items()]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def save_float(path: Path, **options: object) -> Path:
    """Writes the residual net in FP32."""
    onnx.save(residual_net(**options), path)  # type: ignore[arg-type]
    return path


def save_half(path: Path) -> Path:
    """Writes the residual net with FP16 weights and arithmetic, inputs and outputs in float32."""
    source = residual_net()
    half = {t.name: numpy_helper.to_array(t).astype(np.float16) for t in source.graph.initializer}
    cast_in = helper.make_node("Cast", ["x"], ["x16"], "cast_in", to=TensorProto.FLOAT16)
    cast_out = helper.make_node("Cast", ["y16"], ["y"], "cast_out", to=TensorProto.FLOAT)
    nodes = [cast_in, *source.graph.node, cast_out]
    nodes[1].input[0], nodes[-2].output[0] = "x16", "y16"
    onnx.save(model(nodes, {"x": ["N", 3, 8, 8]}, {"y": ["N", 10]}, half), path)
    return path


def save_int8(path: Path, source: Path, size: int = 8) -> Path:
    """Writes ONNX Runtime's own static quantization of ``source``: QDQ, uint8 activations, int8 weights."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            generator = np.random.default_rng(1)
            self.rest = [{"x": generator.normal(size=(8, 3, size, size)).astype(np.float32)} for _ in range(2)]

        def get_next(self) -> dict[str, np.ndarray] | None:
            return self.rest.pop() if self.rest else None

    logging.disable(logging.WARNING)
    try:
        quantize_static(
            source, path, Reader(), quant_format=QuantFormat.QDQ, per_channel=True,
            activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8,
        )  # fmt: skip
    finally:
        logging.disable(logging.NOTSET)
    return path
