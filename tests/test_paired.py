"""Differences of two models on the same samples, against formulas, draws of many data sets and the task's own means."""

import math

import pytest
import torch
from torch import nn

from qtool.errors import QtoolError
from qtool.evaluate import Sums
from qtool.intervals import mean_interval, paired_interval
from qtool.paired import Paired, joined, proportions, sums_of
from qtool.tasks import Classification


class Errors:
    """A mean absolute error, weighted by what stands behind each target, and what is no mean of it."""

    name, metric, higher_is_better = "errors", "mae", False

    def loss(self, output, target):
        value, weight = target.unbind(1)
        return ((output[:, 0] - value).abs() * weight).sum(), weight.sum()

    def metrics(self, output, target):
        return {"mae": self.loss(output, target)[0]}

    def finish(self, means):
        return means | {"exp": math.exp(means["mae"])}


def both(task, outputs, target):
    """What a task makes of two models' outputs, in batches of 7, sample by sample."""
    found = []
    for output in outputs:
        parts = [sums_of(task, o, t) for o, t in zip(output.split(7), target.split(7), strict=True)]
        found.append((joined([sums for sums, _ in parts]), torch.cat([weight for _, weight in parts])))
    (before, weights), (after, _) = found
    return Paired(task, weights), before, after


@pytest.fixture
def draw():
    return torch.Generator().manual_seed(0)


def test_samples_add_up_to_what_batches_give(draw):
    outputs, target = torch.randn(2, 20, 1, generator=draw), torch.rand(20, 2, generator=draw)
    paired, before, after = both(Errors(), outputs, target)
    for output, sums in zip(outputs, (before, after), strict=True):
        batches = Sums(Errors())
        batches.add(output, target)
        wanted = batches.means()
        wanted.pop("num_samples")
        assert paired.means(sums) == pytest.approx(wanted, rel=1e-6)


def test_samples_are_judged_without_label_smoothing_as_batches_are(draw):
    output, target = torch.randn(5, 4, generator=draw), torch.randint(4, (5,), generator=draw)
    wanted = nn.functional.cross_entropy(output, target, reduction="none")
    assert sums_of(Classification(0.1), output, target)[0]["loss"].tolist() == pytest.approx(wanted.tolist())


def test_right_answers_are_paired_proportions(draw):
    outputs, target = torch.randn(2, 60, 4, generator=draw), torch.randint(4, (60,), generator=draw)
    paired, before, after = both(Classification(), outputs, target)
    value, within = paired.change("top1", before, after)
    was, now = outputs.argmax(2) == target
    assert value == pytest.approx(float(now.double().mean() - was.double().mean()))
    wanted = paired_interval(float((now & ~was).sum()), float((was & ~now).sum()), 60)
    assert within(60) == pytest.approx(wanted)
    assert proportions(0.1, 0.2, 0.5)(100) == pytest.approx(paired_interval(5, 10, 50))


def test_a_mean_of_samples_of_equal_weight_has_the_interval_of_the_mean_of_differences(draw):
    outputs = torch.randn(2, 40, 1, generator=draw)
    target = torch.stack([torch.randn(40, generator=draw), torch.ones(40)], 1)
    paired, before, after = both(Errors(), outputs, target)
    value, within = paired.change("mae", before, after)
    apart = ((outputs[1] - target[:, :1]).abs() - (outputs[0] - target[:, :1]).abs())[:, 0].double()
    assert value == pytest.approx(float(apart.mean()), rel=1e-6)
    assert within(40) == pytest.approx(mean_interval(apart), rel=1e-5)
    low, high = within(160)
    assert high - low < 0.55 * (within(40)[1] - within(40)[0])


@pytest.mark.parametrize("metric", ["mae", "exp"])
def test_the_interval_holds_the_truth_about_as_often_as_it_says(metric, draw):
    """400 sets of 80 samples, uneven weights; the truth is that of 400,000 samples."""

    def samples(count):
        noise = torch.randn(count, generator=draw)
        apart = torch.stack([noise, 1.1 * noise + 0.1 * torch.randn(count, generator=draw)])
        return apart.abs().double(), torch.rand(count, generator=draw).double() + 0.1

    def change(values, weights):
        paired = Paired(Errors(), weights)
        before, after = ({"mae": value * weights} for value in values)
        return paired.change(metric, before, after)

    (was, now), weights = samples(400_000)
    means = [float((each * weights).sum() / weights.sum()) for each in (was, now)]
    truth = means[1] - means[0] if metric == "mae" else math.exp(means[1]) - math.exp(means[0])
    rounds, held = (400 if metric == "mae" else 60), 0
    for _ in range(rounds):
        _, within = change(*samples(80))
        low, high = within(80)
        held += low <= truth <= high
    assert 0.88 < held / rounds <= 1.0


@pytest.mark.parametrize("metric", ["mae", "exp"])
def test_models_that_no_sample_tells_apart_are_known_to_be_alike_as_well_as_right_answers_are(metric):
    values = {"mae": torch.arange(50).double() / 50}
    value, within = Paired(Errors(), torch.ones(50).double()).change(metric, values, values)
    assert value == 0
    assert within(50) == pytest.approx(paired_interval(0, 0, 50))
    assert within(50)[1] > 0.01


def test_draws_are_of_pairs_so_that_what_both_have_in_common_drops_out(draw):
    values, weights = torch.randn(100, generator=draw).abs().double(), torch.ones(100).double()
    value, within = Paired(Errors(), weights).change("exp", {"mae": values}, {"mae": values + 0.01})
    low, high = within(100)
    wanted = math.exp(float(values.mean())) * math.expm1(0.01)
    assert value == pytest.approx(wanted)
    assert 0 < high - low < 0.5 * wanted  # drawn apart, each mean would sway by ten times the change


def test_what_finish_makes_is_told_from_means(draw):
    paired, before, _ = both(Errors(), torch.randn(2, 9, 1, generator=draw), torch.rand(9, 2, generator=draw))
    assert paired.is_mean("mae", before)
    assert not paired.is_mean("exp", before)
    assert not paired.is_counted(before["mae"])


def test_a_task_s_outputs_may_be_packed():
    class Packed(Classification):
        def loss(self, output, target):
            return super().loss(output["logits"], target)

        def metrics(self, output, target):
            return super().metrics(output["logits"], target)

    sums, weights = sums_of(
        Packed(), {"logits": nn.functional.one_hot(torch.tensor([0, 1, 1]), 2)}, torch.tensor([0, 1, 0])
    )
    assert sums["top1"].tolist() == [1, 1, 0]
    assert weights.tolist() == [1, 1, 1]


def test_outputs_beside_the_answers_need_not_have_the_samples_on_their_first_axis():
    class First(Classification):
        def loss(self, output, target):
            assert output[1].shape == (2, len(target), 5)
            assert output[2].shape == (7, 4)
            return super().loss(output[0], target)

        def metrics(self, output, target):
            return super().metrics(output[0], target)

    output = (nn.functional.one_hot(torch.tensor([0, 1, 1]), 2).float(), torch.zeros(2, 3, 5), torch.zeros(7, 4))
    sums, _ = sums_of(First(), output, torch.tensor([0, 1, 0]))
    assert sums["top1"].tolist() == [1, 1, 0]


class Found:
    """What share of those of a class is found, which is undefined where there is none."""

    name, metric, higher_is_better = "found", "recall", True

    def finish(self, means):
        return means | {"recall": means["found"] / means["there"]}


def recall(there, found_before, found_after):
    weights = torch.ones(60).double()
    parts = [{"there": there.double(), "found": (there & found).double()} for found in (found_before, found_after)]
    return Paired(Found(), weights).change("recall", *parts)


def test_draws_without_a_sample_of_a_rare_class_are_left_out():
    there, some = torch.arange(60) < 4, torch.arange(60) < 1
    value, within = recall(there, there, ~some)  # one draw in 50 has none of the four
    low, high = within(60)
    assert value == -0.25
    assert -1 <= low < -0.25 <= high <= 0
    with pytest.raises(QtoolError, match=r"metric 'recall': expected an interval.*got [1-4]\d\d draws .*undefined"):
        recall(some, some, some)


def test_a_model_of_which_the_metric_is_undefined_is_no_fault_of_the_task():
    weights, one = torch.ones(9).double(), torch.ones(9).double()
    value, within = Paired(Found(), weights).change(
        "recall", {"there": one, "found": one}, {"there": one * 0, "found": one}
    )
    assert all(math.isnan(each) for each in (value, *within(9)))


def test_draws_without_a_sample_that_counts_are_left_out():
    weights = (torch.arange(60) < 4).double()
    value, within = Paired(Errors(), weights).change("exp", {"mae": weights}, {"mae": weights * 1.1})
    assert within(60)[0] < value * 1.001 < within(60)[1] * 1.01
    with pytest.raises(QtoolError, match="task 'errors': expected samples that count; got none"):
        Paired(Errors(), weights * 0).means({"mae": weights})


@pytest.mark.parametrize(("apart", "by_loss"), [(0, False), (2, False), (2, True), (0, True)])
def test_samples_whose_targets_are_ignored_tell_nothing(draw, apart, by_loss):
    """The interval is that of the samples that count alone, whatever stands beside them."""
    outputs, target = torch.randn(1, 60, 4, generator=draw).repeat(2, 1, 1), torch.arange(60) % 4
    outputs[1, :apart] *= -1
    beside = torch.randn(2, 600, 4, generator=draw)
    ignored = torch.full((600,), -100)
    alone = both(Classification(), outputs, target)
    among = both(Classification(), torch.cat([outputs, beside], 1), torch.cat([target, ignored]))
    metric = "loss" if by_loss else "top1"
    (value, within), (other, likewise) = (paired.change(metric, *sums) for paired, *sums in (alone, among))
    assert other == pytest.approx(value)
    assert likewise(660) == pytest.approx(within(60))
    assert likewise(660)[1] - likewise(660)[0] > 0.01
