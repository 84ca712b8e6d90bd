"""The coverage gate in OpenVINO: its compiled model is asked in which precision each product runs.

OpenVINO renames what it fuses, so layers are counted and not looked up: at least as many convolutions and matrix
products have to run in 8 bits, or 4, as the plan calls integer or lets multiply weights as they are stored. Attention
is fused whole into one kernel, which tells which of the file's nodes it holds and the format of what it reads: none
with a product that the plan calls integer may read floats. Of layers with equal weights that read the same, it runs
one for all. Where there are too few, those that no integer kernel holds are named.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir
from onnx_ir.passes.common import CommonSubexpressionEliminationPass, DeduplicateInitializersPass

from qtool.exporting.gates.gate import Gate
from qtool.exporting.passes.names import WEIGHTED
from qtool.form import Plan
from qtool.runtimes import open_session
from qtool.runtimes.base import Array, arithmetic
from qtool.runtimes.openvino import is_installed


def coverage(plan: Plan, path: Path, feeds: Mapping[str, Array]) -> Gate:
    """Compares the plan with OpenVINO's compiled model of the file; not run where OpenVINO is not installed."""
    multiplying = [unit for unit in plan.units if unit.integer or unit.block is not None]
    weighted = [unit.name for unit in multiplying if unit.weight_bits is not None]
    num = len(weighted)
    expected = f"{num} convolutions and matrix products, integer in the plan, in 8 bits or 4 in OpenVINO's model"
    if not is_installed():
        return Gate("coverage", None, expected, "not run: openvino is not installed (pip install 'qtool[openvino]')")
    session = open_session(path, provider="openvino")
    kernels = [replace(kernel, dtype=kernel.stored or kernel.dtype) for kernel in session.kernels(feeds)]
    session.close()
    ran = arithmetic(kernels)
    in_float = {part for kernel in kernels if kernel.dtype.startswith(("float", "bfloat")) for part in kernel.parts}
    missing = [unit.name for unit in plan.integer_units if unit.kind == "matmul" and unit.name in in_float]
    integers = {kind: ran[kind] for kind in ("int8", "int4") if kind in ran}
    bits = " and ".join(f"{count} in {kind.removeprefix('int')} bits" for kind, count in integers.items()) or "none"
    found = f"of {sum(ran.values())} products {bits}"
    count = sum(integers.values())
    enough = count >= num or count + _num_twins(path) >= num
    if not enough:
        whole = {part.partition("/")[0] for kernel in kernels if kernel.dtype in integers for part in kernel.parts}
        missing += [name for name in weighted if name not in whole]
    if missing:
        found += f"; in float: {', '.join(missing[:5])}{' …' if len(missing) > 5 else ''}"
    return Gate(
        "coverage", enough and not missing, expected, found, "leave those units in float with an override",
        {"arithmetic": ran, "missing": missing},
    )  # fmt: skip


def _num_twins(path: Path) -> int:
    """How many layers of a file compute what another one does."""
    model = ir.load(path)
    whole = _num_layers(model)
    DeduplicateInitializersPass()(model)
    CommonSubexpressionEliminationPass()(model)
    return whole - _num_layers(model)


def _num_layers(model: ir.Model) -> int:
    return sum(node.op_type in WEIGHTED for node in model.graph)
