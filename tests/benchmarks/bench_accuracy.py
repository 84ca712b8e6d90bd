"""How far INT8 files are from FP32: qtool's settings beside onnxruntime.quantization's, in one run on the same data.

    python tests/benchmarks/bench_accuracy.py --model resnet --data fashion-mnist --weights RUN/model.safetensors
        [--qtool "ranges=mse algorithms=equalize,bias"]... [--peers minmax,percentile,entropy] [--calibration train:512]

Every file is made from the same FP32 model and the same calibration samples (512 of the training part), opened in
ONNX Runtime with one thread and fed the same test samples. Printed for each: SQNR at the logits, KL divergence,
agreement and top-1 against FP32's, size and speed over FP32's file, and the CPU time of making it.

``--qtool`` is repeated for more settings: quantize options as ``key=value`` separated by blanks, what is left out being
the default (``seed=0`` is all of it). The peers are
per-channel, uint8 activations and int8 weights, on the model as ``quant_pre_process`` prepares it. ONNX Runtime's
percentile and entropy keep every activation of every sample in memory: ``--peer-samples`` bounds what they are given,
and the table says so.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from qtool.system import allocator

allocator.tune()

import numpy as np  # noqa: E402
import torch  # noqa: E402

from qtool.benchmarking.accuracy import judge, predict  # noqa: E402
from qtool.data.calibration_data import draw  # noqa: E402
from qtool.data.specs import batches, load_data  # noqa: E402
from qtool.exporting.stage import export  # noqa: E402
from qtool.models.specs import load_model  # noqa: E402
from qtool.options import make  # noqa: E402
from qtool.quantization.stage import quantize  # noqa: E402
from qtool.recipe import ExportConfig, QuantizeConfig  # noqa: E402
from qtool.recipe_files import override  # noqa: E402
from qtool.runtimes import open_session  # noqa: E402

SETTINGS = (
    "seed=0", "ranges=minmax", "ranges=minmax algorithms=pixels,smooth,equalize,analytic-bias,gptq-small",
    "ranges=mse algorithms=none",
    "ranges=percentile", "ranges=output", "ranges=mse algorithms=bias", "ranges=output algorithms=gptq",
)  # fmt: skip
PEERS = ("minmax", "percentile", "entropy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet")
    parser.add_argument("--data", default="fashion-mnist")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--qtool", action="append", metavar="SETTINGS")
    parser.add_argument("--peers", default=",".join(PEERS), help="comma-separated, or none")
    parser.add_argument("--calibration", default="train:512")
    parser.add_argument("--peer-samples", type=int)
    parser.add_argument("--samples", type=int, help="test samples; all by default")
    parser.add_argument("--gates", action="store_true", help="prove qtool's files as qtool export does")
    parser.add_argument("--rounds", type=int, default=30, help="rounds of timing, batch 1; 0 for none")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(options, Path(folder))
    show(rows)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


def measure(options: argparse.Namespace, folder: Path) -> dict[str, dict[str, Any]]:
    """A row for each file, by the name of its setting."""
    data = load_data(options.data)
    example = data.train[0][0]
    model = load_model(
        options.model, num_classes=data.num_classes, in_channels=example.shape[0], weights=options.weights
    ).eval()
    inputs = list(draw(options.calibration, data, 0, 32)[0])
    files: dict[str, Path] = {}
    seconds: dict[str, float] = {}
    notes: dict[str, list[str]] = {}

    def timed(name: str, make_file: Callable[[Path], list[str]]) -> None:
        out = folder / str(len(seconds))
        out.mkdir()
        start = time.process_time()
        notes[name] = make_file(out)
        seconds[name] = time.process_time() - start
        files[name] = next(out.glob("*int8.onnx"))

    for text in options.qtool or SETTINGS:
        timed(f"qtool {text}", lambda out, text=text: by_qtool(model, text, inputs, out, options.gates))  # type: ignore[misc]
    files = {"FP32": next(folder.glob("0/*fp32.onnx")), **files}
    for name in () if options.peers == "none" else options.peers.split(","):
        given, told = inputs, f"ORT {name}"
        if options.peer_samples and name != "minmax":
            given, told = inputs[: max(1, options.peer_samples // 32)], f"ORT {name} ({options.peer_samples} samples)"
        try:
            timed(told, lambda out, name=name, given=given: by_ort(files["FP32"], name, given, out))  # type: ignore[misc]
        except Exception as error:  # a peer that cannot take the model has no row, and the others stay
            print(f"{told} made no file: {type(error).__name__}: {str(error).splitlines()[0]}")
    rows = judged(files, data.test, options)
    for name, row in rows.items():
        row |= {"seconds": seconds.get(name), "notes": notes.get(name, [])}
    return rows


def by_qtool(model: torch.nn.Module, text: str, inputs: list[Any], out: Path, gates: bool) -> list[str]:
    """Writes the file of one setting; returns the plan's notes."""
    table: dict[str, Any] = {}
    for part in text.split():
        override(table, part if "," not in part else part.replace("=", '=["', 1).replace(",", '","') + '"]')
    if isinstance(table.get("algorithms"), str) and table["algorithms"] != "none":
        table["algorithms"] = [table["algorithms"]]
    form = quantize(model, make(QuantizeConfig, table), example=inputs[0][:2], calibration=inputs)
    export(form, out, ExportConfig(gates=gates, baselines=("fp32",)), samples=inputs if gates else None)
    return list(form.plan.notes)


def by_ort(fp32: Path, method: str, inputs: list[torch.Tensor], out: Path) -> list[str]:
    """Writes the file that onnxruntime.quantization makes of the FP32 file."""
    from onnxruntime import quantization
    from onnxruntime.quantization.shape_inference import quant_pre_process

    logging.disable(logging.WARNING)
    prepared = out / "prepared.onnx"
    quant_pre_process(str(fp32), str(prepared), skip_symbolic_shape=True)
    kind = {"minmax": "MinMax", "percentile": "Percentile", "entropy": "Entropy"}[method]

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.feeds = ({names[0]: batch.numpy()} for batch in inputs)

        def get_next(self) -> Any:
            return next(self.feeds, None)

    names = [tensor.name for tensor in open_session(fp32).inputs]
    quantization.quantize_static(
        str(prepared), str(out / "ort.int8.onnx"), Reader(), per_channel=True,
        activation_type=quantization.QuantType.QUInt8, weight_type=quantization.QuantType.QInt8,
        calibrate_method=getattr(quantization.CalibrationMethod, kind),
    )  # fmt: skip
    logging.disable(logging.NOTSET)
    return []


def judged(files: dict[str, Path], test: Any, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Accuracy, size and speed of every file."""
    sessions = {name: open_session(path) for name, path in files.items()}
    outputs, targets = predict(sessions, _few(test, options.samples))
    rows = judge(outputs, targets, reference="FP32")
    speeds = speedups(sessions, test[0][0][None].numpy(), options.rounds)
    whole = files["FP32"].stat().st_size
    for name, row in rows.items():
        row |= {"size_ratio": files[name].stat().st_size / whole, "speedup": speeds.get(name)}
    return rows


def _few(test: Any, samples: int | None) -> Iterator[tuple[Any, Any]]:
    return batches(test, 50, order=range(min(len(test), samples or len(test))))


def speedups(sessions: dict[str, Any], one: np.ndarray[Any, Any], rounds: int) -> dict[str, float]:
    """Least time of FP32 over least time of each file, batch 1, rounds alternating."""
    runs = {name: session.prepare({session.inputs[0].name: one}) for name, session in sessions.items()}
    least = dict.fromkeys(runs, float("inf"))
    for _, (name, run) in itertools.product(range(rounds), runs.items()):
        for _ in range(3):
            start = time.perf_counter()
            run()
            least[name] = min(least[name], time.perf_counter() - start)
    return {name: least["FP32"] / value for name, value in least.items()} if rounds else {}


def show(rows: dict[str, dict[str, Any]]) -> None:
    width = max(map(len, rows))
    print(f"{'':{width}}  SQNR dB       KL  agree %  top-1 %   size  speed  CPU s")
    for name, row in rows.items():
        top1, speed, seconds = row.get("top1"), row["speedup"], row["seconds"]
        print(
            f"{name:{width}}  {row['sqnr_db']:7.2f} {row['kl']:8.5f}  {100 * row['agreement']:7.2f}  "
            f"{'' if top1 is None else f'{100 * top1:.2f}':>7}  {row['size_ratio']:.3f}  "
            f"{'' if speed is None else f'{speed:.2f}':>5}  {'' if seconds is None else f'{seconds:.1f}':>5}"
        )
    for name, row in rows.items():
        for note in row["notes"]:
            print(f"  {name}: {note}")


if __name__ == "__main__":
    main()
