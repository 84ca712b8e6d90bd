"""Values of bfloat16 within a model: the same numbers, in operators that ONNX Runtime has."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from qtool.exporting.onnx_file import write
from qtool.exporting.to_onnx import float_to_onnx
from qtool.quantization.capturing.capture import capture
from qtool.runtimes import open_session


class Alibi(nn.Module):
    """Slopes of 16 bits times positions beyond 256, which these round too; a sum, a softmax and a join in 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(600, 4)
        self.slopes = nn.Buffer(torch.rand(4, 1).bfloat16())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        positions = (x > 9).long().cumsum(-1) + torch.arange(600)
        alibi = (self.slopes * positions[:, None]).reshape(-1, 600, 4)
        y = torch.cat([x.bfloat16(), x.bfloat16() + 1 / 3], 1).softmax(-1) + torch.ones((), dtype=torch.bfloat16)
        return self.layer(x) + alibi.float().mean(1), (y * 3).float()


def test_the_numbers_are_the_same_and_onnx_runtime_computes_them(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Alibi().eval(), torch.randn(3, 600)
    graph = capture(model, x)
    wanted = model(x)
    for found, expected in zip(graph(x), wanted, strict=True):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    halves = [
        str(node.target) for node in graph.graph.nodes if getattr(node.meta.get("val"), "dtype", None) is torch.bfloat16
    ]
    assert set(halves) <= {"aten.to.dtype", "slopes"}
    write(float_to_onnx(graph, x, 20), tmp_path / "model.onnx")
    session = open_session(tmp_path / "model.onnx", provider="cpu")
    for made, expected in zip(session.run({session.inputs[0].name: x.numpy()}), wanted, strict=True):
        np.testing.assert_allclose(made, expected.detach(), rtol=1e-5)
