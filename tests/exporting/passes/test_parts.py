"""What passes share: how much they may add to a file between them."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from qdq_files import Builder

from qtool.exporting.passes import parts


def test_passes_add_less_between_them_than_the_size_gate_lets_by() -> None:
    b = Builder()
    read = b.op("Add", b.input("x", [1000]), b.constant(np.zeros(1000), np.float32))
    model = ir.serde.deserialize_model(b.model(read))
    found = []
    for number in range(4):
        left = parts.room(model, parts.MOST_GROWTH)
        found.append(left)
        parts.constant(model, f"more_{number}", np.zeros(round(left), np.int8))
    assert found == pytest.approx([20, 20, 5, 0])
