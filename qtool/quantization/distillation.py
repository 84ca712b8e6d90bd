"""Distillation: QAT that trains towards the float model instead of the labels (arXiv 1503.02531).

The aim of quantization is the model that was trained, not another one that scores as well. The float model's
outputs say what that model answers for every sample, with more to learn from than one label: for rows of
two logits or more the loss is ``KL(softmax(teacher) ‖ softmax(student))``, for any other output the mean squared error;
whole numbers have no part in it. Rows with a target for each of their numbers (a regression, several labels at once)
are no logits: what is added to all of a row changes them, and no softmax.

Where asked, values inside are compared too (FitNets, arXiv 1412.6550): what leaves a module in both networks, by the
squared error relative to the teacher's mean square, so that every value counts alike. Both graphs are captures of one
model: what leaves a module is the last operator that was written in it, and its value is *tapped* there while training.
The teacher's batch-norm is folded into the layer before it: either name means what leaves both.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from qtool.captured import call_captured
from qtool.errors import UsageError, nearest
from qtool.evaluate import class_axis, divergence, error_of
from qtool.form import same_sizes
from qtool.nested import call, per_sample, tensors, to_float32
from qtool.quantization.capture import aten, owner
from qtool.quantization.rewrites.norms import is_live
from qtool.step import LossFunction


class Tap(nn.Module):
    """Passes a value on and remembers it."""

    value: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """``x`` itself."""
        self.value = x
        return x


Pairs = Sequence[tuple[Tap, Tap]]


def towards(teacher: nn.Module, taps: Pairs = ()) -> LossFunction:
    """The loss of a model against ``teacher``'s outputs for the same inputs; targets tell only what are logits.

    ``taps`` are (teacher's, student's), whose values are compared too. The teacher is moved to where the inputs are,
    and computes in float32 unless autocast is on.
    """

    def loss(model: Any, value: Any, target: Any) -> tuple[Tensor, Tensor | float]:
        teacher.to(next(tensors(value)).device)
        with torch.no_grad():
            wanted = to_float32(call_captured(teacher, value))
        given = to_float32(call(model, value))
        pairs = zip(tensors(wanted), tensors(given), strict=True)
        parts = [_distance(w, g, target) for w, g in pairs if w.is_floating_point()]
        if not parts:
            raise UsageError(
                "--distill", "a model that gives floating point numbers", "whole numbers alone",
                "take the arg-max out of the model, or train towards labels with --no-distill",
            )  # fmt: skip
        parts += [_relative(wants.value.float(), gives.value.float()) for wants, gives in taps]
        return torch.stack(parts).sum(), float(next(tensors(wanted)).shape[0])

    return loss


def _distance(wanted: Tensor, given: Tensor, target: Any) -> Tensor:
    """The distance summed over the batch."""
    if wanted.dim() == 2 and class_axis(wanted, target) is not None:
        return divergence(wanted, given).sum()
    return per_sample(error_of(wanted, given)).square().mean(1).sum()


def _relative(wanted: Tensor, given: Tensor) -> Tensor:
    """The squared error over the teacher's mean square, summed over the batch."""
    error = per_sample(wanted - given).square().mean(1).sum()
    return error / wanted.square().mean().clamp(min=torch.finfo(torch.float32).tiny)


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
    try:
        for pair in dict.fromkeys(tuple(end[path] for end in ends) for path in paths):
            taps += [(graph, _tap(graph, node)) for graph, node in zip((teacher, student), pair, strict=True)]
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
    """The last operator with a floating point result in every module, those within it included, by path."""
    found: dict[str, Node] = {}
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        if node.op != "call_function" or not (isinstance(value, Tensor) and value.is_floating_point() and value.dim()):
            continue
        parts = owner(node).split(".") if owner(node) else []
        for length in range(1, len(parts) + 1):
            found[".".join(parts[:length])] = node
    return found


def _behind_norms(teachers: dict[str, Node], students: dict[str, Node]) -> None:
    """Lets a layer before a live batch-norm, and this itself, stand for what leaves both, in place."""
    for path, layer in list(students.items()):
        norm = next((user for user in layer.users if user.target is aten.batch_norm.default), None)
        if norm is None or not is_live(layer) or path not in teachers:
            continue
        students[path] = norm
        for other in [name for name, end in students.items() if end is norm]:
            teachers.setdefault(other, teachers[path])


def _is_same(teachers: Node, students: Node) -> bool:
    """Whether the two are one value: of one shape, and not before a batch-norm that is folded in the teacher."""
    shapes = [node.meta["val"].shape[1:] for node in (teachers, students)]
    return same_sizes(*shapes) and not is_live(students)


def _tap(graph: GraphModule, node: Node) -> Node:
    name = f"tap_{node.name}"
    graph.add_submodule(name, Tap())
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
