"""Distillation: QAT that trains towards the float model instead of the labels (arXiv 1503.02531).

The aim of quantization is the model that was trained, not another one that scores as well. The float model's
outputs say what that model answers for every sample, with more to learn from than one label: for rows of
two logits or more the loss is ``KL(softmax(teacher) ‖ softmax(student))``, for any other output the mean squared error;
whole numbers have no part in it. Rows with a target for each of their numbers (a regression, several labels at once)
are no logits: what is added to all of a row changes them, and no softmax. Logits of tokens or pixels, which targets
tell of the first output alone (the states of an encoder can be of the same shape), count by their mean over those
positions of a sample that have a target: what is computed for padding is nobody's aim.

Where asked, values inside are compared too (FitNets, arXiv 1412.6550): what leaves a module in both networks, by the
squared error relative to the teacher's mean square, so that every value counts alike. That is the calibration samples',
measured once: a batch's own would make a batch's loss depend on how it is cut into micro-batches. Both graphs are
captures of one model: what leaves a module is the last operator that was written in it, and its value is *tapped* there
while training.
The teacher's batch-norm is folded into the layer before it: either name means what leaves both.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from qtool.errors import UsageError, nearest
from qtool.evaluate import class_axis, counted, divergence, error_of
from qtool.graphs.captured import call_captured
from qtool.graphs.edits import owner
from qtool.graphs.operators import aten
from qtool.graphs.shapes import same_sizes
from qtool.nested import micro_batches, per_sample, tensors, to_float32
from qtool.quantization.calibration.calibrate import MICRO_BATCH
from qtool.quantization.rewrites.norms import FOLDED, is_live
from qtool.steps.passes import answer
from qtool.steps.setup import LossFunction


class Tap(nn.Module):
    """Passes a value on and remembers it: what leaves the module ``path``."""

    value: Tensor

    def __init__(self, path: str = "") -> None:
        super().__init__()
        self.path = path

    def forward(self, x: Tensor) -> Tensor:
        """``x`` itself."""
        self.value = x
        return x


Pairs = Sequence[tuple[Tap, Tap]]


def towards(teacher: nn.Module, taps: Pairs = (), squares: Sequence[float] = ()) -> LossFunction:
    """The loss of a model against ``teacher``'s outputs for the same inputs; targets tell only what are logits.

    ``taps`` are (teacher's, student's), whose values are compared too, each by its mean square (``mean_squares``). The
    teacher is moved to where the inputs are, and computes in float32 unless autocast is on.
    """

    def loss(model: Any, value: Any, target: Any) -> tuple[Tensor, Tensor | float]:
        teacher.to(next(tensors(value)).device)
        with torch.no_grad():
            wanted = to_float32(call_captured(teacher, value))
        given = to_float32(answer(model, value))
        pairs = enumerate(zip(tensors(wanted), tensors(given), strict=True))
        parts = [_distance(w, g, target, first=i == 0) for i, (w, g) in pairs if w.is_floating_point()]
        if not parts:
            raise UsageError(
                "--distill", "a model that gives floating point numbers", "whole numbers alone",
                "take the arg-max out of the model, or train towards labels with --no-distill",
            )  # fmt: skip
        for (wants, gives), square in zip(taps, squares, strict=True):
            parts.append(_squared(wants.value.float(), gives.value.float()) / square)
        return torch.stack(parts).sum(), float(next(tensors(wanted)).shape[0])

    return loss


def _distance(wanted: Tensor, given: Tensor, target: Any, *, first: bool) -> Tensor:
    """The distance summed over the batch; ``first`` of the outputs is what targets of several positions are of."""
    axis = class_axis(wanted, target) if first or wanted.dim() == 2 else None
    if axis is None:
        return per_sample(error_of(wanted, given)).square().mean(1).sum()
    rows = per_sample(divergence(wanted.movedim(axis, -1), given.movedim(axis, -1)))
    keep = counted(target, wanted, axis) if wanted.dim() > 2 else None
    if keep is None:
        return rows.mean(1).sum()
    keep = per_sample(keep).to(rows.device)
    return (torch.where(keep, rows, 0.0).sum(1) / keep.sum(1).clamp(min=1)).sum()


def _squared(wanted: Tensor, given: Tensor) -> Tensor:
    """The squared error summed over the batch."""
    return per_sample(wanted - given).square().mean(1).sum()


@torch.no_grad()
def mean_squares(teacher: nn.Module, taps: Pairs, batches: Iterable[Any]) -> list[float]:
    """The mean square of what each tap of the teacher lets pass, over all ``batches``; none are read without taps.

    Raises UsageError for one that is zero, or is not finite: no error is relative to it.
    """
    sums, counts = [0.0] * len(taps), [0] * len(taps)
    for piece in (piece for batch in (batches if taps else ()) for piece in micro_batches(batch, MICRO_BATCH)):
        call_captured(teacher, piece)
        for i, (tap, _) in enumerate(taps):
            sums[i] += float(tap.value.double().square().sum())
            counts[i] += tap.value.numel()
    found = [total / max(1, count) for total, count in zip(sums, counts, strict=True)]
    for square, (tap, _) in zip(found, taps, strict=True):
        if not 0 < square < math.inf:
            raise UsageError(
                "--distill-features", "modules that give finite values, and not zeros alone, for calibration samples",
                f"a mean square of {square:g} of what leaves '{tap.path}'",
                "leave it out, or calibrate on other samples",
            )  # fmt: skip
    return found


@contextmanager
def tapped(teacher: GraphModule, student: GraphModule, patterns: Sequence[str]) -> Iterator[Pairs]:
    """Taps what leaves the modules of these patterns in both graphs, and takes the taps out again.

    Raises UsageError for a pattern that no module of both matches.
    """
    ends = [_ends(graph) for graph in (teacher, student)]
    _behind_norms(*ends)
    known = [path for path, end in ends[0].items() if path in ends[1] and _is_same(end, ends[1][path])]
    paths = []
    for pattern in patterns:
        found = [path for path in known if fnmatch.fnmatchcase(path, pattern)]
        if not found:
            raise UsageError("--distill-features", "a module of the model", repr(pattern), nearest(pattern, known))
        paths += found
    taps: list[tuple[GraphModule, Node]] = []
    pairs = {tuple(end[path] for end in ends): path for path in paths}
    try:
        for pair, path in pairs.items():
            taps += [(graph, _tap(graph, node, path)) for graph, node in zip((teacher, student), pair, strict=True)]
        for graph in (teacher, student):
            graph.recompile()
        modules = [graph.get_submodule(str(node.target)) for graph, node in taps]
        yield list(zip(modules[::2], modules[1::2], strict=True))  # type: ignore[arg-type]
    finally:
        for graph, node in taps:
            _untap(graph, node)
        for graph in (teacher, student):
            graph.recompile()


def _ends(graph: GraphModule) -> dict[str, Node]:
    """The last operator with a floating point result in every module, those within it included, by path.

    What leaves a batch-norm that was folded is what leaves the layer that it was folded into.
    """
    found: dict[str, Node] = {}
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        if node.op != "call_function" or not (isinstance(value, Tensor) and value.is_floating_point() and value.dim()):
            continue
        for path in filter(None, (owner(node), *node.meta.get(FOLDED, ()))):
            parts = path.split(".")
            found |= {".".join(parts[:length]): node for length in range(1, len(parts) + 1)}
    return found


def _behind_norms(teachers: dict[str, Node], students: dict[str, Node]) -> None:
    """Lets a layer before a live batch-norm stand for what leaves both, in place."""
    for path, layer in list(students.items()):
        norm = next((user for user in layer.users if user.target is aten.batch_norm.default), None)
        if norm is None or not is_live(layer) or path not in teachers:
            continue
        students[path] = norm


def _is_same(teachers: Node, students: Node) -> bool:
    """Whether the two are one value: of one shape, and not before a batch-norm that is folded in the teacher."""
    shapes = [node.meta["val"].shape[1:] for node in (teachers, students)]
    return same_sizes(*shapes) and not is_live(students)


def _tap(graph: GraphModule, node: Node, path: str) -> Node:
    name = f"tap_{node.name}"
    graph.add_submodule(name, Tap(path))
    with graph.graph.inserting_after(node):
        tap = graph.graph.call_module(name, (node,))
    node.replace_all_uses_with(tap, delete_user_cb=lambda user: user is not tap)
    return tap


def _untap(graph: GraphModule, tap: Node) -> None:
    source = tap.args[0]
    assert isinstance(source, Node)
    tap.replace_all_uses_with(source)
    graph.graph.erase_node(tap)
    graph.delete_submodule(str(tap.target))
