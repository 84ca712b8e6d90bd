"""GPTQ against the definition of each of its parts, and what it is for: an output nearer to the float model's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from hard_nets import forms, hard_mobilenet, images
from test_bias import BATCHES, biases, subject
from torch import Tensor, nn

from qtool.data.given import inputs_of
from qtool.evaluate import sqnr_db
from qtool.form import graph_sha256
from qtool.graphs.edits import parameter
from qtool.quantization.algorithms.bias import add_to_bias
from qtool.quantization.algorithms.gptq import DAMPINGS, Moments, _settled, damped, fitted, gptq, output_error, rounded
from qtool.quantization.algorithms.layers import Layer
from qtool.quantization.algorithms.renorm import renormalize
from qtool.quantization.algorithms.rows import reason, rows
from qtool.quantization.algorithms.subject import Subject
from qtool.quantization.capturing.capture import capture
from qtool.quantization.quantizers.qparams import weight_step
from qtool.quantization.stage import quantize
from qtool.recipe import QuantizeConfig


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2), (4, 9, 7)),
        (nn.Conv2d(6, 6, (3, 1), padding=(2, 0), dilation=(2, 1), groups=6), (6, 8, 5)),
        (nn.Conv1d(4, 6, 5, stride=2, padding=2, groups=2), (4, 11)),
        (nn.Conv3d(4, 6, (3, 2, 1), stride=(1, 2, 1), padding=(1, 0, 2), groups=2), (4, 5, 7, 3)),
        (nn.Linear(5, 3), (4, 5)),
    ],
    ids=["grouped", "depthwise", "1d", "3d", "linear"],
)
def test_weights_times_rows_are_the_layers_outputs(layer: nn.Module, shape: tuple[int, ...]) -> None:
    x = torch.randn(3, *shape)
    node = next(n for n in capture(layer.eval(), x).graph.nodes if "conv" in n.name or "linear" in n.name)
    assert reason(node) == ""
    groups = getattr(layer, "groups", 1)
    found = rows(node, layer.weight.detach(), x, 10**6, torch.Generator())
    outputs = found @ layer.weight.detach().flatten(1).reshape(groups, -1, found.shape[2]).mT  # G × N × O/G
    outputs = outputs.permute(1, 0, 2).flatten(1) + layer.bias
    wanted = layer(x).detach()
    wanted = wanted if isinstance(layer, nn.Linear) else wanted.movedim(1, -1)
    torch.testing.assert_close(outputs, wanted.reshape(-1, wanted.shape[-1]))
    few = rows(node, layer.weight.detach(), x, 2, torch.Generator().manual_seed(0))
    assert few.shape == (groups, 6, found.shape[2])
    assert all(bool((found == row[:, None]).all(2).any(1).all()) for row in few.transpose(0, 1))


def test_a_transposed_convolution_is_named() -> None:
    graph = capture(nn.ConvTranspose2d(2, 2, 2).eval(), torch.randn(2, 2, 4, 4))
    node = next(n for n in graph.graph.nodes if "conv" in n.name)
    assert reason(node) == "no rows of conv_transpose2d"


def two_inputs(groups: int, count: int, size: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(groups, count, size) @ torch.randn(groups, size, size) + 3.0
    return x, x + 0.3 * torch.randn(groups, count, size)


def test_the_error_from_moments_is_the_error_of_the_outputs() -> None:
    torch.manual_seed(0)
    x, q = two_inputs(2, 50, 4)
    real, made = torch.randn(2, 3, 4).double(), torch.randn(2, 3, 4).double()
    moments = Moments.of(x[:, :20], q[:, :20]) + Moments.of(x[:, 20:], q[:, 20:])
    gap = x.double() @ real.mT - q.double() @ made.mT
    wanted = gap.var(1, correction=0).sum()
    assert output_error(real, made, moments) == pytest.approx(float(wanted), rel=1e-5)


def test_the_fitted_weights_are_those_of_ridge_regression() -> None:
    torch.manual_seed(0)
    x, q = two_inputs(1, 60, 5)
    real = torch.randn(1, 2, 5).double()
    found = fitted(real, Moments.of(x, q), 0.1)
    x0, q0 = ((v[0] - v[0].mean(0)).double().numpy() for v in (x, q))
    ridge = np.sqrt(0.1 * (q0**2).mean(0).mean() * 60)
    stacked = np.concatenate((q0, ridge * np.eye(5)))
    wanted = np.concatenate((x0 @ real[0].numpy().T, ridge * real[0].numpy().T))
    np.testing.assert_allclose(found[0].numpy().T, np.linalg.lstsq(stacked, wanted, rcond=None)[0], rtol=1e-4)


def by_elimination(weight: np.ndarray, hessian: np.ndarray, scale: np.ndarray, ends: tuple[int, int]) -> np.ndarray:
    """Rounding column by column, each column then eliminated from the inverse Hessian: optimal brain quantization."""
    weight, inverse = weight.copy(), np.linalg.inv(hessian)
    made = np.zeros_like(weight)
    for column in range(weight.shape[1]):
        made[:, column] = np.clip(np.round(weight[:, column] / scale), *ends)
        error = (weight[:, column] - made[:, column] * scale) / inverse[column, column]
        weight -= error[:, None] * inverse[column]
        inverse = inverse - np.outer(inverse[:, column], inverse[column]) / inverse[column, column]
    return made


def test_rounding_is_that_of_optimal_brain_quantization_and_beats_rounding_to_nearest() -> None:
    torch.manual_seed(0)
    _, q = two_inputs(1, 900, 150)
    real = torch.randn(1, 8, 150).double()
    moments = Moments.of(q, q)
    weight, hessian = fitted(real, moments, 0.01), damped(moments, 0.01)
    scale = weight_step(real.gather(2, real.abs().argmax(2, keepdim=True)), -8, 7)
    assert (scale < 0).any()
    made = rounded(weight, hessian, scale, (-8, 7))
    wanted = by_elimination(weight[0].numpy(), hessian[0].numpy(), scale[0, :, 0].numpy(), (-8, 7))
    assert (made[0].numpy() == wanted).mean() > 0.99
    nearest = (real / scale).round().clamp(-8, 7)
    assert output_error(real, made * scale, moments) < 0.5 * output_error(real, nearest * scale, moments)


@pytest.mark.parametrize("noise", [0.05, 3.0])
def test_fit_and_rounding_are_damped_each_as_rows_that_were_not_fitted_to_have_it(noise: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 120, 24) @ torch.randn(24, 24)
    q = x + noise * torch.randn(1, 120, 24)
    real, halves = torch.randn(1, 6, 24).double(), (slice(0, 60), slice(60, 120))
    seen, unseen = (Moments.of(x[:, half], q[:, half]) for half in halves)
    scale = real.abs().amax(2, keepdim=True) / 7
    nearest = (real / scale).round() * scale

    def error(made: Tensor) -> float:
        gap = x[:, halves[1]].double() @ real.mT - q[:, halves[1]].double() @ made.mT
        return float(gap.var(1, correction=0).sum())

    layer = SimpleNamespace(real=real, scale=scale, ends=(-8, 7), plain_error=lambda _: error(nearest))
    fits = {None: real} | {damping: fitted(real, seen, damping) for damping in DAMPINGS}
    fit = min(fits, key=lambda damping: error(fits[damping]))
    made = {damping: rounded(fits[fit], damped(seen, damping), scale, (-8, 7)) * scale for damping in DAMPINGS}
    rounding = min(made, key=lambda damping: error(made[damping]))
    assert error(made[rounding]) < error(nearest)
    assert _settled(cast(Layer, layer), seen, unseen) == (fit, rounding)
    assert (fit is None) == (noise < 1)  # what is all but exact is left as it is
    layer.plain_error = lambda _: 0.0
    assert _settled(cast(Layer, layer), seen, unseen) is None


@pytest.mark.parametrize("settle", [gptq, renormalize])
def test_biases_are_settled_anew_whatever_a_pass_before_made_of_them(settle: Callable[[Subject], None]) -> None:
    given, moved = subject(hard_mobilenet(), BATCHES), subject(hard_mobilenet(), BATCHES)
    for node in moved.anchors():
        add_to_bias(moved.graph, node, torch.ones(len(parameter(moved.graph, node.args[2]))).double())
    moved.graph.recompile()
    settle(given)
    settle(moved)
    names = [node.name for node in given.anchors()]
    wanted = biases(given.graph, names)
    for name, found in biases(moved.graph, names).items():
        assert torch.equal(found, wanted[name])


def test_each_layers_mean_output_is_the_float_models_and_integers_stay_integers() -> None:
    given = subject(hard_mobilenet(), BATCHES)
    names = {node.name: str(node.meta["unit"]) for node in given.anchors()}
    gptq(given)
    assert len(names) == 12
    for node in given.graph.graph.nodes:
        if node.name in names:
            integers = parameter(given.graph, node.args[1].args[0])
            assert integers.dtype == torch.int8
            assert int(integers.abs().max()) <= 127
    assert given.notes[0].startswith("gptq: refitted")


def test_the_output_comes_nearer_than_by_bias_correction_alone() -> None:
    model, test = hard_mobilenet(), images(128, seed=9)
    found = {}
    for algorithms in (("bias",), ("gptq",)):
        config = QuantizeConfig(algorithms=algorithms)
        quantized = quantize(model, config, example=BATCHES[0], calibration=BATCHES, forms=forms(model))
        with torch.no_grad():
            found[algorithms] = sqnr_db(model(test), quantized(test))
    assert found["gptq",] > found["bias",] + 0.5


def test_of_one_batch_the_halves_judge_each_other_and_one_row_judges_nothing() -> None:
    model, test = hard_mobilenet(), images(64, seed=9)
    config = QuantizeConfig(algorithms=("gptq",))
    samples = {"example": BATCHES[0], "calibration": [images(40)], "forms": forms(model)}
    quantized = quantize(model, config, **samples)
    assert "gptq: refitted 0 layers" not in quantized.plan.notes
    with torch.no_grad():
        plain = quantize(model, QuantizeConfig(algorithms=None), **samples)
        assert sqnr_db(model(test), quantized(test)) > sqnr_db(model(test), plain(test)) + 1
    given = subject(nn.Sequential(nn.Linear(4, 3)).eval(), [torch.randn(1, 4)])
    before = {n.name: parameter(given.graph, n.args[1].args[0]).clone() for n in given.anchors()}
    gptq(given)
    assert all(torch.equal(parameter(given.graph, n.args[1].args[0]), before[n.name]) for n in given.anchors())
    assert "gptq: refitted 0 layers" in given.notes


def test_a_batch_without_samples_takes_no_part() -> None:
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    config = QuantizeConfig(algorithms=("equalize", "gptq", "brecq", "renorm", "bias"), rounding_steps=5)
    with_one, without = (
        graph_sha256(quantize(net, config, example=x[:2], calibration=inputs_of(batches)).graph)
        for net in [nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3)).eval()]
        for batches in ([x[:20], x[:0], x[20:]], [x[:20], x[20:]])
    )
    assert with_one == without


def test_inputs_whose_spread_no_float_can_hold_leave_the_layer_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise torch.linalg.LinAlgError("not positive definite")

    monkeypatch.setattr(sys.modules[gptq.__module__], "rounded", refuse)
    given = subject(hard_mobilenet(), BATCHES)
    before = {n.name: parameter(given.graph, n.args[1].args[0]).clone() for n in given.anchors()}
    gptq(given)
    for node in given.anchors():
        assert torch.equal(parameter(given.graph, node.args[1].args[0]), before[node.name])


@pytest.mark.parametrize("bits", [8, 5])
def test_a_weight_that_layers_share_is_fitted_to_none_of_them(bits: int) -> None:
    class Twice(nn.Module):
        """One convolution over inputs of very unlike channels, the second time around."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.last = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 10, 1)
            self.twice = nn.Conv2d(8, 8, 3, padding=1)
            self.twice.weight.data *= torch.randn(8, 8, 1, 1).exp()

        def forward(self, x: Tensor) -> Tensor:
            y = self.twice(self.first(x).relu()).relu()
            y = self.twice(y * torch.linspace(0.05, 5, 8)[:, None, None]).relu()
            return self.last(y).mean((2, 3))

    model, test, found = Twice().eval(), images(128, seed=9), {}
    for algorithms in (("bias",), ("gptq",)):
        config = QuantizeConfig(algorithms=algorithms, weight_bits=bits)
        quantized = quantize(model, config, example=BATCHES[0], calibration=BATCHES)
        with torch.no_grad():
            found[algorithms] = sqnr_db(model(test), quantized(test))
    assert quantized.plan.notes[0] == "gptq left layers that share a weight as they are: twice, twice_2"
    assert found["gptq",] > found["bias",] - 1
