"""An activation that clips moves before a pool, and every number stays."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from written import Forward, Written

from qtool.graphs.operators import aten
from qtool.quantization.capturing.capture import capture
from qtool.quantization.rewrites.clipping import clip_early

X = torch.randn(2, 8, 4, 6, generator=torch.Generator().manual_seed(0)) * 3


def summed(function: Forward) -> Written:
    """A model that begins with a sum, which takes an activation in."""
    return Written(lambda x: function(x + x.sin()))


def moved(function: Forward) -> tuple[int, list[str]]:
    """How many activations moved, and the operators behind the sum; the graph computes the same to the bit."""
    graph = capture(summed(function), X)
    count = clip_early(graph)
    for batch in (X, X[:1]):
        torch.testing.assert_close(graph(batch), summed(function)(batch), rtol=0, atol=0)
    names = [str(n.target).split(".")[1] for n in graph.graph.nodes if n.op == "call_function"]
    return count, [name for name in names[2:] if name != "sym_size"]


MOVES: dict[str, tuple[Forward, list[str]]] = {
    "relu": (lambda x: F.max_pool2d(x, 2).flatten(1).relu(), ["relu", "max_pool2d", "flatten"]),
    "relu6": (lambda x: F.relu6(F.interpolate(x, scale_factor=2.0)), ["relu6", "upsample_nearest2d"]),
    "hardtanh": (lambda x: F.hardtanh(F.pixel_shuffle(x, 2), -0.5, 2.0), ["hardtanh", "pixel_shuffle"]),
    "clamp": (lambda x: F.max_pool2d(x, 3, 2, 1).clamp(0.5, 1.5), ["clamp", "max_pool2d"]),
    "a slice": (lambda x: x[:, 2:].contiguous().relu(), ["relu", "slice", "contiguous"]),
    "in place": (lambda x: F.max_pool2d(x, 2).relu_().permute(0, 2, 3, 1), ["relu", "max_pool2d", "permute"]),
}


@pytest.mark.parametrize("name", MOVES)
def test_it_moves_behind_the_layer(name: str) -> None:
    function, expected = MOVES[name]
    assert moved(function) == (1, expected)


STAYS: dict[str, Forward] = {
    "an average": lambda x: F.avg_pool2d(x, 2).relu(),
    "a pool that is read twice": lambda x: (y := F.max_pool2d(x, 2)).relu() + y,
    "no layer before it": lambda x: F.max_pool2d(x.sigmoid(), 2).relu(),
    "no pool": lambda x: x.relu(),
    "another activation": lambda x: F.gelu(F.max_pool2d(x, 2)),
}


@pytest.mark.parametrize("name", STAYS)
def test_it_stays(name: str) -> None:
    assert moved(STAYS[name])[0] == 0


@pytest.mark.parametrize(("clip", "moves"), [(F.relu, 1), (F.relu6, 0)])
def test_in_training_a_relu_passes_a_dropout(clip: Forward, moves: int) -> None:
    graph = capture(summed(lambda x: clip(F.max_pool2d(F.dropout2d(x, 0.5), 2))), X, train=True)
    torch.manual_seed(1)
    before = graph(X)
    assert clip_early(graph) == moves
    torch.manual_seed(1)
    torch.testing.assert_close(graph(X), before, rtol=0, atol=0)


def test_what_it_clips_to_stays_with_it() -> None:
    graph = capture(summed(lambda x: F.max_pool2d(x, 2).clamp(-1.0, 0.25)), X)
    clip_early(graph)
    (node,) = (n for n in graph.graph.nodes if n.target is aten.clamp.default)
    assert node.args[1:] == (-1.0, 0.25)
    assert node.meta["val"].shape[1:] == X.shape[1:]
