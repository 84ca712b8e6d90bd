"""Batch-norm re-estimation against running the graph: mean and variance of every channel, and a gain at the output."""

from __future__ import annotations

import pytest
import torch
from hard_nets import hard_mobilenet, images
from test_bias import BATCHES, subject, values_of
from torch import Tensor
from torch.fx import GraphModule

from qtool.evaluate import sqnr_db
from qtool.graphs.edits import parameter
from qtool.quantization.algorithms import renorm
from qtool.quantization.algorithms.layers import in_order
from qtool.quantization.algorithms.subject import Subject
from qtool.quantization.stage import quantize
from qtool.recipe import QuantizeConfig


def channels(graph: GraphModule, name: str, batches: list[Tensor]) -> Tensor:
    """Channels × all values of the node of that name, float64."""
    return values_of(graph, name, batches).transpose(0, 1).flatten(1)


def coarse(**kwargs: float) -> Subject:
    """A converted graph whose first layer's scales are a tenth too great: a variance that is clearly wrong."""
    given = subject(hard_mobilenet(**kwargs), BATCHES)
    first = next(iter(given.anchors()))
    parameter(given.graph, first.args[1].args[1]).mul_(1.1)
    return given


def test_means_and_variances_become_the_float_models() -> None:
    given = coarse()
    first, other = next(iter(given.anchors().items()))
    before = channels(given.graph, first.name, BATCHES)
    wanted = channels(given.reference, other.name, BATCHES)
    renorm.renormalize(given)
    found = channels(given.graph, first.name, BATCHES)
    torch.testing.assert_close(before.std(1) / wanted.std(1), torch.full_like(wanted[:, 0], 1.1), rtol=0.02, atol=0)
    torch.testing.assert_close(found.std(1), wanted.std(1), rtol=2e-3, atol=0)
    torch.testing.assert_close(found.mean(1), wanted.mean(1), rtol=0, atol=2e-3 * float(wanted.std()))
    assert given.notes[-1].startswith("renorm: rescaled")


def test_no_integer_changes() -> None:
    given = coarse()
    before = {n.name: parameter(given.graph, n.args[1].args[0]).clone() for n in given.anchors()}
    renorm.renormalize(given)
    for node in given.anchors():
        assert torch.equal(parameter(given.graph, node.args[1].args[0]), before[node.name])


def test_the_error_of_a_factor_is_the_variance_of_the_difference() -> None:
    given = subject(hard_mobilenet(), BATCHES)
    layers = in_order(given)
    layer = next(layers)
    seen, unseen = layer.observe()
    got, wanted = (
        channels(graph, node.name, BATCHES)
        for graph, node in ((given.graph, layer.node), (given.reference, layer.other))
    )
    errors = renorm.channel_errors(layer, seen + unseen, 0.8).flatten()
    torch.testing.assert_close(errors, (wanted - 0.8 * got).var(1, correction=0), rtol=1e-3, atol=1e-9)


def test_a_factor_that_does_worse_on_other_batches_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renorm, "factors", lambda layer, moments: torch.full(layer.scale.shape[:2], 1.5).double())
    given = subject(hard_mobilenet(), BATCHES)
    before = {n.name: parameter(given.graph, n.args[1].args[1]).clone() for n in given.anchors()}
    renorm.renormalize(given)
    assert given.notes == ["renorm: rescaled 0 channels of 12 layers and corrected their biases"]
    for node in given.anchors():
        assert torch.equal(parameter(given.graph, node.args[1].args[1]), before[node.name])


def test_the_output_comes_nearer_where_coarse_weights_cost_variance() -> None:
    model, test = hard_mobilenet(), images(128, seed=9)
    found = {}
    for algorithms in (("bias",), ("renorm",)):
        config = QuantizeConfig(weight_bits=4, algorithms=algorithms)
        quantized = quantize(model, config, example=BATCHES[0], calibration=BATCHES)
        with torch.no_grad():
            found[algorithms] = sqnr_db(model(test), quantized(test))
    assert found["renorm",] > found["bias",]
