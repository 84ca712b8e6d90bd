"""DataLoaders in the place of data sets: what is taken from them, what is told, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from stopped import Stop, stop_after
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import qtool
from qtool.data.specs import batches, from_mapping
from qtool.errors import QtoolError, QtoolWarning
from qtool.recipe import TrainConfig
from qtool.tasks import load_task
from qtool.training.stage import train as train_stage

OPTIONS = {"device": "cpu", "epochs": 2, "batch_size": 8, "checkpoint_every": 1}


class Words(Dataset[Any]):
    """Samples that only their collate function makes tensors of: sequences of several lengths, labels by name."""

    def __init__(self, count: int) -> None:
        self.lengths = [1 + i % 5 for i in range(count)]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"ids": [self.lengths[index]] * self.lengths[index], "label": "long" if index % 5 > 2 else "short"}


def padded(samples: list[dict[str, Any]]) -> tuple[dict[str, Tensor], Tensor]:
    width = max(len(sample["ids"]) for sample in samples)
    ids = torch.tensor([sample["ids"] + [0] * (width - len(sample["ids"])) for sample in samples])
    return {"ids": ids, "mask": ids > 0}, torch.tensor([int(sample["label"] == "long") for sample in samples])


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(6, 8), nn.Linear(8, 2)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.head((self.embedding(ids) * mask[..., None]).sum(1))


def points(count: int) -> TensorDataset:
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(count))
    return TensorDataset(x, (x.sum(1) > 0).long())


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def test_loaders_train_as_their_datasets_do() -> None:
    """Bit for bit: neither their order nor their batch size has a part in it, and that is told."""
    expected = qtool.train(net(), {"train": points(40), "test": points(16)}, **OPTIONS)
    train = DataLoader(points(40), batch_size=5, shuffle=True, drop_last=True)
    with pytest.warns(QtoolWarning, match=r"not used: train's batch_size=5, train's drop_last=True$"):
        found = qtool.train(net(), {"train": train, "test": points(16)}, **OPTIONS)
    assert found.history.losses == expected.history.losses
    assert found.metrics == expected.metrics


@pytest.mark.filterwarnings("ignore::qtool.errors.QtoolWarning")
def test_a_collate_function_makes_the_batches() -> None:
    """Targets are what it makes of them: they are stratified, counted and checked."""
    data = from_mapping({name: DataLoader(Words(50), collate_fn=padded, shuffle=True) for name in ("train", "test")})
    assert data.num_classes == 2
    assert data.validation.targets.tolist().count(1) == 2  # type: ignore[attr-defined]
    inputs, targets = next(batches(data.test, 4, order=[4, 0, 3, 1]))
    assert inputs["ids"].tolist() == [[5, 5, 5, 5, 5], [1, 0, 0, 0, 0], [4, 4, 4, 4, 0], [2, 2, 0, 0, 0]]
    assert torch.equal(inputs["mask"], inputs["ids"] > 0)
    assert targets.tolist() == [1, 0, 1, 0]
    sample, target = data.test[1]
    assert (sample["ids"].tolist(), int(target)) == ([2, 2], 0)


@pytest.mark.filterwarnings("ignore::qtool.errors.QtoolWarning")
def test_a_training_on_collated_batches_resumes_exactly(tmp_path: Any) -> None:
    def parts() -> dict[str, Any]:
        return {name: DataLoader(Words(60), collate_fn=padded, shuffle=True) for name in ("train", "test")}

    whole = qtool.train(Reader(), parts(), **OPTIONS)
    config, task = TrainConfig(**OPTIONS), load_task("classification")
    with pytest.raises(Stop):
        train_stage(Reader(), from_mapping(parts()), config, task=task, out=tmp_path, progress=stop_after(5))
    resumed = train_stage(Reader(), from_mapping(parts()), config, task=task, out=tmp_path)
    assert resumed.history.losses == whole.history.losses
    assert resumed.metrics == whole.metrics
    assert resumed.metrics["top1"] > 0.6


@pytest.mark.filterwarnings("ignore::qtool.errors.QtoolWarning")
def test_collated_inputs_calibrate() -> None:
    parts = {name: DataLoader(points(64), collate_fn=lambda s: torch.stack([x for x, _ in s])) for name in PARTS}
    form = qtool.quantize(net(), parts, calibration="train:32")
    assert form.plan.integer_units


PARTS = ("train", "test")


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(points(8))


@pytest.mark.parametrize(
    ("loader", "got"),
    [
        (lambda d: DataLoader(d, sampler=WeightedRandomSampler([1.0] * 8, 8)), "a WeightedRandomSampler"),
        (lambda d: DataLoader(d, sampler=SubsetRandomSampler([0, 1])), "a SubsetRandomSampler"),
        (lambda d: DataLoader(d, sampler=RandomSampler(d, replacement=True)), "draws with replacement"),
        (lambda d: DataLoader(d, sampler=RandomSampler(d, num_samples=4)), "4 samples of each epoch"),
        (lambda d: DataLoader(d, batch_sampler=[[0, 1], [2]]), "a list"),
        (lambda d: DataLoader(d, batch_size=None), "batch_size=None"),
        (lambda d: DataLoader(Stream()), "an IterableDataset"),
    ],
)
def test_a_loader_that_chooses_for_itself_is_refused(loader: Any, got: str) -> None:
    with pytest.raises(QtoolError, match=rf"'mapping', train: .* got one with .*{got}; give the dataset itself"):
        from_mapping({"train": loader(points(8)), "test": points(8)})


def test_a_batch_sampler_of_torch_s_own_is_an_order() -> None:
    sampler = BatchSampler(SequentialSampler(points(8)), 4, drop_last=False)
    loader = DataLoader(points(8), batch_sampler=sampler, num_workers=1)
    with pytest.warns(QtoolWarning, match=r"not used: train's batch_size=4, train's num_workers=1$"):
        assert len(from_mapping({"train": loader, "test": points(8)}).test) == 8


@pytest.mark.filterwarnings("ignore::qtool.errors.QtoolWarning")
@pytest.mark.parametrize(
    ("collate", "told"),
    [
        (lambda samples: 1 / 0, r"train\[0\]: expected a batch by 'collate_fn'; got ZeroDivisionError"),
        (lambda samples: ["text"] * 3, r"train\[0\]: expected tensors with a batch dimension from 'collate_fn'"),
    ],
)
def test_a_collate_function_that_is_wrong_is_told(collate: Any, told: str) -> None:
    with pytest.raises(QtoolError, match=told):
        from_mapping({"train": DataLoader(points(8), collate_fn=collate), "test": points(8)})


@pytest.mark.filterwarnings("ignore::qtool.errors.QtoolWarning")
def test_collated_inputs_that_are_not_finite_are_named() -> None:
    x = torch.zeros(8, 4)
    x[5, 2] = float("nan")
    loader = DataLoader(
        TensorDataset(x, torch.arange(8) % 2), collate_fn=lambda s: tuple(map(torch.stack, zip(*s, strict=True)))
    )
    data = from_mapping({"train": points(8), "test": loader})
    with pytest.raises(QtoolError, match=r"test\[5\]: expected finite inputs"):
        list(batches(data.test, 4))
