"""A captured graph in half precision: weights and compute in 16 bits, and what it has in integers still in integers.

A quantize or a dequantize is spelt out, x/s + z rounded and cut or s (q − z), in float32 and within one kernel with
what is beside it once compiled: as operators inductor takes them for oneDNN's, also on a GPU, which has none of those.
Weights that are dequantized, having found no integer kernel, become constants. A quantizer reads float32, where a scale
of 1e-5 is no subnormal number, and so does an integer product multiply.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from qtool.runtimes.torch_integer import IntegerProduct

aten = torch.ops.aten
_QUANTIZING = ("quantize_per_tensor", "quantize_per_channel")
_DEQUANTIZING = ("dequantize_per_tensor", "dequantize_per_channel")


def graphs(module: torch.nn.Module) -> Iterator[GraphModule]:
    """The captured graphs in a module."""
    return (part for part in module.modules() if isinstance(part, GraphModule))


def is_quantized(graph: GraphModule) -> bool:
    """Whether a graph has integers in it."""
    return any(_is(node, *_DEQUANTIZING) for node in graph.graph.nodes)


def halve(module: torch.nn.Module, dtype: torch.dtype) -> set[str]:
    """Has all of a module in ``dtype``, float16 or bfloat16, in place; gives the inputs that it takes in float32 still.

    Those are the ones that are quantized at once, and read by nothing else.
    """
    wide: set[str] = set()
    for graph in graphs(module):
        wide |= {node.name for node in graph.graph.find_nodes(op="placeholder") if _only_quantized(node)}
        _halved(graph, dtype)
    for part in module.modules():
        own = () if isinstance(part, IntegerProduct) else (*part._parameters.values(), *part._buffers.values())
        for tensor in own:
            if tensor is not None and tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype)
    return wide


def _halved(graph: GraphModule, dtype: torch.dtype) -> None:
    """Changes what a graph makes in float32, or converts to it."""
    for node in list(graph.graph.nodes):
        if _is(node, *_DEQUANTIZING):
            _spell_out(graph, node, _dequantized, dtype)
        elif _is(node, *_QUANTIZING):
            _spell_out(graph, node, _quantized, node.args[5])
        elif node.op == "call_module" and isinstance(part := graph.get_submodule(str(node.target)), IntegerProduct):
            part.result = dtype
        elif node.op == "call_function":
            node.args, node.kwargs = pytree.tree_map(
                lambda value: dtype if value is torch.float32 else value, (node.args, node.kwargs)
            )
            if _makes_float32(node):
                node.kwargs = {**node.kwargs, "dtype": dtype}
    graph.graph.eliminate_dead_code()
    graph.delete_all_unused_submodules()
    graph.recompile()


def _spell_out(graph: GraphModule, node: Node, way: Callable[[Any, Node], Any], dtype: torch.dtype) -> None:
    """Replaces a quantize or dequantize: by a constant of ``dtype`` where it is one, else by ``way``'s operators."""
    constant = _constant(graph, node)
    with graph.graph.inserting_before(node):
        if constant is not None:
            name = f"halved_{node.name}"
            graph.register_buffer(name, constant.to(dtype))
            new = graph.graph.get_attr(name)
        else:
            new = graph.graph.call_function(aten.to.dtype, (way(graph.graph.call_function, node), dtype))
    node.replace_all_uses_with(new)
    graph.graph.erase_node(node)


def _quantized(call: Any, node: Node) -> Node:
    x, scale, zero_point, low, high = node.args[:5]
    scaled = call(aten.mul.Tensor, (call(aten.to.dtype, (x, torch.float32)), 1.0 / scale))  # type: ignore[operator]
    rounded = call(aten.add.Tensor, (call(aten.round.default, (scaled,)), zero_point))
    cut: Node = call(aten.clamp.default, (rounded, low, high))
    return cut


def _dequantized(call: Any, node: Node) -> Node:
    q, scale, zero_point = node.args[:3]
    shifted = call(aten.sub.Tensor, (call(aten.to.dtype, (q, torch.float32)), zero_point))
    value: Node = call(aten.mul.Tensor, (shifted, scale))
    return value


def _constant(graph: GraphModule, node: Node) -> torch.Tensor | None:
    """The value of an operator that reads nothing but what the graph holds; None of any other."""
    if not node.all_input_nodes or any(source.op != "get_attr" for source in node.all_input_nodes):
        return None
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda source: _held(graph, source))
    assert callable(node.target)
    value: torch.Tensor = node.target(*args, **kwargs)
    return value


def _only_quantized(node: Node) -> bool:
    """Whether nothing reads a node's values but quantizers."""
    reading = [user for user in node.users if user.target is not aten.sym_size.int]
    return bool(reading) and all(_is(user, *_QUANTIZING) for user in reading)


def _is(node: Node, *names: str) -> bool:
    return getattr(node.target, "namespace", "") == "quantized_decomposed" and str(node.target).split(".")[1] in names


def _held(graph: GraphModule, node: Node) -> Any:
    value: Any = graph
    for part in str(node.target).split("."):
        value = getattr(value, part)
    return value


def _makes_float32(node: Node) -> bool:
    """Whether an operator makes a tensor of none, in the type that is torch's default."""
    value, schema = node.meta.get("val"), getattr(node.target, "_schema", None)
    if schema is None or not isinstance(value, torch.Tensor) or value.dtype is not torch.float32:
        return False
    reads = any(isinstance(source.meta.get("val"), torch.Tensor) for source in node.all_input_nodes)
    return not reads and any(argument.name == "dtype" for argument in schema.arguments)
