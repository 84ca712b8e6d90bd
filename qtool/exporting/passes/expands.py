"""Constants that are repeated for each sample, as lookups by zeros that are made of the samples.

A class token, or the first state of a recurrent layer, is an ``Expand`` of a constant to a shape that is computed from
the batch. Beside data that only a shape decides, OpenVINO (2026.4) was seen to lose a convolution's bias, which left an
answer 8 dB from the right one. The same numbers are

    Expand(c, (N, a, b)) = Gather(c of 1 × a × b, zeros of N)

with the zeros taken from one number of each sample, converted to a whole number and multiplied by 0. Along axes that c
does not have it is expanded behind the lookup, by sizes that are known: as a table a picture's coordinates took so many
bytes that the size gate refused a small net. Where the result is only converted (a mask of nothing, to booleans) the
constant is: OpenVINO refuses a file in which it would do so.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from qtool.exporting.passes.biases import drop_unused
from qtool.exporting.passes.parts import constant

_WHOLE = ir.DataType.INT64


def apply(model: ir.Model) -> int:
    """Rewrites in place each constant that is expanded by the number of samples alone; returns how many."""
    changed = 0
    zeros: dict[ir.Value, ir.Value] = {}
    for node in list(model.graph):
        found = _repeated(node)
        if found is not None:
            table, sizes, axis, source = found
            if source not in zeros:
                zeros[source] = _zeros(model, source)
            _look_up(model, *_converted(node, table), sizes, axis, zeros[source])
            changed += 1
    if changed:
        RemoveUnusedNodesPass()(model)
        drop_unused(model)
    return changed


def _repeated(node: ir.Node) -> tuple[npt.NDArray[np.generic], tuple[int, ...], int, ir.Value] | None:
    """What is repeated, its sizes for a sample, along which axis, and the input whose samples are counted; or None."""
    value, shape = node.inputs[:2] if node.op_type == "Expand" else (None, None)
    if value is None or value.const_value is None or shape is None:
        return None
    sizes = _sizes(shape)
    counted = [axis for axis, size in enumerate(sizes) if isinstance(size, ir.Value)]
    if len(counted) != 1:
        return None
    (axis,) = counted
    source = sizes[axis]
    assert isinstance(source, ir.Value)
    stored, behind = value.const_value.numpy(), len(sizes) - axis
    if stored.ndim > len(sizes) or (stored.ndim >= behind and stored.shape[-behind] != 1):
        return None
    fixed = tuple(1 if isinstance(size, ir.Value) else size for size in sizes)
    table = stored.reshape(*[1] * (len(sizes) - stored.ndim), *stored.shape)
    return table, np.broadcast_shapes(table.shape, fixed), axis, source  # a size of 1 keeps its own


def _sizes(shape: ir.Value) -> list[int | ir.Value]:
    """The sizes of a computed shape, the input whose samples are counted in the place of their number; or nothing."""
    made = shape.producer()
    if made is None or made.op_type not in ("Concat", "Shape"):
        return []
    sizes: list[int | ir.Value] = []
    for part in made.inputs if made.op_type == "Concat" else [shape]:
        if part is None:
            return []
        source = _counts(part.producer())
        if part.const_value is not None:
            sizes += [int(size) for size in part.const_value.numpy().reshape(-1)]
        elif source is not None:
            sizes.append(source)
        else:
            return []
    return sizes


def _counts(node: ir.Node | None) -> ir.Value | None:
    """The graph's input whose first size alone a ``Shape`` gives."""
    if node is None or node.op_type != "Shape" or node.inputs[0] is None or not node.inputs[0].is_graph_input():
        return None
    start, end = (node.attributes[name].as_int() if name in node.attributes else None for name in ("start", "end"))
    return node.inputs[0] if start in (None, 0) and end == 1 else None


def _converted(node: ir.Node, table: npt.NDArray[np.generic]) -> tuple[ir.Node, npt.NDArray[np.generic]]:
    """The node that gives the result, and the table for it: the conversion that alone reads it, if there is one."""
    readers = [use.node for use in node.outputs[0].uses()]
    if len(readers) != 1 or readers[0].op_type != "Cast" or node.outputs[0].is_graph_output():
        return node, table
    return readers[0], table.astype(ir.DataType(readers[0].attributes["to"].as_int()).numpy())


def _zeros(model: ir.Model, source: ir.Value) -> ir.Value:
    """As many zeros as an input has samples, in 64 bits."""
    assert source.shape is not None
    name, inner = f"{source.name}/zeros", len(source.shape) - 1
    value, steps = source, list[ir.Node]()
    if inner:
        ends = [constant(model, f"{name}/{end}", np.full(inner, n)) for end, n in (("first", 0), ("second", 1))]
        axes = constant(model, f"{name}/axes", np.arange(1, inner + 1))
        steps.append(ir.node("Slice", [value, *ends, axes]))
        steps.append(ir.node("Reshape", [steps[-1].outputs[0], constant(model, f"{name}/row", np.array([-1]))]))
        value = steps[-1].outputs[0]
    if source.dtype != _WHOLE:
        steps.append(ir.node("Cast", [value], {"to": _WHOLE}))
        value = steps[-1].outputs[0]
    steps.append(ir.node("Mul", [value, constant(model, f"{name}/none", np.array(0))]))
    for index, step in enumerate(steps):
        step.name = step.outputs[0].name = f"{name}/{index}"
    first = next(iter(model.graph))
    model.graph.insert_before(first, steps)
    return steps[-1].outputs[0]


def _look_up(
    model: ir.Model, node: ir.Node, table: npt.NDArray[np.generic], sizes: tuple[int, ...], axis: int, zeros: ir.Value
) -> None:
    result = node.outputs[0]
    steps = [ir.node("Gather", [constant(model, f"{result.name}/table", table.copy()), zeros], {"axis": axis})]
    if table.shape != sizes:
        looked_up = steps[0].outputs[0]
        looked_up.name = steps[0].name = f"{result.name}/rows"
        steps.append(ir.node("Expand", [looked_up, constant(model, f"{result.name}/sizes", np.array(sizes))]))
    steps[-1].name = node.name
    model.graph.insert_before(node, steps)
    ir.convenience.replace_nodes_and_values(model.graph, node, [node], steps, [result], steps[-1].outputs)
