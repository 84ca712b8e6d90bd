from __future__ import annotations

import html
import json
import re
from html.parser import HTMLParser

import pytest

from qtool.errors import QtoolError, UsageError
from qtool.reporting.gather import gather
from qtool.reporting.page import page, summary, write_report

VOID = {"meta", "line", "circle", "rect", "polygon", "polyline", "path", "br"}


class Outline(HTMLParser):
    """Headings and text of a page, every element checked to be closed where it was opened."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.headings: list[str] = []
        self.tags: set[str] = set()
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.add(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text += data
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)


def test_a_finished_run_shows_everything(finished_run):
    read = Outline(page(gather(finished_run)))
    assert read.headings == [
        "Verdict", "Accuracy, time and size", "Figures", "Latency", "Error by layer", "Coverage and gates", "Training",
        "Provenance",
    ]  # fmt: skip
    for words in ("2.50x faster", "asked for <float>", "5 of 6 units are integer", "not run", "failed", "storage only"):
        assert words in read.text
    for words in ("torch2.13.0", "sha256 aaaaaaaaaaaaaaaa…", "batch_sizes1, 8"):
        assert words in read.text


def test_the_page_is_small_and_asks_nothing_of_anyone(finished_run):
    text = page(gather(finished_run))
    assert len(text.encode()) < 1_000_000
    addresses = set(re.findall(r"https?://[^\s\"'<]+", text))
    assert addresses == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"\b(src|href|srcset)=|url\(|@import", text)
    assert "default-src 'none'" in html.unescape(text)


def test_names_are_text_and_never_markup(finished_run):
    read = Outline(page(gather(finished_run)))
    assert "script" not in read.tags
    assert "net <script>alert(1)</script> on fashion-mnist" in read.text


def test_an_unfinished_run_shows_what_there_is(finished_run):
    for name in ("ptq", "qat"):
        (finished_run / name / "benchmark.json").unlink()
    read = Outline(page(gather(finished_run)))
    assert read.headings == ["Missing or changed", "Error by layer", "Coverage and gates", "Training", "Provenance"]
    assert "ptq: not there yet: benchmark (next: qtool benchmark" in read.text


@pytest.mark.parametrize("stage", ["train", "quantize", "export", "benchmark"])
def test_any_one_result_makes_a_report(finished_run, tmp_path, stage):
    place = finished_run if stage == "train" else finished_run / "ptq"
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / f"{stage}.json").write_text((place / f"{stage}.json").read_text())
    assert "Provenance" in Outline(page(gather(alone))).headings


def test_figures_that_were_not_measured_are_left_out(finished_run, result):
    for entry in result["variants"].values():
        entry |= {"accuracy": None, "peak_memory_mib": None}
        for timed in entry["latency"]:
            timed["speedup_ci95"] = None
            del timed["latency_quantiles_ms"]
    for name in ("ptq", "qat"):
        path = finished_run / name / "benchmark.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"metrics": result}))
    read = Outline(page(gather(finished_run)))
    assert "Latency" not in read.headings
    assert "Accuracy, time and size" not in read.headings
    assert "Verdict" in read.headings


def test_a_comparison_is_shown(finished_run):
    path = finished_run / "ptq" / "benchmark.json"
    value = json.loads(path.read_text())
    value["metrics"]["comparison"] = {
        "with": "old.json", "tolerance": 0.05, "notes": ["another CPU"],
        "regressions": [{"told": "int8: size 2, was 1"}],
    }  # fmt: skip
    path.write_text(json.dumps(value))
    read = Outline(page(gather(finished_run)))
    assert "Against an earlier benchmark" in read.headings
    assert "Compared with old.json: 1 figure is worse." in read.text
    for words in ("compared with old.json: 1 figure is worse", "int8: size 2, was 1", "another CPU"):
        assert words in read.text.replace("Compared", "compared")
        assert f"- {words}" in summary(gather(finished_run))


def test_names_are_no_markup_in_the_markdown_either(finished_run):
    path, name = finished_run / "ptq" / "benchmark.json", "int8 <img src=x>|*"
    value = json.loads(path.read_text())
    value["metrics"]["variants"][name] = value["metrics"]["variants"].pop("int8")
    path.write_text(json.dumps(value))
    told = summary(gather(finished_run))
    assert name not in told
    assert r"| int8 \<img src=x>\|\* |" in told


def test_writing_gives_three_files_and_nothing_else(finished_run, tmp_path):
    files = write_report(gather(finished_run))
    names = {"html": "report.html", "markdown": "report.md", "json": "report.json"}
    assert files == {kind: finished_run / name for kind, name in names.items()}
    assert files["html"].read_text().startswith("<!doctype html>")
    elsewhere = write_report(gather(finished_run), tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["report.html", "report.json", "report.md"]
    assert elsewhere["html"].read_bytes() == files["html"].read_bytes()


def test_the_same_run_gives_the_same_page(finished_run):
    assert page(gather(finished_run)) == page(gather(finished_run))


def test_markdown_has_the_verdicts_tables_and_what_is_missing(finished_run):
    text = summary(gather(finished_run))
    assert "### ptq" in text
    assert "### qat" in text
    assert text.count("int8 against fp32") == 2
    (finished_run / "qat" / "benchmark.json").unlink()
    assert "- qat: not there yet: benchmark" in summary(gather(finished_run))


def test_a_folder_that_cannot_be_written_is_refused(finished_run, tmp_path):
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(UsageError, match=r"expected a folder to write to; got '.*taken', which is a file"):
        write_report(gather(finished_run), tmp_path / "taken")
    assert (tmp_path / "taken").read_text() == "a file"


def test_a_folder_without_results_writes_nothing(tmp_path):
    with pytest.raises(QtoolError):
        write_report(gather(tmp_path))
    assert list(tmp_path.iterdir()) == []
