"""What is repeated along axes of one place is spread over them, which moves bytes as reshapes do.

A network for points or sequences gives each place what it knows of all (``g.repeat(1, 1, n)``, PointNet's
segmentation). Over an axis of size 1 that is ``g.expand(-1, -1, n)``, which runtimes have for integers. Left as they
are: repetitions of longer axes, and as often as an open size says.
"""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule, Node

from qtool.graphs.edits import call_before, clean
from qtool.graphs.operators import aten

_REPEATS = (aten.repeat.default, aten.tile.default)


def write_spreads(graph_module: GraphModule) -> int:
    """Rewrites in place what can be; returns how many."""
    written = 0
    for node in list(graph_module.graph.nodes):
        if node.target in _REPEATS and (sizes := _sizes(node)) is not None:
            node.replace_all_uses_with(call_before(node, aten.expand.default, node.args[0], sizes))
            written += 1
    if written:
        clean(graph_module)
    return written


def _sizes(repeat: Node) -> list[int] | None:
    """The sizes to expand to, −1 where an axis stays; None where that repeats more than one place."""
    source, counts = repeat.args
    shape: Any = source.meta["val"].shape  # type: ignore[union-attr]
    given: Any = list(counts)  # type: ignore[arg-type]
    given = [1] * (len(shape) - len(given)) + given
    new = len(given) - len(shape)
    if not all(isinstance(count, int) for count in given):
        return None
    single = [True] * new + [isinstance(size, int) and size == 1 for size in shape]
    if not all(count == 1 or alone for count, alone in zip(given, single, strict=True)):
        return None
    return [-1 if count == 1 and axis >= new else count for axis, count in enumerate(given)]
