"""Fused updates by Triton's interpreter, which runs the kernel on the CPU.

``test_fused_updates.py`` has pytest run this in a process of its own: Triton asks how to work as it is imported.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from bitsandbytes.functional import create_dynamic_map
from torch import nn

from qtool.steps import trees
from qtool.training import fused_updates, pieces, rounding

CPU = torch.device("cpu")
BETAS, EPS, STEP, RATE, DECAY = (0.9, 0.99), 1e-8, 3, 1e-2, 0.1


@pytest.fixture(autouse=True)
def fused(monkeypatch):
    """Few programs: the interpreter takes as long for one as for another. What one computes, none of them tells."""
    monkeypatch.setattr(fused_updates, "usable", lambda inner, parameters: hasattr(inner, "make_state"))
    monkeypatch.setattr(fused_updates, "ROWS", 64)


def books():
    return [create_dynamic_map(signed=signed).numpy() for signed in (True, False)]


def nearest(relative, book):
    """By the distance to each of the 256 values; a positive second moment gets a positive one."""
    codes = np.abs(relative[:, None].astype(np.float64) - book[None].astype(np.float64)).argmin(1)
    return np.where((relative > 0) & (book[0] == 0), np.maximum(codes, 1), codes)


def states(count, seed=0):
    draw = np.random.default_rng(seed)
    codes = [draw.integers(0, 256, count, dtype=np.uint8) for _ in range(2)]
    scales = [draw.random(-(-count // 256), np.float32) * 0.1 + 0.01 for _ in range(2)]
    return codes, scales


def moved(tensors):
    return [torch.from_numpy(t.copy()) for t in tensors]


@pytest.mark.parametrize("shape", [(4096,), (5, 37 * 27)], ids=["16 blocks", "19 and a part of one"])
def test_a_step_is_the_formula_s(shape, monkeypatch):
    monkeypatch.setattr(fused_updates, "ROWS", 4)
    count = int(np.prod(shape))
    codes, scales = states(count)
    draw = torch.Generator().manual_seed(0)
    weight, grad = (torch.randn(shape, generator=draw).bfloat16() for _ in range(2))
    w, g = (t.double().flatten().numpy() for t in (weight, grad))
    m, v = (b[c].astype(np.float64) * s.repeat(256)[:count] for b, c, s in zip(books(), codes, scales, strict=True))
    m, v = BETAS[0] * m + (1 - BETAS[0]) * g, BETAS[1] * v + (1 - BETAS[1]) * g * g
    root = np.sqrt(v / (1 - BETAS[1] ** STEP)) + EPS
    expected = w * (1 - RATE * DECAY) - RATE * m / (1 - BETAS[0] ** STEP) / root
    ours, new = [t.view(shape) for t in moved(codes)], moved(scales)
    fused_updates.update(weight, grad, ours, new, [], None, *BETAS, EPS, STEP, RATE, DECAY)
    wanted = torch.from_numpy(expected).float().bfloat16()
    assert (weight.flatten() != wanted).sum() <= 1, "which may lie at a half"
    for moment, c, s, book in zip((m, v), ours, new, books(), strict=True):
        largest = np.maximum.reduceat(np.abs(moment), np.arange(0, count, 256))
        np.testing.assert_allclose(s.numpy(), largest, rtol=1e-6)
        found = nearest(moment / largest.repeat(256)[:count], book)
        assert (c.flatten().numpy() != found).sum() <= 2
        assert np.abs(c.flatten().numpy().astype(int) - found).max() <= 1


def test_every_relative_moment_has_the_nearest_code():
    draw = np.random.default_rng(0)
    for signed in (True, False):
        book = create_dynamic_map(signed=signed)
        midpoints, lowest = fused_updates.cells(book)
        x = np.concatenate([10 ** -(9 * draw.random(20_000)), book.numpy()[book.numpy() > 0], [0.0]]).astype(np.float32)
        x = np.concatenate([x, -x]) if signed else x
        low = lowest.numpy()[x.view(np.uint32) >> 16].astype(int)
        assert np.array_equal(low + (x > midpoints.numpy()[low]), nearest(x, book.numpy()))


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
def test_what_is_not_finite_or_nothing():
    """As bitsandbytes' CUDA kernel has it for gradients; a block of zeros stays one, a NaN too, of whatever bits."""
    for seed in (None, 5):
        codes, scales = (moved(part) for part in states(4096))
        weight, grad = torch.randn(4096).bfloat16(), torch.randn(4096).bfloat16()
        grad[0], grad[1], weight[2], weight[3] = float("nan"), float("inf"), float("nan"), -float("inf")
        scales[0].view(torch.int32)[2] = 0x7FFF_FFFF  # as a GPU's arithmetic makes it: with all bits set
        codes[0][256:512], codes[1][256:512], grad[256:512] = 127, 0, 0
        before = weight.clone()
        fused_updates.update(weight, grad, codes, scales, [], seed, *BETAS, EPS, STEP, RATE, 0.0)
        assert torch.equal(weight[:2], before[:2])
        assert weight[2].isnan()
        assert weight[3] == -float("inf")
        assert codes[0][:2].tolist() == [127, 127]
        assert codes[1][:2].tolist() == [0, 0]
        assert scales[0][1] == scales[1][1] == 0
        assert torch.equal(weight[256:512], before[256:512])
        assert weight[512:768].isnan().all()
        assert weight[4:512].isfinite().all()
        assert weight[768:].isfinite().all()


def test_halves_are_rounded_to_even():
    value = torch.arange(1, 4097).bfloat16()  # times 1.5 many are halfway between two
    found = rounded(value, -0.5, draw=lambda: None)
    assert torch.equal(found, (value.float() * 1.5).bfloat16())


def drawn():
    return int(torch.randint(2**31, ()))


def rounded(value, away, draw=drawn):
    """``value`` · (1 - away), an update of decay alone; to nearest if nothing is to be drawn."""
    codes = [torch.full(value.shape, code, dtype=torch.uint8) for code in (127, 0)]
    scales = [torch.zeros(-(-len(value) // 256)) for _ in range(2)]
    out = value.bfloat16().clone()
    fused_updates.update(out, torch.zeros_like(out), codes, scales, [], draw(), *BETAS, EPS, STEP, 1.0, away)
    return out


def test_rounding_is_to_a_neighbour_right_on_average_and_independent():
    torch.manual_seed(0)
    count, away = 8 * 4096, 2.0**-10  # from 1 a quarter of the way down to the next, 1 - 2⁻⁸
    first, second = rounded(torch.ones(count), away), rounded(torch.ones(count), away)
    assert sorted(set(first.tolist())) == [1 - 2**-8, 1.0]
    down = (first < 1).double()
    for lag in (1, 2, 3, 4, 5, 6, 7, 8, 256, 1024, fused_updates.ROWS * 256):
        both = (down[lag:] * down[:-lag]).mean()
        assert abs(both - 1 / 16) < 5 * (1 / 16 / count) ** 0.5, "neighbours, threads and programs draw for themselves"
    assert abs(down.mean() - 0.25) < 5 * (3 / 16 / count) ** 0.5
    assert 0.3 < (first != second).double().mean() < 0.45
    values = torch.tensor([3.0, -1.5, 2e-30, -1e30, 3e-38, 0.0]).bfloat16().float()
    draws = rounded(values.repeat_interleave(4096), 2.0**-9).view(len(values), -1).double()
    exact = (values * (1 - 2**-9)).double()[:, None]
    step = exact.abs() * 2**-7 + 2.0**-133
    assert ((draws - exact).abs() <= step).all()
    assert ((draws - exact).mean(1).abs() <= 5 * step[:, 0] / 4096**0.5).all()
    assert torch.equal(rounded(values, 0.0), values.bfloat16()), "what bfloat16 holds exactly stays"


def test_a_seed_draws_the_same_whatever_a_program_takes(monkeypatch):
    found = []
    for seed, rows in ((1, 4), (1, 64), (2, 64)):
        monkeypatch.setattr(fused_updates, "ROWS", rows)
        found.append(rounded(torch.ones(4096), 2.0**-9, lambda seed=seed: seed))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_both_ways_agree():
    rng = torch.get_rng_state()
    assert fused_updates.refusal(CPU) is None
    assert torch.equal(torch.get_rng_state(), rng)


WRONG = {
    "a book": "scales of moment 1 differ",
    "midpoints": "codes of moment 1 differ",
    "no random bits": "weights are not rounded stochastically",
    "no compensation": "what rounding takes away is not kept",
    "no decay": "weights differ",
    "no compiler": "RuntimeError: Failed to find C compiler.",
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_found(wrong, monkeypatch):
    found = [table.clone() for table in fused_updates._tables(CPU)]
    if wrong == "a book":
        found[0] *= 1.05
    elif wrong == "midpoints":
        found[1] = found[1].roll(1, 1)
    monkeypatch.setattr(fused_updates, "_tables", lambda device: found)
    update = fused_updates.update

    def changed(weight, grad, codes, scales, kept, seed, *numbers):
        if wrong == "no compiler":
            raise RuntimeError("Failed to find C compiler.\nPlease")
        if wrong == "no compensation":
            kept = []
        if wrong == "no decay":
            numbers = (*numbers[:-1], 0.0)
        update(weight, grad, codes, scales, kept, None if wrong == "no random bits" else seed, *numbers)

    monkeypatch.setattr(fused_updates, "update", changed)
    fused_updates.refusal.cache_clear()
    assert fused_updates.refusal(CPU).startswith(WRONG[wrong])
    fused_updates.refusal.cache_clear()


OPTIONS = {"precision": "bf16-true", "optimizer": "adamw8bit"}


def test_a_training_is_nearly_the_same_as_with_widened_weights(run_steps, monkeypatch):
    """Compensated: what is drawn for rounding would change what dropout draws."""
    original, options = rounding._narrow, OPTIONS | {"rounding": "compensated"}

    def no_copies(chunk):
        assert all(p.numel() < 4096 for p in chunk)
        return original(chunk)

    monkeypatch.setattr(rounding, "_narrow", no_copies)
    fused = run_steps("transformer", 3, **options)
    monkeypatch.undo()
    wide = run_steps("transformer", 3, **options)
    assert not wide.step.optimizer.fused
    for a, b in zip(fused.model.parameters(), wide.model.parameters(), strict=True):
        assert ((a - b).abs() <= 2**-7 * b.abs() + 2e-3).float().mean() > 0.99
    ours, theirs = (run.step.optimizer.state_dict() for run in (fused, wide))
    assert ours["state"].keys() == theirs["state"].keys()
    for a, b in zip(ours["inner"]["state"].values(), theirs["inner"]["state"].values(), strict=True):
        assert a.keys() == b.keys()
        assert a["step"] == b["step"] == 3


def resumed(first, second, run_steps, path, name, monkeypatch):
    """A step, a checkpoint, and another step: fused or not."""

    def run(count, fused):
        monkeypatch.setattr(fused_updates, "usable", lambda inner, parameters: fused)
        return run_steps("transformer", count, rounding=name, **OPTIONS)

    half = run(1, first)
    rng = torch.get_rng_state()
    trees.save_tree(path, {"m": half.model.state_dict(), "o": half.step.optimizer.state_dict(), "r": rng})
    again, state = run(0, second), trees.load_tree(path)
    again.model.load_state_dict(state["m"])
    again.step.optimizer.load_state_dict(state["o"])
    torch.set_rng_state(state["r"])
    again.step(torch.randn(16, 16), torch.randint(0, 4, (16,)), 0.01)
    return again.model, run(2, second).model


@pytest.mark.parametrize("name", ["stochastic", "compensated"])
def test_it_resumes_bit_for_bit(name, run_steps, same_state, tmp_path, monkeypatch):
    assert same_state(*resumed(True, True, run_steps, tmp_path / "x.safetensors", name, monkeypatch))


@pytest.mark.parametrize("first", [False, True])
def test_a_checkpoint_of_either_way_goes_on_with_the_other(first, run_steps, tmp_path, monkeypatch):
    pair = resumed(first, not first, run_steps, tmp_path / "x.safetensors", "compensated", monkeypatch)
    for a, b in zip(*(model.parameters() for model in pair), strict=True):
        assert ((a - b).abs() <= 2**-7 * b.abs() + 4e-3).float().mean() > 0.98


def test_steps_in_backward_wait_for_small_gradients_alone(run_steps, same_state, monkeypatch):
    monkeypatch.setitem(pieces.PIECE, "cpu", 10**9)
    monkeypatch.setattr(pieces, "SHARE", 1)
    most, small = 0, 0

    def watch(made):
        def count(parameter):
            nonlocal most, small
            there = [p.numel() for p in made.model.parameters() if p.grad is not None]
            most = max(most, sum(n >= 4096 for n in there))
            small = max(small, sum(n < 4096 for n in there))

        for parameter in made.model.parameters():
            parameter.register_post_accumulate_grad_hook(count)

    options = OPTIONS | {"rounding": "compensated"}
    plain = run_steps("transformer", 2, **options)
    early = run_steps("transformer", 2, watch, step_in_backward=True, **options)
    assert same_state(early.model, plain.model)
    assert most == 1
    assert small > 1
    steps = {state["step"] for state in early.step.optimizer.inner.state.values()}
    assert steps == {2}, "no parameter is forgotten or updated twice"


def test_a_weight_that_lies_otherwise_is_widened(run_steps):
    weight = nn.Parameter(torch.randn(64, 64, 3, 3).bfloat16().contiguous(memory_format=torch.channels_last))
    state = {"state1": torch.zeros(1, dtype=torch.uint8), "state2": None}
    assert not fused_updates.fits(weight, state)
    assert fused_updates.fits(nn.Parameter(weight.detach().contiguous()), state)
    assert not fused_updates.fits(nn.Parameter(weight.detach().contiguous().half()), state)
    assert not fused_updates.fits(nn.Parameter(weight.detach().contiguous()), {"state1": torch.zeros(1)})
