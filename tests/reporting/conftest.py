"""A benchmark result written by hand, so that what is said about it can be held against its numbers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from qtool.system.json_files import write_json


def timing(
    batch_size: int, p50: float, speedup: float, bounds: list[float] | None, converged: bool = True
) -> dict[str, Any]:
    return {
        "batch_size": batch_size,
        "latency_p50_ms": p50,
        "latency_p90_ms": p50 * 1.1,
        "latency_p99_ms": p50 * 1.5,
        "latency_mean_ms": p50 * 1.02,
        "throughput_per_s": 1000 * batch_size / p50,
        "speedup": speedup,
        "speedup_ci95": bounds,
        "converged": converged,
        "num_runs": 400,
        "num_rounds": 20,
        "spread": 0.01,
        "waiting_share": 0.0,
        "first_run_ms": p50 * 3,
        "peak_memory_mib": 20.0,
        "latency_quantiles_ms": [p50 * (0.9 + 0.002 * i) for i in range(101)],
    }


def variant(name: str, size: float, ratio: float, p50: float, **accuracy: Any) -> dict[str, Any]:
    speedup = 4.0 / p50
    bounds = None if name == "fp32" else [speedup * 0.98, speedup * 1.02]
    return {
        "file": f"model.{name}.onnx",
        "stored": {"fp32": "float32", "fp16": "float16", "int8": "int8"}[name],
        "size_bytes": int(size * 2**20),
        "size_mib": size,
        "size_stripped_mib": size * 0.9,
        "size_compressed_mib": size * 0.8,
        "size_ratio": ratio,
        "num_files": 1,
        "load_ms": 12.0,
        "peak_memory_mib": 20.0,
        "num_kernels": 9,
        "arithmetic": {"int8": 3} if name == "int8" else {"float32": 3},
        "elsewhere": [],
        "latency": [timing(1, p50, speedup, bounds), timing(8, p50 * 8, speedup, bounds, converged=name != "int8")],
        "accuracy": {"num_samples": 1000, **accuracy},
    }


RESULT = {
    "provider": "cpu",
    "threads": 1,
    "reference": "fp32",
    "cpu": {"name": "A CPU", "cores": 2, "features": ["avx2", "avx512_vnni"]},
    "variants": {
        "fp32": variant("fp32", 4.0, 1.0, 4.0, top1=0.9, agreement=1.0, kl=0.0, sqnr_db=None),
        "fp16": variant(
            "fp16", 2.0, 0.5, 4.0, top1=0.9, agreement=1.0, kl=1e-7, sqnr_db=70.0,
            top1_drop=0.0, top1_drop_ci95=[-0.002, 0.002],
        ),
        "int8": variant(
            "int8", 1.0, 0.25, 1.6, top1=0.897, agreement=0.985, kl=0.0012, sqnr_db=31.4,
            top1_drop=0.003, top1_drop_ci95=[-0.004, 0.010],
        ),
    },
    "noise": {"spread": 0.08, "waiting_share": 0.0, "load": 1.5, "noisy": True, "reasons": ["a neighbour was loud"]},
    "notes": ["fp16: float16 is storage only on cpu; all 3 multiplying operations ran in float32"],
}  # fmt: skip


@pytest.fixture
def result() -> dict[str, Any]:
    """Three variants at two batch sizes: FP16 as fast as FP32, INT8 2.5 times faster."""
    return copy.deepcopy(RESULT)


ENVIRONMENT = {
    "python": "3.11.0",
    "platform": "Linux",
    "cpu": {"name": "A CPU", "cores": 2, "features": ["avx2"]},
    "packages": {"torch": "2.13.0"},
}


def units(left_in_float: bool) -> list[dict[str, Any]]:
    made = [
        {"name": f"blocks.{i}.conv", "kind": "conv", "modules": [], "integer": True, "reason": "", "weight_bits": 8}
        for i in range(6)
    ]
    if left_in_float:
        made[3] |= {"integer": False, "reason": "asked for <float>"}
    return made


def stage(name: str, **parts: Any) -> dict[str, Any]:
    return {
        "schema": 1,
        "stage": name,
        "created": "2026-01-02T03:04:05+00:00",
        "config": {"seed": 0, "batch_sizes": [1, 8]},
        "inputs": {"data": "a" * 64},
        "outputs": {},
        "metrics": {},
        "environment": ENVIRONMENT,
        **parts,
    }


@pytest.fixture
def finished_run(tmp_path: Path, result: dict[str, Any]) -> Path:
    """A run directory with training, PTQ and QAT, every stage done; the names in it are out to do harm."""
    run = tmp_path / "run"
    source = {"model": "net <script>alert(1)</script>", "data": "fashion-mnist"}
    history = {
        "losses": [2.0 / (1 + i / 20) for i in range(500)],
        "epochs": [{"loss": 1.0, "validation_loss": 0.9, "validation_top1": 0.8 + i / 50} for i in range(4)],
        "skipped_steps": 2, "stopped_early": False, "seconds": 12.5,
    }  # fmt: skip
    write_json(run / "train.json", stage("train", source=source, history=history, metrics={"top1": 0.9, "loss": 0.3}))
    for variant in ("ptq", "qat"):
        plan = {"target": "ort-cpu", "units": units(variant == "qat"), "notes": []}
        gates = [
            {"name": "size", "passed": True, "found": "900 bytes"},
            {"name": "unit parity", "passed": None, "found": "no runtime"},
            {"name": "coverage", "passed": variant == "ptq", "found": "5 of 6"},
        ]
        came = source | {"trained_in": ".."}
        sensitivity = [{"name": f"blocks.{i}.conv", "sqnr_db": 40.0 - i} for i in range(6)]
        place = run / variant
        write_json(place / "quantize.json", stage("quantize", source=came, plan=plan, sensitivity=sensitivity))
        write_json(place / "export.json", stage("export", source=came, plan=plan, metrics={"gates": gates}))
        write_json(place / "benchmark.json", stage("benchmark", metrics=result))
    return run
