"""Blocks lie between single tensors, the fastest formats are those of trying all, kernels count with their block."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qtool.exporting.groups import Block, blocks, candidates, fastest, kernel_seconds, stem
from qtool.form import Plan, QuantizedModel, Unit


def test_a_gate_and_a_branch_stay_whole(gated: tuple[QuantizedModel, torch.Tensor]) -> None:
    found = blocks(gated[0].graph, gated[0].plan)
    # what leads to the residual sum is one block: the stem's output is read at both its ends
    assert [block.units[0] for block in found] == ["0", "2.body.0.0", "3", "4", "5"]
    assert found[1].units[-1] == "2.add"
    assert found[1].kinds.count("sigmoid") == 4
    assert [block.elements for block in found] == [8 * 100, 8 * 100, 8, 8, 4]
    units = [unit.name for unit in gated[0].plan.units]
    assert [name for block in found for name in block.units if name != "4"] == units  # a flatten is in no plan


@settings(max_examples=100, derandomize=True, database=None)
@given(st.lists(st.tuples(st.floats(0, 9), st.floats(0, 9), st.floats(0, 5)), min_size=1, max_size=7))
def test_the_fastest_formats_are_those_of_trying_all(rows: list[tuple[float, float, float]]) -> None:
    times, conversions = [row[:2] for row in rows], [row[2] for row in rows]

    def total(choice: tuple[bool, ...] | list[bool]) -> float:
        changes = (conversions[i] for i in range(len(rows) - 1) if choice[i] != choice[i + 1])
        return sum(pair[is_float] for pair, is_float in zip(times, choice, strict=True)) + sum(changes)

    least = min(map(total, itertools.product((False, True), repeat=len(rows))))
    assert total(fastest(times, conversions)) == pytest.approx(least)


def chain(*kinds: str) -> list[Block]:
    return [Block((f"{i}a", f"{i}b"), (kind, "mul"), 10) for i, kind in enumerate(kinds)]


def test_runs_and_patterns_are_candidates() -> None:
    found = chain("conv", "sigmoid", "conv", "sigmoid")
    times = [(5.0, 1.0), (3.0, 1.5), (1.0, 4.0), (3.0, 1.5)]
    groups = candidates(found, times, [0.1] * 4)
    named = {group.name: group for group in groups}
    assert named["0a … 1b"].units == ("0a", "0b", "1a", "1b")
    assert named["0a … 1b"].saves == pytest.approx(5.5 - 0.05)
    assert named["2 × sigmoid → mul"].units == ("1a", "1b", "3a", "3b")
    assert [group.saves for group in groups] == sorted((group.saves for group in groups), reverse=True)


def test_nothing_slow_gives_no_candidate() -> None:
    assert candidates(chain("conv", "sigmoid", "sigmoid"), [(1.0, 2.0)] * 3, [0.1] * 3) == []


def test_kernels_count_with_their_unit_or_module_and_strangers_with_the_one_before() -> None:
    plan = Plan("ort-cpu", (Unit("0", "conv", ("0", "0.bn")), Unit("act_2", "mul", ("act",)), Unit("1", "conv")))
    found = [Block(("0",), ("conv",), 1), Block(("act_2",), ("mul",), 1), Block(("1",), ("conv",), 1)]
    kernels = [("input/quantize", 1.0), ("0_token_2", 2.0), ("Transpose", 4.0), ("act/QuickGeluFusion/", 8.0),
               ("1_nchwc", 16.0), ("ReorderOutput", 32.0)]  # fmt: skip
    assert kernel_seconds(kernels, plan, found) == [7.0, 8.0, 48.0]
    assert stem("a.b_nhwc_token_17") == "a.b"
