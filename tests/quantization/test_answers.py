"""Questions that ask others: each is answered once, and what stands on an assumption is not kept."""

from __future__ import annotations

from functools import partial
from typing import Any

import nets_modern
import pytest
import torch

import qtool
from qtool.quantization.answers import Answers
from qtool.quantization.placement import Placement


def test_each_is_answered_once_until_one_is_asked_anew() -> None:
    answers, asked = Answers(), list[int]()

    def find(number: int) -> bool:
        asked.append(number)
        return number < 2 or sum(answers.ask(number - k, "", partial(find, number - k)) for k in (1, 2)) == 2

    assert answers.ask(40, "", partial(find, 40))
    assert sorted(asked) == list(range(41))
    assert answers.ask(40, "", partial(find, 40))
    assert len(asked) == 82


def test_what_stands_on_an_assumption_is_not_kept() -> None:
    """``b`` is yes while ``a`` is taken for yes; once that turned out to be no, it is no."""
    answers, told = Answers(), list[bool]()

    def a() -> bool:
        answers.ask("b", "", b)
        return False

    def b() -> bool:
        return answers.ask("a", "", a)

    def both() -> bool:
        told.extend((answers.ask("a", "", a), answers.ask("b", "", b)))
        return True

    answers.ask("both", "", both)
    assert told == [False, False]


def test_joins_of_joins_are_placed_in_few_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten layers of a DenseNet took 20,000 questions, and each further one twice as many."""
    asked: list[object] = []
    could_be = Placement._could_be

    def counted(self: Placement, node: torch.fx.Node, wanted: Any) -> bool:
        asked.append(node)
        return could_be(self, node, wanted)

    monkeypatch.setattr(Placement, "_could_be", counted)
    torch.manual_seed(0)
    model = nets_modern.densenet121(blocks=(10,), growth=8, width=16).eval()
    quantized = qtool.quantize(model, [torch.randn(2, 3, 32, 32)], target="openvino", effort="fast")
    assert 0 < len(asked) < 4000
    assert sum(unit.kind == "conv" and unit.integer for unit in quantized.plan.units) > 20
