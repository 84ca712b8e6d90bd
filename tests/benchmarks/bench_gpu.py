"""Every figure that needs a GPU, by one command, as JSON.

    python tests/benchmarks/bench_gpu.py --out DIR [--data imagefolder:cifar10:224] [--parts ladder,int8] [--quick]

Parts, each in a process of its own, one file each in ``DIR/parts``, put together in ``DIR/gpu.json`` with the machine
and the claims they bear on, and a picture of the ladder in ``DIR/ladder.svg``:

- ``ladder/N``: each rung of ``examples/memory_ladder_vit_l16.toml``: predicted, allocated and reserved peak, time per
  image and what was estimated, and metrics where ``--data`` gives real images (else noise,
  and ``--steps 20`` of an epoch);
- ``technique/NAME``: the same for techniques alone, at batch 16; ``group/NAME``: on all GPUs, where there are several;
- ``create/…``: loading weights on the host first, or straight to the device;
- ``update``: the update alone of a ViT-L block's weights in the least memory, fused and in widened copies;
- ``loop``: the step loop beside a bare one; ``int8/NETWORK/PROVIDER``: ViT-B/16 and ResNet-50 in FP32, FP16 and INT8;
- ``compiled``: ViT-B/16 in INT8 beside FP16, compiled by PyTorch as qtool does and in other ways;
- ``rounding/NAME``: ResNet-50 to 4-bit weights over 1,024 images: calibration alone, and each way of rounding after it;
- ``accuracy/NAME``: top-1 of precisions and optimizers on the embedded images, over three seeds.

A part that fails is written down with its message, and the next one is measured; what is claimed comes first. Called
again, the command goes on with what is missing, has failed or was measured with other options, so it can be given in
pieces of ten minutes; on another machine it goes on from ``DIR/gpu.json`` alone. ``--jobs`` has parts at once, but what
is timed waits until it has the device alone. Whole epochs of real images (``--data`` without ``--steps``) take longer:
pass ``--minutes 30``. TF32 is switched off. ``--quick`` takes small nets and few steps, also on a CPU, to see that the
script itself works.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LEAST = "ladder/6"
"""The rung below the published ladder."""
MACHINE = "machine"
_running: list[subprocess.Popen[bytes]] = []
"""The processes of the parts at work."""


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda", help="cpu with --quick where there is no GPU")
    parser.add_argument("--data", help="a spec of 224-pixel images in ten classes, for accuracy on the ladder")
    parser.add_argument("--steps", type=int, help="steps of a training; 20 without --data, else whole epochs")
    parser.add_argument("--parts", help="comma-separated beginnings of names; all by default")
    parser.add_argument("--minutes", type=float, default=9.0, help="that a part may take, waiting included")
    parser.add_argument("--jobs", type=int, default=1, help="parts at once; what is timed has the device alone still")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    options.out.mkdir(parents=True, exist_ok=True)
    return one(options) if options.one else everything(options, words or sys.argv[1:])


def everything(options: argparse.Namespace, words: list[str]) -> int:
    """Measures what is missing, and returns how many parts failed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that the part at work is stopped too
    (options.out / "parts").mkdir(exist_ok=True)
    _restore(options)
    _write(_file(options, MACHINE), _in_process(options, MACHINE, words))
    wanted = tuple((options.parts or "").split(","))
    names = [name for name in _parts(options) if name.startswith(wanted)]
    with ThreadPoolExecutor(options.jobs) as pool:
        waiting = {pool.submit(_part, options, name, words) for name in names if not _is_done(options, name)}
        try:
            for done in as_completed(waiting):
                print(done.result(), flush=True)
                _write(options.out / "gpu.json", gathered(options))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            _stop()
    result = gathered(options)
    _write(options.out / "gpu.json", result)
    draw(result["parts"], options.out / "ladder.svg")
    for claim in result["claims"]:
        print(f"{'yes' if claim['met'] else 'NO '} {claim['claim']}: {claim['value']:.4g} (bound {claim['bound']:.4g})")
    return sum("failed" in result["parts"][name] for name in names)


def _part(options: argparse.Namespace, name: str, words: list[str]) -> str:
    """Measures one part, writes it down, and says how it went."""
    start = time.monotonic()
    found = _in_process(options, name, words)
    about = {"part": name, "options": _compared(options), "seconds": round(time.monotonic() - start, 1)}
    _write(_file(options, name), found | about)
    return f"{name}: {found.get('failed') or 'done'}"


def _restore(options: argparse.Namespace) -> None:
    """Gives the parts in ``gpu.json`` their files again, where that came here alone."""
    whole = options.out / "gpu.json"
    known = json.loads(whole.read_text())["parts"] if whole.exists() else {}
    for name, part in known.items():
        if not _file(options, name).exists():
            _write(_file(options, name), part)


def _is_done(options: argparse.Namespace, name: str) -> bool:
    file = _file(options, name)
    found = json.loads(file.read_text()) if file.exists() else {"failed": "not measured"}
    return "failed" not in found and found.get("options") == _compared(options)


def _compared(options: argparse.Namespace) -> dict[str, Any]:
    """The options that change what is measured."""
    return {name: getattr(options, name) for name in ("device", "data", "steps", "quick")}


def one(options: argparse.Namespace) -> int:
    """What the process of a part does: the part's values, or its error, to its file."""
    from qtool.system import allocator

    allocator.tune()
    from qtool.errors import QtoolError

    try:
        found = machine() if options.one == MACHINE else _parts(options)[options.one](_told(options))
    except QtoolError as error:
        found = {"failed": str(error)}
    _write(_file(options, options.one), found)
    return 0


def _told(options: argparse.Namespace) -> Any:
    import torch
    from gpu_parts import Options

    steps = options.steps or (3 if options.quick else None if options.data else 20)
    return Options(options.out.resolve(), options.device, options.data, steps, options.quick, torch.cuda.device_count())


def _parts(options: argparse.Namespace) -> Mapping[str, Any]:
    from gpu_parts import parts

    return parts(_told(options))


def _file(options: argparse.Namespace, name: str) -> Path:
    return Path(options.out / "parts" / (name.replace("/", "--") + ".json"))


def _in_process(options: argparse.Namespace, name: str, words: list[str]) -> dict[str, Any]:
    """The part's values, or how its process ended."""
    file = _file(options, name)
    file.unlink(missing_ok=True)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), str(HERE), os.environ.get("PYTHONPATH", "")]),
        "NVIDIA_TF32_OVERRIDE": "0",
    }
    log = file.with_suffix(".log")
    with log.open("w") as told:
        command = [sys.executable, str(Path(__file__).resolve()), *words, "--one", name]
        running = subprocess.Popen(command, env=environment, stdout=told, stderr=told, start_new_session=True)
        _running.append(running)
        try:
            code = running.wait(60 * options.minutes)
        except subprocess.TimeoutExpired:
            return {"failed": f"not done after {options.minutes:g} minutes"}
        finally:
            _running.remove(running)
            _stop(running)
    if code == 0 and file.exists():
        found: dict[str, Any] = json.loads(file.read_text())
        return found
    last = log.read_text(errors="replace").strip().splitlines()[-1:] or ["no word"]
    return {"failed": f"exit code {code}: {last[0][:500]}", "log": str(log)}


def _stop(*processes: subprocess.Popen[bytes]) -> None:
    """Ends parts, all of them by default, with the processes that they have started, which hold the GPU too."""
    for process in processes or tuple(_running):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def gathered(options: argparse.Namespace) -> dict[str, Any]:
    """All that is measured so far, the machine, and the claims that can be judged by it."""
    found = [json.loads(path.read_text()) for path in sorted((options.out / "parts").glob("*.json"))]
    parts = {part["part"]: part for part in found if "part" in part}
    about = json.loads(_file(options, MACHINE).read_text())
    return {"machine": about, "data": options.data, "claims": claims(parts), "parts": parts}


def draw(parts: Mapping[str, Mapping[str, Any]], file: Path) -> None:
    """The ladder's picture, of the rungs that are measured: allocated peaks, beside what is published as reserved."""
    from qtool.reporting.ladder import picture

    rungs = [parts[name] for name in sorted(parts) if name.startswith("ladder/") and "failed" not in parts[name]]
    sizes = {"predicted_bytes": "predicted_gb", "peak_bytes": "peak_gb"}
    bars = [
        {"name": rung["name"], "published": rung["published"]} | {key: rung[gb] * 1e9 for key, gb in sizes.items()}
        for rung in rungs
    ]
    if bars:
        file.write_text(picture(bars), encoding="utf-8")


def machine() -> dict[str, Any]:
    """What the figures are of; asked in a process of its own, since a driver that fails must not end the whole."""
    import torch

    from qtool.system.machine import cpu_info, environment

    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return {
        "environment": environment(),
        "cpu": cpu_info(),
        "cuda": torch.version.cuda,
        "gpus": [{"name": gpu.name, "memory_gb": gpu.total_memory / 10**9} for gpu in gpus],
    }


def claims(parts: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What is promised, what was found, and whether it holds; of what was measured, on the full sizes or not."""
    whole = {name: part for name, part in parts.items() if "failed" not in part}
    found = []

    def judge(claim: str, value: float, low: float | None = None, high: float | None = None) -> None:
        met = value >= low if low is not None else value <= high  # type: ignore[operator]
        found.append({"claim": claim, "value": value, "bound": low if low is not None else high, "met": met})

    for name, part in whole.items():
        if "error" in part:
            compiled = part["config"]["compile"]
            judge(f"{name}: predicted peak off by at most", abs(part["error"]), high=0.10 if compiled else 0.05)
        if "peak_gb" in part.get("published", {}):
            judge(f"{name}: GB reserved, at most the published", part["reserved_gb"], high=part["published"]["peak_gb"])
    if LEAST in whole:
        judge("AdamW below the ladder: GB reserved", whole[LEAST]["reserved_gb"], high=2.0)
    if {LEAST, "ladder/1"} <= whole.keys():
        ratio = whole[LEAST]["ms_per_image"] / whole["ladder/1"]["ms_per_image"]
        judge("AdamW below the ladder: time per image over 16-mixed's", ratio, high=1.5)
    if {"ladder/0", "ladder/1"} <= whole.keys():
        ratio = whole["ladder/0"]["ms_per_image"] / whole["ladder/1"]["ms_per_image"]
        judge("16-mixed: times as fast as FP32 without TF32", ratio, low=4.0)
    if "update" in whole and whole["update"]["refused"] is None:
        judge("update: times as fast fused as in widened copies", whole["update"]["widened_over_fused"], low=2.0)
    if "loop" in whole:
        judge("loop: time over a bare loop's", whole["loop"]["ms_ratio"], high=1.03)
        judge("loop: memory over a bare loop's", whole["loop"]["peak_mib_ratio"], high=1.01)
    if "compiled" in whole:
        ways = [
            value["default"] for value in whole["compiled"].values() if isinstance(value, dict) and "default" in value
        ]
        judge("compiled: INT8 times as fast as FP16", max(way["fp16_over_int8"] for way in ways), low=1.3)
    learned = whole.get("rounding/adaround", {"images": 0})
    if learned["images"] == 1024:
        judge("AdaRound of ResNet-50 over 1,024 images: seconds", learned["quantize_seconds"], high=300.0)
    for name, part in whole.items():
        if name.startswith("accuracy/") and "accuracy/32-true" in whole:
            judge(f"{name}: points lost", 100 * (whole["accuracy/32-true"]["mean"] - part["mean"]),
                  high=3.0 if name == "accuracy/SGD" else 1.0)  # fmt: skip
    return found


def _write(path: Path, value: Mapping[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(value, indent=1, default=str) + "\n")
    temporary.replace(path)


if __name__ == "__main__":
    sys.path[:0] = [str(HERE), str(HERE.parents[1])]  # a checkout is enough
    raise SystemExit(main())
