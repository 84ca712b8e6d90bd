"""Mixtures of experts: those that share tokens out by a mask, and read as many rows as the data decides or none, and
those whose weights are one tensor."""

from __future__ import annotations

import functools
import math
from collections import Counter
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import TensorProto
from torch import Tensor, nn

import qtool
from qtool.errors import QtoolError
from qtool.exporting.stage import export
from qtool.quantization.capturing.float_form import FloatForms
from qtool.quantization.rewrites import einsums
from qtool.quantization.stage import quantize
from qtool.recipe import ExportConfig, QuantizeConfig


class Experts(nn.Module):
    """Each row goes to the one expert that the gate likes best."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 3)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16)) for _ in range(3)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        chosen, made = self.gate(x).argmax(-1), torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            mine = chosen == index
            made[mine] = expert(x[mine])
        return made


@functools.cache
def captured() -> tuple[FloatForms, list[Tensor]]:
    """The net, and batches of too few rows for each expert to get one every time."""
    torch.manual_seed(0)
    return FloatForms(Experts().eval()), [torch.randn(4, 16) for _ in range(8)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"algorithms": ("equalize", "gptq"), "ranges": "output"},
        {"algorithms": ("adaround",), "rounding_steps": 20},
    ],
)
def test_experts_are_integer_and_keep_their_own_biases(tmp_path: Path, options: dict[str, Any]) -> None:
    forms, batches = captured()
    net = forms.model
    with torch.no_grad():
        assert any(len(net.gate(batch).argmax(-1).unique()) < 3 for batch in batches)
    form = quantize(net, QuantizeConfig(**options), example=batches[0], calibration=batches, forms=forms)
    assert {unit.name for unit in form.plan.integer_units} == {
        "gate", *(f"experts.{i}.{j}" for i in range(3) for j in (0, 2))
    }  # fmt: skip
    assert any(note.startswith("no pass corrects layers that read as many rows") for note in form.plan.notes)
    with torch.no_grad():
        for batch in batches:
            assert torch.isfinite(form(batch)).all()
            assert float((form(batch) - net(batch)).abs().max()) < 0.05
    exported = export(form, tmp_path, ExportConfig(baselines=None), samples=batches)
    assert {gate["passed"] for gate in exported.gates} <= {True, None}


@pytest.mark.parametrize("steps", ["averaged", "learned"])
def test_a_step_in_which_an_expert_has_nothing_to_do_trains_the_others(steps: str) -> None:
    torch.manual_seed(0)
    rows = [(torch.randn(16), i % 16) for i in range(32)]
    options: dict[str, Any] = {"step_size": "learned"} if steps == "learned" else {}
    form = qtool.quantize(Experts(), {"train": rows, "test": rows}, mode="qat", epochs=1, batch_size=2, **options)
    with torch.no_grad():
        assert torch.isfinite(form(torch.randn(4, 16))).all()


@pytest.mark.parametrize("mode", ["ptq", "qat"])
def test_an_expert_that_no_sample_reaches_is_named_with_what_to_do(mode: str) -> None:
    torch.manual_seed(0)
    net = Experts().eval()
    net.gate.bias.data[1] = -1e4
    batches = [torch.randn(4, 16) for _ in range(8)]
    options = {"mode": mode, "ranges": "minmax"}

    def made(**more: Any) -> Any:
        config = QuantizeConfig(**options, **more)
        return quantize(net, config, example=batches[0], calibration=batches, qat=lambda *_: None)

    told = (
        r"^layers 'experts\.1\.0', 'experts\.1\.2': expected calibration samples that reach every layer; "
        r"got none of 32 does; .* \(--overrides 'experts\.1\.0=float,experts\.1\.2=float'\)$"
    )
    with pytest.raises(QtoolError, match=told):
        made()
    form = made(overrides={"experts.1.*": "float"})
    assert sum(unit.integer for unit in form.plan.units) == 5
    with torch.no_grad():
        assert torch.isfinite(form(batches[0])).all()


class Stacked(nn.Module):
    """The weights of some experts in one tensor each; all see every token, and a gate weighs what they give."""

    def __init__(self, experts: int = 3) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(16, experts), nn.Parameter(torch.randn(experts, 16, 64) / 4)
        self.down = nn.Parameter(torch.randn(experts, 64, 16) / 8)

    def forward(self, x: Tensor) -> Tensor:
        made = torch.bmm(torch.bmm(x.expand(len(self.up), -1, -1), self.up).relu(), self.down)
        return (made * self.gate(x).softmax(-1).T.unsqueeze(-1)).sum(0)


@pytest.mark.parametrize(
    ("options", "bits"),
    [
        ({}, 8),
        ({"weights_only": True}, 8),
        ({"weights_only": True, "weight_bits": 4, "edge_bits": 4}, 4),
        ({"mode": "qat"}, 8),
    ],
    ids=["integer", "weights", "four bits", "trained"],
)  # fmt: skip
def test_experts_of_one_tensor_are_stored_in_few_bits(
    options: dict[str, Any], bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(einsums, "LEAST_WEIGHTS", 16 * 64)
    torch.manual_seed(0)
    net, batches = Stacked().eval(), [torch.randn(4, 16) for _ in range(8)]
    config = QuantizeConfig(**options)
    form = quantize(net, config, example=batches[0], calibration=batches, qat=lambda *_: None)
    assert [unit.weight_bits for unit in form.plan.units if unit.kind == "linear"] == [bits] * 7
    exported = export(form, tmp_path, ExportConfig(baselines=None), samples=batches)
    assert {gate["passed"] for gate in exported.gates} <= {True, None}
    tensors = onnx.load(exported.files["int8"]).graph.initializer
    weights = [tensor for tensor in tensors if math.prod(tensor.dims) >= 16 * 64]
    assert len(weights) == 6
    assert {tensor.data_type for tensor in weights} <= {TensorProto.INT8, TensorProto.INT4}
    with torch.no_grad():
        wanted = net(batches[0])
        assert float((form(batches[0]) - wanted).norm() / wanted.norm()) < (0.03 if bits == 8 else 0.3)


@pytest.mark.parametrize(
    "options",
    [{}, {"weights_only": True}, {"target": "openvino"}, {"mode": "qat"}, {"overrides": {"*bmm": "float"}}],
    ids=["integer", "weights", "openvino", "trained", "override"],
)
def test_small_experts_are_stored_in_bytes_and_read_in_float(options: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, batches = nn.Sequential(nn.Linear(16, 16), Stacked(experts=6)).eval(), [torch.randn(4, 16) for _ in range(8)]
    form = quantize(net, QuantizeConfig(**options), example=batches[0], calibration=batches, qat=lambda *_: None)
    stored = [unit for unit in form.plan.units if unit.kind == "stored_product" and unit.weight_bits == 8]
    assert len(stored) == 2 - ("overrides" in options)
    assert not any(unit.integer for unit in stored)
    exported = export(form, tmp_path, ExportConfig(baselines=None), samples=batches)
    assert {gate["passed"] for gate in exported.gates} <= {True, None}
    model = onnx.load(exported.files["int8"])
    kinds = Counter(tensor.data_type for tensor in model.graph.initializer if math.prod(tensor.dims) == 6 * 16 * 64)
    assert kinds == Counter({TensorProto.INT8: len(stored)}) + Counter({TensorProto.FLOAT: 2 - len(stored)})
    with torch.no_grad():
        wanted = net(batches[0])
        assert float((form(batches[0]) - wanted).norm() / wanted.norm()) < 0.03


class Shared(nn.Module):
    """Experts that are read twice as they are stored, and once turned, before anything is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.stack, self.out = nn.Parameter(torch.randn(6, 16, 64) / 4), nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        turned = self.stack.transpose(1, 2)
        hidden = torch.bmm(x.expand(6, -1, -1), self.stack).relu()
        return self.out(torch.bmm(torch.bmm(hidden, turned), self.stack).mean(0))


@pytest.mark.parametrize(("engine", "stored"), [("pt2e", 2), ("torch.ao", 1)])  # the first turns constants itself
def test_a_stack_that_is_read_twice_is_stored_once(engine: str, stored: int) -> None:
    torch.manual_seed(0)
    net, batches = Shared().eval(), [torch.randn(4, 16) for _ in range(8)]
    form = quantize(net, QuantizeConfig(engine=engine), example=batches[0], calibration=batches)
    assert [unit.weight_bits for unit in form.plan.units if unit.kind == "stored_product"] == [8, 8, 8]
    large = [tensor for tensor in (*form.graph.parameters(), *form.graph.buffers()) if tensor.numel() == 6 * 16 * 64]
    assert [tensor.dtype for tensor in large] == [torch.int8] * stored
    rows = next(tensor for tensor in large if tensor.shape[-1] == 64)
    stack = net.stack.detach().reshape(-1, 64)
    assert torch.equal(rows.reshape(-1, 64), torch.round(stack / (stack.abs().amax(1, keepdim=True) / 127)).char())
    with torch.no_grad():
        wanted = net(batches[0])
        assert float((form(batches[0]) - wanted).norm() / wanted.norm()) < 0.03
