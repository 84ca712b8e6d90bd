# ruff: noqa: E402
"""Quantizes one model with several libraries, and measures their files side by side.

    python run.py --model file.py:factory --size 224 --peers onnxruntime_default,onnxruntime_best
    python run.py --model torchvision:mobilenet_v2 --settle --peers nncf --python nncf=venvs/nncf/bin/python

Every library gets the same FP32 network, the same calibration images and the same test images; each quantizes in a
process of its own, in its own virtual environment where ``--python`` names one. Printed for each file: size, SQNR and
agreement with FP32 on the test images, latency with the ratio to qtool's (rounds alternating, see qtool benchmark),
seconds and peak memory of quantizing. A peer is one file of ``peers/``; ``measured.py`` has the protocol.

Without ``--calibration`` and ``--test`` (.npy, float32, samples first) images are random. ``--settle`` gives a network
with random weights batch-norm statistics of random images. ``--provider openvino`` measures in OpenVINO's runtime; the
peer ``nncf`` then makes OpenVINO's own form.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from qtool import allocator

allocator.tune()

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from qtool.benchmarking.stage import benchmark
from qtool.exporting.to_onnx import float_to_onnx, save
from qtool.models import load_model
from qtool.quantization.stage import float_form
from qtool.recipe import BenchmarkConfig

HERE = Path(__file__).parent
OPSET = 21


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a model spec, as qtool takes it")
    parser.add_argument("--settle", action="store_true", help="give batch-norm statistics of random images")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--calibration", type=Path, help=".npy of inputs; random images by default")
    parser.add_argument("--test", type=Path, help=".npy of inputs; random images by default")
    parser.add_argument("--samples", type=int, default=32, help="random images for each of the two")
    parser.add_argument("--peers", default="onnxruntime_default,onnxruntime_best", help="names of files in peers/")
    parser.add_argument("--python", action="append", default=[], metavar="PEER=PATH", help="its interpreter")
    parser.add_argument("--provider", default="cpu", choices=("cpu", "openvino"))
    parser.add_argument("--batch-sizes", default="1")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--out", type=Path, default=Path("side_by_side_files"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    prepare(options)
    pythons = dict(pair.split("=", 1) for pair in options.python)
    made = {name: quantize(name, options, pythons) for name in ("qtool", *options.peers.split(","))}
    found = measure(options, [name for name, result in made.items() if "seconds" in result])
    (options.out / "side_by_side.json").write_text(json.dumps({"quantizing": made, **found}, indent=2) + "\n")
    show(made, found)


def prepare(options: argparse.Namespace) -> None:
    """Writes the FP32 file, the same network's spec and weights for qtool, and the images."""
    torch.manual_seed(0)
    random = np.random.default_rng(0)
    for name, given in (("calibration", options.calibration), ("test", options.test)):
        shape = (options.samples, 3, options.size, options.size)
        images = np.load(given) if given else random.standard_normal(shape, dtype=np.float32)
        np.save(options.out / f"{name}.npy", images)
    model = load_model(options.model, num_classes=1000)
    example = torch.from_numpy(np.load(options.out / "calibration.npy")[:2])
    if options.settle:
        settle(model, options.size)
    graph = float_form(model.eval(), example)
    (options.out / "fp32.txt").write_text(options.model)
    save_file(model.state_dict(), options.out / "fp32.safetensors")
    save(float_to_onnx(graph, example, OPSET), options.out / "fp32.onnx")


def settle(model: torch.nn.Module, size: int) -> None:
    """Runs random images in training mode; batch-norm takes their statistics."""
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = None
    model.train()
    with torch.no_grad():
        for _ in range(2):
            model(torch.randn(8, 3, size, size))


def quantize(name: str, options: argparse.Namespace, pythons: dict[str, str]) -> dict[str, Any]:
    """One library's file, and what it took; or ``failed`` with its last line of complaint."""
    words = [pythons.get(name, sys.executable), str(HERE / "peers" / f"{name}.py")]
    files = [options.out / "fp32.onnx", options.out / "calibration.npy", path_of(name, options)]
    done = subprocess.run([*words, *map(str, files)], capture_output=True, text=True)
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        result: dict[str, Any] = json.loads(lines[-1])
        return result
    return {"failed": (done.stderr.strip().splitlines() or ["no output"])[-1]}


def path_of(name: str, options: argparse.Namespace) -> Path:
    """Where a library's file is: OpenVINO's own form for NNCF in OpenVINO's runtime."""
    own = options.provider == "openvino" and name == "nncf"
    folder: Path = options.out
    return folder / f"{name}{'.xml' if own else '.onnx'}"


def measure(options: argparse.Namespace, names: list[str]) -> dict[str, Any]:
    """Figures of every file, each latency as a ratio to qtool's."""
    files = {name: path_of(name, options) for name in ("fp32", *names)}
    sizes = tuple(int(size) for size in options.batch_sizes.split(","))
    config = BenchmarkConfig(provider=options.provider, batch_sizes=sizes, seconds=options.seconds, width=0.01)
    images = torch.from_numpy(np.load(options.out / "test.npy"))
    found = benchmark(files, config, reference="qtool")
    for name, path in files.items():
        weights = path.with_suffix(".bin")  # OpenVINO's form is two files
        if path.suffix == ".xml" and weights.exists():
            found["variants"][name]["size_mib"] += weights.stat().st_size / 2**20
    return {"benchmark": found, "sqnr": against_fp32(files, options.provider, images)}


def against_fp32(files: dict[str, Path], provider: str, images: torch.Tensor) -> dict[str, dict[str, float]]:
    """SQNR in dB and agreement of the greatest output with the FP32 file, on the test images."""
    from qtool.evaluate import sqnr_db
    from qtool.runtimes import open_session

    outputs = {}
    for name, path in files.items():
        session = open_session(path, provider=provider)
        feed = session.inputs[0].name
        outputs[name] = np.concatenate([session.run({feed: batch.numpy()})[0] for batch in images.split(1)])
        session.close()
    wanted = torch.from_numpy(outputs["fp32"])
    return {
        name: {
            "sqnr_db": float(sqnr_db(wanted, torch.from_numpy(value))),
            "agreement": float((value.argmax(1) == outputs["fp32"].argmax(1)).mean()),
        }
        for name, value in outputs.items()
        if name != "fp32"
    }


def show(made: dict[str, dict[str, Any]], found: dict[str, Any]) -> None:
    """The table, and a line for each library that failed."""
    table = Table(
        "file", "MiB", "SQNR, dB", "agreement", "batch", "p50, ms", "qtool is faster by", "seconds", "MiB peak"
    )
    for name, entry in found["benchmark"]["variants"].items():
        error, cost = found["sqnr"].get(name, {}), made.get(name, {})
        for timed in entry["latency"]:
            low, high = timed["speedup_ci95"] or (1.0, 1.0)
            ratio = "" if name == "qtool" else f"{1 / timed['speedup']:.3f} ({1 / high:.3f} to {1 / low:.3f})"
            table.add_row(
                name, f"{entry['size_mib']:.2f}",
                *(f"{error[k]:.3g}" if error else "" for k in ("sqnr_db", "agreement")),
                str(timed["batch_size"]), f"{timed['latency_p50_ms']:.2f}", ratio,
                *(f"{cost[k]:.0f}" if k in cost else "" for k in ("seconds", "peak_mib")),
            )  # fmt: skip
    Console(width=140).print(table)
    for name, result in made.items():
        if "failed" in result:
            print(f"{name}: failed: {result['failed']}")
    for reason in found["benchmark"]["noise"]["reasons"]:
        print(f"note: {reason}")


if __name__ == "__main__":
    main()
