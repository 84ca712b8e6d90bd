"""Language models by the bits of their weights: size, error and time over FP32 in ONNX Runtime, a few tokens at a time.

    python tests/benchmarks/bench_weights.py [--layers 4] [--width 768] [--tokens 1,16,128] [--seconds 8]

A GPT-2-shaped model with random weights, whose layer norms have some channels ten times as large and whose weights
take them back, as those of trained models do. The forms: weights alone in 8 and in 4 bits, with one scale for each
output and for each group of 32 inputs; weights and activations in 8 bits; and what onnxruntime.quantization makes of
the FP32 file in 4 bits and groups of 32 (MatMulNBitsQuantizer). One thread; the files take turns in random order, and
printed is FP32's time over each file's by the quiet moments of both, which ``qtool benchmark`` prints too.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import onnx
import torch
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
from torch import Tensor

from qtool.benchmarking.latency import Burst, Stopping, interleave, speedup
from qtool.evaluate import sqnr_db
from qtool.exporting.stage import export
from qtool.models.gpt import GPT
from qtool.quantization.stage import quantize
from qtool.recipe import ExportConfig, QuantizeConfig
from qtool.runtimes import open_session

VOCABULARY = 4096
FORMS: dict[str, dict[str, Any]] = {
    "8-bit weights": {"weights_only": True},
    "4-bit weights": {"weights_only": True, "weight_bits": 4},
    "4-bit, groups of 32": {"weights_only": True, "weight_bits": 4, "group_size": 32},
    "8 bits, activations too": {},
}
PEER = "onnxruntime.quantization, 4-bit, groups of 32"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--tokens", default="1,16,128")
    parser.add_argument("--seconds", type=float, default=8.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = uneven(options.layers, options.width)
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (32, 64), generator=draw)
    with tempfile.TemporaryDirectory() as folder:
        files = written(model, tokens, Path(folder))
        fp32, sizes = files["fp32"], {name: path.stat().st_size for name, path in files.items()}
        wanted = open_session(fp32).run({"tokens": tokens.numpy()})[0]
        lengths = [int(length) for length in options.tokens.split(",")]
        print(f"{'':46}MiB   SQNR, dB  " + "  ".join(f"{length:>4} tokens" for length in lengths))
        times = {length: measured(files, tokens[:1, :1].repeat(1, length), options.seconds) for length in lengths}
        for name, path in files.items():
            got = open_session(path).run({"tokens": tokens.numpy()})[0]
            error = "–" if name == "fp32" else f"{sqnr_db(torch.from_numpy(wanted), torch.from_numpy(got)):.1f}"
            ratios = "  ".join(f"{times[length][name]:10.2f}x" for length in lengths)
            print(f"{name:44} {sizes[name] / 2**20:5.1f} {error:>10} {ratios}")


def uneven(layers: int, width: int) -> GPT:
    """The model: eight channels of each norm are ten times as large, and the weights behind them a tenth."""
    torch.manual_seed(0)
    model = GPT(VOCABULARY, layers=layers, width=width, heads=width // 64, context=256).eval()
    chosen = torch.randperm(width, generator=torch.Generator().manual_seed(1))[:8]
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.LayerNorm) and not name.endswith("ln_f"):
                module.weight[chosen] *= 10
            if name.endswith(("c_attn", "c_fc")):
                module.weight[:, chosen] /= 10  # type: ignore[index, operator]
    return model


def written(model: GPT, tokens: Tensor, folder: Path) -> dict[str, Path]:
    """The files by name, FP32 first; each of qtool's has passed its gates."""
    files: dict[str, Path] = {}
    for index, (name, settings) in enumerate(FORMS.items()):
        config = QuantizeConfig(**{"ranges": "minmax", "algorithms": None, "dynamic_axes": (1,)} | settings)
        quantized = quantize(model, config, example=tokens[:2], calibration=list(tokens.split(8)))
        made = export(quantized, folder / str(index), ExportConfig(), samples=list(tokens.split(8)))
        files.setdefault("fp32", made.files["fp32"])
        files[name] = made.files["int8"]
    peer = MatMulNBitsQuantizer(
        onnx.load(str(files["fp32"])), bits=4, block_size=32, is_symmetric=True, accuracy_level=4
    )
    peer.process()
    files[PEER] = folder / "peer.onnx"
    onnx.save(peer.model.model, str(files[PEER]))
    return files


def measured(files: Mapping[str, Path], tokens: Tensor, seconds: float) -> dict[str, float]:
    """FP32's time over each file's for one input."""
    bursts = {name: burst(open_session(path).prepare({"tokens": tokens.numpy()})) for name, path in files.items()}
    times = interleave(bursts, reference="fp32", stopping=Stopping(seconds=seconds, width=0.0))
    return {name: speedup(times, "fp32", name).ratio for name in files}


def burst(step: Callable[[], None]) -> Burst:
    """Some runs in a row, each timed."""

    def run(runs: int, warm: int) -> tuple[list[float], float]:
        seconds = []
        for index in range(warm + runs):
            start = time.perf_counter()
            step()
            seconds += [time.perf_counter() - start] if index >= warm else []
        return seconds, 0.0

    return run


if __name__ == "__main__":
    main()
