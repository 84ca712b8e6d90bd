"""Evaluation and comparison, against numpy formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from qtool.data.specs import from_mapping
from qtool.errors import QtoolError
from qtool.evaluate import class_axis, compare, divergence, evaluate, shared_batches, sqnr_db
from qtool.system import processes
from qtool.tasks import Classification


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def cut(x: torch.Tensor, y: torch.Tensor, size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(x.split(size), y.split(size), strict=True))


@settings(max_examples=30)
@given(st.integers(1, 40), st.integers(2, 12), st.integers(1, 17), st.integers(0, 2**31))
def test_streaming_means_equal_the_whole(samples: int, classes: int, size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(samples, classes)).astype(np.float32) * 3
    labels = rng.integers(0, classes, samples)
    got = evaluate(lambda x: x, cut(torch.from_numpy(logits), torch.from_numpy(labels), size), Classification())
    chosen = softmax(logits.astype(np.float64))[np.arange(samples), labels]
    assert got["num_samples"] == samples
    assert got["loss"] == pytest.approx(-np.log(chosen).mean(), rel=1e-5, abs=1e-6)  # of float32 logits near zero
    assert got["top1"] == (logits.argmax(1) == labels).mean()
    if classes > 5:
        rank = (logits > logits[np.arange(samples), labels][:, None]).sum(1)
        assert got["top5"] == (rank < 5).mean()
    else:
        assert "top5" not in got


@pytest.mark.parametrize(
    ("rank", "size", "held", "extra"),
    [(0, 2, [[0, 1], [2]], 0), (1, 2, [[3, 4], [5, 6]], 0), (1, 3, [[2, 3]], 1), (2, 3, [[4, 5], [6]], 0)],
)
def test_processes_call_the_model_equally_often(
    rank: int, size: int, held: list[list[int]], extra: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "rank", lambda: rank)
    monkeypatch.setattr(processes, "size", lambda: size)
    data = from_mapping(
        {part: TensorDataset(torch.arange(7.0)[:, None], torch.arange(7)) for part in ("train", "test")}
    )
    called: list[list[list[float]]] = []
    found = [target.tolist() for _, target in shared_batches(data.test, 2, lambda x: called.append(x.tolist()))]
    assert (found, called) == (held, [[[0.0]]] * extra)


def test_evaluate_keeps_no_gradient_and_finishes() -> None:
    class Perplexity(Classification):
        def finish(self, means: dict[str, float]) -> dict[str, float]:
            return means | {"perplexity": math.exp(means["loss"])}

    model = torch.nn.Linear(3, 4)
    seen: list[bool] = []

    def predict(x: torch.Tensor) -> torch.Tensor:
        output = model(x)
        seen.append(output.requires_grad)
        return output

    got = evaluate(predict, [(torch.zeros(2, 3), torch.tensor([0, 1]))], Perplexity())
    assert seen == [False]
    assert got["perplexity"] == pytest.approx(math.exp(got["loss"]))


def test_no_sample_is_an_error() -> None:
    with pytest.raises(QtoolError, match="at least one sample"):
        evaluate(torch.neg, [], Classification())


class Counting(Classification):
    """A task that gives every batch the same weight."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        object.__setattr__(self, "weight", weight)

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, float]:  # type: ignore[override]
        return super().loss(output, target)[0], self.weight  # type: ignore[attr-defined]


@pytest.mark.parametrize(("weight", "told"), [(-1.0, "a weight of -1"), (math.nan, "a weight of nan")])
def test_a_weight_that_is_no_count_is_told(weight: float, told: str) -> None:
    with pytest.raises(QtoolError, match=f"task 'classification': expected a loss: .*; got {told};"):
        evaluate(lambda x: x, [(torch.randn(3, 4), torch.zeros(3).long())], Counting(weight))


def test_samples_of_which_none_counts_are_not_taken_for_none() -> None:
    with pytest.raises(QtoolError, match="one sample that counts; got none by the task 'classification'"):
        evaluate(lambda x: x, [(torch.randn(3, 4), torch.zeros(3).long())], Counting(0.0))


@settings(max_examples=30)
@given(st.integers(1, 50), st.integers(2, 8), st.floats(0, 2), st.integers(0, 2**31))
def test_compare_equals_numpy(samples: int, classes: int, noise: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    r = rng.normal(size=(samples, classes)).astype(np.float32) * 2
    o = (r + noise * rng.normal(size=r.shape)).astype(np.float32)
    t = rng.integers(0, classes, samples)
    got = compare(torch.from_numpy(r), torch.from_numpy(o), torch.from_numpy(t))
    p, q = softmax(r.astype(np.float64)), softmax(o.astype(np.float64))
    assert got["num_samples"] == samples
    assert got["agreement"] == pytest.approx((r.argmax(1) == o.argmax(1)).mean())
    assert got["kl"] == pytest.approx((p * np.log(p / q)).sum(1).mean(), rel=1e-6, abs=1e-12)
    error = np.square(r.astype(np.float64) - o).sum()
    expected = 10 * np.log10(np.square(r.astype(np.float64)).sum() / error) if error else math.inf
    assert got["sqnr_db"] == pytest.approx(expected)
    right, other = r.argmax(1) == t, o.argmax(1) == t
    assert got["top1_reference"] == pytest.approx(right.mean())
    assert got["top1"] == pytest.approx(other.mean())
    assert got["top1_drop"] == pytest.approx(right.mean() - other.mean())
    low, high = got["top1_drop_ci95"]
    assert -1 <= low < got["top1_drop"] + 1e-12 or samples < 3
    assert low < high <= 1


def test_equal_models() -> None:
    r = torch.randn(20, 4)
    got = compare(r, r)
    assert got == {"num_samples": 20, "agreement": 1.0, "kl": 0.0, "sqnr_db": math.inf}


def test_kl_is_of_the_reference_first() -> None:
    r, o = torch.tensor([[0.0, 0.0]]), torch.tensor([[math.log(3.0), 0.0]])
    assert compare(r, o)["kl"] == pytest.approx(0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25))
    assert compare(o, r)["kl"] != pytest.approx(compare(r, o)["kl"])


def test_a_doubled_output_is_seen() -> None:
    r = torch.randn(50, 5)
    assert sqnr_db(r, 2 * r) == pytest.approx(0.0)
    assert sqnr_db(torch.zeros(2, 2), torch.ones(2, 2)) == -math.inf


def test_bad_outputs_are_named() -> None:
    r = torch.randn(6, 3)
    nan = r.clone()
    nan[4, 1] = math.nan
    with pytest.raises(QtoolError, match=r"other outputs: expected finite logits; got .* the first 4"):
        compare(r, nan)
    with pytest.raises(QtoolError, match="reference outputs"):
        compare(nan, r)
    with pytest.raises(QtoolError, match="same shape"):
        compare(r, r[:5])
    with pytest.raises(QtoolError, match="N×C"):
        compare(r[:, 0], r[:, 0])


def test_logits_of_pixels_are_rows_and_the_drop_is_known_by_images() -> None:
    rng = np.random.default_rng(0)
    r = rng.normal(size=(12, 3, 4, 5)).astype(np.float32) * 2
    o = r + rng.normal(size=r.shape).astype(np.float32)
    t = rng.integers(0, 3, (12, 4, 5))
    t[:, 0] = -100
    got = compare(torch.from_numpy(r), torch.from_numpy(o), torch.from_numpy(t), axis=1)
    keep = t.reshape(-1) != -100
    one, other = (np.moveaxis(v, 1, -1).reshape(-1, 3)[keep].astype(np.float64) for v in (r, o))
    p, q = softmax(one), softmax(other)
    assert got["num_samples"] == keep.sum() == 180
    assert got["kl"] == pytest.approx((p * np.log(p / q)).sum(1).mean())
    assert got["agreement"] == pytest.approx((one.argmax(1) == other.argmax(1)).mean())
    assert got["sqnr_db"] == pytest.approx(10 * np.log10((one**2).sum() / ((one - other) ** 2).sum()))
    right, wrong = (v.argmax(1) == t.reshape(-1)[keep] for v in (one, other))
    each = (right.astype(float) - wrong).reshape(12, 15).mean(1)
    assert got["top1_drop"] == pytest.approx(each.mean())
    half = 2.200985 * each.std(ddof=1) / math.sqrt(12)  # Student's t, 11 degrees of freedom
    assert got["top1_drop_ci95"] == pytest.approx((each.mean() - half, each.mean() + half), rel=0.01)


@pytest.mark.parametrize(
    ("shape", "targets", "asked", "axis"),
    [
        ((6, 5), None, False, 1), ((6, 1), None, True, None), ((6,), None, True, None),
        ((6, 7, 5), None, False, None), ((6, 7, 5), None, True, 2), ((6, 7, 5), (6, 7), False, 2),
        ((6, 7, 5), (6, 5), False, 1), ((6, 7, 5), (6,), False, None), ((6, 7, 1), (6, 7), False, None),
        ((6, 3, 8, 9), None, False, None), ((6, 3, 8, 9), None, True, 1), ((6, 3, 8, 9), (6, 8, 9), False, 1),
        ((6, 8, 9, 3), (2, 8, 9), False, 3), ((6, 3, 8, 9), (6, 3, 8, 9), False, None),
    ],
)  # fmt: skip
def test_which_axis_counts_classes(shape, targets, asked, axis) -> None:
    given = None if targets is None else torch.zeros(targets, dtype=torch.int64)
    assert class_axis(torch.zeros(shape), given, asked=asked) == axis
    assert class_axis(torch.zeros(shape, dtype=torch.int64), given, asked=asked) is None
    if given is not None:
        assert class_axis(torch.zeros(shape), given.float()) is None


def test_each_of_several_heads_has_classes_where_a_target_tells_them() -> None:
    flags, place, kind = torch.tensor([[1.0, 1.0, 0.0]] * 4), torch.randn(4, 2), torch.arange(4)
    heads = {"flags": torch.zeros(4, 3), "place": torch.zeros(4, 2), "kind": torch.zeros(4, 9)}
    for target in ({"flags": flags, "place": place}, (flags, place)):
        assert [class_axis(each, target) for each in heads.values()] == [None, None, None]
        assert class_axis(heads["kind"], target, asked=True) == 1
    assert class_axis(heads["kind"], {"flags": flags, "kind": kind}) == 1
    assert class_axis(torch.zeros(4, 6, 5), {"tokens": torch.zeros(4, 6, dtype=torch.int64), "frames": kind}) == 2
    for numbers in (torch.randn(4), torch.randn(4, 1)):  # a mean and a spread for each
        assert (class_axis(heads["place"], numbers), class_axis(heads["place"], numbers, asked=True)) == (None, 1)


def test_several_labels_at_once_and_regressions_have_no_classes() -> None:
    labels, hot = torch.tensor([[1, 0, 1], [0, 1, 0]]), torch.tensor([[1, 0, 0], [0, 1, 0]])
    for targets in (labels, labels.float(), torch.randn(2, 3), -hot.float()):
        assert class_axis(torch.zeros(2, 3), targets, asked=True) is None
    assert class_axis(torch.zeros(2, 3, 4, 4), torch.rand(2, 3, 4, 4), asked=True) is None
    for targets in (hot, hot.float(), torch.randn(2, 3).softmax(1)):  # shares of classes
        assert class_axis(torch.zeros(2, 3), targets) == 1
    assert class_axis(torch.zeros(2, 3, 4, 4), torch.randn(2, 3, 4, 4).softmax(1), asked=True) == 1


def test_masked_classes_have_no_part_in_anything() -> None:
    r, o = torch.randn(30, 6), torch.randn(30, 6)
    masked = torch.arange(6) % 3 == 0
    expected = compare(r[:, ~masked], o[:, ~masked], torch.full((30,), 1))
    found = compare(r.masked_fill(masked, -math.inf), o.masked_fill(masked, -math.inf), torch.full((30,), 2))
    intervals = [v.pop("top1_drop_ci95") for v in (found, expected)]
    assert found == pytest.approx(expected)
    assert intervals[0] == intervals[1]
    with pytest.raises(QtoolError, match="other outputs: expected finite logits"):
        compare(r, o.masked_fill(masked, -math.inf))
    assert divergence(r, o.masked_fill(masked, -math.inf)).mean() == math.inf
    assert sqnr_db(r.masked_fill(masked, -math.inf), o) == -math.inf


def test_ignored_targets_alone_compare_nothing() -> None:
    with pytest.raises(QtoolError, match="a target that counts"):
        compare(torch.randn(2, 3, 4), torch.randn(2, 3, 4), torch.full((2, 3), -100))
