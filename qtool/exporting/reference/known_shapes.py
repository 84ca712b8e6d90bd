"""The shapes of an ONNX model's tensors, as far as ONNX's own inference knows them."""

from __future__ import annotations

import math

import onnx


def known_shapes(model: onnx.ModelProto) -> dict[str, list[int | None]]:
    """Shapes by ONNX's inference, ``None`` for a size that is not fixed; large weights take part by shape only."""
    light = onnx.ModelProto()
    light.CopyFrom(onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import))
    light.graph.node.extend(model.graph.node)
    light.graph.input.extend(model.graph.input)
    light.graph.output.extend(model.graph.output)
    for tensor in model.graph.initializer:
        if math.prod(tensor.dims) <= 64:
            light.graph.initializer.append(tensor)
        else:
            value = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
            light.graph.input.append(value)
    inferred = onnx.shape_inference.infer_shapes(light).graph
    shapes: dict[str, list[int | None]] = {tensor.name: list(tensor.dims) for tensor in model.graph.initializer}
    for value in [*inferred.input, *inferred.value_info, *inferred.output]:
        if value.type.tensor_type.HasField("shape"):
            dims = value.type.tensor_type.shape.dim
            shapes[value.name] = [d.dim_value if d.HasField("dim_value") else None for d in dims]
    return shapes
