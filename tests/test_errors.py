"""Errors: one line, four parts, an exit code, and the nearest valid name."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qtool.errors import ContractError, QtoolError, UsageError, nearest, one_line


@pytest.mark.parametrize(("kind", "code"), [(QtoolError, 1), (UsageError, 2), (ContractError, 3)])
def test_an_error_says_where_expected_got_and_what_to_do(kind: type[QtoolError], code: int) -> None:
    error = kind("layer 'a'", "finite min <= max", "inf, -inf", "pass a calibration batch")
    assert str(error) == "layer 'a': expected finite min <= max; got inf, -inf; pass a calibration batch"
    assert error.exit_code == code
    assert isinstance(error, QtoolError)


def test_an_error_survives_pickling_as_workers_send_it() -> None:
    error = UsageError("a", "b", "c", "d")
    error.add_note("in process 1 of 2")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is UsageError
    assert (again.where, again.expected, again.got, again.do) == ("a", "b", "c", "d")
    assert again.__notes__ == ["in process 1 of 2"]


@given(st.text(), st.text(), st.text(), st.text())
def test_an_error_is_always_one_line(where: str, expected: str, got: str, do: str) -> None:
    assert len(str(QtoolError(where, expected, got, do)).splitlines()) == 1


@given(st.text())
def test_one_line_keeps_the_words(text: str) -> None:
    assert one_line(text).split() == text.split()


def test_nearest_names_the_closest_or_lists_all() -> None:
    assert nearest("epoch", ["epochs", "seed"]) == "did you mean 'epochs'?"
    assert nearest("zzz", ["b", "a"]) == "choose one of: a, b"


def test_a_long_list_of_names_is_cut() -> None:
    told = nearest("xyzzy", [f"layer{i:02}" for i in range(40)])
    assert told.startswith("choose one of: layer00, layer01")
    assert told.endswith("layer15 and 24 more")
