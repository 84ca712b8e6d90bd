"""Adaptive pools over open sizes and to uneven cells: a file pools any size as torch does, or is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from qtool.errors import QtoolError
from qtool.exporting.to_onnx import float_to_onnx
from qtool.quantization.capturing.float_form import float_form

OPEN = {3: (2,), 4: (2, 3), 5: (2, 3, 4)}


def made(model: nn.Module, shape: tuple[int, ...], *, known: bool = False) -> onnxruntime.InferenceSession:
    example = torch.randn(2, 3, *shape)
    graph = float_form(model.eval(), example, axes=() if known else OPEN[example.dim()])
    file = float_to_onnx(graph, example, 21)
    return onnxruntime.InferenceSession(ir.serde.serialize_model(file).SerializeToString())


class AsOther(nn.Module):
    """As many cells as the image has rows."""

    def forward(self, x: Tensor) -> Any:
        return nn.functional.adaptive_avg_pool2d(x, (2, x.shape[2]))


@pytest.mark.parametrize(
    ("pool", "shape", "other"),
    [
        (nn.AdaptiveAvgPool1d(4), (8,), (21,)),
        (nn.AdaptiveAvgPool1d(1), (8,), (3,)),
        (nn.AdaptiveAvgPool2d(2), (8, 8), (13, 5)),
        (nn.AdaptiveAvgPool2d((3, 1)), (6, 7), (4, 9)),
        (nn.AdaptiveAvgPool2d(5), (8, 8), (3, 12)),
        (nn.AdaptiveAvgPool2d((None, 2)), (8, 8), (13, 5)),
        (AsOther(), (8, 6), (5, 9)),
        (nn.AdaptiveAvgPool2d(1), (8, 8), (13, 5)),
        (nn.AdaptiveAvgPool3d(1), (4, 4, 4), (5, 3, 6)),
        (nn.AdaptiveMaxPool1d(1), (8,), (3,)),
        (nn.AdaptiveMaxPool2d(1), (8, 8), (13, 5)),
        (nn.AdaptiveMaxPool3d(1), (4, 4, 4), (5, 3, 6)),
    ],
)
def test_a_file_pools_other_sizes_than_the_examples(pool, shape, other) -> None:
    session = made(pool, shape)
    for sizes in (shape, other):
        x = torch.randn(3, 3, *sizes)
        found = session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
        np.testing.assert_allclose(found, pool(x).numpy(), atol=1e-6)


@pytest.mark.parametrize(
    ("pool", "shape"),
    [
        (nn.AdaptiveMaxPool1d(2), (8,)),
        (nn.AdaptiveMaxPool2d(2), (8, 8)),
        (nn.AdaptiveAvgPool3d(2), (4, 4, 4)),
    ],
)
def test_what_torch_would_write_for_the_examples_size_alone_is_refused(pool, shape) -> None:
    with pytest.raises(QtoolError, match="a pooling that has an ONNX form over sizes that are open"):
        made(pool, shape)


@pytest.mark.parametrize(
    ("pool", "shape"),
    [
        (nn.AdaptiveMaxPool1d(4), (10,)),
        (nn.AdaptiveMaxPool2d((3, 2)), (8, 7)),
        (nn.AdaptiveMaxPool2d((1, 3)), (8, 8)),
        (nn.AdaptiveMaxPool2d((None, 3)), (4, 8)),
        (nn.AdaptiveMaxPool2d(7), (3, 5)),
        (nn.AdaptiveMaxPool3d((2, 3, 1)), (4, 5, 6)),
        (nn.AdaptiveAvgPool1d(3), (8,)),
        (nn.AdaptiveAvgPool2d((3, 5)), (8, 7)),
        (nn.AdaptiveAvgPool2d((6, 1)), (32, 3)),
        (nn.Sequential(nn.AdaptiveAvgPool2d((5, None)), nn.AdaptiveAvgPool2d(4), nn.AdaptiveAvgPool2d(2)), (7, 6)),
        (nn.AdaptiveAvgPool3d((3, 5, 2)), (4, 5, 6)),
    ],
)
def test_a_file_pools_to_cells_that_do_not_divide_a_known_size(pool, shape) -> None:
    session = made(pool, shape, known=True)
    for batch in (1, 3):
        x = torch.randn(batch, 3, *shape)
        found = session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
        np.testing.assert_allclose(found, pool(x).numpy(), atol=1e-6)


def test_averages_of_uneven_cells_are_products_with_matrices() -> None:
    x = torch.randn(2, 3, 32, 32)
    file = float_to_onnx(float_form(nn.AdaptiveAvgPool2d(6).eval(), x), x, 21)
    assert sum(node.op_type == "MatMul" for node in file.graph) == 2


def test_where_in_uneven_cells_the_maxima_are_is_refused() -> None:
    with pytest.raises(QtoolError, match="the indices of adaptive_max_pool2d to uneven cells"):
        made(nn.AdaptiveMaxPool2d(3, return_indices=True), (8, 8), known=True)
