"""Embedding tables in bytes: the graph against a formula, the file against the graph."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

from qtool.exporting.stage import export
from qtool.form import QuantizedModel
from qtool.graphs.edits import parameter
from qtool.graphs.operators import aten
from qtool.quantization.stage import quantize
from qtool.recipe import ExportConfig, QuantizeConfig
from qtool.runtimes import open_session

ROWS, WIDTH = 300, 24


class Words(nn.Module):
    """A table whose rows differ a lot in size; the last layer shares it."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.words, self.kinds = nn.Embedding(ROWS, WIDTH), nn.Embedding(3, WIDTH)
        self.mix, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, ROWS, bias=False)
        with torch.no_grad():
            self.words.weight *= torch.logspace(-3, 1, ROWS)[:, None]
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.mix(self.words(ids) + self.kinds(ids % 3)).relu())


IDS = torch.randint(0, ROWS, (16, 7), generator=torch.Generator().manual_seed(0))


def made(tied: bool = True, **options: object) -> QuantizedModel:
    torch.manual_seed(0)
    return quantize(Words(tied).eval(), QuantizeConfig(**options), example=IDS, calibration=[IDS])


def lookups(form: QuantizedModel) -> list[torch.fx.Node]:
    return [node for node in form.graph.graph.nodes if node.target is aten.embedding.default]


def test_each_row_has_its_own_scale_and_is_off_by_half_a_step_at_most() -> None:
    form = made(tied=False)
    words, kinds = lookups(form)
    integers, scales = (parameter(form.graph, node) for node in words.args[0].args[:2])
    torch.manual_seed(0)
    table = Words(tied=False).words.weight.detach()
    assert integers.dtype == torch.int8
    np.testing.assert_allclose(scales.numpy(), np.abs(table.numpy()).max(1) / 127, rtol=1e-6)
    error = (integers * scales[:, None] - table).abs() / scales[:, None]
    assert float(error.max()) <= 0.5 + 1e-4
    assert kinds.args[0].op == "get_attr"  # three rows stay as they are
    reasons = {unit.name: (unit.weight_bits, unit.reason) for unit in form.plan.units if unit.kind == "embedding"}
    assert reasons["words"][0] == 8
    assert reasons["kinds"] == (None, "a table of 3 rows is small")


def test_a_layer_that_shares_the_table_shares_its_integers() -> None:
    tied, untied = (sum(t.numel() for t in made(t).graph.buffers() if t.dtype == torch.int8) for t in (True, False))
    assert untied - tied == ROWS * WIDTH


@pytest.mark.parametrize("tied", [True, False])
def test_the_file_reads_rows_of_bytes_and_passes_its_gates(tmp_path: Path, tied: bool) -> None:
    form = made(tied)
    exported = export(form, tmp_path, ExportConfig(baselines=("fp32",)), samples=[IDS])
    assert {gate["passed"] for gate in exported.gates} <= {True, None}
    model = onnx.load(str(exported.files["int8"]))
    initializers = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    read = [initializers.get(node.input[0]) for node in model.graph.node if node.op_type == "Gather"]
    assert sorted(read) == [onnx.TensorProto.FLOAT] * 2 + [onnx.TensorProto.INT8]  # the small table, scales, rows
    assert exported.files["int8"].stat().st_size < 0.5 * exported.files["fp32"].stat().st_size
    (found,) = open_session(exported.files["int8"]).run({"ids": IDS.numpy()})
    np.testing.assert_allclose(found, form(IDS).detach().numpy(), atol=0.05 * np.abs(found).max())


def test_an_override_leaves_a_table_alone() -> None:
    form = made(overrides={"words": "float"})
    assert lookups(form)[0].args[0].op == "get_attr"
    assert next(unit for unit in form.plan.units if unit.name == "words").reason == "left in float by an override"


def test_weights_alone_are_tables_too() -> None:
    form = made(weights_only=True)
    assert lookups(form)[0].args[0].target is not None
    assert lookups(form)[0].args[0].op == "call_function"


class Translator(nn.Module):
    """Two recurrent layers, one table that both read, and one layer that is called twice."""

    def __init__(self, cell: type[nn.RNNBase]) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, WIDTH)
        self.reads, self.writes = cell(WIDTH, 16, batch_first=True), cell(WIDTH, 16, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        _, state = self.reads(self.words(ids))
        first, state = self.writes(self.words(ids + 1), state)
        return torch.cat([first, self.writes(self.words(ids), state)[0]], 1)


@pytest.mark.parametrize("cell", [nn.GRU, nn.LSTM])
def test_a_layer_that_is_called_twice_is_stored_once_and_others_by_themselves(cell: type[nn.RNNBase]) -> None:
    torch.manual_seed(0)
    net, ids = Translator(cell).eval(), IDS % (ROWS - 1)
    form = quantize(net, QuantizeConfig(), example=ids, calibration=[ids])
    with torch.no_grad():
        difference = float((form(ids) - net(ids)).abs().max())
    assert 0 < difference < 0.05
    tables = {t.data_ptr(): t.numel() for t in form.graph.buffers() if t.dtype == torch.int8}
    gates = 4 if cell is nn.LSTM else 3
    assert sum(tables.values()) == ROWS * WIDTH + 2 * gates * 16 * (WIDTH + 16)
