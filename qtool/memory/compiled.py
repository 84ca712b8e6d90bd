"""What a compiled model allocates, without compiling it.

``torch.compile`` captures the model, makes one graph of its forward and one of its backward pass, and decides what the
first keeps for the second and what the second computes again (by a minimum cut). All of that is asked for here, on fake
tensors; the compiler behind it, which takes minutes, is not. What it would make of a graph follows from three rules of
torch's inductor:

* an element-wise operator has no memory of its own: it is computed where its result is read. It gets memory where a
  matrix product, a convolution or the outside reads it, or where that would read more than eight buffers (four, if
  there are several readers);
* a view has no memory; everything else has that of its result;
* memory is freed after its last reader, and an element-wise operator or a reduction may write over what it reads last.

So each graph is a list of buffers that come and go. :class:`Walk` allocates and frees them in that order, within a
step that is otherwise the usual one, for whoever is counting.

Left out on purpose: what kernels take for themselves while they run, graphs that dynamo breaks in two (refused), and
symbolic shapes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from qtool.errors import QtoolError
from qtool.nested import call

INLINED = ("clone", "_to_copy", "convert_element_type", "full", "expand", "select_scatter", "slice_scatter", "where")
"""Element-wise by nature, without the tag."""
REDUCED = ("sum", "mean", "var_mean", "var", "amax", "amin", "argmax", "prod", "any", "all")
READS, READS_IF_SHARED = 8, 4
"""Of how many buffers an element-wise result may be computed anew by its readers; by several readers."""


@dataclass(frozen=True)
class Buffer:
    """Memory that the node ``name`` takes, after freeing ``before`` and before freeing ``after``."""

    name: str
    size: int
    before: tuple[str, ...]
    after: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """The buffers of a graph in order, and for each of its outputs the buffers or inputs that it lies in."""

    buffers: tuple[Buffer, ...]
    outputs: tuple[frozenset[str] | None, ...]
    unread: tuple[str, ...]
    """Inputs that nobody reads."""


def plan(graph: fx.Graph, owned: Mapping[str, str]) -> Plan:
    """The buffers of ``graph``. ``owned``: its inputs that end with their last reader, and whose memory they are in."""
    outputs = [n if isinstance(n, fx.Node) else None for n in graph.output_node().args[0]]  # type: ignore[union-attr]
    reads: dict[fx.Node, frozenset[str]] = {}
    made: list[tuple[fx.Node, frozenset[str]]] = []
    for node in graph.nodes:
        if node.op == "placeholder":
            reads[node] = frozenset({owned.get(node.name, node.name)})
        elif node.op == "call_function":
            read = frozenset().union(*(reads.get(arg, frozenset()) for arg in node.all_input_nodes))
            if _is_part(node) or not (_is_several(node) or _lies_in_another(node) or _inlined(node, len(read))):
                made.append((node, read))
                reads[node] = frozenset({node.name})
            else:
                reads[node] = read
    kept = tuple(None if node is None else reads[node] for node in outputs)
    return _timed(made, kept, set(owned.values()))


def _timed(
    made: list[tuple[fx.Node, frozenset[str]]], kept: tuple[frozenset[str] | None, ...], owned: set[str]
) -> Plan:
    last = {name: node.name for node, read in made for name in read}
    mine = owned | {node.name for node, _ in made}
    forever = frozenset().union(*(names for names in kept if names))
    sizes = {node.name: _bytes(node.meta.get("val")) for node, _ in made}
    buffers = []
    for node, read in made:
        over = tuple(name for name in read if last[name] == node.name and name in mine - forever)
        in_place = _elementwise(node) or _name(node) in REDUCED
        before = tuple(n for n in over if in_place and sizes.get(n, 0) == sizes[node.name])[:1]
        never = () if node.name in last or node.name in forever else (node.name,)
        buffers.append(Buffer(node.name, sizes[node.name], before, (*(n for n in over if n not in before), *never)))
    return Plan(tuple(buffers), kept, tuple(owned - set(last) - forever))


def _name(node: fx.Node) -> str:
    packet = getattr(node.target, "overloadpacket", None)
    return packet.__name__ if packet is not None else getattr(node.target, "__name__", "")


def _is_several(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), tuple | list)


def _is_part(node: fx.Node) -> bool:
    """Whether this is one of several results of an operator: each has memory of its own."""
    return node.target is operator.getitem and _is_several(node.all_input_nodes[0])


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


@dataclass(frozen=True)
class Captured:
    """A model's two graphs as lists of buffers."""

    forward: Plan
    backward: Plan
    trained: tuple[nn.Parameter, ...]
    gradients: tuple[frozenset[str] | None, ...]
    """For each trained parameter, the backward buffers that its gradient lies in."""
    results: tuple[Tensor, ...]
    names: tuple[frozenset[str] | None, ...]
    spec: TreeSpec


def capture(model: nn.Module, value: Any) -> Captured:
    """Captures ``model`` at inputs like ``value``, all of it fake. Raises QtoolError unless it is one graph."""
    import torch._inductor.lowering  # its decompositions name it without importing it
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    graphs: dict[str, list[Any]] = {"inputs": [], "forward": [], "backward": []}

    def keeper(kind: str) -> Callable[..., Any]:
        def keep(module: fx.GraphModule, inputs: Any) -> Any:
            graphs[kind].append(module.graph)
            return make_boxed_func(module.forward)

        return keep

    def backend(module: fx.GraphModule, inputs: Any) -> Any:
        graphs["inputs"].append(inputs)
        return aot_autograd(
            fw_compiler=keeper("forward"), bw_compiler=keeper("backward"), decompositions=select_decomp_table(),
            partition_fn=min_cut_rematerialization_partition,
        )(module, inputs)  # fmt: skip

    def run(*args: Any, **kwargs: Any) -> Any:
        return model._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    run.__code__ = run.__code__.replace()  # dynamo keeps shapes by code object, and takes a second one for a variable
    model_result = call(torch.compile(run, backend=backend, dynamic=False), value)
    leaves, spec = tree_flatten(model_result)
    sum(leaf.sum() for leaf in leaves if leaf.requires_grad).backward()
    if [len(found) for found in graphs.values()] != [1, 1, 1] or not all(isinstance(x, Tensor) for x in leaves):
        got = f"{len(graphs['inputs'])} graphs"
        raise QtoolError("--compile", "a model that is captured whole", got, "leave it out: this is not predicted")
    for parameter in model.parameters():
        parameter.grad = None
    return _captured(graphs["inputs"][0], graphs["forward"][0], graphs["backward"][0], leaves, spec)


def _captured(inputs: Any, forward: fx.Graph, backward: fx.Graph, leaves: list[Tensor], spec: TreeSpec) -> Captured:
    first = plan(forward, {})
    saved = [n.name for n in backward.nodes if n.op == "placeholder" and not n.name.startswith("tangents")]
    kept = first.outputs[len(first.outputs) - len(saved) :]
    made = {buffer.name for buffer in first.buffers}
    owned = {name: next(iter(where)) for name, where in zip(saved, kept, strict=True) if where and where <= made}
    second = plan(backward, owned)
    pairs = [
        (value, where)
        for value, where in zip(inputs, second.outputs, strict=False)
        if isinstance(value, nn.Parameter) and value.requires_grad
    ]
    front = len(first.outputs) - len(saved)
    return Captured(
        first, second, tuple(value for value, _ in pairs), tuple(where for _, where in pairs),
        tuple(leaf.detach() for leaf in leaves), first.outputs[front - len(leaves) : front], spec,
    )  # fmt: skip


class Compiled(nn.Module):
    """Stands in for a model in a step: allocates what the compiled one would, and returns results of its shapes."""

    def __init__(self, captured: Captured) -> None:
        super().__init__()
        self.captured = captured

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        results = Walk.apply(self.captured, *self.captured.trained)  # type: ignore[no-untyped-call]
        return tree_unflatten(list(results), self.captured.spec)


class Walk(torch.autograd.Function):
    """The two lists of buffers, allocated and freed in order."""

    @staticmethod
    def forward(ctx: Any, captured: Captured, *parameters: Tensor) -> tuple[Tensor, ...]:
        held: dict[str, Tensor] = {}
        device = captured.results[0].device
        _walk(captured.forward, held, device, {})
        saved = frozenset().union(*(w for w in captured.forward.outputs[_front(captured) :] if w))
        results = []
        for like, where in zip(captured.results, captured.names, strict=True):
            for name in (where or frozenset()) - saved:
                held.pop(name, None)
            results.append(torch.empty_like(like))
        ctx.captured, ctx.held, ctx.device = captured, {k: v for k, v in held.items() if k in saved}, device
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        captured, held = ctx.captured, ctx.held
        shaped = {
            next(iter(where)): parameter
            for parameter, where in zip(captured.trained, captured.gradients, strict=True)
            if where
        }
        for name in captured.backward.unread:
            held.pop(name, None)
        _walk(captured.backward, held, ctx.device, shaped)
        del ctx.held
        found = [held.pop(next(iter(where)), None) if where else None for where in captured.gradients]
        held.clear()
        pairs = zip(captured.trained, found, strict=True)
        return (None, *(g if g is not None and g.shape == p.shape else torch.empty_like(p) for p, g in pairs))


def _front(captured: Captured) -> int:
    """Where what is kept for the backward pass begins among the outputs of the forward graph."""
    names, outputs = captured.names, captured.forward.outputs
    return next(i for i in range(len(outputs)) if outputs[i : i + len(names)] == names) + len(names)


def _walk(made: Plan, held: dict[str, Tensor], device: torch.device, shaped: Mapping[str, Tensor]) -> None:
    for buffer in made.buffers:
        for name in buffer.before:
            held.pop(name, None)
        like = shaped.get(buffer.name)
        fits = like is not None and like.numel() * like.element_size() == buffer.size
        held[buffer.name] = (
            torch.empty_like(like) if like is not None and fits
            else torch.empty(buffer.size, dtype=torch.uint8, device=device)
        )  # fmt: skip
        for name in buffer.after:
            held.pop(name, None)
