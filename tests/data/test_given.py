"""Batches that a caller gives: pairs or inputs alone, gone through as often as needed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from fake_device import DEVICE, Fake, Hidden
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from qtool.data.given import columns_in, inputs_of, pair_of, pairs_of
from qtool.data.specs import from_mapping
from qtool.errors import QtoolError, UsageError

X, Y = torch.zeros(2, 3), torch.zeros(2)


def test_batches_with_and_without_targets() -> None:
    given = [(X, Y), X, [X, Y], {"x": X}]
    assert [value is X for value in inputs_of(given)] == [True, True, True, False]
    assert [target is Y for _, target in pairs_of(given)] == [True, False, True, False]


def test_batches_on_a_device_come_to_host_memory() -> None:
    with Fake():
        ((value, target),) = pairs_of([({"x": X.to(DEVICE)}, Y.to(DEVICE))])
        assert not any(isinstance(tensor, Hidden) for tensor in (value["x"], target))


def test_a_batch_of_three_is_the_input_of_a_model_of_three_arguments() -> None:
    assert list(pairs_of([(X, Y, X)])) == [((X, Y, X), None)]


def test_a_batch_of_one_is_an_input_alone() -> None:
    assert list(pairs_of([(X,), [X]])) == [(X, None)] * 2
    assert list(pairs_of([((X, Y),)])) == [((X, Y), None)]


def test_a_dict_by_itself_may_hold_its_target_and_texts() -> None:
    target, given = torch.tensor(1), torch.arange(3)
    for name in ("labels", "label", "label_ids"):
        inputs, found = pair_of({"text": "some", "input_ids": given, name: target, "more": ["a", "b"]})
        assert (list(inputs), inputs["input_ids"], found) == (["input_ids"], given, target)
    inputs, found = pair_of({"x": given, "label": given, "labels": target})
    assert (list(inputs), found) == (["x", "label"], target)


def test_arrays_are_taken_for_tensors() -> None:
    images, labels = np.arange(6, dtype=np.float32).reshape(2, 3), np.array([1, 0])
    words = np.array(["a", "b"])
    for given in ((images[:, ::-1], labels), {"x": images[:, ::-1], "labels": labels, "words": words}):
        value, target = pair_of(given)
        value = value["x"] if isinstance(value, dict) else value
        assert (value.tolist(), value.dtype, target.tolist()) == ([[2, 1, 0], [5, 4, 3]], torch.float32, [1, 0])
    assert pair_of({"x": X, "words": words})[0]["words"] is words


@pytest.mark.parametrize("given", [{"x": X, "target": Y}, {"labels": X}, {"x": X, "labels": None}])
def test_dicts_without_a_target_are_inputs_alone(given: dict[str, Any]) -> None:
    assert pair_of(given) == (given, None)
    assert pair_of(({"x": X, "labels": Y},)) == ({"x": X, "labels": Y}, None)
    assert pair_of(({"x": X, "labels": Y}, 1)) == ({"x": X, "labels": Y}, 1)


def test_lists_of_numbers_in_a_dict_are_tensors() -> None:
    given = {"ids": [1, 2], "scores": [[0.5, 1], [2, 3]], "mask": [True], "ragged": [[1], [2, 3]], "labels": [3, 4]}
    inputs, target = pair_of(given)
    assert (inputs["ids"].tolist(), inputs["ids"].dtype) == ([1, 2], torch.int64)
    assert (inputs["scores"].tolist(), inputs["scores"].dtype) == ([[0.5, 1], [2, 3]], torch.float32)
    assert (inputs["mask"].dtype, inputs["ragged"], target.tolist()) == (torch.bool, [[1], [2, 3]], [3, 4])


@pytest.mark.parametrize(
    ("labels", "target"),
    [
        ([5, 6, 7, 8], [6, 7, 8, -100]),
        ([-100, -100, 7, 8], [-100, 7, 8, -100]),  # a prompt, which is not counted
        ([-100, -100, -100, 8], [-100, -100, 8, -100]),
        ([-100, 9, -100, -100], [-100, 9, -100, -100]),  # what a mask hid
        ([-100, 6, -100, -100], [-100, 6, -100, -100]),  # and what it left as it was
        ([0, 0, 1, 0], [0, 0, 1, 0]),  # a class for each token
    ],
)
def test_labels_that_repeat_the_tokens_are_those_of_the_next_one(labels: list[int], target: list[int]) -> None:
    given = {"input_ids": [5, 6, 7, 8], "labels": labels}
    assert pair_of(given)[1].tolist() == target
    batch = {name: torch.tensor([value, value]) for name, value in given.items()}
    assert pair_of(batch)[1].tolist() == [target, target]
    assert pair_of(batch | {"decoder_input_ids": batch["input_ids"]})[1].tolist() == [labels, labels]


class Rows:
    """What ``datasets.Dataset`` is to whoever asks for batches."""

    column_names = ("input_ids",)

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return {"input_ids": [1, 2]}


def test_batches_without_samples_are_passed_over() -> None:
    x, y = torch.arange(6.0).view(3, 2), torch.arange(3)
    given = [(x[:0], y[:0]), (x[:2], y[:2]), (x[:0], y[:0]), (x[2:], y[2:])]
    assert [len(target) for _, target in pairs_of(given)] == [2, 1]
    assert [len(inputs) for inputs in inputs_of([x[:0], x])] == [3]
    assert len(list(inputs_of([torch.tensor(1.0)]))) == 1  # which has no axis to be empty


def test_rows_of_a_table_are_no_batches() -> None:
    with pytest.raises(UsageError, match=r"a Rows of single samples; wrap it in a DataLoader"):
        inputs_of(Rows())


def test_columns_are_told_from_lists_of_batches_and_of_samples() -> None:
    images, classes = torch.randn(6, 1, 8, 8), torch.arange(6)
    assert columns_in((images, classes)) == "2 tensors of 6 rows each"
    assert columns_in([images.numpy(), classes.numpy()]) == "2 tensors of 6 rows each"
    alike = [torch.randn(6, 5), torch.randn(6, 7)], [images, images], [classes[0], classes[1]]
    others: list[Any] = [(images, classes[:3]), (), [(images, classes)], {"x": images}, iter([images, classes])]
    for given in (*alike, *others):
        assert columns_in(given) is None
    with pytest.raises(UsageError, match=r"got 2 tensors of 6 rows each; pass \[\(inputs, targets\)\], or"):
        inputs_of((images, classes))
    with pytest.raises(QtoolError, match=r"train: expected a dataset of samples; got 2 tensors of 6 rows each"):
        from_mapping({"train": (images, classes), "test": (images, classes)})


def test_one_tensor_or_array_is_no_batches() -> None:
    for one, kind in ((X, "tensor"), (X.numpy(), "array")):
        with pytest.raises(UsageError, match=rf"one {kind}; pass \[{kind}\]"):
            inputs_of(one)


def test_an_iterator_is_kept_so_that_it_can_be_gone_through_again() -> None:
    inputs = inputs_of(iter([X, X]))
    assert [len(list(inputs)) for _ in range(2)] == [2, 2]


def test_a_data_loader_is_read_anew_each_time() -> None:
    loader = DataLoader(TensorDataset(torch.arange(6.0), torch.arange(6)), batch_size=4)
    assert [[len(value) for value in inputs_of(loader)] for _ in range(2)] == [[4, 2], [4, 2]]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (X, r"pass \[tensor\]"), (TensorDataset(X, Y), "wrap it in a DataLoader"), (7, "got an int"),
        ("x", "got a str"), ({}, "got a dict"),
    ],
)  # fmt: skip
def test_what_would_be_read_sample_by_sample_is_refused(given: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        inputs_of(given)


class Noisy(Dataset[Any]):
    """Numbers with noise that is drawn from each of the random states that datasets draw from."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return index + torch.rand(1) + np.random.rand() + random.random(), index


@pytest.mark.parametrize("generator", [None, torch.Generator()], ids=["global", "own"])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_every_pass_of_a_loader_that_shuffles_and_augments_is_the_same(generator: Any, num_workers: int) -> None:
    loader = DataLoader(Noisy(), batch_size=4, shuffle=True, generator=generator, num_workers=num_workers)
    before, inputs = torch.get_rng_state(), inputs_of(loader)
    first = torch.cat([next(iter(inputs)), *inputs])
    torch.rand(3)  # what the caller draws in between changes nothing
    torch.testing.assert_close(torch.cat([next(iter(inputs)), *inputs]), first, rtol=0, atol=0)
    torch.set_rng_state(before)
    expected = torch.rand(3)
    torch.set_rng_state(before)
    list(inputs)
    assert torch.equal(torch.rand(3), expected)


class Stream(IterableDataset[Any]):
    """Samples that can be had once, from an object that can be iterated again."""

    def __init__(self, count: int) -> None:
        self.samples = iter(torch.arange(float(count)))

    def __iter__(self) -> Iterator[Any]:
        return self.samples


def test_a_loader_that_gives_other_batches_the_next_time_is_refused() -> None:
    inputs = inputs_of(DataLoader(Stream(6), batch_size=2))
    assert len(list(inputs)) == 3
    with pytest.raises(QtoolError, match=r"got 0 batches, after 3 before; pass list\(batches\)"):
        list(inputs)
    inputs = inputs_of(DataLoader(Stream(6), batch_size=2))
    next(iter(inputs))
    with pytest.raises(QtoolError, match="got another batch 0"):
        list(inputs)
