"""What ONNX Runtime says of a file that it does not take, in a line, and what is to be done about it.

Its messages begin with codes and positions in its source, and tell a file that is broken, one that is no valid ONNX
and one that only this runtime refuses in much the same way. What to do is chosen by their words, the most telling
first.
"""

from __future__ import annotations

import re

from qtool.errors import one_line

_LONGEST = 300
_NEWER = "or install a newer onnxruntime"
_CURES = (
    ("not a registered function/op|No Op registered", f"use a file of standard ONNX operators, {_NEWER}"),
    (r"implementation for \w+\([1-6]\)", "convert it to opset 7 or later: onnx.version_converter"),
    (
        "Could not find an implementation|Failed to find kernel|NOT_IMPLEMENTED|is not currently registered",
        f"write it with operators, and types of numbers, that ONNX Runtime computes, {_NEWER}",
    ),
    ("serialization failed", "free space in the folder for temporary files (TMPDIR)"),  # of what it writes itself
    ("path validation failed", "put the external data file beside the model, and name it there without folders"),
    ("[Ee]xternal[ _]data|External initializer", "put the whole external data file beside the model"),
    ("Unsupported model IR version", f"save it with a lower ir_version, {_NEWER}"),
    ("Opset|opset version", f"export with a lower opset, {_NEWER}"),
    ("Unrecognized attribute", f"export with the opset that its operators are of, {_NEWER}"),
    (
        "[Ii]nvalid model|Type Error|ShapeInferenceError|Missing |No opset import",
        "export it again: onnx.checker.check_model(path, full_check=True) tells more",
    ),
    ("Exception during", "leave what ONNX Runtime refuses out of the model, or write it another way"),
)
"""What in a message calls for what."""


def reason(error: Exception) -> str:
    """ONNX Runtime's message without its prefixes and source positions, at most 300 characters."""
    whole = one_line(error).strip(" :")
    text = re.sub(r"\[ONNXRuntimeError\] : \d+ : \w+( : ?|$)", "", whole) or whole.rpartition(" : ")[2]
    text = re.sub(r"^Load model from .*? failed: ?", "", text)
    signature = r"[^()]*onnxruntime::[^()]*\([^()]*\) "  # of the C++ function that failed
    text = re.sub(rf"/\S*/onnxruntime/\S+:\d+ ({signature}|\S+ )?", "", text)
    text = re.sub(r"^ONNX Runtime only \*guarantees\* .*? Opset", "Opset", text)  # or what it supports is cut off
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def cure(error: Exception) -> str:
    """What to do about a file that is not opened."""
    text = str(error)
    return next((do for words, do in _CURES if re.search(words, text)), "check that the file is complete and is ONNX")
