"""Writes an ONNX file tensor by tensor.

A file is one protobuf message, and the usual way to write one holds the model three times: the tensors, the message
with a copy of each, and the message as bytes. But a message is a row of fields, each a key, its length and its bytes:

    ModelProto = { …, 7: GraphProto = { …, 5: TensorProto = { dims, type, name, 9: raw data }, 5: … } }

so once the lengths are known, which they are from shapes and types, the graph is written with everything but its
large tensors, and these behind it one at a time (https://protobuf.dev/programming-guides/encoding). What is written so
is read by any reader of ONNX.

Left out on purpose: files beyond 2 GiB, which protobuf cannot hold; ``to_onnx.save`` puts their tensors beside them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

GRAPH, INITIALIZER, RAW_DATA = 7, 5, 9  # field numbers in onnx.proto
LARGE_BYTES = 4096


def write(model: ir.Model, path: Path) -> None:
    """Writes ``model`` to ``path``; beside the model, one tensor at a time is in memory."""
    large = large_initializers(model)
    with stand_ins(large):
        proto = ir.serde.serialize_model(model)
    small = [tensor for tensor in proto.graph.initializer if tensor.name not in large]
    del proto.graph.initializer[:]
    proto.graph.initializer.extend(small)
    graph = proto.graph.SerializeToString()
    proto.ClearField("graph")
    heads = {name: _head(name, value) for name, value in large.items()}
    bodies = {name: len(heads[name]) + value.const_value.nbytes for name, value in large.items()}
    total = len(graph) + sum(len(_key(INITIALIZER, size)) + size for size in bodies.values())
    with path.open("wb") as file:
        file.write(proto.SerializeToString() + _key(GRAPH, total) + graph)
        for name, value in large.items():
            file.write(_key(INITIALIZER, bodies[name]) + heads[name])
            file.write(value.const_value.tobytes())


def large_initializers(model: ir.Model) -> dict[str, ir.Value]:
    """The initializers that are worth handling one at a time, by name."""
    found = {}
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if tensor is not None and tensor.dtype != ir.DataType.STRING and tensor.nbytes > LARGE_BYTES:
            found[name] = value
    return found


@contextmanager
def stand_ins(values: dict[str, ir.Value]) -> Iterator[None]:
    """Lets these initializers be empty for the block."""
    kept = {name: value.const_value for name, value in values.items()}
    try:
        for name, value in values.items():
            value.const_value = ir.Tensor(np.empty(0, np.float32), name=name)
        yield
    finally:
        for name, value in values.items():
            value.const_value = kept[name]


def _head(name: str, value: ir.Value) -> bytes:
    """A TensorProto up to its data."""
    tensor = value.const_value
    assert tensor is not None
    dims = [int(size) for size in tensor.shape]
    head: bytes = onnx.TensorProto(dims=dims, data_type=tensor.dtype.value, name=name).SerializeToString()
    return head + _key(RAW_DATA, tensor.nbytes)


def _key(field: int, size: int) -> bytes:
    """What stands before the bytes of a field: its number, its kind (2: bytes with a length), their length."""
    return _varint(field << 3 | 2) + _varint(size)


def _varint(value: int) -> bytes:
    """Seven bits to a byte, lowest first; the eighth says that more follow."""
    parts = []
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes([*parts, value])
