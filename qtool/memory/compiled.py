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

Products and convolutions are PyTorch's own there too, and take for themselves what they take uncompiled
(:mod:`qtool.memory.scratch`).

So each graph is a list of buffers that come and go. :class:`Walk` allocates and frees them in that order, within a
step that is otherwise the usual one, for whoever is counting. The model may be compiled as one or block by block; of
blocks of one class whose weights and inputs have the same shapes, one is captured.

Left out on purpose: what generated kernels take for themselves, graphs that dynamo breaks in two (refused, as are
sharded blocks with batch-norm, which is gathered by itself), and symbolic shapes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only, tree_unflatten

from qtool import step
from qtool.errors import QtoolError
from qtool.memory.fakes import sized_by_values
from qtool.memory.scratch import Scratch

INLINED = ("clone", "_to_copy", "convert_element_type", "full", "expand", "select_scatter", "slice_scatter", "where")
"""Element-wise by nature, without the tag."""
REDUCED = ("sum", "mean", "var_mean", "var", "amax", "amin", "argmax", "prod", "any", "all")
STATE = "run_and_save_rng_state"
"""Saves a generator's state beside what an operator gives that draws, or may."""
CALLED = ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward")
"""Not generated."""
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
    return _timed(made, kept, set(owned.values()), _scratches(made, scratch or Scratch()))


def _scratches(made: list[tuple[fx.Node, frozenset[str]]], scratch: Scratch) -> dict[str, int]:
    """What operators take for themselves, by the name of the last of their results."""
    operators = {(node.all_input_nodes[0] if _is_part(node) else node): node.name for node, _ in made}
    return {
        name: scratch.of(node.target, *fx.node.map_arg((node.args, node.kwargs), lambda arg: arg.meta["val"]))
        for node, name in operators.items()
        if _name(node) in CALLED
    }


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
    packet = getattr(node.target, "overloadpacket", None)
    return packet.__name__ if packet is not None else getattr(node.target, "__name__", "")


def _is_several(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), tuple | list)


def _is_part(node: fx.Node) -> bool:
    """Whether this is one of several results of an operator, each with memory of its own. A split's have none."""
    if node.target is not operator.getitem:
        return False
    source = node.all_input_nodes[0]
    return _is_several(source) and not (hasattr(source.target, "_schema") and _lies_in_another(source))


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


@dataclass(frozen=True)
class Captured:
    """A forward pass's two graphs as lists of buffers."""

    forward: Plan
    backward: Plan
    parameters: tuple[str, ...]
    """The parameters that have a gradient, by name."""
    inputs: tuple[int, ...]
    """The leaves of the arguments that have one, by position."""
    kept: tuple[int, ...]
    """The leaves of the arguments that the backward pass reads."""
    gradients: tuple[frozenset[str] | None, ...]
    """For each of these parameters and inputs, the backward buffers that its gradient lies in."""
    results: tuple[Tensor, ...]
    names: tuple[frozenset[str] | None, ...]
    leaves: tuple[Any, ...]
    """What the pass returns; tensors stand for the results."""
    spec: TreeSpec


class StandIn:
    """Stands in for the compiled ``function``, a forward pass of ``module``: allocates what it would allocate."""

    def __init__(
        self, function: Callable[..., Any], module: nn.Module, mode: Any, scratch: Scratch, known: dict[Any, Captured]
    ) -> None:
        self.function, self.module, self.mode, self.scratch, self.known = function, module, mode, scratch, known
        self.captured: Captured | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves = tree_flatten((args, kwargs))[0]
        if self.captured is None:
            key = (type(self.module), *map(_kind, self.module.parameters()), *map(_kind, leaves))
            if key not in self.known:
                _require_whole(self.module)
                with _disable_current_modes(), self.mode:
                    self.known[key] = capture(self.function, self.module, args, kwargs, self.scratch)
            self.captured = self.known[key]
        captured, parameters = self.captured, dict(self.module.named_parameters())
        kept = [leaves[i] for i in captured.kept]
        wanted = [*(parameters[name] for name in captured.parameters), *(leaves[i] for i in captured.inputs)]
        made = iter(Walk.apply(captured, len(kept), *kept, *wanted))  # type: ignore[no-untyped-call]
        return tree_unflatten([next(made) if isinstance(x, Tensor) else x for x in captured.leaves], captured.spec)


@contextmanager
def stood_in(mode: Any, scratch: Scratch) -> Iterator[None]:
    """Inside the block nothing is compiled: what a setup compiles is captured on its first call, and stood in for."""
    known: dict[Any, Captured] = {}
    with mock.patch.object(step, "compiled", lambda function, module: StandIn(function, module, mode, scratch, known)):
        yield


def _require_whole(module: nn.Module) -> None:
    """Raises QtoolError for a block with weights that are gathered by themselves: its graph breaks there."""
    if inner := [name for name, child in module.named_modules() if name and isinstance(child, FSDPModule)]:
        raise QtoolError(
            "--compile", "blocks whose weights are gathered together",
            f"'{inner[0]}', which is sharded by itself within its block",
            "leave it out: this is not predicted",
        )  # fmt: skip


def _kind(leaf: Any) -> Any:
    return (leaf.shape, leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else repr(leaf)


def capture(function: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any, scratch: Scratch) -> Captured:
    """Captures a forward pass at inputs like these, all of it fake. Raises QtoolError unless it is one graph."""
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
        return function(*args, **kwargs)

    run.__code__ = run.__code__.replace()  # dynamo keeps shapes by code object, and takes a second one for a variable
    args, kwargs = tree_map_only(Tensor, lambda leaf: leaf.detach().requires_grad_(leaf.requires_grad), (args, kwargs))
    sources = [*module.parameters(), *(leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor))]
    try:
        leaves, spec = tree_flatten(torch.compile(run, backend=backend, dynamic=False)(*args, **kwargs))
    except Exception as error:
        if (asked := sized_by_values(error)) is None:
            raise
        raise _not_whole(f"'{asked}', which asks for a value, and a graph ends there") from None
    ends = [leaf.sum() for leaf in leaves if _learns(leaf)]
    torch.autograd.grad(ends, [*filter(_learns, sources)], allow_unused=True)
    if [len(found) for found in graphs.values()] != [1, 1, 1]:
        raise _not_whole(f"{len(graphs['inputs'])} graphs")
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    places = {id(leaf): i for i, leaf in enumerate(tree_flatten((args, kwargs))[0])}
    inputs, forward, backward = (found[0] for found in graphs.values())
    return _captured(inputs, forward, backward, leaves, spec, names, places, scratch)


def _not_whole(got: str) -> QtoolError:
    return QtoolError("--compile", "a model that is captured whole", got, "leave it out: this is not predicted")


def _captured(
    inputs: list[Any], forward: fx.Graph, backward: fx.Graph, leaves: list[Any], spec: TreeSpec, names: dict[int, str],
    places: dict[int, int], scratch: Scratch,
) -> Captured:  # fmt: skip
    first = plan(forward, {}, scratch)
    saved = [n.name for n in backward.nodes if n.op == "placeholder" and not n.name.startswith("tangents")]
    kept = first.outputs[len(first.outputs) - len(saved) :]
    made = {buffer.name for buffer in first.buffers}
    owned = {name: next(iter(where)) for name, where in zip(saved, kept, strict=True) if where and where <= made}
    second = plan(backward, owned, scratch)
    given = {node.name: value for node, value in zip(forward.find_nodes(op="placeholder"), inputs, strict=False)}
    read = [id(given[name]) for where in kept for name in where or () if name in given]
    ends = [(id(x), where) for x, where in zip(inputs, second.outputs, strict=False) if _learns(x)]
    weights, others = ([end for end in ends if end[0] in known] for known in (names, places))
    results, front = [leaf for leaf in leaves if isinstance(leaf, Tensor)], len(first.outputs) - len(saved)
    return Captured(
        forward=first, backward=second, parameters=tuple(names[source] for source, _ in weights),
        inputs=tuple(places[source] for source, _ in others),
        kept=tuple(places[source] for source in read if source in places),
        gradients=tuple(where for _, where in (*weights, *others)), results=tuple(x.detach() for x in results),
        names=first.outputs[front - len(results) : front], leaves=tuple(leaves), spec=spec,
    )  # fmt: skip


def _learns(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


class Walk(torch.autograd.Function):
    """The two lists of buffers, allocated and freed in order."""

    @staticmethod
    def forward(ctx: Any, captured: Captured, num_kept: int, *given: Tensor) -> tuple[Tensor, ...]:
        held: dict[str, Tensor] = {}
        device = captured.results[0].device
        _walk(captured.forward, held, device, {})
        saved = frozenset().union(*(w for w in captured.forward.outputs[_front(captured) :] if w))
        results = []
        for like, where in zip(captured.results, captured.names, strict=True):
            for name in (where or frozenset()) - saved:
                held.pop(name, None)
            results.append(torch.empty_like(like))
        ctx.save_for_backward(*given[:num_kept])
        ctx.captured, ctx.held, ctx.device = captured, {k: v for k, v in held.items() if k in saved}, device
        ctx.wanted = [x if isinstance(x, nn.Parameter) else x.to("meta") for x in given[num_kept:]]
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        captured, held = ctx.captured, ctx.held
        pairs = zip(ctx.wanted, captured.gradients, strict=True)
        shaped = {next(iter(where)): like for like, where in pairs if where}
        for name in captured.backward.unread:
            held.pop(name, None)
        _walk(captured.backward, held, ctx.device, shaped)
        del ctx.held
        found = [held.pop(next(iter(where)), None) if where else None for where in captured.gradients]
        held.clear()
        pairs = zip(ctx.wanted, found, strict=True)
        own = [g if g is not None and g.shape == w.shape else torch.empty_like(w, device=ctx.device) for w, g in pairs]
        return (None, None, *[None] * len(captured.kept), *own)


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
            torch.empty_like(like, device=device) if like is not None and fits
            else torch.empty(buffer.size, dtype=torch.uint8, device=device)
        )  # fmt: skip
        if buffer.scratch:
            torch.empty(buffer.scratch, dtype=torch.uint8, device=device)  # and given back
        for name in buffer.after:
            held.pop(name, None)
