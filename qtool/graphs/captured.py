"""Arguments of a captured graph: by place or by name, and those that are no tensors (numbers, flags, words).

A graph that comes from ``torch.export`` takes its arguments by place where it was captured so, and by name where it was
captured so. A model takes both, and so does what stands for it here.

``torch.export`` computes with the values that they have then, and the graph takes any other without a word. So another
value is refused here. One that is left out is filled in where a quantized model is used; in calibration it is refused,
since the model itself would take its default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from qtool.errors import QtoolError, one_line
from qtool.nested import call, tensors


def call_captured(model: nn.Module, inputs: Any) -> Any:
    """A captured graph applied to an input given by place or by name; another model as by :func:`qtool.nested.call`."""
    known = _captured(model) if isinstance(model, GraphModule) else {}
    bound = _bound(inputs, list(known))
    if not known or bound.keys() != known.keys():
        return call(model, inputs)
    codegen: Any = model.graph._codegen  # type: ignore[union-attr]
    by_place = codegen.pytree_info.in_spec.children()[0].num_children > 0
    return call(model, tuple(bound[name] for name in known) if by_place else {name: bound[name] for name in known})


def arguments(graph: GraphModule) -> list[str]:
    """What the arguments are called; empty for a graph that does not tell."""
    return list(_captured(graph))


def as_called(graph: GraphModule, value: Any) -> Any:
    """What a call with ``value`` alone means: of a model whose only argument is a dict, one is that argument."""
    kinds = {name: spec.type for name, (spec, _) in _captured(graph).items()}
    name, kind = next(iter(kinds.items()), ("", None))
    whole = len(kinds) == 1 and isinstance(kind, type) and issubclass(kind, Mapping)
    return {name: value} if whole and isinstance(value, Mapping) and name not in value else value


def with_constants(graph: GraphModule, inputs: Any) -> Any:
    """``inputs``, all by name, with the captured constants that they leave out; as they are where there is none."""
    known = _captured(graph)
    bound = _bound(inputs, list(known))
    left_out = {
        name: pytree.tree_unflatten([value for _, value in leaves], spec)
        for name, (spec, leaves) in known.items()
        if name not in bound and leaves and not any(isinstance(value, Tensor) for _, value in leaves)
    }
    return {**bound, **left_out} if left_out else inputs


def check_constants(graph: GraphModule, inputs: Any, where: str) -> None:
    """Raises QtoolError, naming ``where``, for an argument of another value than ``graph`` was captured with."""
    known = _captured(graph)
    bound = _bound(inputs, list(known))
    for name, value in bound.items():
        if known and name not in known and not list(tensors(value)):
            raise QtoolError(
                f"{where}, '{name}'", f"the arguments that the graph was captured with ({', '.join(known)})",
                f"{value!r} beside them", "leave it out, or quantize again with it in all batches",
            )  # fmt: skip
    for name, (spec, leaves) in known.items():
        given, found = pytree.tree_flatten(bound.get(name))
        if name in bound and found != spec:
            continue  # which calling the graph tells
        for i, (leaf, value) in enumerate(leaves):
            if isinstance(value, Tensor) or (name in bound and _same(value, given[i])):
                continue
            raise QtoolError(
                f"{where}, '{leaf}'", f"{value!r}, which the graph was captured with and holds as a constant",
                one_line(repr(given[i]))[:80] if name in bound else "nothing",
                "give every batch that value, or quantize again with another in all of them",
            )  # fmt: skip


def _captured(graph: GraphModule) -> dict[str, tuple[Any, list[tuple[str, Any]]]]:
    """Of each argument its structure and its leaves, each with its name and what is known of it.

    Empty for a graph that does not tell, or takes any number of arguments.
    """
    info = getattr(graph.graph._codegen, "pytree_info", None)
    nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
    if info is None or any("val" not in node.meta for node in nodes):
        return {}
    specs = [child for part in info.in_spec.children() for child in part.children()]
    if len(specs) != len(info.orig_args) or sum(spec.num_leaves for spec in specs) != len(nodes):
        return {}
    leaves = iter([(str(node.target), node.meta["val"]) for node in nodes])
    return {
        name: (spec, [next(leaves) for _ in range(spec.num_leaves)])
        for name, spec in zip(info.orig_args, specs, strict=True)
    }


def _bound(inputs: Any, names: list[str]) -> dict[str, Any]:
    """The arguments of a call by name."""
    if isinstance(inputs, Mapping):
        return {str(name): value for name, value in inputs.items()}
    given = inputs if isinstance(inputs, tuple | list) else (inputs,)
    return dict(zip([*names, *map(str, range(len(names), len(given)))], given, strict=False))


def _same(left: Any, right: Any) -> bool:
    numbers = isinstance(left, int | float) and isinstance(right, int | float)
    return bool(left is right or ((numbers or type(left) is type(right)) and left == right))
