"""What a terminal shows of a result: the figures, in the right units, and nothing that the result does not hold."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from click.testing import CliRunner

from qtool import pipeline
from qtool.cli import main
from qtool.errors import ContractError
from qtool.reporting import terminal

HISTORY = {"epochs": [{}, {}], "losses": [1.0] * 6, "skipped_steps": 1, "stopped_early": True}
TRAIN = {"metrics": {"num_samples": 1000.0, "loss": 0.25, "top1": 0.881}, "history": HISTORY}
UNITS = [
    {"name": "a", "integer": True, "reason": ""},
    {"name": "b", "integer": False, "reason": "softmax has no integer kernel"},
    {"name": "c", "integer": False, "reason": "softmax has no integer kernel"},
]
QUANTIZE = {
    "config": {"mode": "ptq"},
    "calibration": {"spec": "train:512", "seed": 0, "num_samples": 512},
    "plan": {"target": "ort-cpu", "units": UNITS, "notes": ["a channel was dead"]},
}
ENVIRONMENT = {"packages": {"qtool": "0.1", "torch": "2.13"}, "python": "3.12", "cpu": {"name": "a CPU"}}
EXPORT = {
    "outputs": {
        "int8": {"file": "model.int8.onnx", "size_bytes": 3 * 2**19},
        "fp32": {"file": "model.fp32.onnx", "size_bytes": 3 * 2**21},
    },
    "metrics": {
        "gates": [
            {"name": "size", "passed": True, "found": "within 1 %", "details": {"predicted_bytes": 7}},
            {"name": "integer reference", "passed": None, "found": "this CPU has no VNNI", "details": {}},
        ]
    },
}


def shown(capsys: pytest.CaptureFixture[str], kind: str, result: dict[str, Any]) -> str:
    terminal.show(kind, result)
    return capsys.readouterr().out


def test_training(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "train", TRAIN)
    assert "top1 88.1 %" in text
    assert "loss 0.25" in text
    assert "1,000 test samples" in text
    assert "2 epochs, 6 steps, 1 skipped, stopped early" in text


def test_names_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    unit = {"name": "m:a:b[red]", "kind": ":x:", "sqnr_db": 1.0, "kl": None, "agreement": None}
    drawn = QUANTIZE | {"source": {"split": "of 'npz:x:32' [b]no test part"}}
    assert "'npz:x:32' [b]no test part" in shown(capsys, "quantize", drawn)
    assert "m:a:b[red]  :x:" in shown(capsys, "sensitivity", {"units": [unit], "num_samples": 1})


@pytest.mark.parametrize(("kind", "result"), [("train", TRAIN), ("quantize", QUANTIZE)])
def test_parts_that_are_not_used_as_they_are_named_are_told(
    capsys: pytest.CaptureFixture[str], kind: str, result: dict[str, Any]
) -> None:
    told = shown(capsys, kind, result | {"source": {"split": "no test part"}})
    assert "data: no test part\n" in told
    assert "data:" not in shown(capsys, kind, result | {"source": {"split": ""}})


@pytest.mark.parametrize(
    ("source", "random"),
    [
        ({"model": "resnet", "weights": None}, True), ({"model": "timm:vit", "weights": None}, True),
        ({"model": "timm:vit", "weights": "pretrained"}, False), ({"model": "resnet", "trained_in": "."}, False),
        ({"model": "/x/net.py:net", "weights": None}, False), ({"model": None, "weights": None}, False),
    ],
)  # fmt: skip
def test_an_architecture_without_weights_is_told(
    capsys: pytest.CaptureFixture[str], source: dict[str, Any], random: bool
) -> None:
    assert ("has random weights" in shown(capsys, "quantize", QUANTIZE | {"source": source})) == random


def test_quantization_says_what_stayed_in_float_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "quantize", QUANTIZE)
    assert "ptq for ort-cpu, 1 of 3 units integer" in text
    assert "512 samples (train:512, seed 0)" in text
    assert "2 in float: softmax has no integer kernel" in text
    assert "note: a channel was dead" in text


def test_units_whose_operands_are_float_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    units = [{"integer": False, "reason": f"its operand 'add_{i}' is float"} for i in range(3)]
    assert "3 in float: an operand is float\n" in shown(capsys, "quantize", QUANTIZE | {
        "plan": QUANTIZE["plan"] | {"units": units}
    })  # fmt: skip


def test_export_gives_sizes_and_gates(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "export", EXPORT)
    assert "model.fp32.onnx, 6.000 MiB on disk\n" in text
    assert "model.int8.onnx, 1.500 MiB on disk, 4.00x smaller than FP32\n" in text
    assert [line.split() for line in text.splitlines()[2:]] == [
        ["size", "passed", "within", "1", "%"],
        ["integer", "reference", "not", "run", "this", "CPU", "has", "no", "VNNI"],
    ]
    assert "within 1 %" in text


def test_a_run_sums_up_each_variant_with_the_interval_of_its_drop(capsys: pytest.CaptureFixture[str]) -> None:
    accuracy = {
        "agreement": 0.996, "kl": 0.00015, "num_samples": 1000, "top1_drop": -0.004,
        "top1_drop_ci95": [-0.0092, 0.0012],
    }  # fmt: skip
    lines = terminal.against_float(accuracy)
    assert lines == (
        "agreement with FP32 99.6 %, KL 0.00015 nats, top-1 drop −0.40 points (95 % CI −0.92 to 0.12), "
        "on 1,000 test samples"
    )
    variant = {"run": "runs/x/ptq", "missing": ["quantize is of an earlier train"]}
    text = shown(capsys, "run", {"run": "runs/x", "train": TRAIN, "variants": {"ptq": variant}})
    assert "── ptq ── runs/x/ptq" in text
    assert "ptq: quantize is of an earlier train" in text
    assert "runs/x/report.json" in text


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ({"sqnr_db": math.inf}, "SQNR ∞ dB, on 1,000 test samples"),
        ({"sqnr_db": 31.24}, "SQNR 31.2 dB, on 1,000 test samples"),  # of outputs that are no classes
        ({"agreement": 0.5}, "agreement with FP32 50.0 %, on 1,000 test samples"),  # of whole numbers
        ({"agreement": 1.0, "kl": 0.0, "sqnr_db": None}, "agreement with FP32 100.0 %, KL 0 nats, on 1,000 test"),
        ({"agreement": 0.5, "metrics": {"perplexity": 9.0}}, "agreement with FP32 50.0 %, on 1,000 test tokens"),
    ],
)
def test_a_run_tells_of_accuracy_what_was_measured(
    capsys: pytest.CaptureFixture[str], found: dict[str, Any], told: str
) -> None:
    metrics = {"variants": {"int8": {"accuracy": found | {"num_samples": 1000}}}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(terminal, "benchmark_lines", lambda result: iter(()))
        text = shown(
            capsys, "run", {"run": "r", "variants": {"ptq": {"run": "r/ptq", "benchmark": {"metrics": metrics}}}}
        )
    assert f"ptq: {told}" in text


def test_a_benchmark_without_figures_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no figures in it; run 'qtool benchmark' again" in shown(capsys, "benchmark", {"metrics": {}})


def test_an_outline_keeps_short_things_on_a_line_and_words_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "inspect", {"kind": "onnx", "operators": {"Conv": 2}, "shape": [1, "[batch]"], "x": 0.1})
    assert text.splitlines() == ["kind: onnx", "operators: Conv 2", "shape: [1, [batch]]", "x: 0.1"]
    long = shown(capsys, "inspect", {"operators": {f"Operator{i}": i for i in range(12)}})
    assert long.splitlines()[:2] == ["operators:", "  Operator0: 0"]
    foreign = shown(capsys, "inspect", {"inputs": {"x\n\x1b[31m": [4]}, "metadata": {"a": "é\t\x1b[2J"}})
    assert foreign.splitlines() == ["inputs: x �[31m [4]", "metadata: a é �[2J"]


def test_a_run_is_inspected_stage_by_stage_and_unit_by_unit(capsys: pytest.CaptureFixture[str]) -> None:
    units = [
        {"name": "a", "kind": "conv", "integer": True, "weight_bits": 4, "low": -1.5, "high": 2.25, "sqnr_db": 31.04,
         "kl": 0.1},
        {"name": "b", "kind": "softmax", "integer": False, "weight_bits": None, "low": None, "high": None,
         "sqnr_db": None, "kl": None},
    ]  # fmt: skip
    made = {"source": {"model": "resnet", "data": None}, "environment": ENVIRONMENT}
    run = {"run": "runs/x", "quantize": QUANTIZE | made, "export": EXPORT | made | {"stale": "a gate failed"}}
    text = shown(capsys, "inspect", {"run": "runs", "variants": {"ptq": run | {"units": units}}})
    lines = [line.split() for line in text.splitlines()]
    assert "model resnet, data given as an object" in text
    assert ["a", "conv", "int4", "-1.5", "to", "2.25", "31.0"] in lines
    assert ["b", "softmax", "float", "–", "–"] in lines
    assert ["integer", "reference", "not", "run", "this", "CPU", "has", "no", "VNNI"] in lines
    assert "stale: a gate failed" in text
    assert "made with qtool 0.1, torch 2.13, Python 3.12, on a CPU" in text


def test_what_no_terminal_shows_is_a_line_for_each_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = TRAIN | {"metrics": {"num_samples": 1.0} | {f"a long metric {i}": 0.5 for i in range(20)}}
    monkeypatch.setenv("COLUMNS", "80")
    assert len(shown(capsys, "train", result).splitlines()) > 2
    monkeypatch.delenv("COLUMNS")
    assert len(shown(capsys, "train", result).splitlines()) == 2


def test_a_file_larger_than_fp32_is_told_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"int8": 5 * 2**20, "fp32": 4 * 2**20, "fp16": 4 * 2**20}
    outputs = {name: {"file": f"{name}.onnx", "size_bytes": size} for name, size in sizes.items()}
    text = shown(capsys, "export", {"outputs": outputs, "metrics": {"gates": []}})
    assert "int8.onnx, 5.000 MiB on disk, 1.25x larger than FP32\n" in text
    assert "fp32.onnx, 4.000 MiB on disk\n" in text
    assert "fp16.onnx, 4.000 MiB on disk, as large as FP32\n" in text


@pytest.mark.parametrize(("words", "printed"), [((), True), (("--quiet",), False), (("--json",), False)])
def test_a_benchmark_that_fails_by_its_figures_prints_them(
    monkeypatch: pytest.MonkeyPatch, result: dict[str, Any], words: tuple[str, ...], printed: bool
) -> None:
    def fail(*_: object, **__: object) -> None:
        error = ContractError("benchmark", "INT8 faster than fp32", "not so", "accept it")
        error.details = result
        raise error

    monkeypatch.setenv("QTOOL_MALLOC", "0")
    monkeypatch.setattr(pipeline, "benchmark", fail)
    done = CliRunner().invoke(main, ["benchmark", "x", *words])
    assert done.exit_code == 3
    assert ("size on disk, MiB" in done.stdout) is printed
    assert "--json" not in words or json.loads(done.stdout)["error"]["details"]


@pytest.mark.parametrize(
    ("metrics", "counted"),
    [
        ({"top1": 0.9}, "1,000 test samples"),
        ({"perplexity": 9.0}, "1,000 test tokens"),
        ({"mae": 0.1}, "the test data"),
    ],
)
def test_what_a_task_weighs_by_is_not_called_samples(metrics: dict[str, float], counted: str) -> None:
    """A task of one's own may count pixels, or whatever its loss is a mean of."""
    first, *_ = terminal.train_lines({"metrics": {"num_samples": 1000.0} | metrics})
    assert first.endswith(f"on {counted}")
