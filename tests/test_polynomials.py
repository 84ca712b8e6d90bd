"""The polynomials of sigmoid and hyperbolic tangent: close to torch's, and ONNX Runtime's to the last bit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor

from qtool.polynomials import logistic, tanh

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
