"""Tuning of an export: what measures it, and what is remembered of it.

``qtool.exporting.tuning`` decides; it is handed here what it measures with: the profile of a session, and the
benchmark's interleaved rounds over one process a file. What it found is kept in ``export.json`` under a key of
the untuned file, the CPU, the runtime's version, threads, batch size and time, and used again where all are the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from qtool.artifacts import earlier
from qtool.recipe import ExportConfig
from qtool.system.files import sha256_of
from qtool.system.imports import imported
from qtool.system.machine import cpu_info
from qtool.system.temporary import Folder

if TYPE_CHECKING:
    from qtool.exporting.tuning import Profile, Race
    from qtool.form import QuantizedModel
    from qtool.runtimes.base import TimedSession

PROFILED_RUNS = 20
INTERVAL = 0.01
ACCURACY_SAMPLES = 32
TOLD = frozenset({"name", "units", "in_float", "reason", "speedup", "speedup_ci95"})
"""What is read again of each group."""


def tuned(
    model: QuantizedModel, folder: Path, config: ExportConfig, samples: Iterable[Any] | None
) -> tuple[QuantizedModel, dict[str, Any]]:
    """The model with its slow groups in float, and the account that goes into ``folder``'s export.json."""
    from qtool.exporting import tuning
    from qtool.exporting.gates.parity import take
    from qtool.exporting.to_onnx import default_opset, quantized_to_onnx, save

    tuning.check(model)
    opset = config.opset or default_opset(model.plan)
    provider = tuning.PROVIDERS[model.plan.target]
    few = [] if samples is None else list(take(samples, ACCURACY_SAMPLES))
    inputs = few[0] if few else model.example
    with Folder("tune") as place:
        untuned = place / "untuned.onnx"
        save(quantized_to_onnx(model, opset), untuned)
        key = _key(untuned, config, provider)
        if (known := _known(folder, key, model)) is not None:
            return tuning.retune(model, known), {**known, "cached": True}
        how = Measured(provider, config.tune_threads, config.tune_batch_size)
        result, account = tuning.tune(
            model, untuned, opset, few, batch_size=config.tune_batch_size,
            race=race_of(inputs, how, config.tune_seconds), profile=profile_of(inputs, how),
        )  # fmt: skip
    return result, {"key": key, "cached": False, **account}


@dataclass(frozen=True)
class Measured:
    """Where and how files are timed: the runtime's provider, threads within an operator, samples in a batch."""

    provider: str
    threads: int
    batch_size: int


def _key(path: Path, config: ExportConfig, provider: str) -> dict[str, Any]:
    package = "openvino" if provider == "openvino" else "onnxruntime"
    return {
        "file_sha256": sha256_of(path), "cpu": cpu_info()["name"], "runtime": f"{package} {_version(package)}",
        "threads": config.tune_threads, "batch_size": config.tune_batch_size, "seconds": config.tune_seconds,
    }  # fmt: skip


def _version(package: str) -> str:
    return str(imported(package, "--tune", f"qtool[{package}]").__version__)


def _known(folder: Path, key: Mapping[str, Any], model: QuantizedModel) -> dict[str, Any] | None:
    """What an earlier export into ``folder`` found for this key; None, too, where that cannot be made sense of."""
    from qtool.exporting.groups import blocks

    account = (earlier(folder, "export") or {"metrics": {}})["metrics"].get("tuning")
    try:
        if account is None or account["key"] != dict(key):
            return None
        names = {name for block in blocks(model.graph, model.plan) for name in block.units}  # moves among them
        whole = all(names.issuperset(g["units"]) and g.keys() >= TOLD for g in account["groups"])
    except (TypeError, KeyError, AttributeError):
        return None
    return dict(account) if whole else None


def profile_of(inputs: Any, how: Measured) -> Profile:
    """What times a file's kernels, each by its median over a few runs; one named after an output is its producer's."""
    import onnx

    from qtool.benchmarking.inputs import sized_feeds
    from qtool.runtimes import open_session

    def profile(path: Path) -> Sequence[tuple[str, float]]:
        graph = onnx.load(str(path), load_external_data=False).graph
        outputs = {value.name for value in graph.output}
        makers = {name: node.name for node in graph.node for name in node.output if name in outputs}
        session = cast("TimedSession", open_session(path, provider=how.provider, threads=how.threads))
        feeds = sized_feeds(inputs, session.inputs, how.batch_size)
        kernels = session.kernels(feeds, PROFILED_RUNS)
        session.close()
        return [(makers.get(kernel.name, kernel.name), kernel.seconds or 0.0) for kernel in kernels]

    return profile


def race_of(inputs: Any, how: Measured, seconds: float) -> Race:
    """What times files as the benchmark does: a process each, interleaved, until the ratios are known well."""
    from qtool.benchmarking.inputs import sized_feeds
    from qtool.benchmarking.latency import Stopping, describe
    from qtool.benchmarking.process import Worker, whole_cores
    from qtool.benchmarking.process import race as timed

    def race(files: Mapping[str, Path]) -> Mapping[str, Mapping[str, Any]]:
        reference, cores = next(iter(files)), whole_cores(how.threads)
        with contextlib.ExitStack() as stack:
            workers = {}
            for name, path in files.items():
                worker = workers[name] = stack.enter_context(Worker(name, provider=how.provider, cores=cores))
                worker.open(path, provider=how.provider, threads=how.threads, precision=None, device=None)
                worker.feed(sized_feeds(inputs, worker.inputs, how.batch_size))
            stopping = Stopping(width=INTERVAL, seconds=seconds)
            timings = timed(workers, reference=reference, stopping=stopping)
        return describe(timings, reference=reference, batch_size=how.batch_size, width=INTERVAL)

    return race
