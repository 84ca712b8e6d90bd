"""Verification on samples: the error of a reader is that of its rounded form, and what does not help is not done."""

from __future__ import annotations

import sys

import pytest
import torch
from test_equalize import BATCHES, subject
from torch import fx, nn

from qtool.graphs.edits import copied
from qtool.quantization.algorithms.equalize import equalize
from qtool.quantization.algorithms.streams import Stream, find_streams
from qtool.quantization.algorithms.verify import Samples, parted, rounded, rounded_rows


def pair(activation: type[nn.Module] = nn.ReLU, *behind: nn.Module) -> nn.Sequential:
    """Two layers, the third channel between them 50 times as large as the others."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 1), activation(), *(behind or [nn.Conv2d(8, 5, 3)]), nn.Flatten()).eval()
    with torch.no_grad():
        model[0].weight[2] *= 50
        model[0].bias[2] *= 50
        for layer in behind or [model[2]]:
            if isinstance(layer, nn.Conv2d):
                layer.weight[:, 2] /= 50
    return model


def eight_bits(stream: Stream) -> dict[fx.Node, int]:
    """The largest integers of weights in 8 bits."""
    return dict.fromkeys(stream.consumers, 127)


def test_rounding_is_that_of_an_affine_and_of_a_symmetric_grid() -> None:
    x, weight = torch.randn(40, 7) + 0.5, torch.randn(6, 7)
    step = float(x.max() - x.min()) / 255
    wanted = torch.fake_quantize_per_tensor_affine(x, step, round(-float(x.min()) / step), 0, 255)
    torch.testing.assert_close(rounded(x, 1.0), wanted)
    scale, zeros = weight.abs().amax(1) / 127, torch.zeros(6, dtype=torch.int32)
    torch.testing.assert_close(
        rounded_rows(weight), torch.fake_quantize_per_channel_affine(weight, scale, zeros, 0, -127, 127)
    )


def test_a_narrower_grid_clips_both_ends() -> None:
    """Half the width ends at half of each end, in as many steps."""
    values = torch.linspace(-2, 4, 400)
    step = 3 / 255
    zero = round(1 / step)
    wanted = ((values / step).round() + zero).clamp(0, 255).sub(zero) * step
    torch.testing.assert_close(rounded(values, 0.5), wanted, rtol=1e-5, atol=1e-6)
    assert rounded(values, 0.5).min() == pytest.approx(-1, abs=step)


@pytest.mark.parametrize(("size", "samples"), [(64, 16), (2, 64)])
def test_of_small_values_more_samples_are_held_out(size: int, samples: int) -> None:
    """8 channels of 64 × 64 in 16 samples are values enough; of 2 × 2 all that are held out are too few."""
    batches = [torch.rand(32, 3, size + 2, size + 2) for _ in range(8)]
    given = subject(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 5, 1)).eval(), batches)
    stream = find_streams(given.graph)[0]
    kept = Samples(given.graph, [stream], batches, eight_bits(stream)).kept
    assert [len(value) for value in kept.values()] == [samples]


def test_the_error_is_that_of_a_rounded_reader_and_falls_with_the_right_scales() -> None:
    model = pair()
    given = subject(model, BATCHES)
    stream = find_streams(given.graph)[0]
    samples = Samples(given.graph, [stream], BATCHES, eight_bits(stream))
    with torch.no_grad():
        x = model[1](model[0](torch.cat([BATCHES[0][18:], BATCHES[1][6:]])))
        wanted = nn.functional.conv2d(x, model[2].weight)
        errors = []
        for width in (1.0, 0.8, 0.6, 0.45, 0.3):
            gap = nn.functional.conv2d(rounded(x, width), rounded_rows(model[2].weight)) - wanted
            errors.append(gap.var((0, 2, 3), correction=0).mean() / wanted.var((0, 2, 3), correction=0).mean())
    plain = samples.error(stream, torch.ones(8), {})
    assert plain == pytest.approx(float(min(errors)), rel=1e-3)
    level = torch.ones(8)
    level[2] = 1 / 50
    assert samples.error(stream, level, {}) < 0.2 * plain


@pytest.mark.parametrize("activation", [nn.ReLU, nn.ReLU6])
def test_zeros_put_around_an_image_are_those_that_a_convolution_pads_with(activation: type[nn.Module]) -> None:
    inside, outside = pair(activation, nn.Conv2d(8, 5, 3, padding=1)), pair(activation, nn.ZeroPad2d(1))
    outside.insert(3, nn.Conv2d(8, 5, 3))
    outside[3].load_state_dict(inside[2].state_dict())
    errors, scales = [], torch.linspace(0.2, 2.0, 8)
    for model in (inside, outside):
        given = subject(model, BATCHES)
        stream = find_streams(given.graph)[0]
        assert not stream.blocked
        errors.append(Samples(given.graph, [stream], BATCHES, eight_bits(stream)).error(stream, scales, {}))
    assert errors[0] == pytest.approx(errors[1], rel=1e-6)
    before = outside(BATCHES[0]).detach()
    equalize(given)
    assert "equalize: rescaled 1 and shifted 0 of 2 paths; left as they are: 1 (flatten reads it)" in given.notes
    torch.testing.assert_close(given.graph(BATCHES[0]), before, rtol=1e-4, atol=1e-4 * float(before.abs().max()))


@pytest.mark.parametrize("padding", [nn.ConstantPad2d(1, 2.0), nn.ReflectionPad2d(1)])
def test_other_padding_blocks_a_path(padding: nn.Module) -> None:
    stream = find_streams(subject(pair(nn.ReLU, padding, nn.Conv2d(8, 5, 3)), BATCHES).graph)[0]
    assert stream.blocked == ["pad reads it"]


def test_what_is_held_out_is_a_quarter_of_every_batch_and_never_nothing() -> None:
    batches = [torch.arange(8), torch.arange(8, 11), torch.arange(11, 12)]
    kept = [batch.tolist() for batch in parted(batches, held=False)]
    held = [batch.tolist() for batch in parted(batches, held=True)]
    assert kept == [[0, 1, 2, 3, 4, 5], [8, 9], [11]]
    assert held == [[6, 7], [10], [11]]


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.ReLU6()])
def test_what_an_activation_clips_of_unseen_values_counts(activation: nn.Module) -> None:
    """Weights and steps that cost nothing: what is left is what the changed activation does to the float function."""
    model = nn.Sequential(nn.Conv2d(3, 4, 1), activation, nn.Conv2d(4, 2, 1), nn.Flatten()).eval()
    with torch.no_grad():
        model[0].bias += 1.0
    given = subject(model, BATCHES)
    stream = find_streams(given.graph)[0]
    samples = Samples(given.graph, [stream], BATCHES, eight_bits(stream))
    ones, reader = torch.ones(4), stream.consumers[0]
    assert samples.error(stream, ones, {}) < 1e-3
    if isinstance(activation, nn.ReLU6):
        assert samples.error(stream, 8 * ones, {}) > 0.1
    else:
        moved = {value: torch.ones(4) for value in stream.values}
        assert reader.args[0] in moved
        assert samples.error(stream, ones, moved) > 0.1


def test_a_change_that_readers_do_no_better_with_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules[equalize.__module__]
    bad = torch.ones(8)
    bad[2] = 20.0  # the channel that sticks out, further
    monkeypatch.setattr(module.NoiseModel, "best", lambda self: bad)
    monkeypatch.setattr(module, "shifts", lambda *_: {})
    given = subject(pair(), BATCHES)
    before = copied(given.graph)
    equalize(given)
    for (name, found), (_, wanted) in zip(given.graph.state_dict().items(), before.state_dict().items(), strict=True):
        assert torch.equal(found, wanted), name
    assert given.notes[-1].endswith("1 (its readers did no better on samples)")
