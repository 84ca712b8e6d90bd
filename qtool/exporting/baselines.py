"""FP16 baselines: the float file with its weights and arithmetic in half precision, inputs and outputs kept.

Half precision reaches 65,504. A weight beyond it is refused by name, save float32's own limits, which stand for
"no limit" in masks and become half's limits; an activation beyond it shows as an output
that is not finite, which is checked on samples and told. Whether the arithmetic is really done in half is the
runtime's affair: ONNX Runtime's CPU provider mostly converts back to float32, so that FP16 is only storage there.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from qtool.artifacts import atomic_path
from qtool.exporting.gates import Gate
from qtool.exporting.parity import feeds_of
from qtool.runtimes import open_session

LARGEST = float(np.finfo(np.float16).max)
LIMIT = np.finfo(np.float32).max


def overflowing(model: onnx.ModelProto) -> list[str]:
    """The float32 constants with a value beyond half precision's range that is neither infinite nor float32's limit."""
    names = []
    for tensor in model.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT:
            values = np.abs(onnx.numpy_helper.to_array(tensor))
            if values.size and float(values[values < LIMIT].max(initial=0)) > LARGEST:
                names.append(tensor.name)
    return names


def write_fp16(float_path: Path, path: Path) -> list[str]:
    """Writes the half-precision twin of an FP32 file; returns the constants that overflow (then writes nothing)."""
    from onnxruntime.transformers.float16 import convert_float_to_float16

    if too_large := overflowing(onnx.load(str(float_path))):
        return too_large
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it tells of values below half's least, which become zero
        # nobody else holds the model that is handed over, so it goes when its shapes have been inferred into another
        half = convert_float_to_float16(onnx.load(str(float_path)), keep_io_types=True)
    with atomic_path(path) as temporary:
        onnx.save(half, str(temporary))
    return []


def fp16_gate(path: Path, samples: Sequence[Any], too_large: Sequence[str]) -> Gate:
    """Whether the FP16 file's outputs are finite on the samples; reported, not required."""
    expected = f"weights and activations within ±{LARGEST:.0f}"
    if too_large:
        return Gate("fp16 range", None, expected, f"no FP16 file: {', '.join(too_large[:3])} overflow half precision")
    model = onnx.load(str(path), load_external_data=False)
    session = open_session(path)
    finite = all(np.isfinite(out).all() for batch in samples for out in session.run(feeds_of(model, batch)))
    session.close()
    found = "finite outputs" if finite else "infinite or NaN outputs: an activation overflows half precision"
    return Gate("fp16 range", True if finite else None, expected, found)
