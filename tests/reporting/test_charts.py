from __future__ import annotations

import math
import xml.etree.ElementTree as ET

import pytest

from qtool.reporting.charts import Point, bars, curve, distributions, frontier, series_class, shape, thinned

SVG = "{http://www.w3.org/2000/svg}"
POINTS = [
    Point("fp32", 1.0, 0.90, 4.0),
    Point("fp16", 1.02, 0.90, 2.0, (0.99, 1.05), (0.898, 0.902)),
    Point("int8 ptq", 0.4, 0.897, 1.0, (0.39, 0.41), (0.89, 0.904)),
]


def parsed(picture):
    """The SVG as a tree: it has to be well formed, and everything in it within its box."""
    root = ET.fromstring(picture)
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    for node in root.iter():
        for key in ("x", "x1", "x2", "cx"):
            if key in node.attrib:
                assert -1 <= float(node.attrib[key]) <= width + 1
        for key in ("y", "y1", "y2", "cy"):
            if key in node.attrib:
                assert -1 <= float(node.attrib[key]) <= height + 1
    return root


def texts(root):
    return [node.text for node in root.iter(f"{SVG}text")]


def test_the_frontier_shows_every_variant_and_the_better_is_higher_and_further_left():
    root = parsed(frontier(POINTS, "top-1, %"))
    assert {"fp32", "fp16", "int8 ptq"} <= set(texts(root))
    circle = next(root.iter(f"{SVG}circle"))
    diamond = next(root.iter(f"{SVG}polygon"))
    x, y = (float(v) for v in diamond.attrib["points"].split()[0].split(","))
    assert x < float(circle.attrib["cx"])
    assert y > float(circle.attrib["cy"])


def test_a_marks_area_is_the_files_size():
    root = parsed(frontier([Point("fp32", 1, 0.9, 4.0), Point("fp32 b", 0.5, 0.8, 1.0)], "top-1"))
    large, small = sorted((float(c.attrib["r"]) for c in root.iter(f"{SVG}circle")), reverse=True)
    assert (large - 5) / (small - 5) == pytest.approx(2.0, rel=0.01)


def test_whiskers_are_drawn_where_there_are_intervals():
    root = parsed(frontier(POINTS, "top-1, %"))
    whiskers = [n for n in root.iter(f"{SVG}line") if "whisker" in n.attrib["class"]]
    assert len(whiskers) == 4


def test_the_front_leaves_out_what_another_beats():
    beaten = Point("int8 bad", 0.9, 0.895, 1.0)
    line = next(parsed(frontier([*POINTS, beaten], "top-1")).iter(f"{SVG}polyline")).attrib["points"]
    assert len(line.split()) == 3  # int8, a corner, fp32: neither the beaten one nor fp16, as accurate and slower


def test_where_less_is_better_the_line_goes_through_the_least_and_ticks_are_no_percentages():
    shown = [Point("fp32", 1.0, 4.0, 4.0), Point("int8", 0.4, 4.2, 1.0), Point("other", 0.8, 4.5, 1.0)]
    root = parsed(frontier(shown, "perplexity", as_percent=False, more_is_better=False))
    corners = next(root.iter(f"{SVG}polyline")).attrib["points"].split()
    assert len(corners) == 3  # int8, across, fp32: nothing goes through what both beat
    place = next(root.iter(f"{SVG}circle")).attrib
    assert corners[-1] == f"{float(place['cx']):.1f},{float(place['cy']):.1f}"
    assert "4.2" in {text.text for text in root.iter(f"{SVG}text")}
    assert any("4.20, 1.00 MiB" in title.text for title in root.iter(f"{SVG}title"))


def test_labels_of_equal_points_do_not_lie_on_each_other():
    root = parsed(frontier([Point("fp32", 1, 0.9, 1), Point("fp16", 1, 0.9, 1)], "top-1"))
    places = [(n.attrib["x"], n.attrib["y"]) for n in root.iter(f"{SVG}text") if n.attrib.get("class") == "name"]
    assert len(set(places)) == 2


def test_marks_differ_in_form_and_colour():
    made = {shape(name, 0, 0, 5).split(" ")[0] + series_class(name) for name in ("fp32", "fp16", "int8", "mine")}
    assert len(made) == 4


def test_distributions_put_the_percentiles_where_they_are():
    root = parsed(distributions({"fp32": list(range(101)), "int8": [v / 2 for v in range(101)]}))
    whisker = next(n for n in root.iter(f"{SVG}line") if "s-fp32" in n.attrib["class"])
    median = [n for n in root.iter(f"{SVG}line") if n.attrib["class"] == "median"]
    low, high = float(whisker.attrib["x1"]), float(whisker.attrib["x2"])
    per = (high - low) / 98
    assert float(median[0].attrib["x1"]) == pytest.approx(low + 49 * per, abs=0.05)
    assert float(median[1].attrib["x1"]) == pytest.approx(low + 24 * per, abs=0.05)


def test_equal_times_are_drawn_too():
    parsed(distributions({"fp32": [1.0] * 101}))


def test_bars_keep_the_order_cut_long_names_and_stop_at_thirty():
    values = [(f"a.very.long.name.of.a.layer.{i}", float(i)) for i in range(40)]
    root = parsed(bars(values, "SQNR, dB"))
    names = [n.text for n in root.iter(f"{SVG}text") if n.attrib.get("class") == "layer"]
    assert len(names) == 30
    assert names[7].startswith("…")
    assert names[7].endswith("of.a.layer.7")
    assert len(names[7]) == 24
    widths = [float(n.attrib["width"]) for n in root.iter(f"{SVG}rect")]
    assert widths == sorted(widths)


def test_bars_of_negative_values_stay_within():
    parsed(bars([("a", -3.0), ("b", 12.0)], "SQNR, dB"))
    parsed(bars([("a", -3.0)], "SQNR, dB"))


def test_the_curve_falls_where_the_loss_does():
    root = parsed(curve([3.0, 2.0, 1.0, math.nan, 0.5], {3: 0.8, 5: 0.9}, "top1"))
    line = next(root.iter(f"{SVG}polyline")).attrib["points"]
    heights = [float(p.split(",")[1]) for p in line.split()]
    assert heights == sorted(heights)
    assert len(heights) == 4
    assert "top1 90.0 %" in texts(root)
    assert "mse 3.20" in texts(parsed(curve([3.0], {1: 3.2}, "mse")))


@pytest.mark.parametrize("losses", [[1.0], [0.0, 0.0], [-1.0, -2.0]])
def test_curves_of_any_sign_and_length(losses):
    parsed(curve(losses, {}, ""))


def test_thinning_averages_neighbours_and_keeps_the_ends():
    points = thinned([float(i) for i in range(1000)], most=100)
    assert len(points) == 100
    assert points[0] == (5.5, 4.5)
    assert points[-1][1] == 994.5
    assert thinned([1.0, math.inf, 3.0]) == [(1.0, 1.0), (3.0, 3.0)]
