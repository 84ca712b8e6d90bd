"""Between which values an activation lets its input pass, read off its operator and arguments."""

from __future__ import annotations

import math
from typing import Any

from torch.fx import Node

from qtool.graphs.operators import aten
from qtool.quantization.targets import RELU_LIKE


def keeps_zero(node: Node) -> bool:
    """Whether an activation keeps zero: then a range of its results clips like it, since every range holds zero.

    Activations that clip nothing pass.
    """
    if node.target not in RELU_LIKE:
        return True
    low, high = clip_limits(node)
    return low <= 0 <= high


def clip_limits(node: Node) -> tuple[float, float]:
    """Between which values one of ``RELU_LIKE`` lets its input pass."""
    given = [*node.args[1:], None, None][:2]
    if node.target is aten.clamp_max.default:
        given = [None, given[0]]
    low, high = (node.kwargs.get(name, value) for name, value in zip(("min", "max"), given, strict=True))
    least, most = _OWN.get(node.target, (-math.inf, math.inf))
    return (least if low is None else float(str(low))), (most if high is None else float(str(high)))


_OWN: dict[Any, tuple[float, float]] = {
    aten.relu.default: (0.0, math.inf),
    aten.relu6.default: (0.0, 6.0),
    aten.hardtanh.default: (-1.0, 1.0),
}
