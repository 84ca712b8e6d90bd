from __future__ import annotations

import io

import pytest
from rich.console import Console

from qtool.reporting.tables import markdown, rows, terminal


def table(result):
    return {row.label: dict(zip(result["variants"], row.cells, strict=True)) for row in rows(result)}


def test_rows_hold_the_figures_with_their_units(result):
    told = table(result)
    assert told["size on disk, MiB"] == {"fp32": "4.00", "fp16": "2.00", "int8": "1.00"}
    assert told["without metadata, MiB"]["int8"] == "0.900"
    assert told["smaller by"] == {"fp32": "–", "fp16": "2.00×", "int8": "4.00×"}
    assert told["batch 1: latency p50, ms"]["int8"] == "1.60"
    assert told["batch 8: p90 / p99, ms"]["fp32"] == "35.2 / 48.0"
    assert told["batch 1: speed-up"] == {"fp32": "–", "fp16": "1.00×", "int8": "2.50×"}
    assert told["batch 1: 95 % CI"] == {"fp32": "–", "fp16": "0.98 to 1.02", "int8": "2.45 to 2.55"}
    assert told["top-1"]["fp32"] == "90.0 %"
    assert told["top-1 drop, points"]["int8"] == "0.30"
    assert told["drop, 95 % CI"]["int8"] == "−0.40 to 1.00"
    assert told["multiplying operations"]["int8"] == "3 int8"


def test_the_reference_is_not_compared_with_itself(result):
    told = table(result)
    assert told["agreement with fp32"]["fp32"] == told["KL divergence, nats"]["fp32"] == "–"


def test_what_nobody_measured_has_no_row(result):
    for entry in result["variants"].values():
        entry["peak_memory_mib"] = None
        del entry["accuracy"]
    told = table(result)
    assert "peak memory, MiB" not in told
    assert "top-1" not in told
    assert "load time, ms" in told


def test_a_task_s_own_metrics_have_rows_what_decides_first(result):
    values = {"fp32": 4.0, "fp16": 4.01, "int8": 4.2}
    for name, value in values.items():
        metrics = {"loss": 1.4, "top1": 0.5, "recall": 0.25, "perplexity": value}
        told = {"metric": "perplexity", "higher_is_better": False, "metrics_reference": {"perplexity": 4.0}}
        result["variants"][name]["accuracy"] |= told | {"metrics": metrics}
    labels = list(table(result))
    assert table(result)["perplexity"] == {"fp32": "4.00", "fp16": "4.01", "int8": "4.20"}
    assert labels.index("recall") == labels.index("perplexity") + 1 == labels.index("top-1") - 1
    assert not {"loss", "top1"} & set(labels)
    assert "perplexity 4.20 against 4.00 on" in markdown(result)
    result["variants"]["int8"]["accuracy"]["metric_change_ci95"] = [0.1, 0.3]
    assert table(result)["perplexity change, 95 % CI"] == {"fp32": "–", "fp16": "–", "int8": "+0.100 to +0.300"}
    assert "recall change, 95 % CI" not in table(result)
    assert "perplexity 4.20 against 4.00 (95 % CI of the change +0.100 to +0.300) on" in markdown(result)


@pytest.mark.parametrize("metrics", [{"loss": 0.5}, {"loss": 0.5, "mae": 0.25}])
def test_a_loss_that_decides_has_the_row(result, metrics):
    for entry in result["variants"].values():
        entry["accuracy"] = {"num_samples": 9, "metric": "loss", "metrics": metrics}
    assert table(result)["loss"]["int8"] == "0.500"


def test_an_unsettled_ratio_is_marked_and_explained(result):
    assert table(result)["batch 8: 95 % CI"]["int8"].endswith(" *")
    assert "wider than was asked" in markdown(result)
    result["variants"]["int8"]["latency"][1]["converged"] = True
    assert "wider than was asked" not in markdown(result)


def test_markdown_is_one_table_under_the_verdicts(result):
    lines = markdown(result).splitlines()
    assert lines[1].startswith("int8 against fp32")
    grid = [line for line in lines if line.startswith("|")]
    assert {line.count("|") for line in grid} == {5}
    assert len(grid) == len(rows(result)) + 2
    assert lines[-1] == "- noisy machine: a neighbour was loud"


def test_what_became_of_a_comparison_is_told_below_the_table(result):
    notes = ["int8x was measured then and not now"]
    result["comparison"] = {"with": "old.json", "regressions": [], "notes": notes}
    stream = io.StringIO()
    Console(file=stream, width=120).print(terminal(result))
    for text in (stream.getvalue(), markdown(result)):
        assert "compared with old.json: nothing is worse" in text
        assert notes[0] in text


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_terminal_shows_the_same_within_its_width(result, width):
    stream = io.StringIO()
    Console(file=stream, width=width).print(terminal(result))
    text = stream.getvalue()
    assert max(map(len, text.splitlines())) <= width
    for words in ("2.50×", "3 int8", "noisy machine"):
        assert words in text
    assert width < 80 or all(f"{row.label} " in text for row in rows(result)), "no row is wrapped"
