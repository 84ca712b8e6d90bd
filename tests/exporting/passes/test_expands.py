"""What is repeated for each sample is looked up, with the same numbers for any batch; nothing else changes."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from qdq_files import needs_vnni
from torch import Tensor, nn

from qtool.exporting.passes import expands
from qtool.exporting.stage import export
from qtool.quantization.stage import quantize
from qtool.recipe import ExportConfig, QuantizeConfig

TYPES = {np.float32: TensorProto.FLOAT, np.int64: TensorProto.INT64, np.bool_: TensorProto.BOOL}


def repeated(
    value: Any, before: list[int], behind: list[int], kind: Any = np.float32, rank: int = 3, **shape: int
) -> onnx.ModelProto:
    """A model that gives ``value`` expanded to before × N × behind, N as ``Shape`` with these attributes tells."""
    x = helper.make_tensor_value_info("x", TYPES[kind], ["n", 2, 3][:rank])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * (len(before) + len(behind) + 1))
    steps = [
        helper.make_node("Shape", ["x"], ["size"], **{"start": 0, "end": 1} | shape),
        helper.make_node("Concat", ["before", "size", "behind"], ["shape"], axis=0),
        helper.make_node("Expand", ["value", "shape"], ["y"]),
    ]
    stored = {"value": np.float32(value), "before": np.array(before, np.int64), "behind": np.array(behind, np.int64)}
    graph = helper.make_graph(steps, "g", [x], [y], [numpy_helper.from_array(v, n) for n, v in stored.items()])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def changed(model: onnx.ModelProto) -> tuple[int, onnx.ModelProto]:
    made = ir.serde.deserialize_model(model)
    return expands.apply(made), ir.serde.serialize_model(made)


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize(
    ("given", "more"),
    [
        ((0.5, [], [2]), {}),
        (([[[1, 2]]], [], [3, 2]), {}),
        (([[[1, 2]]], [], [1, 1]), {}),
        (([[[7]], [[8]]], [2], [4]), {}),
        (([1, 2], [], [2]), {"kind": np.int64}),
        (([1, 2], [3], [2]), {"kind": np.bool_, "rank": 1}),
    ],
)
def test_it_is_looked_up_for_any_batch(given: tuple[Any, ...], more: dict[str, Any], batch: int) -> None:
    before = repeated(*given, **more)
    count, after = changed(before)
    onnx.checker.check_model(after, full_check=True)
    assert count == 1
    assert not {"Shape", "Concat"} & {node.op_type for node in after.graph.node}
    tables = [numpy_helper.to_array(table) for table in after.graph.initializer if table.name.endswith("/table")]
    assert [table.size for table in tables] == [np.size(given[0])]  # nothing is stored several times
    x = np.full([batch, 2, 3][: more.get("rank", 3)], np.nan if "kind" not in more else 1).astype(more.get("kind", "f"))
    with np.errstate(invalid="ignore"):  # even of NaN there are no zeros but zeros
        wanted, found = (ReferenceEvaluator(model).run(None, {"x": x})[0] for model in (before, after))
    np.testing.assert_array_equal(wanted, found)


def test_what_is_only_converted_is_a_table_of_that_type() -> None:
    before = repeated([0.0, 2.0], [], [2])
    before.graph.node.append(helper.make_node("Cast", ["y"], ["truth"], to=TensorProto.BOOL))
    before.graph.output[0].CopyFrom(helper.make_tensor_value_info("truth", TensorProto.BOOL, [None, 2]))
    count, after = changed(before)
    onnx.checker.check_model(after, full_check=True)
    assert count == 1
    assert "Gather" in {node.op_type for node in after.graph.node}
    assert TensorProto.BOOL in {table.data_type for table in after.graph.initializer}
    wanted, found = (ReferenceEvaluator(m).run(None, {"x": np.ones((3, 2, 3), "f")})[0] for m in (before, after))
    np.testing.assert_array_equal(wanted, found)
    both = repeated([0.0, 2.0], [], [2])
    both.graph.node.append(helper.make_node("Cast", ["y"], ["truth"], to=TensorProto.BOOL))
    both.graph.output.append(helper.make_tensor_value_info("truth", TensorProto.BOOL, [None, 2]))
    assert [table.data_type for table in changed(both)[1].graph.initializer].count(TensorProto.BOOL) == 0


OTHERS = [((0.5, [], [2]), {"start": 1, "end": 2}), ((0.5, [], []), {"end": 2}), (([[1], [2]], [], [3]), {})]


@pytest.mark.parametrize(("given", "shape"), OTHERS)
def test_other_shapes_stay(given: tuple[Any, ...], shape: dict[str, int]) -> None:
    count, after = changed(repeated(*given, **shape))
    assert count == 0
    assert [node.op_type for node in after.graph.node] == ["Shape", "Concat", "Expand"]


class Tokens(nn.Module):
    """A convolution, and a token that is the same for all."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, 2, 1), nn.Conv2d(16, 16, 3, 1, 1)
        self.token = nn.Parameter(torch.randn(1, 1, 16))

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.first(x).relu()).flatten(2).mT
        return torch.cat([self.token.expand(x.shape[0], 1, 16), y], 1)


@needs_vnni
@pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="openvino is not installed")
def test_a_token_does_not_cost_openvino_a_bias(tmp_path: Path) -> None:
    torch.manual_seed(0)
    given = [torch.randn(8, 3, 20, 20) for _ in range(4)]
    form = quantize(Tokens(), QuantizeConfig(target="openvino"), example=given[0], calibration=given)
    gates = {gate["name"]: gate for gate in export(form, tmp_path, ExportConfig(baselines=None), samples=given).gates}
    assert gates["end-to-end parity"]["found"].endswith("in OpenVINO")
    assert gates["end-to-end parity"]["details"]["sqnr_db_file"] > 30
