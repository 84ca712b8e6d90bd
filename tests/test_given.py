"""Batches that a caller gives: pairs or inputs alone, gone through as often as needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from qtool.errors import UsageError
from qtool.given import inputs_of, pairs_of

X, Y = torch.zeros(2, 3), torch.zeros(2)


def test_batches_with_and_without_targets() -> None:
    given = [(X, Y), X, [X, Y], {"x": X}]
    assert [value is X for value in inputs_of(given)] == [True, True, True, False]
    assert [target is Y for _, target in pairs_of(given)] == [True, False, True, False]


def test_a_batch_of_three_is_the_input_of_a_model_of_three_arguments() -> None:
    assert list(pairs_of([(X, Y, X)])) == [((X, Y, X), None)]


def test_a_batch_of_one_is_an_input_alone() -> None:
    assert list(pairs_of([(X,), [X]])) == [(X, None)] * 2
    assert list(pairs_of([((X, Y),)])) == [((X, Y), None)]


def test_an_iterator_is_kept_so_that_it_can_be_gone_through_again() -> None:
    inputs = inputs_of(iter([X, X]))
    assert [len(list(inputs)) for _ in range(2)] == [2, 2]


def test_a_data_loader_is_read_anew_each_time() -> None:
    loader = DataLoader(TensorDataset(torch.arange(6.0), torch.arange(6)), batch_size=4)
    assert [[len(value) for value in inputs_of(loader)] for _ in range(2)] == [[4, 2], [4, 2]]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (X, r"pass \[tensor\]"), (TensorDataset(X, Y), "wrap it in a DataLoader"), (7, "got a int"),
        ("x", "got a str"), ({}, "got a dict"),
    ],
)  # fmt: skip
def test_what_would_be_read_sample_by_sample_is_refused(given: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        inputs_of(given)
