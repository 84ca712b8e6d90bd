"""8-bit updates of parameters that lie side by side, against the same one by one."""

import bitsandbytes.optim
import pytest
import torch
from torch import nn

from qtool.steps import trees
from qtool.training.batched import batched
from qtool.training.blockwise import on_cpu
from qtool.training.rounding import WideUpdates

SHAPES = [(64, 128), (10,), (4096,), (80, 60), (65, 64), (64, 64), (130, 64)]
"""8-bit but the second; the fourth is 18¾ blocks and the fifth 16¼, so that nothing may be joined to them."""
RUNS = [[(64, 128), (4096,), (80, 60)], [(65, 64)], [(64, 64), (130, 64)]]


def optimizer_of(name, shapes=SHAPES, rounding="compensated"):
    torch.manual_seed(0)
    kind = batched(on_cpu(getattr(bitsandbytes.optim, name)))
    parameters = [nn.Parameter(torch.randn(shape).bfloat16()) for shape in shapes]

    def make(wide):
        return kind(wide, lr=0.01, weight_decay=0.1)

    made = WideUpdates(parameters, make, rounding)
    made.most = 10**9
    made.param_groups[0]["lr"] = 0.01
    return made, parameters


def step(optimizer, parameters, seed):
    torch.manual_seed(seed)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape).bfloat16()
    optimizer.step()


def runs_of(optimizer, monkeypatch):
    found = []
    update = type(optimizer.inner)._update_run

    def watched(self, group, run, place, index):
        found.append([tuple(p.shape) for p in run])
        update(self, group, run, place, index)

    monkeypatch.setattr(type(optimizer.inner), "_update_run", watched)
    return found


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["AdamW8bit", "Lion8bit"])
def test_side_by_side_or_one_by_one_is_the_same(name, monkeypatch):
    together, ours = optimizer_of(name)
    alone, theirs = optimizer_of(name)
    monkeypatch.setattr(alone.inner, "_runs", lambda large: ((i, [p]) for i, p in large))
    found = runs_of(together, monkeypatch)
    for seed in range(3):
        del found[:]
        step(together, ours, seed)
        if name == "AdamW8bit":  # Lion's small states are no kernel's of torch, and come alone
            assert found == RUNS
        step(alone, theirs, seed)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    for a, b in zip(together.inner.state.values(), alone.inner.state.values(), strict=True):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[key], b[key]) if torch.is_tensor(a[key]) else a[key] == b[key] for key in a)
    assert len(together.inner.state) == len(SHAPES), "what stood for several is gone"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_loaded_states_lie_side_by_side_again(tmp_path, monkeypatch):
    first, ours = optimizer_of("AdamW8bit")
    step(first, ours, 1)
    trees.save_tree(tmp_path / "x.safetensors", first.state_dict())
    second, theirs = optimizer_of("AdamW8bit")
    second.load_state_dict(trees.load_tree(tmp_path / "x.safetensors"))
    for parameter, value in zip(theirs, ours, strict=True):
        parameter.data.copy_(value)
    found = runs_of(second, monkeypatch)
    step(second, theirs, 2)
    assert found == RUNS
    step(first, ours, 2)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_parameters_at_another_step_are_updated_apart(monkeypatch):
    optimizer, parameters = optimizer_of("AdamW8bit", [(64, 64)] * 3)
    step(optimizer, parameters[:2], 0)
    parameters[1].grad = None
    found = runs_of(optimizer, monkeypatch)
    step(optimizer, [parameters[0], parameters[2]], 1)
    step(optimizer, parameters, 2)
    wide = list(optimizer.inner.state.values())
    assert [state["step"] for state in wide] == [3, 2, 2]
    assert [len(run) for run in found] == [1, 1, 1, 2]
