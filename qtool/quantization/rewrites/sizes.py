"""Sizes that were divided as floats, as whole numbers again.

``int(windows.shape[0] / (H * W / w / w))`` is how Swin finds its batch: captured, ``trunc(truediv(sym_float(s), 4))``,
which a file would hold as conversions and a division of floats, made at every call, beside which OpenVINO was seen to
lose a convolution's bias. A size that is divided by a whole number is a size again where nothing is left over:

    trunc(s / k) = s // k        (s ≥ 0, k > 0)
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch.fx import Node

DIVISIONS = (math.trunc, math.floor)


def spell_size(node: Node) -> None:
    """Writes what is left of a size divided by a whole number as a whole division, in place."""
    division = node.args[0]
    if not (isinstance(division, Node) and division.target is operator.truediv):
        return
    size, divisor = division.args
    if isinstance(size, Node) and size.target is torch.sym_float:
        size = size.args[0]
    whole = isinstance(divisor, int | float) and divisor > 0 and divisor == int(divisor)
    if isinstance(size, Node) and isinstance(size.meta.get("val"), torch.SymInt) and whole:
        count: Any = int(divisor)  # type: ignore[arg-type]
        node.target, node.args = operator.floordiv, (size, count)
        node.meta["val"] = size.meta["val"] // count
