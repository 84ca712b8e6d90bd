"""The benchmark stage: exported files and test data, to figures side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qtool.artifacts import earlier, has_result, output_path, read_result, staging, write_result
from qtool.data.given import pairs_of
from qtool.errors import QtoolError, UsageError, kind_of
from qtool.lineage import superseded
from qtool.options import argument, documented
from qtool.recipe import BASELINES, VARIANTS, BenchmarkConfig, as_dict
from qtool.source import UNIDENTIFIED, open_data, open_task, recall_source, recall_task, require_run_directory
from qtool.stages.common import AnyPath, Progress, configured, finished, run_of, teller, writable
from qtool.stages.surroundings import apart
from qtool.system.files import named, names_file, sha256_of

if TYPE_CHECKING:
    from qtool.benchmarking.accuracy import Scores
    from qtool.exporting.stage import ExportResult
    from qtool.tasks import Task

NO_TASK = (
    "the task's metrics were not measured: it was given as a Python object; call benchmark from Python with task=…"
)


@apart
@documented(BenchmarkConfig)
def benchmark(
    what: AnyPath | ExportResult | Mapping[str, AnyPath] | Sequence[AnyPath],
    data: object = None,
    *,
    task: Task | str | None = None,
    out: AnyPath | None = None,
    trust: bool = False,
    config: BenchmarkConfig | None = None,
    progress: Progress = False,
    **options: Any,
) -> dict[str, Any]:
    """Measures size, speed and accuracy of exported files side by side, and returns the figures as plain values.

    ``what`` is a run directory (the result is committed there), what :func:`export` returned, which stands for it, or
    any ONNX files: one, several, or a mapping of names to them. ``data`` gives the test samples: by default those of
    the run directory; or any data or iterable of batches, (input, target) or inputs alone; for files, none measures
    speed alone. ``task`` adds its metrics to what is compared anyway (top-1, agreement, KL, SQNR): by default that of
    the run directory. In PyTorch (``provider="torch"``) the run's quantized and float graphs are measured instead of
    the exported files. ``out`` is where a run directory's figures go instead. Raises ContractError where a figure
    became worse than in ``compare``, or INT8 is slower than the reference without ``allow_slower``; the figures are
    committed all the same.
    """
    config = configured(BenchmarkConfig, config, options)
    from qtool.benchmarking import stage

    what = run_of(what)
    if (files := _files(what)) is not None:
        if out is not None:
            do = "leave it out: the figures of files are what is returned"
            raise UsageError(argument("out"), "a run directory beside it, whose result is written", "files", do)
        if config.variants != VARIANTS:
            got, do = ", ".join(config.variants), "leave them out: the files that are named are what is measured"
            raise UsageError(argument("variants"), "a run directory beside them", got, do)
        if config.samples is not None and data is None:
            do = "leave it out: files alone are timed on random inputs, and not judged"
            raise UsageError(argument("samples"), "test data beside it", "files alone", do)
        scores = None if task is None else _scores(open_task(task), files)
        found = stage.benchmark(
            files, config, batches=_test_batches(open_data(data, 0)), scores=scores, progress=teller(progress)
        )
        _require(found, config)
        return found
    if not isinstance(what, str | Path):
        raise UsageError(argument("what"), "a run directory, or ONNX files", kind_of(what), "pass what export returned")
    require_use(config)
    made = _made(config)
    run = require_run_directory(Path(what), made)
    folder = writable(out) or writable(run) or run
    recorded = read_result(run, made)
    _require_current(run, made)
    outputs, left = _outputs(config, recorded)
    if not outputs:
        told, do = "; ".join(left.values()), "name others, or export again"
        raise UsageError(argument("variants"), "files that the export wrote", told, do)
    files = {name: output_path(run, recorded, output) for name, output in outputs.items()}
    opened = recall_source(run, made, trust=trust).data if data is None else open_data(data, 0)
    identity = getattr(opened, "identity", UNIDENTIFIED)
    subject = {
        "model": (recorded.get("source") or {}).get("model"), "data": None if identity == UNIDENTIFIED else identity
    }  # fmt: skip
    judging = recall_task(recorded.get("source") or {}, trust=trust) if task is None else open_task(task)
    found = stage.benchmark(
        files, config, batches=_test_batches(opened), scores=_scores(judging, files, run), subject=subject,
        target=recorded["plan"]["target"], precisions=_recast(config),
        progress=teller(progress),
    )  # fmt: skip
    found["notes"] += [f"{name} was not measured: {reason}" for name, reason in left.items()]
    found["notes"] += [NO_TASK] if judging is None else []
    with staging(folder, "benchmark"):
        inputs = {name: recorded["outputs"][output]["sha256"] for name, output in outputs.items()}
        inputs |= {"data": identity} | _compared(config)
        write_result(folder, "benchmark", config=as_dict(config), inputs=inputs, outputs={}, metrics=found)
    _require(found, config, _gains_size_alone(recorded))
    return found


def require_use(config: BenchmarkConfig) -> None:
    """Raises UsageError for a variant of a run directory that the provider has nothing to measure of."""
    if "bf16" in config.variants and not config.provider.startswith(("torch", "openvino")):
        raise UsageError(
            "--variants bf16", "--provider torch or openvino, which compute in bfloat16",
            f"--provider {config.provider}", "measure it there: no such ONNX file is exported",
        )  # fmt: skip


def _scores(task: Task | None, files: Mapping[str, Path], run: Path | None = None) -> Scores | None:
    """What a task makes of the files' outputs, packed as the model's; None for plain classification.

    The top-1 of that is compared anyway.
    """
    from qtool.benchmarking.accuracy import Scores
    from qtool.tasks import Classification

    return None if task is None or isinstance(task, Classification) else Scores(task, _structure(files, run))


def _structure(files: Mapping[str, Path], run: Path | None) -> Any:
    """What a model's outputs are packed in: as one of its files tells, or else as the quantized model in ``run``."""
    from qtool.graphs.structures import outputs_of, read
    from qtool.runtimes.onnx_notes import OUTPUTS, metadata
    from qtool.stages.quantization import load_quantized

    for path in files.values():
        if path.suffix == ".onnx" and path.is_file() and (told := metadata(path).get(OUTPUTS)):
            return read(told)
    if run is None or not has_result(run, "quantize"):
        return None
    return outputs_of(load_quantized(run).graph)


def measured(run: Path, config: BenchmarkConfig, tell: Callable[[str], None] = lambda text: None) -> bool:
    """Whether these very files were measured as ``config`` says, on the data of the quantization beside them.

    ``tell`` takes a line that says so, or what has changed since. Raises ContractError where the measurement did.
    """
    found = earlier(run, "benchmark")
    if found is None:
        return False
    recorded = read_result(run, _made(config))
    inputs = {name: recorded["outputs"][output]["sha256"] for name, output in _outputs(config, recorded)[0].items()}
    inputs |= {"data": read_result(run, "quantize", verify=False)["inputs"]["data"]} | _compared(config)
    if not finished(run, "benchmark", as_dict(config), inputs, tell):
        return False
    _require(found["metrics"], config, _gains_size_alone(recorded))
    return True


def _compared(config: BenchmarkConfig) -> dict[str, str]:
    """What identifies the figures that are compared with."""
    path = Path(config.compare) if config.compare else None
    return {"compare": sha256_of(path)} if path and path.is_file() else {}


def _files(what: object) -> dict[str, Path] | None:
    """ONNX files by name, where that is what was given."""
    if isinstance(what, Mapping):
        if other := next((name for name, path in what.items() if not isinstance(path, str | Path)), None):
            got = f"{kind_of(what[other])} as '{other}'"
            raise UsageError(argument("what"), "paths of files by name", got, "export it first, and name the file")
        return {str(name): Path(path) for name, path in what.items()}
    if isinstance(what, str | Path):
        return named([Path(what)]) if names_file(Path(what)) else None
    paths = list(what) if isinstance(what, Sequence) else []
    return named([Path(path) for path in paths]) if paths and all(isinstance(p, str | Path) for p in paths) else None


def _require_current(run: Path, stage: str) -> None:
    """Raises QtoolError where the quantization in ``run`` is stale, or another one than was exported there."""
    read = ("quantize", "export")
    there = {name: read_result(run, name, verify=False, stale=True) for name in read if has_result(run, name)}
    if stage == "export" and (told := superseded(there, stage)):
        reason = there["quantize"].get("stale")
        raise QtoolError(
            f"'{run / 'export.json'}'", "an export of the quantization that is there",
            f"one {told}{f': {reason}' if reason else ''}",
            f"run 'qtool {'quantize' if reason else 'export'}' with this directory again, or name the files themselves",
        )  # fmt: skip


def _gains_size_alone(recorded: Mapping[str, Any]) -> bool:
    """Whether nothing was planned to multiply integers: stored weights are dequantized, or all is simulated."""
    return not any(unit["integer"] or unit.get("block") for unit in recorded["plan"]["units"])


def _require(found: dict[str, Any], config: BenchmarkConfig, may_be_slower: bool = False) -> None:
    """Raises ContractError for figures that became worse, and for INT8 that is slower where it was to be faster."""
    from qtool.benchmarking.claims import require_not_slower
    from qtool.benchmarking.regression import require_no_regression

    require_no_regression(found)
    require_not_slower(found, config.allow_slower or may_be_slower)


def _made(config: BenchmarkConfig) -> str:
    """The stage whose outputs are measured."""
    return "quantize" if config.provider.startswith("torch") else "export"


def _recast(config: BenchmarkConfig) -> dict[str, str]:
    """The variants that have no file of their own, and the precision that the float model is computed in for them."""
    recast = ("fp16", "bf16") if _made(config) == "quantize" else ("bf16",)
    return {name: name for name in config.variants if name in recast}


def _outputs(config: BenchmarkConfig, recorded: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """The output of the stage that each variant is measured from; and of those that the export did not make, why."""
    if _made(config) == "quantize":
        return {name: name if name == "int8" else "float" for name in config.variants}, {}
    outputs = {name: "fp32" if name in _recast(config) else name for name in config.variants}
    left = {name: reason for name, output in outputs.items() if (reason := _unmade(output, recorded))}
    return {name: output for name, output in outputs.items() if name not in left}, left


def _unmade(output: str, recorded: Mapping[str, Any]) -> str:
    """Why the export made no such file; empty where it made one, or should have."""
    if output in recorded["outputs"]:
        return ""
    if output in BASELINES and output not in (recorded["config"].get("baselines", BASELINES) or ()):
        return f"the export left out {output}, as --baselines told it to"
    gates = recorded["metrics"].get("gates", ())
    return next((gate["found"] for gate in gates if gate["name"] == f"{output} range"), "")


def _test_batches(data: Any) -> Callable[[int], Iterable[tuple[Any, Any]]] | None:
    """Batches of the test part, or of the iterable itself, as the benchmark asks for them."""
    from qtool.data.specs import batches

    if data is None:
        return None
    if not hasattr(data, "test"):
        given = pairs_of(data)
        return lambda size: given
    return lambda size: batches(data.test, size)
