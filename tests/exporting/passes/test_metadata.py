"""What the exporter wrote for its own debugging goes, what the model computes stays."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator
from qdq_files import Builder

from qtool.exporting.passes import metadata

SECRET = "/home/somebody/net.py"


def talkative() -> onnx.ModelProto:
    b = Builder()
    x = b.pair(b.input("x", [1, 3, 6, 6]), 0.05, 120)
    model = b.model(b.pair(b.op("Conv", x, b.weight(4, 3, 3, 3)), 0.3, 128))
    model.doc_string = model.graph.doc_string = SECRET
    model.producer_name, model.producer_version = "pytorch", "2.99"
    for target in (model, model.graph, *model.graph.node, *model.graph.input, *model.graph.value_info):
        target.metadata_props.add(key="stack_trace", value=SECRET)
        target.doc_string = SECRET
    for tensor in model.graph.initializer:
        tensor.doc_string = SECRET
        tensor.metadata_props.add(key="stack_trace", value=SECRET)
    return model


def test_no_word_of_it_is_left() -> None:
    model = talkative()
    stripped = ir.serde.deserialize_model(model)
    metadata.strip(stripped)
    after = ir.serde.serialize_model(stripped)
    assert SECRET.encode() not in after.SerializeToString()
    assert (after.producer_name, after.producer_version) == ("qtool", "")
    assert not after.metadata_props
    x = np.random.default_rng(0).normal(size=(1, 3, 6, 6)).astype(np.float32)
    np.testing.assert_array_equal(*(ReferenceEvaluator(m).run(None, {"x": x})[0] for m in (model, after)))
