"""JSON files of what qtool measured: strict JSON, with the infinities that mean something told from what is missing."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qtool.system.files import atomic_path


def write_json(path: Path, value: object) -> None:
    """Writes ``value`` as JSON, atomically, as :func:`finite` has it."""
    text = json.dumps(finite(value), indent=2, ensure_ascii=False, allow_nan=False)
    with atomic_path(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")


def finite(value: Any) -> Any:
    """``value`` as JSON can hold it: mappings with text keys, lists, and null for infinities and NaN.

    An SQNR is infinite where outputs are equal, and null would say that it was not measured; a format stores infinity
    where a number overflows it. Both are the text ``"Infinity"``, which :func:`from_json` makes a number of again, and
    so do ``float`` and JavaScript's ``Number``.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): _word(v) if _may_be_infinite(k) else finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


_WORDS = {math.inf: "Infinity", -math.inf: "-Infinity"}


def _word(value: Any) -> Any:
    return _WORDS[value] if isinstance(value, float) and math.isinf(value) else finite(value)


def _may_be_infinite(key: object) -> bool:
    return str(key).startswith("sqnr_db") or key == "stored"


def from_json(text: str) -> Any:
    """What :func:`finite` made JSON of. Raises ValueError for what is none."""
    numbers = {word: number for number, word in _WORDS.items()}

    def read(found: dict[str, Any]) -> dict[str, Any]:
        return {k: numbers.get(v, v) if isinstance(v, str) and _may_be_infinite(k) else v for k, v in found.items()}

    return json.loads(text, object_hook=read)
