# ruff: noqa: E402
"""Quantizes one model with several libraries, and measures their files side by side.

    python run.py --model file.py:factory --data imagefolder:DIR --samples 200 --environments venvs
    python run.py --model torchvision:mobilenet_v2 --settle --peers onnxruntime_best,nncf --markdown

Every library gets the same FP32 network, the same calibration images and the same test images; each quantizes in a
process of its own, and in its own virtual environment where there is one: ``venvs/NAME/bin/python`` for the peers
called NAME or NAME_SETTING, or the interpreter that ``--python`` names. One that is not installed is told with the
command that installs it, one that fails with its complaint; the others go on. Printed for each file: size; SQNR, KL
divergence and agreement with FP32 on the test images; latency with the ratio to qtool's (rounds alternating, see qtool
benchmark); seconds and peak memory of quantizing. A peer is one file of ``peers/``; ``measured.py`` has the protocol.

``--data`` is a spec as qtool takes it: calibration images are drawn from its training part, and its test part is what
errors are measured on. Without it images are random, or those of ``--calibration`` and ``--test`` (.npy, float32,
samples first). ``--settle`` gives a network with random weights batch-norm statistics of random images. ``--provider
openvino`` measures in OpenVINO's runtime; the peer ``nncf`` then makes OpenVINO's own form. ``--resume`` keeps what an
earlier run of the same command made, and measures all files again.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from qtool.system import allocator

allocator.tune()

import numpy as np
import torch
from safetensors.torch import save_file
from table import print_table

from qtool.benchmarking.accuracy import judge, predict
from qtool.benchmarking.stage import benchmark
from qtool.data.calibration_data import draw
from qtool.data.specs import load_data
from qtool.errors import QtoolError
from qtool.exporting.to_onnx import float_to_onnx, save
from qtool.models.specs import load_model
from qtool.quantization.capturing.float_form import float_form
from qtool.recipe import BenchmarkConfig
from qtool.runtimes import open_session

HERE = Path(__file__).parent
OPSET = 21
CLASSES = 1000
PEERS = tuple(sorted(path.stem for path in (HERE / "peers").glob("*.py")))


def main() -> None:
    options = arguments()
    options.out = options.out.absolute()
    options.out.mkdir(parents=True, exist_ok=True)
    result, made = options.out / "side_by_side.json", {}
    if options.resume and result.exists():
        told = json.loads(result.read_text())["quantizing"]
        made = {name: entry for name, entry in told.items() if "seconds" in entry and path_of(name, options).exists()}
    else:
        prepare(options)
    for name in dict.fromkeys(("qtool", *options.peers)):
        print(f"quantizing: {name}", file=sys.stderr)
        made[name] = made.get(name) or quantize(name, options)
        result.write_text(json.dumps({"quantizing": made}))
    print("measuring", file=sys.stderr)
    found = measure(options, [name for name, told in made.items() if "seconds" in told])
    result.write_text(json.dumps({"quantizing": made, **found}, indent=2) + "\n")
    print_table(made, found, markdown=options.markdown)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a model spec, as qtool takes it")
    parser.add_argument("--weights", type=Path, help="a file of weights for it")
    parser.add_argument("--settle", action="store_true", help="give batch-norm statistics of random images")
    parser.add_argument("--size", type=int, default=224, help="of random images")
    parser.add_argument("--data", help="a data spec, as qtool takes it")
    parser.add_argument("--calibration", type=Path, help=".npy of inputs")
    parser.add_argument("--test", type=Path, help=".npy of inputs")
    parser.add_argument("--samples", type=int, default=32, help="calibration images; as many test images if random")
    parser.add_argument("--test-samples", type=int, help="at most; all of the test part by default")
    parser.add_argument("--peers", type=known, default=PEERS, help=f"some of {', '.join(PEERS)}; all by default")
    parser.add_argument("--environments", type=Path, default=Path("venvs"), help="folder of virtual environments")
    parser.add_argument("--python", action="append", default=[], metavar="PEER=PATH", help="its interpreter")
    parser.add_argument("--provider", default="cpu", choices=("cpu", "openvino"))
    parser.add_argument("--batch-sizes", default="1")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--resume", action="store_true", help="quantize only with peers that have no file in --out yet")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--out", type=Path, default=Path("side_by_side_files"))
    return parser.parse_args()


def known(text: str) -> tuple[str, ...]:
    """The names of peers in ``text``; a usage error for one that has no file."""
    names = tuple(text.split(","))
    strange = [name for name in names if name not in PEERS]
    if strange:
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(PEERS)}; got {', '.join(strange)}")
    return names


def prepare(options: argparse.Namespace) -> None:
    """Writes the FP32 file, the same network's spec and weights for qtool, and the images."""
    torch.manual_seed(0)
    images, classes = chosen_images(options)
    for name, values in images.items():
        np.save(options.out / f"{name}.npy", values)
    model = load_model(options.model, num_classes=classes, weights=options.weights)
    example = torch.from_numpy(images["calibration"][:2])
    if options.settle:
        settle(model, options.size)
    graph = float_form(model.eval(), example)
    (options.out / "fp32.txt").write_text(f"{options.model}\n{classes}")
    save_file(model.state_dict(), options.out / "fp32.safetensors")
    save(float_to_onnx(graph, example, OPSET), options.out / "fp32.onnx")


def chosen_images(options: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Calibration and test images, and the number of classes."""
    if options.data:
        data = load_data(options.data)
        count = min(len(data.test), options.test_samples or len(data.test))
        drawn = torch.cat(list(draw(f"train:{options.samples}", data, 0, options.samples)[0]))
        test = torch.stack([data.test[index][0] for index in range(count)])
        return {"calibration": drawn.numpy(), "test": test.numpy()}, data.num_classes or CLASSES
    random = np.random.default_rng(0)
    shape = (options.samples, 3, options.size, options.size)
    given = {"calibration": options.calibration, "test": options.test}
    images = {
        name: np.load(path) if path else random.standard_normal(shape, np.float32) for name, path in given.items()
    }
    return images, CLASSES


def settle(model: torch.nn.Module, size: int) -> None:
    """Runs random images in training mode; batch-norm takes their statistics."""
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = None
    model.train()
    with torch.no_grad():
        for _ in range(2):
            model(torch.randn(8, 3, size, size))


def quantize(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """What one library's file took; or ``absent`` with its installation, or ``failed`` with its last line."""
    with tempfile.TemporaryDirectory() as folder:  # of its own, since some write into the file that they read
        for path in options.out.glob("fp32.*"):
            shutil.copy(path, folder)
        files = [Path(folder) / "fp32.onnx", options.out / "calibration.npy", path_of(name, options)]
        words = [interpreter(name, options), str(HERE / "measured.py"), name, *map(str, files)]
        where = None if name.startswith("qtool") else folder  # some write where they run; qtool's spec may be relative
        done = subprocess.run(words, capture_output=True, text=True, cwd=where)
    result, peer = last_words(done), importlib.import_module(f"peers.{name}")
    if "absent" in result:
        home = options.environments / name.split("_")[0]
        result["install"] = f"python -m venv {home} && {home}/bin/pip install '{peer.NEEDS}'"
    return result | {"setting": str(peer.__doc__).splitlines()[0]}


def last_words(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The line of JSON that a peer's process ended with, or ``failed`` with its complaint."""
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode == 0 and lines:
        result: dict[str, Any] = json.loads(lines[-1])
        return result
    complaint = [line for line in done.stderr.splitlines() if line.strip()]
    return {"failed": (complaint or [f"exit {done.returncode} and no word"])[-1]}


def interpreter(name: str, options: argparse.Namespace) -> str:
    """The one named by ``--python``, else of the library's environment, else this one."""
    named = dict(pair.split("=", 1) for pair in options.python)
    own = options.environments / name.split("_")[0] / "bin" / "python"
    chosen = named.get(name) or str(own if own.exists() else sys.executable)
    return str(Path(shutil.which(chosen) or chosen).absolute())


def path_of(name: str, options: argparse.Namespace) -> Path:
    """Where a library's file is: OpenVINO's own form for NNCF in OpenVINO's runtime."""
    own = options.provider == "openvino" and name.startswith("nncf")
    folder: Path = options.out
    return folder / f"{name}{'.xml' if own else '.onnx'}"


def measure(options: argparse.Namespace, names: list[str]) -> dict[str, Any]:
    """Figures of every file, each latency as a ratio to qtool's."""
    files = {name: path_of(name, options) for name in ("fp32", *names)}
    sizes = tuple(int(size) for size in options.batch_sizes.split(","))
    config = BenchmarkConfig(provider=options.provider, batch_sizes=sizes, seconds=options.seconds, width=0.01)
    return {"benchmark": benchmark(files, config, reference="qtool"), "error": against_fp32(files, options)}


def against_fp32(files: dict[str, Path], options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """SQNR, KL divergence and agreement with the FP32 file on the test images, one at a time, file by file."""
    images = torch.from_numpy(np.load(options.out / "test.npy"))
    outputs: dict[str, torch.Tensor] = {}
    for name, path in files.items():
        session = open_session(path, provider=options.provider)
        outputs |= predict({name: session}, ((image, None) for image in images.split(1)))[0]
        session.close()
    found = judge(outputs, None, reference="fp32")
    return {name: entry for name, entry in found.items() if name != "fp32"}


if __name__ == "__main__":
    try:
        main()
    except QtoolError as error:
        sys.exit(str(error))
