"""Weights of four bits: which layers have them, what the file holds, and that it still proves what it computes."""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from hard_nets import forms, hard_mobilenet, images
from onnx import numpy_helper
from torch import nn

from qtool.errors import UsageError
from qtool.evaluate import sqnr_db
from qtool.exporting.stage import export
from qtool.exporting.to_onnx import quantized_to_onnx
from qtool.form import QuantizedModel
from qtool.graphs.edits import parameter
from qtool.quantization.integers import WEIGHTED
from qtool.quantization.stage import quantize
from qtool.recipe import ExportConfig, QuantizeConfig
from qtool.runtimes import open_session

BATCHES = [images(24), images(16, seed=1)]


@cache
def quantized_to(bits: int, **options) -> QuantizedModel:
    """Each made once: tests change nothing of it."""
    config = QuantizeConfig(weight_bits=bits, **options)
    model = hard_mobilenet(nn.ReLU6, 0.3)
    return quantize(model, config, example=BATCHES[0], calibration=BATCHES, forms=forms(model))


def bits_of(quantized: QuantizedModel) -> list[int]:
    return [unit.weight_bits for unit in quantized.plan.units if unit.weight_bits]


@pytest.mark.parametrize(
    ("bits", "edge", "expected"), [(4, 8, (8, 4, 8)), (4, 6, (6, 4, 6)), (6, 4, (6, 6, 6)), (7, 8, (7, 7, 7))]
)
def test_the_first_and_the_last_layer_have_bits_of_their_own_below_seven(bits, edge, expected) -> None:
    quantized = quantized_to(bits, edge_bits=edge, algorithms=None, ranges="minmax")
    first, *inner, last = bits_of(quantized)
    assert (first, *set(inner), last) == expected
    for node in quantized.graph.graph.nodes:
        if node.target in WEIGHTED:
            unit = next(u for u in quantized.plan.units if u.name == node.meta["custom"]["unit"])
            integers = parameter(quantized.graph, node.args[1].args[0])
            levels = 2 ** (unit.weight_bits - 1)
            assert int(integers.abs().max()) == (levels if unit.weight_bits < 7 else levels - 1)
            assert int(integers.max()) < levels
            assert unit.integer


def test_the_file_holds_the_graphs_integers_two_to_a_byte_and_passes_its_gates(tmp_path: Path) -> None:
    quantized = quantized_to(4)
    result = export(quantized, tmp_path, ExportConfig(baselines=None), samples=BATCHES)
    assert all(gate["passed"] is not False for gate in result.gates)
    stored = {t.name: t for t in onnx.load(str(result.files["int8"])).graph.initializer}
    checked = below = 0
    for node in quantized.graph.graph.nodes:
        if node.target in WEIGHTED and node.args[1].args[4] == -8:
            unit = node.meta["custom"]["unit"]
            tensor = stored.get(f"{unit}/weight") or stored[f"{unit}/even/1"]
            integers, scales = (parameter(quantized.graph, node.args[1].args[i]) for i in (0, 1))
            below += int((scales < 0).sum())
            integers = integers.numpy()
            assert tensor.data_type == onnx.TensorProto.INT4
            found = numpy_helper.to_array(tensor).astype(np.int8)
            own = tuple(map(slice, integers.shape))  # behind these are channels that fill vectors up
            assert len(tensor.raw_data) == (found.size + 1) // 2
            np.testing.assert_array_equal(found[own], integers)
            assert np.count_nonzero(found) == np.count_nonzero(integers)
            checked += 1
    assert checked == 10
    assert below > 10  # a channel's farthest weight is -8 steps, and above 0 in half of them
    test = images(32, seed=5)
    given = open_session(result.files["int8"]).run({"x": test.numpy()})[0]
    assert sqnr_db(quantized(test), torch.from_numpy(given)) > 50


def test_zero_points_that_a_layer_of_eight_bits_has_too_stay_there(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Conv2d(3 if i == 0 else 8, 8, 3) for i in range(4))).eval()
    quantized = quantize(model, QuantizeConfig(weight_bits=4), example=BATCHES[0], calibration=BATCHES)
    assert bits_of(quantized) == [8, 4, 4, 8]
    result = export(quantized, tmp_path, ExportConfig(baselines=None), samples=BATCHES)
    assert all(gate["passed"] is not False for gate in result.gates)


@pytest.mark.parametrize("weights_only", [True, False])
def test_layers_over_stacked_rows_are_packed_too(weights_only: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4))).eval()
    rows = torch.randn(16, 5, 8)
    config = QuantizeConfig(weight_bits=4, weights_only=weights_only)
    quantized = quantize(model, config, example=rows, calibration=[rows])
    stored = [t for t in quantized_to_onnx(quantized, 21).graph.initializers.values() if t.shape == ir.Shape([8, 8])]
    assert Counter(t.dtype for t in stored) == {ir.DataType.INT8: 2, ir.DataType.INT4: 2}


def test_an_opset_without_four_bits_is_refused() -> None:
    with pytest.raises(UsageError, match="21 or more for 4-bit weights; got 20"):
        quantized_to_onnx(quantized_to(4), 20)


def test_who_cannot_have_four_bits_is_told() -> None:
    for options, where in (({"engine": "torch.ao"}, "engine 'torch.ao'"), ({"target": "tensorrt"}, "'tensorrt'")):
        with pytest.raises(UsageError, match=where):
            quantized_to(4, **options)


def test_gptq_gains_most_where_bits_are_few() -> None:
    test = images(128, seed=9)
    with torch.no_grad():
        wanted = hard_mobilenet(nn.ReLU6, 0.3)(test)
    found = {name: sqnr_db(wanted, quantized_to(4, algorithms=(name,))(test)) for name in ("bias", "gptq")}
    assert found["gptq"] > found["bias"] + 2


def test_equal_weights_that_are_stored_once_are_packed_once(tmp_path: Path) -> None:
    """Sums with a number in front of padding are such: depthwise convolutions, all their integers -8."""

    class Shifts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner, self.last = (nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1) for i in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.inner(torch.sigmoid(self.first(x)) + 1)
            return self.last(torch.relu(x) + 2)

    x = torch.randn(8, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    config = QuantizeConfig(weight_bits=4, algorithms=())  # which leave them as they are
    quantized = quantize(Shifts().eval(), config, example=x, calibration=[x])
    model = quantized_to_onnx(quantized, 21)
    kinds = [value.dtype for value in model.graph.initializers.values() if value.shape == (8, 1, 1, 1)]
    assert kinds == [ir.DataType.INT4]
    export(quantized, tmp_path, ExportConfig(baselines=None), samples=[x])
