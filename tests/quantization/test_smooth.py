"""SmoothQuant: the same function, the paper's factors, and a gain where channels stick out behind a norm."""

from __future__ import annotations

import pytest
import torch
from nets_modern import EncoderLayer
from torch import Tensor, nn

from qtool.evaluate import sqnr_db
from qtool.quantization.algorithms import Declined, Subject
from qtool.quantization.algorithms.smooth import apply, best_alpha, factors, output_error, place_of, smooth
from qtool.quantization.capture import aten, copied, parameter
from qtool.quantization.matrices import flatten_linears
from qtool.quantization.placement import Placement
from qtool.quantization.stage import float_form, quantize
from qtool.quantization.targets import get_target
from qtool.recipe import QuantizeConfig

WIDTH = 32


def transformer(outliers: float = 60.0) -> nn.Module:
    """Two encoder layers whose norms blow three channels up, which the weights behind them take back."""
    torch.manual_seed(0)
    model = nn.Sequential(EncoderLayer(WIDTH, 4), EncoderLayer(WIDTH, 4), nn.Flatten(), nn.Linear(6 * WIDTH, 10)).eval()
    with torch.no_grad():
        for layer in list(model)[:2]:
            for norm, linear in ((layer.norm1, layer.attention.qkv), (layer.norm2, layer.mlp[0])):
                norm.weight[[3, 11, 20]] *= outliers
                linear.weight[:, [3, 11, 20]] /= outliers
    return model


def tokens(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, 6, WIDTH, generator=torch.Generator().manual_seed(seed))


BATCHES = [tokens(16), tokens(16, seed=1)]


def subject(model: nn.Module) -> Subject:
    graph = float_form(model, BATCHES[0])
    flatten_linears(graph)
    return Subject(graph, graph, Placement(graph, get_target("ort-cpu")), BATCHES)


def test_the_function_stays_and_every_norm_is_changed() -> None:
    given = subject(transformer())
    before = copied(given.graph)
    smooth(given)
    test = tokens(8, seed=5)
    torch.testing.assert_close(given.graph(test), before(test), rtol=1e-4, atol=1e-4)
    assert given.notes[-1].startswith("smooth: rescaled 4 of 4 norms")


def test_factors_are_the_papers() -> None:
    given = subject(transformer())
    norm = next(n for n in given.graph.graph.nodes if n.target is aten.layer_norm.default)
    place = place_of(norm, given)
    place.low, place.high = -torch.rand(WIDTH) - 0.1, torch.rand(WIDTH) + 0.1
    weights = torch.cat([parameter(given.graph, r.args[1]) for r in place.readers])
    wanted = torch.maximum(-place.low, place.high) ** 0.7 / weights.abs().amax(0) ** 0.3
    found = factors(given.graph, place, 0.7)
    torch.testing.assert_close(found, wanted / wanted.log().mean().exp())


def test_the_error_that_is_judged_is_that_of_a_quantized_layer() -> None:
    given = subject(transformer())
    norm = next(n for n in given.graph.graph.nodes if n.target is aten.layer_norm.default)
    place = place_of(norm, given)
    x = torch.randn(500, WIDTH)
    place.kept, place.low, place.high = [x], x.amin(0), x.amax(0)
    step = float(x.max() - x.min()) / 255
    zero = round(-float(x.min()) / step)
    rounded = torch.fake_quantize_per_tensor_affine(x, step, zero, 0, 255)
    wanted = 0.0
    for reader in place.readers:
        weight = parameter(given.graph, reader.args[1])
        scale = weight.abs().amax(1) / 127
        zeros = torch.zeros(len(weight), dtype=torch.int32)
        made = torch.fake_quantize_per_channel_affine(weight, scale, zeros, 0, -127, 127)
        outputs = x @ weight.T
        wanted += float((outputs - rounded @ made.T).var(0).sum() / outputs.var(0).sum())
    assert output_error(given.graph, place, torch.ones(WIDTH), 255) == pytest.approx(wanted, rel=1e-3)


def test_the_output_comes_much_nearer_to_float_where_channels_stick_out() -> None:
    model, test = transformer(), tokens(64, seed=9)
    found = {}
    for algorithms in (None, ("smooth",)):
        quantized = quantize(model, QuantizeConfig(algorithms=algorithms), example=BATCHES[0], calibration=BATCHES)
        with torch.no_grad():
            found[algorithms] = sqnr_db(model(test), quantized(test))
    assert found["smooth",] > found[None] + 6


def test_a_norm_that_would_not_gain_is_left_and_so_is_one_that_others_read() -> None:
    given = subject(transformer(outliers=1.0))
    norm = next(n for n in given.graph.graph.nodes if n.target is aten.layer_norm.default)
    place = place_of(norm, given)
    x = torch.rand(500, WIDTH) * 2 - 1  # flat already, and so are the weights
    place.kept, place.low, place.high = [x], x.amin(0), x.amax(0)
    for reader in place.readers:
        parameter(given.graph, reader.args[1]).data.uniform_(-1, 1)
    assert best_alpha(given.graph, place, 255) is None
    alone = nn.Sequential(nn.LayerNorm(WIDTH), nn.GELU(), nn.Linear(WIDTH, 3)).eval()
    with pytest.raises(Declined, match="no norm is read by integer linear layers alone"):
        smooth(refused := subject(alone))
    assert refused.notes == ["smooth: 1 of 1 norms left as they are: gelu reads it"]


def test_what_is_applied_is_undone_by_its_inverse() -> None:
    given = subject(transformer())
    norm = next(n for n in given.graph.graph.nodes if n.target is aten.layer_norm.default)
    place = place_of(norm, given)
    before = parameter(given.graph, norm.args[2]).clone()
    scales = torch.rand(WIDTH) + 0.5
    apply(given.graph, place, scales)
    torch.testing.assert_close(parameter(given.graph, norm.args[2]), before / scales)
    apply(given.graph, place, 1 / scales)
    torch.testing.assert_close(parameter(given.graph, norm.args[2]), before)
