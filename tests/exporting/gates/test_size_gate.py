"""What the size gate predicts that no tensor of the graph says: what the exporter stores of its own accord."""

from __future__ import annotations

import copy
from pathlib import Path

import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, numpy_helper
from torch import Tensor, nn
from torch.nn import functional as F

from qtool.exporting import to_onnx
from qtool.exporting.gates.size import predicted_bytes, size
from qtool.quantization.stage import quantize
from qtool.recipe import QuantizeConfig


class Transformer(nn.Module):
    """A spatial transformer: images looked at through two grids of one size."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 6), nn.Linear(3, 6)
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        mean, sizes = x.mean((2, 3)), [x.shape[0], 3, self.size, self.size]
        for layer in (self.first, self.second):
            grid = F.affine_grid(layer(mean).view(-1, 2, 3), sizes, align_corners=False)
            x = F.grid_sample(x, grid, align_corners=False)
        return x


@pytest.mark.parametrize("size", [8, 40])  # of which the exporter compares the smaller grids alone
def test_the_positions_of_affine_grids_are_predicted(size: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 3, 16, 16)
    quantized = quantize(Transformer(size).eval(), QuantizeConfig(effort="fast"), example=x, calibration=[x])
    model = ir.to_proto(to_onnx.quantized_to_onnx(quantized, 21))
    kept = [numpy_helper.to_array(t) for t in model.graph.initializer if t.data_type != TensorProto.INT64]
    assert abs(predicted_bytes(quantized) - sum(array.nbytes for array in kept)) < 200


class Shifted(nn.Module):
    """A layer, and a constant that is stored in another type, as transformers' ALiBi slopes are."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 6)
        self.register_buffer("shift", torch.arange(6, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + (x[:, :1].to(self.shift.dtype) * self.shift).float()


def test_constants_in_16_bits_are_counted_as_the_file_holds_them() -> None:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    config = QuantizeConfig(effort="fast")
    forms = [
        quantize(Shifted(kind).eval(), config, example=x, calibration=[x]) for kind in (torch.half, torch.bfloat16)
    ]
    for quantized in forms:
        model = ir.to_proto(to_onnx.quantized_to_onnx(quantized, 21))
        kept = [numpy_helper.to_array(t) for t in model.graph.initializer if t.data_type != TensorProto.INT64]
        assert abs(predicted_bytes(quantized) - sum(array.nbytes for array in kept)) < 16
    assert predicted_bytes(forms[1]) == predicted_bytes(forms[0]) + 2 * 6  # bfloat16 is kept in float32


def test_equal_float_weights_that_are_one_in_the_file_are_no_fault(tmp_path: Path) -> None:
    torch.manual_seed(0)
    first, last = nn.Linear(64, 64), nn.Linear(64, 8)  # as torch's TransformerEncoder copies its layers
    model = nn.Sequential(first, nn.ReLU(), copy.deepcopy(first), nn.ReLU(), last).eval()
    x = torch.randn(8, 4, 64)
    floats = {"0": "float", "2": "float"}
    config = QuantizeConfig(target="openvino", ranges="minmax", algorithms=None, overrides=floats)
    quantized = quantize(model, config, example=x, calibration=[x])
    file = tmp_path / "model.onnx"
    to_onnx.save(to_onnx.quantized_to_onnx(quantized, 20), file)
    assert size(quantized, file).passed
    whole = ir.load(file)
    largest = max(whole.graph.initializers.values(), key=lambda value: value.const_value.nbytes)
    assert largest.const_value.nbytes == 4 * 64 * 64  # once of two times
    largest.const_value = ir.tensor(largest.const_value.numpy().astype("float16"))
    ir.save(whole, file)
    assert not size(quantized, file).passed  # a weight in another type is one still
