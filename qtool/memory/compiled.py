"""What a compiled model allocates, without compiling it.

``torch.compile`` captures the model, makes one graph of its forward and one of its backward pass, and decides what the
first keeps for the second and what the second computes again (by a minimum cut). All of that is asked for here, on fake
tensors; the compiler behind it, which takes minutes, is not. What it would make of a graph is a list of buffers that
come and go (:mod:`qtool.memory.buffers`). :class:`Walk` allocates and frees them in that order, within a step that is
otherwise the usual one, for whoever is counting. The model may be compiled as one or block by block; of blocks of one
class whose weights and inputs have the same shapes, one is captured.

Left out on purpose: graphs that dynamo breaks in two (refused, as are sharded blocks with batch-norm, which is gathered
by itself), and symbolic shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import FSDPModule
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only, tree_unflatten

from qtool.errors import QtoolError
from qtool.memory.buffers import CHANNELS_LAST, Plan, in_order, lays_out, plan
from qtool.memory.fakes import sized_by_values
from qtool.memory.scratch import Scratch
from qtool.steps import forwards, moved_buffers


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

    def stand_in(function: Callable[..., Any], module: nn.Module) -> StandIn:
        return StandIn(function, module, mode, scratch, known)

    with mock.patch.object(forwards, "compiled", stand_in):
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
    from torch._functorch import config
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    graphs: dict[str, list[Any]] = {"inputs": [], "forward": [], "backward": []}

    def keeper(kind: str) -> Callable[..., Any]:
        def keep(module: fx.GraphModule, inputs: Any) -> Any:
            graphs[kind].append(module.graph)
            return make_boxed_func(module.forward)

        return keep

    def partition(joint: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        moved_buffers.keep(joint.graph)  # as forwards.compiled has it kept
        return min_cut_rematerialization_partition(joint, *args, **kwargs)

    def backend(module: fx.GraphModule, inputs: Any) -> Any:
        graphs["inputs"].append(inputs)
        return aot_autograd(
            fw_compiler=keeper("forward"), bw_compiler=keeper("backward"), decompositions=select_decomp_table(),
            partition_fn=partition, keep_inference_input_mutations=True,
        )(module, inputs)  # fmt: skip

    def run(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    run.__code__ = run.__code__.replace()  # dynamo keeps shapes by code object, and takes a second one for a variable
    args, kwargs = tree_map_only(Tensor, lambda leaf: leaf.detach().requires_grad_(leaf.requires_grad), (args, kwargs))
    sources = [*module.parameters(), *(leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor))]
    try:
        # a GPU's generators would be inputs of both graphs: their states are saved instead, as the CPU's are
        with config.patch(graphsafe_rng_functionalization=False):
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
    saved = [n.name for n in backward.nodes if n.op == "placeholder" and not n.name.startswith("tangents")]
    _lay_out_saved(forward, backward, len(saved))
    first = plan(forward, {}, scratch)
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


def _lay_out_saved(forward: fx.Graph, backward: fx.Graph, count: int) -> None:
    """Has the ``count`` values that the backward graph is given lie as the forward one leaves them.

    Where the compiler lays images out channels-last, it does so with whatever leads to or comes from a convolution.
    """
    from torch._inductor.graph import GraphLowering

    if not lays_out(forward):
        return
    preferring = GraphLowering.find_nodes_prefer_channels_last(SimpleNamespace(module=forward.owning_module))  # type: ignore[arg-type]
    made: Any = forward.output_node().args[0]
    placeholders = backward.find_nodes(op="placeholder")
    given = {node: node.meta["val"] for node in placeholders}
    saved = [node for node in placeholders if not node.name.startswith("tangents")]
    with _disable_current_modes():  # they have one of their own
        for node, source in zip(saved, made[len(made) - count :], strict=True):
            if source in preferring and source.op == "call_function" and given[node].dim() == 4:
                given[node] = in_order(given[node], CHANNELS_LAST)
        mode = next(value.fake_mode for value in given.values() if isinstance(value, FakeTensor))
        FakeTensorProp(backward.owning_module, mode).propagate_dont_convert_inputs(*given.values())  # type: ignore[arg-type]


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
