"""Every file in examples/ does its work, on small data."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import runpy
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path
from types import ModuleType

import pytest
import torch
from command_line import in_process
from nets import FeedForward
from torch import nn

import qtool
from qtool.cli import main
from qtool.data.specs import EMBEDDED
from qtool.evaluate import evaluate
from qtool.models.specs import BUILT_INS
from qtool.recipe_files import load_recipe

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


def qtool_command(*words: str) -> None:
    with contextlib.chdir(ROOT):
        done = in_process(*words, "--quiet")
    assert done.exit_code == 0, done.stderr


def test_each_example_is_named_in_a_test() -> None:
    tested = Path(__file__).read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for path in EXAMPLES.iterdir():
        told = readme if path.suffix == ".png" else tested
        assert path.name.startswith("__") or path.name in told, path


def test_the_recipe_runs(tmp_path: Path, small_net: str, small_data: str) -> None:
    recipe = EXAMPLES / "recipe.toml"
    assert load_recipe(recipe).model in BUILT_INS
    small = [f"model={small_net}", f"data={small_data}", "train.max_steps=20", 'variants=["ptq"]',
             "export.reference_samples=1", "benchmark.seconds=0.05", "benchmark.allow_slower=true",
             "quantize.calibration=train:64"]  # fmt: skip
    words = [word for change in small for word in ("--set", change)]
    qtool_command("run", str(recipe), "--out", str(tmp_path / "run"), *words)
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["variants"]["ptq"]["benchmark"]
    assert tomllib.loads((tmp_path / "run" / "recipe.toml").read_text())["quantize"]["ranges"] == "mse"


def test_gpt2_learns_by_adapters(tmp_path: Path) -> None:
    """gpt2_lora.toml, fewer steps of shorter windows, on the book's beginning."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import peft  # noqa: F401
    except (ImportError, RuntimeError):  # a torchvision that does not fit torch stops it with the latter
        pytest.skip("peft does not import")
    (tmp_path / "beginning.txt").write_text((EMBEDDED / "alice" / "alice.txt").read_text(encoding="utf-8")[:24_000])
    small = ["train.max_steps=12", "train.epochs=1", f"data=text:{tmp_path}/beginning.txt:16"]
    words = [word for change in small for word in ("--set", change)]
    qtool_command("run", str(EXAMPLES / "gpt2_lora.toml"), "--out", str(tmp_path), *words)
    report = json.loads((tmp_path / "report.json").read_text())["train"]
    assert report["metrics"]["perplexity"] < 250
    assert (tmp_path / "adapter_model.safetensors").stat().st_size < (tmp_path / "model.safetensors").stat().st_size / 4


def blocks() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 256), FeedForward(256), FeedForward(256), nn.Linear(256, 3))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_the_published_ladder_is_legal_and_predicted(small_data: str) -> None:
    """memory_ladder_vit_l16.toml: every rung's options go together; a small net takes the first and the last."""
    from qtool.stages.ladder import configs, load_ladder
    from qtool.stages.memory import predict_memory
    from qtool.training import rules

    ladder = load_ladder(EXAMPLES / "memory_ladder_vit_l16.toml")
    made = configs(ladder)
    for config in made:
        rules.check(config)
    assert [rung.published.get("peak_gb") for rung in ladder.rungs[:2]] == [26.84, 18.21]
    assert (made[-1].optimizer, made[-1].batch_size, made[-1].grad_clip) == ("adamw8bit", 30, None)
    net = f"{__file__}:blocks"
    first, last = (predict_memory(net, small_data, config=made[i])["predicted"]["peak_bytes"] for i in (0, -1))
    assert last < 0.8 * first  # of so small a net, half the last is what bitsandbytes' step takes for itself


def imported(file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(file).stem, EXAMPLES / file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_own_model_learns_its_own_data() -> None:
    own = imported("own_model.py")
    result = qtool.train(own.model(), own.data(), epochs=5, learning_rate=5e-3)
    assert result.metrics["top1"] > 0.85


def commands_of(module: ModuleType, recorded: str, out: Path) -> list[list[str]]:
    """The words of each command in a file's own text, which writes to ``out`` instead."""
    assert module.__doc__ is not None
    text = module.__doc__.replace("\\\n", " ").replace(recorded, str(out))
    return [line.split()[1:] for line in text.splitlines() if line.strip().startswith("qtool ")]


@pytest.mark.parametrize(("file", "recorded"), [("own_model.py", "runs/own"), ("own_task.py", "runs/task")])
def test_the_commands_of_a_file_work(file: str, recorded: str, tmp_path: Path) -> None:
    """Four of them, run from the root, and shortened."""
    module, out = imported(file), tmp_path / "own"
    shorter = {"train": ["--max-steps", "4"], "quantize": ["--calibration", "train:64"], "export": [],
               "benchmark": ["--seconds", "0.05", "--allow-slower"]}  # fmt: skip
    commands = commands_of(module, recorded, out)
    assert [command for command, *_ in commands] == list(shorter)
    for command, *words in commands:
        assert command in main.commands
        qtool_command(command, *words, *shorter[command])
    assert json.loads((out / "benchmark.json").read_text())["metrics"]["variants"]["int8"]["accuracy"]
    x = module.data()["test"][0][0][None]
    from qtool.stages import load_quantized

    assert load_quantized(out)(x.repeat(2, 1, 1, 1)).dtype == torch.float32


def test_a_task_s_own_metric_is_that_of_all_pixels_however_they_are_batched() -> None:
    output, target = torch.randn(6, 3, 8, 8), torch.randint(0, 3, (6, 8, 8))
    batches = zip(output.split(4), target.split(4), strict=True)
    counts = torch.zeros(3, 3).index_put_((target.flatten(), output.argmax(1).flatten()), torch.ones(()), True)
    both, either = counts.diag(), counts.sum(0) + counts.sum(1) - counts.diag()
    found = evaluate(lambda inputs: inputs, batches, imported("own_task.py").task())
    assert found["mean_iou"] == pytest.approx(float((both / either).mean()))
    assert found["pixels"] == pytest.approx(float(both.sum() / counts.sum()))


@pytest.mark.filterwarnings("default")
def test_mlops_pipeline_fails_its_job_only_when_the_contract_is_not_met(
    tmp_path: Path, small_data: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second time with the stages' figures of the first."""
    file, job = EXAMPLES / "mlops_pipeline.py", imported("mlops_pipeline.py")
    words = [str(file), "--data", small_data, "--epochs", "1", "--out", str(tmp_path)]
    words += ["--min-speedup", "0"]  # so small a net takes no less time in integers
    kept = ["--min-agreement", "0.5", "--max-kl", "1", "--max-size", "1"]
    monkeypatch.setattr(sys, "argv", [*words, *kept])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(file), run_name="__main__")
    told = capsys.readouterr().err
    assert left.value.code == 0, told
    report = json.loads((tmp_path / "report.json").read_text())
    assert (tmp_path / "model.int8.onnx").exists()
    assert report.pop("broken_terms") == []
    assert "not deployed" not in told
    monkeypatch.setattr(job, "build", lambda options: report)
    monkeypatch.setattr(sys, "argv", [*words, "--max-kl", "-1"])
    assert job.main() == 3
    assert json.loads((tmp_path / "report.json").read_text())["broken_terms"]
    assert "not deployed: kl is" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_libraries_are_measured_side_by_side(
    tmp_path: Path, small_net: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that does its work, one that is not installed, one whose process says nothing."""
    file = Path(small_net.rpartition(":")[0])
    file.write_text(file.read_text().replace("Conv2d(1, ", "Conv2d(3, "))
    words = ["--model", small_net, "--settle", "--size", "8"]
    peers = ["--peers", "onnxruntime_best,aimet,nncf", "--python", "nncf=false", "--environments", str(tmp_path / "no")]
    more = ["--samples", "16", "--seconds", "0", "--markdown", "--out", str(tmp_path)]
    run = EXAMPLES / "side_by_side" / "run.py"
    monkeypatch.syspath_prepend(run.parent)
    monkeypatch.setattr(sys, "argv", [str(run), *words, *peers, *more])
    runpy.run_path(str(run), run_name="__main__")
    told = capsys.readouterr().out
    found = json.loads((tmp_path / "side_by_side.json").read_text())
    assert set(found["benchmark"]["variants"]) == {"fp32", "qtool", "onnxruntime_best"}
    assert all(entry["sqnr_db"] > 10 and 0 < entry["kl"] < 1 for entry in found["error"].values())
    assert found["quantizing"]["qtool"]["seconds"] > 0
    heads, *rows = [line.split(" | ") for line in told.splitlines() if line.startswith("| ")]
    assert [len(row) for row in rows] == [len(heads)] * 4
    assert re.search(r"`aimet` is not installed .*no/aimet/bin/pip install 'aimet-onnx", told)
    assert rows[-1][0] == "| nncf: failed, see below"
    assert "`nncf` failed: exit 1" in told


def test_peers_import_without_their_libraries() -> None:
    """So that one that is not installed can say how to install it."""
    folder = EXAMPLES / "side_by_side"
    names = sorted(path.stem for path in (folder / "peers").glob("*.py"))
    words = "import importlib, sys\nfor name in sys.argv[1:]:\n    peer = importlib.import_module(f'peers.{name}')\n"
    words += "    assert peer.NEEDS and peer.__doc__ and callable(peer.quantize), name\n"
    words += "assert not {'torch', 'onnx', 'onnxruntime'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", words, *names], cwd=folder, capture_output=True, text=True)
    assert (done.returncode, len(names) > 10) == (0, True), done.stderr
