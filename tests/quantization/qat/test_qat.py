"""Quantization-aware training through the loop, by both engines: what it gains, what it freezes, how it resumes."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import json
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hard_nets import hard_mobilenet, images
from qat_runs import ENGINES, SAMPLES, TEST, TRAIN, Killed, config, forms, qat
from qat_runs import trained as trained  # the fixture
from torch import nn
from torch.fx import GraphModule

from qtool.errors import QtoolError, UsageError
from qtool.evaluate import sqnr_db
from qtool.form import QuantizedModel
from qtool.graphs.operators import DROPOUTS
from qtool.quantization import targets
from qtool.quantization.algorithms import steps
from qtool.quantization.calibration.observers import PerChannelFakeQuantizer
from qtool.quantization.engines import pt2e
from qtool.quantization.qat.fine_tune import QatHooks
from qtool.quantization.stage import quantize
from qtool.quantization.targets import INT8_WEIGHT, ORT_CPU
from qtool.recipe import QatConfig, QuantizeConfig


def agreement(model: nn.Module, quantized: QuantizedModel) -> float:
    with torch.no_grad():
        return float((model(TEST).argmax(1) == quantized(TEST).argmax(1)).float().mean())


@pytest.mark.parametrize("engine", ENGINES)
def test_training_recovers_what_coarse_weights_lose(
    engine: str, trained: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    coarse = dataclasses.replace(ORT_CPU, weight=dataclasses.replace(INT8_WEIGHT, qmin=-1, qmax=1))
    monkeypatch.setitem(targets.TARGETS, "ort-cpu", coarse)
    before = quantize(trained, QuantizeConfig(engine=engine, algorithms=None), **SAMPLES, forms=forms(trained))
    after = qat(trained, engine, config(epochs=10, freeze_bn=0.5))  # so few levels move the statistics
    with torch.no_grad():
        wanted = trained(TEST)
    assert agreement(trained, after) > agreement(trained, before) - 0.02  # ten images of 512, near the edge
    assert sqnr_db(wanted, after(TEST)) > sqnr_db(wanted, before(TEST)) + 1


def test_nothing_that_torch_says_of_itself_reaches_the_user(trained: nn.Module) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        qat(trained, "pt2e", config(epochs=1))
    assert [str(word.message) for word in said if not issubclass(word.category, DeprecationWarning)] == []


@pytest.mark.parametrize("engine", ENGINES)
def test_at_eight_bits_training_keeps_agreement(engine: str, trained: nn.Module) -> None:
    kept: dict[str, Any] = {}
    made = qat(trained, engine, config(learning_rate=2e-4), kept)
    assert agreement(trained, made) >= 0.95
    assert all(torch.isfinite(torch.tensor(kept["history"].losses)))


@functools.cache
def undisturbed(model: nn.Module, engine: str) -> tuple[QuantizedModel, torch.Tensor]:
    """What a run gives that nothing stops, and what its graph gave before it was converted."""
    kept: dict[str, Any] = {}
    return qat(model, engine, config(), kept), kept["output"]


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_converted_is_what_was_trained(engine: str, trained: nn.Module) -> None:
    made, output = undisturbed(trained, engine)
    assert sqnr_db(output, made(TEST)) >= 45  # int32 biases and the order of float sums flip single steps


def test_both_engines_name_the_same_units_and_ranges(trained: nn.Module) -> None:
    first, second = (qat(trained, engine, config(epochs=1)) for engine in ENGINES)
    units = [[(unit.name, unit.kind, unit.integer) for unit in made.plan.units] for made in (first, second)]
    assert units[0] == units[1]
    assert first.ranges.keys() == second.ranges.keys()
    assert all(entry["method"] == "qat" for entry in second.ranges.values())
    for name, entry in first.ranges.items():  # trained apart, from equal ranges
        width = entry["high"] - entry["low"]
        assert abs(entry["high"] - second.ranges[name]["high"]) < 0.2 * width, name


@pytest.mark.parametrize("engine", ENGINES)
def test_statistics_and_ranges_are_frozen_in_turn(engine: str, trained: nn.Module) -> None:
    kept: dict[str, Any] = {}
    qat(trained, engine, config(freeze_bn=0.5, freeze_observers=0.75), kept)  # 12 steps: frozen from 6 and from 9 on
    seen = kept["hooks"].seen
    assert len(seen) == 12
    means = [name for name in seen[0] if name.endswith("running_mean")]
    lows = [name for name in seen[0] if name.endswith("high") and "input" not in name]
    weights = [name for name in seen[0] if name.endswith("scale") and seen[0][name].numel() in (4, 8)]
    assert len(means) == 2
    assert len(weights) == 3
    for names, first, frozen in ((means, 0, 6), (lows, 0, 9), (weights, 1, 9)):  # calibration saw the first weights
        moved = [any(not torch.equal(a[n], b[n]) for n in names) for a, b in itertools.pairwise(seen)]
        assert all(moved[first:frozen]), names
        assert not any(moved[frozen:]), names


def test_ranges_stay_those_of_post_training_quantization(trained: nn.Module) -> None:
    after = quantize(trained, QuantizeConfig(algorithms=None), **SAMPLES, forms=forms(trained))
    ranges = qat(trained, "pt2e", config()).ranges
    assert ranges.keys() <= after.ranges.keys()
    for name, found in ranges.items():
        assert found["low"] == pytest.approx(after.ranges[name]["low"]), name
        assert found["high"] == pytest.approx(after.ranges[name]["high"]), name


def untouched(*_: Any) -> None:
    """A training that does nothing."""


STEPS = ("smooth", "equalize", "steps")


@pytest.mark.parametrize(
    ("options", "drops"), [({}, True), ({"weight_bits": 4}, False), ({"algorithms": STEPS}, False)]
)
def test_training_starts_from_what_rounding_made(
    options: dict[str, Any], drops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Channels scaled by e² and back, which equalization undoes and which 8 bits do not hold as they are."""
    monkeypatch.setattr(steps, "SAMPLES", 64)
    model, batches = hard_mobilenet(), [images(64 if "algorithms" in options else 32)]
    if drops:
        model = nn.Sequential(model, nn.Dropout(0.5), nn.Linear(10, 4)).eval()
    made = {
        mode: quantize(
            model, QuantizeConfig(mode=mode, **options), example=batches[0][:8], calibration=batches, qat=untouched,
            tuning=config(), forms=forms(model),
        )
        for mode in ("ptq", "qat")
    }  # fmt: skip
    x = images(64, seed=1)
    assert sqnr_db(made["ptq"](x), made["qat"](x)) >= 60
    changes = [[note for note in each.plan.notes if note.startswith(("equal", "pairs"))] for each in made.values()]
    assert changes[0] == changes[1]
    assert changes[0]
    assert {name for name, entry in made["qat"].ranges.items() if "equalize" in entry}
    learned = [note for each in made.values() for note in each.plan.notes if note.startswith("steps: ")]
    assert all("scales and the biases" in note for note in learned), learned


class Read:
    """Batches that count how often they are read."""

    def __init__(self, batches: list[torch.Tensor]) -> None:
        self.batches, self.count = batches, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        for batch in self.batches:
            self.count += 1
            yield batch


def test_where_ranges_are_known_one_batch_is_read_for_the_weights(trained: nn.Module) -> None:
    counts = []
    for mode in ("ptq", "qat"):
        batches = Read([torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(4)])
        quantize(
            trained, QuantizeConfig(mode=mode), example=batches.batches[0], calibration=batches,
            qat=untouched if mode == "qat" else None, tuning=config(), forms=forms(trained),
        )  # fmt: skip
        counts.append(batches.count)
    assert counts[1] == counts[0] + 1


def test_with_batch_norm_live_training_starts_from_the_model_as_it_is() -> None:
    model, batches = hard_mobilenet(), [images(32)]
    folded, live = (
        quantize(
            model, QuantizeConfig(mode="qat"), example=batches[0], calibration=batches, qat=untouched,
            tuning=config(freeze_bn=freeze_bn), forms=forms(model),
        )
        for freeze_bn in (0.0, 0.5)
    )  # fmt: skip
    x = images(64, seed=1)
    with torch.no_grad():
        assert sqnr_db(model(x), folded(x)) >= sqnr_db(model(x), live(x)) + 6
    assert all("equalize" not in entry for entry in live.ranges.values())


def test_what_passes_did_before_training_is_repeated_with_its_ranges(tmp_path: Path) -> None:
    model, batches = hard_mobilenet(), [images(32)]
    quantize_ = partial(quantize, model, example=batches[0], qat=untouched, tuning=config(), forms=forms(model))
    made = quantize_(QuantizeConfig(mode="qat"), calibration=batches)
    saved = tmp_path / "ranges.json"
    saved.write_text(json.dumps(made.ranges))
    again = quantize_(QuantizeConfig(mode="qat", ranges_from=str(saved)), calibration=batches)
    assert sqnr_db(made(batches[0]), again(batches[0])) >= 60
    with pytest.raises(UsageError, match="--freeze-bn 0 with --mode qat"):
        quantize_(QuantizeConfig(mode="qat", ranges_from=str(saved)), calibration=batches, tuning=config(freeze_bn=0.5))


def test_what_the_model_does_not_train_stays(trained: nn.Module) -> None:
    model = copy.deepcopy(trained)
    model.second[0].requires_grad_(False)
    seen: dict[str, bool] = {}

    def look(graph: nn.Module, *_: Any) -> None:
        seen.update({name: value.requires_grad for name, value in graph.named_parameters()})

    quantize(model, QuantizeConfig(mode="qat"), **SAMPLES, qat=look, tuning=config())
    weights = {name: trains for name, trains in seen.items() if name.endswith("weight")}
    assert weights == {"first.0.weight": True, "second.0.weight": False, "last.weight": True}
    assert sorted(seen.values()) == [False, False, True, True, True, True], "each has a bias, folded or corrected"


class Frozen(nn.Module):
    """A net whose first layers run without gradients, as a backbone that is only read from."""

    def __init__(self, whole: bool = False) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU())
        self.head, self.whole = nn.Linear(4, 10), whole

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(False):
            features = self.backbone(x).mean((2, 3))
            if self.whole:
                return self.head(features)
        return self.head(features)


@pytest.mark.parametrize(
    ("engine", "freeze_bn", "whole"),
    [("pt2e", 0.0, False), ("pt2e", 0.5, False), ("torch.ao", 0.5, False), ("pt2e", 0.0, True)],
)
def test_what_runs_without_gradients_is_not_trained(engine: str, freeze_bn: float, whole: bool) -> None:
    seen: dict[str, bool] = {}

    def look(graph: nn.Module, *_: Any) -> None:
        seen.update({name: value.requires_grad for name, value in graph.named_parameters()})

    wanted = QuantizeConfig(mode="qat", engine=engine)
    tuning = config(freeze_bn=freeze_bn)
    model = Frozen(whole)
    model.head.eval()
    x = torch.randn(8, 3, 8, 8)
    quantize(model, wanted, example=x, calibration=[x], qat=look, tuning=tuning)
    head = {name for name in seen if "head" in name or "linear" in name}
    assert {name for name, trains in seen.items() if trains} == (set(seen) if whole else head)
    assert set(seen) > head > set()
    assert all(value.requires_grad for value in model.parameters())
    assert [part.training for part in model.modules()] == [part is not model.head for part in model.modules()]


@pytest.mark.parametrize("freeze_bn", [0.0, 0.5])
def test_dropout_is_live_in_training_alone(freeze_bn: float, trained: nn.Module) -> None:
    flags: list[list[bool]] = []

    def look(graph: GraphModule, hooks: QatHooks, _: Any) -> None:
        for training in (True, False):
            hooks.mode(graph, training)
            flags.append([node.args[2] for node in graph.graph.nodes if node.target in DROPOUTS])

    quantize(trained, QuantizeConfig(mode="qat"), **SAMPLES, qat=look, tuning=config(freeze_bn=freeze_bn))
    assert flags == [[True], [False]]


def test_a_weights_range_follows_its_batch_norm_until_both_are_frozen(trained: nn.Module) -> None:
    kept: dict[str, Any] = {}
    qat(trained, "pt2e", config(freeze_bn=0.75, freeze_observers=0.25), kept)
    fakes = pt2e.fake_quantizers(kept["graph"])
    hooks = QatHooks(config(freeze_bn=0.75, freeze_observers=0.25), kept["hooks"].switch)
    hooks.mode(kept["graph"], True)
    for step, observing in ((2, {True}), (3, {True, False}), (8, {True, False}), (9, {False})):
        hooks.before_step(kept["graph"], step, 12)
        assert {fake.observing for fake in fakes} == observing
        assert all(fake.observing is (step < 9) for fake in fakes if isinstance(fake, PerChannelFakeQuantizer))
    hooks.mode(kept["graph"], False)
    assert not any(fake.observing for fake in fakes)


@pytest.mark.parametrize("engine", ENGINES)
def test_dropout_and_batch_norm_follow_the_mode(engine: str, trained: nn.Module) -> None:
    kept: dict[str, Any] = {}
    qat(trained, engine, config(epochs=1, max_steps=1), kept)
    graph: GraphModule = kept["graph"]
    hooks = QatHooks(config(), kept["hooks"].switch)
    hooks.mode(graph, True)
    before = {name: value.clone() for name, value in graph.named_buffers() if name.endswith("running_mean")}
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        assert not torch.equal(graph(TEST), graph(TEST))
    assert all(not torch.equal(graph.get_buffer(name), value) for name, value in before.items())
    hooks.mode(graph, False)
    before = {name: value.clone() for name, value in graph.named_buffers()}
    with torch.no_grad():
        assert torch.equal(graph(TEST), graph(TEST))
    assert all(torch.equal(graph.get_buffer(name), value) for name, value in before.items())


@pytest.mark.parametrize(("engine", "killed_after"), [("pt2e", 3), ("pt2e", 10), ("torch.ao", 7)])
def test_a_resumed_run_gives_the_same_bits(engine: str, killed_after: int, trained: nn.Module, tmp_path: Path) -> None:
    """Killed before anything is frozen, between, and after."""
    tuning = config(checkpoint_every=1)
    wanted, output = undisturbed(trained, engine)

    def kill(progress: Any) -> None:
        if progress.step == killed_after + 1:
            raise Killed

    with pytest.raises(Killed):
        qat(trained, engine, tuning, out=tmp_path / "parts", progress=kill)
    parts: dict[str, Any] = {}
    got = qat(trained, engine, tuning, parts, out=tmp_path / "parts")
    assert len(parts["hooks"].seen) == 12 - killed_after
    assert torch.equal(output, parts["output"])
    assert wanted.ranges == got.ranges
    ours, theirs = (dict(made.graph.named_buffers()) for made in (wanted, got))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


@pytest.mark.parametrize(("step_size", "frozen"), [("observed", True), ("learned", False)])
def test_the_hooks_state_is_what_is_frozen(step_size: str, frozen: bool) -> None:
    hooks, again = (QatHooks(config(step_size=step_size), _ignore) for _ in range(2))
    graph = torch.fx.symbolic_trace(nn.Identity())
    hooks.before_step(graph, 7, 12)
    again.load_state_dict(hooks.state_dict())
    assert (again.frozen_norms, again.frozen_ranges) == (True, frozen)


def _ignore(graph: GraphModule, *, batch_norm: bool, dropout: bool) -> None:
    """A switch without anything to switch."""


@pytest.mark.parametrize(
    ("engine", "precision"), [("pt2e", "16-mixed"), ("pt2e", "bf16-mixed"), ("torch.ao", "16-mixed")]
)
def test_mixed_precision(engine: str, precision: str, trained: nn.Module) -> None:
    assert agreement(trained, qat(trained, engine, config(precision=precision, learning_rate=2e-4))) >= 0.95


@pytest.mark.parametrize("precision", ["16-true", "bf16-true"])
def test_weights_in_16_bits_are_refused_before_any_work(precision: str, trained: nn.Module) -> None:
    with pytest.raises(UsageError, match=f"got '{precision}'; use {precision[:-5]}-mixed"):
        qat(trained, "pt2e", config(precision=precision))


@pytest.mark.parametrize("options", [{"devices": 2}, {"strategy": "fsdp"}, {"create_on_device": True}])
def test_several_devices_are_refused_before_any_work(options: dict[str, Any], trained: nn.Module) -> None:
    with pytest.raises(UsageError, match="one process with the whole model"):
        qat(trained, "pt2e", config(**options))


def test_what_a_captured_graph_does_not_have_is_refused_before_any_work(trained: nn.Module) -> None:
    with pytest.raises(UsageError, match="a captured graph, which has no blocks; got --activation-checkpointing"):
        qat(trained, "pt2e", config(activation_checkpointing=True))


def test_training_data_is_asked_for(trained: nn.Module) -> None:
    with pytest.raises(UsageError, match="training data"):
        quantize(trained, QuantizeConfig(mode="qat"), example=TRAIN[:2], calibration=[TRAIN])


@pytest.mark.parametrize("engine", ENGINES)
def test_a_value_that_is_not_finite_names_its_layer(engine: str, trained: nn.Module) -> None:
    bad = TRAIN[:4].clone()
    bad[0, 0, 0, 0] = float("nan")
    with pytest.raises(QtoolError, match=r"layer 'x'.*NaN"):
        quantize(
            trained, QuantizeConfig(mode="qat", engine=engine), example=TRAIN[:2], calibration=[bad], tuning=config(),
            qat=_never, forms=forms(trained),
        )  # fmt: skip


def _never(*_: Any) -> None:
    raise AssertionError("training began")


def test_hooks_without_a_graph_say_so() -> None:
    with pytest.raises(QtoolError, match="a captured graph; got Linear"):
        QatHooks(config()).mode(nn.Linear(2, 2), True)


@pytest.mark.parametrize("step_size", ["observed", "learned"])
def test_by_default_eight_bits_do_not_drift(step_size: str, trained: nn.Module) -> None:
    """Trained on batches of 32 it stays as close to the float model as without training; live statistics move it."""
    with torch.no_grad():
        wanted = trained(TEST)
    before = quantize(trained, QuantizeConfig(algorithms=None), **SAMPLES, forms=forms(trained))
    options = {"epochs": 4, "batch_size": 32, "device": "cpu", "step_size": step_size}
    after, moved = (
        qat(trained, "pt2e", QatConfig(**options, freeze_bn=share).settled(8))  # type: ignore[arg-type]
        for share in (QatConfig().freeze_bn, 1.0)
    )
    sqnr = {name: sqnr_db(wanted, made(TEST)) for name, made in (("ptq", before), ("qat", after), ("live", moved))}
    assert sqnr["qat"] > sqnr["ptq"] - 1, sqnr
    assert sqnr["qat"] > sqnr["live"] + 3, sqnr
