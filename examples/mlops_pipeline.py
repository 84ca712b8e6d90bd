"""qtool inside a job: train, quantize, export, measure, and fail the job when the contract is not met.

    python examples/mlops_pipeline.py --out artifacts

The job's exit code is what the pipeline around it looks at: 0 when the INT8 file may be deployed, 3 when it did not
keep to the contract, and anything else when the work itself failed. ``report.json`` in the folder says why.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import qtool

CONTRACT_NOT_MET = 3


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train, quantize, export and measure; fail when the contract is not met."
    )
    parser.add_argument("--data", default="fashion-mnist", help="data spec")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path("artifacts"))
    parser.add_argument(
        "--min-agreement", type=float, default=0.97, help="share of samples with the same top-1 as FP32"
    )
    parser.add_argument("--max-kl", type=float, default=0.01, help="KL divergence from FP32, in nats")
    parser.add_argument("--max-size", type=float, default=0.4, help="size of the INT8 file over the FP32 file")
    parser.add_argument("--min-speedup", type=float, default=1.0, help="speed of INT8 over FP32 on this machine")
    return parser.parse_args()


def build(options: argparse.Namespace) -> dict[str, Any]:
    """The stages, on plain objects: what one returns is what the next takes."""
    data = qtool.load_data(options.data)
    model = qtool.load_model("resnet", num_classes=data.num_classes, in_channels=1)
    trained = qtool.train(model, data, epochs=options.epochs, learning_rate=2e-3)
    quantized = qtool.quantize(trained, data, mode="ptq")
    exported = qtool.export(quantized, options.out, samples=data)
    figures = qtool.benchmark(exported.files, data, seconds=1.0, allow_slower=True)  # the contract below decides
    return {"train": trained.metrics, "gates": exported.gates, "benchmark": figures}


def broken_terms(report: dict[str, Any], options: argparse.Namespace) -> list[str]:
    """The terms of the contract that the INT8 file does not keep, each with what was measured."""
    int8 = report["benchmark"]["variants"]["int8"]
    measured = {
        "agreement": (int8["accuracy"]["agreement"], options.min_agreement, 1),
        "kl": (int8["accuracy"]["kl"], options.max_kl, -1),
        "size_ratio": (int8["size_ratio"], options.max_size, -1),
        "speedup": (int8["latency"][0]["speedup"], options.min_speedup, 1),
    }
    return [
        f"{name} is {value:.4f}, the contract says {'at least' if sign > 0 else 'at most'} {bound}"
        for name, (value, bound, sign) in measured.items()
        if sign * value < sign * bound
    ]


def main() -> int:
    options = arguments()
    try:
        report = build(options)
    except qtool.ContractError as error:
        print(f"not deployed: {error}", file=sys.stderr)
        return CONTRACT_NOT_MET
    broken = broken_terms(report, options)
    (options.out / "report.json").write_text(json.dumps(report | {"broken_terms": broken}, indent=2, default=str))
    for term in broken:
        print(f"not deployed: {term}", file=sys.stderr)
    return CONTRACT_NOT_MET if broken else 0


if __name__ == "__main__":
    sys.exit(main())
