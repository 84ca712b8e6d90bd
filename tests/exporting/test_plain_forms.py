"""What a mask is made of is written into a file without decomposing the graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qtool.errors import QtoolError
from qtool.exporting import to_onnx
from qtool.quantization.float_form import float_form


class Masked(nn.Module):
    """Scores that a mask of whole numbers hides, as transformers write it."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        seen = mask.to(x.device).bool() & (mask < 3) | (mask == 7)
        hidden = (1.0 - seen.to(x.dtype)) * torch.finfo(x.dtype).min
        return (
            (self.scores(x) + hidden).softmax(-1)
            + torch.rsub(x, 2, alpha=3)
            + (5 - mask).type_as(x).square() * (1.5 - mask)
        )


def test_a_masks_operators_are_written_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, example = Masked().eval(), (torch.randn(2, 4), torch.tensor([[1, 0, 1, 7], [0, 3, 1, 1]]))
    graph = float_form(model, example)
    monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", None)
    made = to_onnx.float_to_onnx(graph, example, 21)
    session = onnxruntime.InferenceSession(ir.serde.serialize_model(made).SerializeToString())
    feeds = {value.name: x.numpy() for value, x in zip(session.get_inputs(), example, strict=True)}
    np.testing.assert_allclose(session.run(None, feeds)[0], model(*example).detach().numpy(), atol=2e-6)


CLAMPED: dict[str, tuple[float, float]] = {"a whole least": (0, 0.7), "a whole greatest": (-0.3, 1)}


@pytest.mark.parametrize("bounds", CLAMPED.values(), ids=CLAMPED)
def test_bounds_may_be_a_whole_number_and_a_fraction(bounds: tuple[float, float]) -> None:
    class Clamped(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.clamp(*bounds) + (x * 3).int().clamp(*bounds)

    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    made = to_onnx.float_to_onnx(float_form(Clamped(), x), x, 21)
    session = onnxruntime.InferenceSession(ir.serde.serialize_model(made).SerializeToString())
    np.testing.assert_array_equal(session.run(None, {"x": x.numpy()})[0], Clamped()(x).numpy())


def test_an_average_by_a_divisor_that_torch_would_leave_out_is_refused() -> None:
    class Pooled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.nn.functional.avg_pool2d(x, 2, 2, 0, True, divisor_override=3)

    example = torch.randn(2, 3, 5, 5)
    graph = float_form(Pooled(), example, axes=(2,))
    with pytest.raises(QtoolError, match="divisor_override"):
        to_onnx.float_to_onnx(graph, example, 21)


class Smaller(nn.Module):
    """Images that are resized with antialiasing."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        return F.interpolate(x, antialias=True, **self.options)


@pytest.mark.parametrize("target", ["ort-cpu", "openvino"])
@pytest.mark.parametrize(
    "options", [{"scale_factor": 0.3}, {"scale_factor": (0.3, 1.7), "mode": "bicubic"}, {"size": (7, 9)}], ids=str
)
def test_an_antialiased_resizing_keeps_its_factor(options: dict[str, Any], target: str) -> None:
    torch.manual_seed(0)
    model, x = Smaller(**{"mode": "bilinear", **options}), torch.randn(2, 3, 16, 19)
    made = to_onnx.float_to_onnx(float_form(model, x), x, 21, target)
    session = onnxruntime.InferenceSession(ir.serde.serialize_model(made).SerializeToString())
    np.testing.assert_allclose(session.run(None, {"x": x.numpy()})[0], model(x).numpy(), atol=2e-5)


def test_an_antialiased_resizing_between_corners_is_refused() -> None:
    x = torch.randn(2, 3, 16, 19)
    graph = float_form(Smaller(size=(7, 9), mode="bilinear", align_corners=True), x)
    with pytest.raises(QtoolError, match="got antialias with align_corners; leave one of them out"):
        to_onnx.float_to_onnx(graph, x, 21)
