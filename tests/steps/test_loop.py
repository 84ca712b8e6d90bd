import random
import signal
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import warm
from stopped import Stop, stop_after
from torch import nn

from qtool.errors import QtoolError, UsageError
from qtool.recipe import TrainConfig
from qtool.steps import checkpoint, loop, trees
from qtool.steps.loop import Hooks, fit
from qtool.steps.order import Batches
from qtool.system import devices
from qtool.tasks import load_task

TASK = load_task("classification")


class Noisy:
    """A map-style set that draws from Python's and torch's generators whenever it is read, as augmentations do."""

    def __init__(self, count, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.targets = torch.randint(0, 3, (count,), generator=generator)
        self.images = torch.randn(count, 2, 5, 5, generator=generator) + self.targets[:, None, None, None]

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return self.images[index] + 0.1 * random.random() + 0.1 * torch.randn(2, 5, 5), self.targets[index]

    def batch(self, positions):
        images, targets = zip(*(self[i] for i in positions), strict=True)
        return torch.stack(images), torch.stack(targets)


def make_data(count=37):
    return SimpleNamespace(train=Noisy(count), validation=Noisy(12, seed=1), identity="noisy")


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(72, 3)
    )


def config(**options):
    return TrainConfig(**({"device": "cpu", "epochs": 3, "batch_size": 8, "checkpoint_every": 2} | options))


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def test_training_learns_and_is_deterministic():
    first, second = make_model(), make_model()
    one = fit(first, make_data(), TASK, config())
    two = fit(second, make_data(), TASK, config())
    assert one.losses == two.losses
    assert same(first, second)
    assert one.steps == 15
    assert len(one.epochs) == 3
    assert one.epochs[-1]["loss"] < one.epochs[0]["loss"]
    assert one.epochs[-1]["validation_top1"] > 0.4
    assert not first.training
    other = fit(make_model(), make_data(), TASK, config(seed=1))
    assert other.losses != one.losses


def test_no_gradients_are_left_in_the_model():
    """A service that keeps the model would keep as many bytes again."""
    for options in ({}, {"epochs": 2, "micro_batches": 2}, {"max_steps": 1}):
        model = make_model()
        fit(model, make_data(), TASK, config(**options))
        assert all(parameter.grad is None for parameter in model.parameters())


def test_the_callers_generators_are_left_alone():
    model = make_model()
    before, state = random.getstate(), torch.get_rng_state()
    fit(model, make_data(), TASK, config(epochs=1))
    assert random.getstate() == before
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("step", [1, 2, 5, 7, 15])
def test_a_stopped_run_goes_on_as_if_nothing_had_happened(step, tmp_path):
    """Parameters, moments, running statistics, losses, metrics, data order, dropout and augmentation, bit for bit."""
    whole = make_model()
    expected = fit(whole, make_data(), TASK, config(early_stopping=2), out=tmp_path / "whole")
    stopped = make_model()
    with pytest.raises(Stop):
        fit(stopped, make_data(), TASK, config(early_stopping=2), out=tmp_path / "stopped", progress=stop_after(step))
    resumed = make_model()
    history = fit(resumed, make_data(), TASK, config(early_stopping=2), out=tmp_path / "stopped")
    assert history.losses == expected.losses
    assert history.epochs == expected.epochs
    assert same(resumed, whole)
    for name in ("optimizer", "place", "rng"):
        states = [
            trees.load_tree(checkpoint.latest(tmp_path / run / "checkpoints"))[name] for run in ("whole", "stopped")
        ]
        assert flat(states[0]) == flat(states[1])


def test_a_run_stopped_after_its_last_step_is_judged_when_it_goes_on(tmp_path):
    """Its steps end within an epoch, where a checkpoint is due: the epoch has not ended before it is validated."""
    options = config(max_steps=4, early_stopping=1)
    expected = fit(make_model(), make_data(), TASK, options, out=tmp_path / "whole")
    with pytest.raises(Stop):
        fit(make_model(), make_data(), TASK, options, out=tmp_path / "stopped", hooks=Unjudged())
    history = fit(make_model(), make_data(), TASK, options, out=tmp_path / "stopped")
    assert (history.losses, history.epochs) == (expected.losses, expected.epochs)
    assert history.best_epoch == 0


class Unjudged(Hooks):
    """Stops a run as it begins to judge an epoch, not where it tries that out before the first step."""

    def __init__(self):
        self.trained = False

    def before_step(self, model, step, total):
        self.trained = True

    def mode(self, model, training):
        model.train(training)
        if self.trained and not training:
            raise Stop


def test_the_time_of_an_epochs_beginning_counts_when_a_run_goes_on(tmp_path):
    with pytest.raises(Stop):
        fit(make_model(), make_data(), TASK, config(), out=tmp_path, progress=stop_after(3))
    assert trees.load_tree(checkpoint.latest(tmp_path / "checkpoints"))["history"]["seconds"] > 0


class Drawing:
    """A set that draws from generators of its own, of every kind."""

    def __init__(self, seed):
        self.inputs = torch.randn(12, 4, generator=torch.Generator().manual_seed(seed))
        own = [np.random.default_rng(3), np.random.Generator(np.random.MT19937(3)), torch.Generator().manual_seed(3)]
        self.noise = {"numpy": own[:2], "old": np.random.RandomState(3), "python": random.Random(3), "torch": own[2]}

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        first, second = (generator.standard_normal() for generator in self.noise["numpy"])
        more = self.noise["old"].standard_normal() + self.noise["python"].gauss(0, 1)
        return self.inputs[index] + first + second + more + torch.randn((), generator=self.noise["torch"]), index % 3


class Remembering(nn.Module):
    """Subtracts a running mean, adds that of what it remembers, in buffers that no state has, and noise of its own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.noise = nn.Linear(4, 3), torch.Generator().manual_seed(2)
        self.register_buffer("mean", torch.zeros(4), persistent=False)
        self.register_buffer("seen", None, persistent=False)
        self.register_buffer("graph", torch.eye(4).to_sparse(), persistent=False)

    def forward(self, x):
        self.mean.lerp_(x.mean(0), 0.1)
        self.seen = x[:1] if self.seen is None else torch.cat([self.seen, x[:1]])
        noise = torch.rand(4, generator=self.noise)
        return self.layer((x - self.mean + noise) @ self.graph) + self.seen.mean()


@pytest.mark.parametrize("given", [False, True])
def test_own_generators_of_data_and_buffers_that_no_state_has_are_resumed(given, tmp_path):
    def run(**more):
        parts = [Drawing(0), Drawing(1)]
        if given:
            parts = [Batches(torch.utils.data.DataLoader(part, batch_size=4, shuffle=True)) for part in parts]
        model, data = Remembering(), SimpleNamespace(train=parts[0], validation=parts[1], identity="drawing")
        options = config(batch_size=4, early_stopping=1, learning_rate=0.05)
        return model, fit(model, data, TASK, options, **more)

    whole, expected = run()
    with pytest.raises(Stop):
        run(out=tmp_path, progress=stop_after(5))
    resumed, history = run(out=tmp_path)
    assert (history.losses, history.epochs) == (expected.losses, expected.epochs)
    assert same(resumed, whole)
    assert torch.equal(resumed.mean, whole.mean)
    assert torch.equal(resumed.seen, whole.seen)


class Full(Remembering):
    """Runs out of memory in forward pass number ``when``, after it has moved its buffers."""

    def __init__(self, when):
        super().__init__()
        self.register_buffer("mask", torch.ones(4), persistent=False)
        self.norm, self.when, self.found = nn.BatchNorm1d(3), when, []

    def forward(self, x):
        self.found.append({name: b.to_dense().clone() for name, b in self.named_buffers()})
        y = self.norm(super().forward(x * self.mask))
        if len(self.found) == self.when:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return y


@pytest.mark.parametrize("step", [1, 3])
def test_a_step_that_is_repeated_begins_from_the_buffers_as_they_were(step, monkeypatch):
    copied, kept = [], checkpoint.Unstored.kept
    monkeypatch.setattr(checkpoint.Unstored, "kept", lambda own: copied.append(kept(own)) or copied[-1])
    model, data = Full(step), SimpleNamespace(train=Drawing(0), validation=None, identity="drawing")
    assert fit(model, data, TASK, config(epochs=1, batch_size=4), backs_off=True).halvings == 1
    failed, again = model.found[step - 1 : step + 1]
    assert failed.keys() == again.keys()
    assert all(torch.equal(failed[name], again[name]) for name in failed)
    assert set(copied[-1]) == {"mean", "seen"}  # what does not move is copied for the first step alone


def flat(tree):
    tensors = {}
    structure = trees._encode(tree, "", tensors, {})
    return structure, {name: tensor.tolist() for name, tensor in tensors.items()}


SCRIPT = """
import os, signal, sys
from pathlib import Path
import torch
from qtool.steps import trees
from test_loop import TASK, config, fit, make_data, make_model

out, when = Path(sys.argv[1]), sys.argv[2]

def kill(at):
    if when == str(at.step):
        os.kill(os.getpid(), signal.SIGKILL)

if when == "writing":
    save = trees.save_file
    def half(tensors, path, metadata):
        save(tensors, path, metadata)
        if len(list(out.rglob("step-*"))) and "00000010" not in str(list(out.rglob("step-*"))):
            return
        os.truncate(path, 1000)
        os.kill(os.getpid(), signal.SIGKILL)
    trees.save_file = half

model = make_model()
history = fit(model, make_data(), TASK, config(), out=out, progress=kill)
torch.save({"model": model.state_dict(), "losses": history.losses}, out / "result.pt")
"""


def run_script(out, when):
    out.mkdir(exist_ok=True)
    return warm.Started(out / "said", warm.script, SCRIPT, str(out), when)


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
@pytest.mark.parametrize("when", ["7", "writing"])
def test_a_killed_process_resumes_exactly(when, tmp_path):
    """Killed between steps, and killed in the middle of writing a checkpoint (whose half must not count)."""
    killed = run_script(tmp_path, when)
    assert killed.end() == -signal.SIGKILL, killed.said()
    assert not (tmp_path / "result.pt").exists()
    again = run_script(tmp_path, "never")
    assert again.end() == 0, again.said()
    found = torch.load(tmp_path / "result.pt", weights_only=True)
    model = make_model()
    expected = fit(model, make_data(), TASK, config())
    assert found["losses"] == expected.losses
    assert all(torch.equal(value, found["model"][name]) for name, value in model.state_dict().items())


def test_a_finished_run_is_not_run_again(tmp_path):
    first, second = make_model(), make_model()
    expected = fit(first, make_data(), TASK, config(), out=tmp_path)
    history = fit(second, make_data(), TASK, config(), out=tmp_path, progress=stop_after(1))
    assert history == expected
    assert same(first, second)


def test_a_checkpoint_of_another_recipe_is_refused(tmp_path):
    fit(make_model(), make_data(), TASK, config(epochs=1), out=tmp_path)
    with pytest.raises(
        QtoolError, match=r"differs in learning_rate \(0.002 there, 0.1 here\), seed \(0 there, 3 here\)"
    ):
        fit(make_model(), make_data(), TASK, config(epochs=1, learning_rate=0.1, seed=3), out=tmp_path)
    with pytest.raises(QtoolError, match="model's parameters"):
        fit(nn.Sequential(nn.Flatten(), nn.Linear(50, 3)), make_data(), TASK, config(epochs=1), out=tmp_path)
    with pytest.raises(QtoolError, match="weights"):
        fit(make_model(), make_data(), TASK, config(epochs=1), out=tmp_path, identity={"weights": "abc"})
    fit(make_model(), make_data(), TASK, config(epochs=1, checkpoint_every=None), out=tmp_path)


def test_starting_over_removes_what_was_there(tmp_path):
    fit(make_model(), make_data(), TASK, config(epochs=1), out=tmp_path)
    history = fit(make_model(), make_data(), TASK, config(epochs=1, seed=5), out=tmp_path, resume=False)
    assert history.steps == 5


def test_a_damaged_checkpoint_is_named(tmp_path):
    fit(make_model(), make_data(), TASK, config(epochs=1), out=tmp_path)
    path = checkpoint.latest(tmp_path / "checkpoints")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(QtoolError, match=path.name):
        fit(make_model(), make_data(), TASK, config(epochs=1), out=tmp_path)


class Poisoned(Hooks):
    """Puts a NaN into the data path at a step."""

    def __init__(self, at: int = 6) -> None:
        self.at = at

    def before_step(self, model, step, total):
        if step == self.at:
            model[0].register_forward_hook(lambda m, i, o: o * float("nan"))


def test_a_loss_that_is_not_finite_is_explained(tmp_path):
    with pytest.raises(QtoolError) as caught:
        fit(make_model(), make_data(), TASK, config(), hooks=Poisoned(), out=tmp_path)
    text = str(caught.value)
    assert "training step 7" in text
    assert "nan at learning rate 0.00" in text
    assert "layer '0'" in text
    assert "; lower --learning-rate; " in text
    assert "step-00000006.safetensors" in text
    assert checkpoint.latest(tmp_path / "checkpoints").name == "step-00000006.safetensors"


def test_no_learning_rate_is_blamed_for_a_loss_that_is_not_finite_before_any_update():
    with pytest.raises(QtoolError, match=r"step 1: .*layer '0'; correct the model, its weights or the task's loss; no"):
        fit(make_model(), make_data(), TASK, config(), hooks=Poisoned(at=0))


def test_data_that_is_not_finite_is_told_as_such():
    data = [(torch.full((4, 2, 5, 5), float("nan")), torch.zeros(4, dtype=torch.int64))]
    data = SimpleNamespace(train=Batches(data), validation=None)
    with pytest.raises(
        QtoolError, match=r"nan at .*, first non-finite in the inputs.*; correct the data; no checkpoint"
    ):
        fit(make_model(), data, TASK, config())


def test_a_short_last_batch_that_is_given_leaves_batch_norm_two_samples(tmp_path):
    """Unless single samples are what all batches are cut into; a resume cuts as an undisturbed run does."""
    draw = torch.Generator().manual_seed(0)
    data = [(torch.randn(n, 2, 5, 5, generator=draw), torch.arange(n) % 3) for n in (8, 5, 4)]
    data, seen = SimpleNamespace(train=Batches(data), validation=None), []

    def run(given=data, stop=99, **options):
        model = nn.Sequential(nn.Flatten(), nn.Linear(50, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
        model[0].register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
        del seen[:]
        fit(
            model,
            given,
            TASK,
            config(epochs=1, micro_batches=4, checkpoint_every=1),
            progress=stop_after(stop),
            **options,
        )

    run()
    assert seen == [2, 2, 2, 2, 2, 3, 2, 2]
    with pytest.raises(Stop):
        run(stop=2, out=tmp_path)
    run(out=tmp_path)
    assert seen[-2:] == [2, 2]
    with pytest.raises(QtoolError, match="or give batches, that leave every micro-batch"):
        run(SimpleNamespace(train=Batches(data.train.batches[2:]), validation=None))


class Ruin(Hooks):
    """Damages a parameter after the loss of the last step has been read."""

    def after_epoch(self, model, epoch, metrics):
        model[0].weight.data[0] = float("inf")


def test_a_damaged_model_is_never_checkpointed(tmp_path):
    with pytest.raises(QtoolError, match=r"non-finite value in '0.weight'.*no checkpoint"):
        fit(make_model(), make_data(), TASK, config(checkpoint_every=None), hooks=Ruin(), out=tmp_path)
    assert checkpoint.latest(tmp_path / "checkpoints") is None


class Freezing(Hooks):
    """What QAT does: freeze batch-norm after a fraction of the steps, keep a state, switch modes its own way."""

    def __init__(self):
        self.calls, self.modes, self.sum = [], [], 0

    def mode(self, model, training):
        self.modes.append(training)
        model.train(training)

    def before_step(self, model, step, total):
        self.calls.append((step, total))
        self.sum += step
        if step >= total // 2:
            model[1].eval()

    def state_dict(self):
        return {"sum": self.sum}

    def load_state_dict(self, state):
        self.sum = state["sum"]


def test_hooks_see_every_step_and_resume(tmp_path):
    whole, hooks = make_model(), Freezing()
    fit(whole, make_data(), TASK, config(), hooks=hooks)
    assert hooks.calls == [(step, 15) for step in range(15)]
    assert hooks.modes == [False] + [True, False] * 3 + [False]
    assert whole[1].num_batches_tracked == 7
    with pytest.raises(Stop):
        fit(make_model(), make_data(), TASK, config(), hooks=Freezing(), out=tmp_path, progress=stop_after(9))
    resumed, again = make_model(), Freezing()
    fit(resumed, make_data(), TASK, config(), hooks=again, out=tmp_path)
    assert again.calls == [(step, 15) for step in range(8, 15)]
    assert again.sum == sum(range(15))
    assert same(whole, resumed)


def test_another_loss_can_take_the_tasks_place():
    teacher = make_model().eval()

    def distill(model, value, target):
        with torch.no_grad():
            goal = teacher(value)
        return ((model(value) - goal) ** 2).sum(), float(len(target))

    student = make_model()
    student[5].weight.data += 0.1
    history = fit(student, make_data(), TASK, config(learning_rate=1e-3), loss_fn=distill)
    assert history.losses[-1] < history.losses[0]


def loader(shuffle=True, **options):
    return torch.utils.data.DataLoader(Noisy(20), batch_size=4, shuffle=shuffle, **options)


def seeded():
    return torch.Generator().manual_seed(5)


LOADERS = {
    "shuffling": loader,
    "with a generator of its own": lambda: loader(generator=seeded()),
    "of a sampler with one": lambda: loader(
        False, sampler=torch.utils.data.RandomSampler(range(20), generator=seeded())
    ),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_a_shuffling_loader_trains_and_resumes_exactly(tmp_path, kind):
    def data():
        return SimpleNamespace(train=Batches(LOADERS[kind]()), validation=Batches(loader(False)))

    whole, resumed = make_model(), make_model()
    expected = fit(whole, data(), TASK, config())
    with pytest.raises(Stop):
        fit(make_model(), data(), TASK, config(), out=tmp_path, progress=stop_after(9))
    history = fit(resumed, data(), TASK, config(), out=tmp_path)
    assert history.losses == expected.losses
    assert same(whole, resumed)


def test_max_steps_ends_within_an_epoch():
    history = fit(make_model(), make_data(), TASK, config(max_steps=7))
    assert history.ends == [5, 7]
    assert (history.steps, len(history.epochs)) == (7, 2)
    assert fit(make_model(), make_data(), TASK, config(max_steps=99)).steps == 15


def test_no_epochs_change_nothing():
    model = make_model()
    history = fit(model, make_data(), TASK, config(epochs=0))
    assert history.steps == 0
    assert same(model, make_model())


def test_frozen_parameters_stay_and_a_frozen_model_is_refused():
    model = make_model()
    model[0].requires_grad_(False)
    fit(model, make_data(), TASK, config(epochs=1))
    assert torch.equal(model[0].weight, make_model()[0].weight)
    assert not torch.equal(model[5].weight, make_model()[5].weight)
    with pytest.raises(UsageError, match="requires_grad"):
        fit(model.requires_grad_(False), make_data(), TASK, config(epochs=1))


def test_progress_tells_where_the_run_is():
    seen = []
    history = fit(make_model(), make_data(), TASK, config(epochs=2), progress=seen.append)
    steps = [at for at in seen if not at.ends]
    assert [at.step for at in steps] == list(range(1, 11))
    assert {at.total_steps for at in seen} == {10}
    assert [at.epoch for at in steps] == [0] * 5 + [1] * 5
    ends = [at for at in seen if at.ends]
    assert [(at.step, at.epoch, at.loss) for at in ends] == [(5, 0, ends[0].metrics["loss"]), (10, 1, seen[-1].loss)]
    assert [at.metrics for at in ends] == history.epochs
    assert ends[0].learning_rate == steps[4].learning_rate
    assert "validation_top1" not in seen[0].metrics
    assert "validation_top1" in seen[-1].metrics
    assert seen[0].learning_rate == pytest.approx(0.002)


def test_no_module_of_the_loop_names_a_technique():
    """The step and the loop stay ignorant of what the techniques do."""
    for name in ("loop.py", "step.py", "setup.py", "stopping.py"):
        text = (Path(loop.__file__).parent / name).read_text()
        assert not any(
            word in text for word in ("autocast", "bitsandbytes", "channels_last", "bfloat16", "fully_shard")
        )


def test_the_device_of_a_training_is_the_current_one_while_it_lasts(monkeypatch):
    """A second GPU's events and generators are not those of the first."""
    seen = []

    @contextmanager
    def current(device):
        seen.append(device)
        yield
        seen.append("left")

    monkeypatch.setattr(loop, "current", current)
    fit(make_model(), make_data(), TASK, config(max_steps=1), progress=lambda at: seen.append(at.step))
    assert seen == [torch.device("cpu"), 1, 1, "left"]
    assert isinstance(devices.current(torch.device("cuda", 1)), torch.cuda.device)
