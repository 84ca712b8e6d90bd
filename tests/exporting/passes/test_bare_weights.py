from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from torch import nn

from qtool.exporting import to_onnx
from qtool.exporting.passes import bare_weights
from qtool.quantization.stage import quantize
from qtool.recipe import QuantizeConfig

X = np.random.default_rng(0).normal(size=(5, 32)).astype(np.float32)


class Residual(nn.Module):
    """Two blocks whose four layers have as many outputs; float reads what the blocks give."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(2))

    def forward(self, x):
        for block, norm in enumerate(self.norms):
            first, second = self.layers[2 * block : 2 * block + 2]
            x = x + second(torch.relu(first(norm(x))))
        return x


@pytest.fixture(scope="module")
def files():
    """The file for OpenVINO without the pass, and with it."""
    torch.manual_seed(0)
    config = QuantizeConfig(target="openvino", effort="fast")
    made = quantize(Residual().eval(), config, example=torch.randn(2, 32), calibration=[torch.randn(64, 32)])
    with pytest.MonkeyPatch.context() as patch:
        kept = tuple(p for p in to_onnx.PASSES["openvino"] if p is not bare_weights.apply)
        patch.setitem(to_onnx.PASSES, "openvino", kept)
        before = ir.serde.serialize_model(to_onnx.quantized_to_onnx(made, 21))
    return before, ir.serde.serialize_model(to_onnx.quantized_to_onnx(made, 21))


def test_weights_have_no_zero_points_and_outputs_stay(files):
    before, after = files
    stored = {value.name for value in after.graph.initializer}
    weights = [n for n in after.graph.node if n.op_type == "DequantizeLinear" and n.input[0] in stored]
    assert len(weights) >= 4
    assert all(len(node.input) == 2 for node in weights)
    assert not all(len(n.input) == 2 for n in after.graph.node if n.op_type == "DequantizeLinear" and n not in weights)
    onnx.checker.check_model(after, full_check=True)
    expected, found = (ReferenceEvaluator(model).run(None, {before.graph.input[0].name: X})[0] for model in files)
    np.testing.assert_array_equal(found, expected)


def test_zero_points_that_count_are_kept():
    weight = onnx.helper.make_tensor("w", onnx.TensorProto.INT8, [2, 2], [1, 2, 3, 4])
    zero = onnx.helper.make_tensor("z", onnx.TensorProto.INT8, [], [3])
    scale = onnx.helper.make_tensor("s", onnx.TensorProto.FLOAT, [], [0.5])
    node = onnx.helper.make_node("DequantizeLinear", ["w", "s", "z"], ["y"])
    out = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [2, 2])
    graph = onnx.helper.make_graph([node], "g", [], [out], [weight, scale, zero])
    model = ir.serde.deserialize_model(onnx.helper.make_model(graph))
    assert bare_weights.apply(model) == 0
