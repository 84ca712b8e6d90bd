"""What operators take for themselves, against what they take when the caller counts."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from qtool.memory import scratch
from qtool.memory.measure import allocations
from qtool.memory.scratch import Scratch

MM = torch.ops.aten.mm.default


def test_a_fake_call_takes_what_a_real_one_takes() -> None:
    a, b = torch.randn(512, 512).bfloat16().t(), torch.randn(512, 128).bfloat16()
    changes, _ = allocations(lambda: MM(a, b))
    with FakeTensorMode() as mode:
        found = Scratch().of(MM, (mode.from_tensor(a), mode.from_tensor(b)), None)
    assert found == sum(change for change in changes[1:] if change > 0)
    assert changes[0] == 512 * 128 * 2  # the result itself


def test_other_operators_and_large_ones_are_not_called(monkeypatch) -> None:
    taken = Scratch()
    x = torch.ones(4, 4)
    assert taken.of(torch.ops.aten.add.Tensor, (x, x), None) == 0
    assert taken.known == {}
    monkeypatch.setattr(scratch, "LARGEST", 100)
    assert taken.of(MM, (x, x), None) == 0
    assert taken.known == {}


def test_each_kind_of_call_is_made_once() -> None:
    taken = Scratch()
    for _ in range(3):
        taken.of(MM, (torch.ones(4, 8), torch.ones(8, 4)), None)
    taken.of(MM, (torch.ones(4, 8), torch.ones(4, 8).t()), None)
    assert len(taken.known) == 2
