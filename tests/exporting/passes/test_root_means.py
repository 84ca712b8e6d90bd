"""An RMSNorm becomes the division that ONNX Runtime has one kernel for, in the float file and in the integer one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from qdq_files import Builder, rewritten_by, run
from torch import Tensor, nn

from qtool.exporting.passes import root_means
from qtool.exporting.stage import export
from qtool.quantization.stage import quantize
from qtool.recipe import ExportConfig, QuantizeConfig


class Written(nn.Module):
    """The norm as transformers' language models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(16) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))


class Divided(Written):
    """The norm as its paper has it (arXiv 1910.07467)."""

    def forward(self, x: Tensor) -> Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * self.weight


@pytest.mark.parametrize("norm", [Written, Divided, lambda: nn.RMSNorm(16, eps=1e-5)])
def test_each_file_runs_one_kernel_for_a_norm(norm: type[nn.Module], tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(norm(), nn.Linear(16, 16), norm(), nn.Linear(16, 4)).eval()
    x = torch.randn(8, 5, 16)
    form = quantize(net, QuantizeConfig(algorithms=None, ranges="minmax"), example=x, calibration=[x])
    exported = export(form, tmp_path / "out", ExportConfig(baselines=("fp32",)), samples=[x])
    assert {gate["passed"] for gate in exported.gates} <= {True, None}
    for kind in ("fp32", "int8"):
        options = onnxruntime.SessionOptions()
        options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
        session = onnxruntime.InferenceSession(str(exported.files[kind]), options, providers=["CPUExecutionProvider"])
        kinds = [node.op_type for node in onnx.load(options.optimized_model_filepath).graph.node]
        assert kinds.count("SimplifiedLayerNormalization") == 2
        assert not {"Pow", "ReduceMean", "Sqrt", "Reciprocal", "Div"} & set(kinds)
    with torch.no_grad():
        wanted = net(x).numpy()
    found = onnxruntime.InferenceSession(str(exported.files["fp32"])).run(
        None, {session.get_inputs()[0].name: x.numpy()}
    )
    np.testing.assert_allclose(found[0], wanted, rtol=1e-4, atol=1e-5)


def normed(exponent: float = 2, axis: int = -1, other: bool = False) -> onnx.ModelProto:
    """x · 1 / sqrt(mean(x²) + ε), or something like it."""
    b = Builder()
    x = b.input("x", ["n", 4, 6])
    square = b.op("Pow", b.op("Neg", x) if other else x, b.constant(exponent, np.float32))
    mean = b.op("ReduceMean", square, b.constant([axis], np.int64), keepdims=1)
    root = b.op("Sqrt", b.op("Add", b.constant(1e-5, np.float32), mean))
    return b.model(b.op("Mul", b.op("Reciprocal", root), x))


def test_the_quotient_is_the_product(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(3, 4, 6)).astype(np.float32)
    changed, rewritten = rewritten_by(root_means.apply, normed())
    assert changed == 1
    assert [node.op_type for node in rewritten.graph.node][-2:] == ["Sqrt", "Div"]
    wanted = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(run(rewritten, {"x": x}, tmp_path)[0][0], wanted, rtol=1e-5)


@pytest.mark.parametrize("options", [{"exponent": 4}, {"axis": 1}, {"other": True}])
def test_what_is_no_norm_of_this_kind_is_left_alone(options: dict[str, float]) -> None:
    assert rewritten_by(root_means.apply, normed(**options))[0] == 0
