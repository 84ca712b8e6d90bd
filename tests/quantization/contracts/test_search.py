"""The search: cheapest first, stopped at the first that is met, and no step taken for a gain that is noise."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from qtool.errors import QtoolError
from qtool.quantization.contracts.contract import Judge, Scores
from qtool.quantization.contracts.search import OutOfTime, Search, Trial, frontier
from qtool.recipe import QuantizeConfig

N = 400
NOISE = torch.rand(N, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
UNITS = [{"name": f"unit[{i}]", "kl": 0.1 if i < 10 else 0.0, "sqnr_db": 20.0} for i in range(20)]
"""As harmful as ``World.error`` has it."""


class World:
    """Candidates whose mean KL is written down in ``error``; everything else is the real search."""

    def __init__(self, limit: float, method: str = "auto", budget: int = 100) -> None:
        logits = torch.randn(N, 3, generator=torch.Generator().manual_seed(1))
        self.config = QuantizeConfig(max_kl=limit, method=method, ranges="minmax", algorithms=None)
        self.judge = Judge(self.config, [(logits, None)], lambda x: x, None)
        self.budget, self.tried = budget, []
        self.units = UNITS
        self.search = Search(self.config, self.judge, self.attempt, lambda _: self.units, can_train=True)

    def attempt(self, name: str, config: QuantizeConfig) -> Trial:
        if len(self.tried) == self.budget:
            raise OutOfTime
        self.tried.append(name)
        scores = Scores(NOISE / NOISE.mean() * self.error(config), None, {})
        facts = {"size_bytes": 100 + len(config.overrides)}
        return Trial(name, config, scores, self.judge.verdict(scores), facts)

    def error(self, config: QuantizeConfig) -> float:
        error = {"minmax": 1.0, "percentile": 0.8, "entropy": 0.8001, "mse": 0.8}.get(config.ranges, 0.9)
        names = set(config.algorithms or ())
        error *= 0.9 if names & {"bias", "gptq-small"} else 1.0
        error *= 1.2 if "equalize" in names and "gptq-small" not in names else 1.0
        error *= max(0.3, 1 - 0.1 * len(config.overrides))
        return 0.05 if config.mode == "qat" else error


def notes_of(world: World) -> list[str]:
    """What the search tells, but for what was not tried."""
    return [note for note in world.search.notes if " was not tried: " not in note]


def test_the_first_that_is_met_ends_it() -> None:
    world = World(2.0)
    met = world.search.run()
    assert met is not None
    assert world.tried == ["ptq, minmax"] == [met.name]


@pytest.mark.parametrize(
    ("options", "tried"),
    [
        ({}, ["ptq, minmax", "ptq, network + pixels + smooth + equalize + pairs + analytic-bias + gptq-small"]),
        (
            {"weight_bits": 4},
            ["ptq, minmax", "ptq, network + pixels + smooth + equalize + pairs + analytic-bias + gptq-small"],
        ),
        ({"weight_ranges": "mse"}, ["ptq, network + pixels + smooth + equalize + pairs + analytic-bias + gptq-small"]),
        ({"algorithms": ("bias",)}, ["ptq, network + bias"]),
        (
            {"ranges_from": "ranges.json"},
            ["ptq, network + pixels + smooth + equalize + pairs + analytic-bias + gptq-small"],
        ),
        ({"mode": "qat"}, ["qat, network"]),
        ({"method": "given"}, ["ptq, network + pixels + smooth + equalize + pairs + analytic-bias + gptq-small"]),
    ],
)
def test_what_nothing_was_chosen_for_begins_with_extremes(options: dict[str, Any], tried: list[str]) -> None:
    world = World(0.95)
    world.search.config = dataclasses.replace(QuantizeConfig(max_kl=0.95), **options)
    met = world.search.run()
    assert world.tried == tried
    assert met is not None
    assert met.config == world.search.config, "the second stands on none of the first"


def test_that_more_were_looked_at_than_95_percent_are_promised_of_is_told() -> None:
    """Two that lie at the limit pass in 5 % of cases at most, three do not."""
    for count, told in ((2, []), (3, ["3 candidates"])):
        world = World(0.5)
        world.error = lambda config, world=world, count=count: 0.1 if len(world.tried) == count else 1.0  # type: ignore[method-assign]
        assert world.search.run() is not None
        assert len(world.search.trials) == count
        assert [note.split(" were judged on the same samples")[0] for note in world.search.notes] == told


def test_ranges_then_corrections_stand_on_what_helped() -> None:
    world = World(0.78)
    met = world.search.run()
    assert met is not None
    assert met.name == "bias"  # the usual best, with equalization, is worse here
    assert met.config.ranges == "percentile"  # mse is as good, which is no gain
    assert world.tried[:4] == [
        "ptq, minmax",
        "analytic-bias",
        "ranges network + pixels + smooth + equalize + pairs + gptq + steps",
        "ranges moving-average",
    ]
    assert len(set(world.tried)) == len(world.tried)


def test_ranges_of_activations_are_not_tried_where_weights_alone_are_quantized() -> None:
    world = World(1e-6, method="ptq")
    world.search.config = dataclasses.replace(world.config, weights_only=True)
    world.search.run()
    assert [name for name in world.tried if name.startswith(("ranges", "weight ranges"))] == [
        "ranges network + pixels + smooth + equalize + pairs + gptq + steps", "weight ranges mse",
    ]  # fmt: skip


def test_what_another_algorithm_includes_is_not_tried_beside_it() -> None:
    world = World(1e-6, method="ptq")
    world.search.config = QuantizeConfig(max_kl=1e-6, method="ptq")
    world.search.run()
    names = [set(name.split(" + ")) for name in world.tried]
    assert {"gptq-small"} in [each & {"gptq-small", "gptq", "bias"} for each in names]
    assert all(len(each & {"gptq-small", "gptq", "bias"}) < 2 for each in names)


@pytest.mark.parametrize(("limit", "tried"), [(0.27, True), (0.26, False)])
def test_rounding_is_learned_where_a_quarter_of_the_error_would_do(limit: float, tried: bool) -> None:
    """The upper end of the error's interval is 1.057 for all that is there, its quarter 0.264."""
    world = World(limit, method="ptq")
    world.error = lambda config: 1.0  # type: ignore[method-assign]
    world.search.run()
    for name in ("adaround", "brecq"):
        assert any(name in candidate for candidate in world.tried) == tried
        assert any(note.startswith(f"{name} was not tried") for note in world.search.notes) != tried
    assert any("renorm" in candidate for candidate in world.tried)


def test_the_usual_best_comes_after_what_is_free_and_is_stood_on_where_it_gains() -> None:
    world = World(0.3)
    world.error = lambda c: 0.5 if c.ranges == "network" and "gptq" in (c.algorithms or ()) else 1.0  # type: ignore[method-assign]
    world.search.run()
    assert world.tried[1:3] == ["analytic-bias", "ranges network + pixels + smooth + equalize + pairs + gptq + steps"]
    assert world.search.base.config.algorithms == ("pixels", "smooth", "equalize", "pairs", "gptq", "steps")
    assert world.tried[3] == "ranges moving-average + pixels + smooth + equalize + pairs + gptq + steps"
    asked = World(0.3)
    asked.search.config = dataclasses.replace(
        asked.config, ranges="network", algorithms=("pixels", "smooth", "equalize", "pairs", "gptq", "steps")
    )
    asked.search.run()
    assert (
        "ranges network + pixels + smooth + equalize + pairs + gptq + steps" not in asked.tried
    )  # it was what was asked for


def test_as_few_units_as_will_do_are_left_in_float() -> None:
    world = World(0.4)
    met = world.search.run()
    assert met is not None
    assert len(met.config.overrides) == 5  # 0.72 · (1 − 0.1 k) + noise ≤ 0.4
    assert next(iter(met.config.overrides)) == "unit[[]0]"
    assert in_float(world) == [5, 4], "harm adds up here"


def in_float(world: World) -> list[int]:
    """How many units were left in float, in the order of the candidates."""
    return [int(name.split()[0]) for name in world.tried if name.endswith("in float")]


@pytest.mark.parametrize(
    ("harm", "tried"),
    [
        ([1000, *[1] * 19], [1, 2, 4, 8, 6, 5]),  # the first alone seems to do it
        ([1] * 20, [10, 9, 7, 3, 5, 4]),  # and here more of them than do
        ([0] * 20, [1, 2, 4, 8, 6, 5]),
    ],
)
def test_harm_that_does_not_add_up_is_where_the_search_begins(harm: list[float], tried: list[int]) -> None:
    world = World(0.4)
    levels = [-10 * math.log10(power) if power else math.inf for power in harm]
    world.units = [unit | {"kl": None, "sqnr_db": level} for unit, level in zip(UNITS, levels, strict=True)]
    assert (met := world.search.run()) is not None
    assert len(met.config.overrides) == 5
    assert in_float(world) == tried


def test_units_are_left_in_float_beside_one_of_which_something_else_was_asked() -> None:
    world = World(0.4)
    world.search.config = dataclasses.replace(world.config, overrides={"unit[[]0]": "int8"})
    assert (met := world.search.run()) is not None
    assert in_float(world) == [5, 4]
    assert [value for name, value in met.config.overrides.items() if name != "unit[[]0]"] == ["float"] * 4


def test_weights_of_few_bits_get_eight_before_float() -> None:
    world = World(0.4)
    world.search.config = dataclasses.replace(world.config, weight_bits=4)
    met = world.search.run()
    assert met is not None
    assert set(met.config.overrides.values()) == {"int8"}
    assert not any("in float" in name for name in world.tried)


def test_training_comes_last_and_only_where_it_may() -> None:
    assert (met := World(0.06).search.run()) is not None
    assert met.config.mode == "qat"
    assert met.config.overrides == {}
    untrained = World(0.06, "ptq")
    assert untrained.search.run() is None
    assert "qat" not in untrained.tried
    given = World(0.06, "given")
    assert given.search.run() is None
    assert given.tried == ["ptq, minmax"]


def test_what_changes_nothing_is_no_candidate_and_is_not_stood_on() -> None:
    world = World(1e-9, "ptq")
    attempt = world.attempt

    def repeating(name: str, config: QuantizeConfig) -> Trial:
        declined = "renorm" in (config.algorithms or ())
        trial = attempt(name, dataclasses.replace(config, algorithms=None) if declined else config)
        return dataclasses.replace(trial, config=config, same_as="ptq, minmax" if declined else None)

    world.search._attempt = repeating
    world.search.run()
    assert any("renorm" in name for name in world.tried)
    assert not any("renorm" in (trial.config.algorithms or ()) for trial in world.search.trials)
    assert len(set(world.tried)) == len(world.tried)
    note, _ = notes_of(world)
    assert note.startswith("renorm")
    assert note.endswith("changes nothing: it is the model of 'ptq, minmax'")


def test_a_candidate_that_cannot_be_made_is_passed_over_and_told() -> None:
    world, attempt = World(0.01), World.attempt

    def fails(name: str, config: QuantizeConfig) -> Trial:
        if config.ranges == "mse" or len(config.overrides) in (6, 10) or config.mode == "qat":
            raise QtoolError("here", "this", "that", "do so")
        return attempt(world, name, config)

    world.search._attempt = fails
    assert world.search.run() is None
    why = "could not be made: here: expected this; got that; do so"
    told = [note for note in world.search.notes if note.endswith(why)]
    assert (
        [note.split(" could")[0] for note in told] == ["ranges mse", "10 units in float", "qat"] == world.search.failed
    )
    assert world.search.trained
    world = World(0.31)
    world.search._attempt = fails
    assert (met := world.search.run()) is not None
    assert len(met.config.overrides) == 7
    assert world.search.failed == ["ranges mse", "6 units in float"]
    assert not world.search.trained
    world = World(0.01)
    world.search._attempt = lambda name, config: fails(name, dataclasses.replace(config, mode="qat"))
    with pytest.raises(QtoolError, match="expected this"):
        world.search.run()


def test_training_that_comes_no_nearer_is_left_and_told() -> None:
    world = World(1e-9)
    world.error = lambda config: 1.5 if config.mode == "qat" else 1.0  # type: ignore[method-assign]
    assert world.search.run() is None
    assert world.tried[-1] == "qat"
    assert world.search.closest.config.mode == "ptq"
    assert notes_of(world)[1:] == ["qat comes no nearer to the float model than 'ptq, minmax', and is left"]


def test_the_half_of_the_units_is_the_most() -> None:
    world = World(1e-9, "ptq")
    world.error = lambda config: 1.0  # type: ignore[method-assign]
    assert world.search.run() is None
    assert world.tried[-1] == "10 units in float"
    assert notes_of(world) == ["no more than 10 of 20 units were tried in float"]
    assert world.search.closest.name == "ptq, minmax"


def test_out_of_time_keeps_what_was_found() -> None:
    world = World(0.06, budget=3)
    assert world.search.run() is None
    assert world.search.out_of_time
    assert len(world.search.trials) == 3
    whole = World(0.4)
    whole.search.run()
    late = World(0.4, budget=len(whole.tried) - 1)  # before the last, smaller one
    met = late.search.run()
    assert met is not None
    assert len(met.config.overrides) == 5
    too_late = World(0.4, budget=len(whole.tried) - 2)
    assert too_late.search.run() is None
    assert too_late.search.out_of_time


def test_the_frontier_is_what_nothing_beats() -> None:
    world = World(1e-9)
    world.search.run()
    shown = frontier(world.search.trials)
    for trial in world.search.trials:
        beaten = [
            s for s in shown
            if s.facts["size_bytes"] <= trial.facts["size_bytes"] and s.verdict.excess <= trial.verdict.excess
        ]  # fmt: skip
        assert beaten
    sizes: list[Any] = [trial.facts["size_bytes"] for trial in shown]
    assert sizes == sorted(set(sizes))


def test_ranges_that_are_given_are_not_searched() -> None:
    world = World(0.01, "ptq")
    world.search.config = dataclasses.replace(world.config, ranges_from="ranges.json")
    world.search.run()
    assert not any("ranges" in name for name in world.tried)


def test_ranges_that_are_given_are_not_those_of_other_quantizers() -> None:
    world = World(0.01)
    world.search.config = dataclasses.replace(world.config, ranges_from="ranges.json")
    world.search.run()
    others = [trial.config for trial in world.search.trials if trial.config.overrides or trial.config.mode == "qat"]
    assert [len(config.overrides) for config in others] == [10, 0]
    for trial in world.search.trials:
        assert trial.config.ranges_from == (None if trial.config in others else "ranges.json")


@pytest.mark.parametrize("limit", [0.95, 0.75, 0.5, 0.2])
def test_what_is_returned_is_met(limit: float) -> None:
    met = World(limit).search.run()
    assert met is not None
    assert met.verdict.met
