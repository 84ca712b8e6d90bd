"""``qtool sensitivity``: measured once, found again, gone on with after a kill, refused for another model."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import warm

import qtool
from qtool.artifacts import read_result
from qtool.errors import QtoolError, UsageError
from qtool.inspection import describe_run
from qtool.reporting.gather import gather
from qtool.reporting.page import write_report
from qtool.stages.sensitivity import PART

OPTIONS = {"calibration": "train:64", "samples": 32}


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory: pytest.TempPathFactory, small_recipe: Path, small_data: str) -> Path:
    out = tmp_path_factory.mktemp("trained") / "run"
    qtool.train(f"{small_recipe.parent}/net.py:build", small_data, out=out, epochs=1, batch_size=16)
    return out


@pytest.fixture
def trained(tmp_path: Path, trained_once: Path) -> Path:
    return shutil.copytree(trained_once, tmp_path / "run")


def test_it_is_written_found_again_and_shown_in_the_report(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    qtool.quantize(trained, out=trained / "ptq", calibration="train:64")
    first = qtool.sensitivity(trained / "ptq", samples=32)
    assert first["config"]["calibration"] == "train:64"  # the options of the quantization that is there
    assert first["num_samples"] == 32
    assert read_result(trained / "ptq", "quantize")["sensitivity"] == first["units"]
    html = write_report(gather(trained))["html"].read_text(encoding="utf-8")
    assert "SQNR of the output with only this layer quantized" in html
    monkeypatch.setattr("qtool.quantization.stage.sensitivities", None)  # nothing is measured again
    assert qtool.sensitivity(trained / "ptq", samples=32) == first


def test_its_options_are_those_of_the_quantization_beside_the_training(trained: Path) -> None:
    qtool.quantize(trained, calibration="train:64", weight_bits=7)
    assert qtool.sensitivity(trained, samples=16)["config"]["weight_bits"] == 7


def test_under_a_contract_its_options_are_those_that_were_chosen(trained: Path) -> None:
    qtool.quantize(trained, calibration="train:64", max_kl=10.0)
    assert read_result(trained, "quantize")["contract"]["options"] == {"ranges": "minmax", "algorithms": ["pairs"]}
    measured = qtool.sensitivity(trained, samples=16)
    assert (measured["config"]["ranges"], measured["config"]["algorithms"]) == ("minmax", ["pairs"])
    assert read_result(trained, "quantize")["sensitivity"] == measured["units"]
    other = qtool.sensitivity(trained, samples=16, ranges="network")
    assert read_result(trained, "quantize")["sensitivity"] == measured["units"] != other["units"]


def test_measured_before_the_quantization_it_is_of_it_and_of_no_other(trained: Path) -> None:
    found = qtool.sensitivity(trained, **OPTIONS)
    qtool.quantize(trained, calibration="train:64")
    assert read_result(trained, "quantize")["sensitivity"] == found["units"]
    shown = {unit["name"]: unit["sqnr_db"] for unit in describe_run(trained)["units"]}
    assert shown == {unit["name"]: unit["sqnr_db"] for unit in found["units"]}
    qtool.quantize(trained, calibration="train:64", weight_bits=7)
    assert "sensitivity" not in read_result(trained, "quantize")
    assert {unit["sqnr_db"] for unit in describe_run(trained)["units"]} == {None}


def test_measured_with_other_options_it_is_not_of_the_quantization(trained: Path) -> None:
    qtool.quantize(trained, calibration="train:64")
    qtool.sensitivity(trained, samples=16, weight_bits=7)
    assert "sensitivity" not in read_result(trained, "quantize")
    units = qtool.sensitivity(trained, samples=16)["units"]
    assert read_result(trained, "quantize")["sensitivity"] == units


def test_samples_are_a_number(trained: Path) -> None:
    for samples in (0, "3", None):
        with pytest.raises(UsageError, match="argument 'samples': expected"):
            qtool.sensitivity(trained, samples=samples)
    given: Any = np.int64(8)
    assert qtool.sensitivity(trained, samples=given) == qtool.sensitivity(trained, samples=8)


def test_other_options_are_measured_anew(trained: Path) -> None:
    first = qtool.sensitivity(trained, **OPTIONS)
    second = qtool.sensitivity(trained, **OPTIONS, ranges="minmax")
    assert first["config"]["ranges"] != second["config"]["ranges"]
    assert json.loads((trained / "sensitivity.json").read_text())["config"]["ranges"] == "minmax"


def test_a_measurement_of_another_model_or_other_samples_is_refused(
    trained: Path, small_net: str, small_data: str
) -> None:
    qtool.sensitivity(trained, **OPTIONS)
    with pytest.raises(QtoolError, match="these calibration samples; got one of another calibration"):
        qtool.sensitivity(trained, **OPTIONS, seed=1)
    qtool.train(small_net, small_data, out=trained, epochs=1, batch_size=16, seed=1)
    with pytest.raises(QtoolError, match="this model's weights; got one of another model"):
        qtool.sensitivity(trained, **OPTIONS)
    assert qtool.sensitivity(trained, **OPTIONS, resume=False)["num_samples"] == 32


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 7}'])
def test_a_damaged_file_is_named(text: str, trained: Path) -> None:
    (trained / "sensitivity.json").write_text(text)
    with pytest.raises(QtoolError, match=r"sensitivity\.json': expected what 'qtool sensitivity' wrote"):
        qtool.sensitivity(trained, **OPTIONS)


def test_an_edited_file_is_named_with_what_is_wrong_in_it(trained: Path) -> None:
    first = qtool.sensitivity(trained, **OPTIONS)
    path = trained / "sensitivity.json"
    whole = path.read_text()
    edits: list[tuple[str, dict[str, Any]]] = [
        ("without units[0].sqnr_db", {"units": [{k: v for k, v in first["units"][0].items() if k != "sqnr_db"}]}),
        ("without units[0].kl", {"units": [{k: v for k, v in first["units"][0].items() if k != "kl"}]}),
        ("with 'high' as units[0].kl", {"units": [first["units"][0] | {"kl": "high"}]}),
        ("with 'none' as units", {"units": "none"}),
        ("with '[]' as identity", {"identity": []}),
        ("with 'None' as config", {"config": None}),
    ]
    for fault, edit in edits:
        path.write_text(json.dumps(json.loads(whole) | edit))
        with pytest.raises(QtoolError, match=re.escape(f"got JSON {fault}; delete it")):
            qtool.sensitivity(trained, **OPTIONS)
    path.write_text(whole)
    assert qtool.sensitivity(trained, **OPTIONS) == first


@pytest.mark.parametrize("edit", [{"state": []}, {"state": {"num_samples": 8}}, None])
def test_what_a_stopped_measurement_left_is_passed_over_where_it_is_no_more_that(edit: Any, trained: Path) -> None:
    first = qtool.sensitivity(trained, **OPTIONS)
    (trained / "sensitivity.json").unlink()
    told = {key: first[key] for key in ("schema", "identity", "config")}
    (trained / PART).write_text(json.dumps(told | edit if edit else []))
    assert qtool.sensitivity(trained, **OPTIONS) == first


def test_a_file_that_may_not_be_read_is_not_to_be_deleted(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from qtool.stages.sensitivity import read_sensitivity

    def refuse(path: Path, **_: object) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(QtoolError, match="got Permission denied; check the path and its permissions"):
        read_sensitivity(trained / "sensitivity.json")


def test_wrong_numbers_and_places_are_usage_errors(trained: Path) -> None:
    with pytest.raises(UsageError, match="argument 'samples': expected at least 1"):
        qtool.sensitivity(trained, samples=0)
    with pytest.raises(
        UsageError, match="argument 'max_drop': expected options of what is measured; got one of a search"
    ):
        qtool.sensitivity(trained, max_drop=1.0)
    with pytest.raises(UsageError, match="a folder that a stage has written"):
        qtool.sensitivity(trained / "nowhere")


SLOW = """
import importlib, sys, time
module = importlib.import_module("qtool.stages.sensitivity")
from qtool.quantization.contracts.sensitivity import Sensitivities
module.SAVE_SECONDS = 0.0
add = Sensitivities._add
def slow(self, piece):
    time.sleep(float(sys.argv[2]))
    add(self, piece)
Sensitivities._add = slow
module.sensitivity(sys.argv[1], samples=32, calibration="train:64")
"""


def test_killed_by_sigkill_it_goes_on(trained: Path, tmp_path: Path) -> None:
    calm = qtool.sensitivity(trained, out=tmp_path / "calm", **OPTIONS)
    process = warm.Started(tmp_path / "said", warm.script, SLOW, str(trained), "0.5")
    part = trained / PART
    process.wait_for(part.exists)
    process.kill()
    assert 0 < json.loads(part.read_text())["state"]["num_samples"] < 32
    assert not (trained / "sensitivity.json").exists()
    assert qtool.sensitivity(trained, **OPTIONS) == calm
    assert not part.exists()
