"""Training and quantization over run directories and plain objects: what is committed, skipped, resumed, refused."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from command_line import in_process
from torch import nn

import qtool
from qtool.artifacts import read_result
from qtool.data.specs import load_data
from qtool.errors import ContractError, QtoolError, UsageError
from qtool.quantization.contracts import search
from qtool.recipe import BASELINES, QatConfig
from qtool.reporting.terminal import quantize_lines
from qtool.source import require_run_directory
from qtool.stages import load_quantized
from qtool.steps import loop
from qtool.system.files import sha256_of


def plain_net() -> nn.Module:
    """A net without batch-norm, for tests that pass objects."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3))


def test_training_returns_the_model_and_commits_it(tmp_path: Path, small_net: str, small_data: str) -> None:
    result = qtool.train(small_net, small_data, out=tmp_path, epochs=3, batch_size=16)
    committed = read_result(tmp_path, "train")
    assert committed["metrics"] == result.metrics
    assert committed["metrics"]["top1"] > 0.9
    assert (committed["config"]["batch_size"], committed["metric"]) == (16, "top1")
    assert len(committed["history"]["losses"]) == result.history.steps
    assert sorted(p.name for p in tmp_path.iterdir() if p.suffix != ".py") == ["model.safetensors", "train.json"]


@pytest.mark.parametrize("work", ["train", "quantize"])
def test_a_second_training_in_a_run_directory_is_refused_while_the_first_is_at_work(
    work: str, tmp_path: Path, small_data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qtool.artifacts.WAIT_SECONDS", 0.0)
    more = {} if work == "train" else {"mode": "qat", "calibration": "train:32"}
    options = {"out": tmp_path / "run", "epochs": 1, "batch_size": 64} | more
    begun = []
    step = loop.Step.__call__

    def meddled(self: Any, *args: Any) -> float:
        if not begun:
            begun.append(True)
            with pytest.raises(QtoolError, match=f"one 'qtool {work}' at a time; got another at work"):
                getattr(qtool, work)(plain_net(), small_data, **options)
        return step(self, *args)

    monkeypatch.setattr(loop.Step, "__call__", meddled)
    getattr(qtool, work)(plain_net(), small_data, **options)
    assert begun
    assert not (tmp_path / "run" / "checkpoints").exists()


class Noted(nn.Linear):
    state: Any = None

    def get_extra_state(self) -> Any:
        return self.state or {"version": 3}

    def set_extra_state(self, state: Any) -> None:
        pass


def test_what_a_file_of_weights_cannot_hold_is_told_before_the_training(tmp_path: Path) -> None:
    batches, model = [(torch.randn(4, 3), torch.tensor([0, 1, 0, 1]))], nn.Sequential(Noted(3, 2))
    with pytest.raises(QtoolError, match=r"a state dict of tensors.*got '0\._extra_state', a dict"):
        qtool.train(model, batches, out=tmp_path / "run", epochs=1)
    assert not (tmp_path / "run").exists()
    assert qtool.train(model, batches, epochs=1).history.steps == 1
    for value, told in (
        (torch.eye(3).to_sparse(), r"'0\.more', a sparse tensor; register it with persistent=False"),
        (torch.ones(3, dtype=torch.complex128), r"'0\.more' of torch\.complex128; keep it in another type"),
        (torch.ones(1).expand(3), r"'0\.more', a view of less memory, which cannot be written; register its \.contig"),
    ):
        other = nn.Sequential(nn.Linear(3, 2))
        other[0].register_buffer("more", value)
        with pytest.raises(QtoolError, match=told):
            qtool.train(other, batches, out=tmp_path / "run", epochs=1)
    model[0].state = BytesIO(b"which has a method to detach")
    with pytest.raises(QtoolError, match=r"'0\._extra_state', a BytesIO"):
        qtool.train(model, batches, out=tmp_path / "run", epochs=1)


def test_buffers_that_are_views_of_less_memory_are_trained_with() -> None:
    model, batch = nn.Sequential(nn.Linear(3, 2)), (torch.randn(4, 3), torch.tensor([0, 1, 0, 1]))
    model.register_buffer("mask", torch.ones(1).expand(3))
    parts = {"train": [(batch[0][i], batch[1][i]) for i in range(4)]}
    done = qtool.train(model, {**parts, "validation": parts["train"]}, early_stopping=1, max_steps=1)
    assert done.history.best_epoch == 0


def test_a_finished_training_is_not_done_again(
    tmp_path: Path, small_net: str, small_data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    first = qtool.train(small_net, small_data, out=out, max_steps=2)
    monkeypatch.setattr(loop, "_Run", None)
    told: list[str] = []
    again = qtool.train(small_net, small_data, out=out, max_steps=2, progress=told.append)
    assert told == [f"train: as it is in '{out}', finished with the same settings"]
    assert again.metrics == first.metrics
    assert again.history == first.history
    theirs = first.model.state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in again.model.state_dict().items())
    with pytest.raises(TypeError):
        qtool.train(small_net, small_data, out=out, max_steps=3)
    with pytest.raises(TypeError):
        qtool.train(small_net, small_data, out=out, max_steps=2, resume=False)


def test_a_finished_training_whose_weights_were_changed_is_refused_not_overwritten(
    tmp_path: Path, small_net: str, small_data: str
) -> None:
    out = tmp_path / "run"
    qtool.train(small_net, small_data, out=out, max_steps=1)
    (out / "model.safetensors").write_bytes(b"mine")
    with pytest.raises(QtoolError, match=r"as recorded in train\.json"):
        qtool.train(small_net, small_data, out=out, max_steps=1)
    assert (out / "model.safetensors").read_bytes() == b"mine"
    qtool.train(small_net, small_data, out=out, max_steps=1, resume=False)
    read_result(out, "train")


def test_training_on_a_plain_iterable_of_batches_returns_objects() -> None:
    batches = [(torch.randn(8, 1, 8, 8), torch.arange(8) % 3) for _ in range(4)]
    net = plain_net()
    result = qtool.train(net, batches, epochs=2)
    assert result.model is net
    assert result.history.steps == 8


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"epoch": 3}, "argument 'epoch'.*did you mean 'epochs'"),
        ({"epochs": "3"}, "argument 'epochs'"),
        ({"precision": "fp8"}, "argument 'precision'"),
    ],
)
def test_keyword_arguments_are_checked_as_arguments(small_data: str, options: dict[str, Any], part: str) -> None:
    with pytest.raises(UsageError, match=part):
        qtool.train(plain_net(), small_data, **options)


def test_ptq_of_a_run_directory_is_committed_beside_the_training(
    tmp_path: Path, small_net: str, small_data: str
) -> None:
    qtool.train(small_net, small_data, out=tmp_path, max_steps=2)
    quantized = qtool.quantize(tmp_path, calibration="train:32")
    result = read_result(tmp_path, "quantize")
    assert {entry["file"] for entry in result["outputs"].values()} == {"float.pt2", "int8.pt2", "ranges.json"}
    assert result["calibration"]["num_samples"] == 32
    assert result["metrics"]["num_float_units"] == 0
    x = next(iter(qtool.load_data(small_data).test.batch([0, 1, 2])))
    again = load_quantized(tmp_path)
    assert torch.equal(again(x), quantized(x))
    assert again.float_graph is not None
    assert again.plan == quantized.plan


def test_quantizing_without_training_before(tmp_path: Path, small_net: str, small_data: str) -> None:
    qtool.quantize(small_net, small_data, out=tmp_path / "q", calibration="train:8")
    assert read_result(tmp_path / "q", "quantize")["source"]["data"] == small_data


def test_quantizing_a_module_with_batches_alone() -> None:
    quantized = qtool.quantize(plain_net(), [torch.randn(4, 1, 8, 8) for _ in range(3)])
    assert len(quantized.plan.integer_units) == 2
    assert quantized(torch.randn(5, 1, 8, 8)).shape == (5, 3)


def test_the_saved_ranges_give_the_same_quantization_without_the_data(
    tmp_path: Path, small_net: str, small_data: str
) -> None:
    first = qtool.quantize(small_net, small_data, out=tmp_path / "a", calibration="train:32", ranges="mse")
    second = qtool.quantize(
        small_net, small_data, out=tmp_path / "b", calibration="train:8", ranges="mse",
        ranges_from=str(tmp_path / "a" / "ranges.json"),
    )  # fmt: skip
    x = torch.randn(4, 1, 8, 8)
    assert torch.equal(first(x), second(x))


def test_what_repeats_ranges_writes_the_same_file(tmp_path: Path) -> None:
    torch.manual_seed(2)  # of which some layers are rounded anew, and not all
    layers = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4)
    model, batches = nn.Sequential(*layers).eval(), [torch.randn(8, 3, 8, 8) for _ in range(2)]
    qtool.quantize(model, batches, out=tmp_path / "a", algorithms=("gptq-small",))
    ranges = str(tmp_path / "a" / "ranges.json")
    qtool.quantize(model, batches, out=tmp_path / "b", algorithms=("gptq-small",), ranges_from=ranges)
    assert (tmp_path / "a" / "int8.pt2").read_bytes() == (tmp_path / "b" / "int8.pt2").read_bytes()


def test_qat_options_without_qat_and_qat_without_data_are_refused(small_net: str, small_data: str) -> None:
    with pytest.raises(UsageError, match="argument 'epochs': expected mode 'qat'; got mode 'ptq'"):
        qtool.quantize(small_net, small_data, epochs=1)
    with pytest.raises(UsageError, match="argument 'qat': expected mode 'qat'; got mode 'ptq'"):
        qtool.quantize(small_net, small_data, qat=QatConfig(epochs=1))
    with pytest.raises(UsageError, match="did you mean 'calibration'"):
        qtool.quantize(small_net, small_data, calibratoin="train:8")
    with pytest.raises(QtoolError, match="expected targets; got inputs alone"):
        qtool.quantize(plain_net(), [torch.randn(4, 1, 8, 8)], mode="qat")


def test_qat_trains_the_prepared_graph_and_leaves_no_scaffolding(
    tmp_path: Path, small_net: str, small_data: str
) -> None:
    run = tmp_path / "run"
    qtool.train(small_net, small_data, out=run, epochs=8, batch_size=16)
    quantized = qtool.quantize(run, mode="qat", out=run / "qat", epochs=1, calibration="train:32", seed=3)
    result = read_result(run / "qat", "quantize")
    assert result["config"]["qat"]["epochs"] == 1
    assert result["config"]["seed"] == result["config"]["qat"]["seed"] == 3
    assert result["source"]["trained_in"] == ".."
    assert not (run / "qat" / "checkpoints").exists()
    assert len(result["history"]["losses"]) == result["history"]["ends"][0]
    assert result["metric"] == "top1"
    told = result["history"]["epochs"][0]["validation_top1"]
    assert any(
        "trained for 1 epoch, " in line and f"top1 {100 * told:.1f} %" in line for line in quantize_lines(result)
    )
    again = [load_quantized(run / "qat"), pickle.loads(pickle.dumps(quantized))]
    assert all(model.training == {key: result[key] for key in ("history", "metric")} for model in again)
    held = load_data(small_data).test
    x, y = held.batch(list(range(len(held))))
    assert (quantized(x).argmax(1) == y).float().mean() > 0.9


def test_a_quantized_model_of_earlier_weights_is_refused(tmp_path: Path, small_net: str, small_data: str) -> None:
    run = tmp_path / "run"
    qtool.train(small_net, small_data, out=run, max_steps=1)
    qtool.quantize(run, out=run / "ptq", calibration="train:8")
    qtool.train(small_net, small_data, out=run, max_steps=2)
    with pytest.raises(QtoolError, match=r"one of earlier weights.*quantize"):
        load_quantized(run / "ptq")
    qtool.quantize(run, out=run / "ptq", calibration="train:8")
    load_quantized(run / "ptq")


def test_a_run_directory_that_moved_still_knows_its_training(tmp_path: Path, small_net: str, small_data: str) -> None:
    qtool.train(small_net, small_data, out=tmp_path / "a", max_steps=1)
    qtool.quantize(tmp_path / "a", out=tmp_path / "a" / "ptq", calibration="train:8")
    shutil.move(tmp_path / "a", tmp_path / "b")
    load_quantized(tmp_path / "b" / "ptq")
    qtool.train(small_net, small_data, out=tmp_path / "b", max_steps=2)
    with pytest.raises(QtoolError, match="earlier weights"):
        load_quantized(tmp_path / "b" / "ptq")


def test_bad_weights_are_refused_and_nothing_is_left(tmp_path: Path, small_net: str, small_data: str) -> None:
    from safetensors.torch import save_file

    save_file({"first.0.weight": torch.full((8, 1, 3, 3), float("nan"))}, tmp_path / "w.safetensors")
    with pytest.raises(QtoolError):
        qtool.quantize(small_net, small_data, weights=tmp_path / "w.safetensors", out=tmp_path / "q")
    assert not (tmp_path / "q").exists()


def test_a_changed_calibration_recipe_is_calibrated_anew(tmp_path: Path, small_net: str, small_data: str) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text("samples = 8\n")
    known = []
    for text in ("samples = 8\n", "samples = 8\n", "samples = 16\n"):
        recipe.write_text(text)
        qtool.quantize(small_net, small_data, out=tmp_path / "q", calibration=str(recipe))
        known.append((tmp_path / "q" / "quantize.json").stat().st_mtime_ns)
    assert known[0] == known[1] < known[2]
    assert read_result(tmp_path / "q", "quantize")["calibration"]["num_samples"] == 16


def test_a_calibration_recipe_is_found_again_from_any_folder(
    tmp_path: Path, small_net: str, small_data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.toml").write_text("samples = 8\n")
    monkeypatch.chdir(tmp_path)
    qtool.quantize(small_net, small_data, out="q", calibration="mine.toml", effort="fast")
    monkeypatch.chdir("q")
    config = read_result(Path(), "quantize")["config"]
    assert config["calibration"] == str(tmp_path / "mine.toml")
    assert qtool.sensitivity(small_net, small_data, config=config)["num_samples"] == 8
    qtool.quantize(small_net, small_data, out="again", ranges_from="ranges.json", effort="fast")
    assert read_result(Path("again"), "quantize")["config"]["ranges_from"] == str(tmp_path / "q" / "ranges.json")


def test_a_stage_keeps_to_its_folders_wherever_it_is_led_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = [torch.randn(4, 8, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    (tmp_path / "elsewhere").mkdir()

    def led_away(text: str) -> None:
        os.chdir(tmp_path / "elsewhere")

    monkeypatch.chdir(tmp_path)
    qtool.quantize(nn.Sequential(nn.Linear(8, 4)), batches, out="a/q", effort="fast", progress=led_away)
    os.chdir(tmp_path)
    assert require_run_directory(Path("a/q"), "quantize") == tmp_path / "a" / "q"
    assert not any((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("stage", ["train", "quantize", "export"])
def test_a_place_that_cannot_hold_a_folder_is_refused_before_any_work(
    tmp_path: Path, small_net: str, small_data: str, stage: str
) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    arguments = [plain_net()] if stage == "export" else [small_net, small_data]
    with pytest.raises(UsageError, match="which is a file"):
        getattr(qtool, stage)(*arguments, out=file / "run", **({} if stage != "export" else {"example_inputs": ()}))
    assert file.read_text() == "mine"


def test_a_link_to_nothing_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "run").symlink_to(tmp_path / "away" / "run")
    with pytest.raises(UsageError, match="run', which is a link to nothing; name another folder"):
        qtool.export(plain_net(), out=tmp_path / "run", example_inputs=())
    with pytest.raises(UsageError, match="run', which is a link to nothing; name another folder"):
        qtool.export(plain_net(), out=tmp_path / "run" / "deeper", example_inputs=())


@pytest.mark.parametrize("stage", ["quantize", "sensitivity"])
def test_a_run_directory_that_cannot_be_written_is_refused_before_any_work(
    tmp_path: Path, small_net: str, small_data: str, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    qtool.train(small_net, small_data, out=run, max_steps=1)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(UsageError, match="a folder that cannot be written"):
        getattr(qtool, stage)(run)


def test_a_path_that_is_no_text_is_told() -> None:
    """torch opened no file there, and called those that it had written damaged."""
    folder = Path(os.fsdecode(b"/tmp/\xff"))
    for call in (lambda: qtool.quantize(plain_net(), [], out=folder), lambda: qtool.export(folder)):
        with pytest.raises(UsageError, match="a path that is UTF-8"):
            call()


@pytest.mark.parametrize("folder", ["/proc/qtool", f"/tmp/{300 * 'x'}"])
def test_a_folder_that_the_system_refuses_is_told(folder: str) -> None:
    with pytest.raises(UsageError, match="a folder to write to"):
        qtool.quantize(plain_net(), [], out=folder)


# A full disk


def test_a_full_disk_is_one_line_and_the_same_command_works_with_room(
    tmp_path: Path, small_net: str, small_data: str
) -> None:
    run = tmp_path / "run"
    steps = {
        "train": (2000, ["--model", small_net, "--data", small_data, "--max-steps", "2", "--out", str(run)]),
        "quantize": (4000, [str(run), "--calibration", "train:8", "--effort", "fast"]),
        "export": (3000, [str(run), "--parity-samples", "8", "--reference-samples", "1"]),
    }
    for stage, (limit, words) in steps.items():
        before = sorted(run.iterdir()) if run.exists() else None
        full = warm.Started(tmp_path / stage, warm.limited, limit, stage, *words, "--quiet")
        assert full.end() == 1, full.said()
        assert len(full.said().splitlines()) == 1, full.said()
        assert "room" in full.said() or "free space" in full.said()
        assert (sorted(run.iterdir()) if run.exists() else None) == before
        assert in_process(stage, *words, "--quiet").exit_code == 0


# A kill


@pytest.mark.parametrize("mode", ["train", "qat"])
def test_a_training_killed_by_sigkill_resumes_to_the_same_bits(
    tmp_path: Path, small_net: str, small_data: str, mode: str
) -> None:
    if mode == "train":
        words, file = ["train", "--model", small_net, "--data", small_data], "model.safetensors"
    else:
        qtool.train(small_net, small_data, out=tmp_path / "float", max_steps=4)
        words, file = ["quantize", str(tmp_path / "float"), "--mode", "qat"], "ranges.json"
        words += ["--step-size", "learned", "--ema", "0.99", "--ranges", "minmax"]
    words += ["--epochs", "2" if mode == "train" else "1", "--batch-size", "8", "--checkpoint-every", "5", "--quiet"]
    calm, killed = tmp_path / "calm", tmp_path / "killed"
    undisturbed = in_process(*words, "--out", str(calm))
    assert undisturbed.exit_code == 0, undisturbed.stderr

    def whole() -> set[str]:
        """Its checkpoints, without what is being written or was left half written."""
        return {p.name for p in killed.glob("checkpoints/step-*")}

    for kill in (1, 2) if mode == "train" else (1,):
        process, before = warm.Started(tmp_path / f"said {kill}", warm.command, *words, "--out", str(killed)), whole()
        process.wait_for(lambda before=before: whole() - before)
        process.kill()
        assert not (killed / f"{'train' if mode == 'train' else 'quantize'}.json").exists()
    last = warm.Started(tmp_path / "said at last", warm.command, *words, "--out", str(killed))
    assert last.end() == 0, last.said()
    assert sha256_of(killed / file) == sha256_of(calm / file)
    stage = "train" if mode == "train" else "quantize"
    assert json.loads((killed / f"{stage}.json").read_text())["metrics"] == read_result(calm, stage)["metrics"]
    assert sorted(p.name for p in killed.iterdir()) == sorted(p.name for p in calm.iterdir())


def test_a_model_that_has_no_file_in_half_precision_is_measured_without_it(tmp_path: Path, small_data: str) -> None:
    (tmp_path / "adding.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "class Adding(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = nn.Linear(64, 3)\n"
        "    def forward(self, x):\n"
        "        y = self.layer(x.flatten(1))\n"
        "        return torch.zeros_like(y).scatter_reduce(1, (y > 0).long(), y, 'prod')\n"
        "def build():\n"
        "    return Adding()\n"
    )
    run = tmp_path / "run"
    qtool.quantize(f"{tmp_path}/adding.py:build", small_data, out=run, calibration="train:32")
    qtool.export(run, parity_samples=16)
    found = qtool.benchmark(run, seconds=0.01, allow_slower=True)
    assert set(found["variants"]) == {"fp32", "int8"}
    assert any(note.startswith("fp16 was not measured: no FP16 file: ") for note in found["notes"])
    with pytest.raises(UsageError, match="expected files that the export wrote; got no FP16 file: "):
        qtool.benchmark(run, variants=("fp16",))


def test_float_files_are_written_as_asked_and_the_benchmark_tells_what_it_did_without(
    tmp_path: Path, small_net: str, small_data: str
) -> None:
    run = tmp_path / "run"
    qtool.quantize(small_net, small_data, out=run, calibration="train:32")
    whole = qtool.export(run, parity_samples=16)
    for asked in (("fp32",), ("fp16",), None):
        place = tmp_path / str(asked)
        made = qtool.export(run, place, parity_samples=16, baselines=asked)
        assert set(made.files) == {"int8", *(asked or ())}
        assert all(file.read_bytes() == whole.files[name].read_bytes() for name, file in made.files.items())
        assert made.gates == [g for g in whole.gates if g["name"] != "fp16 range" or asked == ("fp16",)]
    found = qtool.benchmark(place, seconds=0.01)
    assert (set(found["variants"]), found["reference"]) == ({"int8"}, "int8")
    told = [note for note in found["notes"] if "not measured" in note]
    assert told == [
        f"{name} was not measured: the export left out {name}, as --baselines told it to" for name in BASELINES
    ]
    with pytest.raises(UsageError, match="got the export left out fp32, as --baselines told it to; name others"):
        qtool.benchmark(place, variants=("fp32",))


UNLABELLED = """
import torch
from torch.utils.data import TensorDataset

class Alone(torch.utils.data.Dataset):
    def __init__(self, count, seed):
        self.inputs = torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
    def __len__(self):
        return len(self.inputs)
    def __getitem__(self, index):
        return self.inputs[index]

def data():
    return {"train": Alone(80, 0), "validation": TensorDataset(Alone(40, 1).inputs), "test": Alone(20, 2)}
"""


def test_inputs_without_labels_are_enough_for_all_but_training(tmp_path: Path, small_net: str) -> None:
    file, out = tmp_path / "unlabelled.py", tmp_path / "run"
    file.write_text(UNLABELLED)
    data = f"{file}:data"
    qtool.quantize(small_net, data, out=out, min_agreement=50, method="given", calibration="train:32")
    qtool.export(out, parity_samples=16, reference_samples=2, baselines=("fp32",))
    measured = qtool.benchmark(out, seconds=0.01, allow_slower=True)["variants"]["int8"]["accuracy"]
    assert measured["num_samples"] == 20
    assert measured["agreement"] > 0.5
    assert "top1" not in measured
    again = qtool.benchmark(out, [load_data(data).test[0][0][None]] * 3, seconds=0.01, allow_slower=True)
    assert again["variants"]["int8"]["accuracy"]["num_samples"] == 3
    with pytest.raises(UsageError, match="--variants bf16: expected --provider torch or openvino"):
        qtool.benchmark(out, variants=("bf16",))
    qtool.quantize(small_net, data, out=out, calibration="train:32", weight_bits=7)
    with pytest.raises(QtoolError, match="there; got one of an earlier quantize; run 'qtool export'"):
        qtool.benchmark(out)
    with pytest.raises(QtoolError, match="expected targets; got inputs alone"):
        qtool.train(small_net, data, max_steps=1)
    with pytest.raises(QtoolError, match="expected targets; got inputs alone"):
        qtool.quantize(small_net, data, mode="qat", max_steps=1)
    with pytest.raises(UsageError, match="labels to measure the metric with"):
        qtool.quantize(small_net, data, max_drop=1.0)


def test_a_contract_that_only_training_could_keep_ends_as_one_that_is_not_kept_without_labels(
    tmp_path: Path, small_net: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "RUNGS", (search.as_asked, search.training))
    file = tmp_path / "unlabelled.py"
    file.write_text(UNLABELLED)
    with pytest.raises(ContractError, match="promise less, give labelled training data") as caught:
        qtool.quantize(small_net, f"{file}:data", max_kl=1e-12, calibration="train:32")
    assert caught.value.details is not None
    assert caught.value.details["notes"] == ["no training was tried: the data have no labels"]


ANSWERS_BY_NAME = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.linear = nn.Conv2d(1, 4, 3), nn.Linear(4, 3)

    def forward(self, x):
        return {"scores": self.linear(self.conv(x).relu().mean((2, 3)))}

def build():
    torch.manual_seed(0)
    return Net()
"""


def test_answers_that_the_task_cannot_judge_are_found_before_the_training(
    tmp_path: Path, held_out_data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "fit", lambda *_, **__: pytest.fail("trained in vain"))
    monkeypatch.setattr(search, "RUNGS", (search.as_asked, search.training))
    file = tmp_path / "by_name.py"
    file.write_text(ANSWERS_BY_NAME)
    with pytest.raises(QtoolError, match="expected N×classes logits and N class indices; got output dict"):
        qtool.quantize(f"{file}:build", held_out_data, mode="qat", calibration="train:32")
    with pytest.raises(ContractError, match=r"promise less, or look at those units") as caught:
        qtool.quantize(f"{file}:build", held_out_data, max_kl=1e-14, calibration="train:32")
    assert caught.value.details is not None
    assert caught.value.details["notes"][0].startswith(
        "qat could not be made: task 'classification': expected N×classes"
    )


TWO_INPUTS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.more = nn.Linear(6, 4), nn.Linear(5, 4)

    def forward(self, image, more):
        return self.image(image) + self.more(more)

class Labelled:
    def __len__(self):
        return 24

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(index)
        return (torch.randn(6, generator=draw), torch.randn(5, generator=draw)), index % 4

def build():
    return Net()

def data():
    return {"train": Labelled(), "validation": Labelled(), "test": Labelled()}
"""


def test_a_model_of_two_inputs_is_exported_on_its_recorded_samples(tmp_path: Path) -> None:
    file, out = tmp_path / "two.py", tmp_path / "run"
    file.write_text(TWO_INPUTS)
    qtool.quantize(f"{file}:build", f"{file}:data", out=out, calibration="train:16")
    gates = {gate["name"]: gate["passed"] for gate in qtool.export(out, baselines=None).gates}
    assert gates["end-to-end parity"]
    assert gates["unit parity"]


def test_an_export_of_another_model_is_told_though_it_was_given_as_an_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = [torch.randn(8, 8, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    nets = [nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)) for _ in range(2)]
    monkeypatch.chdir(tmp_path)
    exported = qtool.export(qtool.quantize(nets[0], batches), ".", samples=batches, baselines=None)
    assert exported.folder == tmp_path, "it is found from any folder"
    qtool.quantize(nets[1], batches, out=tmp_path)
    (told,) = qtool.inspect(tmp_path)["notes"]
    assert told == f"export is of another model than quantize: run 'qtool export {tmp_path}' again"
    with pytest.raises(QtoolError, match="got one of another model than quantize; run 'qtool export'"):
        qtool.benchmark(tmp_path, data=batches)
    for same in (qtool.quantize(nets[1], batches), load_quantized(tmp_path)):
        qtool.export(same, tmp_path, samples=batches, baselines=None)
        assert "notes" not in qtool.inspect(tmp_path)
