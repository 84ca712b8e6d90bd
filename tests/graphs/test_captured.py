"""Arguments of a captured graph that are no tensors: the values that it was captured with, and no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qtool
from qtool.errors import QtoolError

BATCHES = [torch.randn(8, 8, generator=torch.Generator().manual_seed(i)) for i in range(3)]


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 4)

    def forward(self, x: Tensor, scale: float = 1.0, parts: tuple[int, int] = (1, 1)) -> Tensor:
        y: Tensor = self.linear(x)
        return y * scale * parts[0]


@pytest.fixture(scope="module", params=["by name", "by position"])
def quantized(request: pytest.FixtureRequest) -> qtool.QuantizedModel:
    named: list[Any] = [{"x": batch, "scale": 0.5, "parts": (2, 3)} for batch in BATCHES]
    return qtool.quantize(Scaled(), named if request.param == "by name" else [((b, 0.5, (2, 3)),) for b in BATCHES])


def test_a_constant_that_is_left_out_takes_its_captured_value(quantized: qtool.QuantizedModel) -> None:
    wanted = quantized(BATCHES[0], 0.5, (2, 3))
    for answer in (quantized(BATCHES[0]), quantized(BATCHES[0], 0.5), quantized(x=BATCHES[0], parts=(2, 3))):
        assert torch.equal(answer, wanted)
    assert torch.allclose(wanted, Scaled()(BATCHES[0]), atol=0.05)  # 0.5 · 2


@pytest.mark.parametrize("named", [True, False])
def test_a_graph_takes_by_name_what_it_was_captured_with_by_place_and_the_reverse(named: bool, tmp_path: Path) -> None:
    placed, by_name = BATCHES, [{"x": batch} for batch in BATCHES]
    captured, others = (by_name, placed) if named else (placed, by_name)
    rows = torch.randn(200, 8, generator=torch.Generator().manual_seed(9))
    held = [rows if named else {"x": rows}]
    made = qtool.quantize(Scaled(), captured, validation=held, max_kl=10.0, out=tmp_path)
    opened = qtool.load_quantized(tmp_path)
    for model in (made, opened):
        assert torch.equal(model(BATCHES[0]), model(x=BATCHES[0]))
    gates = {
        gate["name"]: gate["passed"]
        for gate in qtool.export(opened, tmp_path / "out", samples=others, baselines=None).gates
    }
    assert gates["end-to-end parity"] is True


def test_training_takes_batches_by_place_and_by_name(tmp_path: Path) -> None:
    targets = torch.zeros(8, dtype=torch.long)
    batches = [(BATCHES[0], targets), {"x": BATCHES[1], "labels": targets}]
    assert qtool.quantize(Scaled(), batches, mode="qat", epochs=1)(BATCHES[0]).shape == (8, 4)


def test_another_value_is_refused(quantized: qtool.QuantizedModel, tmp_path: Path) -> None:
    with pytest.raises(QtoolError, match=r"inputs, 'scale': expected 0\.5, .* got 7\.0; give every batch that value"):
        quantized(x=BATCHES[0], scale=7.0)
    with pytest.raises(QtoolError, match=r"inputs, 'parts_0': expected 2, .* got 1"):
        quantized(BATCHES[0], 0.5, (1, 3))
    with pytest.raises(QtoolError, match=r"'scale': expected 0\.5, .* got 9\.0"):
        qtool.export(quantized, tmp_path, samples=[{"x": batch, "scale": 9.0} for batch in BATCHES])


@pytest.mark.parametrize(("second", "got"), [({"scale": 2.0}, r"2\.0"), ({}, "nothing")])
def test_calibration_batches_have_one_value(second: dict[str, float], got: str) -> None:
    with pytest.raises(QtoolError, match=rf"calibration batch 1, 'scale': expected 0\.5, .* got {got}"):
        qtool.quantize(Scaled(), [{"x": BATCHES[0], "scale": 0.5}, {"x": BATCHES[1], **second}])


def test_an_argument_that_was_not_captured_is_refused() -> None:
    quantized = qtool.quantize(Scaled(), BATCHES)
    for args, kwargs in (((), {"x": BATCHES[0], "scale": 2.0}), ((BATCHES[0], 2.0), {})):
        with pytest.raises(QtoolError, match=r"captured with \(x\); got 2\.0 beside them; leave it out"):
            quantized(*args, **kwargs)


class OfADict(nn.Module):
    """Its one argument is a dict of tensors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 4)

    def forward(self, features: dict[str, Tensor]) -> Tensor:
        y: Tensor = self.linear(features["a"] + features["b"])
        return y


def test_a_model_of_one_dict_is_called_as_it_is() -> None:
    batches = [{"a": batch, "b": batch.flip(0)} for batch in BATCHES]
    quantized = qtool.quantize(OfADict(), [{"features": batch} for batch in batches])
    wanted = quantized(features=batches[0])
    assert torch.equal(quantized(batches[0]), wanted)
    assert torch.equal(quantized({"features": batches[0]}), wanted)
    assert torch.allclose(wanted, OfADict()(batches[0]), atol=0.1)
    with pytest.raises(QtoolError, match=r"the model's arguments \(features\)"):
        quantized(a=batches[0]["a"], b=batches[0]["b"])


def test_a_wrong_name_is_no_dict_of_a_models() -> None:
    with pytest.raises(QtoolError, match=r"the model's arguments \(x\); got .*unexpected keyword argument 'y'"):
        qtool.quantize(Scaled(), BATCHES)({"y": BATCHES[0]})
