"""The stage and its commands: what they print, what they refuse, and the fresh process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import warm
from click.testing import CliRunner
from torch import nn

from qtool.cli import main
from qtool.errors import QtoolError, UsageError
from qtool.reporting.memory import memory_lines
from qtool.stages import memory as stage
from qtool.system import launcher
from qtool.system.signals import Ended

FACTORIES = """
import torch
from torch import nn

def net():
    return nn.Sequential(nn.Linear(8, 2048), nn.ReLU(), nn.Linear(2048, 3))

def net_of_blocks():
    blocks = [nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(3)]
    return nn.Sequential(nn.Linear(8, 256), *blocks, nn.Linear(256, 3))

def data():
    samples = torch.utils.data.TensorDataset(torch.randn(300, 8), torch.arange(300) % 3)
    return {"train": samples, "test": samples}

class Broken(nn.Linear):
    def forward(self, x):
        raise SystemExit(5)

def broken():
    return Broken(9, 3)

def endless():
    import pathlib, time
    pathlib.Path(__file__).with_name("begun").touch()
    time.sleep(60)
"""


@pytest.fixture
def specs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setenv("QTOOL_MALLOC", "0")
    file = tmp_path / "mine.py"
    file.write_text(FACTORIES)
    return {"model": f"{file}:net", "data": f"{file}:data"}


def invoke(*words: str) -> Any:
    return CliRunner().invoke(main, list(words))


def flags(specs: dict[str, str]) -> list[str]:
    return [word for key, value in specs.items() for word in (f"--{key}", value)]


def test_a_model_is_predicted_and_measured(specs: dict[str, str]) -> None:
    told = invoke("memory", *flags(specs), "--batch-size", "256", "--device", "cpu", "--measure", "--json")
    assert told.exit_code == 0, told.output
    result = json.loads(told.stdout)
    assert abs(result["error"]) < 0.05
    assert result["measured"]["steps"] == 3
    assert sum(result["predicted"]["parts"].values()) == result["predicted"]["peak_bytes"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*gathered whole:qtool.errors.QtoolWarning")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_several_processes_are_predicted_and_measured(
    specs: dict[str, str], strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "_asked", warm.measured)
    found = stage.predict_memory(**specs, measure=True, device="cpu", batch_size=256, devices=2, strategy=strategy)
    predicted, measured = found["predicted"], found["measured"]["peak_bytes"]
    assert 0.97 * predicted["peak_bytes"] < measured < 1.03 * (predicted["peak_bytes"] + predicted["late_bytes"])
    assert found["measured"]["seconds_per_step"] > 0


def test_objects_are_predicted_but_not_measured(specs: dict[str, str]) -> None:
    model = nn.Sequential(nn.Linear(8, 3))
    batches = [(torch.randn(512, 8), torch.zeros(512, dtype=torch.int64))]
    found, less = (stage.predict_memory(model, batches, device="cpu", micro_batches=count) for count in (1, 4))
    sizes = [one["predicted"]["parts"]["activations"] for one in (found, less)]
    assert sizes[0] > 512 * 3 * 4 > 2 * sizes[1]  # the logits of a whole batch, whose size no option names
    assert found["predicted"]["parts"]["parameters"] == (8 * 3 + 3) * 4
    short = stage.predict_memory(model, [(batches[0][0][:2], batches[0][1][:2]), *batches], device="cpu")
    assert short["predicted"]["peak_bytes"] == found["predicted"]["peak_bytes"]
    assert "this is the largest of 2 that were looked at (512×8)" in [*memory_lines(short)][2]
    with pytest.raises(UsageError, match="specs"):
        stage.predict_memory(model, batches, measure=True, device="cpu")
    with pytest.raises(QtoolError, match="at least one batch"):
        stage.predict_memory(model, [], device="cpu")


def test_what_is_not_predicted_is_refused(specs: dict[str, str]) -> None:
    for words in (("--batch-size", "auto"), ("--memory-budget", "8GiB")):
        told = invoke("memory", *flags(specs), *words)
        assert told.exit_code == 2
        assert f"error: {words[0]}" in told.stderr
    assert "--memory-budget" not in invoke("memory", "--help").stdout


class ThroughNumpy(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y * float(y.detach().numpy().max())


def test_a_step_that_cannot_be_predicted_is_told_with_what_the_command_has(specs: dict[str, str]) -> None:
    with pytest.raises(QtoolError, match=r"^prediction: .*\.numpy\(\).*; have it estimated .* memory --params N$"):
        stage.predict_memory(ThroughNumpy(8, 3), specs["data"])


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"step_in_backward": True, "grad_clip": None}], ids=["whole", "blocks"])
def test_a_compiled_step_is_predicted_and_measured(
    specs: dict[str, str], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "_asked", warm.measured)
    specs["model"] += "_of_blocks" if options else ""
    found = stage.predict_memory(**specs, **options, measure=True, device="cpu", batch_size=256, compile=True)
    assert abs(found["error"]) < 0.1


def test_a_failure_in_the_fresh_process_is_told(specs: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "_asked", warm.measured)
    broken = {**specs, "model": specs["model"].replace("net", "broken"), "task": "classification"}
    for work, do in (("measure", "batch-size, or leave --measure out"), ("train", "use a smaller --batch-size")):
        with pytest.raises(QtoolError, match=f"fresh process.*{do}$"):
            stage._in_fresh_process(broken, stage.TrainConfig(device="cpu"), work)
    with pytest.raises(QtoolError, match="model 'nothing'"):
        stage._in_fresh_process(
            {**specs, "model": "nothing", "task": "classification"}, stage.TrainConfig(device="cpu")
        )


def test_a_measurement_ends_with_the_one_who_asked_for_it(specs: dict[str, str], tmp_path: Path) -> None:
    """Who is killed cannot stop it; as a rung of a ladder it would train to its end."""
    spec = {**specs, "model": specs["model"].replace("net", "endless"), "task": "classification", "work": "measure"}
    command = [sys.executable, "-P", "-m", "qtool.stages.memory"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, text=True, env=stage._environment()) as process:
        assert process.stdin is not None
        process.stdin.write(json.dumps({**spec, "config": {"device": "cpu"}, "folder": ""}) + "\n")
        process.stdin.flush()
        end = time.monotonic() + 60
        while not (tmp_path / "begun").exists() and time.monotonic() < end:
            time.sleep(0.01)
        process.stdin.close()
        assert process.wait(20) == 1


def _answer_that_ends(request: str, temporary: str) -> None:
    tempfile.tempdir = temporary
    launcher.launch = lambda *_: os._exit(1)
    stage._answer(json.loads(request))


def test_a_measurement_in_several_processes_that_ends_with_its_asker_leaves_no_files(
    specs: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))

    def ended(request: str) -> NoReturn:
        assert warm.Started(tmp_path / "said", _answer_that_ends, request, str(temporary)).end() == 1
        raise Ended(signal.SIGTERM)

    monkeypatch.setattr(stage, "_asked", ended)
    with pytest.raises(Ended):
        stage._in_fresh_process({**specs, "task": "classification"}, stage.TrainConfig(device="cpu", devices=2))
    assert not [*temporary.iterdir()]


def test_arithmetic_needs_no_model() -> None:
    told = invoke("memory", "--params", "1e9", "--optimizer", "adamw", "--gpu-memory", "24GB")
    assert told.exit_code == 0, told.output
    assert "to train: 24.0 GB" in told.stdout
    assert "4.00 GB at 32-bit" in told.stdout
    result = json.loads(invoke("memory", "--params", "1e9", "--gpu-memory", "24GB", "--json").stdout)
    assert result["training"]["num_gpus"] == 2  # a tenth of each is set aside


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--model", "resnet"),
        ("--params", "1e9", "--model", "resnet", "--data", "fashion-mnist"),
        ("--params", "1e9", "--model", "resnet"),
        ("--params", "1e9", "--task", "language-modelling"),
    ],
)
def test_one_of_the_two_questions_is_asked(words: tuple[str, ...]) -> None:
    told = invoke("memory", *words)
    assert told.exit_code == 2
    assert "--params" in told.stderr


@pytest.mark.parametrize(
    "words",
    [("--params", "1e9", "--measure"), ("--ladder", "--params", "1e9"), ("--seeds", "3"), ("--gpu-memory", "8GB")],
)
def test_what_belongs_to_another_form_of_the_command_is_refused(words: tuple[str, ...], specs: dict[str, str]) -> None:
    told = invoke("memory", *words, *([] if "--params" in words else flags(specs)))
    assert told.exit_code == 2
    assert "is not for this form of the command" in told.stderr


def test_numerics_shows_pi() -> None:
    told = invoke("numerics", "pi")
    assert told.exit_code == 0
    lines = {line.split("  ")[0]: line.split() for line in told.stdout.splitlines()[10:]}
    assert lines["FP16"][1] == "3.140625"
    assert lines["INT8"][1] == "3"


def test_numerics_as_json_and_refusals() -> None:
    result = json.loads(invoke("numerics", "70000", "--json").stdout)
    by_name = {entry["name"]: entry for entry in result["values"][0]["stored"]}
    assert by_name["FP16"]["stored"] == "Infinity"  # which JSON has no number for
    assert by_name["INT8"]["stored"] == 127
    assert invoke("numerics", "abc").exit_code == 2
    assert invoke("numerics", "--scale", "0").exit_code == 2
