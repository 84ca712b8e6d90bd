"""A user's own dataset as checked samples, in batches that are the same however they are read."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from fake_device import DEVICE, Fake
from hypothesis import given, settings
from hypothesis import strategies as st
from image_sets import mapping
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from qtool.data import samples
from qtool.data.specs import (
    batches,
    example_input,
    from_mapping,
    stratified_sample,
    targets_of,
)
from qtool.errors import QtoolError, QtoolWarning


class Read(Dataset[Any]):
    """Ten samples, of which it is counted how many were read; ``changed`` is what a transform adds to targets."""

    def __init__(self, first: int, changed: int = 0) -> None:
        self.targets, self.count = [first + row % 3 for row in range(10)], 0
        if changed:
            self.target_transform = lambda target: target + changed
        self.changed = changed

    def __len__(self) -> int:
        return 10

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        self.count += 1
        return torch.zeros(2), self.targets[row] + self.changed


def test_targets_of_joined_sets_are_those_of_their_parts_none_of_them_read() -> None:
    parts = [Read(0), Subset(Read(3), [0, 2])]
    assert targets_of(ConcatDataset(parts)).tolist() == [*parts[0].targets, 3, 5]
    assert parts[0].count == parts[1].dataset.count == 0
    odd = TensorDataset(torch.zeros(4, 2), torch.zeros(4, 2))
    assert targets_of(ConcatDataset([Read(0), odd])) is None


def test_of_a_part_no_more_samples_are_read_than_it_has() -> None:
    read = Read(0, changed=1)
    assert targets_of(Subset(read, [1, 5, 6])).tolist() == [2, 3, 1]
    assert read.count == 3


def test_targets_that_a_transform_changes_are_what_it_makes_of_them() -> None:
    changed = Read(0, changed=5)
    assert targets_of(changed).tolist() == [target + 5 for target in changed.targets]
    assert changed.count == 10


def test_slow_reading_of_targets_is_told_once_with_what_is_left_and_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow = Read(0, changed=1)
    clock = itertools.count(0, 2.0)
    monkeypatch.setattr(samples.time, "monotonic", lambda: next(clock))
    with pytest.warns(QtoolWarning) as told:
        targets_of(slow, "data 'x', train")
    assert len(told) == 1
    text = str(told[0].message)
    assert text.startswith("data 'x', train: ")
    assert "from 10 samples one by one, 14 more seconds" in text  # 6 for the first three
    assert "'targets'" in text


class Lazy(Dataset[Any]):
    """A user's own dataset: neither targets nor tensors to look at, and a count of its reads."""

    def __init__(self, inputs: list[Any], targets: list[Any]) -> None:
        self.inputs, self.rows, self.reads = inputs, targets, 0

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        self.reads += 1
        return self.inputs[index], self.rows[index]


@settings(max_examples=30)
@given(st.integers(1, 20), st.integers(1, 25), st.randoms())
def test_fast_and_slow_paths_give_the_same_batches(count: int, size: int, random: Any) -> None:
    x, y = torch.arange(count * 3.0).view(count, 3), torch.arange(count)
    order = random.sample(range(count), count)
    whole = TensorDataset(torch.cat([x, x]), torch.cat([y, y]))
    sources = [TensorDataset(x, y), Subset(whole, list(range(count))), list(zip(x, y, strict=True))]
    for source in (*sources, Lazy(list(x), y.tolist())):
        got = list(batches(source, size, order=order))
        assert [len(a) for a, _ in got] == [min(size, count - s) for s in range(0, count, size)]
        assert torch.equal(torch.cat([a for a, _ in got]), x[order])
        assert torch.equal(torch.cat([b for _, b in got]), y[order])


class Changed(TensorDataset):
    def __getitem__(self, index: int) -> tuple[Any, ...]:
        x, y = super().__getitem__(index)
        return 10 * x, y + 1


class ChangedPart(Subset[Any]):
    def __getitem__(self, index: int) -> tuple[Any, ...]:  # type: ignore[override]
        x, y = super().__getitem__(index)
        return 10 * x, y + 1

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


def test_samples_are_what_a_class_made_from_a_set_of_tensors_makes_of_them() -> None:
    x, y = torch.arange(8.0).view(4, 2), torch.tensor([0, 1, 0, 1])
    changed = Changed(x, y)
    for source in (changed, Subset(changed, range(4)), ChangedPart(TensorDataset(x, y), range(4))):
        inputs, targets = next(batches(source, 4))
        assert torch.equal(inputs, 10 * x)
        assert torch.equal(targets, y + 1)
        assert targets_of(source).tolist() == [1, 2, 1, 2]
    one, other = (from_mapping({"train": s, "test": s}).identity for s in (changed, Changed(x + 1, y)))
    assert one != other


def test_inputs_may_be_tuples_and_dicts() -> None:
    pairs = [((torch.full((2,), float(i)), np.float32(i)), i) for i in range(3)]
    (a, b), y = next(batches(pairs, 3))
    assert (a.shape, b.shape, y.tolist()) == ((3, 2), (3,), [0, 1, 2])
    named = [({"ids": torch.tensor([i, i]), "mask": torch.ones(2)}, {"start": i}) for i in range(3)]
    x, target = next(batches(named, 2))
    assert x["ids"].tolist() == [[0, 0], [1, 1]]
    assert target["start"].tolist() == [0, 1]


def test_samples_may_be_dicts_with_their_labels_inside() -> None:
    samples = [{"input_ids": [i, i + 1], "text": f"the {i}th", "label": i % 3} for i in range(30)]
    data = from_mapping({"train": samples, "test": samples})
    assert data.num_classes == 3
    (inputs, targets), *_ = batches(data.test, 4)
    assert {name: value.tolist() for name, value in inputs.items()} == {"input_ids": [[0, 1], [1, 2], [2, 3], [3, 4]]}
    assert targets.tolist() == [0, 1, 2, 0]


def test_datasets_on_a_device_are_read_into_host_memory() -> None:
    x, y = torch.randn(20, 3), torch.arange(20) % 2
    plain = from_mapping({"train": TensorDataset(x, y), "test": TensorDataset(x, y)})
    with Fake():
        held = TensorDataset(x.to(DEVICE), y.to(DEVICE))
        for there in (held, Subset(held, range(20))):
            data = from_mapping({"train": there, "test": there})
            assert torch.equal(example_input(data), example_input(plain))
            assert data.num_classes == 2
            assert stratified_sample(there, 4, 0) == stratified_sample(TensorDataset(x, y), 4, 0)


def test_parts_of_a_split_hold_their_own_samples() -> None:
    x, y = torch.arange(40.0)[:, None], torch.arange(40) % 4
    for whole in (TensorDataset(x, y), list(zip(x, y, strict=True))):
        data = from_mapping({"train": whole, "test": whole})
        for part in (data.train, data.validation):
            inputs, targets = next(batches(part, 40))
            assert torch.equal(inputs, torch.stack([part[i][0] for i in range(len(part))]))
            assert torch.equal(targets, targets_of(part))
            assert torch.equal(targets, inputs[:, 0].long() % 4)
        seen = [float(value) for part in (data.train, data.validation) for value, _ in batches(part, 1)]
        assert sorted(seen) == list(range(40))


def test_targets_are_read_once_and_only_as_far_as_needed() -> None:
    lazy = Lazy([torch.zeros(2)] * 30, [i % 3 for i in range(30)])
    data = from_mapping({"train": lazy, "test": [(torch.zeros(2), 0)]})
    assert lazy.reads == 30
    stratified_sample(data.train, 9, 0)
    assert lazy.reads == 30
    dense = Lazy([torch.zeros(2)] * 30, [torch.zeros(4)] * 30)
    from_mapping({"train": dense, "test": dense})
    assert dense.reads == 2


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("tensors", [True, False])
def test_inputs_that_are_not_finite_are_named(value: float, tensors: bool) -> None:
    x, y = torch.zeros(6, 3), torch.arange(6) % 2
    x[4, 1] = value
    given = TensorDataset(x, y) if tensors else list(zip(x, y, strict=True))
    data = from_mapping({"train": given, "test": given})
    with pytest.raises(QtoolError, match=r"test\[4\]: expected finite inputs"):
        list(batches(data.test, 4))
    held = from_mapping({"train": given, "validation": given, "test": given}).train
    with pytest.raises(QtoolError, match=r"train\[4\]"):  # the position in the user's own dataset, in any order
        list(batches(held, 4, order=[5, 0, 1, 4]))


def test_large_but_finite_inputs_pass() -> None:
    dataset = TensorDataset(torch.full((4, 3), 3e38), torch.zeros(4, dtype=torch.int64))
    assert len(list(batches(dataset, 4))) == 1


@pytest.mark.parametrize(
    ("samples", "told"),
    [
        ([(torch.zeros(2), 0), (torch.zeros(3), 0)], r"\[1\]: expected shape \(2,\), as sample 0; got shape \(3,\)"),
        ([(np.zeros(2), 0)], "float32 inputs; got float64"),
        ([("text", 0)], "tensors, or tuples or dicts of them; got str"),
        ([({"x": "text"}, 0)], r"\[0\]\['x'\]: expected tensors, .*; got str; .* or leave it out"),
        ([{"x": 1.0, "labels": "cat"}], r"\[0\], target: expected tensors, .*; got str"),
        ([{"x": 1.0, "labels": 1}, {"x": 1.0}], r"\[1\], target: expected tensors, .*; got NoneType"),
        ([({"x": 1.0}, 0), ({"y": 1.0}, 0)], r"\[1\]: expected a dict of 'x', as sample 0; got a dict of 'y'"),
        ([((1.0, 2.0), 0), ((1.0,), 0)], r"\[1\]: expected 2 items, as sample 0; got 1 item"),
        ([({"x": 1.0}, 0), (1.0, 0)], r"\[1\]: expected a dict of 'x', as sample 0; got float"),
        ([{"ids": [1, 2], "label": 0}, {"ids": [1], "label": 0}], r"\['ids'\]: expected shape .* 'collate_fn' does"),
    ],
)
def test_samples_that_do_not_stack(samples: Any, told: str) -> None:
    with pytest.raises(QtoolError, match=told):
        list(batches(samples, 2))


def test_a_dataset_that_raises_is_named() -> None:
    with pytest.raises(QtoolError, match=r"test\[1\]: expected a sample; got IndexError"):
        from_mapping(mapping(test=Lazy([torch.zeros(3)] * 2, [0])))
