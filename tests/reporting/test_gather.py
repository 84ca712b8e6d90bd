from __future__ import annotations

import json

import pytest

from qtool.artifacts import pending
from qtool.errors import QtoolError
from qtool.inspection import describe_run
from qtool.reporting.gather import gather, plain
from qtool.system.files import sha256_of


def test_a_whole_run_has_its_training_and_its_variants(finished_run):
    run = gather(finished_run)
    assert list(run.results) == ["train"]
    assert [v.name for v in run.variants] == ["ptq", "qat"]
    assert all(list(v.results) == ["quantize", "export", "benchmark"] for v in run.variants)
    assert run.missing == [] == run.variants[0].missing
    assert [r.name for r in run.measured] == [r.name for r in run.quantized] == ["ptq", "qat"]


def test_a_variants_folder_brings_the_training_it_came_from(finished_run):
    run = gather(finished_run / "ptq")
    assert run.name == "ptq"
    assert "train" in run.results
    assert run.measured == [run]


def test_what_is_not_there_yet_is_said_with_the_next_command(finished_run):
    (finished_run / "qat" / "benchmark.json").unlink()
    (finished_run / "qat" / "export.json").unlink()
    run = gather(finished_run)
    assert run.variants[1].missing == [f"not there yet: export, benchmark (next: qtool export {finished_run / 'qat'})"]
    assert [r.name for r in run.measured] == ["ptq"]


def test_only_trained_is_a_run_too(finished_run, tmp_path):
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "train.json").write_text((finished_run / "train.json").read_text())
    assert "quantize" in gather(alone).missing[0]


def test_only_a_benchmark_lacks_nothing(finished_run, tmp_path):
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "benchmark.json").write_text((finished_run / "ptq" / "benchmark.json").read_text())
    assert gather(alone).missing == []


def test_an_export_from_another_folder_needs_no_quantization_but_says_that_a_contract_was_not_kept(finished_run):
    place = finished_run / "ptq"
    (place / "quantize.json").unlink()
    assert gather(place).missing == []
    result = json.loads((place / "export.json").read_text())
    found = "not run: the quantization did not keep it, and is the closest found"
    result["metrics"]["gates"].append({"name": "contract", "passed": None, "found": found})
    (place / "export.json").write_text(json.dumps(result))
    assert gather(place).missing == [f"contract {found}"]


def test_a_commit_that_was_killed_is_finished_and_its_folder_is_no_variant(finished_run):
    place = finished_run / "ptq"
    pending(place, "export").mkdir()
    (place / "export.json").rename(pending(place, "export") / "export.json")
    assert set(gather(place).results) == {"train", "quantize", "export", "benchmark"}
    pending(place, "export").mkdir()
    (pending(place, "export") / "train.json").write_text("{}")  # of a stage that was killed before it committed
    assert gather(place).variants == []


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": 99, "stage": "export"}'])
def test_a_damaged_result_is_a_sentence_and_not_the_end(finished_run, text):
    (finished_run / "ptq" / "export.json").write_text(text)
    run = gather(finished_run)
    assert any("export.json" in told for told in run.variants[0].missing)
    assert "benchmark" in run.variants[0].results


def test_a_damaged_training_is_no_part_of_the_quantization_beside_it(finished_run):
    quantized = json.loads((finished_run / "ptq" / "quantize.json").read_text())
    quantized["source"]["trained_in"] = "."
    (finished_run / "quantize.json").write_text(json.dumps(quantized))
    (finished_run / "train.json").write_text("{")
    told = plain(gather(finished_run))
    assert "train" not in told
    assert any("train.json" in text for text in told["missing"])


def test_a_stale_result_is_shown_as_such(finished_run):
    path = finished_run / "ptq" / "export.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"stale": "a later export failed"}))
    run = gather(finished_run)
    assert "export is stale: a later export failed" in run.variants[0].missing
    assert "export" in run.variants[0].results


@pytest.mark.parametrize(("stage", "output"), [("quantize", "int8"), ("export", "int8")])
def test_what_was_made_from_an_earlier_result_is_said(finished_run, stage, output):
    later = {"quantize": "export", "export": "benchmark"}[stage]
    taken = {"quantize": "quantized", "export": "int8"}[stage]
    (finished_run / "ptq" / "made").write_text("anew")
    made = {"file": "made", "sha256": sha256_of(finished_run / "ptq" / "made")}
    for name, key, value in ((stage, "outputs", {output: made}), (later, "inputs", {taken: "a" * 64})):
        path = finished_run / "ptq" / f"{name}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    told = f"{later} is of an earlier {stage}: run 'qtool {later} {finished_run / 'ptq'}' again"
    assert told in gather(finished_run).variants[0].missing
    if later == "export":  # the step behind it would be refused, and is not said to be the next
        (finished_run / "ptq" / "benchmark.json").rename(finished_run / "kept.json")
        assert "not there yet: benchmark" in gather(finished_run).variants[0].missing
        (finished_run / "kept.json").rename(finished_run / "ptq" / "benchmark.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"inputs": {taken: made["sha256"]}}))
    assert gather(finished_run).variants[0].missing == []


def test_a_quantization_of_an_earlier_training_is_said_also_where_that_lies_in_another_folder(finished_run):
    path, place = finished_run / "train.json", finished_run / "qat"
    (finished_run / "weights").write_text("anew")
    made = {"file": "weights", "sha256": sha256_of(finished_run / "weights")}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"outputs": {"model": made}}))
    path = place / "quantize.json"
    quantized = json.loads(path.read_text()) | {"inputs": {"weights": "a" * 64}, "config": {"mode": "qat"}}
    path.write_text(json.dumps(quantized))
    told = f"quantize is of an earlier train: run 'qtool quantize {finished_run} --mode qat --out {place}' again"
    assert gather(finished_run).told == [f"qat: {told}"]
    assert gather(place).told == [told]
    assert plain(gather(finished_run))["variants"]["qat"]["missing"] == [told]
    path.write_text(json.dumps(quantized | {"inputs": {"weights": made["sha256"]}}))
    assert gather(finished_run).told == []


def test_a_file_that_was_changed_or_taken_away_is_said(finished_run):
    place, result = finished_run / "ptq", finished_run / "ptq" / "quantize.json"
    (place / "int8.pt2").write_bytes(b"integers")
    entry = {"file": "int8.pt2", "sha256": sha256_of(place / "int8.pt2")}
    result.write_text(json.dumps(json.loads(result.read_text()) | {"outputs": {"int8": entry}}))
    assert gather(finished_run).told == []
    (place / "int8.pt2").write_bytes(b"inteqers")
    (told,) = gather(finished_run).told
    assert told.startswith(f"ptq: '{place / 'int8.pt2'}': expected sha256 {entry['sha256'][:12]}… as recorded")
    (place / "int8.pt2").unlink()
    assert "no file" in gather(finished_run).told[0]


@pytest.mark.parametrize(
    ("stage", "record", "place", "before"),
    [
        ("export", {"inputs": {"quantized_in": "."}}, "ptq", "quantize"),
        ("quantize", {"source": {"trained_in": "."}}, "ptq", "train"),
        ("quantize", {"source": {"trained_in": ".."}}, ".", "train"),
    ],
)
def test_a_result_that_is_gone_is_missed_where_another_was_made_from_it(finished_run, stage, record, place, before):
    path = finished_run / "ptq" / f"{stage}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | record))
    lost = finished_run / place / f"{before}.json"
    lost.unlink(missing_ok=True)
    told = f"'{lost}': expected the result that {stage} was made from; got no file; restore it or run 'qtool {before}'"
    assert gather(finished_run).told[0] == f"ptq: {told} again"
    assert describe_run(finished_run / "ptq", finished_run)["notes"] == [f"{told} again"]
    if place == ".":
        assert gather(finished_run / "ptq").told == []  # it was handed on alone


def test_a_folder_without_results_is_refused(tmp_path):
    with pytest.raises(QtoolError, match="run a stage"):
        gather(tmp_path)
    with pytest.raises(QtoolError, match="no such folder"):
        gather(tmp_path / "absent")
    (tmp_path / "file").write_text("")
    with pytest.raises(QtoolError, match="a file"):
        gather(tmp_path / "file")


@pytest.mark.parametrize("name", ["train.json", "contract.json", "ptq/quantize.json"])
def test_of_results_that_cannot_be_read_the_first_is_told_where_there_is_nothing_else(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text('{"schema": 1')
    with pytest.raises(
        QtoolError, match=rf"^'{tmp_path / name}': expected .*; got Expecting .*; run 'qtool \w+' again$"
    ):
        gather(tmp_path)


def test_a_simulation_is_not_sent_to_an_export_that_refuses_it(finished_run):
    for stage in ("export", "benchmark"):
        (finished_run / "qat" / f"{stage}.json").unlink()
    path = finished_run / "qat" / "quantize.json"
    result = json.loads(path.read_text())
    result.setdefault("config", {})["activation_bits"] = 4
    path.write_text(json.dumps(result))
    assert gather(finished_run).variants[1].missing == ["no file: activations of fewer than 8 bits are a simulation"]
