from __future__ import annotations

import numpy as np
import onnx_files
import pytest
import torch

from qtool import evaluate
from qtool.benchmarking.accuracy import Scores, judge, predict, unjudged
from qtool.errors import QtoolError, QtoolWarning
from qtool.intervals import mean_interval
from qtool.runtimes import open_session
from qtool.runtimes.base import TensorInfo


@pytest.fixture(scope="module")
def sessions(files):
    return {name: open_session(path) for name, path in files.items()}


def test_predictions_are_those_of_the_whole_set_at_once(sessions, batches):
    outputs, targets = predict(sessions, batches(16))
    (images, labels) = next(iter(batches(40)))
    for name, session in sessions.items():
        np.testing.assert_allclose(outputs[name], session.run({"x": images})[0], rtol=1e-5, atol=1e-6)
    assert targets.tolist() == labels.tolist()


def test_the_number_of_samples_can_be_limited_within_a_batch(sessions, batches):
    outputs, targets = predict(sessions, batches(16), samples=20)
    assert len(outputs["fp32"]) == len(targets) == 20


@pytest.mark.parametrize("first", [True, False])
def test_targets_of_some_batches_alone_are_told(first, sessions, batches):
    given = [(images, labels if (at == 0) == first else None) for at, (images, labels) in enumerate(batches(16))]
    without = sum(labels is None for _, labels in given)
    with pytest.warns(QtoolWarning, match=f"{without} of {len(given)} batches have no targets: top-1 is not"):
        assert predict(sessions, given)[1] is None


@pytest.mark.parametrize(("kind", "compared"), [("int64", True), ("float32", False)])
def test_outputs_agree_where_one_of_several_targets_is_their_class(kind, compared, sessions, batches):
    given = (
        (images, {"far": np.zeros((len(labels), 3), np.float32), "near": labels.astype(kind)})
        for images, labels in batches(16)
    )
    outputs, targets = predict(sessions, given, samples=20)
    assert [tuple(each.shape) for each in targets] == [(20, 3), (20,)]
    found = judge(outputs, targets, reference="fp32")["int8"]
    assert ("agreement" in found) == ("kl" in found) == compared
    assert found["sqnr_db"] > 10


@pytest.mark.parametrize("fixed", [1, 6, 16, 64])
def test_files_with_a_fixed_batch_give_the_same(sessions, batches, tmp_path, fixed):
    session = open_session(onnx_files.save_float(tmp_path / "fixed.onnx", batch=fixed))
    outputs, _ = predict({"free": sessions["fp32"], "fixed": session}, batches(16))
    torch.testing.assert_close(outputs["fixed"], outputs["free"])


def test_a_runtime_that_compiles_for_each_size_is_fed_one_size(sessions, batches):
    sizes = []

    class Recorded:
        inputs, outputs = sessions["fp32"].inputs, sessions["fp32"].outputs

        def run(self, feeds):
            sizes.append(len(feeds["x"]))
            return sessions["fp32"].run(feeds)

    outputs, _ = predict({"fp32": Recorded()}, batches(16), whole=16)
    assert sizes == [16, 16, 16]
    assert len(outputs["fp32"]) == 40


def test_no_data_is_an_error(sessions):
    with pytest.raises(QtoolError, match="at least one batch"):
        predict(sessions, [])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_in_the_data_is_told_by_its_sample_and_not_as_the_files_fault(sessions, batches, bad):
    damaged = [(images.copy(), labels) for images, labels in batches(16)]
    damaged[1][0][3, 0, 0, 0] = bad
    with pytest.raises(QtoolError, match=r"benchmark data, sample 19: expected finite inputs; got NaN or infinity"):
        predict({"int8": sessions["int8"], "fp32": sessions["fp32"]}, damaged, reference="fp32")


def test_data_without_labels_gives_agreement_only(sessions, batches):
    unlabelled = ((images, None) for images, _ in batches(20))
    told = judge(*predict(sessions, unlabelled), reference="fp32")
    assert "top1" not in told["int8"]
    assert 0 <= told["int8"]["agreement"] <= 1


def test_targets_that_are_no_tensor_leave_the_outputs_to_be_compared(sessions, batches):
    boxes = ((images, [{"boxes": torch.rand(2, 4)} for _ in images]) for images, _ in batches(20))
    outputs, targets = predict(sessions, boxes)
    assert targets is None
    assert len(outputs["fp32"]) == 40


def test_classes_that_the_outputs_do_not_have_are_refused(sessions, batches):
    outputs, targets = predict(sessions, batches(20))
    with pytest.raises(QtoolError, match=r"classes from 0 to \d+, as the outputs have; got \d to 77"):
        judge(outputs, torch.where(targets == targets[0], 77, targets), reference="fp32")


def test_targets_that_are_not_counted_have_no_part(sessions, batches):
    outputs, targets = predict(sessions, batches(20))
    some = torch.where(torch.arange(len(targets)) % 2 == 0, targets, -100)
    told = judge(outputs, some, reference="fp32")["int8"]
    assert told == judge({k: v[::2] for k, v in outputs.items()}, targets[::2], reference="fp32")["int8"]


def test_targets_that_say_no_class_are_told(sessions, batches):
    outputs, targets = predict(sessions, batches(20))
    assert unjudged(outputs["fp32"], targets) is None
    assert unjudged(outputs["fp32"], None) is None
    one_hot = torch.nn.functional.one_hot(targets, outputs["fp32"].shape[1])
    for wrong in (one_hot, targets[:7], targets.float()):
        assert f"targets {str(wrong.dtype)[6:]} {tuple(wrong.shape)} are no" in unjudged(outputs["fp32"], wrong)


def test_judging_is_evaluates_comparison(sessions, batches):
    outputs, targets = predict(sessions, batches(16))
    told = judge(outputs, targets, reference="fp32")
    assert told["int8"] == evaluate.compare(outputs["fp32"], outputs["int8"], targets)
    assert told["fp32"]["agreement"] == 1.0


def test_targets_that_are_no_classes_and_outputs_that_are_no_logits_are_compared_by_sqnr():
    base = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0))
    told = judge({"fp32": base, "int8": base + 0.1}, torch.zeros(4, 5), reference="fp32")
    assert told["int8"] == {"num_samples": 4, "sqnr_db": evaluate.sqnr_db(base, base + 0.1)}
    told = judge({"fp32": base[:, 0], "int8": base[:, 0]}, torch.zeros(4), reference="fp32")
    assert "top1" not in told["int8"]


@pytest.mark.parametrize("targets", [None, torch.tensor([0, 1, 1])])
def test_of_one_number_for_each_sample_nothing_agrees_by_itself(targets):
    """A regression, or a probability: its arg-max is always the same, and its softmax always 1."""
    wanted, got = torch.tensor([[0.1], [2.0], [-1.0]]), torch.tensor([[-5.0], [7.0], [9.0]])
    found = judge({"a": wanted, "b": got}, targets, reference="a")["b"]
    assert set(found) == {"num_samples", "sqnr_db"}


def test_of_classes_the_share_that_is_equal_is_told():
    wanted = torch.arange(24).reshape(2, 3, 4)
    got = wanted.clone()
    got[0, 0, :3] += 100
    found = judge({"a": wanted, "b": got}, None, reference="a")["b"]
    assert found == {"num_samples": 2, "agreement": 1 - 3 / 24}


def test_sequences_with_their_tokens_are_compared_token_by_token():
    base, noise = torch.randn(2, 4, 3, 5, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[0, 1, -100]] * 4)
    told = judge({"fp32": base, "int8": base + noise}, targets, reference="fp32")["int8"]
    counted = (base[:, :2].argmax(-1) == (base + noise)[:, :2].argmax(-1)).double().mean().item()
    assert told["num_samples"] == 8
    assert told["agreement"] == counted
    assert "top1" in told


class Echo:
    """Gives its input, and a little noise, as logits of tokens; or their argmax."""

    outputs = ()

    def __init__(self, noise=0.0, whole=False):
        self.inputs, self.noise, self.whole = [TensorInfo("x", "float32", ("batch", "length", 5))], noise, whole

    def run(self, feeds):
        value = feeds["x"] + self.noise * np.sin(np.arange(feeds["x"].size, dtype=np.float32)).reshape(feeds["x"].shape)
        return [value.argmax(-1) if self.whole else value]


def ragged(labelled):
    generator = torch.Generator().manual_seed(0)
    for length in (4, 7, 3):
        target = torch.randint(0, 5, (6, length), generator=generator)
        yield torch.randn(6, length, 5, generator=generator), target if labelled else None


@pytest.mark.parametrize("labelled", [False, True])
def test_batches_of_other_lengths_are_compared_where_there_is_something(labelled):
    outputs, targets = predict({"fp32": Echo(), "int8": Echo(0.5)}, ragged(labelled))
    found = judge(outputs, targets, reference="fp32")["int8"]
    other = [Echo(0.5).run({"x": value.numpy()})[0].reshape(-1, 5) for value, _ in ragged(True)]
    rows = torch.cat([value.reshape(-1, 5) for value, _ in ragged(True)]), torch.from_numpy(np.concatenate(other))
    labels = torch.cat([target.flatten() for _, target in ragged(True)])
    plain = evaluate.compare(*rows, labels if labelled else None)
    names = ["sqnr_db", *(["num_samples", "agreement", "kl", "top1", "top1_drop"] if labelled else [])]
    assert {name: found[name] for name in names} == pytest.approx({name: plain[name] for name in names})


def test_classes_of_batches_of_other_lengths_are_refused():
    with pytest.raises(QtoolError, match=r"outputs of one size; got \(3,\) and \(4,\); pad all batches"):
        predict({"fp32": Echo(whole=True)}, ragged(labelled=True))


class TimeFirst(Echo):
    """Logits as CTC takes them, time × batch × classes, and a single number."""

    outputs = (TensorInfo("y", "float32", (4, "batch", 5)), TensorInfo("z", "float32", ()))

    def run(self, feeds):
        return [super().run(feeds)[0].swapaxes(0, 1), np.array(7, np.float32)]


def test_samples_are_on_the_axis_where_the_file_has_them():
    logits, seen = torch.randn(6, 4, 5, generator=torch.Generator().manual_seed(0)), []

    class Seen(Margin):
        def loss(self, output, target):
            seen.append(output)
            return torch.zeros(()), 1.0

    batches = [(logits[:4], torch.zeros(4)), (logits[4:], torch.zeros(2))]
    outputs, _ = predict({"fp32": TimeFirst()}, batches, samples=5, scores=Scores(Seen()))
    torch.testing.assert_close(outputs["fp32"], logits[:5])
    torch.testing.assert_close(seen[0][0], logits[:4].swapaxes(0, 1))
    assert [float(number) for _, number in seen[:1]] == [7]


def test_a_file_without_a_batch_answers_one_sample_at_a_time():
    class Alone:
        inputs = (TensorInfo("x", "float32", (3, 8, 8)),)
        outputs = (TensorInfo("y", "float32", (10,)),)

        def run(self, feeds):
            return [feeds["x"].ravel()[:10]]

    images = torch.randn(4, 3, 8, 8)
    outputs, targets = predict({"fp32": Alone()}, [(image, index) for index, image in enumerate(images)])
    torch.testing.assert_close(outputs["fp32"], images.flatten(1)[:, :10])
    assert targets.tolist() == [0, 1, 2, 3]


def test_rows_of_each_sample_are_all_compared():
    class Flat(Echo):
        def run(self, feeds):
            return [super().run(feeds)[0].reshape(-1, 5)]

    value = torch.randn(3, 4, 5)
    outputs, targets = predict({"fp32": Flat()}, [(value, torch.arange(12))], samples=2)
    torch.testing.assert_close(outputs["fp32"], value[:2].reshape(-1, 5))
    assert targets.tolist() == list(range(8))


def test_segmentations_with_their_pixels_are_compared_pixel_by_pixel():
    base, noise = torch.randn(2, 4, 3, 5, 6, generator=torch.Generator().manual_seed(0))
    targets = torch.zeros(4, 5, 6, dtype=torch.int64)
    told = judge({"fp32": base, "int8": base + noise}, targets, reference="fp32")["int8"]
    assert told["num_samples"] == 120
    assert told["agreement"] == (base.argmax(1) == (base + noise).argmax(1)).double().mean().item()
    assert told["top1_reference"] == (base.argmax(1) == 0).double().mean().item()


def test_classes_that_are_masked_in_both_are_no_fault():
    base = torch.randn(4, 3)
    masked = base.masked_fill(torch.tensor([False, True, False]), float("-inf"))
    assert judge({"fp32": masked, "int8": masked}, None, reference="fp32")["int8"]["kl"] == 0.0
    with pytest.raises(QtoolError, match="'int8': expected finite outputs"):
        judge({"fp32": base, "int8": masked}, None, reference="fp32")


def test_another_comparison_can_be_given():
    outputs = {"fp32": torch.zeros(2, 2), "int8": torch.ones(2, 2)}
    told = judge(outputs, None, reference="fp32", compare=lambda a, b, t: {"off": float((b - a).mean())})
    assert told == {"fp32": {"off": 0.0}, "int8": {"off": 1.0}}


@pytest.mark.parametrize(
    ("other", "words"),
    [(torch.full((2, 3), float("nan")), "finite"), (torch.zeros(2, 4), "outputs like those of 'fp32'")],
)
def test_outputs_that_cannot_be_compared_are_refused(other, words):
    with pytest.raises(QtoolError, match=words):
        judge({"fp32": torch.zeros(2, 3), "int8": other}, None, reference="fp32")


class Margin:
    """How far the right class is ahead, and the share that is, from outputs that are packed as a model's."""

    name, metric, higher_is_better = "margin", "margin", True

    def loss(self, output, target):
        ahead = output["logits"].gather(1, target[:, None])[:, 0] - output["logits"].mean(1)
        return -ahead.sum(), float(len(target))

    def metrics(self, output, target):
        return {"margin": -self.loss(output, target)[0], "right": (output["logits"].argmax(1) == target).sum()}

    def finish(self, means):
        return means | {"twice": 2 * means["margin"]}


def test_a_task_of_its_own_judges_every_variant(sessions, batches):
    scores = Scores(Margin(), {"logits": torch.zeros(2, 3)})
    outputs, targets = predict(sessions, batches(16), samples=25, scores=scores)
    found = scores.results("fp32")
    assert not scores.failure
    for name, values in outputs.items():
        margin = float((values.gather(1, targets[:, None])[:, 0] - values.mean(1)).mean())
        right = float((values.argmax(1) == targets).double().mean())
        wanted = {"loss": -margin, "margin": margin, "right": right, "twice": 2 * margin}
        assert found[name]["metrics"] == pytest.approx(wanted, rel=1e-5)
        assert found[name]["metrics_reference"] == found["fp32"]["metrics"]
        assert (found[name]["metric"], found[name]["higher_is_better"]) == ("margin", True)
        if name == "fp32":
            assert "metric_change_ci95" not in found[name]
            continue
        apart = [(v.gather(1, targets[:, None])[:, 0] - v.mean(1)).double() for v in (outputs["fp32"], values)]
        assert found[name]["metric_change_ci95"] == pytest.approx(mean_interval(apart[1] - apart[0]), rel=1e-3)


class Apart(Margin):
    """What a batch as a whole is judged by: how far its samples are from one another."""

    def loss(self, output, target):
        return output["logits"].std(0, correction=0).sum() * len(target), float(len(target))

    def metrics(self, output, target):
        return {"margin": self.loss(output, target)[0]}


class Whole(Apart):
    """One that takes no single sample at all."""

    def metrics(self, output, target):
        if len(target) < 2:
            raise ValueError("two samples, please")
        return super().metrics(output, target)


class Rare(Margin):
    """The share of right answers among the lower classes; a draw without any of these cannot be judged."""

    def __init__(self, below):
        self.below = below

    def metrics(self, output, target):
        low = target < self.below
        right = (output["logits"].argmax(1) == target) & low
        return {"low": low.sum(), "right": right.sum()} if low.any() else {}

    def finish(self, means):
        return {"margin": means["right"] / means["low"]}


def test_a_metric_that_some_samples_do_not_have_is_a_sum_over_the_others(sessions, batches):
    scores = Scores(Rare(5), {"logits": torch.zeros(2, 3)})
    outputs, targets = predict(sessions, batches(16), samples=40, scores=scores)
    found = scores.results("fp32")
    assert not scores.failure
    low = targets < 5
    for name, values in outputs.items():
        wanted = float((values.argmax(1) == targets)[low].double().mean())
        assert found[name]["metrics"]["margin"] == pytest.approx(wanted)
        assert ("metric_change_ci95" in found[name]) == (name != "fp32")


def test_draws_that_cannot_be_judged_leave_the_figures_without_an_interval():
    scores = Scores(Rare(1), {"logits": torch.zeros(2, 3)})
    for name in ("fp32", "int8"):
        scores.add(name, [np.eye(3, dtype=np.float32)], torch.tensor([0, 1, 1]))
    found = scores.results("fp32")
    assert found["int8"]["metrics"] == {"margin": 1.0}
    assert "metric_change_ci95" not in found["int8"]


@pytest.mark.parametrize("task", [Apart(), Whole()])
def test_what_is_no_sum_of_samples_is_measured_without_an_interval(task, sessions, batches):
    scores = Scores(task, {"logits": torch.zeros(2, 3)})
    predict(sessions, batches(16), samples=32, scores=scores)
    found = scores.results("fp32")
    assert not scores.failure
    assert all(entry["metrics"]["margin"] > 0 and "metric_change_ci95" not in entry for entry in found.values())
    assert ("margin has no interval: it is " in scores.apart) == (type(task) is Apart)


def test_outputs_of_an_unknown_structure_are_a_tensor_or_a_tuple_of_them():
    class Seen(Margin):
        def loss(self, output, target):
            seen.append(output)
            return torch.zeros(()), 1.0

        def metrics(self, output, target):
            return {}

    seen = []
    Scores(Seen()).add("fp32", [np.ones((2, 3), np.float16)], torch.zeros(2))
    Scores(Seen()).add("fp32", [np.ones((2, 3)), np.ones(2, np.int64)], torch.zeros(2))
    assert seen[0].dtype == torch.float32
    assert isinstance(seen[-1], tuple)
    assert seen[-1][1].dtype == torch.int64


def test_outputs_of_another_number_than_the_model_has_are_judged_as_they_are():
    class Any(Margin):
        def loss(self, output, target):
            assert isinstance(output, torch.Tensor)
            return output.sum(), 1.0

        def metrics(self, output, target):
            return {"margin": output.sum()}

    scores = Scores(Any(), {"logits": torch.zeros(2, 3), "sizes": torch.zeros(2)})
    scores.add("fp32", [np.ones((2, 3), np.float32)], torch.zeros(2))
    assert scores.results("fp32")["fp32"]["metrics"]["margin"] == 6


def test_a_task_that_cannot_judge_says_why_and_the_outputs_are_compared_all_the_same(sessions, batches):
    scores = Scores(Margin())  # no dict: the task fails
    outputs, _ = predict(sessions, batches(16), scores=scores)
    assert scores.results("fp32") == {}
    assert "task 'margin'" in scores.failure
    assert all(len(values) == 40 for values in outputs.values())


def test_targets_that_are_nan_are_told_where_the_metric_becomes_it():
    class Difference(Margin):
        def loss(self, output, target):
            return (output - target).square().sum(), 1.0

        def metrics(self, output, target):
            return {"margin": (output - target).abs().nansum() if self.lenient else (output - target).abs().sum()}

    target = torch.tensor([[0.0, torch.nan]])
    for lenient in (False, True):
        task = Difference()
        task.lenient = lenient
        scores = Scores(task)
        scores.add("fp32", [np.ones((1, 2), np.float32)], target)
        assert bool(scores.results("fp32")) == lenient
        assert ("got NaN, and so 'margin'; clean the data" in scores.failure) != lenient


def test_without_targets_no_task_is_asked(sessions, batches):
    scores = Scores(Margin())
    predict(sessions, ((images, None) for images, _ in batches(20)), scores=scores)
    assert scores.results("fp32") == {}
    assert not scores.failure
