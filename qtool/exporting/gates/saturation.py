"""Whether a file's integer products saturate on x86 CPUs without VNNI.

There, unsigned bytes are multiplied by signed ones two at a time, and the sum of the two products is kept in 16 bits
(``vpmaddubsw``): ``sat16(x₀·w₀ + x₁·w₁)`` with x up to 255 and w down to −127 can need 17. Nothing reports it, and
the same file loses accuracy by changing machine. CPUs with VNNI (and ARM) add in 32 bits, and so does ONNX Runtime
on all others where it is asked to, which takes longer (``passes/exact_sums.py``).

Only some pairs of weights can saturate at all (``kernel_order.py``); of weights in 7 bits (63 + 63) and of those made
to fit, none. Where some can, the file's own activations are multiplied out for those, since most never meet two bytes
large enough.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from qtool.exporting.gates.gate import Gate
from qtool.exporting.kernel_order import LIMIT, Array, AtRisk, at_risk, matrices
from qtool.exporting.passes import exact_sums
from qtool.exporting.reference.integer_arithmetic import Quantized
from qtool.exporting.reference.integer_graph import Node, Unit
from qtool.exporting.reference.integer_kernels import windows
from qtool.exporting.reference.integer_reference import IntegerReference, dynamic_lstm, real
from qtool.form import Plan
from qtool.graphs.lstm import OPERATOR
from qtool.runtimes.onnx_notes import EXACT_SUMS
from qtool.system.machine import VNNI, cpu_info, sums_in_32_bits
from qtool.units import many

MAX_SUMS = 2**22
EXPECTED = "no product beyond 16 bits, or a CPU that adds in 32"
NONE = "no pair of weights can saturate: the file is the same on every x86 CPU"
IN_OPENVINO = (
    "not run: it counts in ONNX Runtime's kernels; OpenVINO's can saturate on x86 CPUs without VNNI as well, and "
    "without an option against it: there serve files of --weight-bits 7"
)
AS_ASKED = (
    f", and none in a session with {EXACT_SUMS}=1, as the file's metadata asks and qtool opens it there; files "
    "made with 'pairs' among the algorithms (where no layer shares an embedding table) or --weight-bits 7 need no "
    "option, and are faster there"
)


def count_saturated(reference: IntegerReference, feeds: Mapping[str, Array]) -> dict[str, int]:
    """For each unit with a weight at risk, how many pairs of products leave 16 bits on these inputs."""
    layers = {unit.node.name: unit for unit in reference.units if _matrices(unit, reference)}
    lstms = [unit.node for unit in reference.units if unit.node.op == OPERATOR]
    read = [unit.node.inputs[0] for unit in layers.values()] + [name for node in lstms for name in node.inputs]
    values = reference.trace(feeds, keep=read)
    counts: dict[str, int] = {}
    for name, unit in layers.items():
        risks = [at_risk(weight) for weight in _matrices(unit, reference)]
        if any(risks):
            x = values[unit.node.inputs[0]]
            assert isinstance(x, Quantized)
            counts[name] = sum(_saturated(risk, rows) for risk, rows in zip(risks, _rows(unit, x), strict=True) if risk)
    for node in lstms:
        _count_in_lstm(node, values, counts)
    return counts


def _count_in_lstm(node: Node, values: Mapping[str, Any], counts: dict[str, int]) -> None:
    """Adds what leaves 16 bits in the products of an LSTM, whose bytes come about step by step."""
    known: dict[int, AtRisk | None] = {}

    def seen(x: torch.Tensor, weight: torch.Tensor) -> None:
        if weight.data_ptr() not in known:
            known[weight.data_ptr()] = at_risk(weight.numpy())
        if (found := known[weight.data_ptr()]) is not None:
            counts[node.name] = counts.get(node.name, 0) + _saturated(found, x.numpy().astype(np.int32))

    dynamic_lstm([real(values[name]) if name else None for name in node.inputs], seen)


def _saturated(found: AtRisk, rows: Array) -> int:
    if not len(rows):  # a layer that gets none of what is shared out
        return 0
    rows = np.pad(rows, ((0, 0), (0, len(found.weight) - rows.shape[1])))
    pairs, columns = _reachable(found, rows.max(0))
    total, step = 0, max(1, MAX_SUMS // len(rows))
    for start in range(0, len(pairs), step):
        top, column = pairs[start : start + step], columns[start : start + step]
        sums = rows[:, top] * found.weight[top, column] + rows[:, top + 1] * found.weight[top + 1, column]
        total += int(np.count_nonzero((sums > LIMIT) | (sums < -LIMIT - 1)))
    return total


def _reachable(found: AtRisk, largest: Array) -> tuple[Array, Array]:
    """The pairs at risk that would saturate if all of their bytes were as large as they ever are here."""
    first, second = (largest[found.rows + i] * found.weight[found.rows + i, found.columns] for i in (0, 1))
    above = np.maximum(first, 0) + np.maximum(second, 0) > LIMIT
    below = np.minimum(first, 0) + np.minimum(second, 0) < -LIMIT - 1
    return found.rows[above | below], found.columns[above | below]


def _matrices(unit: Unit, reference: IntegerReference) -> list[Array]:
    """A unit's constant int8 weight as K × outputs in the kernel's order, one for each group of a convolution.

    None where it has no such weight, or a depthwise one.
    """
    node = unit.node
    weight = reference.constants.get(node.inputs[1]) if unit.fused and len(node.inputs) > 1 else None
    if not isinstance(weight, Quantized) or weight.affine.dtype != torch.int8:
        return []
    values: Array = weight.values.numpy()
    groups, transposed = int(node.attributes.get("group", 1)), bool(node.attributes.get("transB", 0))
    return matrices(node.op, values, groups=groups, transposed=transposed)


def _rows(unit: Unit, x: Quantized) -> Array:
    """The bytes that each of a unit's matrices meets: rows × K in its order, one for each place of the output."""
    attributes = unit.node.attributes
    if unit.node.op != "Conv":
        return x.values.numpy().reshape(1, -1, x.values.shape[-1]).astype(np.int32)
    taps = torch.stack(list(windows(x.values.float(), attributes, float(x.affine.zero_point))), -1).movedim(1, -1)
    groups, depth = int(attributes.get("group", 1)), taps.shape[-2]
    each = taps.reshape(-1, depth, groups, taps.shape[-1] // groups).movedim(2, 0)
    rows: Array = each.reshape(groups, each.shape[1], -1).numpy().astype(np.int32)
    return rows


def may_saturate(plan: Plan, path: Path) -> bool:
    """Whether products of a plan's file can leave 16 bits: of weights that do not fit, or of two activations."""
    return any(unit.kind == "matmul" for unit in plan.integer_units) or exact_sums.can_saturate(ir.load(path))


def saturation_in_openvino(plan: Plan, path: Path) -> Gate:
    """What can be told of a file for OpenVINO, whose kernels give no account of themselves.

    They read weights in the order of ONNX Runtime's: what fits there was never seen to saturate in them.
    """
    risky = may_saturate(plan, path)
    return Gate("saturation", None if risky else True, EXPECTED, IN_OPENVINO if risky else NONE)


def saturation(reference: IntegerReference, feeds: Mapping[str, Array], *, exact: bool) -> Gate:
    """What CPU the file needs, or how it is to be opened on others; ``exact`` where it says how.

    Fails on an x86 CPU without VNNI where its products saturate on these inputs however it is opened.
    """
    counts = count_saturated(reference, feeds)
    hurt = {name: count for name, count in counts.items() if count}
    needs = list(VNNI) if counts else []
    found = NONE
    if counts:
        found = f"{many(len(counts), 'unit')} can saturate on x86 CPUs without VNNI, {len(hurt)} on these inputs"
        found += AS_ASKED if exact else ""
    return Gate(
        "saturation", sums_in_32_bits() or exact or not hurt,
        EXPECTED, found,
        "quantize with --weight-bits 7, or serve on a CPU with VNNI",
        {"needs": needs, "cpu": cpu_info(), "units_at_risk": sorted(counts), "num_saturated": hurt},
    )  # fmt: skip
