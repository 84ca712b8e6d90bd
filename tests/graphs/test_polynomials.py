"""The polynomials of sigmoid and hyperbolic tangent: close to torch's, and ONNX Runtime's to the last bit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor

from qtool.graphs.polynomials import LOGISTIC_BOTTOM, LOGISTIC_TOP, horner, logistic, tanh

X = torch.cat([torch.linspace(-30, 30, 6001), torch.logspace(-20, 1, 400), -torch.logspace(-20, 1, 400)])


@pytest.mark.parametrize(("op", "ours", "theirs"), [("Sigmoid", logistic, torch.sigmoid), ("Tanh", tanh, torch.tanh)])
def test_they_are_the_functions_and_the_runtimes(
    op: str, ours: Callable[[Tensor], Tensor], theirs: Callable[[Tensor], Tensor]
) -> None:
    torch.testing.assert_close(ours(X), theirs(X), atol=3e-7, rtol=0)
    value = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [None]) for name in ("x", "y")]
    graph = onnx.helper.make_graph([onnx.helper.make_node(op, ["x"], ["y"])], op, value[:1], value[1:])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    np.testing.assert_array_equal(ours(X).numpy(), session.run(None, {"x": X.numpy()})[0])


def test_steps_taken_together_are_each_rounded_once() -> None:
    """Also where one lies midway between two float32, and where more numbers than are worked on at once are given."""
    odd, little = 2.0**12 + 1, 2.0**-40  # their square is midway, and what float64 loses of the sum decides
    found = horner(torch.tensor([odd, 0.0, 2.0]), (odd, little), (2.0, 3.0, 1.0))
    assert found[0].tolist() == [2.0**24 + 2**13 + 2, little, 2 * odd]
    np.testing.assert_array_equal(found[1].numpy(), np.float32([2 * odd**2 + 3 * odd + 1, 1.0, 15.0]))
    many = torch.rand(3, 30_000, generator=torch.Generator().manual_seed(0))
    whole = horner(many, LOGISTIC_TOP, LOGISTIC_BOTTOM)
    assert whole.shape == (2, 3, 30_000)
    for row, part in zip(many, whole.unbind(1), strict=True):
        assert torch.equal(part, horner(row, LOGISTIC_TOP, LOGISTIC_BOTTOM))
