"""Names of sizes that a file leaves open: ``batch``, and ``axis_1``, ``axis_2`` … behind it.

The exporter calls them ``s77`` and the like, which whoever serves the file has to read. Sizes of one axis that differ
between inputs, as the lengths of two sequences may, have the input's name before them from the second on. Inputs are
samples of one batch, whatever the exporter makes of that. A size that was asked to be open and that the model fixes is
the exporter's symbol ``4``, which readers take for an open one.
"""

from __future__ import annotations

import re

import onnx_ir as ir

_SYMBOL = re.compile(r"\b[su]\d+\b")


def apply(model: ir.Model) -> int:
    """Renames in place; returns how many symbols have a name now."""
    names: dict[str, str] = {}
    for value in model.graph.inputs:
        for axis, size in enumerate(value.shape or ()):
            symbol = _text(size)
            if symbol in names or not _SYMBOL.fullmatch(symbol):
                continue
            plain = f"axis_{axis}" if axis else "batch"
            names[symbol] = plain if not axis or plain not in names.values() else f"{value.name}_{plain}"
    values = (output for node in ir.traversal.RecursiveGraphIterator(model.graph) for output in node.outputs)
    for value in (*model.graph.inputs, *values):
        if value.shape is not None and any(map(_text, value.shape)):
            value.shape = ir.Shape([_named(size, names) for size in value.shape])
    return len(names)


def _text(size: int | ir.SymbolicDim) -> str:
    return "" if isinstance(size, int) else str(size.value or "")


def _named(size: int | ir.SymbolicDim, names: dict[str, str]) -> int | ir.SymbolicDim:
    if isinstance(size, int) or size.value is None:
        return size
    text = _SYMBOL.sub(lambda found: names.get(found[0], found[0]), str(size.value))
    return int(text) if text.isdecimal() else ir.SymbolicDim(text)
