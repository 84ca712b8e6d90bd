"""Checks of values in a model's code: ``assert x.min() >= 0``, ``if torch.isnan(x).any(): raise …``.

A graph has nothing to raise with, so that where code asks whether such a check holds, the answer is that all is well.
Which question that is the source tells; one whose answer is used for anything else has none here.
"""

from __future__ import annotations

import ast
import linecache
import os
from pathlib import Path
from types import FrameType

import torch

_TORCH = os.path.dirname(torch.__file__) + os.sep  # torchvision's folder begins likewise


def check_at(frame: FrameType | None) -> tuple[bool, str] | None:
    """What lets the check pass whose condition the code in ``frame`` asks for, and ``file.py:12``; None of no check."""
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    if frame is None:
        return None
    file, line = frame.f_code.co_filename, frame.f_lineno
    for first, last, answer in _checks(file):
        if first <= line <= last:
            return answer, f"{Path(file).name}:{line}"
    return None


def _checks(file: str) -> list[tuple[int, int, bool]]:
    """The lines of the conditions of all checks in a file, each with the answer that lets it pass."""
    linecache.checkcache(file)
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return []
    found = []
    for node in ast.walk(tree):
        passes = isinstance(node, ast.Assert)
        if passes or (isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise)):
            test: ast.expr = node.test  # type: ignore[attr-defined]
            while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
                test, passes = test.operand, not passes
            if not any(isinstance(part, ast.Not) for part in ast.walk(test)):  # one part may be denied, another not
                found.append((test.lineno, test.end_lineno or test.lineno, passes))
    return found
