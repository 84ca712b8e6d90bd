"""Memory that runs out, batches that find their size, budgets: through the training stage, with errors injected."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import warm
from nets import FeedForward
from torch import nn

import qtool
from qtool.errors import OutOfMemory, QtoolError, UsageError
from qtool.memory import pace, plan
from qtool.memory.plan import fewest_devices, sharded
from qtool.options import make
from qtool.recipe import AUTO, PLANNED, Recipe, TrainConfig
from qtool.recipe_files import load_recipe, to_toml
from qtool.source import open_source
from qtool.stages import choice, fitting
from qtool.stages.choice import Choice
from qtool.stages.training import _told_in_group
from qtool.steps import loop
from qtool.system import devices, launcher, processes
from qtool.system.launcher import _death
from qtool.training import optimizers

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
OPTIONS = {"device": "cpu", "max_steps": 6, "epochs": 9, "batch_size": 32, "checkpoint_every": 2, "grad_clip": None}


class Picky(nn.Module):
    """Runs out of memory, as a GPU does, at more than ``most`` samples from forward pass number ``after`` on."""

    def __init__(self, most: int = 10**9, after: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 32), nn.Dropout(0.2), nn.ReLU())
        self.head = nn.Linear(32, 3)
        self.most, self.after, self.passes, self.sizes = most, after, 0, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x)
        if self.training and not isinstance(x, torch._subclasses.FakeTensor):
            self.passes += 1
            self.sizes.append(len(x))
            if len(x) > self.most and self.passes > self.after:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return self.head(y)


def test_the_message_has_prediction_flags_and_checkpoint(
    small_data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where there is no room left to measure the device in."""
    monkeypatch.setattr(pace, "measure", Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory.")))
    with pytest.raises(QtoolError) as caught:
        qtool.train(Picky(16, after=3), small_data, out=tmp_path, **OPTIONS)
    text = str(caught.value)
    assert text.startswith("training step 4: expected memory for it; got none left, ")
    assert "MiB in use by the process (" in text
    assert "KiB predicted for tensors)" in text
    assert "pass --" in text
    assert "(predicted " in text
    kept = tmp_path / "checkpoints" / "step-00000002.safetensors"
    assert f"last good checkpoint: '{kept}'" in text
    resumed = qtool.train(Picky(), small_data, out=tmp_path, **OPTIONS)  # it is whole
    assert resumed.history.steps == 6


def test_without_memory_the_micro_batch_is_halved_and_the_run_goes_on(
    small_data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps before it are the undisturbed run's; the step itself has the same batch and generators, in parts."""
    monkeypatch.setattr(fitting, "_with_batch", lambda *_: Choice(TrainConfig(**OPTIONS)))
    model = Picky(16, after=2)
    found = qtool.train(model, small_data, **(OPTIONS | {"batch_size": "auto"}))
    whole = qtool.train(Picky(), small_data, **OPTIONS)
    assert model.sizes == [32, 32, 32, *[16] * 8]
    assert found.history.losses[:2] == whole.history.losses[:2]
    assert found.history.losses[2] == pytest.approx(whole.history.losses[2], rel=0.2)  # other batch-norm, other dropout
    assert model.body[1].num_batches_tracked == 10  # the pass that failed is forgotten


def test_where_one_sample_is_too_much_no_smaller_batch_is_named(small_data: str) -> None:
    few = {"optimizer": "sgd", "precision": "bf16-true"}  # so that there are few ways out to predict
    with pytest.raises(QtoolError, match="or take a smaller model; no checkpoint") as caught:
        qtool.train(Picky(0, after=1), small_data, **(OPTIONS | few | {"batch_size": "auto"}))
    assert "--batch-size" not in str(caught.value)
    error, auto = OutOfMemory("step 2", "memory for it", "none left", "", "no checkpoint"), TrainConfig(batch_size=AUTO)
    for asked, named in ((auto, False), (TrainConfig(), True)):
        assert ("--batch-size" in str(_told_in_group(error, asked, TrainConfig(), False))) is named


def test_what_fails_while_weights_change_is_not_repeated(small_data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "_with_batch", lambda *_: Choice(TrainConfig(**OPTIONS, step_in_backward=True)))
    with pytest.raises(QtoolError, match="none left"):
        qtool.train(Picky(16), small_data, **(OPTIONS | {"batch_size": "auto", "step_in_backward": True}))


class PickyJudge(Picky):
    """Runs out of memory at more than eight samples outside of training; if ``later``, once it was trained."""

    later = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training and len(x) > 8 and self.body[1].num_batches_tracked >= self.later:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return super().forward(x)


def test_a_model_is_judged_in_batches_that_training_had_room_for(small_data: str, tmp_path: Path) -> None:
    found = qtool.train(PickyJudge(), small_data, micro_batches=4, **OPTIONS)
    assert found.metrics["num_samples"] > 8
    for later, last in ((False, "no checkpoint was written before it"), (True, "last good checkpoint: '")):
        model = PickyJudge()
        model.later = later
        with pytest.raises(OutOfMemory, match=f"evaluation: expected memory for it; got none left, .*{last}"):
            qtool.train(model, small_data, out=tmp_path, **OPTIONS)


def test_memory_that_ends_while_states_are_made_is_told_as_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(parameters: list[nn.Parameter]) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    monkeypatch.setitem(optimizers.OPTIMIZERS, "adamw8bit", lambda config: none_left)
    batch = torch.randn(4, 64), torch.arange(4) % 3
    with pytest.raises(OutOfMemory, match=r"^optimizer: expected memory for its states; got none left"):
        qtool.train(Picky(), [batch], **OPTIONS | {"optimizer": "adamw8bit"})


def decided(told: list[str]) -> list[str]:
    """What was told but for each prediction and each epoch."""
    return [line for line in told if not line.startswith(("train: predicting ", "train: epoch "))]


def test_a_batch_finds_its_size_and_keeps_it(small_data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    options = OPTIONS | {"batch_size": "auto"}
    source = qtool.load_data(small_data)
    assert len(source.train) == 216
    qtool.train(Picky(), small_data, out=tmp_path / "a", progress=told.append, **options)
    assert told[0] == "train: predicting --batch-size 2 (1 of 8)"
    assert decided(told)[0].startswith("batch size 16: predicted peak")  # an eighth of an epoch, memory being plenty
    kept = json.loads((tmp_path / "a" / "train.json").read_text())["memory"]
    assert kept["flags"] == "--batch-size 16"
    assert [one["flags"] for one in kept["considered"]] == [f"--batch-size {size}" for size in (2, 8, 16)]
    assert kept["considered"][-1]["predicted_peak_bytes"] == kept["predicted_peak_bytes"] < kept["limit_bytes"]
    with pytest.raises(KeyboardInterrupt):
        _interrupted(small_data, tmp_path / "b", options)
    told.clear()
    monkeypatch.setattr(fitting, "Predictor", None)  # nothing is predicted again
    assert qtool.train(Picky(), small_data, out=tmp_path / "b", progress=told.append, **options).history.steps == 6
    assert decided(told) == ["goes on with --batch-size 16, chosen when this run began"]


def test_what_a_budget_chose_is_held_to_by_the_same_command_alone(
    small_data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(source: Any = None, **changes: Any) -> Choice:
        config = TrainConfig(device="cpu", batch_size=128, grad_clip=None, memory_budget="6MiB")
        return fitting.fitted(dataclasses.replace(config, **changes), source or one, tmp_path, True, told.append)

    told: list[str] = []
    one, other = (open_source(f"{__file__}:{name}", small_data, seed=0) for name in ("wide", "deep"))
    first = found()
    assert first.config.precision != "32-true" or first.config.micro_batches > 1
    told.clear()
    with monkeypatch.context() as patch:
        patch.setattr(fitting, "Predictor", None)
        assert found() == first
        assert found(checkpoint_every=3).config == dataclasses.replace(first.config, checkpoint_every=3)
        patch.setattr(fitting, "Predictor", lambda source: lambda config: config.devices * 4 * 2**20)
        with pytest.raises(UsageError, match=r"at least 8MiB on each of 2 devices for --.*, as this run began; got 6"):
            found(devices=2)
    assert [line.split(" with ")[0] for line in told] == ["goes on"] * 2
    monkeypatch.setattr(fitting.Predictor, "__call__", lambda self, config: 2**20)
    monkeypatch.setattr(fitting.Predictor, "seconds", lambda self, base: lambda config: 1.0)
    for changes in ({"memory_budget": "1GiB"}, {"source": other}):
        told.clear()
        found(**changes)
        assert told[0].startswith("train: predicting it as it is")


def test_a_refused_command_leaves_the_choice_of_the_run_that_is_there(small_data: str, tmp_path: Path) -> None:
    options = OPTIONS | {"batch_size": "auto"}
    with pytest.raises(KeyboardInterrupt):
        _interrupted(small_data, tmp_path, options)
    choice.halve(tmp_path, TrainConfig(batch_size=16), 0, Picky())
    with pytest.raises(QtoolError, match=r"one that differs in .*learning_rate \("):
        qtool.train(Picky(), small_data, out=tmp_path, **options | {"learning_rate": 0.5})
    assert choice.halvings(tmp_path) == 0
    told: list[str] = []
    assert qtool.train(Picky(), small_data, out=tmp_path, progress=told.append, **options).history.halvings == 1
    assert decided(told) == ["goes on with --batch-size 16, chosen when this run began"]


def _interrupted(data: str, out: Path, options: dict[str, Any]) -> None:
    before = loop._Run._report

    def report(run: Any, loss: float, rate: float) -> None:
        if run.history.steps == 3:
            raise KeyboardInterrupt

    loop._Run._report = report  # type: ignore[method-assign]
    try:
        qtool.train(Picky(), data, out=out, **options)
    finally:
        loop._Run._report = before  # type: ignore[method-assign]


def test_a_budget_chooses_and_an_impossible_one_says_what_is_needed(small_data: str) -> None:
    def wide() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 3))

    told: list[str] = []
    plain = {"device": "cpu", "max_steps": 1, "batch_size": 128, "grad_clip": 0.5, "progress": told.append}
    qtool.train(wide(), small_data, memory_budget="1GiB", **plain)
    qtool.train(wide(), small_data, memory_budget="6MiB", **plain)
    assert told[:2] == ["train: predicting it as it is (1 of 24)", decided(told)[0]]
    assert decided(told)[0].startswith("1GiB budget: predicted peak ")
    assert decided(told)[0].endswith("MiB as it is")
    assert re.search(
        r" MiB with --.*predicted to fit \(its step estimated at [\d.]+ times that without\)", decided(told)[1]
    )
    told.clear()
    with pytest.raises(UsageError, match=r"at least \dMiB.*got 1MiB; pass --memory-budget \dMiB --") as caught:
        qtool.train(wide(), small_data, memory_budget="1MiB", **plain)
    assert told[1].startswith("train: predicting --micro-batches 64 ")
    assert len(told) < 8
    need = str(caught.value).split("at least ")[1].split(",")[0]
    qtool.train(wide(), small_data, memory_budget=need, **plain)
    with pytest.raises(UsageError, match="an amount of memory"):
        qtool.train(wide(), small_data, memory_budget="much", **plain)


def test_what_is_given_at_its_default_is_kept(small_data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By name: as keyword arguments, in a recipe and in one that was written out, but not of a config made whole."""

    def peak(self: Any, config: TrainConfig) -> int:
        return 10 * 2**20 // (config.micro_batches * (1 if config.precision == "32-true" else 2))

    monkeypatch.setattr(fitting.Predictor, "__call__", peak)
    monkeypatch.setattr(fitting.Predictor, "seconds", lambda self, base: lambda config: 1.0)
    told: list[str] = []
    plain: dict[str, Any] = {"device": "cpu", "max_steps": 1, "batch_size": 128, "memory_budget": "6MiB"}
    fixed = {"precision": "32-true", "optimizer": "adamw"}
    qtool.train(wide(), small_data, progress=told.append, **plain)
    qtool.train(wide(), small_data, progress=told.append, **plain, **fixed)
    assert "--precision" in decided(told)[0]
    assert "--precision" not in decided(told)[1]
    assert "--optimizer" not in decided(told)[1]
    (tmp_path / "r.toml").write_text(
        "model = 'resnet'\ndata = 'fashion-mnist'\n[train]\nmemory_budget = '6MiB'\nprecision = '32-true'\n"
    )
    recipe = load_recipe(tmp_path / "r.toml", ["train.optimizer=adamw"])
    assert {"precision", "optimizer"} <= set(fitting.pinned(recipe.train))
    (tmp_path / "whole.toml").write_text(to_toml(recipe))
    assert load_recipe(tmp_path / "whole.toml") == recipe
    free = Recipe(train=TrainConfig(**plain))
    (tmp_path / "free.toml").write_text(to_toml(free))
    assert load_recipe(tmp_path / "free.toml") == free
    assert "precision" not in fitting.pinned(free.train)


def test_what_the_model_cannot_take_is_refused_before_anything_is_predicted(small_data: str) -> None:
    told: list[str] = []
    for wanted in ({"activation_checkpointing": True}, {"lora": 4, "lora_targets": ("nowhere",)}):
        with pytest.raises(UsageError, match=r"--activation-checkpointing|--lora-targets"):
            qtool.train(wide(), small_data, memory_budget="1GiB", device="cpu", progress=told.append, **wanted)  # type: ignore[arg-type]
    assert told == []


def test_a_budget_changes_nothing_else() -> None:
    rows_of = plan.rows(TrainConfig(batch_size=64))
    assert {name for row in rows_of for choice in row for name in choice.changes} == set(PLANNED)


def test_adapters_are_named_where_the_model_takes_them(small_data: str) -> None:
    def named(net: nn.Module) -> bool:
        with pytest.raises(UsageError, match=", or a smaller --batch-size") as caught:
            qtool.train(net, small_data, memory_budget="1KiB", device="cpu", batch_size=2, precision="bf16-true")
        return "--lora" in str(caught.value)

    pytest.importorskip("peft")
    flat = nn.Flatten()
    assert named(nn.Sequential(flat, nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 3)))
    assert not named(nn.Sequential(flat, nn.Linear(64, 3)))  # a last layer alone: nothing to adapt


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_of_several_devices_each_has_the_budget(strategy: str, small_data: str) -> None:
    def peak(**options: Any) -> int:
        return fitting.Predictor(source)(TrainConfig(**plain, **options))

    source = open_source(f"{__file__}:wide", small_data, seed=0)
    plain = {"device": "cpu", "batch_size": 128, "devices": 2, "strategy": strategy}
    whole = peak()
    told: list[str] = []
    for share in (1.01, 0.9):
        config = TrainConfig(**plain, memory_budget=f"{int(share * whole)}")
        found = fitting.fitted(config, source, None, False, told.append).config
        assert peak(**{key: getattr(found, key) for key in CHOSEN}) <= share * whole
    assert "budget on each of 2 devices: predicted peak" in decided(told)[0]
    assert decided(told)[0].endswith("as it is")
    assert " MiB with --" in decided(told)[1]
    three = TrainConfig(**(plain | {"batch_size": AUTO, "devices": 3}))
    found = fitting.fitted(three, source, None, False, told.append).config
    assert found.batch_size == 24  # an eighth of 216 samples, in threes of powers of two


CHOSEN = ("precision", "optimizer", "rounding", "micro_batches", "activation_checkpointing")


def wide() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 3))


def test_an_impossible_budget_says_over_how_many_devices_it_would_fit() -> None:
    def peak(config: TrainConfig) -> int:
        """A model of memory: 800 of weights and states, that shards divide and 8 bits halve, and 40 a sample."""
        states = 400 if config.optimizer == "adamw8bit" else 800
        return states // config.devices + 40 * -(-config.batch_size // config.devices // config.micro_batches)

    plain = TrainConfig(device="cpu", batch_size=64, optimizer="adamw8bit")
    for budget in (440, 239, 200, peak(sharded(plain, 11)), 47, 46):
        fitting_counts = [n for n in range(2, 65) if peak(sharded(plain, n)) <= budget]
        asked = Mock(side_effect=peak)
        assert fewest_devices(plain, budget, asked, fitting._legal) == min(fitting_counts)
        assert asked.call_count <= 5, "they lie nearly on a + b/n"
    assert fewest_devices(plain, 45, peak, fitting._legal) is None
    assert fewest_devices(dataclasses.replace(plain, optimizer="adafactor"), 440, peak, fitting._legal) is None
    said = fitting._more_devices(TrainConfig(device="cpu", batch_size=64), plain, 440, peak, 1)
    assert said == "--optimizer adamw8bit --devices 8 --strategy fsdp, or "

    def normed(config: TrainConfig) -> int:
        if config.batch_size < 2 * config.devices:
            raise QtoolError("model", "two samples for batch-norm", "one", "take more")
        return peak(config)

    assert fewest_devices(plain, 92, normed, fitting._legal, least=2) == 32
    assert fewest_devices(plain, 91, normed, fitting._legal, least=2) is None
    assert fewest_devices(plain, 47, normed, fitting._legal) is None  # what cannot be predicted is not said


def test_a_model_with_batch_norm_is_not_said_to_fit_with_a_sample_on_each_device(small_data: str) -> None:
    source = open_source(Picky(), small_data, "classification", None, seed=0)
    config = TrainConfig(device="cpu", batch_size=2)
    assert fitting._more_devices(config, config, 10**9, fitting.Predictor(source), 1) == ""


@pytest.mark.slow
def test_such_a_budget_fits_over_that_many_devices(small_data: str) -> None:
    source = open_source(f"{__file__}:deep", small_data, seed=0)
    leanest = {"optimizer": "sgd", "precision": "bf16-true", "activation_checkpointing": True}
    config = TrainConfig(device="cpu", batch_size=16, memory_budget="1650KiB", **leanest)
    with pytest.raises(UsageError, match=r"or .*--devices \d+ --strategy fsdp.*, or --lora 8") as caught:
        fitting.fitted(config, source, None, False, lambda text: None)
    words = str(caught.value).split(", or ")[1]
    count = int(words.split("--devices ")[1].split()[0])
    assert count > 2  # two would not do
    given = dataclasses.replace(config, devices=count, strategy="fsdp")
    assert fitting.fitted(given, source, None, False, lambda text: None).config.devices == count


def deep() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), *(FeedForward(128) for _ in range(3)), nn.Linear(128, 3))


def as_found(model: nn.Module, data: str, run: Path, options: dict[str, Any]) -> None:
    """Has the run go on with a batch of 32, as if that had been found for it."""
    asked = make(TrainConfig, {key: value for key, value in options.items() if key != "progress"})
    memory = {"chosen": {"batch_size": 32}, "flags": "--batch-size 32"}
    choice.record(run, asked, open_source(model, data, seed=0).inputs, memory)


@pytest.mark.parametrize("content", ["{", '{"asked": {}, "others": 3}', '{"asked": {}, "halvings": "x"}'])
def test_a_choice_that_is_damaged_is_made_anew(tmp_path: Path, content: str) -> None:
    asked, inputs = TrainConfig(batch_size=64), {"data": "a"}
    choice.record(tmp_path, asked, inputs, {"chosen": {"batch_size": 32}})
    assert choice.recorded(tmp_path, asked, inputs) is not None
    (tmp_path / choice.FILE).write_text(content)
    assert (choice.recorded(tmp_path, asked, inputs), choice.halvings(tmp_path)) == (None, 0)
    choice.record(tmp_path, asked, inputs, {"chosen": {"batch_size": 16}})
    assert choice.recorded(tmp_path, asked, inputs).config.batch_size == 16  # type: ignore[union-attr]


class PickyInOne(Picky):
    """Runs out of memory in the second process alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.most = 8 if processes.rank() == 1 else 10**9
        return super().forward(x)


@pytest.mark.slow
@pytest.mark.usefixtures("warm_launches")
def test_several_processes_go_on_together_from_the_last_checkpoint_in_smaller_micro_batches(
    small_data: str, tmp_path: Path
) -> None:
    told: list[str] = []
    options = OPTIONS | {"batch_size": "auto", "devices": 2, "strategy": "fsdp", "progress": told.append}
    as_found(PickyInOne(after=3), small_data, tmp_path, options)
    found = qtool.train(PickyInOne(after=3), small_data, out=tmp_path, **options)
    assert found.history.steps == 6
    assert told == ["training step 4: out of memory; again from the last checkpoint in smaller micro-batches"]
    start = time.monotonic()
    with pytest.raises(
        QtoolError, match=r"training step 4: .*[0-9] KiB predicted for tensors\); pass --.*step-00000002'"
    ):
        qtool.train(PickyInOne(after=3), small_data, out=tmp_path, **options | {"batch_size": 32})
    assert time.monotonic() - start < 60  # nobody waits for the one that failed


class Killed(Picky):
    """Its second process is killed at more than ``most`` samples, and leaves a file in ``folder``."""

    def __init__(self, folder: Path, **options: int) -> None:
        super().__init__(**options)
        self.folder = folder

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return super().forward(x)
        except torch.OutOfMemoryError:
            if processes.rank() == 1:
                (self.folder / str(time.monotonic_ns())).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)
            raise


@pytest.mark.slow
@pytest.mark.usefixtures("warm_launches")
def test_a_process_that_the_system_kills_for_lack_of_memory_is_one_that_ran_out_of_it(
    small_data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    killed, run = tmp_path / "killed", tmp_path / "run"
    killed.mkdir()
    options = OPTIONS | {"batch_size": "auto", "devices": 2, "progress": told.append}
    model = Killed(killed, most=8, after=3)
    as_found(model, small_data, run, options)
    monkeypatch.setattr(devices, "memory_kills", lambda: {"system": len(list(killed.iterdir()))})
    assert qtool.train(model, small_data, out=run, **options).history.halvings == 1
    assert told == ["process 1 of 2: out of memory; again from the last checkpoint in smaller micro-batches"]
    assert len(list(killed.iterdir())) == 1


def test_the_end_of_host_memory_is_told_with_what_was_free_and_what_was_predicted(
    small_data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launched(*_: Any) -> None:
        counts.append(then)
        raise died

    counts, then, died = [7], 8, _death(1, 2, -signal.SIGKILL)
    monkeypatch.setattr(devices, "memory_kills", lambda: {"system": counts[-1]})
    monkeypatch.setattr(devices, "memory_free", lambda device: 3 * 2**20)
    monkeypatch.setattr(launcher, "launch", launched)
    options = OPTIONS | {"devices": 2, "out": tmp_path}
    with pytest.raises(OutOfMemory) as caught:
        qtool.train(Picky(), small_data, **options)
    assert re.fullmatch(
        r"process 1 of 2: expected host memory for it; got a kill by SIGKILL, probably for lack of it, 3.00 MiB free "
        r"when it began \(2 times [0-9.]+ KiB predicted for tensors\); pass .*; no checkpoint was written before it",
        str(caught.value),
    )
    counts, then = [8], 8  # a user's kill -9 looks the same
    (note := tmp_path / choice.NOTE).parent.mkdir()
    note.touch()
    with pytest.raises(launcher.Killed, match=r"process 1 of 2: .* a kill by SIGKILL; run the same"):
        qtool.train(Picky(), small_data, **options)
    assert note.exists()
    died = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        qtool.train(Picky(), small_data, **options)
    assert not note.exists()  # nobody would tell from a kill what the user has stopped


def test_a_run_that_was_killed_for_lack_of_memory_goes_on_in_smaller_micro_batches(
    small_data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it was alone, nobody saw it: what it left tells."""
    told: list[str] = []
    options = OPTIONS | {"batch_size": "auto", "progress": told.append}

    def begun(run: str, kills: int, boot: str = choice._boot()) -> Picky:
        as_found(Picky(), small_data, tmp_path / run, options)
        (tmp_path / run / choice.NOTE).write_text(json.dumps({"boot": boot, "kills": {"system": kills}}))
        model = Picky()
        qtool.train(model, small_data, out=tmp_path / run, **options)
        return model

    monkeypatch.setattr(devices, "memory_kills", lambda: {"system": 1})
    assert begun("a", 0).sizes == [16] * 12
    assert told[1].startswith("the last attempt was killed, probably for lack of host memory: it goes on in smaller")
    assert begun("b", 1).sizes == [32] * 6
    assert begun("c", 0, "another start of the system").sizes == [32] * 6
    assert not (tmp_path / "b" / choice.NOTE).exists()


def test_batches_made_already_are_refused_before_processes_start(
    small_data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "launch", None)
    batches = [(torch.zeros(4, 64), torch.zeros(4, dtype=torch.int64))]
    with pytest.raises(UsageError, match="several processes can share; got an iterable of batches"):
        qtool.train(Picky(), batches, device="cpu", devices=2)


def picky_in_one() -> nn.Module:
    return PickyInOne(after=3)


@pytest.mark.slow
def test_torchrun_starts_them_again_in_smaller_micro_batches(small_data: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = [
        "--nproc-per-node", "2", "--max-restarts", "1", "--standalone", "-m", "qtool.cli", "train", "--model",
        f"{__file__}:picky_in_one", "--data", small_data, "--out", str(run), "--device", "cpu", "--epochs", "9",
        "--max-steps", "6", "--batch-size", "32", "--checkpoint-every", "2", "--memory-budget", "1GiB", "--strategy",
        "fsdp", "--optimizer", "sgd", "--precision", "bf16-true",
    ]  # fmt: skip
    done = warm.Started(tmp_path / "said", warm.torchrun, *words)
    assert done.end() == 0, done.said()[-3000:]
    assert "training step 4: expected memory for it" in done.said()
    assert "it goes on in smaller micro-batches; last good checkpoint" in done.said()
    result = json.loads((run / "train.json").read_text())
    assert len(result["history"]["losses"]) == 6


def test_auto_is_a_word_of_recipes_too(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text('model = "resnet"\ndata = "fashion-mnist"\n[train]\nbatch_size = "auto"\n')
    recipe = load_recipe(tmp_path / "r.toml")
    assert recipe.train.batch_size == AUTO
    (tmp_path / "again.toml").write_text(to_toml(recipe))
    assert load_recipe(tmp_path / "again.toml") == recipe
    assert Recipe().train.batch_size == 64


LIMITED = """
import resource, sys
import torch
import qtool
from qtool.errors import QtoolError
x = torch.zeros(300, 64); y = torch.zeros(300, dtype=torch.int64)
data = torch.utils.data.TensorDataset(x, y)
class Hungry(torch.nn.Linear):
    passes = 0
    def forward(self, x):
        self.passes += self.training
        if self.passes > 2:
            limit = int(open("/proc/self/statm").read().split()[0]) * 4096 + 2**26
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            x = x.repeat(1, 100_000)[:, :64]
        return super().forward(x)
try:
    qtool.train(Hungry(64, 3), {"train": data, "test": data}, out=sys.argv[1], batch_size=100, epochs=1, device="cpu",
                checkpoint_every=2)
except QtoolError as error:
    print(error)
"""


def test_an_address_space_that_ends_is_told_as_memory_that_ends(tmp_path: Path) -> None:
    process = warm.Started(tmp_path / "said", warm.script, LIMITED, str(tmp_path / "run"))
    process.end()
    (told,) = [line for line in process.said().splitlines() if line.startswith("training step 3: ")]
    assert "expected memory for it; got none left" in told
    assert "step-00000002.safetensors" in told
