"""The eager door: a model quantized by hand with torch.ao, rebuilt module by module into the one quantized form.

Such a model went through ``fuse_modules``, ``prepare`` (or ``prepare_qat``) and ``convert``; its tensors are quantized
tensors and its modules call kernels that no exporter can read. Each quantized module is replaced by one that
says in plain operators what the kernel means (``eager_modules.py``). Between modules plain tensors flow, which
hold exactly the values of the quantized ones, so the user's own ``forward`` is captured as any other model.

What torch does to quantized tensors outside of those modules (poolings, reshapes, a ReLU) keeps the scale and
zero point of its input; the quantizers that say so are inserted after the capture.

Scales and zero points are carried as they are. ``fbgemm`` calibrates activations for 0…127 (``reduce_range``),
but its kernels clip at 0 and 255, and so do the quantizers here; weights have −128…127.

Left out on purpose: dynamic quantization, embeddings, recurrent and transposed layers, operations of
``QFunctional`` with a Python number (each refused by name), and models that FX converted.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
import warnings
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from qtool.errors import QtoolError, UsageError, kind_of, one_line
from qtool.form import Plan, QuantizedModel, Unit, quantized
from qtool.graphs.edits import copied, owner, parameter, remove_identities, set_parameter
from qtool.graphs.operators import ADAPTIVE_POOLS, AVERAGE_POOLS, MAX_POOLS, aten
from qtool.nested import call, tensors
from qtool.quantization.capturing.capture import capture
from qtool.quantization.capturing.float_form import float_form
from qtool.quantization.engines.align import align, label_units
from qtool.quantization.engines.eager_modules import (
    Leave,
    Requantized,
    converted,
    is_observed,
    is_quantized,
    paths_of,
    rebuild,
)
from qtool.quantization.integers import finish
from qtool.quantization.placement import Placed, Placement
from qtool.quantization.rewrites.constants import constant_nodes
from qtool.quantization.rewrites.matrices import flatten_quantized
from qtool.quantization.targets import ORT_CPU, RELU_LIKE, Target
from qtool.system.quiet import quiet_torch_ao

Q, DQ = quantized.quantize_per_tensor.default, quantized.dequantize_per_tensor.default
Grid = tuple[Any, ...]
"""scale, zero_point, quant_min, quant_max, dtype: the arguments of a quantizer behind its tensor."""

# What torch computes on quantized tensors with the scale and zero point of the (first) input.
_KEEPS_GRID = (
    *RELU_LIKE, *MAX_POOLS, *AVERAGE_POOLS, *ADAPTIVE_POOLS, aten.mean.dim, aten.cat.default,
    aten.flatten.using_ints, aten.reshape.default, aten.permute.default, aten.transpose.int,
    aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default, aten.contiguous.default,
    aten.clone.default, aten.slice.Tensor, aten.select.int, aten.expand.default, aten.pixel_shuffle.default,
    aten.channel_shuffle.default, aten.leaky_relu.default, aten.upsample_nearest2d.vec, aten.upsample_bilinear2d.vec,
    aten.pad.default, aten.chunk.default, aten.split.Tensor, aten.split_with_sizes.default, operator.getitem,
)  # fmt: skip
# Averages on one grid end in a half as often as one in their count. In steps, not in real units, a half is exact.
_AVERAGES = (aten.mean.dim, *AVERAGE_POOLS, *ADAPTIVE_POOLS)
_OWN_GRID: dict[Any, Grid] = {aten.sigmoid.default: (1 / 256, 0, 0, 255, torch.uint8)}
_LEAST_SQNR_DB = 10.0


def from_eager(
    model: nn.Module, example_inputs: tuple[Any, ...], float_model: nn.Module | None = None
) -> QuantizedModel:
    """Rebuilds a model prepared or converted with eager torch.ao as the quantized form; ``model`` stays as it was.

    ``example_inputs`` are the model's arguments, float tensors, batch first. A prepared model is converted first (a
    copy of it). ``float_model``, the model before any of this, serves the gates that compare with it.

    Raises QtoolError for a model without quantized or observed modules, observers that saw no data, a model that
    does not run on ``example_inputs``, and modules or operations that have no counterpart here, by name.
    """
    copied_model = _converted(model)
    expected = _outputs(copied_model, example_inputs)
    rebuild(copied_model)
    own, leaves = (paths_of(copied_model, kind) for kind in (Requantized, Leave))
    graph = capture(copied_model, example_inputs)
    remove_identities(graph)
    _name_owners(graph, own)
    _insert_quantizers(graph, own, leaves)
    _absorb_activations(graph)
    flatten_quantized(graph)
    placement = Placement(_stripped(graph), _as_given(ORT_CPU))
    pairs = align(placement.graph_module, graph)
    label_units(placement, pairs)
    units = tuple(_unit(placed, pairs) for placed in placement.placed if placed.unit.kind != "move")
    plan = Plan(ORT_CPU.name, units, finish(graph, ORT_CPU))
    float_graph = float_form(float_model, example_inputs, merged=False) if float_model is not None else None
    made = QuantizedModel(graph, plan, example_inputs, float_graph)
    _check(made, expected)
    return made


def require_eager(model: Any) -> None:
    """Raises UsageError for what is no module, QtoolError for a module with nothing quantized or observed in it."""
    if not isinstance(model, nn.Module):
        raise UsageError(
            "argument 'quantized'", "a quantized model or a run directory", kind_of(model),
            "pass what qtool.quantize returned",
        )  # fmt: skip
    if not any(is_observed(module) or is_quantized(module) for module in model.modules()):
        raise QtoolError(
            f"eager model '{type(model).__name__}'", "modules that torch.ao prepared or converted", "none",
            "call torch.ao.quantization.prepare and calibrate it, or give the float model to qtool.quantize",
        )  # fmt: skip


# From a prepared model to a converted one that is known to run.


def _converted(model: nn.Module) -> nn.Module:
    require_eager(model)
    made = copy.deepcopy(model).cpu().eval()
    if not any(map(is_observed, model.modules())):
        return made
    with quiet_torch_ao():
        warnings.filterwarnings("error", message=_NO_DATA)
        try:
            return converted(made)
        except UserWarning as warning:
            raise QtoolError(
                f"eager model '{type(model).__name__}'", "observers that saw calibration data", one_line(warning)[:120],
                "run calibration batches through the prepared model",
            ) from warning  # fmt: skip


_NO_DATA = ".*must run observer before"


def _outputs(model: nn.Module, example: Any) -> list[torch.Tensor]:
    try:
        with torch.no_grad(), quiet_torch_ao():
            outputs = call(model, example)
    except Exception as error:
        raise QtoolError(
            f"eager model '{type(model).__name__}'", "a converted model that runs on example_inputs",
            one_line(f"{type(error).__name__}: {error}")[:200],
            "put QuantStub and DeQuantStub around what is quantized, and FloatFunctional in place of +, * and cat",
        ) from error  # fmt: skip
    return [t.dequantize() if t.is_quantized else t for t in tensors(outputs)]


# Passes over the captured graph.


def _name_owners(graph: GraphModule, modules: set[str]) -> None:
    """Gives the operators of a rebuilt module the path that the user knows it by."""
    for node in graph.graph.nodes:
        if node.op == "call_function" and (path := _within(node, modules)):
            node.meta["owner"] = path


def _within(node: Node, modules: set[str]) -> str:
    """The path of the module in ``modules`` that the operator is part of; empty where there is none."""
    path = owner(node)
    while path and path not in modules:
        path = path.rpartition(".")[0]
    return path


def _insert_quantizers(graph: GraphModule, own: set[str], leaves: set[str]) -> None:
    """Puts a quantizer behind every operator that torch runs on quantized tensors outside of a module.

    Modules in ``own`` have quantizers of their own; behind those in ``leaves`` values are float.
    """
    grids: dict[Node, Grid] = {}
    marks = [n for n in graph.graph.nodes if n.target is aten.clone.default and _within(n, leaves)]
    for node in list(graph.graph.nodes):
        operands = [n for n in node.all_input_nodes if n in grids]
        if node.target is DQ:
            grids[node] = tuple(node.args[1:])
        elif node.op == "call_function" and operands and node not in marks and not _within(node, own):
            _carry(graph, node, operands[0], grids)
    for mark in marks:
        mark.replace_all_uses_with(mark.args[0])
        graph.graph.erase_node(mark)
    graph.recompile()


def _carry(graph: GraphModule, node: Node, operand: Node, grids: dict[Node, Grid]) -> None:
    """Gives the result of ``node`` the grid that torch's kernel for quantized tensors gives it."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor | list | tuple) or (
        isinstance(value, torch.Tensor) and not value.is_floating_point()
    ):
        return
    if node.target not in _OWN_GRID and node.target not in _KEEPS_GRID:
        name = str(node.target).removeprefix("aten.")
        raise QtoolError(
            f"eager model, '{owner(node) or node.name}'", "an operation that torch has for quantized tensors",
            f"{name} on quantized values", "put a DeQuantStub before it, or use FloatFunctional",
        )  # fmt: skip
    grid = _OWN_GRID.get(node.target, grids[operand])
    if not isinstance(value, torch.Tensor):  # several parts; each has its own quantizer
        grids[node] = grid
    elif node.target in _AVERAGES:
        steps = (1.0, *grid[1:])
        with graph.graph.inserting_before(node):
            integers = graph.graph.call_function(DQ, (operand.args[0], *steps))
        integers.meta.update(operand.meta)
        node.replace_input_with(operand, integers)
        grids[_quantized(graph, node, steps, grid)] = grid
    else:
        grids[_quantized(graph, node, grid, grid)] = grid


def _quantized(graph: GraphModule, node: Node, written: Grid, read: Grid) -> Node:
    """Quantizes the result of ``node`` on one grid; its readers get it, dequantized on another, which is returned."""
    readers = list(node.users)
    with graph.graph.inserting_after(node):
        integers = graph.graph.call_function(Q, (node, *written))
    with graph.graph.inserting_after(integers):
        result = graph.graph.call_function(DQ, (integers, *read))
    for reader in readers:
        reader.replace_input_with(node, result)
    integers.meta["val"], result.meta["val"] = node.meta["val"].to(written[-1]), node.meta["val"]
    integers.meta["owner"] = result.meta["owner"] = owner(node)
    return result


def _absorb_activations(graph: GraphModule) -> None:
    """Moves a clip that changes no integer of the grid it is applied to before the quantizer, into the unit there.

    Elsewhere it stays an operator between integers: a kernel clips where its output's grid ends, and only there.
    """
    for node in list(graph.graph.nodes):
        if node.target not in RELU_LIKE or node.args[0].target is not DQ:
            continue
        read, before = node.args[0], node.args[0].args[0]
        source = before.args[0]
        alone = len(read.users) == len(before.users) == 1 and source.op == "call_function"
        if alone and source.target not in RELU_LIKE and _keeps_all(node, tuple(read.args[1:])):
            node.replace_input_with(read, source)
    graph.graph.eliminate_dead_code()
    graph.recompile()


def _keeps_all(clip: Node, grid: Grid) -> bool:
    """Whether every value of the grid lies within the bounds of a clipping operator."""
    scale, zero_point, least, greatest, _ = grid
    low, high = (zero_point + round(bound / scale) if bound is not None else None for bound in _bounds(clip))
    return (low is None or low <= least) and (high is None or high >= greatest)


def _bounds(clip: Node) -> tuple[float | None, float | None]:
    """The (low, high) of a clipping operator; None where it has no bound."""
    fixed = {aten.relu.default: (0.0, None), aten.relu6.default: (0.0, 6.0)}
    if clip.target in fixed:
        return fixed[clip.target]
    given = dict(zip(("min", "max"), clip.args[1:], strict=False)) | dict(clip.kwargs)
    default = (-1.0, 1.0) if clip.target is aten.hardtanh.default else (None, None)
    low, high = given.get("min", given.get("min_val", default[0])), given.get("max", given.get("max_val", default[1]))
    return low, high  # type: ignore[return-value]


def _stripped(quantized_graph: GraphModule) -> GraphModule:
    """The graph without quantizers, its weights float constants: what a placement is made on.

    An alias stays where a quantizer was, so that nothing is taken for fused across it.
    """
    graph = copied(quantized_graph)
    constants = constant_nodes(graph)
    for node in list(graph.graph.nodes):
        if node.target is quantized.dequantize_per_channel.default and node in constants:
            name = f"{str(node.args[0].target).replace('.', '_')}_float"
            stored = [parameter(graph, argument) for argument in node.args[:3]]
            set_parameter(graph, name, node.target(*stored, *node.args[3:]))
            with graph.graph.inserting_before(node):
                node.replace_all_uses_with(graph.graph.get_attr(name))
        elif node.target is Q:
            node.replace_all_uses_with(node.args[0])
        elif node.target is DQ:
            node.target, node.args = aten.alias.default, node.args[:1]
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


# The plan, and the proof that the rebuilding was right.


def _as_given(target: Target) -> Target:
    """The target for a model whose quantizers are there already: which operands are integer, they say."""
    given = (dataclasses.replace(pattern, needs_integer_inputs=False) for pattern in target.patterns)
    return dataclasses.replace(target, patterns=tuple(given))


def _unit(placed: Placed, pairs: dict[Node, Node]) -> Unit:
    """The unit, integer where the model has it so."""
    if placed.pattern is None:
        return placed.unit
    anchor = pairs[placed.anchor]
    stored = [n for n in anchor.all_input_nodes if n.target is quantized.dequantize_per_channel.default]
    inputs = [n for n in anchor.all_input_nodes if n.op != "get_attr" and n not in stored]
    weighted = not placed.pattern.weighted or anchor.args[1] in stored
    ends = all(user.target is Q for user in pairs[placed.output].users)
    if weighted and ends and all(n.target is DQ for n in inputs):
        return placed.unit
    return dataclasses.replace(
        placed.unit, integer=False, weight_bits=None, reason="float in the model as it was given"
    )


def _check(made: QuantizedModel, expected: list[torch.Tensor]) -> None:
    """Raises QtoolError where the rebuilt graph is far from the model on the example: an operation was misread."""
    got = list(tensors(made(made.example)))
    for want, have in zip(expected, got, strict=True):
        error = (want.float() - have.float()).square().sum()
        if error > 0 and 10 * torch.log10(want.float().square().sum() / error) < _LEAST_SQNR_DB:
            raise QtoolError(
                "eager model", "a rebuilt graph that gives the model's own outputs", "others", "report this model"
            )
