"""The coverage gate: what the plan calls integer is integer in the runtime's own optimised graph.

The runtime is asked for the graph that it executes, and each unit is looked up there by its name. A unit is
integer when its kernel is one of ONNX Runtime's integer kernels; a convolution, matrix product or sum that the
plan calls integer and that appears there as a float kernel fails the gate, by name. So does a layer of stored integers
that the runtime dequantizes in every run where the plan says that it multiplies them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import onnx

from qtool.exporting.gates.gate import Gate
from qtool.form import Plan, Unit
from qtool.graphs.lstm import OPERATOR
from qtool.runtimes.ort import optimized_graph
from qtool.runtimes.profile import BLOCK_PRODUCT
from qtool.units import many

INTEGER_KERNELS = {
    "conv": ("QLinearConv", "ConvInteger", "QLinearConvTranspose"),
    "linear": ("QGemm", "QLinearMatMul", "MatMulIntegerToFloat", "MatMulInteger"),
    "add": ("QLinearAdd",),
    "mul": ("QLinearMul",),
    "concat": ("QLinearConcat",),
    "global_avg_pool": ("QLinearGlobalAveragePool",),
    "avg_pool": ("QLinearAveragePool", "QLinearConv"),
    "max_pool": ("MaxPool", "NhwcMaxPool"),
    "sigmoid": ("QLinearSigmoid",),
    "leaky_relu": ("QLinearLeakyRelu",),
    "hard_sigmoid": ("QLinearAdd",),
    "pad": ("Pad",),
    "upsample": ("Resize",),
    "recurrent": (OPERATOR,),
}
COPIES = frozenset({
    "MaxPool", "NhwcMaxPool", "Pad", "Resize", "Transpose", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Slice",
    "Split", "Gather", "Expand", "Tile", "Identity",
})  # fmt: skip
"""Kernels that give numbers of the type they read, integers or floats."""
FLOAT_COMPUTE = frozenset({
    "Conv", "FusedConv", "NhwcFusedConv", "ConvTranspose", "Gemm", "FusedGemm", "MatMul", "FusedMatMul", "Add", "Mul",
    "Concat", "GlobalAveragePool", "AveragePool", "ReduceMean", "Sigmoid", "LeakyRelu", "Relu", "Clip",
    "BatchNormalization", "LSTM",
})  # fmt: skip


def coverage(plan: Plan, path: Path) -> Gate:
    """Compares the plan with the runtime's optimised graph of the file."""
    graph = optimized_graph(path, weights=False).graph
    kernels: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        kernels.setdefault(_unit_name(node.name), []).append(node)
    makers = {output: node for node in graph.node for output in node.output}

    def absent(units: Iterable[Unit], is_there: Callable[[str, list[onnx.NodeProto]], bool]) -> list[str]:
        named = ((unit, kernels.get(unit.name, [])) for unit in units)
        told = ((f"{unit.name} ({unit.kind}) runs as {_kernel_names(ran)}", unit.kind, ran) for unit, ran in named)
        return [text for text, kind, ran in told if not is_there(kind, ran)]

    checked = [unit for unit in plan.integer_units if unit.kind in INTEGER_KERNELS]
    blocks = [unit for unit in plan.float_units if unit.block]
    missing = absent(checked, lambda kind, ran: _is_integer(kind, ran) and not _is_float_copy(ran, makers))
    found = f"{len(checked) - len(missing)} of {len(checked)} integer units run in integers"
    if blocks:
        dequantized = absent(blocks, lambda _, ran: any(node.op_type == BLOCK_PRODUCT for node in ran))
        found += f"; {len(blocks) - len(dequantized)} of {len(blocks)} multiply stored integers"
        missing += dequantized
    counts = Counter(node.op_type for node in graph.node)
    if weights := sum(unit.weight_bits is not None and not unit.block for unit in plan.float_units):
        found += f"; {weights} run in float from integer weights, as planned"
    if missing:
        found += f"; not: {'; '.join(missing[:5])}{' …' if len(missing) > 5 else ''}"
    return Gate(
        "coverage", not missing, f"{many(len(checked), 'unit')}, integer in the plan, to be so in the runtime's graph",
        found, "leave those units in float with an override, or report this model",
        {
            "num_integer_units": len(checked), "num_missing": len(missing), "missing": missing,
            "float_units": [{"name": unit.name, "kind": unit.kind, "reason": unit.reason} for unit in plan.float_units],
            "kernels": dict(counts), "num_quantize": counts["QuantizeLinear"],
            "num_dequantize": counts["DequantizeLinear"],
        },
    )  # fmt: skip


def _unit_name(node_name: str) -> str:
    """The unit a runtime's node is called after: fused nodes carry the first node's name and a token."""
    return re.sub(r"(_token_\d+|_nhwc|_quant)+$", "", node_name)


def _is_integer(kind: str, nodes: list[Any]) -> bool:
    types = [node.op_type for node in nodes]
    return any(t in INTEGER_KERNELS[kind] for t in types) and not any(
        t in FLOAT_COMPUTE and t not in INTEGER_KERNELS[kind] for t in types
    )


def _is_float_copy(nodes: list[Any], makers: Mapping[str, Any]) -> bool:
    """Whether an operator that only copies or compares numbers does it with floats, by what made the numbers."""
    makes = [node for node in nodes if node.op_type in COPIES]
    while makes and makes[0].op_type in COPIES and (maker := makers.get(makes[0].input[0])) is not None:
        makes = [maker]
    return bool(makes) and makes[0].op_type == "DequantizeLinear"


def _kernel_names(nodes: list[Any]) -> str:
    return "/".join(node.op_type for node in nodes) or "no node of that name"
