"""What the tests of several processes run in them: small trainings, one after the other in one group."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from qtool.models.materialise import Target, create
from qtool.recipe import TrainConfig
from qtool.steps.trees import save_tree
from qtool.system import processes
from qtool.system.json_files import write_json
from qtool.tasks import load_task
from qtool.training.stage import train
from qtool.training.techniques import setup

COMMON = {"device": "cpu", "epochs": 1, "batch_size": 10, "learning_rate": 0.01, "checkpoint_every": 5}
_SCALE = {"optimizer": "sgd", "grad_clip": None, "learning_rate": 0.05}  # AdamW and clipping forgive a wrong factor
ALIKE: dict[str, dict[str, Any]] = {
    "ddp": {"micro_batches": 5, **_SCALE},
    "fsdp-scale": {"strategy": "fsdp", **_SCALE},
    "fsdp": {"micro_batches": 5, "strategy": "fsdp", "early_stopping": 9},
    "fsdp-mixed": {"strategy": "fsdp", "precision": "bf16-mixed", "activation_checkpointing": True, "reshard": False},
}
EXACT: dict[str, dict[str, Any]] = {
    "plain": {"strategy": "fsdp"},
    "scaled": {"strategy": "fsdp", "precision": "16-mixed"},
    "copies": {"micro_batches": 2},
    "torchao": {"strategy": "fsdp", "optimizer": "torchao-adamw8bit"},
    "8-bit": {"strategy": "fsdp", "optimizer": "adamw8bit", "precision": "bf16-true", "rounding": "compensated"},
}
KILLED = "8-bit"
try:
    import peft  # noqa: F401

    _HEAD = {"lora": 4, "lora_base": "nf4", "lora_trained": ("3",), "strategy": "fsdp"}
    ALIKE["adapters"] = {"create_on_device": True, **_HEAD}
    EXACT["adapters"] = {"lora_dropout": 0.1, "micro_batches": 2, **_HEAD}
except (ImportError, RuntimeError):  # a torchvision that does not fit torch stops it with the latter
    pass


class Layer(nn.Module):
    """72 → 130 → 72: half of it, 65 rows of 72, has more than 4,096 values and does not divide into blocks of 256."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(72), nn.Linear(72, 130), nn.Linear(130, 72)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(torch.relu(self.up(self.norm(x)))))


def model(dropout: float = 0.0, batch_norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    norm = [nn.BatchNorm1d(72)] if batch_norm else []
    return nn.Sequential(nn.Linear(6, 72), *norm, *(Layer(dropout) for _ in range(2)), nn.Linear(72, 3))


def two_weights() -> nn.Module:
    """Half of the first weight is 24 blocks of 256."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 2048, bias=False), nn.ReLU(), nn.Linear(2048, 3, bias=False))


class Points:
    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.targets = torch.randint(0, 3, (count,), generator=generator)
        self.inputs = torch.randn(count, 6, generator=generator) + self.targets[:, None]

    def __len__(self) -> int:
        return len(self.targets)

    def batch(self, positions: list[int]) -> Any:
        return self.inputs[positions], self.targets[positions]


def data(count: int) -> Any:
    return SimpleNamespace(train=Points(count, 0), validation=Points(21, 1), test=Points(13, 2), identity="points")


def weighted(model: Any, value: torch.Tensor, target: torch.Tensor) -> Any:
    """A loss whose weight differs from sample to sample, as that of texts of different lengths does."""
    weights = 1 + target  # whole numbers, as counts of tokens are
    losses = nn.functional.cross_entropy(model(value).float(), target, reduction="none")
    return (weights * losses).sum(), weights.sum()


def run(name: str, options: dict[str, Any], folder: Path, *, at_step: Any = None, count: int = 100) -> Any:
    """One training. torchao's step is not compiled: it sees plain tensors alone, as in ``test_optimizers``."""
    config = TrainConfig(**{**COMMON, "devices": processes.size(), **options})
    dropout = 0.1 if name in ("scaled", "copies") else 0.0
    net = two_weights() if name == "torchao" else model(dropout, batch_norm=name == "copies")
    if config.create_on_device:
        net = create(model, folder / "begin.safetensors", Target(torch.device("cpu"), later=config.strategy == "fsdp"))
    with torch.compiler.set_stance("force_eager"):
        return train(
            net, data(count), config, task=load_task("classification"),
            out=folder / name, progress=at_step, loss_fn=weighted if name in ALIKE else None,
        )  # fmt: skip


def alike(folder: Path) -> None:
    """Each training of ``ALIKE`` on 63 samples: the last batch is of 3, of which one process has one and one two."""
    with processes.joined(torch.device("cpu")):
        for name, options in ALIKE.items():
            result = run(name, options, folder, count=63)
            if processes.rank() == 0:
                save_tree(folder / f"{name}.safetensors", result.model.state_dict())
                write_json(folder / f"{name}.json", {"losses": result.history.losses, "metrics": result.metrics})
        read_in_parts(folder / "begin.safetensors", folder / "read.safetensors")


def read_in_parts(begin: Path, end: Path) -> None:
    """A model whose weights each process reads its own rows of, put together again."""
    made = create(model, begin, Target(torch.device("cpu"), later=True))
    with setup(made, TrainConfig(device="cpu", devices=2, strategy="fsdp")):
        assert not any(processes.local(p).is_meta for p in made.parameters())
    if processes.rank() == 0:
        save_tree(end, made.state_dict())


def whole(folder: Path) -> None:
    """Each training of ``EXACT``, undisturbed, or resumed where there are checkpoints."""
    with processes.joined(torch.device("cpu")):
        for name, options in EXACT.items():
            run(name, options, folder)


class Stopped(Exception):
    pass


def killed(folder: Path) -> None:
    """Each training of ``EXACT`` stopped after seven steps; the last by a kill of the second process."""
    with processes.joined(torch.device("cpu")):
        for name, options in EXACT.items():
            try:
                run(name, options, folder, at_step=_kill if name == KILLED else _stop)
            except Stopped:
                continue


def _stop(at: Any) -> None:
    if at.step == 7:
        raise Stopped


def _kill(at: Any) -> None:
    if at.step == 7 and processes.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def left_alone(folder: Path) -> None:
    """Six samples in batches of four: the last leaves one to each of two processes, and batch-norm cannot take it."""
    config = TrainConfig(**{**COMMON, "devices": 2, "batch_size": 4})
    net = model(batch_norm=True)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with processes.joined(torch.device("cpu")):
        try:
            train(net, data(6), config, task=load_task("classification"))
        finally:
            same = all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
            (folder / f"{processes.rank()}").write_text(str(same))
