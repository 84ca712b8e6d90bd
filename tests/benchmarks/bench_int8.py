"""What INT8 buys and costs on the definitions of published networks; prints ratios and the gates' numbers.

    python tests/benchmarks/bench_int8.py [resnet50] [mobilenet_v2] [--calibration 64] [--weight-bits 7] [--tune]
        [--json FILE]

Other names: resnext50, mobilenet_v3_large, efficientnet_b0, densenet121, vit_s16, unet.

Weights are random, batch-norm statistics settled on random batches, inputs random images of 224 pixels. Printed:

- the calibration pass over the float forward pass on the same batches (min-max and histogram), rounds
  alternating, each the least CPU time of its rounds, since other processes only add;
- the INT8 file's size over the FP32 file's;
- coverage, unit parity, the integer reference and the end-to-end comparison, as the export gates give them;
- with ``--tune``, which groups of units are left in float because the file is faster so;
- INT8 over FP32 in ONNX Runtime, one thread, batch 1, as ``qtool benchmark`` measures it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from qtool.system import allocator

allocator.tune()

sys.path.insert(0, str(Path(__file__).parent.parent))

import nets  # noqa: E402
import nets_modern  # noqa: E402

from qtool.benchmarking.stage import benchmark  # noqa: E402
from qtool.exporting.stage import export  # noqa: E402
from qtool.graphs.edits import copied  # noqa: E402
from qtool.quantization.capturing.float_form import float_form  # noqa: E402
from qtool.quantization.engines import pt2e  # noqa: E402
from qtool.quantization.placement import Placement  # noqa: E402
from qtool.quantization.stage import quantize  # noqa: E402
from qtool.quantization.targets import ORT_CPU  # noqa: E402
from qtool.recipe import BenchmarkConfig, ExportConfig, QuantizeConfig  # noqa: E402
from qtool.stages.tuning import tuned  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["resnet50", "mobilenet_v2"])
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--calibration", type=int, default=64)
    parser.add_argument("--weight-bits", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = {name: measure(name, options) for name in options.models}
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nets.settled((getattr(nets, name, None) or getattr(nets_modern, name))(), options.size, batches=2)
    batches = list(torch.randn(options.calibration, 3, options.size, options.size).split(16))
    result: dict[str, Any] = {"calibration_over_forward": calibration_cost(model, batches, options.rounds)}
    bits = QuantizeConfig(weight_bits=options.weight_bits)
    quantized = quantize(model, bits, example=batches[0][:2], calibration=batches)
    with tempfile.TemporaryDirectory() as folder:
        if options.tune:
            config = ExportConfig(tune=True, tune_seconds=options.seconds)
            quantized, result["tuning"] = tuned(quantized, Path(folder), config, batches)
        exported = export(quantized, Path(folder), ExportConfig(baselines=("fp32",)), samples=batches)
        result["gates"] = {gate["name"]: gate["found"] for gate in exported.gates}
        files = {variant: exported.files[variant] for variant in ("fp32", "int8")}
        measured = BenchmarkConfig(variants=("fp32", "int8"), seconds=options.seconds)
        report = benchmark(files, measured, batches=lambda n: ((b, torch.zeros(len(b))) for b in batches[0].split(n)))
    int8 = report["variants"]["int8"]
    result["size_ratio"] = int8["size_ratio"]
    result["speedup"] = {k: v for k, v in int8["latency"][0].items() if "speedup" in k}
    result["cpu"] = report["cpu"]
    show(name, result)
    return result


def calibration_cost(model: torch.nn.Module, batches: list[torch.Tensor], rounds: int) -> dict[str, float]:
    """CPU time of the observed pass over that of the float pass, for min-max and histogram observers."""
    plain = float_form(model, batches[0][:2])
    passes = {"float": plain}
    for kind, detailed in (("minmax", False), ("histogram", True)):
        graph = copied(plain)
        passes[kind] = pt2e.prepare(graph, Placement(graph, ORT_CPU), detailed=detailed)
    least = dict.fromkeys(passes, float("inf"))
    for _ in range(rounds):
        for kind, graph in passes.items():
            least[kind] = min(least[kind], cpu_seconds(graph, batches))
    return {kind: least[kind] / least["float"] for kind in ("minmax", "histogram")}


def cpu_seconds(graph: Callable[[torch.Tensor], Any], batches: list[torch.Tensor]) -> float:
    start = time.process_time()
    with torch.no_grad():
        for batch in batches:
            graph(batch)
    return time.process_time() - start


def show(name: str, result: dict[str, Any]) -> None:
    print(f"{name}")
    for kind, ratio in result["calibration_over_forward"].items():
        print(f"  calibration pass ({kind}) over the float pass: {ratio:.2f}")
    print(f"  INT8 file over FP32 file: {result['size_ratio']:.4f}")
    for gate, found in result["gates"].items():
        print(f"  {gate}: {found}")
    for group in result.get("tuning", {}).get("groups", ()):
        print(f"  tuning, {group['name']}: {group['reason']}")
    print(f"  INT8 over FP32 in ONNX Runtime: {result['speedup']}")


if __name__ == "__main__":
    main()
