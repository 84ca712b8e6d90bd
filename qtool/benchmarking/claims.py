"""What a file says it is, against what ran: the difference between an INT8 file and INT8 arithmetic.

A file's *stored* format is the one that holds most of its weights; its *arithmetic* is what the
runtime executed its multiplying operations in. Where a runtime has no kernel for a format it converts
and carries on, and the figure is one of something else. Each such case is said in a sentence.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qtool.benchmarking.size import all_tensors, load_onnx

_FORMATS = {"FLOAT": "float32", "FLOAT16": "float16", "BFLOAT16": "bfloat16", "DOUBLE": "float64", "INT8": "int8",
            "UINT8": "int8", "INT4": "int4", "UINT4": "int4"}  # fmt: skip


def stored_format(path: Path) -> str | None:
    """The number format of most of an ONNX file's weights; None for another kind of file or no weights."""
    if path.suffix != ".onnx":
        return None
    import onnx

    held: Counter[str] = Counter()
    for tensor in all_tensors(load_onnx(path)):
        kind = onnx.TensorProto.DataType.Name(tensor.data_type)
        if kind in _FORMATS:
            held[_FORMATS[kind]] += math.prod(tensor.dims)
    return held.most_common(1)[0][0] if held else None


def check_claim(name: str, stored: str | None, ran: Mapping[str, int], provider: str) -> str | None:
    """A sentence where the file's format is not what was computed in, or None.

    ``ran`` counts multiplying operations by format (:func:`qtool.runtimes.base.arithmetic`).
    """
    total = sum(ran.values())
    if stored not in ("float16", "bfloat16", "int8") or not total:
        return None
    same, other = ran.get(stored, 0), max(ran, key=lambda dtype: ran[dtype])
    if same == total:
        return None
    if same == 0 and stored != "int8":
        return f"{name}: {stored} is storage only on {provider}; all {total} multiplying operations ran in {other}"
    if same == 0:
        return f"{name}: not INT8 arithmetic on {provider}; all {total} multiplying operations ran in {other}"
    rest = ", ".join(f"{count} in {dtype}" for dtype, count in ran.items() if dtype != stored)
    return f"{name}: {same} of {total} multiplying operations ran in {stored}, {rest}"


def slower_sentence(name: str, reference: str, entry: Mapping[str, Any], ran: Mapping[str, int]) -> str | None:
    """A sentence where a variant is not faster than the reference beyond doubt, with what is known of the cause."""
    interval = entry["speedup_ci95"]
    low = interval[0] if interval else entry["speedup"]
    if low > 1:
        return None
    text = f"{name} is not faster than {reference} at batch size {entry['batch_size']} ({entry['speedup']:.2f}x)"
    floats = sum(count for dtype, count in ran.items() if dtype != "int8")
    if name.startswith("int8") and floats:
        text += f": {floats} of {sum(ran.values())} multiplying operations run in float"
    return text
