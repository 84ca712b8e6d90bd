"""A reverted unit computes on floats, and the file still does what the graph means."""

from __future__ import annotations

from pathlib import Path

import torch

from qtool.exporting.gates.coverage import coverage
from qtool.exporting.gates.end_to_end import sqnr_in_torch
from qtool.exporting.gates.parity import unit_parity
from qtool.exporting.gates.size import size
from qtool.exporting.revert import in_float
from qtool.exporting.to_onnx import quantized_to_onnx, save
from qtool.form import QuantizedModel, quantize_nodes
from qtool.runtimes.ort import optimized_graph

Gated = tuple[QuantizedModel, torch.Tensor]


def test_all_in_float_is_the_model_with_rounded_weights(gated: Gated) -> None:
    quantized, x = gated
    reverted = in_float(quantized, dict.fromkeys(names(quantized), "asked"))
    assert not quantize_nodes(reverted.graph)
    assert not reverted.plan.integer_units
    assert {unit.reason for unit in reverted.plan.units} == {"asked"}
    assert sqnr_in_torch(reverted, [x]) > 40


def names(quantized: QuantizedModel) -> list[str]:
    return [*(unit.name for unit in quantized.plan.units), "4"]  # 4 is the flatten, which no plan lists


def test_a_reverted_block_keeps_the_gates(gated: Gated, tmp_path: Path) -> None:
    quantized, x = gated
    block = [name for name in names(quantized) if name.startswith("2.")]
    reverted = in_float(quantized, dict.fromkeys(block, "asked"))
    # the stem's output stays quantized for nobody: float reads it before, so its quantizer goes unless integers do
    assert len(quantize_nodes(reverted.graph)) < len(quantize_nodes(quantized.graph))
    path = tmp_path / "a.onnx"
    save(quantized_to_onnx(reverted, 21), path)
    for gate in (size(reverted, path), coverage(reverted.plan, path), unit_parity(reverted, path, [x])):
        assert gate.passed, gate
    assert "from integer weights" not in coverage(reverted.plan, path).found
    kinds = {node.name: node.op_type for node in optimized_graph(path).graph.node}
    assert any(op in ("Conv", "FusedConv") for name, op in kinds.items() if name.startswith("2.body"))
    assert any(op == "QGemm" for op in kinds.values())


def test_what_integers_read_stays_quantized(gated: Gated) -> None:
    quantized, x = gated
    reverted = in_float(quantized, {"0": "asked"})
    units = [node.meta["custom"]["unit"] for node in quantize_nodes(reverted.graph)]
    assert "input" not in units
    assert "0" in units
    assert quantized.plan.units[0].integer, "the model that was given is left as it was"
    assert torch.isfinite(reverted(x)).all()
