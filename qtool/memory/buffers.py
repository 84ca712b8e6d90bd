"""What a graph of a compiled model keeps in memory: a list of buffers that come and go.

The compiler is not asked, which would take minutes. What it makes of a graph follows from three rules of torch's
inductor:

* an element-wise operator has no memory of its own: it is computed where its result is read. It gets memory where a
  matrix product, a convolution or the outside reads it, or where that would read more than eight buffers (four, if
  there are several readers);
* a view has no memory; everything else has that of its result;
* memory is freed after its last reader, and an element-wise operator or a reduction may write over what it reads last.

A fourth one is a convolution's alone: the backward pass is given its operands in the order of memory that the weight's
gradient has, and then those that the input's gradient needs in the order of that one, and what lies otherwise is
copied. The order of a depthwise weight of images has two readings, since its one input channel can lie anywhere, and
the compiler's is neither that of the images nor one that the operator knows.

Products and convolutions are PyTorch's own here too, and take for themselves what they take uncompiled
(:mod:`qtool.memory.scratch`): of operands that lie as they do in the graph, except that generated code lays what it
has turned (by ``permute``) out in the order of its dimensions.

Left out on purpose: what generated kernels take for themselves.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map_only

from qtool.graphs.operators import packet_of
from qtool.memory.scratch import Scratch

INLINED = ("clone", "_to_copy", "convert_element_type", "full", "expand", "select_scatter", "slice_scatter", "where")
"""Element-wise by nature, without the tag."""
REDUCED = ("sum", "mean", "var_mean", "var", "amax", "amin", "argmax", "prod", "any", "all")
STATE = "run_and_save_rng_state"
"""Saves a generator's state beside what an operator gives that draws, or may."""
AGAIN = "run_with_rng_state"
"""Runs such an operator once more, from that state; torch does not tell what it returns."""
CALLED = ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward")
"""Operators that no code is generated for."""
TURNING = ("permute", "transpose", "t")
CHANNELS_LAST = [3, 0, 2, 1]
"""The rank of each dimension of an image in memory, 0 for the innermost."""
READS, READS_IF_SHARED = 8, 4
"""Of how many buffers an element-wise result may be computed anew by its readers; by several readers."""


@dataclass(frozen=True)
class Buffer:
    """Memory that the node ``name`` takes, after freeing ``before`` and before freeing ``after``."""

    name: str
    size: int
    before: tuple[str, ...]
    after: tuple[str, ...]
    scratch: int = 0
    """Bytes that the operator has for itself meanwhile."""


@dataclass(frozen=True)
class Plan:
    """The buffers of a graph in order, and for each of its outputs the buffers or inputs that it lies in."""

    buffers: tuple[Buffer, ...]
    outputs: tuple[frozenset[str] | None, ...]
    unread: tuple[str, ...]
    """Inputs that nobody reads."""


def plan(graph: fx.Graph, owned: Mapping[str, str], scratch: Scratch | None = None) -> Plan:
    """The buffers of ``graph``. ``owned``: its inputs that end with their last reader, and whose memory they are in.

    ``scratch`` tells what operators take for themselves.
    """
    _copy_operands(graph)
    outputs = [n if isinstance(n, fx.Node) else None for n in graph.output_node().args[0]]  # type: ignore[union-attr]
    reads: dict[fx.Node, frozenset[str]] = {}
    made: list[tuple[fx.Node, frozenset[str]]] = []
    for node in graph.nodes:
        if node.op == "placeholder":
            reads[node] = frozenset({owned.get(node.name, node.name)})
        elif node.op == "call_function":
            read = frozenset().union(*(reads.get(arg, frozenset()) for arg in node.all_input_nodes))
            if _is_state(node):
                reads[node] = frozenset()
            elif _is_part(node) or not (_is_several(node) or _lies_in_another(node) or _inlined(node, len(read))):
                made.append((node, read))
                reads[node] = frozenset({node.name})
            else:
                reads[node] = read
    kept = tuple(None if node is None else reads[node] for node in outputs)
    return _timed(made, kept, set(owned.values()), _scratches(graph, made, scratch or Scratch()))


def _copy_operands(graph: fx.Graph) -> None:
    """Puts the copies into ``graph`` that a convolution's backward pass is given in the place of its operands.

    One kernel makes them, and none of what it reads ends before it does.
    """
    found = graph.find_nodes(op="call_function", target=torch.ops.aten.convolution_backward.default)
    channels_last = bool(found) and lays_out(graph)
    for node in found:
        with _disable_current_modes(), FakeTensorMode():
            values = [_empty_like(operand.meta["val"]) for operand in node.args[:3]]
            changes = list(_ordered(values, node.args[4:], channels_last))
        copies: list[fx.Node] = []
        with graph.inserting_before(node):
            for place, value in changes:
                copy = graph.call_function(torch.ops.aten.as_strided_copy.default, (node.args[place], *copies))
                copy.meta["val"] = value
                node.update_arg(place, copy)
                copies.append(copy)
        if copies:
            copies[-1].args = tuple(dict.fromkeys(read for copy in copies for read in copy.all_input_nodes))


def _empty_like(value: Tensor) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def lays_out(graph: fx.Graph) -> bool:
    """Whether the compiler lays images out channels-last in this graph: by its forward passes, as of 2.15 by all."""
    from torch._inductor.graph import GraphLowering

    return GraphLowering.decide_layout_opt(graph.owning_module, is_inference=False)  # type: ignore[arg-type]


def _ordered(values: list[Tensor], rest: Any, channels_last: bool) -> Iterator[tuple[int, Tensor]]:
    """The operands of a convolution's backward pass that are copied, in turn, by position, and how the copies lie.

    ``values`` are the gradient, the input and the weight; ``rest`` the other arguments but for the sizes of the bias.
    """
    from torch._inductor.ir import get_stride_order

    *settings, mask = rest
    for wanted, places in ((1, (1, 0)), (0, (0, 2))):
        if not mask[wanted]:
            continue
        order = CHANNELS_LAST
        if not channels_last or values[2].dim() != 4:
            alone = [i == wanted for i in range(3)]
            gradients = torch.ops.aten.convolution_backward.default(*values, None, *settings, alone)
            order = list(get_stride_order(gradients[wanted].stride()))
        for place in places:
            if not _lies_in(values[place], order):
                values[place] = in_order(values[place], order)
                yield place, values[place]


def _lies_in(value: Tensor, order: list[int]) -> bool:
    """Whether dimensions of a higher rank in ``order`` have strides as large; those of size 1 lie anywhere."""
    dims = sorted((dim for dim in range(value.dim()) if value.shape[dim] != 1), key=order.__getitem__)
    return [value.stride(dim) for dim in dims] == sorted(value.stride(dim) for dim in dims)


def in_order(value: Tensor, order: list[int]) -> Tensor:
    """An empty tensor like ``value``, whose dimensions have these ranks in memory, 0 for the innermost."""
    outwards = sorted(range(value.dim()), key=order.__getitem__, reverse=True)
    return value.new_empty([value.shape[dim] for dim in outwards]).permute(*map(outwards.index, range(value.dim())))


def _scratches(graph: fx.Graph, made: list[tuple[fx.Node, frozenset[str]]], scratch: Scratch) -> dict[str, int]:
    """What operators take for themselves, by the name of the last of their results."""
    operators = {(node.all_input_nodes[0] if _is_part(node) else node): node.name for node, _ in made}
    turned = _turned(graph)
    return {
        name: scratch.of(node.target, *_given(node, turned))
        for node, name in operators.items()
        if _name(node) in CALLED
    }


def _given(node: fx.Node, turned: set[fx.Node]) -> Any:
    """Operands as they lie in the graph; a convolution's in the order of their dimensions if one of them was turned."""
    given = fx.node.map_arg((node.args, node.kwargs), lambda operand: operand.meta["val"])
    if _name(node) == "convolution" and turned.intersection(node.all_input_nodes):
        return tree_map_only(Tensor, lambda value: value.new_empty(value.shape), given)
    return given


def _turned(graph: fx.Graph) -> set[fx.Node]:
    """What is generated from results whose dimensions have changed places."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        generated = node.op == "call_function" and (_elementwise(node) or _lies_in_another(node))
        if generated and (_name(node) in TURNING or found.intersection(node.all_input_nodes)):
            found.add(node)
    return found


def _timed(
    made: list[tuple[fx.Node, frozenset[str]]], kept: tuple[frozenset[str] | None, ...], owned: set[str],
    scratches: Mapping[str, int],
) -> Plan:  # fmt: skip
    last = {name: node.name for node, read in made for name in read}
    mine = owned | {node.name for node, _ in made}
    forever = frozenset().union(*(names for names in kept if names))
    sizes = {node.name: _bytes(node.meta.get("val")) for node, _ in made}
    buffers = []
    for node, read in made:
        over = tuple(name for name in sorted(read) if last[name] == node.name and name in mine - forever)
        in_place = _elementwise(node) or _name(node) in REDUCED
        before = tuple(n for n in over if in_place and sizes.get(n, 0) == sizes[node.name])[:1]
        never = () if node.name in last or node.name in forever else (node.name,)
        after = (*(n for n in over if n not in before), *never)
        buffers.append(Buffer(node.name, sizes[node.name], before, after, scratches.get(node.name, 0)))
    return Plan(tuple(buffers), kept, tuple(owned - set(last) - forever))


def _name(node: fx.Node) -> str:
    packet = packet_of(node)
    return packet.__name__ if packet is not None else getattr(node.target, "__name__", "")


def _is_several(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), tuple | list)


def _is_part(node: fx.Node) -> bool:
    """Whether this is one of several results of an operator, each with memory of its own. A split's have none."""
    if node.target is not operator.getitem:
        return False
    source = node.all_input_nodes[0]
    split = hasattr(source.target, "_schema") and _lies_in_another(source)
    return _name(source) == AGAIN or (_is_several(source) and not split)


def _is_state(node: fx.Node) -> bool:
    """Whether this is a generator's state, a few numbers."""
    return node.target is operator.getitem and (node.args[1], _name(node.all_input_nodes[0])) == (0, STATE)


def _lies_in_another(node: fx.Node) -> bool:
    """Whether a result is a view."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return True  # numbers
    return any(a.alias_info is not None and not a.alias_info.is_write for a in schema.arguments)


def _elementwise(node: fx.Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or _name(node) in INLINED


def _inlined(node: fx.Node, num_reads: int) -> bool:
    """Whether an element-wise result is computed where it is read."""
    readers = list(_readers(node))
    if not _elementwise(node) or any(r is None or not (_elementwise(r) or _name(r) in REDUCED) for r in readers):
        return False
    return num_reads <= (READS_IF_SHARED if len(readers) > 1 else READS)


def _readers(node: fx.Node) -> Iterator[fx.Node | None]:
    """Who reads a result, itself or through views; None where it leaves the graph."""
    for user in node.users:
        if user.op == "output":
            yield None
        elif _lies_in_another(user):
            yield from _readers(user)
        else:
            yield user


def _bytes(value: Any) -> int:
    tensors = [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]
    return sum(t.numel() * t.element_size() for t in tensors)
