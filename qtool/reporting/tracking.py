"""A run's results in MLflow: parameters, metrics and files, under ``--mlflow URI``.

The run directory stays the record; this copies it to where a team compares runs. Each place that holds results (the
training, each quantized variant) becomes an MLflow run, variants nested in the whole. Parameters are the stages'
configurations (``quantize.ranges``), metrics every finite number that the stages measured
(``benchmark.variants.int8.size_mib``; the entries of a list by batch size or place), artifacts the JSON results, the
INT8 file and the report.

A server takes MLflow's client alone (mlflow-skinny, the extra ``mlflow``); a database of one's own, the whole package.
The experiment is MLflow's own choice (``MLFLOW_EXPERIMENT_NAME``), and credentials are its environment's. Left out on
purpose: the model registry, and logging step by step while a stage runs.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from qtool.errors import QtoolError, UsageError, one_line
from qtool.reporting.gather import Run, gather
from qtool.system.imports import imported

RETRIES = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"
MAX_PARAM = 500
BATCH = 100
ARTIFACTS = ("*.json", "recipe.toml", "model.int8.onnx", "report.html", "report.md")


def require_mlflow() -> Any:
    """The mlflow module. Raises UsageError that says how to install it."""
    return imported("mlflow", "--mlflow", "qtool[mlflow]", UsageError)


def require_answer(uri: str) -> None:
    """Asks the server or database at ``uri`` for its experiments, before there is anything to log.

    Raises UsageError where there is no URI or mlflow is not installed, QtoolError where no answer comes.
    """
    if not uri.strip():
        raise UsageError("--mlflow", "the URI of a tracking server or database", "nothing", "give one, or leave it out")
    mlflow = require_mlflow()
    given = os.environ.get(RETRIES)
    os.environ[RETRIES] = given or "1"  # MLflow's own seven take four minutes where nothing listens
    try:
        with _told(uri):
            mlflow.MlflowClient(tracking_uri=uri).search_experiments(max_results=1)
    finally:
        if given is None:
            del os.environ[RETRIES]


def log_run(path: Path, uri: str) -> str:
    """Logs the run directory at ``path`` to the tracking server or database at ``uri``; returns MLflow's run id.

    Raises UsageError where mlflow is not installed, QtoolError where there is no result or MLflow refuses.
    """
    mlflow, run = require_mlflow(), gather(path)
    with _told(uri):
        mlflow.set_tracking_uri(uri)
        return _log(mlflow, run, nested=False)


@contextlib.contextmanager
def _told(uri: str) -> Iterator[None]:
    """What MLflow raises, in a line of qtool's."""
    try:
        yield
    except Exception as error:
        raise QtoolError(
            f"--mlflow '{uri}'", "a tracking server or database that takes the run",
            one_line(f"{type(error).__name__}: {error}")[:300],
            "check the URI and MLflow's own settings; a database (sqlite:///FILE) needs pip install mlflow",
        ) from error  # fmt: skip


def _log(mlflow: Any, run: Run, *, nested: bool) -> str:
    with mlflow.start_run(run_name=run.name, nested=nested) as active:
        params = dict(pair for stage, result in run.results.items() for pair in _params(stage, result))
        for start in range(0, len(params), BATCH):
            mlflow.log_params(dict(list(params.items())[start : start + BATCH]))
        mlflow.log_metrics(dict(p for stage, result in run.results.items() for p in metrics_of(stage, result)))
        for pattern in ARTIFACTS:
            for file in sorted(run.path.glob(pattern)):
                mlflow.log_artifact(str(file))
        for variant in run.variants:
            _log(mlflow, variant, nested=True)
        return str(active.info.run_id)


def _params(stage: str, result: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in result.get("config", {}).items():
        items = value.items() if isinstance(value, Mapping) else [("", value)]
        for key, item in items:
            yield _name(f"{stage}.{name}.{key}".rstrip(".")), str(item)[:MAX_PARAM]


def metrics_of(stage: str, result: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Every finite number under a result's ``metrics``, named by its path; of lists, those of named entries only.

    >>> dict(metrics_of("benchmark", {"metrics": {"a": {"b": 1, "c": "x"}, "at": [{"batch_size": 8, "ms": 2.5}]}}))
    {'benchmark.a.b': 1.0, 'benchmark.at.batch_size-8.ms': 2.5}
    """
    yield from _numbers(stage, result.get("metrics", {}))


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, bool | str) or value is None:
        return
    if isinstance(value, int | float):
        if math.isfinite(value):
            yield _name(name), float(value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _numbers(f"{name}.{key}", item)
    elif isinstance(value, list):
        for entry in value:
            label = _label(entry)
            if label:
                rest = {key: item for key, item in entry.items() if key not in ("name", "batch_size", "details")}
                yield from _numbers(f"{name}.{label}", rest)


def _label(entry: Any) -> str:
    """What tells one entry of a list from the others: its batch size or its name; empty where it has neither."""
    if not isinstance(entry, Mapping):
        return ""
    return f"batch_size-{entry['batch_size']}" if "batch_size" in entry else str(entry.get("name", ""))


def _name(text: str) -> str:
    """A name with MLflow's characters only."""
    return re.sub(r"[^\w./: -]", "_", text, flags=re.ASCII)
