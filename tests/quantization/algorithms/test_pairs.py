"""Weights that fit sums of 16 bits: orders of channels, wider steps, and what later passes leave of both."""

from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path
from typing import Any

import nets as models
import numpy as np
import onnxruntime
import pytest
import torch
from conv_nets import build, example, nets
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from qdq_files import VNNI, has
from torch import Tensor, nn

from qtool.errors import UsageError
from qtool.evaluate import sqnr_db
from qtool.exporting.gates.saturation import saturation_in_openvino
from qtool.exporting.reference.integer_reference import IntegerReference
from qtool.exporting.stage import export
from qtool.form import QuantizedModel
from qtool.graphs.edits import copied, parameter
from qtool.nested import call, tensors
from qtool.quantization.algorithms import Declined, Subject, pairs
from qtool.quantization.algorithms.pairs import costs, matched, order_pairs
from qtool.quantization.calibration.observers import PerChannelFakeQuantizer, PerChannelWeightObserver
from qtool.quantization.capturing.float_form import FloatForms, float_form
from qtool.quantization.integers import WEIGHTED
from qtool.quantization.placement import Placement
from qtool.quantization.quantizers.fake_quantize import fake_quantize
from qtool.quantization.quantizers.learned import LearnedSteps
from qtool.quantization.quantizers.pair_sums import PAIRED, fitted, least_ends
from qtool.quantization.rewrites.norms import write_norms
from qtool.quantization.stage import quantize
from qtool.quantization.stored_weights import integers_of, store_integers
from qtool.quantization.targets import get_target
from qtool.recipe import ExportConfig, QatConfig, QuantizeConfig
from qtool.runtimes import onnx_notes, open_session


def fits(integers: np.ndarray, groups: int) -> bool:
    """By hand: the inputs of a tap one after the other, tap by tap, two at a time, and any of an odd number of them."""
    if integers.ndim > 2 and groups == len(integers) > 1 and integers.shape[1] == 1:
        return True
    for row in integers.astype(int):
        places = itertools.product(*map(range, row.shape[1:])) if row.ndim > 1 else [()]
        numbers = [int(row[(channel, *place)]) for place in places for channel in range(row.shape[0])]
        numbers += [0] * (len(numbers) % 2)
        anything = row.ndim > 1 and row.shape[0] % 4
        for one, other in (
            itertools.combinations(numbers, 2) if anything else zip(numbers[::2], numbers[1::2], strict=True)
        ):
            if max(one, 0) + max(other, 0) > 128 or min(one, 0) + min(other, 0) < -128:
                return False
    return True


SHAPES = [(5, 12), (4, 7), (3, 8, 3, 3), (6, 4, 2), (4, 3, 3, 3), (2, 5, 1, 1), (6, 1, 3, 3), (2, 4, 2, 1, 2)]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(SHAPES), st.integers(0, 2**31), st.booleans(), st.sampled_from([1.0, 0.2, 3.0]))
def test_nearest_integers_of_the_ends_fit(shape: tuple[int, ...], seed: int, wide: bool, power: float) -> None:
    random = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=random)
    weight = weight.sign() * weight.abs() ** power
    groups = shape[0] if shape[1] == 1 and wide else 1
    ends = torch.maximum(weight.flatten(1).abs().amax(1), least_ends(weight, groups))
    steps = (ends / 127).reshape(-1, *[1] * (weight.dim() - 1))
    assert fits((weight / steps).round().numpy(), groups)
    assert bool((ends <= 2.02 * weight.flatten(1).abs().amax(1)).all())  # 7 bits are enough in any order


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(SHAPES), st.integers(0, 2**31))
def test_what_does_not_fit_is_brought_nearer_to_zero_and_nothing_else(shape: tuple[int, ...], seed: int) -> None:
    integers = torch.randint(-127, 128, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int8)
    groups = shape[0] if shape[1] == 1 else 1
    made = fitted(integers, groups)
    assert fits(made.numpy(), groups)
    assert made.dtype == torch.int8
    assert bool((made.abs() <= integers.abs()).all())
    assert bool((made * integers.sign() >= 0).all())
    assert torch.equal(fitted(made, groups), made)
    small = integers.clamp(-64, 64)
    assert torch.equal(fitted(small, groups), small)


def test_a_weight_alone_meets_no_other() -> None:
    alone = torch.tensor([127, -127, 3], dtype=torch.int8).reshape(3, 1, 1, 1)
    assert torch.equal(fitted(alone, 1), alone)
    assert bool((least_ends(alone.float(), 1) <= 127).all())


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31))
def test_four_channels_are_paired_as_well_as_they_can_be(seed: int) -> None:
    weight = torch.randn(6, 4, 3, 3, generator=torch.Generator().manual_seed(seed))
    cost = costs([weight])
    np.testing.assert_allclose(cost, cost.T)

    def whole(order: list[int]) -> float:
        return float(cost[order[0], order[1]] + cost[order[2], order[3]])

    order = matched(cost).tolist()
    assert sorted(order) == [0, 1, 2, 3]
    assert whole(order) <= min(whole(list(other)) for other in itertools.permutations(range(4))) * (1 + 1e-3)


def test_costs_are_those_of_their_equation() -> None:
    weight = torch.randn(3, 6, 2, generator=torch.Generator().manual_seed(0)).double()
    numbers, largest = weight.numpy(), weight.abs().amax((1, 2)).numpy()
    expected = 0.0
    for output, tap, sign in itertools.product(range(3), range(2), (1, -1)):
        one, other = (max(sign * numbers[output, channel, tap], 0.0) / largest[output] for channel in (1, 4))
        expected += largest[output] ** 2 / np.mean(largest**2) * np.exp(10 * (one + other - 1))
    assert costs([weight])[1, 4] == pytest.approx(expected)


def subject(model: nn.Module, x: Tensor, target: str = "ort-cpu", **options: object) -> Subject:
    graph = copied(float_form(model, x))
    write_norms(graph)
    return Subject(graph, graph, Placement(graph, get_target(target, **options)), [x])


def steps(given: Subject) -> dict[str, Tensor]:
    """The ends of each marked layer's ranges, over those of 8 bits."""
    found = {}
    for node in given.graph.graph.nodes:
        if PAIRED in node.meta:
            weight = parameter(given.graph, node.args[1])
            assert weight is not None
            largest = weight.flatten(1).abs().amax(1)
            found[node.name] = torch.maximum(least_ends(weight, node.meta[PAIRED]) / largest, torch.ones(()))
    return found


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(nets(most=4))
def test_any_net_computes_the_same_in_another_order(net) -> None:
    x = example(net, 8, 0)
    given = subject(build(net), x)
    expected = [output.detach() for output in tensors(call(given.graph, x))]
    try:
        order_pairs(given)
    except Declined:
        return
    for output, wanted in zip(tensors(call(given.graph, x)), expected, strict=True):
        torch.testing.assert_close(output.detach(), wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()) + 1e-6)


@pytest.mark.parametrize("make", [models.small_mobilenet, models.small_resnet])
def test_steps_are_narrower_and_a_net_with_depthwise_layers_computes_the_same(make) -> None:
    torch.manual_seed(0)
    model = models.settled(make(), 16)
    x = torch.randn(4, 3, 16, 16)
    given = subject(model, x)
    expected = call(given.graph, x).detach()
    unordered = subject(model, x)
    for node, other in zip(unordered.graph.graph.nodes, given.graph.graph.nodes, strict=True):
        assert node.name == other.name
    order_pairs(given)
    for node in unordered.graph.graph.nodes:
        node.meta |= {key: value for key, value in find(given, node.name).meta.items() if key == PAIRED}
    torch.testing.assert_close(call(given.graph, x).detach(), expected, rtol=1e-4, atol=1e-5)
    before, after = steps(unordered), steps(given)
    assert before.keys() == after.keys()
    squares = [sum(float(ends.square().mean()) for ends in found.values()) for found in (before, after)]
    assert squares[1] < squares[0]


def find(given: Subject, name: str):
    return next(node for node in given.graph.graph.nodes if node.name == name)


@pytest.mark.parametrize(
    ("target", "options"),
    [
        ("tensorrt", {}),
        ("ort-cpu", {"weight_bits": 7}),
        ("ort-cpu", {"weight_bits": 4}),
        ("ort-cpu", {"weights_only": True}),
    ],
)
def test_where_nothing_is_added_in_16_bits_nothing_is_done(target: str, options: dict[str, object]) -> None:
    given = subject(models.small_mobilenet().eval(), torch.randn(2, 3, 16, 16), target, **options)
    if "weight_bits" in options and options["weight_bits"] == 4:  # the first and the last layer have 8
        order_pairs(given)
        assert len(steps(given)) == 2
        return
    with pytest.raises(Declined, match="no product of two weights is added in 16 bits"):
        order_pairs(given)


class OfOneSign(nn.Module):
    """Layers with large weights of one sign beside each other, which saturate wherever bytes are large."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = nn.Conv2d(16, 32, 1), nn.Conv2d(32, 8, 3, padding=1), nn.Linear(8, 6)
        for layer in (self.first, self.second, self.head):
            nn.init.uniform_(layer.weight, 0.2, 1.0)
            with torch.no_grad():
                layer.weight *= (
                    torch.rand(layer.weight.shape[:2])
                    .sub(0.3)
                    .sign()
                    .reshape(*layer.weight.shape[:2], *[1] * (layer.weight.dim() - 2))
                )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x).relu()).relu().mean((2, 3)))


X = torch.rand(16, 16, 6, 6, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "algorithms",
    [("pairs",), ("equalize", "pairs", "gptq"), ("pairs", "adaround"), ("pairs", "gptq-small", "steps"), ()],
)
def test_files_are_the_same_in_any_session(algorithms: tuple[str, ...], tmp_path: Path) -> None:
    config = QuantizeConfig(algorithms=algorithms, rounding_steps=20)
    made = quantize(OfOneSign().eval(), config, example=X, calibration=[X])
    result = export(made, tmp_path, ExportConfig(baselines=None), samples=[X])
    path, (gate,) = result.files["int8"], [gate for gate in result.gates if gate["name"] == "saturation"]
    assert gate["passed"]
    asks = onnx_notes.asks_for_exact_sums(path)
    assert asks is not bool(algorithms)
    if algorithms:
        assert gate["found"] == "no pair of weights can saturate: the file is the same on every x86 CPU"
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        (expected,) = IntegerReference(path).run({"x": X.numpy()})
        np.testing.assert_array_equal(session.run(None, {"x": X.numpy()})[0], expected)


@pytest.mark.parametrize("algorithms", [("pairs",), ()])
def test_nothing_saturates_in_openvino_either(algorithms: tuple[str, ...], tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    config = QuantizeConfig(algorithms=algorithms, target="openvino")
    made = quantize(OfOneSign().eval(), config, example=X, calibration=[X])
    result = export(made, tmp_path, ExportConfig(gates=bool(algorithms)), samples=[X])
    assert saturation_in_openvino(made.plan, result.files["int8"]).passed is (True if algorithms else None)
    (found,) = open_session(result.files["int8"], provider="openvino").run({"x": X.numpy()})
    distance = sqnr_db(call(made.graph, X).detach(), torch.from_numpy(found))
    if algorithms:
        assert distance > 80
    elif has("avx2") and not has(*VNNI):
        assert distance < 40


@pytest.mark.parametrize("algorithms", [("pairs",), ()])
def test_whatever_a_pass_makes_of_integers_is_stored_so_that_it_fits(algorithms: tuple[str, ...]) -> None:
    made = quantize(OfOneSign().eval(), QuantizeConfig(algorithms=algorithms), example=X, calibration=[X])
    layers = [node for node in made.graph.graph.nodes if node.target in WEIGHTED]
    assert len(layers) == 3
    for layer in layers:
        integers = integers_of(made.graph, layer)
        farther = (integers.int() + 8 * integers.sign()).clamp(-127, 127)
        assert not fits(farther.numpy(), 1)
        store_integers(made.graph, layer, farther)
        stored = integers_of(made.graph, layer)
        assert stored.dtype == torch.int8
        assert fits(stored.numpy(), 1) is bool(algorithms)


def test_the_default_is_nearer_than_7_bits_and_says_what_it_did() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 16)).eval()
    x = torch.randn(256, 64)
    errors = {}
    for bits, algorithms in ((8, ("pairs",)), (8, ()), (7, ())):
        config = QuantizeConfig(weight_bits=bits, algorithms=algorithms)
        made = quantize(model, config, example=x, calibration=[x])
        errors[bits, algorithms] = float((call(made.graph, x) - model(x)).detach().square().mean())
        notes = [note for note in made.plan.notes if note.startswith("pairs")]
        expected = ["pairs: the weights of 2 layers fit sums of 16 bits, 1 path of channels in another order for it"]
        assert notes == (expected if algorithms else [])
    assert errors[8, ()] < errors[8, ("pairs",)] < errors[7, ()]


def test_a_saved_order_is_repeated_and_not_found_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, saved = OfOneSign().eval(), tmp_path / "ranges.json"
    first = quantize(model, QuantizeConfig(), example=X, calibration=[X])
    orders = [entry["pairs"] for entry in first.ranges.values() if "pairs" in entry]
    assert orders
    assert all(sorted(order) == list(range(len(order))) != order for order in orders)
    saved.write_text(json.dumps(first.ranges))
    monkeypatch.setattr(pairs, "matched", lambda cost: pytest.fail("it was saved"))
    again = quantize(model, QuantizeConfig(ranges_from=str(saved)), example=X, calibration=[])
    assert torch.equal(first(X), again(X))

    def changed(numbers: list[int]) -> None:
        ranges = {k: v | ({"pairs": numbers} if "pairs" in v else {}) for k, v in first.ranges.items()}
        saved.write_text(json.dumps(ranges))

    changed([0] * len(orders[0]))
    with pytest.raises(UsageError, match="an order of the 32 channels at 'conv2d'; got a channel twice"):
        quantize(model, QuantizeConfig(ranges_from=str(saved)), example=X, calibration=[])
    changed([1, 0])
    with pytest.raises(UsageError, match="32 finite numbers of what pairs changed"):
        quantize(model, QuantizeConfig(ranges_from=str(saved)), example=X, calibration=[])
    saved.write_text(json.dumps(first.ranges))
    config = QuantizeConfig(ranges_from=str(saved), algorithms=("pixels", "smooth", "equalize"))
    with pytest.raises(UsageError, match="pairs among --algorithms"):
        quantize(model, config, example=X, calibration=[])


@functools.cache
def forms_to_train() -> FloatForms:
    return FloatForms(nn.Sequential(OfOneSign(), nn.Linear(6, 4)).eval())


def trained(config: QuantizeConfig, tuning: QatConfig, *, steps: int = 12) -> tuple[QuantizedModel, Tensor]:
    """QAT whose last steps, ranges frozen, still move weights by several integers; and what it computed at its end."""
    kept: dict[str, Any] = {}

    def fine_tune(graph: nn.Module, hooks: Any, loss: Any) -> None:
        weights = [value for name, value in graph.named_parameters() if name.endswith("weight")]
        for step in range(steps):
            hooks.before_step(graph, step, steps)
            graph(X).square().sum().backward()
            with torch.no_grad():
                for weight in weights:
                    weight -= 0.01 * weight.grad.sign()
            graph.zero_grad()
        hooks.mode(graph, False)
        kept["output"] = graph(X).detach()

    forms = forms_to_train()
    made = quantize(forms.model, config, example=X, calibration=[X], qat=fine_tune, tuning=tuning, forms=forms)
    return made, kept["output"]


@pytest.mark.parametrize(
    ("step_size", "algorithms", "freeze_bn"),
    [("observed", None, 0.0), *((kind, ("pairs",), share) for kind in ("observed", "learned") for share in (0.0, 0.5))],
)
def test_training_keeps_pairs_within_bounds(
    step_size: str, algorithms: tuple[str, ...] | None, freeze_bn: float, tmp_path: Path
) -> None:
    config = QuantizeConfig(mode="qat", algorithms=algorithms)
    made, output = trained(config, QatConfig(step_size=step_size, freeze_observers=0.5, freeze_bn=freeze_bn))
    layers = [node for node in made.graph.graph.nodes if node.target in WEIGHTED]
    assert len(layers) == 4
    assert all(fits(integers_of(made.graph, layer).numpy(), 1) for layer in layers) is (algorithms is not None)
    assert sqnr_db(output, call(made.graph, X)) >= 35  # single steps flip, which are wide where weights shrank
    path = export(made, tmp_path, ExportConfig(baselines=None), samples=[X]).files["int8"]
    assert onnx_notes.asks_for_exact_sums(path) is (algorithms is None)
    notes = [note for note in made.plan.notes if "pairs" in note]
    ends = "which training keeps to" if freeze_bn else "2 paths of channels in another order for it"
    assert notes == ([f"pairs: the weights of 4 layers fit sums of 16 bits, {ends}"] if algorithms else [])


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(SHAPES), st.integers(0, 2**31), st.booleans())
def test_gradients_pass_where_an_integer_fits_and_nowhere_else(
    shape: tuple[int, ...], seed: int, learned: bool
) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed), requires_grad=True)
    scale = torch.full((shape[0],), 0.02)
    if learned:
        made = LearnedSteps(scale, 0, -127, 127, axis=0, paired=1)(weight, True)
        scale = LearnedSteps(scale, 0, -127, 127, axis=0).qparams()[0]
    else:
        made = fake_quantize(weight, scale, torch.zeros(shape[0], dtype=torch.int32), -127, 127, 0, 1)
    steps = scale.reshape(-1, *[1] * (len(shape) - 1))
    nearest = (weight.detach() / steps).round()
    kept = fitted(nearest.clamp(-127, 127), 1)
    torch.testing.assert_close(made.detach(), kept * steps)
    made.sum().backward()
    assert torch.equal(weight.grad, (kept == nearest).float())


@pytest.mark.parametrize("kind", [PerChannelFakeQuantizer, PerChannelWeightObserver])
def test_steps_are_as_wide_as_the_pairs_need(kind: Any) -> None:
    weight = OfOneSign().second.weight.detach()
    observer = kind(torch.int8, -127, 127, torch.per_channel_symmetric, 0, paired=1)
    observer(weight)
    largest = weight.flatten(1).abs().amax(1)
    scales, _ = observer.calculate_qparams()
    torch.testing.assert_close(scales, torch.maximum(largest, least_ends(weight, 1)) / 127)
    assert bool((scales > 1.2 * largest / 127).all())
