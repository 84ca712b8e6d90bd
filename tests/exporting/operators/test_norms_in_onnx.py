"""Norms in the file: torch's numbers, in few operators that ONNX Runtime has kernels for."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qtool.exporting import to_onnx

KNOWN = {"Reshape", "Shape", "InstanceNormalization", "BatchNormalization"}


class Normed(nn.Module):
    """An image, a signal and a row of features, each with norms of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.rand(6) + 0.5), nn.Parameter(torch.randn(6))

    def forward(self, image: Tensor, signal: Tensor, row: Tensor) -> tuple[Tensor, ...]:
        return (
            F.group_norm(F.group_norm(image, 3, self.w, self.b, 0.1), 1, None, self.b),
            F.group_norm(F.group_norm(signal, 6), 2, self.w, None),
            F.group_norm(row, 2, self.w, self.b),
        )


@pytest.mark.parametrize("more", [0, 2])
def test_the_file_gives_torchs_numbers_in_a_few_operators(more: int) -> None:
    model, example = Normed().eval(), (torch.randn(2, 6, 4, 5), torch.randn(2, 6, 4), torch.randn(2, 6))
    shapes = [
        {axis: torch.export.Dim.DYNAMIC for axis in ((0, 2, 3) if more else (0,)) if axis < x.dim()} for x in example
    ]
    graph = torch.export.export(model, example, dynamic_shapes=tuple(shapes)).module(check_guards=False)
    made = to_onnx.float_to_onnx(graph, example, 21)
    assert {node.op_type for node in made.graph} <= KNOWN
    session = onnxruntime.InferenceSession(ir.serde.serialize_model(made).SerializeToString())
    given = [torch.randn(3, 6, *(size + more for size in x.shape[2:])) for x in example]
    found = session.run(None, {value.name: x.numpy() for value, x in zip(session.get_inputs(), given, strict=True)})
    for got, wanted in zip(found, model(*given), strict=True):
        np.testing.assert_allclose(got, wanted.detach().numpy(), atol=2e-6)


class Behind(nn.Module):
    """Batch-norms behind what they cannot be folded into."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.row = nn.BatchNorm2d(6), nn.BatchNorm1d(6, affine=False)
        self.image.running_mean, self.row.running_var = torch.randn(6), torch.rand(6) + 0.5

    def forward(self, x: Tensor) -> Tensor:
        return self.row(self.image(x.relu()).mean((2, 3)))


def test_batch_norms_are_written_without_decomposing_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    model, example = Behind().eval(), torch.randn(2, 6, 4, 5)
    shape = {0: torch.export.Dim.DYNAMIC}
    program = torch.export.export(model, (example,), dynamic_shapes=(shape,))
    monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", None)
    made = to_onnx.float_to_onnx(program.module(check_guards=False), example, 21)
    session = onnxruntime.InferenceSession(ir.serde.serialize_model(made).SerializeToString())
    (found,) = session.run(None, {session.get_inputs()[0].name: example.numpy()})
    np.testing.assert_allclose(found, model(example).detach().numpy(), atol=2e-6)
