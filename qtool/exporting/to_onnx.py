"""From a captured graph to ONNX: torch's own exporter, then qtool's passes.

``torch.onnx.export(dynamo=True)`` translates operator by operator; quantize and dequantize become
QuantizeLinear and DequantizeLinear with the weights as int8 initializers. What the exporter leaves for
a runtime to trip over is mended by the passes, one file each. The units' names travel: the i-th
activation quantizer of the graph is the i-th QuantizeLinear of the file, which is checked, not assumed.

Before it translates, the exporter traces a program anew to decompose operators without an ONNX form. That is most of
its time, and the graphs here rarely hold such an operator: those that do not are translated as they are
(:class:`Decomposed`).
"""

from __future__ import annotations

import contextlib
import logging
import operator
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from torch.fx import GraphModule

from qtool.errors import QtoolError, UsageError, one_line
from qtool.exporting import onnx_file
from qtool.exporting.exporter import distinct_units, exact_constants, quicker
from qtool.exporting.operators import adaptive_pools, attention, norms, plain_forms, recurrent
from qtool.exporting.passes import (
    activations,
    bare_weights,
    behind_layers,
    biases,
    block_products,
    casts,
    channel_pads,
    clips_apart,
    conv_pads,
    cubic_reductions,
    even_channels,
    even_inputs,
    exact_sums,
    expands,
    faint_biases,
    faint_shares,
    flat_means,
    float_units,
    folded,
    global_pool,
    hard_sigmoid,
    int4,
    joins,
    kept_axes,
    linear_zeros,
    lookups,
    mean_pools,
    metadata,
    names,
    norm_scales,
    own_zeros,
    pads,
    parts,
    pixels,
    pointwise_pads,
    pool_pads,
    root_means,
    single_columns,
    sizes,
    smooth_resizes,
    stem,
    stored,
    strides,
    wide_gates,
    wide_groups,
    wraps,
)
from qtool.form import Plan, QuantizedModel, quantize_nodes, unit_of
from qtool.graphs import complex_numbers
from qtool.graphs.programs import line_of, program_of
from qtool.graphs.recurrent import whole_sequences
from qtool.graphs.structures import output_names
from qtool.system.files import atomic_path

NO_BARE_MOVES = 20
"""The last opset in which ONNX Runtime 1.31 opens a file whose int8 values are moved without a pair of their own."""
OPSETS = {"ort-cpu": 21, "tensorrt": 19, "openvino": NO_BARE_MOVES}
EXTERNAL_DATA_BYTES = 2_000_000_000  # protobuf cannot hold 2 GiB

aten = torch.ops.aten

Pass = Callable[[ir.Model], int]
PASSES: dict[str, tuple[Pass, ...]] = {
    "ort-cpu": (
        pixels.apply, global_pool.apply, activations.apply, hard_sigmoid.apply, conv_pads.apply, pads.apply,
        biases.apply, clips_apart.apply, float_units.apply, stem.apply, lookups.apply,
    ),
    "openvino": (
        pixels.apply, global_pool.apply, activations.apply, strides.apply, biases.apply, bare_weights.apply,
        behind_layers.apply, lookups.apply, expands.apply, kept_axes.apply, flat_means.apply, joins.apply,
        norm_scales.apply, faint_biases.apply, linear_zeros.apply, own_zeros.apply, channel_pads.apply,
    ),
    "tensorrt": (global_pool.apply, activations.apply, conv_pads.apply),
}  # fmt: skip
"""What is mended in a file, by target: operators on integers themselves are ONNX Runtime's alone."""
MISREAD: dict[str, tuple[Pass, ...]] = {
    "ort-cpu": (cubic_reductions.apply,),
    "tensorrt": (cubic_reductions.apply,),
    "openvino": (
        wraps.apply, conv_pads.apply, single_columns.apply, pointwise_pads.apply, smooth_resizes.apply,
    ),
}  # fmt: skip
"""What takes out of a file, integer or not, what a target's runtime does not open it with, or computes otherwise."""
FUSED: dict[str, tuple[Pass, ...]] = {"ort-cpu": (root_means.apply, faint_shares.apply)}
"""What writes operators of a file, integer or not, as a target's runtime is quick with, or finds its own kernel by."""
QUICK: dict[str, tuple[Pass, ...]] = {
    "ort-cpu": (
        mean_pools.apply, wide_groups.apply, even_channels.apply, even_inputs.apply, wide_gates.apply,
    ),
}  # fmt: skip
"""What gives integer layers, once it is settled which these are, the form that a target's kernels are quick with."""
LAST: dict[str, tuple[Pass, ...]] = {"ort-cpu": (exact_sums.apply,)}
"""What makes of a finished file, and says in it, how a target's runtime is to open it."""
NUMBERS_OPSET = 21
"""From it on ONNX knows weights in 4 bits, and a scale for each block of inputs."""
BLOCK_PRODUCTS: dict[str, Callable[[ir.Model, Collection[str]], int]] = {
    "ort-cpu": block_products.apply, "openvino": block_products.join_groups,
}  # fmt: skip
"""What gives layers that multiply stored integers the form in which a target does."""


def default_opset(plan: Plan) -> int:
    """What the target's runtime does best with, and that knows the numbers that the plan stores."""
    return max(OPSETS[plan.target], NUMBERS_OPSET if _new_numbers(plan) else 0)


def require_opset(plan: Plan, opset: int) -> None:
    """Raises UsageError for an opset that does not know the numbers that the plan stores."""
    if opset < NUMBERS_OPSET and (what := _new_numbers(plan)):
        raise UsageError("--opset", f"{NUMBERS_OPSET} or more for {what}", str(opset), "leave --opset out")


def _new_numbers(plan: Plan) -> str | None:
    """What a plan stores that not all opsets know, if anything."""
    if any(unit.weight_bits == 4 for unit in plan.units):
        return "4-bit weights"
    return "scales of groups" if any(unit.block for unit in plan.units) else None


def float_to_onnx(graph: GraphModule, example: Any, opset: int, target: str = "ort-cpu") -> ir.Model:
    """The float graph as an ONNX model with a dynamic batch for a target, its nodes named after the modules."""
    model, units, outputs = _translate(graph, example, opset)
    names.apply(model, units, outputs)
    for rewrite in (*MISREAD.get(target, ()), *FUSED.get(target, ())):
        rewrite(model)
    metadata.strip(model)
    return model


def quantized_to_onnx(quantized: QuantizedModel, opset: int) -> ir.Model:
    """The quantized graph as a QDQ ONNX model that its target runs in integers.

    Its QuantizeLinear nodes stand in the order of the graph's quantize nodes and are named after the same
    units. Raises QtoolError when an operator has no ONNX form, or when the quantizers do not correspond.
    """
    require_opset(quantized.plan, opset)
    model, units, outputs = _translate(quantized.graph, quantized.example, opset)
    wanted = [unit_of(node) for node in quantize_nodes(quantized.graph)]
    found = [units.get(node.outputs[0].name or "") for node in model.graph if node.op_type == names.QUANTIZE]
    if found != wanted:
        raise QtoolError(
            "export", f"{len(wanted)} activation quantizers in the graph's order", f"{len(found)} in the ONNX graph",
            "report this model",
        )  # fmt: skip
    casts.apply(model)
    names.apply(model, units, outputs)
    target = quantized.plan.target
    for rewrite in (*MISREAD.get(target, ()), *FUSED.get(target, ()), *PASSES[target]):
        rewrite(model)
    if opset > NO_BARE_MOVES and any(map(parts.moves_signed, model.graph)):
        raise UsageError(
            "--opset", f"{NO_BARE_MOVES} or less where int8 values are only moved, which no ONNX Runtime opens else",
            str(opset), "leave --opset out",
        )  # fmt: skip
    four_bits = {unit.name: unit.integer for unit in quantized.plan.units if unit.weight_bits == 4}
    int4.apply(model, {name for name, integer in four_bits.items() if not integer})
    stored.apply(model, {unit.name for unit in quantized.plan.float_units if unit.weight_bits and not unit.block})
    metadata.strip(model)
    for rewrite in QUICK.get(target, ()):
        rewrite(model)
    if blocks := {unit.name for unit in quantized.plan.units if unit.block}:
        BLOCK_PRODUCTS[target](model, blocks)
    int4.apply(model, {name for name, integer in four_bits.items() if integer}, widened=True)
    for rewrite in LAST.get(target, ()):
        rewrite(model)
    return model


def _translate(graph: GraphModule, example: Any, opset: int) -> tuple[ir.Model, dict[str, str], list[str | None]]:
    """The exporter's model, the unit of each value by the exporter's name for it, and the outputs' own names."""
    program = program_of(graph, example)
    adaptive_pools.spell_pools(program.graph)
    complex_numbers.spell_parts(program.graph)
    plain_forms.drop_checks(program.graph)
    plain_forms.require_forms(program.graph)
    recurrent.require_forms(program.graph)
    adaptive_pools.require_forms(program.graph)
    try:
        with quiet_exporter(), quicker(), distinct_units(), exact_constants(), whole_sequences():
            exported = _exported(program, opset)
    except Exception as error:
        raise _untranslated(program, error) from error
    assert exported is not None
    assert exported.exported_program is not None
    _require_opset(exported.model, opset)
    folded.apply(exported.model, {*program.state_dict, *program.constants})
    sizes.apply(exported.model)
    pool_pads.apply(exported.model)
    _restore_inputs(exported.model, {str(name) for name in program.graph_signature.user_inputs})
    labelled = (node for node in exported.exported_program.graph.nodes if "unit" in (node.meta.get("custom") or {}))
    units = {node.name: unit_of(node) for node in labelled}
    called = zip(output_names(program.call_spec.out_spec), program.graph_signature.user_outputs, strict=True)
    return exported.model, units, [name for name, value in called if value is not None]


def _require_opset(model: ir.Model, opset: int) -> None:
    """Raises UsageError where torch left the model in another opset: it converts from its own as far as it can."""
    if (found := model.opset_imports.get("")) != opset:
        raise UsageError(
            "--opset", "one that torch can write this model in", f"{opset}, and {found} from torch", "leave it out"
        )


def _exported(program: torch.export.ExportedProgram, opset: int) -> Any:
    """The exporter's result: of the program as it is if that has a form in ONNX, else decomposed."""
    options: dict[str, Any] = {
        "dynamo": True, "opset_version": opset, "verbose": False,
        "custom_translation_table": (
            attention.TRANSLATIONS | plain_forms.TRANSLATIONS | norms.translations(program.graph)
            | recurrent.TRANSLATIONS | adaptive_pools.translations(program.graph)
        ),
    }  # fmt: skip
    plain = type(program)
    program.__class__ = Decomposed
    try:
        return torch.onnx.export(program, **options)
    except torch.onnx.OnnxExporterError:
        program.__class__ = plain
        return torch.onnx.export(program, **options)


class Decomposed(torch.export.ExportedProgram):
    """A program that is decomposed by tracing only where it holds an operator that is to be decomposed."""

    def run_decompositions(self, decomp_table: Any = None, *args: Any, **kwargs: Any) -> torch.export.ExportedProgram:
        """This program itself where ``decomp_table`` has nothing to say of its operators, which are functions all."""
        if decomp_table is not None and all(_stays(node, decomp_table) for node in self.graph.nodes):
            return self
        traced: torch.export.ExportedProgram = super().run_decompositions(decomp_table, *args, **kwargs)
        return traced


def _stays(node: torch.fx.Node, decomposed: Mapping[Any, Any]) -> bool:
    if node.op != "call_function" or getattr(node.target, "__module__", "") in (operator.__name__, "_operator", "math"):
        return node.op != "call_module"
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target not in decomposed and not target._schema.is_mutable


def _restore_inputs(model: ir.Model, wanted: set[str]) -> None:
    """Gives back the names of inputs that are outputs too; the exporter gives those to the outputs."""
    for value in model.graph.inputs:
        name = (value.name or "").removesuffix("_orig")
        if value.name in wanted or name not in wanted:
            continue
        for output in model.graph.outputs:
            if output.name == name:
                output.name = f"{name}_output"
        value.name = name


_REPLACE = "replace that operator in the model, or leave its module out of the exported graph"


def _untranslated(program: torch.export.ExportedProgram, error: BaseException) -> QtoolError:
    """What to tell of a failed translation: the operator, its module and the user's line where torch knows them."""
    causes = list(_causes(error))
    operator = re.search(r"op='([\w.:]+)', overload='(\w*)'", str(causes[-1]))
    broken = re.search(r"translating node %(\w+) ", "\n".join(map(str, causes)))
    node = None
    if operator or broken:
        node = _first_of(program, ".".join(operator.groups()) if operator else "", broken.group(1) if broken else "")
    first = next((line for line in str(causes[-1]).splitlines() if line.strip()), "")
    found = f"{type(causes[-1]).__name__}: {first}"
    if node is not None and "SymbolicTensor" in first:
        found = f"{node.target} with an argument computed from the inputs, where ONNX has a fixed number"
    module = list((node.meta.get("nn_module_stack") or {}).values())[-1:] if node is not None else []
    return QtoolError(
        f"export, module '{module[0][0]}'" if module and module[0][0] else "export", "operators that have an ONNX form",
        one_line(found)[:300],
        f"{line_of(node)}{_REPLACE}",
    )  # fmt: skip


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _first_of(program: torch.export.ExportedProgram, operator: str, name: str) -> torch.fx.Node | None:
    """The first node that calls ``operator``, or is called so, once decomposed as the exporter decomposes it."""
    with quiet_exporter():
        nodes = [*program.graph.nodes, *program.run_decompositions().graph.nodes]
    return next((node for node in nodes if (str(node.target) == operator if operator else node.name == name)), None)


@contextlib.contextmanager
def quiet_exporter() -> Iterator[None]:
    """Silences what torch's exporter says of itself: absent torchvision operators and its own deprecations."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.onnx._internal", "onnxscript", "onnx_ir")]
    registration = logging.getLogger("torch.onnx._internal.exporter._registration")
    levels = [(logger, logger.level) for logger in (*loggers, registration)]
    try:
        for logger, _ in levels:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in levels:
            logger.setLevel(level)


def save(model: ir.Model, path: Path, extra: Mapping[str, str] | None = None) -> None:
    """Writes the model, atomically, with ``extra`` in its metadata; tensors go beside it above 2 GB."""
    model.metadata_props.update(extra or {})
    size = sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value is not None)
    with atomic_path(path) as temporary:
        if size > EXTERNAL_DATA_BYTES:
            ir.save(model, temporary, external_data=f"{path.name}.data")
        else:
            onnx_file.write(model, temporary)
