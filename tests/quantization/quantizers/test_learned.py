"""Learned step sizes: LSQ's gradients in numpy, LSQ+'s offset, and what they are worth where weights are coarse."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from qat_runs import DATA, ENGINES, SAMPLES, TEST, TRAIN, Killed, config, forms, qat
from qat_runs import trained as trained  # the fixture
from torch import nn

import qtool
from qtool.evaluate import sqnr_db
from qtool.quantization import targets
from qtool.quantization.calibration import observers
from qtool.quantization.calibration.observers import clips_at
from qtool.quantization.quantizers.learned import LearnedSteps
from qtool.quantization.stage import quantize
from qtool.quantization.targets import INT8_WEIGHT, ORT_CPU
from qtool.recipe import QatConfig, QuantizeConfig
from qtool.steps.loop import fit
from qtool.tasks import Classification
from qtool.training.techniques import setup

X = torch.linspace(-3.0, 5.0, 64).reshape(2, 32)


def test_the_forward_is_fake_quantization() -> None:
    for zero in (0, 90, 255):
        steps = LearnedSteps(torch.tensor([0.021]), zero, 0, 255, affine=True)
        scale, zero_point = steps.qparams()
        wanted = torch.fake_quantize_per_tensor_affine(X, scale, zero_point.int(), 0, 255)
        torch.testing.assert_close(steps(X, True), wanted, atol=1e-6, rtol=0)
        assert int(zero_point) == zero
        assert steps.range() == pytest.approx((-zero * 0.021, (255 - zero) * 0.021), rel=1e-5)


@pytest.mark.parametrize("scale", [0.5, -0.5])
def test_the_scales_gradient_is_that_of_the_paper(scale: float) -> None:
    """Eq. 3 of 1902.08153 for unsigned values with a zero point, times s for the logarithm, over √(N·Q)."""
    zero = 3
    steps = LearnedSteps(torch.tensor([scale]), zero, 0, 7, affine=scale > 0)
    steps(X, True).sum().backward()
    x = X.double().numpy() / scale
    inside = (np.round(x) + zero >= 0) & (np.round(x) + zero <= 7)
    each = np.where(inside, np.round(x) - x, np.where(x < 0, -zero, 7 - zero))
    assert steps.log_scale.grad is not None
    assert float(steps.log_scale.grad) == pytest.approx(scale * each.sum() / math.sqrt(32 * 7), rel=1e-5)


def test_the_offsets_gradient_is_that_of_the_plus_paper() -> None:
    """LSQ+: ∂x̂/∂β is 1 where x is clipped and 0 elsewhere; here β = −offset · 7 · s."""
    steps = LearnedSteps(torch.tensor([0.5]), 3, 0, 7, affine=True)
    steps(X, True).sum().backward()
    x = np.round(X.double().numpy() / 0.5) + 3
    clipped = ((x < 0) | (x > 7)).sum()
    assert steps.offset is not None
    assert steps.offset.grad is not None
    assert float(steps.offset.grad) == pytest.approx(-clipped * 7 * 0.5, rel=1e-5)


def test_values_pass_their_gradient_inside_the_range_alone() -> None:
    x = X.clone().requires_grad_()
    LearnedSteps(torch.tensor([0.5]), 3, 0, 7)(x, True).sum().backward()
    inside = ((X / 0.5).round() + 3).clamp(0, 7) == (X / 0.5).round() + 3
    assert x.grad is not None
    torch.testing.assert_close(x.grad, inside.float())


def test_each_channel_has_its_own_scale_and_what_is_frozen_has_no_gradient() -> None:
    weight = torch.randn(4, 3, 3, 3, generator=torch.Generator().manual_seed(0))
    scales = torch.tensor([0.1, -0.2, 0.3, -0.4])
    steps = LearnedSteps(scales, 0, -8, 7, axis=0)
    wanted = torch.fake_quantize_per_channel_affine(
        weight, steps.qparams()[0], torch.zeros(4, dtype=torch.int32), 0, -8, 7
    )
    torch.testing.assert_close(steps(weight, True), wanted)
    assert not steps(weight, False).requires_grad
    assert steps.qparams()[1].tolist() == [0, 0, 0, 0]


def test_a_scale_stays_within_its_limit_and_an_activation_that_is_never_negative_keeps_zero() -> None:
    steps = LearnedSteps(torch.tensor([6 / 255]), 0, 0, 255, affine=True, most=6 / 255)
    assert steps.offset is None
    with torch.no_grad():
        steps.log_scale.add_(1.0)
    assert steps.range() == pytest.approx((0.0, 6.0))
    assert LearnedSteps(torch.tensor([2 / 255]), 255, 0, 255, affine=True, limits=(-2.0, 0.0)).offset is None


def test_what_is_beyond_its_limit_comes_back() -> None:
    steps = LearnedSteps(torch.tensor([2 / 255]), 128, 0, 255, affine=True, most=2 / 255)
    assert steps.offset is not None
    with torch.no_grad():
        steps.log_scale.add_(0.1)
        steps.offset.add_(1.0)
    assert steps.range() == pytest.approx((-2.0, 0.0))
    steps(X, True).sum().backward()
    assert steps.log_scale.grad
    assert steps.offset.grad


@pytest.mark.parametrize("limits", [(-1.0, 1.0), (-0.3, math.inf), (-math.inf, 0.2)])
def test_no_zero_point_takes_a_range_beyond_where_the_activation_clips(limits: tuple[float, float]) -> None:
    for offset in (-0.1, 0.0, 0.002, 0.25, 0.5, 0.7, 0.999, 1.0, 1.1):
        steps = LearnedSteps(torch.tensor([0.1]), 128, 0, 255, affine=True, limits=limits)
        assert steps.offset is not None
        with torch.no_grad():
            steps.offset.fill_(offset)
        assert clips_at(*steps.qparams(), limits, 0, 255)


ENDS = [(-1.0, 1.0), (-1.0, 0.25), (None, 0.0), (-2.0, 0.0), (-0.5, None)]


@pytest.mark.parametrize(
    ("target", "ends"), [*(("ort-cpu", ends) for ends in ENDS), *(("tensorrt", ends) for ends in ENDS[1:3])]
)
def test_a_range_of_an_activation_of_either_sign_starts_where_its_calibration_ended(ends: Any, target: str) -> None:
    class Clamped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.first(3 * x).clamp(*ends))

    torch.manual_seed(0)
    model, x, y = Clamped().eval(), torch.randn(64, 6), torch.randint(2, (64,))
    quantize_ = partial(qtool.quantize, model, [(x, y)], target=target, mode="qat", learning_rate=1e-9)
    wanted, made = (quantize_(step_size=kind)(x) for kind in ("observed", "learned"))
    assert sqnr_db(wanted, made) > 35


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_converted_is_what_was_trained(engine: str, trained: nn.Module) -> None:
    kept: dict[str, Any] = {}
    made = qat(trained, engine, config(step_size="learned", learning_rate=2e-3), kept)
    assert sqnr_db(kept["output"], made(TEST)) >= 45
    first, last = kept["hooks"].seen[0], kept["hooks"].seen[-1]
    learned = [name for name in first if name.endswith("log_scale")]
    assert len(learned) >= 7  # three weights, the input and three results; some by two names
    assert all(not torch.equal(first[name], last[name]) for name in learned)


def test_learned_steps_beat_observed_ones_at_two_bits(trained: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    coarse = dataclasses.replace(ORT_CPU, weight=dataclasses.replace(INT8_WEIGHT, qmin=-1, qmax=1))
    monkeypatch.setitem(targets.TARGETS, "ort-cpu", coarse)
    with torch.no_grad():
        wanted = trained(TEST)
    found = {
        kind: sqnr_db(wanted, qat(trained, "pt2e", config(epochs=6, learning_rate=5e-3, step_size=kind))(TEST))
        for kind in ("observed", "learned")
    }
    assert found["learned"] > found["observed"] + 1


def test_resumed_with_learned_steps_and_an_average_gives_the_same_bits(trained: nn.Module, tmp_path: Path) -> None:
    tuning = config(epochs=2, checkpoint_every=2, step_size="learned", ema=0.9)

    def made(out: Path, stop: int | None = None) -> Any:
        def progress(at: Any) -> None:
            if at.step == stop:
                raise Killed

        def run(graph: nn.Module, hooks: Any, loss_fn: Any = None) -> Any:
            with setup(graph, tuning, TRAIN[:2]) as parts:
                return fit(
                    graph, DATA, Classification(), tuning, setup=parts, hooks=hooks, loss_fn=loss_fn, out=out,
                    progress=progress,
                )  # fmt: skip

        return quantize(trained, QuantizeConfig(mode="qat"), **SAMPLES, tuning=tuning, qat=run, forms=forms(trained))

    whole = made(tmp_path / "whole")
    with pytest.raises(Killed):
        made(tmp_path / "parts", 9)
    again = made(tmp_path / "parts")
    assert torch.equal(whole(TEST), again(TEST))
    assert whole.ranges == again.ranges
    tuning = dataclasses.replace(tuning, ema=None)
    assert not torch.equal(made(tmp_path / "plain")(TEST), whole(TEST))


def test_a_weights_range_is_looked_for_once(trained: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    looked, look = [], observers.weight_range
    monkeypatch.setattr(observers, "weight_range", lambda weight, *args: looked.append(weight) or look(weight, *args))
    quantize_ = partial(quantize, trained, QuantizeConfig(mode="qat"), example=TRAIN[:2], calibration=[TRAIN])
    quantize_(tuning=config(step_size="learned"), qat=lambda *_: None)
    assert len(TRAIN) > 8, "several micro-batches"
    assert len(looked) == 3, "each of three, where training starts from"


def test_training_starts_from_the_ranges_asked_for(trained: nn.Module) -> None:
    config_ = QuantizeConfig(mode="qat", ranges="percentile", percentile=90.0, algorithms=None)
    untrained = config(step_size="learned")
    made = quantize(
        trained, config_, example=TRAIN[:2], calibration=[TRAIN], tuning=untrained, qat=lambda *_: None,
    )  # fmt: skip
    untuned = dataclasses.replace(config_, mode="ptq")
    wanted = quantize(trained, untuned, example=TRAIN[:2], calibration=[TRAIN])
    for name, entry in wanted.ranges.items():
        width = entry["high"] - entry["low"]
        assert made.ranges[name]["high"] == pytest.approx(entry["high"], abs=width / 200)


def test_the_defaults_learn_nothing() -> None:
    assert QatConfig().step_size == "observed"
    assert QatConfig().ema is None
