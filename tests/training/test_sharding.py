"""Copies and shards: against one process, resumed exactly after a kill, resumed on another number of processes."""

import json
import shutil
import warnings
from functools import partial
from pathlib import Path

import group_runs
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.utils import parametrizations

from qtool.errors import QtoolError, QtoolWarning
from qtool.recipe import TrainConfig
from qtool.steps import checkpoint, trees
from qtool.steps.setup import trained
from qtool.steps.step import Step
from qtool.system.launcher import launch
from qtool.training import sharded_files
from qtool.training.techniques import setup

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"),
    pytest.mark.usefixtures("warm_launches"),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, warm_launches):
    """The folders of undisturbed trainings on two processes, and of some that were stopped and killed."""
    folder = tmp_path_factory.mktemp("runs")
    launch(group_runs.whole, 2, folder / "whole")
    with pytest.raises(QtoolError, match=r"process 1 of 2.*SIGKILL"):
        launch(group_runs.killed, 2, folder / "stopped")
    return folder


@pytest.mark.slow
def test_two_processes_do_what_one_does(tmp_path):
    begin = {name: torch.randn_like(value) for name, value in group_runs.model().state_dict().items()}
    save_file(begin, tmp_path / "begin.safetensors")
    (tmp_path / "one").mkdir()
    shutil.copy(tmp_path / "begin.safetensors", tmp_path / "one")
    launch(group_runs.alike, 2, tmp_path)
    read = trees.load_tree(tmp_path / "read.safetensors")
    assert all(torch.equal(read[name], value) for name, value in begin.items())
    for name, options in group_runs.ALIKE.items():
        alone = options | {"strategy": "ddp", "reshard": True}
        one = group_runs.run(name, alone, tmp_path / "one", count=63)
        two = json.loads((tmp_path / f"{name}.json").read_text())
        near = {"abs": 0.02} if "mixed" in name else {"rel": 1e-5}
        assert two["losses"] == pytest.approx(one.history.losses, **near), name
        assert two["metrics"] == pytest.approx(one.metrics, **near), name
        weights = trees.load_tree(tmp_path / f"{name}.safetensors")
        assert weights.keys() == one.model.state_dict().keys()
        for key, value in one.model.state_dict().items():
            assert torch.allclose(weights[key], value, atol=0.05 if "mixed" in name else 2e-6), (name, key)


@pytest.mark.slow
def test_killed_and_resumed_on_two_processes_is_bit_equal(runs):
    stopped = shutil.copytree(runs / "stopped", runs / "resumed")
    assert {p.name.partition(".")[0] for p in stopped.glob("*/checkpoints/*")} == {"step-00000005"}
    launch(group_runs.whole, 2, stopped)
    for name in group_runs.EXACT:
        left, right = ({p.name: p for p in _parts(folder / name)} for folder in (runs / "whole", stopped))
        assert left.keys() == right.keys()
        assert any("00000010" in str(p) for p in left.values())
        for file, path in left.items():
            if path.stem in ("main", "step-00000010"):
                assert _compared(path) == _compared(right[file]), (name, file)
            else:
                one, other = load_file(path), load_file(right[file])
                assert one.keys() == other.keys()
                assert [key for key, value in one.items() if not torch.equal(value, other[key])] == [], (name, file)


def _parts(run: Path) -> list[Path]:
    return [p for p in (run / "checkpoints").rglob("*") if p.is_file()]


def _compared(path: Path) -> tuple[object, list[bytes]]:
    """A tree without the time that the run took, its tensors as their bytes."""
    tree = trees.load_tree(path)
    del tree["history"]["seconds"], tree["identity"]
    tensors: dict[str, torch.Tensor] = {}
    return trees._encode(tree, "", tensors, {}), [
        t.reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors.values()
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "near"), [("plain", 1e-5), ("8-bit", 0.02)])
def test_resumed_on_one_process_it_comes_to_the_same(runs, name, near):
    folder = shutil.copytree(runs / "stopped" / name, runs / "one" / name).parent
    seen = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        group_runs.run(name, group_runs.EXACT[name] | {"devices": 1}, folder, at_step=seen.append)
    assert any("quantized again" in str(warning.message) for warning in told) == (name == "8-bit")
    assert [at.step for at in seen if not at.ends] == [6, 7, 8, 9, 10]
    first, second = (_weights(f / name, group_runs.EXACT[name]) for f in (runs / "whole", folder))
    for key, value in first.items():
        assert torch.allclose(value.float(), second[key].float(), atol=near), key
    assert any(not torch.equal(value, group_runs.model().state_dict()[key]) for key, value in second.items())


def _weights(run: Path, options: dict) -> dict[str, torch.Tensor]:
    """The weights in the last checkpoint, read by one process."""
    model = group_runs.model()
    with setup(model, TrainConfig(device="cpu", **options)) as made:
        optimizer = made.make_optimizer([p for p in model.parameters() if p.requires_grad])
        made.files.restore(made.files.read(checkpoint.latest(run / "checkpoints")), model, optimizer)
    return model.state_dict()


def test_one_process_may_shard_alone_and_the_model_comes_back_whole():
    model = group_runs.model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    kinds = [type(module) for module in model.modules()]
    with setup(model, TrainConfig(device="cpu", strategy="fsdp")):
        assert all(hasattr(p, "full_tensor") for p in model.parameters())
        assert type(model[1]).__name__ == "FSDPLayer"
    assert [type(module) for module in model.modules()] == kinds
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model(torch.randn(2, 6)).sum().backward()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not torch.distributed.is_initialized()


def test_nothing_of_the_sharding_is_left_in_a_model_and_it_may_be_sharded_again():
    model = group_runs.model()
    before = [set(vars(module)) for module in model.modules()]
    for _ in range(2):
        with setup(model, TrainConfig(device="cpu", strategy="fsdp")) as made:
            made.predict(torch.randn(2, 6))
        assert [set(vars(module)) for module in model.modules()] == before


@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "bf16-mixed", "bf16-true"])
def test_a_step_of_a_sharded_model_is_the_step(net, precision, run_steps):
    options = {"precision": precision, "micro_batches": 2, "grad_clip": 1.0, "activation_checkpointing": True}
    whole = run_steps(net, 2, **options)
    sharded = run_steps(net, 2, **options, strategy="fsdp")
    assert sharded.losses == pytest.approx(whole.losses, abs=1e-6 if precision == "32-true" else 0.05)
    sharded.setup.close()
    for (name, one), (other, two) in zip(*(x.model.state_dict().items() for x in (whole, sharded)), strict=True):
        assert name == other
        if precision == "32-true":
            assert torch.allclose(one.float(), two.float(), atol=1e-6), name


@pytest.mark.parametrize("blocks", [False, True])
def test_a_model_that_is_gathered_whole_is_told(blocks):
    inner = [nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2)]
    model = nn.Sequential(*(group_runs.Layer(0.0) for _ in range(2))) if blocks else nn.Sequential(*inner)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with setup(model, TrainConfig(device="cpu", strategy="fsdp")):
            groups = [module for module in model.modules() if type(module).__name__.startswith("FSDP")]
    found = [str(warning.message) for warning in told if warning.category is QtoolWarning]
    assert len(groups) == (3 if blocks else 1)
    assert [text.partition(":")[0] for text in found] == ([] if blocks else ["--strategy fsdp"])


def _tied() -> nn.Module:
    """Of four blocks the first and the last share a weight."""
    model = nn.Sequential(*(group_runs.Layer(0.0) for _ in range(4)), nn.Linear(72, 4))
    model[3].up.weight = model[0].up.weight
    return model


class _Written(nn.Module):
    """Each block gives a view, which the model writes over."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Folded() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            y = block(x)
            y += x
            x = y
        return x[:, :4]


class _Folded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(72, 4), nn.Linear(4, 72)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))).view(-1, 72)


def _normed(norm) -> nn.Module:
    return nn.Sequential(*(norm(nn.Linear(72, 72)) for _ in range(3)), nn.Linear(72, 4))


NETS = {
    "weight norm": partial(_normed, parametrizations.weight_norm),
    "spectral norm": partial(_normed, parametrizations.spectral_norm),
    "a weight in two blocks": _tied,
    "views that are written over": _Written,
}


@pytest.mark.parametrize("name", NETS)
def test_steps_of_a_sharded_model_are_the_steps(name):
    def steps(**options):
        torch.manual_seed(0)
        model = NETS[name]()
        with setup(model, TrainConfig(device="cpu", batch_size=8, **options)) as made:
            step = Step(made, made.make_optimizer(trained(model)), group_runs.weighted)
            return [step(torch.randn(8, 72), torch.arange(8) % 4, 0.1) for _ in range(3)], model

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        (losses, sharded), (expected, whole) = steps(strategy="fsdp"), steps()
    assert losses == pytest.approx(expected, rel=1e-6)
    for key, value in whole.state_dict().items():
        assert torch.allclose(sharded.state_dict()[key], value, atol=1e-6), key
    assert not [str(warning.message) for warning in told if "view" in str(warning.message)]


def test_blocks_that_share_a_weight_are_gathered_with_the_rest():
    model = _tied()
    with setup(model, TrainConfig(device="cpu", strategy="fsdp")):
        groups = [name for name, module in model.named_modules() if type(module).__name__.startswith("FSDP")]
    assert groups == ["", "1", "2"]
    assert model[3].up.weight is model[0].up.weight


class _Around(nn.Sequential):
    """Reads the weight of a block, or has one run by another name than a call."""

    def __init__(self, read: bool) -> None:
        super().__init__(*(group_runs.Layer(0.0) for _ in range(2)))
        self.read = read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) @ self[0].down.weight if self.read else self[1].forward(x)


@pytest.mark.parametrize("read", [True, False])
def test_weights_that_are_not_gathered_where_they_are_used_are_told(read):
    with (
        setup(_Around(read), TrainConfig(device="cpu", strategy="fsdp")) as made,
        pytest.raises(
            QtoolError, match=r"; pass --strategy ddp: fsdp gathers the weights of a block while it is calle"
        ),
    ):
        made.predict(torch.randn(2, 72))


def test_a_weight_with_two_names_is_stored_once_and_comes_back_in_both(tmp_path):
    model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8, bias=False))
    model[1].weight = model[0].weight
    with setup(model, TrainConfig(device="cpu", strategy="fsdp")) as made:
        optimizer = made.make_optimizer(list(model.parameters()))
        before = model[0].weight.full_tensor().clone()
        path = made.files.commit(tmp_path, 1, {}, model, optimizer)
        torch.nn.init.zeros_(model[0].weight)
        made.files.restore(made.files.read(path), model, optimizer)
    assert torch.equal(model[0].weight, before)
    assert model[1].weight is model[0].weight


def test_a_sharded_checkpoint_that_the_disk_does_not_take_leaves_the_last_one_alone(tmp_path, monkeypatch):
    model = nn.Linear(4, 4)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with setup(model, TrainConfig(device="cpu", strategy="fsdp")) as made:
        optimizer = made.make_optimizer(list(model.parameters()))
        kept = made.files.commit(tmp_path, 1, {}, model, optimizer)
        monkeypatch.setattr(sharded_files, "save", full)
        with pytest.raises(QtoolError, match="No space left"):
            made.files.commit(tmp_path, 2, {}, model, optimizer)
    assert list(tmp_path.iterdir()) == [kept]


def test_a_bit_that_flips_in_any_file_of_a_sharded_checkpoint_is_told(tmp_path):
    model = nn.Linear(64, 4)
    with setup(model, TrainConfig(device="cpu", strategy="fsdp")) as made:
        optimizer = made.make_optimizer(list(model.parameters()))
        path = made.files.commit(tmp_path, 1, {}, model, optimizer)
        made.files.keep_best(tmp_path, model)

        def read(of: Path) -> None:
            if of == path:
                made.files.restore(made.files.read(path), model, optimizer)
            else:
                made.files.take_best(tmp_path, model)

        files = [file for file in tmp_path.rglob("*") if file.is_file()]
        assert {file.stem.partition("-")[0] for file in files} == {"main", "shard", "sums"}
        for file in files:
            whole = file.read_bytes()
            file.write_bytes(whole[:-2] + bytes([whole[-2] ^ 0x10]) + whole[-1:])
            folder = path if file.parent == path else tmp_path  # without the best weights alone it cannot go on
            with pytest.raises(QtoolError, match=r"a whole checkpoint written by qtool; got.*; delete") as told:
                read(file.parent)
            assert f"delete '{folder}' to start over" in str(told.value)
            file.write_bytes(whole)
            read(file.parent)


def test_a_parameter_that_cannot_be_cut_is_named():
    model = torch.nn.Module()
    model.scale = torch.nn.Parameter(torch.tensor(1.0))
    with pytest.raises(QtoolError, match="'scale', which is a single number"):
        setup(model, TrainConfig(device="cpu", strategy="fsdp"))
    model.scale = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))
    with pytest.raises(QtoolError, match=r"'scale', which is of torch.complex64; keep its parts as real numbers"):
        setup(model, TrainConfig(device="cpu", strategy="fsdp", optimizer_kernels="foreach"))
    model.scale = torch.nn.Parameter(torch.ones(0, 3))
    with pytest.raises(QtoolError, match=r"'scale', which is without values; take it out, or pass --strategy ddp"):
        setup(model, TrainConfig(device="cpu", strategy="fsdp"))
    assert not torch.distributed.is_initialized()


def test_a_checkpoint_of_copies_is_not_one_of_shards(tmp_path):
    config = TrainConfig(device="cpu", strategy="fsdp")
    with setup(group_runs.model(), config) as sharded, pytest.raises(QtoolError, match="--strategy ddp"):
        sharded.files.read(tmp_path / "step-00000001.safetensors")
    with pytest.raises(QtoolError, match="--strategy fsdp"):
        checkpoint.Files().read(tmp_path)
