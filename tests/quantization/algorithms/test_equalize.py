"""Equalization and absorption: the same function, better ranges, and a reason where a path cannot be rescaled."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import numpy as np
import pytest
import torch
from conv_nets import build, example, nets
from hard_nets import form_of, hard_mobilenet, images
from hypothesis import HealthCheck, given, settings
from test_bias import values_of
from torch import Tensor, nn
from torch.nn import functional as F

from qtool.errors import UsageError
from qtool.evaluate import sqnr_db
from qtool.graphs.edits import parameter
from qtool.graphs.shapes import batch_symbols
from qtool.nested import call, tensors
from qtool.quantization.algorithms import Declined, Subject, channels_seen
from qtool.quantization.algorithms.absorb import shifts
from qtool.quantization.algorithms.channels_seen import Seen, observe
from qtool.quantization.algorithms.equalize import NoiseModel, equalize, output_gains, rescale
from qtool.quantization.algorithms.streams import find_streams
from qtool.quantization.algorithms.verify import parted
from qtool.quantization.capturing.float_form import FloatForms, float_form
from qtool.quantization.placement import Placement
from qtool.quantization.rewrites.norms import write_norms
from qtool.quantization.stage import quantize
from qtool.quantization.targets import get_target
from qtool.recipe import QatConfig, QuantizeConfig

BATCHES = [images(24), images(8, seed=1)]


def subject(model: nn.Module, batches: list) -> Subject:
    graph = form_of(model, batches[0])
    write_norms(graph)
    return Subject(graph, graph, Placement(graph, get_target("ort-cpu")), batches)


def weight_of(given: Subject, path: str) -> Tensor:
    return parameter(given.graph, next(n for n in given.graph.graph.nodes if n.target == path))


@settings(max_examples=6, suppress_health_check=list(HealthCheck))
@given(nets(most=4))
def test_any_net_computes_the_same_afterwards(net) -> None:
    batches = [example(net, 8, 0), example(net, 8, 1)]
    given = subject(build(net), batches)
    fitted = list(parted(batches, held=False))  # what is held out may go further, and is clipped
    expected = [[output.detach() for output in tensors(call(given.graph, batch))] for batch in fitted]
    try:
        equalize(given)
    except Declined:
        return
    for batch, outputs in zip(fitted, expected, strict=True):
        for found, wanted in zip(tensors(call(given.graph, batch)), outputs, strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4 * max(1.0, float(wanted.abs().max())))


@pytest.mark.parametrize("activation", [nn.ReLU, nn.ReLU6])
def test_channels_of_unlike_size_no_longer_hurt(activation: type[nn.Module]) -> None:
    model, test = hard_mobilenet(activation), images(128, seed=9)
    found, forms = {}, FloatForms(model)
    for algorithms in (None, ("equalize",)):
        config = QuantizeConfig(algorithms=algorithms)
        quantized = quantize(model, config, example=BATCHES[0], calibration=BATCHES, forms=forms)
        with torch.no_grad():
            found[algorithms] = sqnr_db(model(test), quantized(test))
            assert torch.equal(quantized.float_graph(test), model(test))  # the reference is the user's model
    assert found["equalize",] > found[None] + 12
    (told,) = (note for note in quantized.plan.notes if note.startswith("equalize"))
    assert "1 (the graph's output reads it)" in told
    assert int(told.removeprefix("equalize: rescaled ").split()[0]) >= 6


def test_weights_of_few_bits_are_given_less_to_make_up_for() -> None:
    """With the step of 8 bits in mind, 4-bit weights lost 1.3 dB by equalization here."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Conv2d(8, 4, 1)).eval()
    with torch.no_grad():
        model[2].weight[0] *= 4
        model[2].bias[0] *= 4
        model[4].weight[:, 0] /= 4
    batches = [torch.randn(32, 3, 16, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(5)]
    found = {}
    for algorithms in (None, ("equalize",)):
        config = QuantizeConfig(algorithms=algorithms, weight_bits=4, ranges="minmax")
        quantized = quantize(model, config, example=batches[0], calibration=batches[:4])
        with torch.no_grad():
            found[algorithms] = sqnr_db(model(batches[4]), quantized(batches[4]))
    assert found["equalize",] > found[None] + 0.2


@pytest.mark.parametrize("qmax", [127, 7])
def test_the_noise_is_what_its_formula_says(qmax: int) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 6, 3, groups=2), nn.ReLU(), nn.Flatten())
    given = subject(model, BATCHES)
    stream = find_streams(given.graph)[0]
    seen = observe(given.graph, [stream], BATCHES)
    relu = stream.values[1]
    gains = {stream.consumers[0]: torch.tensor([1.0, 2.0, 0.5, 1.0, 1.0, 3.0])}
    noise = NoiseModel(given.graph, stream, seen, gains, [relu], {stream.consumers[0]: qmax})
    scales = torch.tensor([1.0, 3.0, 0.5, 2.0])
    weight, s = model[2].weight.detach().double().numpy(), scales.double().numpy()
    high, square = seen[relu].highest.double().numpy(), seen[relu].square.double().numpy()
    values = torch.cat([values_of(given.graph, relu.name, [batch]) for batch in BATCHES])
    nonzero = values.ne(0).double().mean((0, 2, 3)).numpy()
    step, expected = (high * s).max() / 255, 0.0
    for o in range(6):
        inputs = [0, 1] if o < 3 else [2, 3]
        scaled = np.stack([weight[o, k] / s[i] for k, i in enumerate(inputs)])
        rounded = np.stack([weight[o, k] / s[i] * nonzero[i] ** 0.5 for k, i in enumerate(inputs)])
        signal = sum(9 * s[i] ** 2 * square[i] for i in inputs)
        variance = step**2 / 12 * (rounded**2).sum() + (np.abs(scaled).max() / qmax) ** 2 / 12 * signal
        expected += float(gains[stream.consumers[0]][o]) * variance
    assert float(noise(scales)) == pytest.approx(expected, rel=1e-5)
    best = noise.best()
    for alpha in (0.0, 0.5, 1.0):
        level = torch.from_numpy((high.max() / high) ** alpha).float()
        assert float(noise(best)) <= float(noise(level)) * (1 + 1e-5)


def test_channels_that_were_silent_so_far_are_not_clipped_once_they_speak() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 4)).eval()
    with torch.no_grad():
        model[0].weight[:8] *= torch.logspace(0, 1, 8)[:, None]
        model[2].weight[:, :8] /= torch.logspace(0, 1, 8)
        model[0].weight[8:] = 0.0
        model[0].weight[8:, 0] = torch.linspace(0.5, 1, 16)
        model[0].bias[8:] = -0.1
    usual, unseen = torch.rand(64, 8), torch.rand(64, 8)
    usual[:, 0], unseen[:, 0] = -usual[:, 0], 2 * unseen[:, 0] - 1
    config = QuantizeConfig(algorithms=("equalize",))
    quantized = quantize(model, config, example=usual, calibration=[usual, usual])
    with torch.no_grad():
        assert sqnr_db(model(unseen), quantized(unseen)) > 12  # 6.4 where they are scaled without limit


def test_gains_are_sums_of_squared_weights_backwards() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))
    graph = float_form(model, torch.randn(4, 3))
    streams = find_streams(graph)
    gains = output_gains(graph, streams)
    last, middle = model[4].weight.detach().square(), model[2].weight.detach().square()
    expected = last.sum(0)
    torch.testing.assert_close(gains[streams[1].producers[0]], expected / expected.mean())
    expected = expected @ middle
    torch.testing.assert_close(gains[streams[0].producers[0]], expected / expected.mean())


@pytest.mark.parametrize("scaled", [True, False])
def test_the_batch_stays_open_where_a_layer_has_an_output_for_each_sample(scaled: bool) -> None:
    class Compared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            y = self.layers(x)
            return F.linear(F.linear(y, y).T, y.T)

    graph = float_form(Compared(), torch.randn(4, 3))
    streams = find_streams(graph, scaled=scaled)
    assert batch_symbols(graph.graph)
    assert [(stream.name, bool(stream.blocked)) for stream in streams][:2] == [("layers.0", False), ("layers.2", True)]


def test_a_residual_path_is_one_stream_with_all_its_blocks() -> None:
    given = subject(hard_mobilenet(), BATCHES)
    paths = {stream.name: stream for stream in find_streams(given.graph)}
    assert [n.meta["owner"] for n in paths["blocks.0.project"].producers] == [
        "blocks.0.project", "blocks.1.project", "blocks.2.project",
    ]  # fmt: skip
    assert [n.meta["owner"] for n in paths["blocks.0.project"].consumers] == [
        "blocks.1.expand", "blocks.2.expand", "head.0",
    ]  # fmt: skip
    assert paths["head.0"].consumers[0].meta["owner"] == "linear"  # through pooling and flatten


class Pooled(nn.Module):
    """Two layers, and a pooling of the axis that the first one's channels are in."""

    def __init__(self, first: nn.Module, last: nn.Module, pool) -> None:
        super().__init__()
        self.first, self.last, self.pool = first, last, pool

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.pool(self.first(x).relu(), 3, 1, 1))


@pytest.mark.parametrize(
    ("kind", "pool"),
    [("linear", F.max_pool1d), ("linear", F.avg_pool1d), ("convolution", F.max_pool2d)],
    ids=["maximum", "mean", "images"],
)
def test_channels_that_a_pooling_mixes_are_not_scaled(kind: str, pool) -> None:
    torch.manual_seed(0)
    x, level = torch.randn(16, 16, 16), torch.logspace(-2, 1, 32)[torch.randperm(32)]
    layers = (nn.Linear(16, 32), nn.Linear(32, 8)) if kind == "linear" else (nn.Conv1d(16, 32, 1), nn.Conv1d(32, 8, 1))
    with torch.no_grad():
        for value in layers[0].parameters():
            value.mul_(level.reshape(-1, *[1] * (value.dim() - 1)))
    model = Pooled(*layers, pool).eval()
    config = QuantizeConfig(target="openvino", algorithms=("equalize",), ranges="minmax")
    quantized = quantize(model, config, example=x, calibration=[x, x])
    assert sqnr_db(model(x), quantized(x)) > 30
    (mixed, _) = find_streams(subject(model, [x]).graph)
    assert mixed.blocked == [f"{pool.__name__} reads it"]


def test_relu6_is_never_pushed_beyond_what_was_seen() -> None:
    model = hard_mobilenet(nn.ReLU6)
    given = subject(model, BATCHES)
    stream = find_streams(given.graph)[0]
    seen = observe(given.graph, [stream], BATCHES)
    gains = output_gains(given.graph, find_streams(given.graph))
    qmax = dict.fromkeys(stream.consumers, 127)
    noise = NoiseModel(given.graph, stream, seen, gains, stream.values[1:], qmax)
    before = seen[stream.producers[0]].highest
    assert bool((before * noise.best() <= 6).all())
    assert bool((noise.best() >= 1 / 256).all())
    clipped = {
        node: Seen(*[v + 7 for v in (s.low, s.high, s.highest, s.lowest, s.mean, s.square)], s.nonzero, s.num_samples)
        for node, s in seen.items()
    }
    assert bool((NoiseModel(given.graph, stream, clipped, gains, stream.values[1:], qmax).best() == 1).all())


def test_what_is_seen_is_what_the_definition_gives_whatever_the_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    given = subject(hard_mobilenet(), BATCHES)
    (stream, *_) = find_streams(given.graph)
    value = stream.producers[0]
    assert len(BATCHES[0]) != len(BATCHES[1])
    outputs = [values_of(given.graph, value.name, [batch]) for batch in BATCHES]
    ends = [(y.amin((0, 2, 3)), y.amax((0, 2, 3))) for y in outputs]
    every = torch.cat(outputs)
    for piece in (5, 8, 100):
        monkeypatch.setattr(channels_seen, "PIECE", piece)
        seen = observe(given.graph, [stream], BATCHES)[value]
        wanted = [
            sum(low for low, _ in ends) / 2, sum(high for _, high in ends) / 2, every.amax((0, 2, 3)),
            every.amin((0, 2, 3)), every.mean((0, 2, 3)), every.square().mean((0, 2, 3)),
        ]  # fmt: skip
        found = (seen.low, seen.high, seen.highest, seen.lowest, seen.mean, seen.square)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)
        assert (seen.num_samples, seen.num_batches) == (len(every), 2)


def test_the_more_samples_were_seen_the_less_room_is_left_below_a_relu6() -> None:
    given = subject(hard_mobilenet(nn.ReLU6), BATCHES)
    stream = find_streams(given.graph)[0]
    value = stream.producers[0]
    few, many = (observe(given.graph, [stream], batches)[value] for batches in (BATCHES[:1], BATCHES[:1] * 8))
    assert many.num_samples == 8 * few.num_samples == 8 * len(BATCHES[0])
    torch.testing.assert_close(many.highest, few.highest)
    assert bool((many.reach() <= few.reach()).all())
    assert bool((many.reach() < few.reach()).any())
    assert bool((many.reach() >= many.highest.clamp(min=0)).all())


def test_a_depthwise_and_a_grouped_reader_are_divided_channel_by_channel() -> None:
    for groups, outputs in ((4, 8), (2, 6), (1, 3)):
        model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, outputs, 3, groups=groups)).eval()
        given = subject(model, BATCHES)
        stream, expected = find_streams(given.graph)[0], model(BATCHES[0])
        rescale(given.graph, stream, torch.tensor([0.5, 4.0, 2.0, 8.0]))
        torch.testing.assert_close(given.graph(BATCHES[0]), expected, rtol=1e-5, atol=1e-5)
        assert not torch.equal(weight_of(given, "0.weight"), model[0].weight)


class Path(nn.Module):
    """A path without an activation; ``padding`` of its reader and a constant in its channels to choose."""

    def __init__(self, padding: int = 0, relu: bool = False, offset: float = 5.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 5, 3, padding=padding)
        self.relu = relu
        with torch.no_grad():
            self.first.bias.copy_(torch.tensor([0.0, offset, -offset, 2 * offset]))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.second(y.relu() if self.relu else y).relu().flatten(1)


def test_constants_of_channels_move_into_the_reader() -> None:
    model = Path()
    given = subject(model, BATCHES)
    wanted = model(BATCHES[0])
    equalize(given)
    torch.testing.assert_close(given.graph(BATCHES[0]), wanted, rtol=1e-4, atol=1e-4)
    assert "shifted 1 of" in given.notes[-1]
    fitted = parted(BATCHES, held=False)
    first = observe(given.graph, streams := find_streams(given.graph), fitted)[streams[0].producers[0]]
    assert float((first.low + first.high).abs().max()) < 1e-3 * float(first.high.max())


def test_before_a_relu_only_what_it_never_clips_moves() -> None:
    model = Path(relu=True, offset=6.0)
    given = subject(model, BATCHES)
    stream = find_streams(given.graph)[0]
    seen = observe(given.graph, [stream], BATCHES)
    moved = shifts(stream, {v: s.lowest for v, s in seen.items()}, {v: s.middle for v, s in seen.items()})
    least = torch.cat([F.conv2d(b, model.first.weight, model.first.bias) for b in BATCHES]).amin((0, 2, 3))
    torch.testing.assert_close(moved[stream.producers[0]], least.clamp(min=0).detach())
    equalize(given)
    for batch in parted(BATCHES, held=False):  # what is held out may go further, and is clipped
        torch.testing.assert_close(given.graph(batch), model(batch), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("size", "count"), [(1.0, 1), (1e-4, 0)])
def test_what_is_left_without_constants_is_more_than_float32_can_tell(size: float, count: int) -> None:
    """Without its constants a tensor would be nothing but the rounding of the sums that made it."""
    model = Path(offset=5.0)
    with torch.no_grad():
        model.first.weight *= size
    given = subject(model, BATCHES)
    equalize(given)
    assert f"shifted {count} of" in " ".join(given.notes)


def test_a_reader_that_pads_keeps_the_constants_where_they_are() -> None:
    given = subject(Path(padding=1), BATCHES)
    equalize(given)
    assert "shifted 0 of" in " ".join(given.notes)


class Blocked(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.other, self.last = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if self.kind == "product":
            y = y * self.other(x)
        elif self.kind == "curve":
            y = F.hardswish(y)
        elif self.kind == "concat":
            y = torch.cat([y[:, :2], self.other(x)[:, :2]], 1)
        elif self.kind == "input":
            y = y + x.mean(1, keepdim=True)
        elif self.kind == "shared":
            y = self.last(y)[:, :1] + self.other(x)
        return self.last(y)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("product", "mul reads it"), ("curve", "hardswish reads it"), ("concat", "slice reads it"),
     ("input", "add reads it"), ("shared", "a weight is shared by several layers")],
)  # fmt: skip
def test_what_blocks_a_path_is_said(kind: str, reason: str) -> None:
    given = subject(Blocked(kind), BATCHES)
    with pytest.raises(Declined, match=rf"no path.*\d \({reason}\)"):
        equalize(given)


def test_a_graph_that_computes_with_sizes_is_no_obstacle() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = hard_mobilenet()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x) + torch.arange(x.shape[0])[:, None] * 0.0

    given = subject(Counts(), BATCHES)
    equalize(given)
    assert any(note.startswith("equalize: rescaled") for note in given.notes)


def test_without_data_it_declines() -> None:
    given = subject(hard_mobilenet(), BATCHES)
    given.batches = []
    with pytest.raises(Declined, match="no calibration data"):
        equalize(given)


def test_what_was_changed_is_repeated_with_the_ranges_that_belong_to_it(tmp_path: pathlib.Path) -> None:
    class Levels(nn.Module):
        """The hard net, with a path whose channels lie far from zero and that is shifted."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net, self.first, self.second = hard_mobilenet(nn.ReLU6), nn.Conv2d(3, 8, 1), nn.Conv2d(8, 10, 1)
            self.first.bias.data = torch.linspace(-90, 90, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x) + self.second(self.first(x)).mean((2, 3))

    model, path, test = Levels().eval(), tmp_path / "ranges.json", images(16, seed=3)
    config, forms = QuantizeConfig(algorithms=("equalize",)), FloatForms(model)
    form = quantize(model, config, example=BATCHES[0], calibration=BATCHES, forms=forms)
    assert [note for note in form.plan.notes if "and shifted" in note and "shifted 0" not in note]
    path.write_text(json.dumps(form.ranges))
    again = dataclasses.replace(config, ranges_from=str(path))
    for others in ([], [torch.zeros_like(BATCHES[0])]):
        made = quantize(model, again, example=BATCHES[0], calibration=others, forms=forms)
        assert torch.equal(made(test), form(test))
        assert made.ranges == json.loads(path.read_text())
        assert any(note.startswith("equalize: as saved with the ranges in ") for note in made.plan.notes)
    for changed in ({"algorithms": ("bias",)}, {"algorithms": None}, {"engine": "torch.ao"}, {"mode": "qat"}):
        changed_config = dataclasses.replace(again, **changed)
        with pytest.raises(UsageError, match="--ranges-from: expected equalize among --algorithms"):
            quantize(
                model, changed_config, example=BATCHES[0], qat=lambda *_: None, tuning=QatConfig(freeze_bn=0.5),
                forms=forms,
            )  # fmt: skip


def test_ranges_that_were_not_equalized_are_not_equalized_when_they_are_repeated(tmp_path: pathlib.Path) -> None:
    model, path = hard_mobilenet(nn.ReLU), tmp_path / "ranges.json"
    forms = FloatForms(model)
    plain = quantize(model, QuantizeConfig(algorithms=None), example=BATCHES[0], calibration=BATCHES, forms=forms)
    path.write_text(json.dumps(plain.ranges))
    config = QuantizeConfig(algorithms=("equalize",), ranges_from=str(path))
    made = quantize(model, config, example=BATCHES[0], calibration=BATCHES, forms=forms)
    assert "equalize: as saved with the ranges in 0 of 10 paths" in made.plan.notes
    assert torch.equal(made(BATCHES[0]), plain(BATCHES[0]))


def test_changes_of_a_path_that_is_not_there_are_refused(tmp_path: pathlib.Path) -> None:
    path, x = tmp_path / "ranges.json", BATCHES[0]
    plain = quantize(nn.Conv2d(3, 4, 1), QuantizeConfig(algorithms=None), example=x, calibration=BATCHES)
    path.write_text(json.dumps(plain.ranges | {"other": {"equalize": {"scales": [1.0], "shifts": []}}}))
    config = QuantizeConfig(algorithms=("equalize",), ranges_from=str(path))
    with pytest.raises(UsageError, match="expected a place for what equalize changed at 'other'"):
        quantize(nn.Conv2d(3, 4, 1), config, example=x)
