"""Examples in docstrings give what they say."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import qtool

PACKAGE = Path(qtool.__file__).parent
EXAMPLES = sorted(path for path in PACKAGE.rglob("*.py") if ">>> " in path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_examples_give_what_they_say(path: Path) -> None:
    name = ".".join(("qtool", *path.relative_to(PACKAGE).with_suffix("").parts))
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted
    assert not found.failed
