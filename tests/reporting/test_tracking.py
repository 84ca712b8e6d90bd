"""What a run gives to MLflow, held against a stand-in for the module."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from qtool.artifacts import staging, write_result
from qtool.cli import main
from qtool.errors import QtoolError, UsageError
from qtool.reporting.tracking import log_run, metrics_of


class FakeMlflow:
    """MLflow's fluent functions, which keep what they were given by run."""

    def __init__(self) -> None:
        self.runs: list[dict[str, Any]] = []
        self.open: list[dict[str, Any]] = []
        self.uri = ""
        self.retries: list[str | None] = []

    def MlflowClient(self, tracking_uri: str) -> Any:
        self.retries.append(os.environ.get("MLFLOW_HTTP_REQUEST_MAX_RETRIES"))
        if tracking_uri == "http://nowhere":
            raise ConnectionError("no route\nto host")
        return SimpleNamespace(search_experiments=lambda max_results: [])

    def set_tracking_uri(self, uri: str) -> None:
        if uri == "http://nowhere":
            raise ConnectionError("no route\nto host")
        self.uri = uri

    @contextlib.contextmanager
    def start_run(self, run_name: str, nested: bool) -> Iterator[Any]:
        assert nested == bool(self.open), "MLflow refuses a second run that is not nested"
        run: dict[str, Any] = {"name": run_name, "params": {}, "metrics": {}, "files": []}
        self.runs.append(run)
        self.open.append(run)
        yield SimpleNamespace(info=SimpleNamespace(run_id=f"id of {run_name}"))
        self.open.pop()

    def log_params(self, params: dict[str, str]) -> None:
        assert len(params) <= 100, "MLflow refuses more at once"
        self.open[-1]["params"] |= params

    def log_metrics(self, metrics: dict[str, float]) -> None:
        self.open[-1]["metrics"] |= metrics

    def log_artifact(self, path: str) -> None:
        self.open[-1]["files"].append(Path(path).name)


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> FakeMlflow:
    fake = FakeMlflow()
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    return fake


def commit(folder: Path, stage: str, config: dict[str, Any], metrics: dict[str, Any]) -> None:
    with staging(folder, stage):
        write_result(folder, stage, config=config, inputs={}, outputs={}, metrics=metrics)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    place = tmp_path / "a"
    (place / "ptq").mkdir(parents=True)
    latency = [{"batch_size": 8, "speedup": 2.5, "converged": True, "latency_quantiles_ms": [1.0]}]
    figures = {"variants": {"int8": {"size_mib": 1.5, "latency": latency, "file": "x"}}, "cpu": {"cores": 2}}
    quantize = {f"option_{i}": i for i in range(120)} | {"overrides": {"layer.*": "float"}}
    commit(place, "train", {"epochs": 4, "lora": None}, {"top1": 0.9})
    commit(place / "ptq", "quantize", quantize, {"loss": float("nan")})
    commit(place / "ptq", "benchmark", {}, figures)
    return place


def test_a_run_and_its_variants_are_logged(mlflow: FakeMlflow, run: Path) -> None:
    assert log_run(run, "file:store") == "id of a"
    assert mlflow.uri == "file:store"
    whole, ptq = mlflow.runs
    assert (whole["name"], ptq["name"]) == ("a", "ptq")
    assert whole["params"] == {"train.epochs": "4", "train.lora": "None"}
    assert whole["metrics"] == {"train.top1": 0.9}
    assert whole["files"] == ["train.json"]
    assert len(ptq["params"]) == 121
    assert ptq["params"]["quantize.overrides.layer._"] == "float"
    assert ptq["metrics"] == {
        "benchmark.variants.int8.size_mib": 1.5, "benchmark.variants.int8.latency.batch_size-8.speedup": 2.5,
        "benchmark.cpu.cores": 2.0,
    }  # fmt: skip


def test_gates_go_by_their_names() -> None:
    gates = [{"name": "unit parity", "passed": True, "details": {"x": 1}, "worst": 3}]
    assert dict(metrics_of("export", {"metrics": {"gates": gates}})) == {"export.gates.unit parity.worst": 3.0}


def test_a_missing_package_is_told_before_any_work(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(UsageError, match=r"pip install 'qtool\[mlflow\]'"):
        log_run(run, "file:store")
    said = CliRunner().invoke(main, ["report", str(run), "--mlflow", "file:store"])
    assert said.exit_code == 2
    assert not (run / "report.html").exists()


def test_a_server_that_refuses_is_one_line(mlflow: FakeMlflow, run: Path) -> None:
    with pytest.raises(QtoolError, match=r"--mlflow 'http://nowhere'.*ConnectionError: no route to host"):
        log_run(run, "http://nowhere")


def test_a_server_that_is_down_is_told_soon_and_before_any_work(
    mlflow: FakeMlflow, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", raising=False)
    said = CliRunner().invoke(main, ["report", str(run), "--mlflow", "http://nowhere"])
    assert said.exit_code == 1
    assert "--mlflow 'http://nowhere'" in said.output
    assert (mlflow.retries, mlflow.runs) == (["1"], [])
    assert not (run / "report.html").exists()
    assert "MLFLOW_HTTP_REQUEST_MAX_RETRIES" not in os.environ
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
    CliRunner().invoke(main, ["report", str(run), "--mlflow", "http://nowhere"])
    assert (mlflow.retries[1], os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"]) == ("3", "3")


def test_an_empty_uri_is_no_wish_to_log_nothing(run: Path) -> None:
    said = CliRunner().invoke(main, ["report", str(run), "--mlflow", ""])
    assert said.exit_code == 2
    assert "--mlflow: expected the URI" in said.output


def test_quiet_has_mlflow_name_no_links(mlflow: FakeMlflow, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"
    monkeypatch.setenv(name, "false")
    (run / "ptq" / "benchmark.json").unlink()
    CliRunner().invoke(main, ["report", str(run), "--mlflow", "file:store", "--quiet"])
    assert os.environ[name] == "1"


def test_the_report_command_logs_what_it_wrote(mlflow: FakeMlflow, run: Path) -> None:
    (run / "ptq" / "benchmark.json").unlink()  # which holds too little for a table
    said = CliRunner().invoke(main, ["report", str(run), "--mlflow", "file:store"])
    assert said.exit_code == 0, said.output
    assert {"report.html", "report.md"} <= set(mlflow.runs[0]["files"])


def test_files_alone_have_no_run_to_log() -> None:
    said = CliRunner().invoke(main, ["benchmark", "a.onnx", "--mlflow", "file:store"])
    assert said.exit_code == 2
    assert "run directory" in said.output
