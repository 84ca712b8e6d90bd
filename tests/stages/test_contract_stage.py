"""Quantizing under a contract: what is left when it is kept, what when it is not, after a kill, and what is refused."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from torch import nn
from torch.utils.data import DataLoader, Dataset

import qtool
from qtool import cli
from qtool.artifacts import alone, has_result, read_result
from qtool.errors import ContractError, QtoolError, UsageError
from qtool.quantization.capturing.capture import capture
from qtool.quantization.contracts import search
from qtool.quantization.contracts.contract import Judge
from qtool.reporting.contracts import advice, contract_sentence
from qtool.reporting.gather import gather
from qtool.reporting.page import report, write_report
from qtool.reporting.terminal import show
from qtool.stages import cost

OPTIONS = {"calibration": "train:64"}
QUICK = OPTIONS | {"ranges": "minmax", "algorithms": None}
"""For what holds whatever is done to a model."""


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer kinds of candidates, timed for a moment only."""
    monkeypatch.setattr(cost, "SECONDS", 0.0)
    monkeypatch.setattr(search, "RUNGS", (search.as_asked, search.mixed, search.training))


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory: pytest.TempPathFactory, small_recipe: Path, held_out_data: str) -> Path:
    out = tmp_path_factory.mktemp("trained") / "run"
    qtool.train(f"{small_recipe.parent}/net.py:build", held_out_data, out=out, epochs=2, batch_size=16)
    return out


@pytest.fixture
def trained(tmp_path: Path, trained_once: Path) -> Path:
    return shutil.copytree(trained_once, tmp_path / "run")


def test_a_second_search_in_a_run_directory_is_refused_while_the_first_is_at_work(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qtool.artifacts.WAIT_SECONDS", 0.0)
    with (
        alone(trained / "checkpoints", "quantize"),
        pytest.raises(QtoolError, match="one 'qtool quantize' at a time; got another at work"),
    ):
        qtool.quantize(trained, max_drop=5.0, method="ptq", **QUICK)
    assert not (trained / "search").exists()


def test_units_that_multiply_stored_integers_are_not_counted_as_float(trained: Path) -> None:
    made = qtool.quantize(trained, max_drop=50.0, weights_only=True, calibration="train:64", ranges="minmax")
    (trial,) = read_result(trained, "quantize")["contract"]["trials"]
    assert any(unit.weight_bits for unit in made.plan.float_units)
    assert trial["num_float_units"] == sum(unit.weight_bits is None for unit in made.plan.float_units)


def test_a_contract_that_is_kept(trained: Path) -> None:
    quantized = qtool.quantize(trained, max_drop=5.0, **OPTIONS)
    outcome = read_result(trained, "quantize")["contract"]
    assert outcome["met"]
    assert outcome["num_samples"] == 300
    assert [trial["name"] for trial in outcome["trials"]] == [
        "ptq, network + pixels + smooth + equalize + pairs + analytic-bias + gptq-small"
    ]
    assert outcome["options"] == {}
    assert outcome["metric"] == "top1"
    assert not (trained / "search").exists()
    torch.testing.assert_close(
        quantized(torch.zeros(2, 1, 8, 8)), qtool.quantize(trained, **OPTIONS)(torch.zeros(2, 1, 8, 8))
    )


def test_one_that_is_not_kept_leaves_no_artifact(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    qtool.quantize(trained, **QUICK)
    told: list[str] = []
    with pytest.raises(
        ContractError, match=r"KL ≤ 1e-09.* is closest: KL .* on 300 samples; units that hurt: "
    ) as caught:
        qtool.quantize(trained, max_kl=1e-9, method="ptq", progress=told.append, **QUICK)
    outcome = caught.value.details
    assert json.loads(json.dumps(outcome)) == json.loads((trained / "contract.json").read_text())
    assert {"stale"} <= read_result(trained, "quantize", stale=True).keys()
    assert (trained / "search" / "closest" / "int8.pt2").exists()
    assert {unit["name"] for unit in outcome["harmful"]} >= {"first.0", "second.0"}
    floats = [trial for trial in outcome["trials"] if "in float" in trial["name"]]
    assert floats
    assert all(trial["speedup"] > 0 and trial["size_bytes"] > 0 for trial in outcome["trials"])
    assert set(outcome["frontier"]) <= {trial["name"] for trial in outcome["trials"]}
    assert [line for line in told if line.startswith("contract: frontier: ")]
    found = report(trained)
    assert found["contracts"] == {trained.name: json.loads(json.dumps(outcome))}
    html, markdown = (Path(found["files"][kind]).read_text(encoding="utf-8") for kind in ("html", "markdown"))
    assert "contract not kept; closest is" in html
    assert outcome["source"]["data"] in html
    assert html.count("<svg") >= 4  # the training, what was lost against size and against time, the units that hurt
    for words in ("size, MiB", "time, FP32 = 1", "limit 1e-09", "Most harm comes from", "no quantized model"):
        assert words in html
    assert all(f"| {trial['name']} |" in markdown for trial in outcome["trials"])
    monkeypatch.setattr("qtool.quantization.stage.quantize", None)  # everything is known by now
    with pytest.raises(ContractError):
        qtool.quantize(trained, max_kl=1e-9, method="ptq", **QUICK)


def test_other_labels_begin_a_search_anew(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3)).eval()
    calibration, held = torch.randn(32, 1, 8, 8), torch.randn(300, 1, 8, 8)
    right = model(held).argmax(1)
    for labels in (torch.zeros_like(right), right):
        with pytest.raises(ContractError) as caught:
            qtool.quantize(
                model, [calibration], validation=[(held, labels)], max_drop=0.7, metric="loss",
                max_kl=1e-9, method="given", out=tmp_path, activation_bits=3,
            )  # fmt: skip
        assert not caught.value.details["higher_is_better"]
        assert "rise of loss ≤ 0.7 points" in contract_sentence(caught.value.details)
        drop = caught.value.details["trials"][0]["criteria"][0]["value"]
        logits = qtool.stages.quantization.load_quantized(tmp_path / "search" / "closest")(held)
        losses = [nn.functional.cross_entropy(outputs, labels).item() for outputs in (model(held), logits)]
        assert drop == pytest.approx(100 * (losses[1] - losses[0]), rel=1e-3)


def test_other_places_that_count_begin_a_search_anew(tmp_path: Path) -> None:
    """A search for a divergence or an agreement has no labels but for the places that they leave out."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 20)).eval()
    calibration, held = torch.randint(20, (32, 10)), torch.randint(20, (200, 10))
    targets = torch.randint(20, (200, 10))
    few = torch.where(torch.arange(10) < 2, targets, -100)
    options: dict[str, Any] = {"max_kl": 1e-12, "method": "given", "task": "language-modelling", "effort": "fast"}
    for wanted in (targets, few):
        with pytest.raises(ContractError) as caught:
            qtool.quantize(model, [calibration], validation=[(held, wanted)], out=tmp_path, **options)
        other = qtool.stages.quantization.load_quantized(tmp_path / "search" / "closest")(held)
        one, two = (logits.detach().double().log_softmax(-1) for logits in (model(held), other))
        apart = (one.exp() * (one - two)).sum(-1)[wanted != -100].mean()
        found = caught.value.details["trials"][0]["criteria"][0]["value"]
        assert found == pytest.approx(float(apart), rel=1e-4)


def test_the_closest_candidate_is_exported_when_it_is_named(trained: Path) -> None:
    told: list[str] = []
    with pytest.raises(ContractError) as caught:
        qtool.quantize(trained, max_kl=1e-9, method="given", progress=told.append, **QUICK)
    closest = trained / "search" / "closest"
    assert f"'{closest}'" in told[-1]
    recorded = read_result(closest, "quantize")
    assert recorded["contract"] == json.loads(json.dumps(caught.value.details))
    with pytest.raises(UsageError, match=rf"got variants search/closest; name one: {re.escape(str(closest))}"):
        qtool.export(trained)
    exported = qtool.export(closest, baselines=None)
    gates = {gate["name"]: gate for gate in exported.gates}
    assert gates["contract"]["passed"] is None
    assert "did not keep it" in gates["contract"]["found"]
    assert all(gate["passed"] for name, gate in gates.items() if name != "contract")
    x = torch.zeros(2, 1, 8, 8)
    alone = qtool.quantize(trained, out=trained.parent / "alone", **QUICK)
    torch.testing.assert_close(qtool.stages.quantization.load_quantized(closest)(x), alone(x))
    assert "contract not kept" in Path(report(closest)["files"]["html"]).read_text(encoding="utf-8")


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"")])
def test_a_closest_candidate_that_is_damaged_is_made_again(trained: Path, damage: Callable[[Path], object]) -> None:
    closest = trained / "search" / "closest"
    for _ in range(2):
        with pytest.raises(ContractError):
            qtool.quantize(trained, max_kl=1e-9, method="given", **QUICK)
        assert read_result(closest, "quantize")
        damage(closest / "int8.pt2")


def test_an_export_of_before_a_contract_that_was_not_kept_is_not_measured(trained: Path) -> None:
    qtool.quantize(trained, **QUICK)
    qtool.export(trained, gates=False)
    (trained / "checkpoints" / "algorithms" / "gptq-0").mkdir(parents=True)
    with pytest.raises(ContractError):
        qtool.quantize(trained, max_kl=1e-9, method="given", **QUICK)
    assert not (trained / "checkpoints").exists()
    with pytest.raises(QtoolError, match="got one of a stale quantize: a later quantization did not keep its contract"):
        qtool.benchmark(trained, seconds=0)
    told = report(trained)["notes"]
    assert f"export is of a stale quantize: run 'qtool quantize {trained}' again" in told
    qtool.export(trained / "search" / "closest", trained, gates=False)
    assert qtool.benchmark(trained, seconds=0, allow_slower=True)["variants"]["int8"]["accuracy"]
    assert not [text for text in report(trained)["notes"] if text.startswith(("export", "benchmark"))]


def test_a_directory_alone_goes_on_where_a_contract_was_not_kept(
    small_net: str, small_data: str, tmp_path: Path
) -> None:
    out, told = tmp_path / "out", []
    options = OPTIONS | {"method": "given", "ranges": "minmax", "algorithms": None}
    for model, data, more in ((small_net, small_data, {"out": out}), (str(out), None, {})):
        with pytest.raises(ContractError):
            qtool.quantize(model, data, max_kl=1e-9, progress=told.append, **options | more)
    assert sum("trying" in line for line in told) == 1, "what is known is not made again"
    qtool.quantize(out, progress=told.append, **OPTIONS)
    with pytest.raises(ContractError):  # and marks that one stale; its units are measured anew
        qtool.quantize(out, max_kl=1e-9, **options | {"calibration": "train:32"})
    told.clear()
    qtool.quantize(out, progress=told.append, **OPTIONS | {"calibration": "train:16"})
    assert told[0].startswith("quantize: again, since calibration changed")


def test_the_command_line_exits_with_3_and_tells_all(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["quantize", str(trained), "--calibration", "train:64", "--max-kl", "1e-9", "--method", "given", "--json"]
    with pytest.raises(SystemExit) as left:
        cli.main.main(words)
    assert left.value.code == 3
    told = json.loads(capsys.readouterr().out)["error"]
    assert told["exit_code"] == 3
    assert told["details"]["met"] is False
    assert not has_result(trained, "quantize")


def test_the_model_is_captured_once_for_all_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[bool] = []

    def counted(*args: Any, train: bool = False, **options: Any) -> Any:
        captured.append(train)
        return capture(*args, train=train, **options)

    for module in ("capturing.float_form", "stage"):  # the evaluation form, and the one with batch-norm live
        monkeypatch.setattr(f"qtool.quantization.{module}.capture", counted)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 3))
    x = torch.randn(40, 1, 8, 8)
    batches = [(x[:20], torch.arange(20) % 3)]
    with pytest.raises(ContractError) as caught:
        qtool.quantize(net, batches, max_kl=1e-12, validation=[x[20:]], method="ptq")
    assert len(caught.value.details["trials"]) > 1
    assert caught.value.details["harmful"]
    assert captured == [False]
    captured.clear()
    qtool.quantize(net, batches, mode="qat", epochs=1)
    assert captured == [False]
    captured.clear()
    qtool.quantize(net, batches, mode="qat", epochs=1, freeze_bn=0.5)
    assert captured == [False, True]  # and not for the ranges that training starts from


def test_mixed_precision_passes_the_gates(trained: Path) -> None:
    """The contract is set where leaving units in float is what keeps it."""
    options = QUICK | {"algorithms": ["analytic-bias"]}
    with pytest.raises(ContractError) as caught:
        qtool.quantize(trained, max_kl=1e-9, method="ptq", **options)
    kl = {t["name"]: t["criteria"][0] for t in caught.value.details["trials"]}
    best = min(entry["ci95"][1] for name, entry in kl.items() if "float" not in name)
    limit = (min(entry["ci95"][1] for entry in kl.values()) + best) / 2
    qtool.quantize(trained, max_kl=limit, method="ptq", **options)
    result = read_result(trained, "quantize")
    assert "in float" in result["contract"]["chosen"]
    floats = [unit["name"] for unit in result["plan"]["units"] if unit["reason"] == "left in float by an override"]
    assert floats
    exported = qtool.export(trained, parity_samples=32, reference_samples=2, baselines=None)
    coverage = next(gate for gate in exported.gates if gate["name"] == "coverage")
    assert coverage["passed"]
    assert {unit["name"] for unit in coverage["details"]["float_units"]} >= set(floats)
    html = write_report(gather(trained))["html"].read_text(encoding="utf-8")
    assert "contract kept by" in html
    assert "SQNR of the output with only this layer quantized" in html


def test_training_is_the_last_resort(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "RUNGS", (search.as_asked, search.training))
    with pytest.raises(ContractError) as caught:
        qtool.quantize(trained, max_kl=1e-9, epochs=1, batch_size=16, **OPTIONS)
    assert [trial["name"] for trial in caught.value.details["trials"]] == [
        "ptq, network + pixels + smooth + equalize + pairs + analytic-bias + gptq-small",
        "qat",
    ]
    assert caught.value.details["trained"]
    assert "Promise less, or look at those units" in advice(caught.value.details)


def test_another_training_is_another_candidate(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "RUNGS", (search.as_asked, search.training))
    found = []
    for epochs in (1, 2, 1):
        with pytest.raises(ContractError) as caught:
            qtool.quantize(trained, max_kl=1e-9, epochs=epochs, batch_size=64, learning_rate=0.01, **QUICK)
        found.append(caught.value.details["trials"][1]["model_sha256"])
    assert found[0] == found[2] != found[1]


def test_a_model_that_equals_an_earlier_one_is_not_judged_again(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "RUNGS", (search.as_asked, search.free, search.training))
    monkeypatch.setattr(search, "FREE", ("smooth",))  # it declines: no linear layer reads a normalisation
    judged, score = [], Judge.score
    monkeypatch.setattr(Judge, "score", lambda self, model: judged.append(1) or score(self, model))
    for _ in range(2):  # the second time all is remembered
        with pytest.raises(ContractError) as caught:
            qtool.quantize(trained, max_kl=1e-9, method="ptq", algorithms=["bias"], **OPTIONS)
        assert len(caught.value.details["trials"]) == len(judged) == 1
        (note,) = caught.value.details["notes"]
        assert note.startswith("smooth")
        assert "changes nothing: it is the model of 'ptq" in note
    found = report(trained)["files"]
    assert all(note in Path(found[kind]).read_text(encoding="utf-8") for kind in ("html", "markdown"))


def test_batches_need_validation_batches_of_their_own() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3)).eval()
    calibration, held = torch.randn(32, 1, 8, 8), torch.randn(300, 1, 8, 8)
    quantized = qtool.quantize(model, [calibration], validation=held.split(100), max_kl=0.01)
    assert len(quantized.plan.integer_units) == 2
    labelled = [(part, model(part).argmax(1)) for part in (held[:200], held[:0], held[200:])]
    assert qtool.quantize(model, [calibration], validation=labelled, max_drop=5.0, min_agreement=90)
    with pytest.raises(UsageError, match="contract: expected validation samples; got batches to calibrate with only"):
        qtool.quantize(model, [calibration], max_kl=0.01)
    with pytest.raises(UsageError, match="labels to measure the metric with"):
        qtool.quantize(model, [calibration], validation=[held], max_drop=5.0)
    with pytest.raises(QtoolError, match=r"got 3 of 300 that are \(equal bytes\)"):
        qtool.quantize(model, [torch.cat([calibration, held[5:8]])], validation=[held], max_kl=0.01)


def test_a_net_whose_only_layer_cannot_be_left_in_float_ends_as_a_contract_that_is_not_kept() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3)).eval()
    calibration, held = torch.randn(32, 1, 8, 8), torch.randn(60, 1, 8, 8)
    with pytest.raises(ContractError) as caught:
        qtool.quantize(model, [calibration], validation=[held], max_kl=1e-14)
    assert caught.value.details is not None
    (note,) = caught.value.details["notes"]
    assert note.startswith("1 unit in float could not be made: quantize: expected a model with operators that")


class Heads(nn.Module):
    """Logits and, from layers of their own, boxes in pixels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.classes, self.boxes = (nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(144, 3)) for _ in "ab")

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.classes(x), "boxes": 1000 * self.boxes(x)}


def test_of_several_outputs_the_first_is_judged_which_is_told_and_its_units_come_first() -> None:
    calibration, held = torch.randn(32, 1, 8, 8), torch.randn(60, 1, 8, 8)
    with pytest.raises(ContractError) as caught:
        qtool.quantize(Heads().eval(), [calibration], validation=[held], max_kl=1e-12, method="given")
    assert caught.value.details is not None
    assert caught.value.details["notes"] == ["KL and agreement are those of the first of 2 outputs"]
    order = [unit["name"].split(".")[0] for unit in caught.value.details["harmful"]]
    assert order == ["classes", "classes", "boxes", "boxes"]


def test_validation_batches_that_cannot_be_judged_are_told() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3)).eval()
    held = torch.randn(60, 1, 8, 8)
    draw = itertools.count()
    drawn = DataLoader(held.tolist(), 10, collate_fn=lambda rows: torch.tensor(rows) + next(draw))
    for validation, told in (
        (drawn, "the same batches each time they are gone through; got another batch 0"),
        ([held.double()], "validation samples, 'input': expected float32 of N × 1 × 8 × 8; got float64"),
        ([held[:, :, :4]], "got float32 of 60 × 1 × 4 × 8"),
        (held, r"pass \[tensor\]"),
        ([3], "validation batch 0: expected tensors, batch first; got int"),
        ("fashion-mnist", "expected an iterable of batches; got a str"),
    ):
        with pytest.raises(QtoolError, match=told):
            qtool.quantize(model, [torch.randn(32, 1, 8, 8)], validation=validation, max_kl=1e-4, method="given")


class Augmented(Dataset[Any]):
    """Images of noise, which is drawn whenever one is read."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> Any:
        return torch.randn(1, 8, 8), index % 3


def test_a_validation_part_that_changes_is_told() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3)).eval()
    data = dict.fromkeys(("train", "validation", "test"), Augmented())
    with pytest.raises(
        QtoolError, match="the same validation samples in the same order each time; got others in batch"
    ):
        qtool.quantize(model, data, max_kl=1e-4, method="given")


def test_too_few_samples_for_an_agreement_are_told_before_any_is_read(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qtool.stages.contract.Candidates", None)
    with pytest.raises(UsageError, match=r"--min-agreement: expected at least 38,.* validation samples.*; got 200;"):
        qtool.quantize(trained, min_agreement=99.99, validation_samples=200, **OPTIONS)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"max_drop": 0.1}, "at least 3,838 validation samples"),
        ({"max_drop": 5.0, "metric": "mAP"}, "a metric of task 'classification'; got 'mAP'"),
        ({"max_drop": 5.0, "validation_samples": 20}, "at least 73 validation samples"),
        ({"min_agreement": 0.97}, r"'min_agreement': expected at least 50 percent; got 0\.97"),
        ({"metric": "top1"}, "'metric': expected max_drop, max_kl or min_agreement beside it; got none of them"),
        ({"time_budget": 5.0}, "'time_budget': expected max_drop"),
        ({"validation": [torch.zeros(2)]}, "'validation': expected max_drop"),
        ({"percentile": 99.5}, "'percentile': expected ranges 'percentile' beside it; got 'network'"),
        ({"max_drop": -1.0}, "argument 'max_drop': expected at least 0"),
        ({"max_drop": 5.0, "method": "magic"}, "argument 'method': expected one of auto, ptq, given"),
    ],
)  # fmt: skip
def test_what_cannot_be_promised_is_refused_before_any_work(options: dict[str, Any], part: str, trained: Path) -> None:
    with pytest.raises(UsageError, match=part):
        qtool.quantize(trained, **OPTIONS, **options)
    assert not has_result(trained, "quantize")


def test_a_sensitivity_of_another_model_is_refused(trained: Path) -> None:
    found = qtool.sensitivity(trained, samples=16, **OPTIONS)
    found["identity"]["model"] = "0" * 64
    (trained / "sensitivity.json").write_text(json.dumps(found))
    with pytest.raises(QtoolError, match="this model's weights; got one of another model"):
        qtool.quantize(trained, max_kl=0.01, **OPTIONS)


def test_a_sensitivity_is_used_again_for_the_same_units_in_as_many_bits(trained: Path) -> None:
    path = trained / "sensitivity.json"
    known = qtool.sensitivity(trained, samples=16, ranges="minmax", algorithms=None, **OPTIONS)["units"]
    for bits, again in ((8, True), (4, False)):
        with pytest.raises(ContractError) as caught:
            qtool.quantize(trained, max_kl=1e-9, method="given", weight_bits=bits, **OPTIONS)
        assert caught.value.details is not None
        harmful = caught.value.details["harmful"]
        assert (sorted(map(str, harmful)) == sorted(map(str, known))) is again
        assert json.loads(path.read_text())["config"]["weight_bits"] == bits


def test_no_time_at_all_is_told(trained: Path) -> None:
    with pytest.raises(ContractError, match="got a time budget of 0"):
        qtool.quantize(trained, max_kl=0.01, time_budget=0.0, **QUICK)
    with pytest.raises(ContractError, match="give more time: the search goes on where it stopped"):
        qtool.quantize(trained, max_kl=1e-9, time_budget=0.01, **QUICK)


def test_a_recipe_holds_a_contract_for_each_variant(
    tmp_path: Path, small_net: str, held_out_data: str, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = {
        "model": small_net, "data": held_out_data, "variants": ["ptq"], "train": {"epochs": 1, "batch_size": 16},
        "quantize": {"calibration": "train:64", "max_kl": 1e-9, "method": "given"},
    }  # fmt: skip
    with pytest.raises(ContractError, match="KL ≤ 1e-09"):
        qtool.run(recipe, tmp_path / "out")
    assert not has_result(tmp_path / "out" / "ptq", "quantize")
    assert (tmp_path / "out" / "ptq" / "contract.json").exists()
    found = qtool.inspect(tmp_path / "out")["variants"]["ptq"]
    assert found == qtool.inspect(tmp_path / "out" / "ptq")
    assert "contract" in found
    show("inspect", found)
    told = " ".join(capsys.readouterr().out.split())
    name = "ptq, network + pixels + smooth + equalize + pairs + analytic-bias + gptq-small"
    assert f"contract not kept; closest is '{name}': KL ≤ 1e-09 nats" in told
    assert "allow more by --method auto" in told


SLOW = """
import sys, time
from qtool.quantization.contracts import search
from qtool.quantization import stage
from qtool.stages import contract, cost
import qtool
cost.SECONDS = 0.0
search.RUNGS = (search.as_asked, search.mixed, search.training)
made = contract.Candidates._made
def slow(self, config):
    found = made(self, config)
    print("made", flush=True)
    time.sleep(float(sys.argv[2]))
    return found
contract.Candidates._made = slow
qtool.quantize(
    sys.argv[1], max_kl=1e-9, method="ptq", calibration="train:64", ranges="minmax", algorithms=None
)
"""


@pytest.mark.slow
def test_a_search_killed_by_sigkill_goes_on(trained: Path, tmp_path: Path) -> None:
    process = warm.Started(tmp_path / "said", warm.script, SLOW, str(trained), "0.5")
    process.wait_for(lambda: process.said().splitlines().count("made") == 1)
    time.sleep(0.1)
    process.kill()
    known = {path.name: path.stat().st_mtime_ns for path in (trained / "search").glob("*.safetensors")}
    assert len(known) == 1
    with pytest.raises(ContractError):
        qtool.quantize(trained, max_kl=1e-9, method="ptq", **QUICK)
    now = {path.name: path.stat().st_mtime_ns for path in (trained / "search").glob("*.safetensors")}
    assert {name: now[name] for name in known} == known
    assert len(now) > 1
