"""Merged groups give the same integers, by the runtime and by both references."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx.reference import ReferenceEvaluator
from qdq_files import Builder, needs_x86, rewritten_by, run

from qtool.exporting.passes import wide_groups
from qtool.exporting.reference.integer_reference import IntegerReference

applied = functools.partial(rewritten_by, wide_groups.apply)


def grouped(
    groups: int = 6, width: int = 4, outputs: int = 4, *, kernel: int = 3, stride: int = 1, integer: bool = True,
    rest: int = 4096,
) -> onnx.ModelProto:  # fmt: skip
    """A convolution of ``groups`` groups, each of ``width`` channels and ``outputs`` outputs, and a larger one."""
    b = Builder()
    x = b.input("x", ["n", groups * width, 7, 6])
    y = b.pair(x, 0.03, 110) if integer else x
    weight = b.weight(groups * outputs, width, kernel, kernel)
    attributes: dict[str, Any] = {"group": groups, "pads": [kernel // 2] * 4, "strides": [stride] * 2}
    y = b.pair(b.op("Conv", y, weight, b.bias(0.03), **attributes), 0.2, 121)
    other = b.op("Conv", b.pair(x, 0.03, 110), b.weight(rest, groups * width, 1, 1), b.bias(0.03))
    return b.model(y, b.pair(other, 0.2, 120))


def groups_of(model: onnx.ModelProto) -> int:
    return next(a.i for node in model.graph.node for a in node.attribute if a.name == "group")


@needs_x86
@settings(max_examples=8, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(
    groups=st.sampled_from([2, 5, 6, 8, 26]), width=st.integers(2, 9), outputs=st.integers(1, 9),
    kernel=st.sampled_from([1, 3]), stride=st.integers(1, 2), batch=st.integers(1, 2),
)  # fmt: skip
def test_the_integers_are_the_same(
    groups: int, width: int, outputs: int, kernel: int, stride: int, batch: int, tmp_path: Path
) -> None:
    model = grouped(groups, width, outputs, kernel=kernel, stride=stride, rest=32768)
    changed, rewritten = applied(model)
    onnx.checker.check_model(rewritten, full_check=True)
    merged = groups / groups_of(rewritten)
    assert (changed == 1) is (merged > 1)
    best = min((m for m in range(1, groups + 1) if groups % m == 0), key=lambda m: _off(m * max(width, outputs)))
    assert merged == best
    x = {"x": np.random.default_rng(batch).normal(size=(batch, groups * width, 7, 6)).astype(np.float32)}
    by_reference = [ReferenceEvaluator(m).run(None, x) for m in (model, rewritten)]
    by_integers = [IntegerReference(m).run(x) for m in (model, rewritten)]
    by_runtime = [run(m, x, tmp_path)[0] for m in (model, rewritten)]
    for before, after in (by_reference, by_integers, by_runtime):
        np.testing.assert_array_equal(after[0], before[0])


def _off(width: int) -> float:
    return max(math.log2(width / 32), math.log2(32 / width))


@pytest.mark.parametrize(
    "changes",
    [{"groups": 1}, {"width": 1, "outputs": 1}, {"width": 32}, {"integer": False}, {"rest": 8}],
    ids=["one group", "depthwise", "wide ones", "in float", "a file that would grow"],
)
def test_others_stay(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide_groups, "FEW", 0)
    model = grouped(**changes)
    changed, rewritten = applied(model)
    assert changed == 0
    assert {t.name: t for t in rewritten.graph.initializer} == {t.name: t for t in model.graph.initializer}


@pytest.mark.parametrize(("rest", "groups"), [(12000, 1), (4096, 2), (2000, 3), (1000, 6)])
def test_where_little_may_be_added_fewer_are_merged(rest: int, groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide_groups, "FEW", 0)
    model = grouped(rest=rest)
    rewritten = applied(model)[1]
    assert groups_of(rewritten) == groups
    before, after = (sum(np.prod(t.dims) for t in m.graph.initializer) for m in (model, rewritten))
    assert after <= (1 + wide_groups.MOST_GROWTH) * before


@pytest.mark.parametrize(("outputs", "groups"), [(1, 1), (4, 2), (12, 6)])
def test_a_small_file_may_grow_by_two_kilobytes(outputs: int, groups: int) -> None:
    model = grouped(outputs=outputs, rest=8)
    rewritten = applied(model)[1]
    assert groups_of(rewritten) == groups
    before, after = (sum(np.prod(t.dims) for t in m.graph.initializer) for m in (model, rewritten))
    assert after - before <= 2048


def test_the_budget_goes_to_what_saves_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers of narrow groups share what wide ones, which come first, would take to no avail."""
    monkeypatch.setattr(wide_groups, "FEW", 0)
    b = Builder()
    y = b.pair(b.input("x", ["n", 64, 20, 20]), 0.03, 110)
    for groups in (4, 32, 32):
        made = b.op("Conv", y, b.weight(64, 64 // groups, 3, 3), b.bias(0.03), group=groups, pads=[1] * 4)
        y = b.pair(made, 0.03, 121)
    other = b.op("Conv", y, b.weight(6500, 64, 1, 1), b.bias(0.03))
    rewritten = applied(b.model(b.pair(other, 0.2, 120)))[1]
    found = [a.i for node in rewritten.graph.node for a in node.attribute if a.name == "group"]
    assert found == [4, 8, 8]
