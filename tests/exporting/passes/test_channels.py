"""Which channels of a file are the same, told of small files by hand."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
from qdq_files import Builder

from qtool.exporting.passes.channels import Channels


def conv(b: Builder, y: str, inputs: int, outputs: int, groups: int = 1) -> str:
    return b.pair(b.op("Conv", y, b.weight(outputs, inputs // groups, 1, 1), b.bias(0.05), group=groups), 0.05, 0)


def read(model: onnx.ModelProto) -> tuple[Channels, dict[str, list[int]]]:
    """The blocks of a file, and those of its tensors by name."""
    channels = Channels(ir.serde.deserialize_model(model).graph)
    return channels, {str(value.name): row for value, row in channels.rows.items()}


def start() -> tuple[Builder, str]:
    b = Builder()
    return b, b.pair(b.input("x", ["n", 8, 9, 9]), 0.05, 110)


def test_a_concatenation_is_a_row_of_blocks() -> None:
    b, x = start()
    one, other = conv(b, x, 8, 12), conv(b, x, 8, 20)
    both = b.pair(b.op("Concat", one, other, one, axis=1), 0.05, 0)
    channels, rows = read(b.model(conv(b, both, 44, 5)))
    (first,), (second,) = rows[one], rows[other]
    assert rows[both] == [first, second, first]
    assert [channels.sizes[block] for block in (first, second)] == [12, 20]
    assert sorted([first, second]) in channels.neighbours()
    assert not {first, second} & channels.fixed


def test_what_is_added_to_a_concatenation_falls_into_its_blocks() -> None:
    b, x = start()
    one, other, whole = conv(b, x, 8, 12), conv(b, x, 8, 20), conv(b, x, 8, 32)
    total = b.op("Add", b.pair(b.op("Concat", one, other, axis=1), 0.05, 0), whole)
    _, rows = read(b.model(conv(b, b.pair(total, 0.05, 0), 32, 5)))
    assert rows[whole] == [*rows[one], *rows[other]]


def test_halves_that_are_the_same_are_one_block() -> None:
    b, x = start()
    one, whole = conv(b, x, 8, 12), conv(b, x, 8, 24)
    same = conv(b, one, 12, 12, groups=12)
    total = b.op("Add", b.pair(b.op("Concat", one, same, axis=1), 0.05, 0), whole)
    _, rows = read(b.model(conv(b, b.pair(total, 0.05, 0), 24, 5)))
    assert rows[whole] == rows[one] * 2 == rows[same] * 2


def test_what_meets_something_else_is_fixed() -> None:
    b, x = start()
    seen, flat, scaled, grouped, free = (conv(b, x, 8, width) for width in (12, 10, 14, 16, 18))
    each = b.op("Mul", scaled, b.constant(np.ones((1, 14, 1, 1)), np.float32))
    ends = [b.op("Flatten", flat), conv(b, b.pair(each, 0.05, 0), 14, 5), conv(b, grouped, 16, 8, groups=4)]
    channels, rows = read(b.model(seen, *ends, conv(b, free, 18, 5)))
    fixed = {name for name in (seen, flat, scaled, grouped, free) if channels.fixed.issuperset(rows[name])}
    assert fixed == {seen, flat, scaled, grouped}


def test_a_tensor_that_an_inner_graph_reads_is_fixed() -> None:
    b, x = start()
    made = conv(b, x, 8, 12)
    branches = []
    for kind in ("Identity", "Neg"):
        node = onnx.helper.make_node(kind, [made], ["inner"])
        value = onnx.helper.make_tensor_value_info("inner", onnx.TensorProto.FLOAT, ["n", 12, 9, 9])
        branches.append(onnx.helper.make_graph([node], kind, [], [value]))
    chosen = b.op("If", b.constant(True), then_branch=branches[0], else_branch=branches[1])
    channels, rows = read(b.model(conv(b, b.pair(chosen, 0.05, 0), 12, 5)))
    assert channels.fixed.issuperset(rows[made])
