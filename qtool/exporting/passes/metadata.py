"""Strips what the exporter writes for its own debugging: per-node metadata and Python stack traces.

On a small network that text outweighs the weights, and it tells of the machine that exported it.
"""

from __future__ import annotations

import onnx_ir as ir


def strip(model: ir.Model) -> None:
    """Clears doc strings and metadata of the model's nodes, values and functions, in place."""
    model.metadata_props.clear()
    model.doc_string = None
    model.graph.doc_string = None
    model.graph.metadata_props.clear()
    model.producer_name, model.producer_version = "qtool", None
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        _clear(value)
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        node.metadata_props.clear()
        node.doc_string = None
        for value in node.outputs:
            _clear(value)


def _clear(value: ir.Value) -> None:
    value.metadata_props.clear()
    value.doc_string = None
    tensor = value.const_value
    if tensor is not None and (tensor.doc_string or tensor.metadata_props):
        value.const_value = ir.Tensor(tensor.numpy(), dtype=tensor.dtype, name=tensor.name)
