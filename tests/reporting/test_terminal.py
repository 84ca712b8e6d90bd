"""What a terminal shows of a result: the figures, in the right units, and nothing that the result does not hold."""

from __future__ import annotations

from typing import Any

import pytest

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
EXPORT = {
    "outputs": {"int8": {"file": "model.int8.onnx", "size_bytes": 3 * 2**19}},
    "metrics": {"gates": [{"name": "size", "passed": True, "found": "within 1 %"}]},
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
    assert "model.int8.onnx, 1.500 MiB" in text
    assert "gate size: " in text
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
    text = shown(capsys, "run", {"run": "runs/x", "train": TRAIN, "variants": {"ptq": {"run": "runs/x/ptq"}}})
    assert "── ptq ── runs/x/ptq" in text
    assert "runs/x/report.json" in text


def test_an_outline_keeps_short_things_on_a_line_and_words_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "inspect", {"kind": "onnx", "operators": {"Conv": 2}, "shape": [1, "[batch]"], "x": 0.1})
    assert text.splitlines() == ["kind: onnx", "operators: Conv 2", "shape: [1, [batch]]", "x: 0.1"]
    long = shown(capsys, "inspect", {"operators": {f"Operator{i}": i for i in range(12)}})
    assert long.splitlines()[:2] == ["operators:", "  Operator0: 0"]
