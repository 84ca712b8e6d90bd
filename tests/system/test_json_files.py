"""What qtool measured as strict JSON, and back."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from qtool.memory.formats import numerics
from qtool.system.json_files import finite, from_json, write_json

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@given(PLAIN)
def test_json_holds_any_plain_value_with_null_for_what_json_lacks(value: Any) -> None:
    again = json.loads(json.dumps(finite(value), allow_nan=False))
    assert again == finite(value)
    assert not (isinstance(value, float) and not math.isfinite(value)) or again is None


def test_json_is_written_atomically_as_utf8(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"µ": float("inf"), "t": (1, 2)})
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8")) == {"µ": None, "t": [1, 2]}


def test_an_infinite_sqnr_is_not_taken_for_one_that_was_not_measured() -> None:
    found = {"units": [{"sqnr_db": math.inf, "kl": math.inf}, {"sqnr_db": None}, {"sqnr_db_torch": -math.inf}]}
    text = json.dumps(finite(found), allow_nan=False)
    assert json.loads(text)["units"][0] == {"sqnr_db": "Infinity", "kl": None}
    assert from_json(text) == {"units": [{"sqnr_db": math.inf, "kl": None}, *found["units"][1:]]}
    assert from_json('{"name": "Infinity", "sqnr_db": [1]}') == {"name": "Infinity", "sqnr_db": [1]}


def test_what_overflows_a_format_is_told_from_what_it_has_no_number_for() -> None:
    told = json.loads(json.dumps(finite(numerics(("-70000", "nan"))), allow_nan=False))
    overflow, unknown = ({each["name"]: each["stored"] for each in value["stored"]} for value in told["values"])
    assert (overflow["FP16"], overflow["FP8 e4m3"], overflow["INT8"]) == ("-Infinity", None, -128.0)
    assert unknown["FP16"] is None
