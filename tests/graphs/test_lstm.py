"""``qtool::lstm`` against ONNX Runtime's own operator, bit for bit, and against torch's float LSTM."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper
from qdq_files import options
from torch import Tensor, nn

from qtool.graphs.lstm import OPERATOR, dynamically, layer, lstm
from qtool.quantization.storage import _layer

Array = npt.NDArray[Any]


def weights(width: int, inputs: int, size: int, seed: int = 0) -> list[Tensor]:
    """A layer's parts: random integers, scales that differ, biases."""
    draw = torch.Generator().manual_seed(seed)
    found = []
    for rows in (inputs, size):
        found.append(torch.randint(-127, 128, (width, rows, 4 * size), generator=draw, dtype=torch.int8))
        found.append((torch.rand((width, 4 * size), generator=draw) + 0.5) / (40 * rows**0.5))
    return [*found, torch.randn((width, 8 * size), generator=draw)]


def in_runtime(x: Tensor, parts: list[Tensor], h: Tensor, c: Tensor) -> list[Array]:
    """What ONNX Runtime's operator makes of a layer, on one thread."""
    weight, scale, hidden, hidden_scale, bias = (part.numpy() for part in parts)
    constants = {
        "w": weight, "r": hidden, "b": bias, "h": h.numpy(), "c": c.numpy(), "sw": scale, "sr": hidden_scale,
        "zw": np.zeros_like(scale, np.int8), "zr": np.zeros_like(scale, np.int8),
    }  # fmt: skip
    names = ["x", "w", "r", "b", "", "h", "c", "", "sw", "zw", "sr", "zr"]
    node = onnx.helper.make_node(
        OPERATOR, names, ["y", "last", "cell"], domain="com.microsoft", hidden_size=h.shape[2],
        direction="bidirectional" if len(h) == 2 else "forward",
    )  # fmt: skip
    value = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in ("y", "last", "cell")]
    given = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, list(x.shape))
    graph = onnx.helper.make_graph(
        [node], "lstm", [given], value, [numpy_helper.from_array(array, name) for name, array in constants.items()]
    )
    sets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("com.microsoft", 1)]
    model = onnx.helper.make_model(graph, opset_imports=sets, ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), options(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x.numpy()})  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("length", "batch", "inputs", "size", "width"), [(1, 1, 8, 8, 1), (9, 3, 20, 33, 2), (5, 4, 600, 16, 1)]
)
def test_a_layer_is_the_runtimes_to_the_last_bit(length: int, batch: int, inputs: int, size: int, width: int) -> None:
    parts = weights(width, inputs, size)
    draw = torch.Generator().manual_seed(1)
    x = torch.randn((length, batch, inputs), generator=draw)
    h, c = (torch.randn((width, batch, size), generator=draw) for _ in range(2))
    for ours, theirs in zip(layer(x, parts, h, c), in_runtime(x, parts, h, c), strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs)


@pytest.mark.parametrize(("values", "zero"), [([0.0, 2.55], 0), ([-2.55, -1.0], 255), ([-1.0, 1.55], 100)])
def test_the_range_holds_zero(values: list[float], zero: int) -> None:
    steps, scale, zero_point = dynamically(torch.tensor([values]))
    assert int(zero_point) == zero
    assert float(scale) == pytest.approx(0.01)
    np.testing.assert_allclose(((steps - zero_point) * scale)[0], values, atol=1e-6)


def test_zeros_have_a_scale() -> None:
    assert float(dynamically(torch.zeros(1, 3))[1]) == 1.0


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@torch.no_grad()
def test_it_is_torchs_lstm_but_for_rounding(bias: bool, batch_first: bool) -> None:
    torch.manual_seed(0)
    net = nn.LSTM(12, 16, 2, bias=bias, batch_first=batch_first, bidirectional=True)
    x, hx = torch.randn(5, 5, 12), [torch.randn(4, 5, 16) for _ in range(2)]
    wanted, (h, c) = net(x, tuple(hx))
    each = [[p.detach() for p in own] for own in net.all_weights]
    parts = [part for start in (0, 2) for part in _layer(each[start : start + 2], 127, "lstm")]
    for ours, theirs in zip(lstm(x, hx, parts, True, batch_first), (wanted, h, c), strict=True):
        assert ours.shape == theirs.shape
        assert 0 < float((ours - theirs).abs().max()) < 0.03
    torch.library.opcheck(lstm, (x, hx, parts, True, batch_first), test_utils=("test_schema", "test_faketensor"))
