"""Recurrent layers in ONNX: one operator for each layer, where sequences stand first and directions second.

``qtool::lstm`` becomes ``DynamicQuantizeLSTM``, one of ONNX Runtime's own operators, whose layout its tensors have
already. Float LSTMs and GRUs are left to torch's exporter. Plain cells, which that writes step by step, become ``RNN``:
of any length, written at once, and faster in ONNX Runtime for one sample, if slower for several in wide layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import onnx_ir as ir
import torch
from onnx.defs import OpSchema
from onnxscript import opset18 as op  # the least that any target asks for
from onnxscript.values import Op, Opset

from qtool.errors import QtoolError
from qtool.graphs.lstm import OPERATOR, PARTS

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
    value, hidden, cells = _turned(x, batch_first), [], []
    for index in range(len(weights) // PARTS):
        weight, scales, own, own_scales, biases = weights[PARTS * index : PARTS * (index + 1)]
        zeros = op.Constant(value=ir.tensor(np.zeros([int(n) for n in scales.shape], np.int8)))
        states, h, c = _LSTM(
            value, weight, own, biases, None, *(_of_layer(whole, index, bidirectional) for whole in hx), None,
            scales, zeros, own_scales, zeros,
            direction=_DIRECTION[bidirectional], hidden_size=int(own.shape[1]),
        )  # fmt: skip
        value = _joined(states, bidirectional)
        hidden.append(h)
        cells.append(c)
    return _turned(value, batch_first), op.Concat(*hidden, axis=0), op.Concat(*cells, axis=0)


def _rnn(activation: str) -> Callable[..., tuple[Any, ...]]:
    """The ONNX form of torch's plain recurrent layers."""

    def translated(
        x: Any, hx: Any, params: Sequence[Any], has_biases: bool, num_layers: int, dropout: float, train: bool,
        bidirectional: bool, batch_first: bool,
    ) -> tuple[Any, ...]:  # fmt: skip
        value, hidden, count = _turned(x, batch_first), [], 4 if has_biases else 2
        width = 2 if bidirectional else 1
        for index in range(num_layers):
            own = params[count * width * index : count * width * (index + 1)]
            parts = [own[place::count] for place in range(count)]
            biases = [op.Concat(*pair, axis=0) for pair in zip(*parts[2:], strict=True)]
            states, last = op.RNN(
                value, _stacked(parts[0]), _stacked(parts[1]), _stacked(biases) if biases else None, None,
                _of_layer(hx, index, bidirectional), activations=[activation] * width,
                direction=_DIRECTION[bidirectional], hidden_size=int(hx.shape[2]),
            )  # fmt: skip
            value = _joined(states, bidirectional)
            hidden.append(last)
        return _turned(value, batch_first), op.Concat(*hidden, axis=0)

    return translated


_DIRECTION = {False: "forward", True: "bidirectional"}


def _turned(value: Any, batch_first: bool) -> Any:
    """Sequences first in place of batches, or the other way round."""
    return op.Transpose(value, perm=[1, 0, 2]) if batch_first else value


def _of_layer(states: Any, index: int, bidirectional: bool) -> Any:
    """The states that one layer begins with."""
    width = 2 if bidirectional else 1
    ends = (op.Constant(value_ints=[width * place]) for place in (index, index + 1))
    return op.Slice(states, *ends, op.Constant(value_ints=[0]))


def _joined(states: Any, bidirectional: bool) -> Any:
    """What both directions give of each step, side by side."""
    if not bidirectional:
        return op.Squeeze(states, op.Constant(value_ints=[1]))
    return op.Reshape(op.Transpose(states, perm=[0, 2, 1, 3]), op.Constant(value_ints=[0, 0, -1]))


def _stacked(parts: Sequence[Any]) -> Any:
    """One tensor for each direction, as one."""
    return op.Concat(*(op.Unsqueeze(part, op.Constant(value_ints=[0])) for part in parts), axis=0)


TRANSLATIONS: dict[Any, Callable[..., tuple[Any, ...]]] = {
    torch.ops.qtool.lstm.default: lstm,
    torch.ops.aten.rnn_tanh.input: _rnn("Tanh"),
    torch.ops.aten.rnn_relu.input: _rnn("Relu"),
}
"""The forms in ONNX of qtool's own operator and of plain recurrent layers."""


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
