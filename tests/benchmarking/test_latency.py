from __future__ import annotations

import itertools
import random

import pytest

from qtool.benchmarking.latency import Renewal, Stopping, Timings, describe, interleave, noise, speedup


class Machine:
    """A machine with a clock of its own, on which ``fast`` takes half of ``slow`` and everything drifts."""

    def __init__(self, seconds, *, drift=0.0, jitter=0.0, waited=0.0):
        self.seconds, self.drift, self.jitter, self.waited = seconds, drift, jitter, waited
        self.now, self.order, self.random = 0.0, [], random.Random(0)

    def clock(self):
        return self.now

    def burst(self, name):
        def run(runs, warm):
            self.order.append(name)
            taken = []
            for _ in range(runs + warm):
                one = self.seconds[name] * (1 + self.drift * self.now) * (1 + self.jitter * self.random.random())
                self.now += one
                taken.append(one)
            return taken[warm:], self.waited

        return run

    def time(self, **options):
        bursts = {name: self.burst(name) for name in self.seconds}
        return interleave(bursts, reference="slow", clock=self.clock, **options)


def test_a_drifting_machine_does_not_move_the_ratio():
    machine = Machine({"slow": 0.02, "fast": 0.01}, drift=0.5)
    gain = speedup(machine.time(stopping=Stopping(seconds=5)), "slow", "fast")
    assert gain.ratio == pytest.approx(2.0, rel=0.02)
    assert gain.interval[0] <= gain.ratio <= gain.interval[1]


def test_rounds_end_when_the_interval_is_narrow_enough():
    steady = Machine({"slow": 0.02, "fast": 0.01}).time(stopping=Stopping(width=0.02, seconds=1000))
    noisy = Machine({"slow": 0.02, "fast": 0.01}, jitter=0.3).time(stopping=Stopping(width=0.02, seconds=1000))
    assert len(steady["fast"].rounds) == 40
    assert 40 < len(noisy["fast"].rounds) < 5000
    assert len(noisy["fast"].rounds) in [round(40 * 1.25**k) for k in range(30)]
    entry = describe(noisy, reference="slow", batch_size=4, width=0.02)["fast"]
    assert entry["converged"]
    low, high = entry["speedup_ci95"]
    assert (high - low) / entry["speedup"] <= 0.02


def test_the_time_given_is_the_end_and_is_said():
    machine = Machine({"slow": 0.02, "fast": 0.01}, jitter=0.9)
    timings = machine.time(stopping=Stopping(width=0.0001, seconds=2))
    assert 2 <= machine.now < 2.3
    assert not describe(timings, reference="slow", batch_size=1, width=0.0001)["fast"]["converged"]


def test_six_rounds_are_run_even_without_time():
    timings = Machine({"slow": 3.0, "fast": 2.0}).time(stopping=Stopping(seconds=0))
    assert len(timings["slow"].rounds) == len(timings["fast"].rounds) == 6
    assert speedup(timings, "slow", "fast").interval is not None


def test_the_order_is_random_by_round_complete_and_repeatable():
    def order(seed):
        machine = Machine({"slow": 0.02, "fast": 0.01, "other": 0.015})
        machine.time(stopping=Stopping(seconds=2), seed=seed)
        return machine.order[3:]

    first = order(0)
    rounds = [tuple(first[i : i + 3]) for i in range(0, len(first), 3)]
    assert all(sorted(r) == ["fast", "other", "slow"] for r in rounds)
    assert len(set(rounds)) > 1
    assert first == order(0) != order(1)


def test_short_runs_come_in_bursts_after_a_discarded_one_and_long_runs_alone():
    asked = []

    def burst(seconds):
        return lambda runs, warm: asked.append((runs, warm)) or ([seconds] * runs, 0.0)

    interleave({"slow": burst(0.5), "quick": burst(0.001)}, reference="slow", stopping=Stopping(seconds=0), warm_up=7)
    assert asked[:2] == [(1, 7), (1, 7)]
    assert set(asked[2:]) == {(1, 0), (20, 1)}


def test_every_run_counts_towards_percentiles_and_throughput():
    timings = {"slow": Timings(), "fast": Timings()}
    for _ in range(6):
        timings["slow"].add([0.004, 0.004], 0.0)
        timings["fast"].add([0.001, 0.003], 0.002)
    entry = describe(timings, reference="slow", batch_size=8, width=1)["fast"]
    assert entry["num_runs"] == 12
    assert entry["throughput_per_s"] == pytest.approx(8 / 0.002)
    assert entry["speedup"] == pytest.approx(4.0)
    assert entry["speedup_typical"] == pytest.approx(2.0)
    assert entry["latency_p50_ms"] == pytest.approx(2.0)
    assert entry["waiting_share"] == pytest.approx(1 / 3)


def test_the_reference_is_compared_with_nothing():
    timings = Machine({"slow": 0.02, "fast": 0.01}).time(stopping=Stopping())
    entry = describe(timings, reference="slow", batch_size=1, width=0.01)["slow"]
    assert (entry["speedup"], entry["speedup_ci95"], entry["converged"]) == (1.0, None, True)


def test_noise_is_told_with_its_reasons():
    quiet = {"spread": 0.01, "converged": True, "waiting_share": 0.0, "speedup": 2.0, "speedup_typical": 1.95}
    assert noise({"a": quiet}, load=1.0) == {
        "spread": 0.01, "waiting_share": 0.0, "load": 1.0, "noisy": False, "reasons": []
    }  # fmt: skip
    told = noise({"a": quiet, "b": quiet | {"spread": 0.2, "converged": False, "waiting_share": 0.4}}, load=9.0)
    assert told["noisy"]
    assert [("20%" in r, "of b is" in r, "40%" in r) for r in told["reasons"]] == [
        (True, False, False), (False, True, False), (False, False, True),
    ]  # fmt: skip


def test_what_a_neighbour_makes_of_a_speed_up_is_told_beside_it():
    timings = {"slow": Timings(), "fast": Timings()}
    for i in range(40):
        busy = i % 4 > 0
        timings["slow"].add([0.002 * (1.1 if busy else 1.0)] * 2, 0.0)
        timings["fast"].add([0.001 * (1.4 if busy else 1.0)] * 2, 0.0)
    entry = describe(timings, reference="slow", batch_size=1, width=0.03)["fast"]
    assert entry["speedup"] == pytest.approx(2.0)
    assert entry["speedup_typical"] == pytest.approx(2 * 1.1 / 1.4)
    reasons = noise({"fast": entry}, load=None)["reasons"]
    assert any("2.00x as fast in quiet moments and 1.57x typically" in reason for reason in reasons)


def test_progress_rises_to_the_end():
    seen = []
    Machine({"slow": 0.2, "fast": 0.1}, jitter=1.0).time(stopping=Stopping(width=0, seconds=5), progress=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


class Lucky(Machine):
    """Each process is faster or slower as its memory happens to lie, by up to 4 %; to start all takes ``cost``."""

    def __init__(self, cost):
        super().__init__({"slow": 0.02, "fast": 0.01}, jitter=0.02)
        self.cost, self.plain, self.starts = cost, dict(self.seconds), []

    def start(self):
        self.now += self.cost
        self.starts.append(self.order.count("fast"))
        self.seconds = {name: one * self.random.uniform(0.96, 1.04) for name, one in self.plain.items()}

    def measure(self, seconds, width=0.0):
        renewal = Renewal(self.start, self.cost)
        return self.time(stopping=Stopping(width=width, seconds=seconds), renewal=renewal)


def test_all_start_anew_after_ten_rounds_and_then_for_a_fifth_of_the_time():
    machine = Lucky(0.2)
    timings = machine.measure(40)
    rounds = [count - 1 - index for index, count in enumerate(machine.starts)]  # a warm-up each
    assert rounds[:3] == [10, 20, 30]
    assert all(later - earlier >= 10 for earlier, later in itertools.pairwise(rounds))
    assert timings["slow"].sittings == timings["fast"].sittings == [0, *rounds]
    warm_up = 4 * sum(machine.plain.values())
    assert 0.17 < len(rounds) * (machine.cost + warm_up) / machine.now < 0.21
    assert describe(timings, reference="slow", batch_size=1, width=0.1)["fast"]["num_processes"] == 1 + len(rounds)


@pytest.mark.parametrize(("cost", "starts"), [(3.0, 2), (7.0, 0)])
def test_what_takes_long_to_open_is_started_anew_less_often(cost, starts):
    machine = Lucky(cost)
    assert len(machine.measure(20)["fast"].sittings) == 1 + starts
    assert machine.now < 20.5


def test_two_measurements_agree_better_in_several_processes():
    def spread_of(renew):
        ratios = []
        for seed in range(12):
            machine = Lucky(0.1)
            machine.random.seed(seed)
            machine.start()
            machine.now = 0.0
            timings = machine.measure(20) if renew else machine.time(stopping=Stopping(width=0.0, seconds=20))
            ratios.append(speedup(timings, "slow", "fast").ratio)
        return max(ratios) / min(ratios) - 1

    assert spread_of(True) < spread_of(False) / 3
