"""The contract judged on the exported file: kept, broken by the file alone, and what cannot be judged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from qdq_files import options

import qtool
from qtool import cli
from qtool.artifacts import read_result
from qtool.exporting import stage
from qtool.stages import cost

OPTIONS = {"calibration": "train:64"}
BARE: dict[str, Any] = {"parity_samples": 32, "reference_samples": 2, "baselines": ("fp32",)}


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "SECONDS", 0.0)


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory, small_recipe: Path, held_out_data: str) -> Path:
    """A run whose quantization keeps a contract on 300 validation images. Tests take a copy."""
    run = tmp_path_factory.mktemp("quantized") / "run"
    qtool.train(f"{small_recipe.parent}/net.py:build", held_out_data, out=run, epochs=1, batch_size=16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cost, "SECONDS", 0.0)
        qtool.quantize(run, max_drop=5.0, max_kl=0.01, **OPTIONS)
    return run


@pytest.fixture
def kept(quantized: Path, tmp_path: Path) -> Path:
    """Such a run of one's own."""
    return Path(shutil.copytree(quantized, tmp_path / "run"))


def test_the_verdict_is_that_of_the_files_own_answers(kept: Path, held_out_data: str) -> None:
    exported = qtool.export(kept, **BARE)
    verdict = read_result(kept, "export")["contract"]
    assert verdict["met"] is True
    assert verdict["num_samples"] == 300
    assert exported.gates[-1]["name"] == "contract"
    drop, kl = verdict["criteria"]
    images = np.load(Path(held_out_data.removeprefix("npz:")) / "validation.npz")
    data = qtool.data.specs.load_data(held_out_data, seed=0)
    x = torch.stack([data.validation[i][0] for i in range(300)]).numpy()  # type: ignore[index]
    answers = {}
    for name in ("fp32", "int8"):
        session = onnxruntime.InferenceSession(str(exported.files[name]), options(), providers=["CPUExecutionProvider"])
        (answers[name],) = session.run(None, {session.get_inputs()[0].name: x})
    right = {name: (z.argmax(1) == images["labels"]).mean() for name, z in answers.items()}
    assert drop["value"] == pytest.approx(100 * (right["fp32"] - right["int8"]), abs=1e-6)
    p, q = (torch.from_numpy(answers[name]).double().log_softmax(1) for name in ("fp32", "int8"))
    assert kl["value"] == pytest.approx(float((p.exp() * (p - q)).sum(1).mean()), rel=1e-3)


def test_a_file_that_breaks_it_takes_no_name_and_exits_with_3(
    kept: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file alone is spoilt: the graph that the search judged is not, and no other gate looks."""
    qtool.export(kept, **BARE)
    save = stage.save

    def spoilt(made: Any, path: Path, notes: Any) -> None:
        save(made, path, notes)
        if "int8" in path.name:
            model = onnx.load(str(path))
            stored = {tensor.name: tensor for tensor in model.graph.initializer}
            name = next(
                n.input[1] for n in model.graph.node if n.op_type == "DequantizeLinear" and n.input[0] in stored
            )
            stored[name].CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(stored[name]) * -3, name))
            onnx.save(model, str(path))

    monkeypatch.setattr(stage, "save", spoilt)
    monkeypatch.setattr(stage, "_gates", lambda *args: [])
    with pytest.raises(SystemExit) as left:
        cli.main.main(["export", str(kept), "--json"])
    assert left.value.code == 3
    told = json.loads(capsys.readouterr().out)["error"]
    assert told["details"]["met"] is False
    assert "stale" in read_result(kept, "export", stale=True)


def test_what_cannot_be_judged_says_so(tmp_path: Path, kept: Path) -> None:
    held = [(torch.randn(300, 1, 8, 8, generator=torch.Generator().manual_seed(1)), torch.arange(300) % 3)]
    qtool.quantize(kept, out=tmp_path / "own", validation=held, max_kl=0.1, **OPTIONS)
    first = qtool.export(tmp_path / "own", **BARE).gates[-1]
    assert (first["name"], first["passed"]) == ("contract", None)
    assert "pass them to export as validation=" in first["found"]
    again = qtool.export(tmp_path / "own", validation=held, **BARE).gates[-1]
    assert again["passed"] is True
    assert again["details"]["num_samples"] == 300


class Error:
    """A regression's mean absolute error, which is an object and nobody's file."""

    name, metric, higher_is_better = "error", "mae", False

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, float]:
        return (output - target).square().sum(), float(len(target))

    def metrics(self, output: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"mae": (output - target).abs().mean(1).sum()}


def test_a_contract_on_objects_is_judged_when_they_are_given_again(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    calibration, x = torch.randn(64, 1, 8, 8, generator=draw), torch.randn(100, 1, 8, 8, generator=draw)
    target = model(x).detach() + torch.randn(100, 2, generator=draw)
    held: dict[str, Any] = {"validation": [(x[:60], target[:60]), (x[60:], target[60:])]}
    qtool.quantize(model, [calibration], task=Error(), max_drop=5.0, out=tmp_path, effort="fast", **held)
    samples = [calibration]
    assert (
        "pass them to export as validation="
        in qtool.export(tmp_path, samples=samples, baselines=None).gates[-1]["found"]
    )
    assert "with task=" in qtool.export(tmp_path, samples=samples, baselines=None, **held).gates[-1]["found"]
    exported = qtool.export(tmp_path, samples=samples, task=Error(), baselines=None, **held)
    assert exported.gates[-1]["passed"] is True
    session = onnxruntime.InferenceSession(str(exported.files["int8"]), options(), providers=["CPUExecutionProvider"])
    (answers,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    errors = [np.abs(z - target.numpy()).mean() for z in (model(x).detach().numpy(), answers)]
    found = exported.gates[-1]["details"]["criteria"][0]["value"]
    assert found == pytest.approx(100 * (errors[1] - errors[0]), rel=1e-3)


def test_a_divergence_from_objects_needs_no_task(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3))
    samples, held = [torch.randn(32, 1, 8, 8)], [torch.randn(50, 1, 8, 8)]
    qtool.quantize(model, samples, task=Error(), validation=held, max_kl=0.1, out=tmp_path, effort="fast")
    assert qtool.export(tmp_path, samples=samples, validation=held, baselines=None).gates[-1]["passed"] is True


def test_without_a_contract_there_is_none_to_judge(kept: Path, tmp_path: Path) -> None:
    qtool.quantize(kept, out=tmp_path / "plain", **OPTIONS)
    exported = qtool.export(tmp_path / "plain", **BARE)
    assert "contract" not in [gate["name"] for gate in exported.gates]
    assert "contract" not in read_result(tmp_path / "plain", "export")
