"""The benchmark: variants of one model, measured side by side, as one plain result.

Sizes come from the files; latency, load time and memory from a process of its own for each variant, timed in
interleaved rounds and begun anew from time to time; accuracy from the labelled data, every file fed the same batches.
The result is made of plain values with their units in the names, and is what ``benchmark.json`` holds. Any ONNX file
that the runtime can open may be measured, not only those that qtool made.

No verdict is given here: whether a figure is good enough is for the reader, or for a contract.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from qtool.benchmarking.accuracy import Compare, Scores, is_finite, judge, predict, unjudged
from qtool.benchmarking.claims import (
    HALVES,
    check_claim,
    far_sentence,
    is_integer,
    is_simulation,
    slower_causes,
    slower_sentence,
    stored_format,
)
from qtool.benchmarking.inputs import Layout, as_written, random_feeds, require_known, sized_feeds
from qtool.benchmarking.latency import Stopping, describe, noise
from qtool.benchmarking.process import Worker, race, whole_cores
from qtool.benchmarking.regression import compare_with, read_benchmark, require_common, require_same_model
from qtool.benchmarking.size import measure_size
from qtool.errors import QtoolError, UsageError
from qtool.recipe import BenchmarkConfig
from qtool.runtimes import RUNTIMES, open_session, openvino
from qtool.runtimes.base import Array
from qtool.runtimes.onnx_notes import needs_exact_sums
from qtool.runtimes.packages import conflict
from qtool.system.control_groups import bound_cores, usable_cores
from qtool.system.machine import cpu_info
from qtool.units import MIB, many

Batches = Callable[[int], Iterable[tuple[Any, Any]]]
Progress = Callable[[str], None]
ACCURACY_BATCH = 32


def benchmark(
    files: Mapping[str, Path],
    config: BenchmarkConfig,
    *,
    batches: Batches | None = None,
    reference: str | None = None,
    compare: Compare | None = None,
    scores: Scores | None = None,
    subject: Mapping[str, str | None] | None = None,
    target: str | None = None,
    precisions: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measures every file of ``files`` (name to path) and compares each with the reference.

    ``batches(n)`` iterates over test data in batches of up to n as (input, target); without it inputs
    are random and accuracy is left out. The reference is ``fp32`` where there is one, else the first.
    ``compare`` replaces :func:`qtool.evaluate.compare`, and ``scores`` adds a task's own metrics. ``subject`` names the
    ``model`` and the ``data`` where they are known, which the result repeats, so that figures of two models are not
    taken for those of one. ``target`` is the runtime that INT8 was quantized for, if known: the notes name it where
    another is measured and is slow. ``precisions`` names variants whose floats PyTorch or OpenVINO is to compute in
    ``fp16`` or ``bf16`` although their files are in FP32. With ``config.compare`` the result holds a ``comparison``
    with that earlier one (see :mod:`qtool.benchmarking.regression`, which also judges it).

    Returns plain values: ``variants`` (per file size_*, load_ms, peak_memory_mib, latency per batch
    size, accuracy), ``noise``, ``notes``. Raises QtoolError for a file or provider that does not do.
    """
    tell = progress or (lambda text: None)
    base = _reference(files, reference)
    if batches is not None:
        require_no_shapes(config)
    earlier = read_benchmark(Path(config.compare)) if config.compare else None
    if config.compare and earlier:
        require_same_model(Path(config.compare), earlier, subject or {})
        require_common(Path(config.compare), earlier, files)
    variants: dict[str, dict[str, Any]] = {}
    for name, path in files.items():
        tell(f"size of {name}")
        variants[name] = {"file": path.name, "stored": stored_format(path), **measure_size(path)}
        variants[name] |= {"exact_sums": True} if config.provider == "cpu" and needs_exact_sums(path) else {}
    opening = {name: _options(config, (precisions or {}).get(name)) for name in files}
    steadiness = _measure_speed(files, opening, config, base, variants, batches, tell)
    told = ["inputs were random; accuracy was not measured"]
    if batches is not None:
        told = _measure_accuracy(files, opening, config, base, variants, batches, compare, scores, tell)
    for entry in variants.values():
        entry["size_ratio"] = entry["size_stripped_mib"] / variants[base]["size_stripped_mib"]
    result: dict[str, Any] = {
        **(subject or {}),
        "provider": config.provider,
        "device": variants[base]["device"],
        "threads": config.threads,
        "reference": base,
        "cpu": cpu_info(),
        "variants": variants,
        "noise": steadiness,
        "notes": [*_notes(variants, config, base, target), *_uncounted(variants[base]["latency"]), *told],
    }
    if config.compare and earlier is not None:
        result["comparison"] = compare_with(Path(config.compare), earlier, result, config.tolerance)
    return result


def require_no_shapes(config: BenchmarkConfig) -> None:
    """Raises UsageError for shapes, which random inputs alone are given."""
    if config.shapes:
        do = "leave them out, or measure the files alone: qtool benchmark FILE.onnx"
        raise UsageError("input shapes", "none beside data, whose samples have theirs", ", ".join(config.shapes), do)


def _reference(files: Mapping[str, Path], asked: str | None) -> str:
    if not files:
        raise UsageError("benchmark", "at least one file", "none", "name the files to measure")
    if asked is not None and asked not in files:
        raise UsageError("reference", f"one of {', '.join(files)}", repr(asked), "name one of the variants")
    return asked or ("fp32" if "fp32" in files else next(iter(files)))


def _measure_speed(
    files: Mapping[str, Path],
    opening: Mapping[str, Mapping[str, Any]],
    config: BenchmarkConfig,
    reference: str,
    variants: dict[str, dict[str, Any]],
    batches: Batches | None,
    tell: Progress,
) -> dict[str, Any]:
    """Fills in load time, latency, memory and arithmetic; gives how steady the machine was."""
    cores = whole_cores(config.threads) if _is_pinned(config) else None
    measured: dict[str, dict[str, Any]] = {}
    with contextlib.ExitStack() as stack:
        workers = {}
        for name, path in files.items():
            tell(f"loading {name}")
            worker = stack.enter_context(Worker(name, provider=config.provider, cores=cores))
            opened = worker.open(path, threads=config.threads, **opening[name])
            variants[name] |= {key: value for key, value in opened.items() if value is not None} | {"latency": []}
            workers[name] = worker
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
        for size in sorted(set(config.batch_sizes or (_own_size(workers.values()),))):
            tell(f"timing at batch size {size}")
            for name, entry in _time(workers, config, reference, size, batches).items():
                variants[name]["latency"].append(entry)
                measured[f"{name} at batch size {size}"] = entry
        for name, worker in workers.items():
            variants[name]["peak_memory_mib"] = variants[name]["latency"][-1]["peak_memory_mib"]
            variants[name].update(worker.kernels())
    return {**noise(measured, load=load), "pinned_cores": cores}


def _options(config: BenchmarkConfig, precision: str | None) -> dict[str, Any]:
    """How a variant is opened."""
    device = config.device if RUNTIMES[config.provider] == "torch" else None
    return {"provider": config.provider, "precision": precision, "device": device}


def _time(
    workers: Mapping[str, Worker], config: BenchmarkConfig, reference: str, batch_size: int, batches: Batches | None
) -> dict[str, dict[str, Any]]:
    require_known(config.shapes, [worker.inputs for worker in workers.values()])
    given = None if batches is None else _first(batches(batch_size))  # once: a loader that shuffles gives another next
    first_runs = {
        name: _fed(worker, _feeds(worker, config, batch_size, given), given) for name, worker in workers.items()
    }
    stopping = Stopping(width=config.width, seconds=config.seconds)
    timings = race(workers, reference=reference, stopping=stopping, seed=config.seed)
    measured = describe(timings, reference=reference, batch_size=batch_size, width=config.width)
    counted = batch_size == 1 or workers[reference].counts(batch_size)
    for name, worker in workers.items():
        measured[name]["throughput_per_s"] = measured[name]["throughput_per_s"] if counted else None
        peak = worker.peak_bytes()
        measured[name]["first_run_ms"] = first_runs[name]
        measured[name]["peak_memory_mib"] = None if peak is None else peak / MIB
    return measured


def _first(batches: Iterable[tuple[Any, Any]]) -> tuple[Any]:
    """The inputs of the first batch, in a tuple of their own."""
    for value, _ in itertools.islice(batches, 1):
        return (value,)
    raise UsageError("benchmark data", "at least one batch", "none", "pass data with samples in it")


def _own_size(workers: Iterable[Worker]) -> int:
    """The batch size where none is asked for: the one that a file is fixed to, or 1."""
    return next((size for worker in workers if (size := Layout.of(worker.inputs).size)), 1)


def _feeds(worker: Worker, config: BenchmarkConfig, batch_size: int, given: tuple[Any] | None) -> dict[str, Array]:
    fixed = Layout.of(worker.inputs).size
    if fixed is not None and fixed != batch_size:
        raise UsageError(
            f"benchmark of '{worker.name}'", f"batch size {fixed}, to which the file is fixed", str(batch_size),
            f"use --batch-sizes {fixed}, or export with a dynamic batch",
        )  # fmt: skip
    if given is None:
        return random_feeds(worker.inputs, batch_size, shapes=config.shapes, seed=config.seed)
    return sized_feeds(given[0], worker.inputs, batch_size)


def _fed(worker: Worker, feeds: dict[str, Array], given: tuple[Any] | None) -> float:
    """The milliseconds of a worker's first run. Where values are random, some of them may be what it fails of."""
    try:
        return worker.feed(feeds)
    except QtoolError as error:
        if given is not None:
            raise
        do = f"{error.do}; values were random: where they matter, call qtool.benchmark(FILE, data=[{{NAME: array, …}}])"
        raise type(error)(error.where, error.expected, error.got, do) from error


def _measure_accuracy(
    files: Mapping[str, Path],
    opening: Mapping[str, Mapping[str, Any]],
    config: BenchmarkConfig,
    reference: str,
    variants: dict[str, dict[str, Any]],
    batches: Batches,
    compare: Compare | None,
    scores: Scores | None,
    tell: Progress,
) -> list[str]:
    """Fills in accuracy and agreement, and gives what is to be told of it.

    All cores are used: threads change the time and not the result.
    """
    tell("accuracy on the test data")
    with contextlib.ExitStack() as stack:
        sessions = {}
        for name, path in files.items():
            session = open_session(path, threads=cpu_info()["cores"], **opening[name])
            stack.callback(session.close)
            if not session.outputs:
                got, do = ", ".join(session.others), "leave the data out, and measure speed and size alone"
                raise QtoolError(f"outputs of '{name}'", "a tensor of numbers, to compare", got, do)
            session.inputs = as_written(session.inputs, path)
            sessions[name] = session
        data = batches(ACCURACY_BATCH)
        whole = ACCURACY_BATCH if config.provider == "torch-compile" else None
        outputs, targets = predict(
            sessions, data, samples=config.samples, whole=whole, scores=scores, reference=reference
        )
        count = len(sessions[reference].outputs)
    own = scores.results(reference) if scores is not None else {}
    halves = [
        name for name in outputs
        if name != reference and (variants[name]["stored"] in HALVES or opening[name]["precision"])
    ]  # fmt: skip
    overflowed = [name for name in halves if not is_finite(outputs[reference], outputs[name])]
    kept = {name: value for name, value in outputs.items() if name not in overflowed}
    for name, values in judge(kept, targets, reference=reference, compare=compare).items():
        variants[name]["accuracy"] = values | own.get(name, {})
    logits = "top-1, agreement, KL and " if "kl" in variants[reference].get("accuracy", {}) else ""
    told = [f"{logits}SQNR {'are those' if logits else 'is that'} of the first of {count} outputs"] if count > 1 else []
    others = ", ".join(sessions[reference].others)
    told += [f"no tensors of numbers, and so computed and timed, not compared: {others}"] if others else []
    if scores is None and compare is None and (why := unjudged(outputs[reference], targets)):
        told.append(why)
    told += [f"{name}: outputs overflow 16 bits to NaN or infinity, and were not judged" for name in overflowed]
    told += [text for name in halves if (text := far_sentence(name, reference, variants[name].get("accuracy", {})))]
    if scores is not None and scores.failure:
        told.append(f"the task's metrics were not measured: {scores.failure}")
    if scores is not None and scores.apart:
        told.append(scores.apart)
    return told


def _notes(
    variants: Mapping[str, dict[str, Any]], config: BenchmarkConfig, reference: str, target: str | None
) -> list[str]:
    """What a reader of the figures has to know, one sentence each."""
    own = _own_precision(variants, config.provider, target)
    told = conflict(), own, _crowded(config), _host_memory(variants)
    notes = [text for text in told if text]
    where = {"provider": config.provider, "features": cpu_info()["features"], "target": target}
    for name, entry in variants.items():
        claim = check_claim(name, entry["stored"], entry["arithmetic"], config.provider)
        slower = [
            slower_sentence(name, reference, timed, slower_causes(entry, (base, timed), where))
            for base, timed in zip(variants[reference]["latency"], entry["latency"], strict=True)
            if is_integer(name, entry, variants[reference]) and not is_simulation(config.provider)
        ]
        notes += [text for text in (claim, *slower) if text]
        if entry["elsewhere"]:
            notes.append(
                f"{name}: {len(entry['elsewhere'])} shape nodes ran on the CPU: {', '.join(entry['elsewhere'][:5])}"
            )
    return notes


def _uncounted(latency: list[dict[str, Any]]) -> list[str]:
    """A sentence where a run is not known to be one of so many samples."""
    sizes = [str(timed["batch_size"]) for timed in latency if timed["throughput_per_s"] is None]
    told = (
        f"samples per second are not told at batch size {' and '.join(sizes)}: no output has a part for each, so that "
        "what the inputs begin with is taken for no batch, and one run for one sample"
    )
    return [told] if sizes else []


def _crowded(config: BenchmarkConfig) -> str | None:
    """A sentence where there are fewer whole cores than threads, which then wait for each other, or for time."""
    if (allowed := usable_cores()) < min(config.threads, bound_cores()):
        return f"{many(config.threads, 'thread')}, and the time of {many(allowed, 'core')} in this control group"
    if not (_is_pinned(config) and hasattr(os, "sched_getaffinity")) or whole_cores(config.threads):
        return None
    there = many(bound_cores(), "hardware thread")
    return f"{many(config.threads, 'thread')} with no whole core each, of {there} here: they wait for one another"


def _host_memory(variants: Mapping[str, dict[str, Any]]) -> str | None:
    """A sentence where most of what a variant takes is not in the memory that was measured."""
    if not any(str(entry.get("device")).startswith("cuda") for entry in variants.values()):
        return None
    return "peak memory is the host's, most of it the libraries of the GPU: what a model takes there is not counted"


def _is_pinned(config: BenchmarkConfig) -> bool:
    return config.provider in ("cpu", "openvino")


def _own_precision(variants: Mapping[str, dict[str, Any]], provider: str, target: str | None) -> str | None:
    """A sentence where the runtime, left to itself, computes a float file in less than what was measured.

    Without a ``target`` there is no run directory, whose float file can be measured so too.
    """
    floats = [name for name, entry in variants.items() if set(entry["arithmetic"]) == {"float32"}]
    if provider != "openvino" or not floats or (own := openvino.own_precision()) == "float32":
        return None
    told = f"{', '.join(floats)}: computed in float32, as asked of OpenVINO; left to itself it takes {own} on this CPU"
    return told + ", which --variants bf16 measures" * (target is not None)
