"""The size gate: the file's tensors take the bytes that the plan predicts.

The prediction is arithmetic over the quantized graph: each constant in the type it is stored in there, zero
points in a byte. A weight that the exporter kept in float, or stored twice, shows at once. What the file
spends on nodes and names is reported beside it.
"""

from __future__ import annotations

from pathlib import Path

import onnx
from torch.fx import Node

from qtool.exporting.gates import Gate
from qtool.form import QuantizedModel
from qtool.form import quantized as quantized_ops

TOLERANCE = 0.05


def predicted_bytes(quantized: QuantizedModel) -> int:
    """Bytes of all constants of the quantized graph; zero points of weights as int8, of biases and tables as nothing.

    Floats that are all zero are stored once for each shape.
    Weights of four bits take half a byte; their zero points, which the file leaves out, are within the tolerance.
    """
    graph = quantized.graph
    tensors = dict(graph.named_parameters(remove_duplicate=True)) | dict(graph.named_buffers(remove_duplicate=True))
    total, zeros = 0, set()
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not tensor.any():  # biases of an untrained network: one for each size
            total += 0 if tensor.shape in zeros else tensor.numel() * tensor.element_size()
            zeros.add(tensor.shape)
        elif name.endswith("zero_point") or "zero_point" in name:
            total += 0 if "bias" in name or "table" in name else tensor.numel()
        else:
            total += tensor.numel() * tensor.element_size()
    packed = [node for node in graph.graph.nodes if _is_int4(node)]
    weights = {str(node.args[0].target) for node in packed}
    return total - sum(tensors[name].numel() // 2 for name in weights)


def _is_int4(node: Node) -> bool:
    return node.target is quantized_ops.dequantize_per_channel.default and node.args[4:6] == (-7, 7)


def size(quantized: QuantizedModel, path: Path) -> Gate:
    """Compares the bytes of the file's tensors with the prediction."""
    model = onnx.load(str(path))
    stored = sum(_bytes(tensor) for tensor in model.graph.initializer)
    expected = predicted_bytes(quantized)
    allowance = max(TOLERANCE * expected, 1024)
    return Gate(
        "size", abs(stored - expected) <= allowance, f"{expected} bytes of tensors, within {TOLERANCE:.0%}",
        f"{stored} bytes of tensors in a file of {path.stat().st_size}",
        "report this model: a weight is stored in another type",
        {"predicted_bytes": expected, "tensor_bytes": stored, "file_bytes": path.stat().st_size},
    )  # fmt: skip


def _bytes(tensor: onnx.TensorProto) -> int:
    array = onnx.numpy_helper.to_array(tensor)
    return (array.size + 1) // 2 if tensor.data_type == onnx.TensorProto.INT4 else int(array.nbytes)
