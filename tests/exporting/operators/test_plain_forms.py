"""What a mask is made of is written into a file without decomposing the graph."""

from __future__ import annotations

import math
from collections.abc import Callable
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
from qtool.quantization.capturing.float_form import float_form


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


class Of(nn.Module):
    """A function of the inputs."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.function(x, y)


WRITTEN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "products": lambda x, y: torch.cumprod(x, 1),
    "products of the last": lambda x, y: (1 - x.sigmoid() + y.mean()).cumprod(-1),
    "a product of one": lambda x, y: torch.cumprod(x[:, :1], 1),
    "products of whole numbers": lambda x, y: torch.cumprod((x * 2).int(), 2),
    "products in another type": lambda x, y: torch.cumprod((x * 2).int(), 2, dtype=torch.float32),
    "distances": torch.cdist,
    "distances of few": lambda x, y: torch.cdist(x[:, :5], y[:, :7]),
    "distances of many by differences": lambda x, y: torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist"),
    "distances in blocks": lambda x, y: torch.cdist(x, y, 1.0),
    "largest distances": lambda x, y: torch.cdist(x, y, math.inf),
    "distances of samples": lambda x, y: torch.cdist(x[:, 0], y[0]),
    "distances between samples": lambda x, y: torch.cdist(x[:, 0], y[:, 1]),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_products_along_an_axis_and_distances_have_forms_for_any_batch(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(3, rows, 6, generator=generator) for rows in (29, 30))
    model = Of(WRITTEN[name])
    made = to_onnx.float_to_onnx(float_form(model, (x, y)), (x, y), 21)
    session = onnxruntime.InferenceSession(ir.serde.serialize_model(made).SerializeToString())
    for batch in (3, 1):
        given = {"x": x[:batch].numpy(), "y": y[:batch].numpy()}
        given = {value.name: given[value.name] for value in session.get_inputs()}
        expected = model(x[:batch], y[:batch]).numpy()
        (found,) = session.run(None, given)
        assert found.dtype == expected.dtype
        np.testing.assert_allclose(found, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (lambda x, y: torch.cumprod(x, 1), "products along an axis of known size"),
        (lambda x, y: torch.cdist(x, y, 3.0), r"distances with p of 1, 2, inf; got cdist with p=3\.0"),
    ],
)
def test_what_has_no_form_is_told_as_it_is_written(function: Callable[..., Tensor], told: str) -> None:
    x, y = torch.randn(2, 5, 6), torch.randn(2, 5, 6)
    graph = float_form(Of(function), (x, y), axes=(1,))
    with pytest.raises(QtoolError, match=told):
        to_onnx.float_to_onnx(graph, (x, y), 21)


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
