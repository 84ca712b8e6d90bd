"""The quantize stage as a function: any net comes out close to itself, the same each time, and bad input is told."""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import weakref
from pathlib import Path
from typing import Any

import conv_nets
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from torch import Tensor, nn

from qtool.errors import QtoolError, UsageError
from qtool.form import QuantizedModel, quantize_nodes
from qtool.graphs.operators import aten
from qtool.nested import call, tensors
from qtool.quantization.calibration.saved_ranges import read_ranges
from qtool.quantization.capturing.float_form import FloatForms, float_form
from qtool.quantization.stage import quantize
from qtool.recipe import RANGES, QuantizeConfig

X = torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.second, self.head = nn.Conv2d(6, 6, 3, padding=1, groups=2), nn.Linear(6, 4)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv(x)))
        return self.head(nn.functional.dropout((self.second(x) + x).mean((2, 3)), 0.5, self.training))


def net() -> Net:
    torch.manual_seed(0)
    model = Net()
    for _ in range(3):
        model(X)
    return model.eval()


def made(model: nn.Module, config: QuantizeConfig | None = None, x: Any = X) -> QuantizedModel:
    return quantize(model, config or QuantizeConfig(), example=x, calibration=[x])


@functools.cache
def forms() -> FloatForms:
    return FloatForms(net())


def requantized(config: QuantizeConfig, **given: Any) -> QuantizedModel:
    """A net that many tests quantize and none changes, captured once."""
    return quantize(forms().model, config, example=X, forms=forms(), **given)


def sqnr_db(reference: Tensor, other: Tensor) -> float:
    """10·log10(Σ ref² / Σ (ref − other)²)."""
    noise = (reference.double() - other.double()).square().sum().clamp(min=1e-30)
    return float(10 * torch.log10(reference.double().square().sum() / noise))


@settings(
    max_examples=7, derandomize=True, database=None, suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)  # fmt: skip
@given(conv_nets.nets(activations=conv_nets.FUSED, most=2))
def test_any_net_stays_close_to_itself_and_keeps_its_weights(net: conv_nets.Net) -> None:
    model, inputs = conv_nets.build(net), conv_nets.example(net, 16)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    form = made(model, x=inputs)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not any(node.target is aten.batch_norm.default for node in form.graph.graph.nodes)
    assert all(unit.integer for unit in form.plan.units if unit.kind in ("conv", "linear"))
    with torch.no_grad():
        for real, folded, simulated in zip(
            tensors(model(*inputs)), tensors(call(form.float_graph, inputs)), tensors(form(inputs)), strict=True
        ):
            assert sqnr_db(real, folded) > 90
            assert sqnr_db(real, simulated) > 15


def test_the_plan_the_ranges_and_the_notes() -> None:
    form = made(net())
    assert [(u.name, u.kind) for u in form.plan.integer_units] == [
        ("conv", "conv"), ("second", "conv"), ("add", "add"), ("mean", "global_avg_pool"), ("head", "linear"),
    ]  # fmt: skip
    assert form.plan.float_units == ()
    assert form.plan.notes == (
        "module 'unused' is no part of the captured graph",
        "equalize: rescaled 0 and shifted 0 of 2 paths; left as they are: 1 (its readers did no better on samples), "
        "1 (the graph's output reads it)",
        "pairs: the weights of 3 layers fit sums of 16 bits, 0 paths of channels in another order for it",
        "analytic-bias: corrected in 1 layer; 2 have no batch-norm before them",
        "gptq-small: refitted 3 layers and corrected the biases of 3",
    )
    assert set(form.ranges) == {"x", "conv", "second", "add", "mean", "head"}
    assert set(form.ranges["head"]) == {"bias", "rounding", "weight"}  # it has no range, its result is float
    assert form.plan.target == "ort-cpu"


def test_the_same_again_is_the_same_to_the_bit() -> None:
    first, second = made(net()), made(net())
    assert torch.equal(first(X), second(X))
    assert first.ranges == second.ranges
    assert first.plan == second.plan


def test_the_model_keeps_its_mode_and_statistics() -> None:
    model = net().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    made(model)
    assert all(module.training for module in model.modules())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize(("engine", "method"), [*(("pt2e", method) for method in RANGES), ("torch.ao", "network")])
def test_saved_ranges_repeat_a_quantization_without_data(method: str, engine: str, tmp_path: Path) -> None:
    given = QuantizeConfig(ranges=method, engine=engine)
    model = net()
    path, forms = tmp_path / "ranges.json", FloatForms(model)
    form = quantize(model, given, example=X, calibration=[X], forms=forms)
    path.write_text(json.dumps(form.ranges))
    again = quantize(model, dataclasses.replace(given, ranges_from=str(path)), example=X, forms=forms)
    assert torch.equal(again(X), form(X))
    assert again.ranges == json.loads(path.read_text())
    assert "gptq-small: as saved with the ranges in 3 layers" in again.plan.notes
    other = dataclasses.replace(given, ranges="mse" if method != "mse" else "entropy", ranges_from=str(path))
    with pytest.raises(UsageError, match=f"--ranges: expected {method}, as the ranges of --ranges-from were chosen"):
        quantize(model, other, example=X, forms=forms)


def test_training_starts_from_ranges_that_are_given(tmp_path: Path) -> None:
    path, config = tmp_path / "ranges.json", QuantizeConfig(ranges="minmax", algorithms=None)
    wide = {
        name: entry | {"high": 2 * entry["high"]} for name, entry in requantized(config, calibration=[X]).ranges.items()
    }
    path.write_text(json.dumps(wide))
    trained = dataclasses.replace(config, mode="qat", ranges_from=str(path))
    found = requantized(trained, calibration=[X], qat=lambda *_: None).ranges
    assert {name: entry["high"] for name, entry in found.items()} == pytest.approx(
        {name: entry["high"] for name, entry in wide.items()}, rel=1e-2
    )


@pytest.mark.parametrize("name", ["gptq-small", "gptq", "renorm", "adaround", "brecq", "steps", "bias"])
def test_what_reads_samples_declines_where_ranges_are_repeated_without_any(name: str, tmp_path: Path) -> None:
    path, config = tmp_path / "ranges.json", QuantizeConfig(algorithms=None)
    form = requantized(config, calibration=[X])
    path.write_text(json.dumps(form.ranges))
    again = requantized(QuantizeConfig(algorithms=(name,), ranges_from=str(path)))
    assert any(note.startswith(f"{name} declined: ") and "calibration samples" in note for note in again.plan.notes)
    assert torch.equal(again(X), form(X))


def test_saved_biases_are_not_taken_for_other_weights(tmp_path: Path) -> None:
    path = tmp_path / "ranges.json"
    path.write_text(json.dumps(made(net()).ranges))
    config = QuantizeConfig(weight_bits=7, ranges_from=str(path))
    assert "gptq-small declined: no calibration samples" in requantized(config).plan.notes
    notes = requantized(config, calibration=[X]).plan.notes
    assert any(note.startswith("gptq-small: refitted") for note in notes)


def test_ranges_of_another_model_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "ranges.json"
    path.write_text(json.dumps(made(nn.Sequential(nn.Conv2d(3, 2, 1))).ranges))
    with pytest.raises(QtoolError, match=r"ranges\.json: expected a range for 'x'"):
        requantized(QuantizeConfig(ranges_from=str(path)))


@pytest.mark.parametrize("numbers", [None, {}, [], [None], "text", 1.0])
def test_a_saved_bias_of_other_than_its_channels_is_refused(numbers: object, tmp_path: Path) -> None:
    config = QuantizeConfig(algorithms=("bias",))
    ranges = requantized(config, calibration=[X]).ranges
    changed = next(name for name, entry in ranges.items() if "bias" in entry)
    ranges[changed]["bias"] = numbers
    path = tmp_path / "ranges.json"
    path.write_text(json.dumps(ranges))
    with pytest.raises(UsageError, match=rf"finite numbers of what bias changed at '{changed}'"):
        requantized(dataclasses.replace(config, ranges_from=str(path)))


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", '{"x": {"low": 0}}', '{"x": 3}', "not json", '"text"', '{"x": {"low": "a", "high": 1}}',
        '{"x": {"low": null, "high": 1, "bias": [1]}}', '{"x": {"low": 0, "high": [1]}}',
        '{"x": {"low": 2, "high": 1}}', '{"x": {"low": 0, "high": Infinity}}', '{"x": {"low": 0, "bias": [1]}}',
        '{"x": {"bias": [1], "rounding": 3}}',
        '{"x": {"low": 0, "high": 1, "observed": [1]}}', '{"x": {"equalize": {"scales": [1]}}}',
        '{"x": {"equalize": [1]}}', '{"x": {"learned": {"scale": "a"}}}', '{"x": {"learned": 3}}',
    ],
)  # fmt: skip
def test_a_file_that_holds_no_ranges_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "ranges.json"
    path.write_text(text)
    with pytest.raises(QtoolError, match=r"ranges\.json': expected the ranges\.json of a quantize run"):
        read_ranges(path)
    with pytest.raises(QtoolError):
        read_ranges(tmp_path / "missing.json")


@pytest.mark.parametrize("algorithms", ["bias", "equalize", "smooth", "gptq", "brecq", "steps"])
def test_a_model_fed_by_name_and_one_fed_by_position(algorithms: str) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 2, 1)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.conv(a) - self.conv(b) * 0.5

    torch.manual_seed(0)
    model = Two().eval()
    config = QuantizeConfig(algorithms=(algorithms,), rounding_steps=2)
    by_name = made(model, config, x={"b": X.flip(0), "a": X})
    by_place = made(model, config, x=(X, X.flip(0)))
    assert by_name.plan.notes == by_place.plan.notes
    assert torch.equal(by_name({"a": X, "b": X.flip(0)}), by_place((X, X.flip(0))))
    assert sqnr_db(model(X, X.flip(0)).detach(), by_place((X, X.flip(0)))) > 30


def test_an_example_of_one_sample_is_enough() -> None:
    form = quantize(net(), QuantizeConfig(), example=X[:1], calibration=[X])
    assert torch.equal(form(X), made(net())(X))


def test_overrides_leave_a_module_in_float() -> None:
    form = made(net(), QuantizeConfig(overrides={"second": "float"}))
    assert [unit.name for unit in form.plan.float_units] == ["second", "add", "mean"]
    assert "override" in form.plan.float_units[0].reason
    kept = next(n for n in form.graph.graph.nodes if n.target is aten.conv2d.default and n.args[1].op == "get_attr")
    assert torch.equal(form.graph.get_parameter(kept.args[1].target), net().second.weight)


def test_float_form_is_the_model_without_norms_and_dropout() -> None:
    graph = float_form(net(), X)
    names = {str(node.target) for node in graph.graph.nodes}
    assert not any("batch_norm" in name or "dropout" in name for name in names)
    torch.testing.assert_close(graph(X), net()(X), rtol=1e-4, atol=1e-5)


# What cannot be quantized.


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_told_by_name(bad: float) -> None:
    model = net()
    with torch.no_grad():
        model.second.weight[1, 0, 0, 0] = bad
    with pytest.raises(QtoolError, match=r"second\.weight"):
        made(model)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_inputs_that_are_not_finite_are_told_by_name(bad: float) -> None:
    x = X.clone()
    x[3, 1] = bad
    with pytest.raises(QtoolError, match=r"layer 'x': expected finite values"):
        quantize(net(), QuantizeConfig(), example=X, calibration=[X, x])


def test_an_activation_that_overflows_is_told_by_its_layer() -> None:
    model = net()
    with torch.no_grad():
        model.second.weight.fill_(3e38)
    with pytest.raises(QtoolError, match=r"layer 'second'"):
        made(model)


@pytest.mark.parametrize(
    ("model", "arguments", "said"),
    [
        (net, {"calibration": []}, r"calibration: expected at least one sample; got none"),
        (net, {"calibration": [X[:, :2]]}, r"calibration batch 0, 'x': expected float32 of N × 3 × 8 × 8"),
        (net, {"calibration": [X[..., :6]]}, r"'x': expected .*; got float32 of 16 × 3 × 8 × 6"),
        (net, {"example": X[:, :2], "calibration": [X]}, r"model 'Net': expected inputs that it takes"),
        (nn.Softmax, {"calibration": [X]}, r"runs in integers; got none"),
        (lambda: net().half(), {"calibration": [X]}, r"parameter 'conv\.weight': expected float32; got float16"),
    ],
)
@pytest.mark.filterwarnings("ignore:Implicit dimension choice for softmax:UserWarning")
def test_what_cannot_be_quantized_is_told_in_one_line(model: Any, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(QtoolError, match=said) as caught:
        quantize(model(), QuantizeConfig(), **{"example": X, **arguments})
    assert "\n" not in str(caught.value)


def test_training_needs_data_and_a_target_a_name() -> None:
    with pytest.raises(UsageError, match=r"training data.*got none"):
        made(net(), QuantizeConfig(mode="qat"))
    with pytest.raises(UsageError, match="did you mean"):
        made(net(), QuantizeConfig(target="ort-cpv"))


def test_quantizers_follow_the_order_of_the_graph() -> None:
    labels = [node.meta["custom"]["unit"] for node in quantize_nodes(made(net()).graph)]
    assert labels == ["x", "conv", "second", "add", "mean"]


@pytest.mark.parametrize("options", [{}, {"algorithms": None}], ids=["corrected", "ranges"])
def test_batches_that_can_be_gone_through_once_give_the_same(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)).eval()
    batches = list(torch.randn(300, 3, 8, 8).split(20))
    config = QuantizeConfig(**options)
    taken = (quantize(model, config, example=X, calibration=given) for given in (batches, iter(batches)))
    kept, streamed = (made.ranges for made in taken)
    assert any("bias" in entry for entry in kept.values()) != bool(options)
    assert streamed == kept


@pytest.mark.parametrize("engine", ["pt2e", "torch.ao"])
def test_a_quantized_model_is_gone_with_its_last_user(engine: str, tmp_path: Path) -> None:
    """So that a search, or a script that quantizes one model after another, needs no more memory than the largest."""
    form = made(net(), QuantizeConfig(engine=engine))
    form.save(tmp_path)
    graphs = [weakref.ref(form.graph), weakref.ref(form.float_graph)]
    del form
    gc.collect()
    assert [graph() for graph in graphs] == [None, None]
