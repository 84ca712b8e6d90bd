"""GPTQ in layers and corrected biases in one walk: what is refitted, what is not, and how it is repeated."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hard_nets import hard_mobilenet, images
from test_bias import BATCHES, mean_of, subject

from qtool.evaluate import sqnr_db
from qtool.form import QuantizedModel
from qtool.graphs.edits import parameter
from qtool.quantization.algorithms.bias import correct_biases
from qtool.quantization.algorithms.gptq_small import gptq_small
from qtool.quantization.capturing.float_form import FloatForms
from qtool.quantization.stage import quantize
from qtool.quantization.stored_weights import integers_of
from qtool.recipe import QuantizeConfig

small = importlib.import_module("qtool.quantization.algorithms.gptq_small")
TEST = images(128, seed=9)
NET = hard_mobilenet()
FORMS = FloatForms(NET)
"""The net captured once for all tests; nothing changes it."""


def made(**options: Any) -> QuantizedModel:
    options = {"algorithms": ("gptq-small",), **options}
    calibration = () if options.get("ranges_from") else BATCHES
    return quantize(NET, QuantizeConfig(**options), example=BATCHES[0], calibration=calibration, forms=FORMS)


@pytest.fixture(scope="module")
def form() -> QuantizedModel:
    """What it makes by default. Tests change nothing of it."""
    return made()


@pytest.fixture(scope="module")
def untouched() -> torch.Tensor:
    """The output of a model that no algorithm has changed."""
    return made(algorithms=None)(TEST)


def test_small_layers_alone_are_refitted_and_every_mean_is_the_float_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small, "FEW", 9)
    given = subject(hard_mobilenet(), BATCHES)
    before = {node: integers_of(given.graph, node).clone() for node in given.anchors()}
    gptq_small(given)
    inputs = {node: parameter(given.reference, other.args[1])[0].numel() for node, other in given.anchors().items()}
    changed = {
        inputs[node] for node, integers in before.items() if not torch.equal(integers, integers_of(given.graph, node))
    }
    assert changed == {9}
    assert set(inputs.values()) > {9, 27}
    for node, other in given.anchors().items():
        wanted, got = mean_of(given.reference, other.name, BATCHES), mean_of(given.graph, node.name, BATCHES)
        # the mean of a refitted layer is that of the rows it was fitted to
        torch.testing.assert_close(
            got, wanted, rtol=0, atol=(0.02 if inputs[node] == 9 else 1e-4) * float(wanted.abs().max())
        )


def test_without_small_layers_it_is_bias_correction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small, "FEW", 0)
    one, other = subject(hard_mobilenet(), BATCHES), subject(hard_mobilenet(), BATCHES)
    gptq_small(one)
    correct_biases(other)
    with torch.no_grad():
        torch.testing.assert_close(one.graph(TEST), other.graph(TEST), rtol=1e-3, atol=1e-3)
    assert one.notes == ["gptq-small: refitted 0 layers and corrected the biases of 12"]


def test_the_output_comes_nearer_than_by_bias_correction(form: QuantizedModel) -> None:
    with torch.no_grad():
        wanted = hard_mobilenet()(TEST)
        bias, refitted = (sqnr_db(wanted, one(TEST)) for one in (made(algorithms=("bias",)), form))
    assert refitted > bias + 0.5


@pytest.mark.parametrize(("bits", "wide"), [(8, False), (6, True), (4, True)])
def test_with_few_bits_wider_layers_are_refitted_too(bits: int, wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small, "FEW", 9)
    found = made(weight_bits=bits, edge_bits=bits)
    refitted = {name for name, entry in found.ranges.items() if "rounding" in entry}
    given = subject(hard_mobilenet(), BATCHES)
    inputs = {
        str(node.meta["unit"]): parameter(given.reference, other.args[1])[0].numel()
        for node, other in given.anchors().items()
    }
    assert any(inputs[name] > 9 for name in refitted) is wide


@pytest.mark.parametrize("options", [{}, {"weight_bits": 4}])
def test_it_is_repeated_from_saved_ranges_without_samples(
    options: dict[str, Any], tmp_path: Path, form: QuantizedModel
) -> None:
    first, path = made(**options) if options else form, tmp_path / "ranges.json"
    path.write_text(json.dumps(first.ranges))
    assert any("rounding" in entry for entry in first.ranges.values())
    again = made(ranges_from=str(path), **options)
    assert "gptq-small: as saved with the ranges in 12 layers" in again.plan.notes
    assert torch.equal(again(TEST), first(TEST))
    assert again.ranges == json.loads(path.read_text())


@pytest.mark.parametrize(
    "change",
    [{"rounding": ""}, {"rounding": "not base 64 at all!"}, {"rounding": "eJxjYAAAAAIAAQ=="}, {"weight": 1}],
    ids=["empty", "no base 64", "of other shape", "of other weights"],
)
def test_what_was_saved_and_does_not_fit_is_not_taken(
    change: dict[str, Any], tmp_path: Path, form: QuantizedModel, untouched: torch.Tensor
) -> None:
    path = tmp_path / "ranges.json"
    broken = {name: entry | (change if "rounding" in entry else {}) for name, entry in form.ranges.items()}
    path.write_text(json.dumps(broken))
    again = made(ranges_from=str(path))
    assert "gptq-small declined: no calibration samples" in again.plan.notes
    assert torch.equal(again(TEST), untouched)
    config = QuantizeConfig(algorithms=("gptq-small",), ranges_from=str(path))
    anew = quantize(NET, config, example=BATCHES[0], calibration=BATCHES, forms=FORMS)
    assert torch.equal(anew(TEST), form(TEST))
    assert anew.ranges == form.ranges


def test_beside_gptq_it_has_nothing_to_do() -> None:
    found = made(algorithms=("gptq-small", "gptq"))
    assert "gptq-small declined: gptq refits all layers" in found.plan.notes
    assert torch.equal(found(TEST), made(algorithms=("gptq",))(TEST))


def test_the_same_twice_is_the_same(form: QuantizedModel) -> None:
    again = made()
    assert torch.equal(again(TEST), form(TEST))
    assert again.ranges == form.ranges
