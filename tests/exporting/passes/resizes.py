"""ONNX models that resize images."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from qdq_files import Builder

TORCH = {"antialias": 1, "exclude_outside": 1, "coordinate_transformation_mode": "half_pixel"}
"""How torch has numbers averaged."""


def resized(sizes: list[int], x: tuple[Any, ...] = ("n", 2, 16, 19), **attributes: Any) -> onnx.ModelProto:
    """A Resize of the last axes to sizes, behind as many others as there are."""
    b = Builder()
    value = b.input("x", list(x))
    others = b.op("Shape", value, start=0, end=len(x) - len(sizes))
    shape = b.op("Concat", others, b.constant(sizes, np.int64), axis=0)
    model = b.model(b.op("Resize", value, "", "", shape, **{**TORCH, "mode": "linear", **attributes}))
    return declared(model, [*x[: len(x) - len(sizes)], *sizes])


def declared(model: onnx.ModelProto, shape: list[Any]) -> onnx.ModelProto:
    """A model with the shape of its output, which ONNX's inference does not know."""
    name = model.graph.output[0].name
    model.graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape))
    return model
