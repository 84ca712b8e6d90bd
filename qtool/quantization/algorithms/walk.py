"""A walk: the whole calibration set moved through a graph layer by layer, each layer run once.

Methods that correct one layer after another need the inputs that a layer really sees once everything before it
was corrected. Running the model again for every layer costs a square of its depth. Here the set stands still between
two layers instead: a graph is cut into *segments* at its quantizers and at what ``layers`` read, a segment reads what
earlier ones left for every batch, and what nothing later reads is dropped. The whole walk costs one forward pass.

What stands between segments are integers, one byte per value, where a quantizer was crossed; where it stands is told
in ``spool.py``. A walk computes where its graph is.

Left out on purpose: anything about what is corrected, which is each method's own.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node, map_arg
from torch.utils import _pytree as pytree

from qtool.errors import QtoolError
from qtool.form import quantized
from qtool.nested import tensors
from qtool.quantization.algorithms.spool import BUDGET, Store
from qtool.quantization.residence import device_of
from qtool.quantization.rewrites.constants import constant_nodes

_QUANTIZE = quantized.quantize_per_tensor.default
_DEQUANTIZE = quantized.dequantize_per_tensor.default


@dataclass(frozen=True)
class Segment:
    """The operators between the values that are kept: ``nodes`` in order, the last of which is the value it makes."""

    nodes: tuple[Node, ...]
    reads: tuple[Node, ...]

    @property
    def output(self) -> Node:
        """The node whose value later segments read."""
        return self.nodes[-1]


class Walk:
    """The batches on their way through ``graph``; see the module's text.

    ``batches`` are inputs: tensors, tuples or dicts of them, gone through once. Use it as a context: for each
    of its ``segments`` look at ``values(segment, node)``, change constants of the graph, then ``advance(segment)``.
    The values of ``held`` nodes are kept beyond their last reader, until they are released; what ``layers`` read is at
    hand where no quantizer is before them.
    """

    def __init__(
        self, graph: GraphModule, batches: Iterable[Any], *, budget: int = BUDGET, held: Iterable[Node] = (),
        layers: Iterable[Node] = (),
    ) -> None:  # fmt: skip
        self.graph, self._held = graph, set(held)
        self._constant_nodes = constant_nodes(graph)
        self.segments = cut(graph, self._held | _read_as_floats(layers))
        self.device = device_of(graph)
        self._store = Store(budget, self.device)
        self._last = {node: index for index, segment in enumerate(self.segments) for node in segment.reads}
        results = next(node for node in graph.graph.nodes if node.op == "output").all_input_nodes
        self._last |= dict.fromkeys(results, len(self.segments))
        self._constants: dict[Node, Any] = {}
        self._position = -1
        self.num_batches = self._take(batches)

    def __enter__(self) -> Walk:
        return self

    def __exit__(self, *_: object) -> None:
        self._store.close()

    def _take(self, batches: Iterable[Any]) -> int:
        """Stores what each batch gives to the graph's inputs that are read."""
        names = [node for node in self.graph.graph.nodes if node.op == "placeholder"]
        count = 0
        for count, batch in enumerate(batches, 1):
            for node, value in zip(names, arranged(batch, names), strict=True):
                if node in self._last or node in self._held:
                    self._store.put(node, count - 1, value)
        if not count:
            raise QtoolError("calibration", "at least one sample", "none", "pass at least one batch of inputs")
        return count

    def values(self, segment: Segment, node: Node) -> Iterator[Any]:
        """The value of ``node``, in the segment or read by it, for each batch in turn; nothing is kept of it."""
        if node in segment.reads:
            yield from (self._store.get(node, index) for index in range(self.num_batches))
            return
        needed = _ancestors(node, segment)
        for index in range(self.num_batches):
            yield self._run(segment, needed, index)[node]

    def means(self, segment: Segment, node: Node) -> Iterator[tuple[Tensor, int]]:
        """The mean over the samples of each batch of ``values``, as a batch of one, and how many samples there were."""
        source = node.args[0] if node.target is _DEQUANTIZE else None
        if source in segment.reads and isinstance(source, Node):
            for index in range(self.num_batches):
                value = self._store.get(source, index)
                yield dequantize(_mean_of_integers(value), *node.args[1:3]), len(value)  # type: ignore[arg-type]
        else:
            yield from ((value.mean(0, keepdim=True), len(value)) for value in self.values(segment, node))

    def advance(self, segment: Segment) -> None:
        """Runs the segment on every batch, keeps its output and drops what nothing later reads."""
        for index in range(self.num_batches):
            self._store.put(segment.output, index, self._run(segment, segment.nodes, index)[segment.output])
        self._position = self.segments.index(segment)
        for node in segment.reads:
            if self._last[node] == self._position and node not in self._held:
                self._store.drop(node)
        self._constants.clear()

    def stored(self, node: Node, index: int) -> Any:
        """The value of a kept node for one batch, as it is stored: integers where it is a quantizer's."""
        return self._store.get(node, index)

    def held(self, node: Node) -> Iterator[Any]:
        """The value of a held node for each batch in turn, once a segment made it."""
        return (self._store.get(node, index) for index in range(self.num_batches))

    def release(self, node: Node) -> None:
        """Lets the value of a held node go with its last reader, at once where that was advanced."""
        self._held.discard(node)
        if self._last.get(node, -1) <= self._position:
            self._store.drop(node)

    def output(self) -> Iterator[Any]:
        """What the graph's output node reads, for each batch, once every segment was advanced."""
        result = next(node for node in self.graph.graph.nodes if node.op == "output").args[0]
        for index in range(self.num_batches):
            yield map_arg(result, functools.partial(self._store.get, index=index))

    @torch.no_grad()
    def _run(self, segment: Segment, nodes: Iterable[Node], index: int) -> dict[Node, Any]:
        env: dict[Node, Any] = {}

        def value(node: Node) -> Any:
            if node not in env:
                stored = node.op == "get_attr" or node in self._constant_nodes
                env[node] = self.constant(node) if stored else self._store.get(node, index)
            return env[node]

        for node in nodes:
            env[node] = execute(self.graph, node, value)
        return env

    def constant(self, node: Node) -> Any:
        """The value of a node that depends on stored tensors alone, as they are now."""
        if node not in self._constants:
            self._constants[node] = _evaluate(self.graph, node, self.constant)
        return self._constants[node]

    def forget(self) -> None:
        """Says that stored tensors were changed."""
        self._constants.clear()


class Beside:
    """A second walk, of the float model, taken only as far as the first one needs it.

    ``wanted`` are the values that will be asked for, each as often as it will be; the walk has to hold them.
    """

    def __init__(self, walk: Walk, wanted: Iterable[Node]) -> None:
        self.walk, self._next, self._left = walk, 0, Counter(wanted)
        self._made = {node for node in walk.graph.graph.nodes if node.op == "placeholder"}

    def reach(self, wanted: Node) -> None:
        """Advances until the value was made."""
        while wanted not in self._made:
            segment = self.walk.segments[self._next]
            self.walk.advance(segment)
            self._made.add(segment.output)
            self._next += 1

    def finish(self, wanted: Node) -> None:
        """Says that a value was asked for once more; after the last time it is dropped."""
        self._left[wanted] -= 1
        if not self._left[wanted]:
            self.walk.release(wanted)


def cut(graph: GraphModule, also: Iterable[Node] = ()) -> list[Segment]:
    """The segments of a graph, in order: up to each quantizer, each value read twice, each result, and ``also``."""
    constant = constant_nodes(graph)
    nodes = [n for n in graph.graph.nodes if n.op not in ("get_attr", "output") and n not in constant]
    results = next(node for node in graph.graph.nodes if node.op == "output").all_input_nodes
    kept = {n for n in nodes if n.op == "placeholder" or _is_kept(n) or n in results} | (set(also) & set(nodes))
    return [_closure(node, kept, constant) for node in nodes if node in kept and node.op != "placeholder"]


def _read_as_floats(layers: Iterable[Node]) -> set[Node]:
    """What layers read but for integers, which are kept as they are."""
    return {node for layer in layers if (node := layer.all_input_nodes[0]).target is not _DEQUANTIZE}


def _is_kept(node: Node) -> bool:
    if node.target is _QUANTIZE:
        return True
    return len(node.users) > 1 and node.target is not _DEQUANTIZE


def _closure(output: Node, kept: set[Node], constant: set[Node]) -> Segment:
    """What leads from kept values to ``output``."""
    inside, stack = {output}, list(output.all_input_nodes)
    reads: dict[Node, None] = {}
    while stack:
        node = stack.pop()
        if node in kept:
            reads[node] = None
        elif node not in inside and node not in constant:
            inside.add(node)
            stack.extend(node.all_input_nodes)
    ordered = tuple(node for node in output.graph.nodes if node in inside)
    return Segment(ordered, tuple(reads))


def _ancestors(node: Node, segment: Segment) -> tuple[Node, ...]:
    wanted, stack = {node}, list(node.all_input_nodes)
    while stack:
        other = stack.pop()
        if other in segment.nodes and other not in wanted:
            wanted.add(other)
            stack.extend(other.all_input_nodes)
    return tuple(n for n in segment.nodes if n in wanted)


def execute(graph: GraphModule, node: Node, value: Any) -> Any:
    """The result of one node, ``value`` giving that of each node it reads."""
    if node.target is _QUANTIZE:
        return _quantize(value(node.args[0]), *cast(tuple[Any, ...], node.args[1:]))
    if node.target is _DEQUANTIZE:
        return dequantize(value(node.args[0]), *cast(tuple[Any, ...], node.args[1:3]))
    return _evaluate(graph, node, value)


def _evaluate(graph: GraphModule, node: Node, value: Any) -> Any:
    if node.op == "get_attr":
        found: Any = graph
        for part in str(node.target).split("."):
            found = getattr(found, part)
        return found.detach() if isinstance(found, Tensor) else found
    args, kwargs = map_arg(node.args, value), map_arg(node.kwargs, value)
    if node.op == "call_function":
        return node.target(*args, **kwargs)  # type: ignore[operator]
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return graph.get_submodule(str(node.target))(*args, **kwargs)


def _quantize(x: Tensor, scale: float, zero_point: int, qmin: int, qmax: int, dtype: torch.dtype) -> Tensor:
    """As ``quantize_per_tensor``, in place on one copy: half its time."""
    steps = x.mul(1.0 / scale).round_()
    return (steps.add_(zero_point) if zero_point else steps).clamp_(qmin, qmax).to(dtype)


def dequantize(x: Tensor, scale: float, zero_point: int) -> Tensor:
    """Integers as the float32 values they stand for."""
    steps = x.to(torch.float32)
    return (steps.sub_(zero_point) if zero_point else steps).mul_(scale)


def _mean_of_integers(x: Tensor) -> Tensor:
    """The mean over the first dimension, kept as one sample, float32: far cheaper on bytes than on floats."""
    if x.device.type != "cpu" or x.dtype != torch.uint8 or len(x) > 256:
        return x.sum(0, dtype=torch.int32)[None] / len(x)
    return torch.from_numpy(x.numpy().sum(0, dtype=np.uint16).astype(np.float32))[None] / len(x)


def interpret(interpreter: Interpreter, batch: Any) -> Any:
    """What an interpreter makes of a batch, whether its inputs are given by name or by place."""
    names = [node for node in interpreter.module.graph.nodes if node.op == "placeholder"]  # type: ignore[union-attr]
    return interpreter.run(*arranged(batch, names))


def arranged(batch: Any, names: list[Node]) -> list[Any]:
    """The tensors of a batch, and what is no tensor among them, in the order of the graph's inputs."""
    if isinstance(batch, Mapping) and all(node.target in batch for node in names):
        return [batch[node.target] for node in names]
    leaves = pytree.tree_leaves(batch)
    return leaves if len(leaves) == len(names) else list(tensors(batch))
