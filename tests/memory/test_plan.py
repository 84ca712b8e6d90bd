"""Plans: the fastest that fits, the smallest where none does, nothing changed that was set; batches by themselves."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from qtool.errors import UsageError
from qtool.memory.plan import ALIKE, choose, flags, largest_batch, plans
from qtool.recipe import TrainConfig
from qtool.training import rules

PLAIN = TrainConfig(device="cpu", batch_size=64)


def legal(config: TrainConfig) -> bool:
    return not any(rule.broken(config) for rule in rules.RULES)


def peak(config: TrainConfig) -> int:
    """A model of memory: 100 of weights, and activations that techniques divide."""
    width = 0.5 if config.precision == "bf16-true" else 1.0
    states = 25 if config.optimizer == "adamw8bit" else 200
    gradients = 0 if config.step_in_backward else 100
    activations = 1000 / config.micro_batches / (4 if config.activation_checkpointing else 1)
    return int(width * (100 + gradients) + states + activations * (1 if config.precision == "32-true" else 0.5))


def seconds(config: TrainConfig) -> float:
    """A model of time: each pass costs a little, and checkpointing a third."""
    return (8 + config.micro_batches) * (1.33 if config.activation_checkpointing else 1)


@pytest.mark.parametrize("budget", [1400, 1300, 900, 700, 560, 400, 200, 60])
def test_the_fastest_plan_that_fits_is_chosen(budget: int) -> None:
    """Against every legal plan, one by one; with half its micro-batches it does not fit."""
    every = [(time, peak(config)) for time, _, _, config in plans(PLAIN, [], legal, seconds)]
    asked: list[int] = []
    found, smallest = choose(
        PLAIN, budget, lambda c: asked.append(1) or peak(c), pinned=[], legal=legal, seconds=seconds  # type: ignore[func-returns-value]
    )  # fmt: skip
    fitting = [time for time, size in every if size <= budget]
    assert (found is not None) == bool(fitting)
    if found is None:
        assert smallest.peak_bytes == min(size for _, size in every)
    else:
        assert found.time <= ALIKE * min(fitting)
        assert found.peak_bytes == peak(found.config) <= budget
        half = replace(found.config, micro_batches=max(1, found.config.micro_batches // 2))
        assert half == found.config or peak(half) > budget
    assert len(asked) <= len(every) + 1


def test_half_as_many_micro_batches_are_taken_where_they_fit() -> None:
    needs = {1: 100, 2: 60, 4: 40, 8: 30, 16: 20}

    def chosen(budget: int) -> str | None:
        pinned = ["precision", "optimizer", "step_in_backward", "activation_checkpointing"]
        found, _ = choose(
            PLAIN, budget, lambda c: needs[c.micro_batches], pinned=pinned, legal=legal, seconds=seconds
        )  # fmt: skip
        return found and found.flags

    assert [chosen(budget) for budget in (100, 60, 59, 40, 30, 29, 20, 19)] == [
        "", "--micro-batches 2", *["--micro-batches 4"] * 2, "--micro-batches 8", *["--micro-batches 16"] * 2, None,
    ]  # fmt: skip


def test_of_a_hopeless_budget_the_leanest_plans_are_enough() -> None:
    """Blocks or not: of a model without any, the leanest are those without checkpointing."""

    def asking(config: TrainConfig) -> int:
        asked.append(config)
        if blocks or not config.activation_checkpointing:
            return peak(config)
        raise UsageError("--activation-checkpointing", "blocks", "none", "leave it out")

    for blocks in (True, False):
        asked: list[TrainConfig] = []
        found, smallest = choose(PLAIN, 30, asking, pinned=[], legal=legal, seconds=seconds)
        every = [config for _, _, _, config in plans(PLAIN, [], legal, seconds)]
        assert found is None
        assert smallest.peak_bytes == min(peak(c) for c in every if blocks or not c.activation_checkpointing)
        predicted = [c for c in asked if blocks or not c.activation_checkpointing]
        assert len(predicted) == 3  # as it is; most micro-batches; the step in the backward pass, which excludes these


def test_of_a_kind_that_cannot_fit_few_plans_are_predicted() -> None:
    """Every plan that has no micro-batches, or no checkpointing beside them, is far from fitting."""

    def asking(config: TrainConfig) -> int:
        asked.append(config)
        return 300 + peak(config) if config.micro_batches == 1 or not config.activation_checkpointing else peak(config)

    asked: list[TrainConfig] = []
    found, _ = choose(PLAIN, 165, asking, pinned=[], legal=legal, seconds=seconds)
    every = sorted(
        (time, len(changes), asking(config)) for time, _, changes, config in plans(PLAIN, [], legal, seconds)
    )
    asked = asked[: -len(every)]
    assert found is not None
    assert found.time <= ALIKE * min(time for time, _, size in every if size <= 165)
    assert len(asked) < len(every) / 3


def test_where_techniques_take_more_than_they_save_all_are_looked_at() -> None:
    def tiny(config: TrainConfig) -> int:
        return 100 + 50 * config.activation_checkpointing - 5 * (config.optimizer == "adamw8bit")

    found, smallest = choose(PLAIN, 10, tiny, pinned=[], legal=legal, seconds=seconds)
    assert found is None
    assert smallest.peak_bytes == 95


@pytest.mark.parametrize("noise", [0.96, 1.0, 1.04])
def test_of_about_as_fast_plans_the_plainest_is_chosen_whichever_was_measured_faster(noise: float) -> None:
    def noisy(config: TrainConfig) -> float:
        return noise if config.precision == "bf16-mixed" else 1.5 if config.micro_batches > 1 else 1.0

    pinned = ["step_in_backward", "grad_clip"]
    found, _ = choose(PLAIN, 900, peak, pinned=pinned, legal=legal, seconds=noisy)
    assert found is not None
    assert found.changes == {"activation_checkpointing": True}


def test_what_the_user_set_stays() -> None:
    pinned = ["optimizer", "precision", "grad_clip"]
    found, smallest = choose(PLAIN, 1, peak, pinned=pinned, legal=legal, seconds=seconds)
    assert found is None
    assert not set(smallest.changes) & set(pinned)
    assert smallest.flags == "--micro-batches 16 --activation-checkpointing"


def test_every_plan_is_legal_and_different() -> None:
    every = [config for _, _, _, config in plans(PLAIN, [], legal, seconds)]
    assert all(legal(config) for config in every)
    assert all(a != b for a, b in itertools.combinations(every, 2))
    assert flags({"grad_clip": None}) == "--grad-clip none"


@pytest.mark.parametrize(("each", "base", "budget"), [(10, 100, 1000), (10, 100, 90), (3, 0, 10**6), (100, 50, 260)])
def test_the_largest_batch_that_fits(each: int, base: int, budget: int) -> None:
    def line(config: TrainConfig) -> int:
        return base + each * config.batch_size

    size, found = largest_batch(PLAIN, budget, line, 300)
    fitting = [n for n in (1, 2, 4, 8, 16, 32, 64, 128, 256) if base + each * n <= budget]
    assert size == max(fitting, default=1)
    assert found == base + each * size
    asked: list[int] = []
    assert largest_batch(PLAIN, 0, lambda c: asked.append(c.batch_size) or line(c), 300, least=2)[0] == 2
    assert min(asked) == 2
