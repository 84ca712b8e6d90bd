"""What a stage returns is what the next one takes: the same as the run directory or the model in it."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_device import DEVICE, Fake
from torch import nn
from torch.utils.data import TensorDataset

import qtool
from qtool.errors import QtoolError, UsageError
from qtool.reporting.terminal import inspect_lines


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(0)
    return [(torch.randn(8, 1, 8, 8, generator=draw), torch.arange(8) % 3) for _ in range(4)]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3))


class Wrong:
    """A task of one's own: the share of wrong answers."""

    name, metric, higher_is_better = "errors", "wrong", False

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, float]:
        return nn.functional.cross_entropy(output, target, reduction="sum"), float(len(target))

    def metrics(self, output: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"wrong": (output.argmax(1) != target).sum()}


def test_each_stage_takes_what_the_one_before_returned(tmp_path: Path) -> None:
    data = batches()
    trained = qtool.train(net(), data, epochs=1, max_steps=2)
    quantized, again = qtool.quantize(trained, data), qtool.quantize(trained.model, data)
    assert torch.equal(quantized(data[0][0]), again(data[0][0]))
    exported = qtool.export(quantized, tmp_path / "out", samples=data, baselines=("fp32",))
    assert exported.folder == tmp_path / "out"
    figures = qtool.benchmark(exported, data, task=Wrong(), seconds=0.1, allow_slower=True)
    assert (tmp_path / "out" / "benchmark.json").exists()  # committed where the files are
    for name, model in {"fp32": trained.model, "int8": quantized}.items():
        wrong = sum(float((model(x).argmax(1) != y).sum()) for x, y in data) / 32
        assert figures["variants"][name]["accuracy"]["metrics"]["wrong"] == pytest.approx(wrong)
    assert qtool.report(exported) == qtool.report(tmp_path / "out")
    assert qtool.inspect(exported) == qtool.inspect(tmp_path / "out")
    assert "model given as an object, data given as an object" in list(inspect_lines(qtool.inspect(exported)))
    with pytest.raises(QtoolError, match="the spec of its data; got one that was given as a Python object"):
        qtool.benchmark(exported)
    options = {"seconds": 0.1, "width": 1.0, "allow_slower": True}
    for files in (exported.files["int8"], [exported.files["int8"]], (str(exported.files["int8"]),)):
        assert list(qtool.benchmark(files, **options)["variants"]) == ["model.int8"]


class Named(nn.Module):
    """Two outputs by name, of which the task reads the second."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.net(x)
        return {"size": found.abs().sum(1), "classes": found}


class WrongByName(Wrong):
    def loss(self, output: dict[str, torch.Tensor], target: torch.Tensor) -> tuple[torch.Tensor, float]:  # type: ignore[override]
        return super().loss(output["classes"], target)

    def metrics(self, output: dict[str, torch.Tensor], target: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return super().metrics(output["classes"], target)


def test_a_benchmark_packs_outputs_as_the_model_does_and_asks_for_a_task_that_no_record_can_name(
    tmp_path: Path,
) -> None:
    model, data = Named().eval(), batches()
    qtool.quantize(model, data, task=WrongByName(), out=tmp_path)
    qtool.export(tmp_path, samples=data, baselines=("fp32",))
    options = {"seconds": 0.1, "width": 1.0, "allow_slower": True}
    told = qtool.benchmark(tmp_path, data, task=WrongByName(), **options)
    wrong = sum(float((model(x)["classes"].argmax(1) != y).sum()) for x, y in data) / 32
    assert told["variants"]["fp32"]["accuracy"]["metrics"]["wrong"] == pytest.approx(wrong)
    untold = qtool.benchmark(tmp_path, data, **options)
    assert "metrics" not in untold["variants"]["fp32"]["accuracy"]
    assert any("pass task" in note or "with task=" in note for note in untold["notes"])


def test_a_function_is_told_of_each_epoch_of_a_training_and_of_qat() -> None:
    told: list[str] = []
    parts = dict.fromkeys(("train", "validation"), TensorDataset(*map(torch.cat, zip(*batches(), strict=True))))
    trained = qtool.train(net(), parts, epochs=2, batch_size=8, device="cpu", progress=told.append)
    assert [line.split()[:4] for line in told] == [["train:", "epoch", str(epoch), "loss"] for epoch in (1, 2)]
    last = trained.history.epochs[-1]
    assert f"loss {last['loss']:.4f} " in told[-1]
    assert told[-1].endswith(f"top1 {last['validation_top1']:.3g}")
    told.clear()
    qtool.quantize(trained, parts, mode="qat", effort="fast", device="cpu", progress=told.append)
    assert [line.split()[:3] for line in told if "epoch" in line] == [["train:", "epoch", "1"]]


@pytest.mark.parametrize("stage", [qtool.train, qtool.quantize, qtool.sensitivity])
def test_progress_is_told_by_no_word(stage: Any) -> None:
    for wrong in ("yes", 1):
        with pytest.raises(
            UsageError, match=r"'progress': expected True, False, or a function .*; pass for example pro"
        ):
            stage(net(), batches(), progress=wrong)


def test_what_files_are_to_tell_is_in_them_and_is_taken_for_nothing_else(tmp_path: Path) -> None:
    told = {"commit": "c0ffee", "data": "of May", "labels": ["a", "b", "c"], "notes": {"über": [1, None]}}
    quantized = qtool.quantize(net(), batches(), effort="fast")
    exported = qtool.export(quantized, tmp_path, samples=batches(), metadata=told)
    for path in exported.files.values():
        found = qtool.inspect(path)["metadata"]
        assert {name: json.loads(found[f"qtool.{name}"]) for name in told} == told
    with pytest.raises(QtoolError, match="the spec of its data; got one that was given as a Python object"):
        qtool.benchmark(exported)
    for wrong, got in (
        ({"made": Path()}, r"values that JSON has; got an? \w+ as 'made': .*; pass for example"),
        ({"opset": 7}, "names that qtool does not use; got 'opset'; give it another name"),
        ({1: 2}, "a mapping of names to values; got a dict; pass for example"),
        (["commit"], "a mapping of names to values; got a list; pass for example"),
    ):
        with pytest.raises(UsageError, match=f"argument 'metadata': expected {got}"):
            qtool.export(quantized, tmp_path, samples=batches(), metadata=wrong)  # type: ignore[arg-type]


def test_files_tell_what_outputs_are_packed_in_where_no_quantized_model_is_beside_them(tmp_path: Path) -> None:
    model, data = Named().eval(), batches()
    quantized = qtool.quantize(model, data, task=WrongByName(), effort="fast")
    exported = qtool.export(quantized, tmp_path, samples=data, baselines=("fp32",))
    wrong = sum(float((model(x)["classes"].argmax(1) != y).sum()) for x, y in data) / 32
    for files in (exported, exported.files):
        told = qtool.benchmark(files, data, task=WrongByName(), seconds=0.1, width=1.0, allow_slower=True)
        assert told["variants"]["fp32"]["accuracy"]["metrics"]["wrong"] == pytest.approx(wrong)


def test_a_model_that_training_left_on_a_device_is_quantized_on_the_cpu() -> None:
    model, data = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), [(torch.randn(8, 6), torch.arange(8) % 3)]
    expected = model(data[0][0])
    with Fake():
        model.to(DEVICE)
        model.held, model.lock = model[0].weight * 2, threading.Lock()  # of neither is there a copy
        moved = qtool.quantize(model, data)
        assert next(model.parameters()).device == DEVICE
    torch.testing.assert_close(moved(data[0][0]), expected, atol=0.1, rtol=0)


def test_a_model_on_a_device_that_no_copy_can_be_made_of_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(model: nn.Module, memo: object) -> nn.Module:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr("qtool.models.specs.copied", full)
    with Fake():
        model = nn.Linear(6, 3).to(DEVICE)
        with pytest.raises(UsageError, match=r"expected a model on the CPU; got one on meta, .*; pass model\.cpu\(\)"):
            qtool.quantize(model, [torch.randn(8, 6)])


def test_what_holds_a_model_stands_for_it() -> None:
    model, data = net(), batches()
    from_holder = qtool.sensitivity(SimpleNamespace(model=model), data)
    assert from_holder["units"] == qtool.sensitivity(model, data)["units"]
    with pytest.raises(UsageError, match=r"'model': expected an nn\.Module, a spec or a run directory; got a Simple"):
        qtool.quantize(SimpleNamespace(model="net"), data)  # type: ignore[arg-type]


def test_a_stage_left_out_is_named(tmp_path: Path) -> None:
    data = batches()
    with pytest.raises(UsageError, match=r"'quantized': .*got a TrainResult; pass what qtool.quantize returned"):
        qtool.export(qtool.train(net(), data, max_steps=1), tmp_path / "out")
    with pytest.raises(QtoolError, match=r"give the float model to qtool\.quantize"):
        qtool.export(net(), tmp_path / "out")
    with pytest.raises(UsageError, match=r"'what': .*got a QuantizedModel; pass what export returned"):
        qtool.benchmark(qtool.quantize(net(), data), data)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()
