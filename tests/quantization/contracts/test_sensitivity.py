"""Sensitivity: each unit's effect is that of a model in which an override leaves everything else in float."""

from __future__ import annotations

import functools
import json
from typing import Any

import nets
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from qtool.errors import QtoolError, UsageError
from qtool.form import QuantizedModel
from qtool.quantization.capturing.float_form import FloatForms
from qtool.quantization.contracts import second_order
from qtool.quantization.contracts.sensitivity import Sensitivities
from qtool.quantization.stage import quantize, sensitivities
from qtool.recipe import QuantizeConfig

X = torch.randn(20, 3, 16, 16, generator=torch.Generator().manual_seed(1))

forms = functools.cache(FloatForms)
"""A model captured once for all that is made of it here; nothing changes one."""


@pytest.fixture(scope="module")
def net() -> nn.Module:
    """Two inverted residuals, the first with a sum."""
    torch.manual_seed(0)
    blocks = nets.InvertedResidual(16, 16, 1, 1), nets.InvertedResidual(16, 24, 2, 6)
    return nets.settled(
        nn.Sequential(nets.conv_bn(3, 16, 3, 2), nn.ReLU6(), *blocks, *nets.pooled_classifier(24, 10)), 16
    )


@pytest.fixture(scope="module")
def form(net: nn.Module) -> QuantizedModel:
    """The net, quantized by default. Tests change nothing of it."""
    return quantize(net, QuantizeConfig(), example=X, calibration=[X], forms=forms(net))


@pytest.fixture(scope="module")
def exact(net: nn.Module) -> Sensitivities:
    """What was measured by default."""
    return measured(net)


@pytest.fixture(scope="module")
def guessed(net: nn.Module) -> Sensitivities:
    """The estimate in its place."""
    return measured(net, sensitivity="second-order")


def measured(model: nn.Module, x: Any = X, **options: Any) -> Sensitivities:
    options = {"algorithms": ("equalize",)} | options  # what of several layers fits each other is not a layer's alone
    found = sensitivities(model, QuantizeConfig(**options), example=x, calibration=[x], forms=forms(model))
    found.measure([x])
    return found


def alone(model: nn.Module, *names: str, **options: Any) -> QuantizedModel:
    """The model with only the units of these names quantized, by overrides."""
    config = QuantizeConfig(overrides=dict.fromkeys(names, "int8") | {"*": "float"}, **options)
    return quantize(model, config, example=X, calibration=[X], forms=forms(model))


def errors(reference: Tensor, other: Tensor) -> tuple[float, float]:
    """SQNR in dB and KL in nats, in numpy."""
    z, y = reference.double().numpy(), other.double().numpy()
    p, q = (np.exp(v) / np.exp(v).sum(1, keepdims=True) for v in (z, y))
    return 10 * np.log10((z**2).sum() / ((z - y) ** 2).sum()), (p * np.log(p / q)).sum(1).mean()


@pytest.mark.parametrize("options", [{}, {"engine": "torch.ao"}, {"weight_ranges": "mse", "ranges": "minmax"}])
def test_each_layer_is_as_if_everything_else_were_left_in_float(
    net: nn.Module, exact: Sensitivities, options: dict[str, Any]
) -> None:
    found = {entry["name"]: entry for entry in (measured(net, **options) if options else exact).results()}
    for name in ("0.0", "6") if "engine" in options else ("0.0", "3.body.2.0", "6"):  # torch.ao traces for each
        one = alone(net, name, algorithms=None, **options)  # which correct what is quantized together
        assert [unit.name for unit in one.plan.integer_units] == [name]
        with torch.no_grad():
            sqnr_db, kl = errors(net(X), one(X))
        assert found[name]["sqnr_db"] == pytest.approx(sqnr_db, abs=0.15)  # the bias is an integer there
        assert found[name]["kl"] == pytest.approx(kl, rel=0.05)


@pytest.mark.parametrize("shape", ["tokens", "pixels"])
@pytest.mark.parametrize("kind", ["exact", "second-order"])
def test_kl_of_tokens_and_of_pixels_is_the_mean_over_a_sample(shape: str, kind: str) -> None:
    torch.manual_seed(0)
    body = [nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 5, 3)]
    net = nn.Sequential(*body, *([nn.Flatten(2), Turned()] if shape == "tokens" else []))
    config, first = QuantizeConfig(ranges="minmax", algorithms=(), sensitivity=kind), net.eval()(X)
    classes = first.argmax(-1 if shape == "tokens" else 1)
    found = sensitivities(net, config, example=X, calibration=[X], targets=classes, forms=forms(net))
    found.measure([X])
    one = alone(net, "0", ranges="minmax", algorithms=())
    with torch.no_grad():
        z, y = (
            v.reshape(20, 5, -1).mT.reshape(-1, 5) if shape == "pixels" else v.flatten(0, 1) for v in (net(X), one(X))
        )
    told = next(entry for entry in found.results() if entry["name"] == "0")
    assert told["kl"] == pytest.approx(errors(z, y)[1], rel=0.05 if kind == "exact" else 0.5)
    if kind == "exact":
        assert told["agreement"] == pytest.approx((z.argmax(1) == y.argmax(1)).double().mean().item(), abs=0.002)
    unknown = sensitivities(net, config, example=X, calibration=[X], forms=forms(net))
    unknown.measure([X[:2]])
    assert unknown.results()[0]["kl"] is None


class Turned(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mT


def test_a_sum_rounds_both_operands_and_its_result(net: nn.Module, form: QuantizedModel, exact: Sensitivities) -> None:
    """The residual sum of block 2, by hand: y = Q(Q(x) + Q(body(x)))."""

    def rounded(value: Tensor, name: str) -> Tensor:
        low, high = min(form.ranges[name]["low"], 0.0), max(form.ranges[name]["high"], 0.0)
        scale = np.float32((high - low) / 255)
        zero = int(-np.round(low / scale))
        return torch.fake_quantize_per_tensor_affine(value, float(scale), zero, 0, 255)

    with torch.no_grad():
        x = net[1](net[0](X))
        y = rounded(rounded(x, "0.0") + rounded(net[2].body(x), "2.body.2.0"), "2.add")
        sqnr_db, _ = errors(net(X), net[3:](y))
    found = {entry["name"]: entry["sqnr_db"] for entry in exact.results()}
    assert found["2.add"] == pytest.approx(sqnr_db, abs=0.02)


def test_the_worst_comes_first_and_every_integer_unit_is_there(form: QuantizedModel, exact: Sensitivities) -> None:
    results = exact.results()
    assert {entry["name"] for entry in results} == {unit.name for unit in form.plan.integer_units}
    assert [e["sqnr_db"] for e in results] == sorted(e["sqnr_db"] for e in results)


def test_a_stopped_measurement_goes_on_to_the_same_bits(net: nn.Module, exact: Sensitivities) -> None:
    config, states = QuantizeConfig(algorithms=("equalize",)), []
    first = sensitivities(net, config, example=X, calibration=[X], forms=forms(net))
    first.measure([X], samples=8, after=lambda state: states.append(json.dumps(state)))
    again = sensitivities(net, config, example=X, calibration=[X], state=json.loads(states[0]), forms=forms(net))
    again.measure([X])
    assert json.loads(states[0])["num_samples"] == 8
    assert again.state == exact.state


def test_any_number_of_inputs_and_outputs_that_are_no_logits() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
            return self.conv(a), self.conv(b).relu()

    results = measured(Two().eval(), (X, X.flip(0))).results()
    assert len(results) == 2
    assert all(20 < entry["sqnr_db"] < 60 and entry["kl"] is None for entry in results)


class Heads(nn.Module):
    """Logits, and boxes in pixels: each head has layers of its own."""

    def __init__(self, pixels: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.classes, self.boxes = (nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.Flatten(), nn.Linear(392, 4)) for _ in "ab")
        self.pixels = pixels

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.classes(x), "boxes": self.pixels * self.boxes(x)}


@pytest.mark.parametrize("kind", ["exact", "second-order"])
def test_an_output_in_large_units_does_not_drown_the_others(kind: str) -> None:
    small, large = (
        {e["name"]: e["sqnr_db"] for e in measured(Heads(pixels).eval(), sensitivity=kind).results()}
        for pixels in (1.0, 1000.0)
    )
    assert set(small) == {"classes.0", "classes.2", "boxes.0", "boxes.2"}
    assert large == pytest.approx(small, abs=1e-3)
    if kind == "exact":
        model, options = Heads(1000.0).eval(), {"algorithms": None}
        with torch.no_grad():
            pairs = zip(model(X).values(), alone(model, "classes.2", **options)(X).values(), strict=True)
            shares = [float(((a - b) ** 2).sum() / (a**2).sum()) for a, b in pairs]
        assert shares[1] < 1e-9
        assert large["classes.2"] == pytest.approx(-10 * np.log10(shares[0] / 2), abs=0.5)  # half of it would be 3 dB


def test_whole_numbers_are_judged_by_how_many_differ() -> None:
    class Classes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nets.settled(nets.small_mobilenet(), 16)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            order = self.net(x).argsort(1)
            return order, order[:, 0]

    model = Classes().eval()
    found = {entry["name"]: entry for entry in measured(model, weight_bits=4).results()}
    one = alone(model, "net.0.0", algorithms=None, weight_bits=4)
    with torch.no_grad():
        wrong = np.mean([(a != b).double().mean().item() for a, b in zip(model(X), one(X), strict=True)])
    assert wrong
    assert found["net.0.0"]["sqnr_db"] == pytest.approx(-10 * np.log10(wrong))
    assert found["net.0.0"]["kl"] is None
    with pytest.raises(UsageError, match="exact, for a model that gives whole numbers"):
        measured(model, sensitivity="second-order")


def test_what_cannot_be_measured_is_refused(net: nn.Module) -> None:
    with pytest.raises(UsageError, match="sensitivity: expected mode 'ptq'"):
        sensitivities(net, QuantizeConfig(mode="qat"), example=X, calibration=[X])
    found = sensitivities(net, QuantizeConfig(), example=X, calibration=[X], forms=forms(net))
    with pytest.raises(QtoolError, match="at least one sample"):
        found.measure([])
    with pytest.raises(QtoolError, match="a measurement of these units; got one of others"):
        sensitivities(net, QuantizeConfig(), example=X, calibration=[X], state={"units": {"x": {}}}, forms=forms(net))


@pytest.mark.parametrize("options", [{}, {"weights_only": True, "weight_bits": 4}])
def test_the_estimate_is_close_to_what_is_measured(net: nn.Module, options: dict[str, Any]) -> None:
    x = torch.randn(128, 3, 16, 16, generator=torch.Generator().manual_seed(2))
    exact, guessed = ({e["name"]: e for e in measured(net, x, sensitivity=kind, **options).results()} for kind in KINDS)
    assert exact.keys() == guessed.keys()
    for name, entry in exact.items():  # a sum of 128 squares of a normal number: 12 % is one standard deviation
        assert guessed[name]["sqnr_db"] == pytest.approx(entry["sqnr_db"], abs=2.5), name
        assert guessed[name]["kl"] == pytest.approx(entry["kl"], rel=0.6), name
        assert (entry["measured"], guessed[name]["measured"], guessed[name]["agreement"]) == (*KINDS, None)


KINDS = ("exact", "second-order")


def test_the_estimate_finds_the_unit_that_is_known_to_be_bad() -> None:
    """One channel of the second layer is 300 times its neighbours, undone behind: its scale is the others' ruin."""
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1) for i in range(5)]
    with torch.no_grad():
        convolutions[1].weight[0] *= 300
        convolutions[1].bias[0] *= 300  # type: ignore[index]
        convolutions[2].weight[:, 0] /= 300
    layers = [layer for convolution in convolutions for layer in (convolution, nn.ReLU())]
    model = nn.Sequential(*layers, *nets.pooled_classifier(8, 10)).eval()
    exact, guessed = (measured(model, sensitivity=kind, ranges="minmax", algorithms=None).results() for kind in KINDS)
    assert exact[0]["name"] == guessed[0]["name"] == "2"
    assert guessed[1]["sqnr_db"] > guessed[0]["sqnr_db"] + 2
    ranks = [{e["name"]: i for i, e in enumerate(found)} for found in (exact, guessed)]
    pairs = np.array([[ranks[0][name], ranks[1][name]] for name in ranks[0]])
    assert np.corrcoef(pairs.T)[0, 1] > 0.8  # Spearman's rank correlation


def test_the_estimate_goes_on_to_the_same_bits_and_from_no_other_kind(net: nn.Module, guessed: Sensitivities) -> None:
    config, states = QuantizeConfig(sensitivity="second-order", algorithms=("equalize",)), []
    first = sensitivities(net, config, example=X, calibration=[X], forms=forms(net))
    first.measure([X], samples=8, after=lambda state: states.append(json.loads(json.dumps(state))))
    again = sensitivities(net, config, example=X, calibration=[X], state=states[0], forms=forms(net))
    again.measure([X])
    assert again.state == guessed.state
    with pytest.raises(QtoolError, match="a measurement of these units; got one of others"):
        sensitivities(
            net, QuantizeConfig(sensitivity="exact"), example=X, calibration=[X], state=guessed.state, forms=forms(net)
        )


def test_left_open_it_is_the_time_that_decides(
    net: nn.Module, guessed: Sensitivities, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kind(state: Any = None) -> str:
        found = sensitivities(
            net, QuantizeConfig(), example=X, calibration=[X], samples=20, state=state, forms=forms(net)
        )
        return found.kind

    assert kind() == "exact"
    monkeypatch.setattr(second_order, "SLOW", 0.0)
    assert kind() == "second-order"
    monkeypatch.undo()
    assert kind(guessed.state) == "second-order"


class Words(nn.Module):
    """A table, a recurrent layer and a linear one."""

    def __init__(self, cell: type[nn.RNNBase]) -> None:
        super().__init__()
        self.words, self.rnn = nn.Embedding(300, 24), cell(24, 16, batch_first=True, bidirectional=True)
        self.head = nn.Linear(32, 5)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.rnn(self.words(ids))[0][:, -1])


@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU])
def test_tables_and_recurrent_layers_are_measured_too(cell: type[nn.RNNBase]) -> None:
    torch.manual_seed(0)
    model = Words(cell).eval()
    ids = torch.randint(0, 300, (16, 7), generator=torch.Generator().manual_seed(0))
    found = {entry["name"]: entry["sqnr_db"] for entry in measured(model, ids, algorithms=None).results()}
    assert set(found) == {"words", "rnn", "head"}
    guess = {
        e["name"]: e["sqnr_db"]
        for e in measured(model, ids, algorithms=None, sensitivity="second-order").results()
    }  # fmt: skip
    for name in ("words", "rnn"):
        wanted = found[name]
        config = QuantizeConfig(overrides={name: "int8"} | {"*": "float"}, algorithms=None)
        one = quantize(model, config, example=ids, calibration=[ids], forms=forms(model))
        with torch.no_grad():
            pieces = [one(ids[start : start + 8]) for start in (0, 8)]  # an LSTM's ranges are its batch's
            assert wanted == pytest.approx(errors(model(ids), torch.cat(pieces))[0], abs=0.01)
        assert guess[name] == pytest.approx(wanted, abs=4)
