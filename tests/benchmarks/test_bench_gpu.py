"""The script of the GPU's figures on a CPU: what it measures, what it does about failures, how it judges."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import warm

sys.path.insert(0, str(Path(__file__).parent))

import bench_gpu
import gpu_parts

from qtool.runtimes import ProviderError
from qtool.training import fused_updates


@pytest.mark.slow
def test_parts_are_measured_failures_told_and_what_is_missing_made_up_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", warm.Popen)
    words = ["--out", str(tmp_path), "--device", "cpu", "--quick", "--parts"]
    words += ["create/on-device,technique/paged,rounding/adaround"]
    assert bench_gpu.main(words) == 1
    result = json.loads((tmp_path / "gpu.json").read_text())
    assert result["parts"]["create/on-device"]["host_peak_gb"] > 0
    assert "--optimizer: expected a GPU" in result["parts"]["technique/paged-adamw8bit"]["failed"]
    assert result["machine"]["gpus"] == []
    assert result["parts"]["rounding/adaround"]["images"] == 16
    assert result["parts"]["rounding/adaround"]["quantize_seconds"] > 0
    for file in (tmp_path / "parts").iterdir():
        file.unlink()
    assert bench_gpu.main([*words[:-1], "create/on-device,rounding/adaround"]) == 0  # gpu.json alone is enough
    again = json.loads((tmp_path / "gpu.json").read_text())
    assert again["parts"]["rounding/adaround"] == result["parts"]["rounding/adaround"]
    options = argparse.Namespace(out=tmp_path, device="cpu", data=None, steps=None, quick=True)
    assert bench_gpu._is_done(options, "create/on-device")
    options.quick = False
    assert not bench_gpu._is_done(options, "create/on-device"), "what was measured otherwise is measured again"


@pytest.mark.parametrize("ends", [subprocess.TimeoutExpired("part", 540), SystemExit()], ids=["its time", "stopped"])
def test_a_part_that_is_stopped_or_breaks_leaves_nothing_behind(
    ends: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sleeping process in place of the script, whose time is over, or which a scheduler stops, once it has begun."""
    script, begun = tmp_path / "script.py", tmp_path / "begun"
    script.write_text("import os, sys, time; os.rename(sys.argv[1], sys.argv[2]); time.sleep(99)")
    monkeypatch.setattr(bench_gpu, "__file__", str(script))
    (tmp_path / "parts").mkdir()
    (tmp_path / "empty").touch()
    options = argparse.Namespace(out=tmp_path, minutes=9.0)
    wait, started = subprocess.Popen.wait, []

    def until_begun(running: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        if timeout is None:
            return wait(running)
        started.append(running.pid)
        while not begun.exists():
            time.sleep(0.01)
        raise ends

    monkeypatch.setattr(subprocess.Popen, "wait", until_begun)
    with pytest.raises(SystemExit) if isinstance(ends, SystemExit) else contextlib.nullcontext():
        found = bench_gpu._in_process(options, "a", [str(tmp_path / "empty"), str(begun)])
        assert found == {"failed": "not done after 9 minutes"}
    with pytest.raises(ProcessLookupError):
        os.kill(started[0], 0)


def test_every_rung_and_every_part_has_a_name() -> None:
    options = gpu_parts.Options(Path(), "cuda", None, 20, False, 4)
    names = list(gpu_parts.parts(options))
    assert names[:3] == ["ladder/6", "ladder/1", "ladder/0"], "what is claimed comes first"
    assert sum(name.startswith("ladder/") for name in names) == 7
    assert {"group/fsdp", "group/ddp", "loop", "create/on-device", "int8/resnet50/tensorrt", "compiled"} <= {*names}
    assert {"rounding/calibration", "rounding/adaround", "accuracy/32-true"} <= {*names}
    assert not any(
        name.startswith("group/") for name in gpu_parts.parts(gpu_parts.Options(Path(), "cuda", None, 20, False, 1))
    )


@pytest.mark.parametrize("named", [False, True], ids=["not named", "named in vain"])
def test_a_provider_that_is_not_there_is_told_before_any_work(
    named: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """onnxruntime-gpu names TensorRT whether its libraries are there or not."""
    runtime = gpu_parts.ort.ort
    every = [*(["TensorrtExecutionProvider"] if named else []), "CPUExecutionProvider"]
    monkeypatch.setattr(runtime, "get_available_providers", lambda: every)
    real = runtime.InferenceSession
    monkeypatch.setattr(runtime, "InferenceSession", lambda path, options, providers: real(path, options, every[-1:]))
    monkeypatch.setattr(gpu_parts.ort, "missing_library", lambda path: "libnvinfer.so.10")
    monkeypatch.setattr(gpu_parts.qtool, "quantize", None)
    expected = "libnvinfer.so.10 cannot be loaded" if named else "an ONNX Runtime with TensorrtExecutionProvider"
    with pytest.raises(ProviderError, match=expected):
        gpu_parts.int8(gpu_parts.Options(tmp_path, "cuda", None, 20, False, 1), "resnet50", "tensorrt")


def test_updates_are_timed_both_ways_and_told_where_they_are_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = []

    def step(parameter: Any, *_: Any) -> None:
        steps.append(parameter.numel())

    options = gpu_parts.Options(tmp_path, "cpu", None, None, True, 0)
    monkeypatch.setattr(fused_updates, "refusal", lambda device: "no GPU")
    found = gpu_parts.update(options)
    assert found["refused"] == "no GPU"
    assert found["weights"] == 12 * 64**2 + 13 * 64
    monkeypatch.setattr(fused_updates, "usable", lambda inner, parameters: True)
    monkeypatch.setattr(fused_updates, "step", step)
    found = gpu_parts.update(options)
    assert found["refused"] is None
    assert found["widened_over_fused"] == found["widened_ms"] / found["fused_ms"]
    assert steps == [3 * 64**2, 64**2, 4 * 64**2, 4 * 64**2] * 15, "five times two steps, each after one to warm up"


def test_claims_are_judged_by_what_was_measured() -> None:
    plain = {"error": -0.02, "config": {"compile": False}, "reserved_gb": 1.9, "ms_per_image": 4.0}
    parts = {
        "ladder/0": {**plain, "ms_per_image": 21.0, "published": {"peak_gb": 1.8}},
        "ladder/1": {**plain, "ms_per_image": 5.0, "error": 0.06},
        "ladder/6": {**plain, "ms_per_image": 7.6},
        "technique/compile": {**plain, "error": 0.08, "config": {"compile": True}},
        "update": {"refused": None, "widened_over_fused": 3.0},
        "loop": {"ms_ratio": 1.02, "peak_mib_ratio": 1.02},
        "rounding/adaround": {"images": 1024, "quantize_seconds": 299.0},
        "compiled": {
            "32": {"default": {"fp16_over_int8": 1.2}},
            "128": {"default": {"fp16_over_int8": 1.4}, "inductor": {"fp16_over_int8": 1.5}},
            "seconds": 9.0,
        },
        "accuracy/32-true": {"mean": 0.9},
        "accuracy/SGD": {"mean": 0.875},
        "accuracy/16-true": {"failed": "NaN"},
    }
    found = {claim["claim"]: claim["met"] for claim in bench_gpu.claims(parts)}
    assert [name for name, met in found.items() if not met] == [
        "ladder/0: GB reserved, at most the published",
        "ladder/1: predicted peak off by at most",
        "AdamW below the ladder: time per image over 16-mixed's",
        "loop: memory over a bare loop's",
    ]
    assert len(found) == 15
    parts["update"] = {"refused": "no module 'triton'", "widened_over_fused": 1.0}
    assert len(bench_gpu.claims(parts)) == 14, "what was not fused is no measure of it"


def tell_when_it_has_it(options: gpu_parts.Options, alone: bool) -> None:
    with gpu_parts._device(options, alone=alone):
        print(time.time(), flush=True)


def test_what_is_timed_has_the_device_alone(tmp_path: Path) -> None:
    """One part at work holds the device for itself; one that tells no time would not wait for its like."""
    options = gpu_parts.Options(tmp_path, "cpu", None, None, True, 0)
    started = {}
    with gpu_parts._device(options, alone=False):
        for kind in ("alone", "beside"):
            started[kind] = warm.Started(tmp_path / kind, tell_when_it_has_it, options, kind == "alone")
        assert started["beside"].end() == 0
        time.sleep(2)
        released = time.time()
    assert started["alone"].end() == 0
    beside, alone = (float(started[kind].said()) for kind in ("beside", "alone"))
    assert beside < released < alone


def test_the_readme_tells_and_shows_what_was_measured(tmp_path: Path) -> None:
    here = Path(__file__).parent
    parts = json.loads((here / "gpu_h100.json").read_text())["parts"]
    bench_gpu.draw(parts, tmp_path / "ladder.svg")
    assert (tmp_path / "ladder.svg").read_text(encoding="utf-8") == (here / "gpu_h100.svg").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+) \| (\d+\.\d{3}) \| (\d+\.\d{3}) \| (\d+\.\d\d) \| (\S+) \| (\d+\.\d\d) \|$",
                      (here.parents[1] / "README.md").read_text(encoding="utf-8"), re.MULTILINE)  # fmt: skip
    assert len(rows) == 7
    for number, (_, predicted, peak, reserved, published, each) in enumerate(rows):
        part = parts[f"ladder/{number}"]
        told = [f"{part['predicted_gb']:.3f}", f"{part['peak_gb']:.3f}", f"{part['reserved_gb']:.2f}"]
        assert [predicted, peak, reserved, each] == [*told, f"{part['ms_per_image']:.2f}"]
        assert published == str(part["published"].get("peak_gb", "–"))
