"""What the exporter folds for each reader is stored once; what is the model's stays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import torch
from torch import Tensor, nn

from qtool.exporting.to_onnx import float_to_onnx, save
from qtool.quantization.capturing.float_form import float_form


class Reader(nn.Module):
    """A recurrent layer, which the exporter writes step by step, and two layers that hold the same."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.RNN(40, 48, batch_first=True)
        self.left, self.right = nn.Linear(48, 32), nn.Linear(48, 32)
        self.right.load_state_dict(self.left.state_dict())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        last = self.cell(x)[1][0]
        return self.left(last), self.right(last + 1)


def test_a_weight_that_every_step_reads_is_stored_once(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, x = Reader().eval(), torch.randn(3, 9, 40)
    model = float_to_onnx(float_form(net, x), x, 18)
    stored = {name: value.const_value for name, value in model.graph.initializers.items()}
    weights = sum(parameter.nbytes for parameter in net.parameters())
    assert sum(tensor.nbytes for tensor in stored.values() if tensor is not None) < 1.02 * weights
    assert {"left/weight", "right/weight"} <= stored.keys()
    save(model, tmp_path / "net.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "net.onnx", providers=["CPUExecutionProvider"])
    found = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    for wanted, got in zip(net(x), found, strict=True):
        np.testing.assert_allclose(got, wanted.detach().numpy(), atol=1e-5)
