"""The contract's statistics against their textbook forms, and what it refuses to judge."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from qtool.errors import QtoolError, UsageError
from qtool.intervals import mean_interval, paired_interval, wilson_interval
from qtool.quantization.contracts.contract import Criterion, Judge
from qtool.recipe import QuantizeConfig
from qtool.tasks import Classification, LanguageModelling

N = 1000
LOGITS = torch.randn(N, 5, generator=torch.Generator().manual_seed(0)) * 3
TARGETS = LOGITS.argmax(1)
T999 = 1.9623415  # the 97.5 % point of Student's t with 999 degrees of freedom
T199 = 1.9719565


def hall(values: np.ndarray, t: float) -> list[float]:
    """Hall's interval of a mean, its cubic solved by bisection."""
    n, mean, spread = len(values), values.mean(), values.std(ddof=1)
    g = (((values - mean) / spread) ** 3).mean()

    def solved(end: float) -> float:
        low, high = -100.0, 100.0
        for _ in range(100):
            x = (low + high) / 2
            low, high = (x, high) if x + g * x**2 / 3 + g**2 * x**3 / 27 + g / (6 * n) < end else (low, x)
        return low

    return [mean - spread * solved(end / math.sqrt(n)) for end in (t, -t)]


def judge(task: Any = None, targets: Tensor | None = TARGETS, logits: Tensor = LOGITS, **options: Any) -> Judge:
    """A judge for whom inputs are the float model's logits themselves."""
    given = logits.split(300)
    parts = zip(given, targets.split(300) if targets is not None else [None] * len(given), strict=True)
    return Judge(QuantizeConfig(**options), list(parts), lambda inputs: inputs, task or Classification())


def wrong(count: int) -> Any:
    """A candidate that answers otherwise for the first ``count`` samples."""
    other = LOGITS.clone()
    other[:count] = -LOGITS[:count]
    seen = iter(other.split(300))
    return lambda _: next(seen)


def test_the_drop_and_its_interval() -> None:
    held = judge(max_drop=2.0)
    criterion = held.verdict(held.score(wrong(10))).criteria[0]
    assert criterion.value == pytest.approx(1.0)
    assert criterion.ci95 == pytest.approx([100 * end for end in paired_interval(10, 0, N)])
    assert criterion.met is True
    assert judge(max_drop=0.5).verdict(held.score(wrong(10))).criteria[0].met is False
    assert judge(max_drop=1.5).verdict(held.score(wrong(10))).criteria[0].met is None


def test_how_many_samples_would_tell() -> None:
    """At a drop of 1.0 and a limit of 1.5 points, with one sample in a hundred that differs."""
    held = judge(max_drop=1.5)
    criterion = held.verdict(held.score(wrong(10))).criteria[0]
    assert held.verdict(held.score(wrong(10))).within
    assert not held.verdict(held.score(wrong(18))).within
    ends = [100 * paired_interval(0.01 * n, 0, n)[1] for n in (0.99 * criterion.needed, criterion.needed)]
    assert ends[1] <= 1.5 < ends[0]


def test_how_many_samples_would_tell_an_agreement() -> None:
    """99.5 % where 99.2 are promised: what Wilson's interval asks for, 2.5 times what the normal one would."""
    held = judge(min_agreement=99.2)
    needed = held.verdict(held.score(wrong(5))).criteria[0].needed
    assert needed == pytest.approx(1.959964**2 * 0.992 * 0.008 / 0.003**2, rel=0.01)


def test_how_many_samples_would_tell_a_divergence() -> None:
    held = judge(max_kl=1.0)
    scores = held.score(wrong(200))
    value = float(scores.divergence.mean())
    needed = judge(max_kl=1.1 * value).verdict(scores).criteria[0].needed
    spread = float(scores.divergence.std())
    assert needed == pytest.approx((1.959964 * spread / (0.1 * value)) ** 2, rel=0.15)
    assert (
        mean_interval(scores.divergence, needed)[1]
        <= 1.1 * value
        < mean_interval(scores.divergence, needed * 99 // 100)[1]
    )


def test_kl_and_agreement() -> None:
    held = judge(max_kl=1.0, min_agreement=98.0)
    kl, agreement = held.verdict(held.score(wrong(5))).criteria
    p, q = (torch.softmax(v.double(), 1).numpy() for v in (LOGITS[:5], -LOGITS[:5]))
    each = np.zeros(N)
    each[:5] = (p * np.log(p / q)).sum(1)
    assert kl.value == pytest.approx(each.mean())
    assert kl.ci95 == pytest.approx(hall(each, T999), rel=1e-5)
    assert agreement.value == pytest.approx(99.5)
    z2, share = 1.959964**2, 0.995
    root = math.sqrt(share * (1 - share) / N + z2 / (4 * N * N))
    low = (share + z2 / (2 * N) - 1.959964 * root) / (1 + z2 / N)
    assert agreement.ci95[0] == pytest.approx(100 * low)
    assert agreement.met is True
    assert judge(min_agreement=99.6).verdict(held.score(wrong(5))).criteria[0].met is None


def test_an_agreement_near_all_is_not_told_as_all() -> None:
    told = str(Criterion("agreement", 99.9, 99.9634, (99.87, 100.0), None))
    assert told == "agreement 99.963 (99.87 to 100; limit 99.9)"


@pytest.mark.parametrize(
    ("criterion", "enough"),
    [
        (Criterion("KL", 0.1, 0.2, (0.1, 0.4), False), 0.25),
        (Criterion("drop", 0.2, 0.3, (0.1, 0.4), None), 0.25),
        (Criterion("agreement", 99.5, 98.5, (98.0, 98.9), False), 0.0625),
    ],
)
def test_what_less_noise_would_do(criterion: Criterion, enough: float) -> None:
    """Divergence goes with its power, answers that change with its deviation; the interval's far end is what counts."""
    assert criterion.met_with(enough * 0.999)
    assert not criterion.met_with(enough * 1.001)


def test_a_loss_is_better_when_lower_and_its_interval_is_that_of_paired_differences() -> None:
    held = judge(max_drop=400.0, metric="loss")
    criterion = held.verdict(held.score(wrong(20))).criteria[0]
    losses = [
        torch.nn.functional.cross_entropy(v, TARGETS, reduction="none").double() for v in (LOGITS, LOGITS.clone())
    ]
    losses[1][:20] = torch.nn.functional.cross_entropy(-LOGITS[:20], TARGETS[:20], reduction="none").double()
    change = 100 * (losses[1] - losses[0])
    assert criterion.value == pytest.approx(float(change.mean()), rel=1e-5)
    assert criterion.ci95 == pytest.approx(mean_interval(change), rel=1e-3)


class SquareRoot(Classification):
    """A task whose metric is no mean: the root of top-1."""

    def finish(self, means: dict[str, float]) -> dict[str, float]:
        return {**means, "root": math.sqrt(means["top1"])}


class Counting:
    """A task whose output is a dict of logits per position, and whose samples weigh as many tokens as they have."""

    name, metric, higher_is_better = "counting", "accuracy", True

    def loss(self, output: Any, target: Tensor) -> tuple[Tensor, float]:
        return output["logits"].sum() * 0, float((target >= 0).sum())

    def metrics(self, output: Any, target: Tensor) -> dict[str, Tensor]:
        return {"accuracy": ((output["logits"].argmax(-1) == target) & (target >= 0)).sum()}


def test_samples_that_weigh_differently_and_outputs_that_are_no_tensor() -> None:
    draw = torch.Generator().manual_seed(3)
    logits = torch.randn(500, 6, 4, generator=draw)
    other = logits + 0.8 * torch.randn(500, 6, 4, generator=draw)
    target = logits.argmax(-1).where(torch.rand(500, 6, generator=draw) < 0.8, -1)
    config = QuantizeConfig(max_drop=50.0)
    held = Judge(config, [({"logits": logits}, target)], lambda inputs: inputs, Counting())
    criterion = held.verdict(held.score(lambda _: {"logits": other})).criteria[0]
    wrong_, tokens = ((other.argmax(-1) != target) & (target >= 0)).sum(1).numpy(), (target >= 0).sum(1).numpy()
    drop = wrong_.sum() / tokens.sum()
    assert criterion.value == pytest.approx(100 * drop)
    picks = np.random.default_rng(0).integers(0, 500, (2000, 500))
    draws = 100 * wrong_[picks].sum(1) / tokens[picks].sum(1)
    assert criterion.ci95 == pytest.approx(np.quantile(draws, [0.025, 0.975]), rel=0.03)


def test_a_metric_that_is_no_mean_is_bootstrapped() -> None:
    held = judge(SquareRoot(), max_drop=3.0, metric="root")
    criterion = held.verdict(held.score(wrong(40))).criteria[0]
    assert criterion.value == pytest.approx(100 * (1 - math.sqrt(0.96)))
    spread = 100 * 0.5 / math.sqrt(0.96) * math.sqrt(0.04 * 0.96 / N)  # the delta method
    assert criterion.ci95 == pytest.approx((criterion.value - 1.96 * spread, criterion.value + 1.96 * spread), rel=0.12)


def test_a_divergence_is_not_below_zero_within_its_interval_either() -> None:
    held = judge(max_kl=1.0)
    low, high = held.verdict(held.score(wrong(1))).criteria[0].ci95
    assert low == 0.0 < high


def test_better_means_by_more_than_noise() -> None:
    held = judge(max_kl=1.0)
    near, nearer = held.score(wrong(100)), held.score(wrong(90))
    assert held.better(nearer, near)
    assert not held.better(near, nearer)
    assert not held.better(held.score(wrong(1)), held.score(wrong(2)))  # one sample is no evidence


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    draw = np.random.default_rng(0)
    held = [wilson_interval(int(count), 500) for count in draw.binomial(500, 0.99, 2000)]
    assert np.mean([low <= 0.99 <= high for low, high in held]) == pytest.approx(0.95, abs=0.025)
    for count in (2, 7, 60):
        values = torch.from_numpy(draw.normal(1.0, 2.0, (600, count)))
        held = [low <= 1.0 <= high for low, high in map(mean_interval, values)]
        assert np.mean(held) == pytest.approx(0.95, abs=0.02)
    for values, most in (
        (np.exp(1.25 * draw.normal(size=(800, 540))), 0.05),
        (draw.normal(size=(800, 540)) ** 2, 0.035),
    ):
        above = [high < values.mean() for _, high in map(mean_interval, torch.from_numpy(values))]
        assert np.mean(above) < most  # a mean that is taken for smaller than it is; Student's t alone: 7 % of the first


def test_labels_that_are_no_classes_have_no_divergence() -> None:
    labels = (LOGITS > 0).float()
    labels[-100:] = torch.eye(5)[TARGETS[-100:]]  # the last batch looks like classes
    for options in ({"max_kl": 1.0}, {"min_agreement": 90.0}):
        with pytest.raises(UsageError, match=r"expected logits .*; got outputs \(100, 5\), targets \(100, 5\)"):
            judge(targets=labels, **options)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"max_drop": 1.0, "metric": "f1"}, "--metric: expected a metric of task 'classification'; got 'f1'"),
        ({"max_kl": 1.0, "metric": "top1"}, "--max-drop beside it"),
        ({"max_drop": 0.1}, r"--max-drop: expected at least 3,838 validation samples .*; got 1,000"),
        ({"min_agreement": 99.9}, r"--min-agreement: expected at least 3,838 validation samples"),
        ({"min_agreement": 100.0}, "more than any number of validation samples .*; promise less: no validation data"),
        ({"max_drop": 0.0}, "more than any number of validation samples .*; promise less: no validation data"),
    ],
)  # fmt: skip
def test_what_cannot_be_judged_is_refused(options: dict[str, Any], part: str) -> None:
    with pytest.raises(UsageError, match=part):
        judge(**options)


def test_labels_and_logits_and_samples_are_needed() -> None:
    with pytest.raises(UsageError, match="labels to measure the metric with"):
        judge(targets=None, max_drop=1.0)
    with pytest.raises(UsageError, match=r"expected logits \(N×C, N×T×C or N×C×H×W\)"):
        judge(targets=None, logits=LOGITS[:, :1], max_kl=1.0)
    with pytest.raises(UsageError, match=r"expected logits \(N×C, N×T×C or N×C×H×W\)"):
        judge(targets=None, logits=LOGITS.argsort(1), max_kl=1.0)
    with pytest.raises(QtoolError, match=r"a row for each of 300 samples; got one of shape \(5,\)"):
        Judge(QuantizeConfig(max_kl=1.0), [(LOGITS[:300], None)], lambda inputs: inputs.sum(0), None)
    with pytest.raises(QtoolError, match=r"a row for each of 300 samples; got one of shape \(\)"):
        Judge(QuantizeConfig(max_drop=1.0), [(LOGITS[:300], None)], lambda inputs: inputs.sum(), None)
    with pytest.raises(QtoolError, match="float model to every validation sample; got NaN"):
        judge(targets=None, logits=LOGITS / 0 * 0, max_kl=1.0)
    with pytest.raises(QtoolError, match="expected validation samples; got none"):
        Judge(QuantizeConfig(max_kl=1.0), [], lambda inputs: inputs, None)


def test_values_that_are_not_finite_never_keep_a_contract() -> None:
    held = judge(max_kl=1.0)
    lost = held.score(lambda x: x / 0)
    assert not held.verdict(lost).met
    assert held.better(held.score(wrong(5)), lost)
    assert not held.better(lost, lost)
    loss = judge(max_drop=1.0, metric="loss")
    assert loss.verdict(loss.score(lambda x: x / 0)).excess == math.inf


class Distance(Classification):
    """How far logits are from targets that are some, with NaN for what is unknown."""

    def loss(self, output: Any, target: Any) -> Any:
        return (output - target).square().sum(), len(target)

    def metrics(self, output: Any, target: Any) -> Any:
        return {"distance": (output - target).abs().sum()}


def test_a_metric_that_is_nan_of_the_float_model_is_refused_before_any_candidate_is_tried() -> None:
    unknown = LOGITS.clone()
    unknown[3, 0] = torch.nan
    with pytest.raises(QtoolError, match="a 'distance' of the float model on the validation samples; got NaN; clean"):
        judge(Distance(), targets=unknown, max_drop=1.0, metric="distance")


def test_a_single_sample_tells_nothing() -> None:
    for options in ({"max_kl": 1.0}, {"max_drop": 1.0, "metric": "loss"}, {"max_drop": 400.0}):
        with pytest.raises(UsageError, match=r"at least 2 validation samples .* got 1;"):
            judge(targets=TARGETS[:1], logits=LOGITS[:1], **options)
    with pytest.raises(UsageError, match=r"at least 2 validation samples .* got 1;"):
        judge(SquareRoot(), TARGETS[:1], LOGITS[:1], max_drop=1.0, metric="root")


class Shares(Classification):
    """A task whose samples are right in parts, and a score that is no mean of them."""

    def metrics(self, output: Tensor, target: Tensor) -> dict[str, Tensor | float]:
        return {"share": 0.5 * (output.argmax(1) == target).sum()}

    def finish(self, means: dict[str, float]) -> dict[str, float]:
        return {**means, "score": math.sqrt(means["share"])}


@pytest.mark.parametrize("metric", ["share", "score"])
def test_answers_that_do_not_differ_tell_as_much_as_if_they_were_right_or_wrong(metric: str) -> None:
    """With N equal ones the score interval is ±1.96²/(N + 1.96²)."""
    few = judge(Shares(), TARGETS[:7], LOGITS[:7], max_drop=0.5, metric=metric)
    found = few.verdict(few.score(lambda inputs: inputs)).criteria[0]
    assert (found.value, found.met, found.needed) == (0.0, None, pytest.approx(765, rel=0.005))
    assert found.ci95[1] == pytest.approx(100 * 1.959964**2 / (7 + 1.959964**2))
    many = judge(Shares(), max_drop=0.5, metric=metric)
    assert many.verdict(many.score(lambda inputs: inputs)).met


class Percent(Classification):
    """A task that tells its means in percent."""

    def finish(self, means: dict[str, float]) -> dict[str, float]:
        return {name: 100 * value for name, value in means.items()}


def test_the_interval_is_that_of_what_finish_made_of_a_mean() -> None:
    held = judge(Percent(), max_drop=200.0)
    criterion = held.verdict(held.score(wrong(10))).criteria[0]
    spread = 100 * math.sqrt(0.01 * 0.99 / N)
    assert criterion.value == pytest.approx(100.0)
    assert criterion.ci95 == pytest.approx((100 * (1 - 1.96 * spread), 100 * (1 + 1.96 * spread)), rel=0.12)


class Alarms(Classification):
    """A task that counts something, of which the float model has one or none."""

    def metrics(self, output: Tensor, target: Tensor) -> dict[str, Tensor | float]:
        return {"count": (output.argmax(1) != target).sum() * 3}


def test_counts_that_a_candidate_alone_has_are_no_right_and_wrong() -> None:
    held = judge(Alarms(metric="count", higher_is_better=False), max_drop=20.0)
    criterion = held.verdict(held.score(wrong(40))).criteria[0]
    each = np.zeros(N)
    each[:40] = 300
    assert criterion.value == pytest.approx(12.0)
    assert criterion.ci95 == pytest.approx(hall(each, T999), rel=1e-5)


def test_a_task_whose_own_metric_is_none_is_told_as_its_own() -> None:
    with pytest.raises(
        UsageError, match=r"^task 'classification': expected a 'metric' that it gives; got 'top-1'.*top1"
    ):
        judge(Classification(metric="top-1"), max_drop=1.0)


class Retrieval(Classification):
    """Whether each sample of a batch is nearest to itself: of a sample alone it always is."""

    def metrics(self, output: Tensor, target: Tensor) -> dict[str, Any]:
        return {"top1": ((output @ output.T).argmax(1) == torch.arange(len(output))).sum()}


def test_a_metric_of_batches_is_promised_by_no_samples() -> None:
    with pytest.raises(UsageError, match=r"'top1', 0\.\d+ in batches and 1 sample by sample; .*--max-kl"):
        judge(Retrieval(), max_drop=1.0)
    assert judge(Retrieval(), max_kl=1.0).num_samples == N


def test_of_which_metrics_less_is_better() -> None:
    def dropped(task: Classification, metric: str) -> float:
        held = judge(task, max_drop=400.0, metric=metric)
        return held.verdict(held.score(wrong(40))).criteria[0].value

    errors = Alarms(metric="loss", higher_is_better=False)
    with pytest.raises(UsageError, match=r"'count', of which nothing says whether more is better"):
        dropped(errors, "count")
    object.__setattr__(errors, "directions", {"count": False})
    assert dropped(errors, "count") == pytest.approx(12.0)
    assert dropped(errors, "loss") > 0
    tokens = LanguageModelling()
    held = judge(tokens, TARGETS.view(200, 5), LOGITS.view(200, 5, 5), max_drop=50.0, metric="top1")
    other = torch.cat([-LOGITS[:40], LOGITS[40:]]).view(200, 5, 5)
    assert held.verdict(held.score(lambda _: other)).criteria[0].value == pytest.approx(4.0)


class Boxes:
    """A task whose targets are a list, one dict of another number of boxes for each sample."""

    name, metric, higher_is_better = "boxes", "right", True

    def loss(self, output: Tensor, target: Any) -> tuple[Tensor, float]:
        return output.sum() * 0, float(len(target))

    def metrics(self, output: Tensor, target: Any) -> dict[str, float]:
        pairs = zip(output.argmax(1).tolist(), target, strict=True)
        return {"right": float(sum(answer == len(each["boxes"]) for answer, each in pairs))}


def test_targets_that_are_a_list_of_samples() -> None:
    targets = [{"boxes": torch.zeros(int(count), 4)} for count in TARGETS]
    held = Judge(QuantizeConfig(max_drop=2.0), [(LOGITS, targets)], lambda inputs: inputs, Boxes())
    other = torch.cat([-LOGITS[:10], LOGITS[10:]])
    assert held.verdict(held.score(lambda _: other)).criteria[0].value == pytest.approx(1.0)


def test_a_task_that_fails_is_told_as_its_own() -> None:
    class Broken(Classification):
        def metrics(self, output: Tensor, target: Tensor) -> dict[str, Tensor | float]:
            return {"top1": output.no_such_thing}

    with pytest.raises(QtoolError, match=r"task 'classification': expected metrics of .*'no_such_thing'"):
        judge(Broken(), max_drop=1.0)


def tokens(targets: Tensor | None, other: Tensor, **options: Any) -> Any:
    """The criteria of a candidate that answers ``other`` for the 200 sequences of five tokens in LOGITS."""
    held = judge(logits=LOGITS.view(200, 5, 5), targets=targets, **options)
    parts = iter(other.view(200, 5, 5).split(300))
    return held.verdict(held.score(lambda _: next(parts))).criteria


def test_a_sequence_counts_as_the_mean_of_its_tokens_with_a_target() -> None:
    other = LOGITS.clone()
    other[:10] = -LOGITS[:10]  # two whole sequences
    kl, agreement = tokens(None, other, max_kl=1.0, min_agreement=90.0)
    p, q = (torch.softmax(v.double(), 1).numpy() for v in (LOGITS[:10], -LOGITS[:10]))
    each = np.zeros(N)
    each[:10] = (p * np.log(p / q)).sum(1)
    sequences = each.reshape(200, 5).mean(1)
    assert kl.value == pytest.approx(sequences.mean())
    assert kl.ci95[1] == pytest.approx(hall(sequences, T199)[1], rel=1e-5)
    assert agreement.value == pytest.approx(99.0)
    assert agreement.ci95 == pytest.approx([100 * end for end in wilson_interval(198, 200)])
    targets = TARGETS.view(200, 5).clone()
    targets[0, 1:], targets[1] = -100, -100  # one token of the first counts; of the second none has a target: all do
    kl = tokens(targets, other, max_kl=1.0)[0]
    assert kl.value == pytest.approx((each[0] + each[5:10].mean()) / 200)


def test_agreement_of_tokens_is_never_surer_than_that_of_as_many_whole_sequences() -> None:
    other = LOGITS.clone()
    other[::5] = -LOGITS[::5]  # the first token of every sequence: all sequences agree in 80 %
    agreement = tokens(None, other, min_agreement=70.0)[0]
    assert agreement.value == pytest.approx(80.0)
    assert agreement.ci95 == pytest.approx([100 * end for end in wilson_interval(160, 200)])


def test_pixels_are_judged_like_tokens_and_masked_classes_not_at_all() -> None:
    masked = LOGITS.clone()
    masked[:, 4] = -math.inf
    maps = [part.reshape(-1, 5, 5).mT.reshape(-1, 5, 5, 1).contiguous() for part in (masked, -masked)]
    maps[1][:, 4] = -math.inf
    other = iter(maps[1].split(300))
    held = judge(None, TARGETS.clamp(max=3).view(200, 5, 1), maps[0], max_kl=10.0)
    assert held.axis == 1
    divergence = held.score(lambda _: next(other)).divergence
    p, q = (torch.softmax(v[:, :4].double(), 1) for v in (LOGITS, -LOGITS))
    torch.testing.assert_close(divergence, (p * (p / q).log()).sum(1).view(200, 5).mean(1))


def test_three_dimensions_are_logits_only_where_targets_or_the_contract_say_so() -> None:
    hidden = LOGITS.view(200, 5, 5)
    task = LanguageModelling()
    assert judge(task, TARGETS.view(200, 5), hidden, max_drop=50.0, metric="loss").axis == 2
    assert judge(logits=hidden, targets=None, max_kl=1.0).axis == 2
    assert Judge(QuantizeConfig(), [(hidden, None)], lambda x: x, None).axis is None
    with pytest.raises(UsageError, match=r"expected logits \(N×C, N×T×C or N×C×H×W\)"):
        judge(logits=LOGITS.view(200, 1, 5, 5), targets=None, max_kl=1.0)


def test_outputs_beyond_what_is_held_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    held = judge(max_kl=1.0).score(wrong(5))
    monkeypatch.setattr("qtool.quantization.contracts.contract.KEPT", 2 * LOGITS[:300].nbytes)
    calls: list[int] = []
    parts = [(part, None) for part in LOGITS.split(300)]
    frugal = Judge(QuantizeConfig(max_kl=1.0), parts, lambda x: (calls.append(len(x)), x)[1], None)
    assert len(calls) == 4
    assert torch.equal(frugal.score(wrong(5)).divergence, held.divergence)
    assert calls[4:] == [300, 100]


def test_samples_with_ignored_targets_keep_no_promise() -> None:
    """500 of 1,000 that count show a drop of a point with none that differs, and 12 do not."""
    for count, limit in ((500, 1.0), (12, 25.0)):
        targets = TARGETS.clone()
        targets[count:] = -100
        held = judge(targets=targets, max_drop=limit)
        criterion = held.verdict(held.score(wrong(0))).criteria[0]
        assert criterion.met is True
        assert criterion.ci95[1] == pytest.approx(100 * paired_interval(0, 0, count)[1])
        with pytest.raises(UsageError, match=rf"got {count} that count among 1,000; give more validation data"):
            judge(targets=targets, max_drop=limit / 2)
