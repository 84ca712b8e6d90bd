"""NVIDIA ModelOpt with its defaults, entropy ranges; calibrated on the CPU, what is left in float kept in FP32."""

from __future__ import annotations

from pathlib import Path

from measured import Images

NEEDS = "nvidia-modelopt[onnx]==0.47.0 torch==2.13.0"


def quantize(source: Path, images: Images, out: Path, method: str = "entropy") -> str:
    """The library places Q/DQ for TensorRT, and keeps weights in float behind them; returns its version."""
    import modelopt
    import onnx
    from modelopt.onnx import quantization

    name = onnx.load(str(source), load_external_data=False).graph.input[0].name
    quantization.quantize(
        str(source), calibration_data={name: images}, calibration_method=method, calibration_eps=["cpu"],
        high_precision_dtype="fp32", output_path=str(out),
    )  # fmt: skip
    return str(modelopt.__version__)
