"""``qtool::lstm`` in ONNX: one ``DynamicQuantizeLSTM`` of ONNX Runtime's own operators for each layer.

Its tensors have that operator's layout already. Sequences stand first there and directions second.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import onnx_ir as ir
import torch
from onnx.defs import OpSchema
from onnxscript import opset21 as op
from onnxscript.values import Op, Opset

from qtool.errors import QtoolError
from qtool.lstm import OPERATOR, PARTS

DOMAIN = "com.microsoft"
_INPUTS = {
    "X": "T", "W": "T2", "R": "T2", "B": "T", "sequence_lens": "T1", "initial_h": "T", "initial_c": "T", "P": "T",
    "W_scale": "T", "W_zero_point": "T2", "R_scale": "T", "R_zero_point": "T2",
}  # fmt: skip
_LEFT_OUT = ("B", "sequence_lens", "initial_h", "initial_c", "P")
_SINGLE, _OPTIONAL = OpSchema.FormalParameterOption.Single, OpSchema.FormalParameterOption.Optional
_SCHEMA = OpSchema(
    OPERATOR, DOMAIN, 1,
    inputs=[
        OpSchema.FormalParameter(name, kind, param_option=_OPTIONAL if name in _LEFT_OUT else _SINGLE)
        for name, kind in _INPUTS.items()
    ],
    outputs=[OpSchema.FormalParameter(name, "T") for name in ("Y", "Y_h", "Y_c")],
    type_constraints=[("T", ["tensor(float)"], ""), ("T1", ["tensor(int32)"], ""), ("T2", ["tensor(int8)"], "")],
    attributes=[
        OpSchema.Attribute("direction", OpSchema.AttrType.STRING),
        OpSchema.Attribute("hidden_size", OpSchema.AttrType.INT),
    ],
)  # fmt: skip
"""What onnxscript has to know of an operator that ONNX does not have."""
_LSTM = Op(Opset(DOMAIN, 1), OPERATOR, _SCHEMA)


def lstm(x: Any, hx: Sequence[Any], weights: Sequence[Any], bidirectional: bool, batch_first: bool) -> tuple[Any, ...]:
    """The ONNX form of ``qtool::lstm``."""
    width = 2 if bidirectional else 1
    value = op.Transpose(x, perm=[1, 0, 2]) if batch_first else x
    hidden, cells = [], []
    for index in range(len(weights) // PARTS):
        first, last = op.Constant(value_ints=[width * index]), op.Constant(value_ints=[width * (index + 1)])
        state = [op.Slice(whole, first, last, op.Constant(value_ints=[0])) for whole in hx]
        weight, scales, own, own_scales, biases = weights[PARTS * index : PARTS * (index + 1)]
        zeros = op.Constant(value=ir.tensor(np.zeros([int(n) for n in scales.shape], np.int8)))
        states, h, c = _LSTM(
            value, weight, own, biases, None, *state, None, scales, zeros, own_scales, zeros,
            direction="bidirectional" if bidirectional else "forward", hidden_size=int(own.shape[1]),
        )  # fmt: skip
        joined = op.Transpose(states, perm=[0, 2, 1, 3]) if bidirectional else states
        value = (
            op.Reshape(joined, op.Constant(value_ints=[0, 0, -1]))
            if bidirectional
            else op.Squeeze(joined, op.Constant(value_ints=[1]))
        )
        hidden.append(h)
        cells.append(c)
    value = op.Transpose(value, perm=[1, 0, 2]) if batch_first else value
    return value, op.Concat(*hidden, axis=0), op.Concat(*cells, axis=0)


TRANSLATIONS = {torch.ops.qtool.lstm.default: lstm}
"""The forms in ONNX of qtool's own operators."""


def require_forms(graph: torch.fx.Graph) -> None:
    """Raises QtoolError for an LSTM whose hidden state is projected: torch would write it as another without a word."""
    for node in graph.nodes:
        if node.target is torch.ops.aten.lstm.input and len(node.args[2]) != _plain_count(node):
            raise QtoolError(
                f"export, '{node.name}'", "a recurrent layer that has an ONNX form", "an LSTM with projections",
                "leave proj_size out, and put a linear layer behind the LSTM",
            )  # fmt: skip


def _plain_count(node: torch.fx.Node) -> int:
    """How many parameters an LSTM without projections has."""
    _, _, _, has_biases, layers, _, _, bidirectional, _ = cast(tuple[Any, ...], node.args)
    return int(layers) * (2 if bidirectional else 1) * (4 if has_biases else 2)
