"""Attention's masks: what hides a place by −100 is to leave no denormal numbers, which CPUs are slow with.

    softmax(s + m),    m = 0 where a place is seen and −100 where it is not

is how windows that an image's edge goes through are told apart (Swin, arXiv 2103.14030, and many after it). The share
of a hidden place, exp(−100), is a float below 2^−126, and a product of such floats takes twenty times as long: the
attention of 64 windows of 49 places by 3 heads 24 ms instead of 1.3, and 3.9 where −∞ hides, since exp of that passes
through them as well (ONNX Runtime 1.31, AVX-512, one thread). Of −60 the share is 9e-27: a float as any other, and
nothing beside the shares of what is seen.

    exp(−60 − d) > 2^−126    and    exp(−60 + d) < 2^−24,    d ≤ 20 between the scores of one row

How far scores are apart is measured where nothing is hidden, on the samples of the capture, and twice that far would
still do no harm. Where they are farther apart, places are hidden by 1000: their shares are 0.

What hides has to be stored (a file holds it then), and to be added to scores alone. A mask that comes with the inputs,
one of truths, and what hides a whole row, stay as they are.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from qtool.graphs.edits import clean, set_parameter, store_before
from qtool.graphs.operators import aten
from qtool.nested import samples_of
from qtool.quantization.algorithms.walk import interpret
from qtool.quantization.rewrites.constants import constant_nodes, constant_values
from qtool.quantization.targets import SOFTMAX

FAINT = -80.0
"""What is added to a score, beside the most in its row, from which on its share may be denormal."""
HIDDEN, GONE = -60.0, -1000.0
MOST_APART = 20.0
"""Scores of one row that ``HIDDEN`` hides."""
SAMPLES = 4

_ATTENTION = aten.scaled_dot_product_attention.default
_PASSED = (
    aten.add.Tensor, aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim, aten.expand.default,
    aten.contiguous.default, aten.clone.default, aten.slice.Tensor, aten.dropout.default,
)  # fmt: skip


@torch.no_grad()
def thin_masks(graph: GraphModule, example: Any) -> int:
    """Has stored masks hide places by as much as leaves no denormal shares, in place; returns how many there were."""
    fixed = _fixed(graph)
    read = [node for node in fixed if any(user not in fixed for user in node.users)]
    readers = {node: found for node in read if (found := _scores(node, fixed))}
    values = constant_values(graph, readers)
    masks = {node: values[node] for node in readers if _hides(values[node])}
    if not masks:
        return 0
    stored = {node: _store(graph, node, fixed, torch.where(_faint(m), _most(m), m)) for node, m in masks.items()}
    clean(graph)
    few = samples_of(example, 0, SAMPLES) if graph.meta.get("any_batch") else example
    apart = _Apart(graph, {score for node in masks for score in readers[node]})
    interpret(apart, few)
    for node, mask in masks.items():
        depth = HIDDEN if max(apart.found[score] for score in readers[node]) <= MOST_APART else GONE
        hidden = _most(mask) + depth
        changed = torch.where(_faint(mask), hidden if depth == HIDDEN else mask.minimum(hidden), mask)
        set_parameter(graph, stored[node], changed, like=stored[node])
    return len(masks)


def _fixed(graph: GraphModule) -> dict[Node, None]:
    """Constants that do not train, and what is computed of such, but for sums, which may be larger than both parts."""
    constants, fixed = constant_nodes(graph), dict[Node, None]()
    for node in graph.graph.nodes:
        if node not in constants or (node.target is aten.add.Tensor and len(node.all_input_nodes) > 1):
            continue
        stored = operator.attrgetter(str(node.target))(graph) if node.op == "get_attr" else None
        if not getattr(stored, "requires_grad", False) and all(source in fixed for source in node.all_input_nodes):
            fixed[node] = None
    return fixed


def _scores(node: Node, fixed: Collection[Node]) -> list[Node]:
    """The softmaxes and attentions whose scores alone a constant is added to; none where something else reads it."""
    found: list[Node] = []
    waiting = [(user, node) for user in node.users if user not in fixed]
    while waiting:
        user, source = waiting.pop()
        if _takes_scores(user, source):
            found.append(user)
        elif user.target in _PASSED and not user.kwargs and _keeps_rows(user, source):
            waiting += [(reader, user) for reader in user.users]
        else:
            return []
    return found


def _takes_scores(user: Node, source: Node) -> bool:
    if user.target in SOFTMAX:
        return user.args[1] in (-1, source.meta["val"].dim() - 1)
    return user.target is _ATTENTION and source in (*user.args[3:4], user.kwargs.get("attn_mask"))


def _keeps_rows(user: Node, source: Node) -> bool:
    """Whether the last axis of the result is that of a source."""
    before, after = source.meta.get("val"), user.meta.get("val")
    if not isinstance(before, Tensor) or not isinstance(after, Tensor) or not before.dim() or not after.dim():
        return False
    return isinstance(before.shape[-1], int) and before.shape[-1] > 1 and before.shape[-1] == after.shape[-1]


def _most(mask: Tensor) -> Tensor:
    return mask.amax(-1, keepdim=True)


def _faint(mask: Tensor) -> Tensor:
    """What hides a place of a row that is not hidden whole."""
    return (mask - _most(mask) < FAINT) & _most(mask).isfinite()


def _hides(mask: Any) -> bool:
    return isinstance(mask, Tensor) and mask.dtype == torch.float32 and mask.dim() > 0 and bool(_faint(mask).any())


def _store(graph: GraphModule, node: Node, fixed: Collection[Node], value: Tensor) -> str:
    """Has what reads a constant beside others read a stored tensor; returns its path."""
    path = f"{node.name}_hidden"
    made = store_before(graph, node, path, value)
    node.replace_all_uses_with(made, delete_user_cb=lambda user: user not in fixed)
    return path


class _Apart(Interpreter):
    """How far the scores of a row are apart at most, at some softmaxes and attentions."""

    def __init__(self, graph: GraphModule, wanted: set[Node]) -> None:
        super().__init__(graph)
        self.wanted = wanted
        self.found: dict[Node, float] = {}

    def run_node(self, n: Node) -> Any:
        if n in self.wanted:
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            scores = _of_attention(*args, **kwargs) if n.target is _ATTENTION else args[0]
            self.found[n] = float((scores.amax(-1) - scores.amin(-1)).max())
        return super().run_node(n)


def _of_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *_: Any,
    scale: float | None = None, **__: Any,
) -> Tensor:  # fmt: skip
    heads = query.shape[1] // key.shape[1] if query.dim() > 3 else 1
    keys = key.repeat_interleave(heads, 1) if heads > 1 else key
    scores = query @ keys.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    return scores if attn_mask is None else scores + attn_mask
