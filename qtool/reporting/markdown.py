"""Markdown of plain text: what a reader of it would take for markup is escaped.

Names of models, layers and files come from outside, as for the page (``markup.py``), and pull requests show HTML.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_MARKUP = re.compile(r"[\\`*<\[\]|~]|&(?=#?\w+;)|(?<![^\W_])_|_(?![^\W_])")
"""An underscore within a word is none, and names are full of them."""


def escaped(text: object) -> str:
    r"""``text`` as Markdown that shows it as it is.

    >>> escaped("a_b.py:__init__ <b> 2 * 3 | R&D")
    'a_b.py:\\_\\_init\\_\\_ \\<b> 2 \\* 3 \\| R&D'
    """
    return _MARKUP.sub(r"\\\g<0>", str(text))


def table(header: Sequence[object], rows: Iterable[Sequence[object]], right: bool = False) -> list[str]:
    """The lines of a table; all columns but the first are set to the ``right`` where they hold figures."""
    rule = ["---", *["---:" if right else "---"] * (len(header) - 1)]
    lines = [map(escaped, header), rule, *(map(escaped, row) for row in rows)]
    return [f"| {' | '.join(line)} |" for line in lines]
