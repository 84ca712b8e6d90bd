from __future__ import annotations

from pathlib import Path

from qtool.reporting import charts, sections
from qtool.reporting.gather import Run, gather


def test_tiles_say_gained_where_the_drop_is_negative(finished_run, result):
    tiles = {label: value for value, label in sections._headline(result["variants"]["int8"])}
    assert tiles == {
        "smaller": "4.00×", "the speed, batch 1": "2.50×", "agreement": "98.5 %", "points of top-1 lost": "0.30"
    }  # fmt: skip
    result["variants"]["int8"]["accuracy"]["top1_drop"] = -0.002
    assert ("0.20", "points of top-1 gained") in sections._headline(result["variants"]["int8"])
    told = {"metric": "mae", "metrics": {"mae": 0.25}, "metrics_reference": {"mae": 0.24}}
    result["variants"]["int8"] |= {"size_ratio": 1.25, "accuracy": {"sqnr_db": 30.0} | told}
    assert sections._headline(result["variants"]["int8"])[::2] == [("1.25×", "larger"), ("0.250", "mae, 0.240 before")]


def test_the_title_is_model_and_data_or_else_the_folder(finished_run, tmp_path):
    assert sections.title_of(gather(finished_run)).endswith("on fashion-mnist")
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "benchmark.json").write_text((finished_run / "ptq" / "benchmark.json").read_text())
    assert sections.title_of(gather(alone)) == "alone"


def test_the_worst_layers_come_first(finished_run):
    text = "".join(sections.layers(gather(finished_run / "ptq")))
    assert text.index("blocks.5.conv") < text.index("blocks.0.conv")


def test_epochs_are_marked_where_they_ended():
    """Of a training that was cut short, the last one is shorter; a loss that is none keeps its place."""
    epochs = [{"validation_top1": 0.5}, {"validation_top1": 0.75}]
    history = {"losses": [1.0, None, *[1.0] * 8], "epochs": epochs, "ends": [8, 10]}
    (page,) = sections.trainings(Run("run", Path("run"), {"train": {"history": history}}))
    assert charts.curve(history["losses"], {8: 0.5, 10: 0.75}, "top1") in str(page)


def test_the_marks_of_a_training_are_of_the_metric_that_decides():
    epochs = [{"loss": 1.0, "validation_loss": 0.9, "validation_area": 4.0, "validation_hinge_loss": 0.25}]
    result = {"metric": "hinge_loss", "history": {"losses": [1.0, 0.5], "epochs": epochs, "ends": [2]}}
    page = "".join(sections.trainings(Run("run", Path("run"), {"train": result})))
    assert "hinge_loss 0.250" in page
    assert "area" not in page
    result["metric"] = "gone"
    assert "marks" not in "".join(sections.trainings(Run("run", Path("run"), {"train": result})))


def test_the_qat_of_each_variant_has_a_curve_too():
    history = {"losses": [1.0, 0.5], "epochs": [{"validation_top1": 0.5}], "ends": [2], "skipped_steps": 3}
    made = {"metric": "top1", "history": history, "metrics": {"num_integer_units": 9}}
    run = Run(
        "run", Path("run"), {"train": {"history": history}}, variants=[Run("qat", Path("qat"), {"quantize": made})]
    )
    first, title, second = map(str, sections.trainings(run))
    assert title == "<h3>qat: QAT</h3>"
    assert charts.curve([1.0, 0.5], {2: 0.5}, "top1") in second
    assert "skipped steps" in second
    assert "integer units" not in first + second
