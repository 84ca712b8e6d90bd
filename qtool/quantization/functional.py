"""One spelling for each operator of a captured graph: nothing in place, paddings as numbers.

An in-place operator becomes its functional twin (``relu_`` → ``relu``), and whatever reads the overwritten tensor later
reads the result. That is only right while no other name for the same memory is read later: a view that was taken
before, or the tensor that the overwritten one is a view of. Where one is, or where a part of a tensor is assigned to,
torch's own functionalization is asked, which knows all views and spells batch-norm and flatten differently. A
quantizer on a tensor that is still written into would separate it from its views, so none may be left.

``padding="same"`` and ``"valid"`` become numbers, with a zero padding in front where they are not symmetric. The parts
of ``chunk`` and ``split`` become slices, each a value of its own. ``clamp(min=0)`` is a relu,
pooling a row to one cell is a mean, and attention without an axis for heads has one head.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from qtool.form import as_graph
from qtool.quantization.quiet import quiet_pytree

aten = torch.ops.aten

FUNCTIONAL = {
    aten.relu_.default: aten.relu.default,
    aten.hardtanh_.default: aten.hardtanh.default,
    aten.relu6_.default: aten.relu6.default,
    aten.hardswish_.default: aten.hardswish.default,
    aten.hardsigmoid_.default: aten.hardsigmoid.default,
    aten.silu_.default: aten.silu.default,
    aten.mish_.default: aten.mish.default,
    aten.sigmoid_.default: aten.sigmoid.default,
    aten.tanh_.default: aten.tanh.default,
    aten.leaky_relu_.default: aten.leaky_relu.default,
    aten.elu_.default: aten.elu.default,
    aten.clamp_.default: aten.clamp.default,
    aten.clip_.default: aten.clip.default,
    aten.clamp_min_.default: aten.clamp_min.default,
    aten.clamp_max_.default: aten.clamp_max.default,
    aten.add_.Tensor: aten.add.Tensor,
    aten.sub_.Tensor: aten.sub.Tensor,
    aten.mul_.Tensor: aten.mul.Tensor,
    aten.div_.Tensor: aten.div.Tensor,
    aten.dropout_.default: aten.dropout.default,
    aten.feature_dropout_.default: aten.feature_dropout.default,
}
DROPOUTS = (aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default)
_ASSERTIONS = (aten._assert_tensor_metadata.default, aten._assert_scalar.default)
_CLAMPS = (aten.clamp.default, aten.clamp_min.default)
_SPLITS = (aten.chunk.default, aten.split.Tensor, aten.split.sizes, aten.split_with_sizes.default)
_PADDED = {aten.conv1d.padding: aten.conv1d.default, aten.conv2d.padding: aten.conv2d.default}


def make_functional(graph_module: GraphModule) -> None:
    """Rewrites in-place operators, where that keeps the meaning, and paddings given as words."""
    graph = graph_module.graph
    for node in list(graph.nodes):
        if _is_guard(node) or _counts_batches(node):
            graph.erase_node(node)
            continue
        if node.target in FUNCTIONAL and _is_safe(node):
            _replace_later(node)
        _spell(node)
    graph.eliminate_dead_code()
    graph.lint()
    graph_module.recompile()


def _is_guard(node: Node) -> bool:
    """Whether a node only checks shapes, types or sizes of what was captured."""
    return (node.op == "call_module" and "guard" in str(node.target)) or node.target in _ASSERTIONS


def _spell(node: Node) -> None:
    """Gives one operator the spelling that the patterns of targets know."""
    if node.target is aten.clip.default:
        node.target = aten.clamp.default
    if node.target in _PADDED:
        _spell_padding(node)
    elif node.target in _CLAMPS and tuple(node.args[1:]) in ((0,), (0, None)):
        node.target, node.args = aten.relu.default, node.args[:1]
    elif node.target is aten.adaptive_avg_pool1d.default and node.args[1] in ([1], (1,)):
        node.target, node.args = aten.mean.dim, (node.args[0], [2], True)
    elif node.target is aten.scaled_dot_product_attention.default and node.meta["val"].dim() == 3:
        _spell_attention(node)
    elif node.target is operator.getitem and isinstance(node.args[0], Node) and node.args[0].target in _SPLITS:
        _slice_part(node)


def mutations(graph_module: GraphModule) -> list[Node]:
    """The operators that still write into a tensor."""
    schemas = [(node, getattr(node.target, "_schema", None)) for node in graph_module.graph.nodes]
    return [node for node, schema in schemas if schema is not None and schema.is_mutable]


def functionalized(program: torch.export.ExportedProgram) -> GraphModule:
    """The program's graph after torch's functionalization, in evaluation form, respelled as captured graphs are.

    What the model writes into its inputs and buffers is dropped: it is no output.
    """
    _drop_idle_dropout(program)
    with quiet_pytree():
        graph_module = as_graph(program.run_decompositions({}))
    for node in list(graph_module.graph.nodes):
        if node.target is aten.copy_.default and node.args[0].op in ("placeholder", "get_attr"):
            node.replace_all_uses_with(node.args[1])
            graph_module.graph.erase_node(node)
        elif node.target is aten._native_batch_norm_legit_no_training.default:
            _respell_norm(node)
    graph_module.graph.eliminate_dead_code()
    make_functional(graph_module)
    return graph_module


def _drop_idle_dropout(program: torch.export.ExportedProgram) -> None:
    """Removes dropout that is off: it returns its input's own memory, which functionalization takes for a copy."""
    graph = program.graph_module.graph
    for node in list(graph.nodes):
        if node.target in DROPOUTS and node.args[2] is False and not any(user.op == "output" for user in node.users):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    program.graph_module.recompile()


def _respell_norm(node: Node) -> None:
    *tensors, momentum, epsilon = node.args
    with node.graph.inserting_before(node):
        norm = node.graph.call_function(aten.batch_norm.default, (*tensors, False, momentum, epsilon, False))
    for item in list(node.users):
        if item.args[1] == 0:
            norm.meta = dict(item.meta)
            norm.meta["nn_module_stack"] = node.meta.get("nn_module_stack")
            item.replace_all_uses_with(norm)


def _counts_batches(node: Node) -> bool:
    """Batch-norm's own count, which only a cumulative average would need."""
    source = node.args[0] if node.target is aten.add_.Tensor else None
    return isinstance(source, Node) and str(source.target).endswith("num_batches_tracked") and not node.users


def _replace_later(node: Node) -> None:
    source = node.args[0]
    assert isinstance(source, Node)
    order = _order(node)
    for user in list(source.users):
        if user is not node and order[user] > order[node]:
            user.replace_input_with(source, node)
    node.target = FUNCTIONAL[node.target]  # type: ignore[index]


def _is_safe(node: Node) -> bool:
    """Whether no name for the overwritten memory, but the one overwritten, is read after ``node``."""
    source = node.args[0]
    if not isinstance(source, Node):
        return False
    memory = _memory(source)
    if memory.op == "get_attr":
        return False
    order = _order(node)
    others = [n for n in order if n not in (source, node) and order[n] < order[node] and _memory(n) is memory]
    return not any(order[user] > order[node] for other in others for user in other.users)


def _order(node: Node) -> dict[Node, int]:
    return {other: index for index, other in enumerate(node.graph.nodes)}


def _memory(node: Node) -> Node:
    """The node whose memory ``node`` names: what it is a view of, however often."""
    while node.op == "call_function":
        source, index = node.args[0] if node.args else None, 0
        if node.target is operator.getitem and isinstance(source, Node):
            index = node.args[1] if isinstance(node.args[1], int) else 0
            producer, source = source, source.args[0]
        else:
            producer = node
        if not (isinstance(source, Node) and _shares_memory(producer, index)):
            break
        node = source
    return node


def _shares_memory(producer: Node, index: int) -> bool:
    """Whether an operator's output is (or, with dropout switched off, is in fact) its first argument's memory."""
    if producer.target in DROPOUTS:
        return producer.args[2] is False
    schema = getattr(producer.target, "_schema", None)
    returns: Any = schema.returns if schema is not None else ()
    listed = returns[index] if index < len(returns) else returns[0] if len(returns) == 1 else None
    return listed is not None and listed.alias_info is not None


def _spell_padding(node: Node) -> None:
    given: list[Any] = [*node.args, *[None, 1, "valid", 1, 1][len(node.args) - 2 :]]
    source, weight, bias, stride, word, dilation, groups = given
    assert isinstance(source, Node)
    assert isinstance(weight, Node)
    sizes = list(weight.meta["val"].shape[2:])
    strides, dilations = (_listed(value, len(sizes)) for value in (stride, dilation))
    total = [d * (k - 1) for d, k in zip(dilations, sizes, strict=True)] if word == "same" else [0] * len(sizes)
    if any(t % 2 for t in total):
        ends = [end for t in reversed(total) for end in (t // 2, t - t // 2)]
        with node.graph.inserting_before(node):
            padded = node.graph.call_function(aten.constant_pad_nd.default, (source, ends, 0.0))
        padded.meta = {**node.meta, "val": _padded(source.meta["val"], total)}
        source, total = padded, [0] * len(sizes)
    node.target = _PADDED[node.target]  # type: ignore[index]
    node.args = (source, weight, bias, strides, [t // 2 for t in total], dilations, groups)


def _padded(value: Tensor, total: list[int]) -> Tensor:
    """A stand-in of the padded shape; computing it would fix the batch."""
    return value.new_empty([*value.shape[:2], *(size + t for size, t in zip(value.shape[2:], total, strict=True))])


def _slice_part(node: Node) -> None:
    """Writes one part of a split tensor as a slice of it, where the split dimension has a fixed size."""
    split, index = node.args
    assert isinstance(split, Node)
    assert isinstance(index, int)
    parts, axis = split.meta["val"], split.args[2] if len(split.args) > 2 else 0
    sizes = [part.shape[axis] for part in parts]
    if not all(isinstance(size, int) for size in sizes):
        return
    start = sum(sizes[:index])
    with node.graph.inserting_before(node):
        part = node.graph.call_function(aten.slice.Tensor, (split.args[0], axis, start, start + sizes[index]))
    part.meta = {**split.meta, **node.meta, "val": parts[index]}
    part.meta.setdefault("nn_module_stack", split.meta.get("nn_module_stack"))
    node.replace_all_uses_with(part)
    node.graph.erase_node(node)


def _spell_attention(node: Node) -> None:
    """Gives attention over batch × tokens × features an axis of one head, which its ONNX form asks for."""
    values = [arg if isinstance(arg, Node) else None for arg in node.args[:4]]
    spread = list(node.args)
    for index, value in enumerate(values):
        if value is not None and value.meta["val"].dim() == 3:  # a mask of tokens × tokens is for all heads
            with node.graph.inserting_before(node):
                spread[index] = one_head = node.graph.call_function(aten.unsqueeze.default, (value, 1))
            one_head.meta = {**node.meta, "val": value.meta["val"].unsqueeze(1)}
    with node.graph.inserting_after(node):
        mixed = node.graph.call_function(aten.squeeze.dim, (node, 1))
    mixed.meta = dict(node.meta)
    node.replace_all_uses_with(mixed, delete_user_cb=lambda user: user is not mixed)
    node.args, node.meta = tuple(spread), {**node.meta, "val": node.meta["val"].unsqueeze(1)}


def _listed(value: Any, count: int) -> list[int]:
    values = list(value) if isinstance(value, tuple | list) else [value]
    return values * count if len(values) == 1 else values
