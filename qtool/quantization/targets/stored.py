"""What is stored in bytes and read in float, whatever else is quantized: tables, recurrent layers, stacks of matrices.

No kernel multiplies these integers, nothing is calibrated for them, and what they gain is size. The exception is a
recurrent layer where the target computes it in integers (see :mod:`qtool.quantization.storage`).
"""

from __future__ import annotations

import math
from typing import Any

from torch.fx import Node

from qtool.graphs.operators import aten
from qtool.quantization.targets.base import Pattern, makes_no_angle, makes_no_logarithm

LEAST_ROWS = 256
"""Of an embedding table that is worth quantizing."""
LEAST_NUMBERS = 4096
"""Of a stack of matrices that is."""
CELLS = (
    aten.lstm_cell.default, aten.gru_cell.default, aten.rnn_tanh_cell.default, aten.rnn_relu_cell.default,
)  # fmt: skip
PRODUCTS = (aten.matmul.default, aten.bmm.default)
_TURNS = (
    aten.permute.default, aten.transpose.int, aten.reshape.default, aten.flatten.using_ints, aten.unflatten.int,
    aten.select.int, aten.unsqueeze.default,
)  # fmt: skip


def moved_from(value: Node) -> list[Node]:
    """The value that another is turned, reshaped or taken from, what does so, and the value itself."""
    line = [value]
    while line[0].target in _TURNS and len(line[0].all_input_nodes) == 1:
        line[:0] = line[0].all_input_nodes
    return line


def is_stored(value: Any) -> bool:
    """Whether a value is a stored tensor, turned or reshaped or not."""
    return isinstance(value, Node) and moved_from(value)[0].op == "get_attr"


def stored_by_rows(node: Node) -> list[Node]:
    """What a node reads by rows: its table, the matrices of its gates, layer after layer, or its stack of matrices."""
    if node.target is aten.embedding.default:
        found: Any = node.args[:1]
    elif node.target in CELLS:
        found = node.args[2:4]
    elif node.target in (*PRODUCTS, aten.einsum.default):
        return [moved_from(value)[0] for value in node.all_input_nodes if is_stored(value)]
    else:
        found = node.args[2]
    return [value for value in found if isinstance(value, Node) and value.meta["val"].dim() == 2]


def _large_table(node: Node) -> str:
    """Why the table of a lookup is not worth quantizing; empty when it is."""
    table = node.args[0]
    if not (isinstance(table, Node) and table.op == "get_attr"):
        return "its table is computed, not stored"
    rows = table.meta["val"].shape[0]
    return "" if rows >= LEAST_ROWS else f"a table of {rows} rows is small"


def _stored_gates(node: Node) -> str:
    """Why the matrices of a recurrent layer cannot be stored in bytes; empty when they can."""
    stored = all(matrix.op == "get_attr" for matrix in stored_by_rows(node))
    return "" if stored else "its weight is computed, not stored"


def _reads_a_stack(node: Node) -> bool:
    """Whether a product is one of activations with a stored tensor of real numbers."""
    found = stored_by_rows(node)
    return len(found) == 1 < len(node.all_input_nodes) and found[0].meta["val"].is_floating_point()


def _large_stack(node: Node) -> str:
    """Why a stored tensor is not worth quantizing; empty when it is."""
    count = math.prod(stored_by_rows(node)[0].meta["val"].shape)
    if count < LEAST_NUMBERS:
        return f"its {count} stored numbers are few"
    return makes_no_angle(node) or makes_no_logarithm(node)


_OPENED = "its 8-bit weights are dequantized as the file is opened and it runs in float: what they gain is size"
TABLE = Pattern(
    "embedding", (aten.embedding.default,), operands=(), quantizes_output=False, accepts=_large_table, stored=True,
    in_float="rows of its 8-bit table are dequantized as they are read: what that gains is size",
)  # fmt: skip
RECURRENT = Pattern(
    "recurrent", (aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input, *CELLS), operands=(),
    quantizes_output=False, accepts=_stored_gates, stored=True, in_float=_OPENED,
)  # fmt: skip
STACK = Pattern(
    "stored_product", (*PRODUCTS, aten.einsum.default), operands=(), quantizes_output=False, meant=_reads_a_stack,
    accepts=_large_stack, stored=True, in_float=_OPENED,
)  # fmt: skip
STORED = (TABLE, RECURRENT, STACK)
