"""SmoothQuant: the same function, the paper's factors, and a gain where channels stick out behind a norm."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from nets_modern import EncoderLayer
from torch import Tensor, nn

from qtool.errors import QtoolError, UsageError
from qtool.evaluate import sqnr_db
from qtool.form import QuantizedModel
from qtool.graphs.edits import copied, parameter
from qtool.graphs.operators import aten
from qtool.quantization.algorithms import Declined, Subject
from qtool.quantization.algorithms.places import place_of
from qtool.quantization.algorithms.smooth import apply, best_alpha, factors, output_error, smooth
from qtool.quantization.capturing.float_form import FloatForms, float_form
from qtool.quantization.placement import Placement
from qtool.quantization.rewrites.matrices import flatten_linears
from qtool.quantization.stage import quantize
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


@functools.cache
def captured() -> FloatForms:
    """The transformer captured once for all tests; nothing changes it."""
    return FloatForms(transformer())


def of_transformer(*, calibration: Iterable[Tensor] = BATCHES, **options: Any) -> QuantizedModel:
    given: dict[str, Any] = {"example": BATCHES[0], "calibration": calibration, "forms": captured()}
    return quantize(captured().model, QuantizeConfig(**options), **given)


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
    place = place_of(norm)
    place.low, place.high = -torch.rand(WIDTH) - 0.1, torch.rand(WIDTH) + 0.1
    weights = torch.cat([parameter(given.graph, r.args[1]) for r in place.readers])
    wanted = torch.maximum(-place.low, place.high) ** 0.7 / weights.abs().amax(0) ** 0.3
    found = factors(given.graph, place, 0.7)
    torch.testing.assert_close(found, wanted / wanted.log().mean().exp())


def test_the_error_that_is_judged_is_that_of_a_quantized_layer() -> None:
    given = subject(transformer())
    norm = next(n for n in given.graph.graph.nodes if n.target is aten.layer_norm.default)
    place = place_of(norm)
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
        quantized = of_transformer(algorithms=algorithms)
        with torch.no_grad():
            found[algorithms] = sqnr_db(model(test), quantized(test))
    assert found["smooth",] > found[None] + 6


def test_a_norm_that_would_not_gain_is_left_and_so_is_one_that_others_read() -> None:
    given = subject(transformer(outliers=1.0))
    norm = next(n for n in given.graph.graph.nodes if n.target is aten.layer_norm.default)
    place = place_of(norm)
    x = torch.rand(500, WIDTH) * 2 - 1  # flat already, and so are the weights
    place.kept, place.low, place.high = [x], x.amin(0), x.amax(0)
    for reader in place.readers:
        parameter(given.graph, reader.args[1]).data.uniform_(-1, 1)
    assert best_alpha(given.graph, place, 255) is None
    alone = nn.Sequential(nn.LayerNorm(WIDTH), nn.GELU(), nn.Linear(WIDTH, 3)).eval()
    with pytest.raises(Declined, match="no norm is read by integer layers alone"):
        smooth(refused := subject(alone))
    assert refused.notes == ["smooth: 1 of 1 norms left as they are: gelu reads it"]


def test_a_norm_that_has_a_bias_alone_keeps_it() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias, self.linear = nn.Parameter(torch.arange(WIDTH) - 9.0), nn.Linear(WIDTH, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(nn.functional.layer_norm(x, (WIDTH,), None, self.bias))

    with pytest.raises(Declined):
        smooth(given := subject(model := Shifted().eval()))
    torch.testing.assert_close(given.graph(BATCHES[1]), model(BATCHES[1]))
    assert given.notes == ["smooth: 1 of 1 norms left as they are: it has no weights"]


def test_what_is_applied_is_undone_by_its_inverse() -> None:
    given = subject(transformer())
    norm = next(n for n in given.graph.graph.nodes if n.target is aten.layer_norm.default)
    place = place_of(norm)
    before = parameter(given.graph, norm.args[2]).clone()
    scales = torch.rand(WIDTH) + 0.5
    apply(given.graph, place, scales)
    torch.testing.assert_close(parameter(given.graph, norm.args[2]), before / scales)
    apply(given.graph, place, 1 / scales)
    torch.testing.assert_close(parameter(given.graph, norm.args[2]), before)


def test_it_is_a_default_that_says_nothing_where_there_is_no_norm() -> None:
    found = of_transformer()
    assert any(note.startswith("smooth: rescaled 4 of 4 norms") for note in found.plan.notes)
    plain, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval(), torch.rand(4, 3, 8, 8)
    for config in (QuantizeConfig(), QuantizeConfig(effort="best"), QuantizeConfig(engine="torch.ao")):
        notes = quantize(plain, config, example=x, calibration=[x]).plan.notes
        assert not any(note.startswith("smooth") for note in notes)
    asked = quantize(plain, QuantizeConfig(algorithms=("smooth",)), example=x, calibration=[x])
    assert "smooth declined: there is no layer norm" in asked.plan.notes
    floats = of_transformer(weights_only=True)
    assert not any(note.startswith("smooth") for note in floats.plan.notes)


def test_batches_that_can_be_read_once_make_the_same_model() -> None:
    often = of_transformer()
    once = of_transformer(calibration=iter(BATCHES))
    assert torch.equal(often(tokens(8, seed=3)), once(tokens(8, seed=3)))


def test_factors_are_repeated_with_the_ranges_that_belong_to_them(tmp_path: Path) -> None:
    form = of_transformer()
    path = tmp_path / "ranges.json"
    path.write_text(json.dumps(form.ranges))
    again = of_transformer(calibration=(), ranges_from=str(path))
    assert "smooth: as saved with the ranges in 4 of 4 norms" in again.plan.notes
    assert torch.equal(again(tokens(8)), form(tokens(8)))
    assert again.ranges == json.loads(path.read_text())
    for changed in ({"algorithms": ("bias",)}, {"algorithms": None}, {"engine": "torch.ao"}):
        with pytest.raises(UsageError, match="--ranges-from: expected smooth among --algorithms"):
            of_transformer(calibration=(), ranges_from=str(path), **changed)


def test_saved_factors_are_repeated_where_a_layer_behind_the_norm_is_float_now(tmp_path: Path) -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.norm, self.left, self.right = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.left(y := self.norm(x)) + self.right(y)

    model, path = Pair().eval(), tmp_path / "ranges.json"
    model.norm.weight.data[[3, 11]] *= 60
    for linear in (model.left, model.right):
        linear.weight.data[:, [3, 11]] /= 60
    config, rows = QuantizeConfig(algorithms=("smooth",)), [batch.flatten(0, 1) for batch in BATCHES]
    form = quantize(model, config, example=rows[0], calibration=rows)
    path.write_text(json.dumps(form.ranges))
    mixed = QuantizeConfig(algorithms=("smooth",), ranges_from=str(path), overrides={"left": "float"})
    test = tokens(32, seed=4).flatten(0, 1)
    made = quantize(model, mixed, example=rows[0])
    with torch.no_grad():
        assert sqnr_db(model(test), made(test)) > sqnr_db(model(test), form(test)) - 1


@pytest.mark.parametrize("part", [lambda y: y[:, 0], lambda y: y[:, 1:]])
def test_a_norm_of_which_a_part_is_read_is_smoothed(part: Callable[[Tensor], Tensor]) -> None:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(part(self.norm(x)))

    torch.manual_seed(0)
    model = Part().eval()
    model.norm.weight.data[5] = 40
    given = subject(model)
    before = copied(given.graph)
    smooth(given)
    assert given.notes[-1].startswith("smooth: rescaled 1 of 1 norms")
    torch.testing.assert_close(given.graph(BATCHES[1]), before(BATCHES[1]), rtol=1e-4, atol=1e-4)


def test_a_part_of_the_channels_is_a_stranger() -> None:
    class Few(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(self.norm(x)[..., 2])  # 6 tokens of 6 channels: the shape alone would not tell

    graph = float_form(Few().eval(), torch.randn(4, 6, 6))
    flatten_linears(graph)
    with pytest.raises(Declined):
        smooth(Subject(graph, graph, Placement(graph, get_target("ort-cpu")), [torch.randn(4, 6, 6)]))


@pytest.mark.parametrize("turned", [False, True])
def test_a_norm_that_is_written_out_is_one(turned: bool) -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.linear = nn.Parameter(torch.ones(WIDTH)), nn.Linear(WIDTH, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
            return self.linear(self.weight * x if turned else x * self.weight)

    torch.manual_seed(0)
    model = Root().eval()
    model.weight.data[5] = 40
    given = subject(model)
    before = copied(given.graph)
    smooth(given)
    assert given.notes[-1].startswith("smooth: rescaled 1 of 1 norms")
    torch.testing.assert_close(given.graph(BATCHES[1]), before(BATCHES[1]), rtol=1e-4, atol=1e-4)
    weight = next(n for n in given.graph.graph.nodes if n.op == "get_attr" and n.meta["val"].shape == (WIDTH,))
    assert parameter(given.graph, weight)[5] < 20


def test_a_norm_whose_length_is_read_is_smoothed() -> None:
    """Where the length of sequences is left open, attention asks what the norm gives for it."""
    layers = transformer()[:2]
    config = QuantizeConfig(ranges="minmax", algorithms=("smooth",), dynamic_axes=(1,))
    made = quantize(layers, config, example=BATCHES[0], calibration=BATCHES)
    assert any(note.startswith("smooth: rescaled 4 of 4 norms") for note in made.plan.notes)


def test_what_a_few_samples_have_in_common_alone_is_no_reason() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 64)).eval()
    few, new = torch.randn(32, 128).exp(), torch.randn(256, 128).exp()  # some values are far out, in no one channel
    errors = {}
    for algorithms in (None, ("smooth",)):
        config = QuantizeConfig(ranges="minmax", algorithms=algorithms)
        made = quantize(model, config, example=few, calibration=[few[:16], few[16:]])
        errors[algorithms] = sqnr_db(model(new), made(new))
    assert errors["smooth",] > errors[None] - 0.5


class Turned(nn.Module):
    """A norm over channels, which are moved to the front for a convolution."""

    def __init__(self, rank: int, kernel: int, groups: int = 1) -> None:
        super().__init__()
        self.norm, self.rank = nn.LayerNorm(16), rank
        conv = (nn.Conv1d, nn.Conv2d)[rank - 1]
        self.conv = conv(16, 16, kernel, padding=kernel // 2, groups=groups)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return self.conv(y.transpose(1, 2) if self.rank == 1 else y.permute(0, 3, 1, 2))


@pytest.mark.parametrize(("rank", "kernel"), [(1, 1), (1, 3), (2, 1), (2, 3)])
def test_a_norm_before_convolutions_is_smoothed_as_in_a_convnext(rank: int, kernel: int) -> None:
    torch.manual_seed(0)
    model = Turned(rank, kernel).eval()
    with torch.no_grad():
        model.norm.weight[[3, 7]] *= 60
        model.conv.weight[:, [3, 7]] /= 60
    batches = [torch.randn(16, *[6] * rank, 16) for _ in range(3)]
    made = {
        names: quantize(model, QuantizeConfig(algorithms=names), example=batches[0], calibration=batches[:2])
        for names in ((), ("smooth",))
    }
    error = {names: sqnr_db(model(batches[2]), one(batches[2])) for names, one in made.items()}
    assert error[("smooth",)] > error[()] + 10


def test_convolutions_whose_weights_are_not_for_all_channels_are_strangers() -> None:
    x = torch.randn(16, 6, 6, 16)
    graph = float_form(Turned(2, 3, groups=2).eval(), x)
    given = Subject(graph, graph, Placement(graph, get_target("ort-cpu")), [x])
    with pytest.raises(Declined):
        smooth(given)
    assert given.notes == ["smooth: 1 of 1 norms left as they are: conv2d reads it"]


UNITS = 10 ** torch.linspace(-1, 3, 12)
"""Of the columns of a table, or of a series' sensors."""


class Table(nn.Module):
    """Rows of columns in their own units, which the model may normalise by itself."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.net = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 3))
        self.series = nn.Sequential(nn.Conv1d(12, 16, 3, padding=1), nn.ReLU(), nn.Conv1d(16, 3, 3))
        self.few, self.table = nn.Linear(6, 3), nn.Embedding(5, 4)
        self.wide = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 3))
        self.cells = nn.ModuleDict({
            "lstm": nn.LSTM(12, 16, 2, batch_first=True, bidirectional=True), "gru": nn.GRU(12, 16, bias=False),
        })  # fmt: skip
        self.heads = nn.ModuleDict({"lstm": nn.Linear(32, 3), "gru": nn.Linear(16, 3)})
        self.register_buffer("middle", torch.rand(12))
        with torch.no_grad():
            self.net[0].weight /= UNITS
            self.series[0].weight /= UNITS[:, None]
            self.few.weight /= UNITS[:6]
            self.wide[0].weight[:, :12] /= UNITS
            for name, weight in self.cells.named_parameters():
                if "weight_ih_l0" in name:
                    weight /= UNITS

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "series":
            return self.series(x)
        if self.kind == "joined":
            return self.wide(torch.cat([x, self.table(x[:, 11].long() % 5)], 1))
        if self.kind == "apart":
            return self.net(x) + self.few(x[:, :6])
        if self.kind in self.cells:
            return self.heads[self.kind](self.cells[self.kind](x)[0])
        return self.net(x - self.middle if self.kind == "centred" else x)


def measured(kind: str, count: int, seed: int) -> Tensor:
    shape = {"series": (count, 20)} | dict.fromkeys(("tokens", "lstm", "gru"), (count, 5))
    rows = torch.randn(*shape.get(kind, (count,)), 12, generator=torch.Generator().manual_seed(seed)) * UNITS
    return rows.transpose(1, 2).contiguous() if kind == "series" else rows


@pytest.mark.parametrize("kind", ["rows", "tokens", "centred", "series", "joined", "apart", "lstm", "gru"])
def test_columns_in_units_of_their_own_are_scaled_where_they_come_in(kind: str, tmp_path: Path) -> None:
    model, batches = Table(kind).eval(), [measured(kind, 32, seed) for seed in range(4)]
    test, path = measured(kind, 64, 9), tmp_path / "ranges.json"
    given: dict[str, Any] = {"example": batches[0], "forms": FloatForms(model)}
    config = QuantizeConfig(algorithms=("smooth", "analytic-bias"))
    form = quantize(model, config, calibration=batches, **given)
    plain = quantize(model, QuantizeConfig(algorithms=("analytic-bias",)), calibration=batches, **given)
    count = 2 if kind == "apart" else 1
    assert any(note.startswith(f"smooth: rescaled {count} of {count} inputs, α") for note in form.plan.notes)
    with torch.no_grad():
        assert sqnr_db(model(test), form(test)) > 30
        assert sqnr_db(model(test), plain(test)) < 15
    path.write_text(json.dumps(form.ranges))
    again = quantize(model, dataclasses.replace(config, ranges_from=str(path)), **given)
    assert f"smooth: as saved with the ranges in {count} of {count} inputs" in again.plan.notes
    assert torch.equal(again(test), form(test))


@functools.cache
def table_of_rows() -> FloatForms:
    return FloatForms(Table("rows").eval())


@pytest.mark.parametrize("numbers", [[1.0] * 5, [float("nan")] * 12, "many", None, [[1.0]] * 12])
def test_saved_factors_of_another_number_of_columns_are_refused(numbers: Any, tmp_path: Path) -> None:
    forms, batches, path = table_of_rows(), [measured("rows", 32, 0)], tmp_path / "ranges.json"
    ranges = quantize(forms.model, QuantizeConfig(), example=batches[0], calibration=batches, forms=forms).ranges
    name = next(name for name, entry in ranges.items() if "smooth" in entry)
    ranges[name]["smooth"] = numbers
    path.write_text(json.dumps(ranges))
    with pytest.raises(
        UsageError, match=f"--ranges-from: expected 12 finite numbers of what smooth changed at '{name}'"
    ):
        quantize(forms.model, QuantizeConfig(ranges_from=str(path)), example=batches[0], forms=forms)


def test_what_is_in_float_or_gains_little_has_no_product() -> None:
    def products(model: nn.Module, batches: list[Tensor], **config: Any) -> int:
        form = quantize(model.eval(), QuantizeConfig(**config), example=batches[0], calibration=batches)
        return sum(node.target is torch.ops.aten.mul.Tensor for node in form.graph.graph.nodes)

    class Skips(Table):
        def forward(self, x: Tensor) -> Tensor:
            return self.net(x) + x[:, :3]

    even = [measured("rows", 32, seed) / UNITS for seed in range(4)]
    apart = [measured("rows", 32, seed) for seed in range(4)]
    assert products(Table("rows"), apart) == 1
    assert products(nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 3)), even) == 0
    assert products(Skips("rows"), apart) == 1, "of what the layers read alone"
    assert products(Table("rows"), apart, overrides={"net.0": "float"}) == 0
    images = [torch.rand(8, 3, 8, 8) * torch.tensor([1.0, 1e2, 1e4])[:, None, None]] * 2
    assert products(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten()), images) == 0


def tailed(count: int, seed: int) -> Tensor:
    return (1.5 * torch.randn(count, 12, generator=torch.Generator().manual_seed(seed))).exp()


def test_what_reads_columns_with_long_tails_stays_in_float(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 3)).eval()
    batches, test, path = [tailed(32, seed) for seed in range(4)], tailed(64, 9), tmp_path / "ranges.json"

    def made(**config: Any) -> QuantizedModel:
        return quantize(model, QuantizeConfig(**config), example=batches[0], calibration=batches)

    def sqnr(form: QuantizedModel) -> float:
        with torch.no_grad():
            return sqnr_db(model(test), form(test))

    left, kept = made(), made(overrides={"0": "int8"})
    assert left.plan.notes[0] == "smooth: left in float, since 8 bits do not hold the columns that it reads: 0"
    assert "smooth declined: nothing else gains by it" in made(algorithms=("smooth",)).plan.notes
    first, last = (next(unit for unit in left.plan.units if unit.name == name) for name in ("0", "2"))
    assert not first.integer
    assert first.reason == "it reads columns whose tails or units 8 bits do not hold"
    assert last.integer
    assert all(unit.integer for unit in kept.plan.units if unit.weight_bits)
    assert sqnr(left) > sqnr(kept) + 3
    path.write_text(json.dumps(left.ranges))
    again = quantize(model, QuantizeConfig(ranges_from=str(path)), example=batches[0])
    assert [unit.integer for unit in again.plan.units] == [unit.integer for unit in left.plan.units]
    assert torch.equal(again(test), left(test))
    assert not any("columns" in unit.reason for unit in made(activation_bits=4, weight_bits=4).plan.units)


def test_columns_with_nan_are_told_as_that() -> None:
    batch = torch.randn(32, 12)
    batch[3, 2] = float("nan")
    with pytest.raises(QtoolError, match=r"NaN|nan"):
        quantize(nn.Linear(12, 3).eval(), QuantizeConfig(), example=batch[:2], calibration=[batch])


def test_columns_without_long_tails_do_not_leave_a_layer_in_float_whatever_its_weights_have() -> None:
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 3)).eval()
    even = [measured("rows", 32, seed) / UNITS for seed in range(4)]
    for weight_bits in (8, 4):
        form = quantize(
            model, QuantizeConfig(weight_bits=weight_bits, edge_bits=weight_bits), example=even[0], calibration=even
        )
        assert not any("columns" in unit.reason for unit in form.plan.units)


def test_a_product_that_a_model_ends_its_own_normalisation_with_takes_the_factors() -> None:
    class Ends(Table):
        def forward(self, x: Tensor) -> Tensor:
            return self.net((x - self.middle) * self.factor)

    model, batches = Ends("rows"), [measured("rows", 32, seed) for seed in range(4)]
    model.register_buffer("factor", torch.rand(12) + 0.5)
    form = quantize(model.eval(), QuantizeConfig(), example=batches[0], calibration=batches)
    assert any(note.startswith("smooth: rescaled 1 of 1 norms") for note in form.plan.notes)
    assert sum(node.target is torch.ops.aten.mul.Tensor for node in form.graph.graph.nodes) == 1
