"""A cast of stored integers is stored; nothing else changes."""

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from torch import nn

from qtool.exporting.passes import casts
from qtool.exporting.stage import export
from qtool.quantization.stage import quantize
from qtool.recipe import ExportConfig, QuantizeConfig


def test_only_integers_cast_to_integers_are_stored() -> None:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [3]) for name in "xy")
    steps = [
        helper.make_node("Cast", ["whole"], ["small"], to=TensorProto.INT8),
        helper.make_node("Cast", ["real"], ["half"], to=TensorProto.FLOAT16),
        helper.make_node("Cast", ["half"], ["full"], to=TensorProto.FLOAT),
        helper.make_node("DequantizeLinear", ["small", "scale"], ["small_real"]),
        helper.make_node("Add", ["x", "full"], ["sum"]),
        helper.make_node("Add", ["sum", "small_real"], ["y"]),
    ]
    stored = {"whole": np.array([-3, 0, 7]), "real": np.float32([0.1, 2, 3]), "scale": np.float32(0.5)}
    graph = helper.make_graph(steps, "g", [x], [y], [numpy_helper.from_array(v, n) for n, v in stored.items()])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    changed = ir.serde.deserialize_model(model)
    assert casts.apply(changed) == 1
    after = ir.serde.serialize_model(changed)
    onnx.checker.check_model(after, full_check=True)
    assert [node.op_type for node in after.graph.node].count("Cast") == 2
    assert {tensor.name for tensor in after.graph.initializer} == {"small", "real", "scale"}
    feeds = {"x": np.float32([1, 2, 3])}
    np.testing.assert_array_equal(*(ReferenceEvaluator(m).run(None, feeds)[0] for m in (model, after)))


def test_a_layer_of_many_classes_passes_the_gates(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 6)
    form = quantize(nn.Linear(6, 8200), QuantizeConfig(), example=x, calibration=[x])
    files = export(
        form, tmp_path, ExportConfig(baselines=None), samples=[x]
    ).files  # torch computes casts up to 8,192 numbers
    assert "Cast" not in {node.op_type for node in onnx.load(files["int8"]).graph.node}
