"""A captured graph in half precision: weights and compute in 16 bits, and what it has in integers still in integers.

A quantize or a dequantize is spelt out, x/s + z rounded and cut or s (q − z), in float32 and within one kernel with
what is beside it once compiled: as operators inductor takes them for oneDNN's, also on a GPU, which has none of those.
Weights that are dequantized, having found no integer kernel, become constants. A quantizer reads float32, where a scale
of 1e-5 is no subnormal number, and so does an integer product multiply. Positions and time steps (``positions.py``),
sums of squares and the like (``sums.py``) and complex numbers stay in it. A number that hides places from a softmax,
−1e9 or float32's limit, is the limit of ``dtype`` here, beyond which torch takes none.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from qtool.form import DEQUANTIZE, QUANTIZE
from qtool.graphs.operators import aten, packet_of
from qtool.graphs.positions import positions
from qtool.graphs.sums import sums
from qtool.masks import within
from qtool.runtimes.torch_integer import IntegerProduct

_WITHOUT_HALF = (aten.cdist, aten._cdist_forward)
_BOUNDED = (aten.add, aten.clamp, aten.clamp_min)
PER_CHANNEL = (QUANTIZE[1], DEQUANTIZE[1])


def graphs(module: torch.nn.Module) -> Iterator[GraphModule]:
    """The captured graphs in a module."""
    return (part for part in module.modules() if isinstance(part, GraphModule))


def is_quantized(graph: GraphModule) -> bool:
    """Whether a graph has integers in it."""
    return any(node.target in DEQUANTIZE for node in graph.graph.nodes)


def halve(module: torch.nn.Module, dtype: torch.dtype) -> set[str]:
    """Has all of a module in ``dtype``, float16 or bfloat16, in place; gives the inputs that it takes in float32 still.

    Those are the ones that are quantized at once, and read by nothing else, and those that positions are made of.
    """
    wide: set[str] = set()
    scales: list[torch.Tensor] = []
    for graph in graphs(module):
        wide |= {node.name for node in graph.graph.find_nodes(op="placeholder") if _only_quantized(node)}
        scales += _halved(graph, dtype, wide)
    kept = {id(scale) for scale in scales}
    for part in module.modules():
        own = () if isinstance(part, IntegerProduct) else (*part._parameters.values(), *part._buffers.values())
        for tensor in own:
            if tensor is not None and tensor.is_floating_point() and id(tensor) not in kept:
                tensor.data = within(tensor.data, dtype).to(dtype)
    return wide


def _halved(graph: GraphModule, dtype: torch.dtype, wide: set[str]) -> list[torch.Tensor]:
    """Changes what a graph makes in float32, or converts to it; gives the constants that stay in it.

    Those are the scales of channels and what positions and sums are made of; inputs among it join ``wide``.
    """
    scales: list[torch.Tensor] = []
    single = positions(graph) | sums(graph) | _without_half(graph)
    widened: dict[Node, Node] = {}
    for node in list(graph.graph.nodes):
        if node in single:
            _widen(graph, node, single, widened)
            _stay(graph, node, single, dtype, scales)
            if node.op == "placeholder":
                wide.add(node.name)
        elif node.target in (*QUANTIZE, *DEQUANTIZE):
            _spell_out(graph, node, dtype, scales)
        elif node.op == "call_module" and isinstance(part := graph.get_submodule(str(node.target)), IntegerProduct):
            part.result = dtype
        elif node.op == "call_function":
            node.args, node.kwargs = pytree.tree_map(
                lambda value: dtype if value is torch.float32 else value, (node.args, node.kwargs)
            )
            _cut(node, dtype)
            if _makes_float32(node):
                node.kwargs = {**node.kwargs, "dtype": dtype}
            elif _promotes(node):
                _round_for(graph, node, list(node.users), dtype)
    graph.graph.eliminate_dead_code()
    graph.delete_all_unused_submodules()
    graph.recompile()
    return scales


def _widen(graph: GraphModule, node: Node, single: set[Node], widened: dict[Node, Node]) -> None:
    """Has a node that stays in float32 read float32, by one conversion of each value for all such nodes."""
    for source in node.all_input_nodes:
        value = source.meta.get("val")
        if source in single or not (value is None or (isinstance(value, torch.Tensor) and value.is_floating_point())):
            continue
        if source not in widened:
            with graph.graph.inserting_after(source):
                widened[source] = graph.graph.call_function(aten.to.dtype, (source, torch.float32))
        node.replace_input_with(source, widened[source])


def _without_half(graph: GraphModule) -> set[Node]:
    """What makes or reads complex numbers, and others for which torch has no kernel in 16 bits."""

    def is_complex(node: Node) -> bool:
        value = node.meta.get("val")
        return isinstance(value, torch.Tensor) and value.is_complex()

    return {
        node for node in graph.graph.nodes
        if is_complex(node) or any(map(is_complex, node.all_input_nodes))
        or packet_of(node) in _WITHOUT_HALF
    }  # fmt: skip


def _stay(graph: GraphModule, node: Node, single: set[Node], dtype: torch.dtype, kept: list[torch.Tensor]) -> None:
    """Has a node that stays in float32 in it, a constant too, and what else reads it read it in ``dtype``."""
    if node.op == "get_attr":
        kept.append(operator.attrgetter(str(node.target))(graph).detach().clone())
        node.target = f"{node.name}_single"
        graph.register_buffer(node.target, kept[-1])
    value, others = node.meta.get("val"), [user for user in node.users if user not in single and user.op != "output"]
    if isinstance(value, torch.Tensor) and value.is_floating_point() and others:
        _round_for(graph, node, others, dtype)


def _round_for(graph: GraphModule, node: Node, users: list[Node], dtype: torch.dtype) -> None:
    """Has these read what ``node`` gives in ``dtype``."""
    with graph.graph.inserting_after(node):
        rounded = graph.graph.call_function(aten.to.dtype, (node, dtype))
    for user in users:
        user.replace_input_with(node, rounded)


def _cut(node: Node, dtype: torch.dtype) -> None:
    """Cuts the numbers that an operator computes floats with; those it counts by are left."""
    value, schema = node.meta.get("val"), getattr(node.target, "_schema", None)
    if schema is None or not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return
    counts = {argument.name for argument in schema.arguments if "int" in str(argument.type)}
    names = [argument.name for argument in schema.arguments]

    def cut(name: str, value: Any) -> Any:
        return value if name in counts else _lifted(node, within(value, dtype), dtype)

    node.args = tuple(cut(name, value) for name, value in zip(names, node.args, strict=False))
    node.kwargs = {name: cut(name, value) for name, value in node.kwargs.items()}


def _lifted(node: Node, value: Any, dtype: torch.dtype) -> Any:
    """An epsilon that ``dtype`` would have for 0 is its least number, where it is added or is a bound."""
    least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    if packet_of(node) in _BOUNDED and isinstance(value, float) and 0 < abs(value) < least:
        return math.copysign(least, value)
    return value


def _spell_out(graph: GraphModule, node: Node, dtype: torch.dtype, scales: list[torch.Tensor]) -> None:
    """Replaces a quantize or dequantize: by a constant of ``dtype`` where it is one, else by its arithmetic."""
    with graph.graph.inserting_before(node):
        if all(source.op == "get_attr" for source in node.all_input_nodes):
            new = _constant(graph, node, dtype)
        else:
            new = _arithmetic(graph, node, dtype, scales)
    node.replace_all_uses_with(new)
    graph.graph.erase_node(node)


def _constant(graph: GraphModule, node: Node, dtype: torch.dtype) -> Node:
    """What an operator makes of nothing but what the graph holds."""
    args = torch.fx.map_arg(node.args, lambda source: operator.attrgetter(str(source.target))(graph))
    assert callable(node.target)
    return _hold(graph, f"{node.name}_value", node.target(*args).to(dtype))


def _arithmetic(graph: GraphModule, node: Node, dtype: torch.dtype, scales: list[torch.Tensor]) -> Node:
    """x/s + z, rounded to even and cut, or s (q − z), with the scale and zero point of all or of each channel."""
    call, inverse = graph.graph.call_function, node.target in QUANTIZE
    args: tuple[Any, ...] = node.args
    scale, zero_point, low, high, integers = *args[1:3], *args[-3:]
    if node.target in PER_CHANNEL:
        across = [-1] + [1] * (node.meta["val"].dim() - 1 - args[3])
        held = [operator.attrgetter(source.target)(graph).float().view(across).clone() for source in args[1:3]]
        held[0] = 1.0 / held[0] if inverse else held[0]
        scales += held
        scale, zero_point = (_hold(graph, f"{node.name}_{i}", tensor) for i, tensor in enumerate(held))
    elif inverse:
        scale = 1.0 / scale
    value = call(aten.to.dtype, (args[0], torch.float32))
    if inverse:
        rounded = call(aten.round.default, (call(aten.mul.Tensor, (value, scale)),))
        cut = call(aten.clamp.default, (call(aten.add.Tensor, (rounded, zero_point)), low, high))
        return call(aten.to.dtype, (cut, integers))
    return call(aten.to.dtype, (call(aten.mul.Tensor, (call(aten.sub.Tensor, (value, zero_point)), scale)), dtype))


def _hold(graph: GraphModule, name: str, tensor: torch.Tensor) -> Node:
    graph.register_buffer(name, tensor)
    return graph.graph.get_attr(name)


def _only_quantized(node: Node) -> bool:
    """Whether nothing reads a node's values but quantizers."""
    reading = [user for user in node.users if user.target is not aten.sym_size.int]
    return bool(reading) and all(user.target in QUANTIZE for user in reading)


def _promotes(node: Node) -> bool:
    """Whether an operator makes floats of integers, in the type that is torch's default: an index divided by a size."""
    values = [source.meta.get("val") for source in node.all_input_nodes]
    read = [value for value in values if isinstance(value, torch.Tensor)]
    made = node.meta.get("val")
    floats = any(value.is_floating_point() or value.is_complex() for value in read)
    converts = torch.float16 in node.args or torch.bfloat16 in node.args or "dtype" in node.kwargs
    return isinstance(made, torch.Tensor) and made.dtype is torch.float32 and bool(read) and not floats and not converts


def _makes_float32(node: Node) -> bool:
    """Whether an operator makes a tensor of none, in the type that is torch's default."""
    value, schema = node.meta.get("val"), getattr(node.target, "_schema", None)
    if schema is None or not isinstance(value, torch.Tensor) or value.dtype is not torch.float32:
        return False
    reads = any(isinstance(source.meta.get("val"), torch.Tensor) for source in node.all_input_nodes)
    return not reads and any(argument.name == "dtype" for argument in schema.arguments)
