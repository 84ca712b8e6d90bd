"""However an operator is written in a model, the captured graph has the one spelling that patterns look for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from written import Forward, Written

from qtool.graphs.operators import aten
from qtool.quantization.capturing.capture import capture
from qtool.quantization.placement import Placement
from qtool.quantization.targets import ORT_CPU


def spelled(function: Forward, x: Tensor) -> list[Any]:
    """The operators of the captured graph, which computes the same for any batch."""
    graph = capture(Written(function), x)
    for batch in (x, x[:1], torch.cat([x, x.flip(0)])):
        expected = function(batch)
        torch.testing.assert_close(graph(batch).reshape(expected.shape), expected)
    shape_only = (aten.sym_size.int,)
    return [n.target for n in graph.graph.nodes if n.op == "call_function" and n.target not in shape_only]


X = torch.randn(2, 8, 4, 6, generator=torch.Generator().manual_seed(0)) * 3


def written(x: Tensor, place: Any, made: Forward) -> Tensor:
    """What a detector does to the parts of its output."""
    y = -x
    y[place] = made(y[place])
    return y


GLU = [aten.slice.Tensor, aten.slice.Tensor, aten.sigmoid.default, aten.mul.Tensor]
ATTENTION = aten.scaled_dot_product_attention.default
SAME = {
    "concat": (lambda x: torch.concat([x, x], 1), [aten.cat.default]),
    "view": (lambda x: x.view(x.shape[0], -1), [aten.reshape.default]),
    "a mean of one": (lambda x: x[..., :1].mean(-1), [aten.slice.Tensor, aten.squeeze.dims]),
    "a mean of one that is kept": (lambda x: x[..., :1].mean(3, True).relu(), [aten.slice.Tensor, aten.relu.default]),
    "swapaxes": (lambda x: x.swapaxes(1, 3), [aten.transpose.int]),
    "clip": (lambda x: x.clip(-1, 2), [aten.clamp.default]),
    "a bound of integers": (lambda x: x.long().clamp(min=0), [aten.to.dtype, aten.clamp.default]),
    "unflatten": (lambda x: x.unflatten(1, (2, -1)), [aten.reshape.default]),
    "view_as": (lambda x: x.view_as(x), [aten.reshape.default]),
    "squeeze": (lambda x: x[:, :1].squeeze(), [aten.slice.Tensor, aten.reshape.default]),
    "squeeze of a longer axis": (lambda x: x.relu().squeeze(1), [aten.relu.default]),
    "squeeze of several axes": (lambda x: x[:, :1].squeeze((1, 2)), [aten.slice.Tensor, aten.squeeze.dims]),
    "a slice of all": (
        lambda x: x[:, :, 0:4, :].relu() + x[:, 1:2],
        [aten.relu.default, aten.slice.Tensor, aten.add.Tensor],
    ),
    "a slice that cuts nothing off": (lambda x: x[:, :, ::2][:, 0:][:], [aten.slice.Tensor]),
    "an index that cuts nothing off": (
        lambda x: x.relu()[..., : x.shape[2], : x.shape[3]][...] + x,
        [aten.relu.default, aten.add.Tensor],
    ),
    "movedim": (lambda x: x.movedim(1, -1), [aten.permute.default]),
    "movedim of several": (lambda x: x.movedim((1, 2), (3, 0)), [aten.permute.default]),
    "an order that is another": (lambda x: x.permute(0, 1, 3, 2).relu(), [aten.permute.default, aten.relu.default]),
    "an order that is the same": (lambda x: x.permute(0, 1, -2, 3).relu(), [aten.relu.default]),
    "mT": (lambda x: x.mT, [aten.permute.default]),
    "t": (lambda x: x.flatten(1).t(), [aten.flatten.using_ints, aten.permute.default]),
    "chunk": (lambda x: x.chunk(2, 1)[1], [aten.slice.Tensor]),
    "chunk of the batch": (
        lambda x: torch.cat([x, x.relu()]).chunk(2)[1],
        [aten.relu.default, aten.cat.default, aten.reshape.default, aten.select.int],
    ),
    "other names": (
        lambda x: torch.divide(torch.multiply(x, torch.negative(x)), torch.true_divide(x, 3)),
        [aten.neg.default, aten.mul.Tensor, aten.div.Tensor, aten.div.Tensor],
    ),
    "more other names": (
        lambda x: torch.linalg.matmul(torch.special.expit(x), torch.subtract(x, 3).mT),
        [aten.sigmoid.default, aten.sub.Tensor, aten.permute.default, aten.matmul.default],
    ),
    "tensor_split": (lambda x: x.tensor_split(3, 1)[2], [aten.slice.Tensor]),
    "adaptive pool": (lambda x: F.adaptive_avg_pool2d(x, (2, 3)), [aten.avg_pool2d.default]),
    "a sum over windows by a number": (
        lambda x: F.avg_pool2d(x, (2, 3), 2, (1, 0), count_include_pad=False, divisor_override=5),
        [aten.avg_pool2d.default, aten.mul.Tensor],
    ),
    "the same over windows that end behind the input": (
        lambda x: F.avg_pool3d(x, 3, (1, 3, 4), 1, True, divisor_override=7),
        [aten.constant_pad_nd.default, aten.avg_pool3d.default, aten.mul.Tensor],
    ),
    "a mean that counts its padding, over windows that end behind it": (
        lambda x: F.avg_pool2d(x, (4, 3), (3, 2), (2, 1), True),
        [aten.constant_pad_nd.default, aten.avg_pool2d.default],
    ),
    "a mean whose windows all end within its padding": (
        lambda x: F.avg_pool2d(x, (2, 4), 2, (1, 1), True),
        [aten.avg_pool2d.default],
    ),
    "adaptive pool of rows": (
        lambda x: F.adaptive_avg_pool1d(x.flatten(2), 8),
        [aten.flatten.using_ints, aten.avg_pool1d.default],
    ),
    "adaptive pool of volumes": (
        lambda x: F.adaptive_avg_pool3d(x.unsqueeze(1), (4, 2, 6)),
        [aten.unsqueeze.default, aten.avg_pool3d.default],
    ),
    "adaptive pool of volumes to one": (
        lambda x: F.adaptive_avg_pool3d(x.unsqueeze(1), 1),
        [aten.unsqueeze.default, aten.mean.dim],
    ),
    "adaptive pool of features to one": (
        lambda x: F.adaptive_avg_pool1d(x.flatten(1), 1),
        [aten.flatten.using_ints, aten.mean.dim],
    ),
    "adaptive pool to the same": (lambda x: F.adaptive_avg_pool2d(x, (4, None)).relu(), [aten.relu.default]),
    "adaptive pool to one": (lambda x: F.adaptive_avg_pool2d(x, 1), [aten.adaptive_avg_pool2d.default]),
    "adaptive pool of windows that overlap": (lambda x: F.adaptive_avg_pool2d(x, 3), [aten.avg_pool2d.default]),
    "adaptive pool unevenly": (lambda x: F.adaptive_avg_pool2d(x, 5), [aten.adaptive_avg_pool2d.default]),
    "narrow": (lambda x: x.narrow(1, 2, 3), [aten.slice.Tensor]),
    "unbind": (lambda x: x.unbind(1)[3], [aten.select.int]),
    "expand_as": (lambda x: x.mean((2, 3), keepdim=True).expand_as(x), [aten.mean.dim, aten.expand.default]),
    "float": (lambda x: x.float().to("cpu").to(x.device, x.dtype).to(x).relu(), [aten.relu.default]),
    "another type": (lambda x: x.to("cpu", torch.float64).type_as(x), [aten.to.dtype, aten.to.dtype]),
    "clamp": (lambda x: x.clamp(min=0), [aten.relu.default]),
    "a drawn slope": (lambda x: F.rrelu(F.rrelu(x), 0.05, 0.25), [aten.leaky_relu.default] * 2),
    "a drawn slope in place": (lambda x: F.rrelu(x * 2, 0.2, inplace=True), [aten.mul.Tensor, aten.leaky_relu.default]),
    "a drawn slope seen through a view": (
        lambda x: (y := x * 2, y.mT, F.rrelu_(y))[1] + 1,
        [aten.mul.Tensor, aten.leaky_relu.default, aten.transpose.int, aten.add.Tensor],
    ),
    "hard sigmoid": (lambda x: F.relu6(x + 3) / 6, [aten.hardsigmoid.default]),
    "hard sigmoid times": (lambda x: (x + 3.0).clamp(0, 6) * (1 / 6), [aten.hardsigmoid.default]),
    "hard swish": (lambda x: x * F.relu6(x + 3) / 6, [aten.hardswish.default]),
    "hard swish of a gate": (lambda x: x * (F.hardtanh(x + 3, 0, 6) / 6), [aten.hardswish.default]),
    "hard swish in place": (lambda x: x * F.relu6(x + 3, inplace=True).div_(6), [aten.hardswish.default]),
    "attention in windows": (
        lambda x: F.scaled_dot_product_attention(y := x.unflatten(1, (2, 2, 2)), y, y[..., :3], scale=0.3),
        [aten.reshape.default, aten.slice.Tensor, *[aten.reshape.default] * 2, ATTENTION, aten.reshape.default],
    ),
    "attention of queries in groups": (
        lambda x: F.scaled_dot_product_attention(y := x.unflatten(1, (2, 2, 2)), y[:, :1], y[:, :, :1]),
        [
            *[aten.reshape.default, aten.slice.Tensor, aten.slice.Tensor, aten.reshape.default],
            *[aten.expand.default, aten.reshape.default] * 2,
            *[ATTENTION, aten.reshape.default],
        ],
    ),
    "concat of one": (lambda x: torch.cat([x], 1).relu(), [aten.relu.default]),
    "concat with nothing": (lambda x: torch.cat([x.relu(), x[..., 6:]], -1), [aten.relu.default]),
    "concat of two and nothing": (lambda x: torch.cat([x, x[..., 6:], x], -1), [aten.cat.default]),
    "stack of one": (lambda x: torch.stack([x], -1), [aten.unsqueeze.default]),
    "stack": (lambda x: torch.stack([x, x], -1), [aten.unsqueeze.default, aten.cat.default]),
    "sum from zero": (lambda x: sum([x, x.relu()]), [aten.relu.default, aten.add.Tensor]),
    "product with one": (lambda x: 1 * x.relu() * 1.0, [aten.relu.default]),
    "padding by nothing": (lambda x: F.pad(F.pad(x, (0, 0)), (0, 0, 0, 0), "reflect").relu(), [aten.relu.default]),
    "padding": (lambda x: F.pad(x, (0, 0, 1, 0)).relu(), [aten.pad.default, aten.relu.default]),
    "a product that is added to": (
        lambda x: torch.baddbmm(x[:, 0, :, :4], x[:, 1], x[:, 2].mT, beta=0.5, alpha=3),
        [
            *[aten.select.int, aten.slice.Tensor, aten.select.int, aten.select.int, aten.permute.default],
            *[aten.bmm.default, aten.mul.Tensor, aten.mul.Tensor, aten.add.Tensor],
        ],
    ),
    "a product alone is added to": (
        lambda x: torch.baddbmm(x[:, 0, :1, :1], x[:, 1], x[:, 2].mT),
        [
            *[aten.select.int, aten.slice.Tensor, aten.slice.Tensor, aten.select.int, aten.select.int],
            *[aten.permute.default, aten.bmm.default, aten.add.Tensor],
        ],
    ),
    "a maximum that is padded more at the end": (
        lambda x: F.max_pool2d(F.pad(x, (0, 1, 1, 2), value=-torch.inf), 3, 2, dilation=(2, 1)),
        [aten.max_pool2d.default],
    ),
    "a maximum that is padded alike, twice": (
        lambda x: F.max_pool2d(F.pad(x, (1, 1), "constant", -torch.inf), (3, 5), 1, (1, 1)),
        [aten.max_pool2d.default],
    ),
    "a maximum that is padded with another number": (
        lambda x: F.max_pool2d(F.pad(x, (0, 1, 0, 1), value=-1.0), 3, 2),
        [aten.pad.default, aten.max_pool2d.default],
    ),
    "a maximum whose padding is a window wide": (
        lambda x: F.max_pool2d(F.pad(x, (0, 3), value=-torch.inf), 3, 1).relu(),
        [aten.pad.default, aten.max_pool2d.default, aten.relu.default],
    ),
    "an affine in one call": (
        lambda x: torch.addcmul(x[:, :1], x[:, 1:2], x, value=2),
        [*[aten.slice.Tensor] * 2, aten.mul.Tensor, aten.mul.Tensor, aten.add.Tensor],
    ),
    "a quotient that is added to, in place": (
        lambda x: (-x).addcdiv_(x, x[:, 1:2]),
        [aten.neg.default, aten.slice.Tensor, aten.div.Tensor, aten.add.Tensor],
    ),
    "new_zeros": (lambda x: x + x.new_zeros(6), [aten.full.default, aten.add.Tensor]),
    "new_full": (lambda x: x + x.new_full((4, 1), 2.5), [aten.full.default, aten.add.Tensor]),
    "ones_like": (lambda x: x * torch.ones_like(torch.arange(6)), [aten.full.default, aten.mul.Tensor]),
    "silu": (lambda x: torch.sigmoid(x) * x, [aten.silu.default]),
    "a gated linear unit": (lambda x: F.glu(x, 1), GLU),
    "a gated linear unit of the last axis": (lambda x: F.glu(x), GLU),
    "a part that is written": (
        lambda x: written(x, (..., slice(1, 3)), torch.relu),
        [aten.neg.default, aten.slice.Tensor, aten.relu.default, *[aten.slice.Tensor] * 2, aten.cat.default],
    ),
    "an end that is written": (
        lambda x: written(x, (slice(None), slice(-3, None)), torch.relu),
        [aten.neg.default, aten.slice.Tensor, aten.relu.default, aten.slice.Tensor, aten.cat.default],
    ),
    "a plane that is written": (
        lambda x: written(x, (slice(None), -1), torch.relu),
        [
            aten.neg.default,
            aten.select.int,
            aten.relu.default,
            aten.unsqueeze.default,
            aten.slice.Tensor,
            aten.cat.default,
        ],
    ),
    "all that is written": (
        lambda x: written(x, (slice(None), slice(0, 99)), torch.relu),
        [aten.neg.default, aten.relu.default],
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_one_spelling_with_the_same_numbers(name: str) -> None:
    function, expected = SAME[name]
    assert spelled(function, X) == expected


OTHER = {
    "another gate": lambda x: x * torch.sigmoid(x + 1),
    "a gate that is read twice": lambda x: (g := torch.sigmoid(x)) * x + g,
    "another shift": lambda x: F.relu6(x + 2) / 6,
    "another limit": lambda x: (x + 3).clamp(0, 5) / 6,
    "another divisor": lambda x: F.relu6(x + 3) / 5,
    "a sum that is read twice": lambda x: F.relu6(y := x + 3) / 6 + y,
    "a scaled sum": lambda x: F.relu6(torch.add(x, 3, alpha=2)) / 6,
    "the product of another": lambda x: (x + 1) * F.relu6(x + 3) / 6,
    "what adds nothing, be it NaN": lambda x: torch.baddbmm(x[:, 0, :, :4] / 0, x[:, 1], x[:, 2].mT, beta=0),
    "a real conversion": lambda x: x.double().relu(),
    "a sum that converts": lambda x: torch.arange(6) + 0.0 + x,
    "zeros for every sample": lambda x: x + torch.zeros_like(x),
    "every other that is written": lambda x: written(x, (..., slice(0, 6, 2)), torch.relu),
    "samples that are written": lambda x: written(x, slice(1, 2), torch.relu),
    "one number for many": lambda x: written(x, (..., slice(1, 2)), torch.mean),
}


@pytest.mark.parametrize("name", OTHER)
def test_what_means_something_else_is_left(name: str) -> None:
    gates = {aten.hardsigmoid.default, aten.hardswish.default, aten.silu.default}
    operators = spelled(OTHER[name], X)
    assert not gates & set(operators)
    assert (aten.to.dtype in operators) == (name == "a real conversion")


COPIES: dict[str, Forward] = {
    "conversion": lambda x: x.to(torch.float32, copy=True),
    "padding": lambda x: F.pad(x, (0, 0)),
    "concat": lambda x: torch.cat([x], 1),
    "sum": lambda x: x + 0,
    "pool": lambda x: F.adaptive_avg_pool2d(x, (4, None)),
}


@pytest.mark.parametrize("name", COPIES)
def test_what_is_written_into_a_copy_is_not_in_the_other(name: str) -> None:
    spelled(lambda x: COPIES[name](x).relu_() + x, X)
    spelled(lambda x: (y := x * 2, COPIES[name](y), y.relu_())[1] + y.sigmoid(), X)


def test_squeezing_keeps_a_batch_of_one() -> None:
    graph = capture(Written(lambda x: x.mean((2, 3), keepdim=True).squeeze()), X)
    assert graph(X[:1]).shape == (1, 8)


def test_the_largest_of_all_numbers_is_over_every_axis() -> None:
    graph = capture(Written(lambda x: torch.stack([x.amax(), x.amin(())])), X).graph
    axes = [graph.find_nodes(op="call_function", target=op)[0].args[1] for op in (aten.amax.default, aten.amin.default)]
    assert axes == [[0, 1, 2, 3]] * 2


def test_an_average_of_parts_of_windows_counts_what_there_is() -> None:
    def pooled(x: Tensor) -> Tensor:
        return F.avg_pool1d(F.avg_pool2d(x, 3, 2, ceil_mode=True).flatten(2), 4, ceil_mode=True)

    graph = capture(Written(pooled), X)
    torch.testing.assert_close(graph(X), pooled(X))
    ops = (aten.avg_pool2d.default, aten.avg_pool1d.default)
    assert [graph.graph.find_nodes(op="call_function", target=op)[0].args[4:] for op in ops] == [(True, False)] * 2


@pytest.mark.parametrize("counted", [True, False])
def test_a_ceiling_that_cuts_no_window_off_goes(counted: bool) -> None:
    """As in the shortcuts of ResNet-D: at even sizes every window is whole."""

    def pooled(x: Tensor) -> Tensor:
        whole = F.avg_pool2d(x, 2, 2, ceil_mode=True, count_include_pad=counted)
        return F.avg_pool2d(whole, 3, 1, 1, ceil_mode=True, count_include_pad=counted)

    x = torch.randn(2, 3, 8, 6)
    graph = capture(Written(pooled), x)
    torch.testing.assert_close(graph(x), pooled(x))
    pools = graph.graph.find_nodes(op="call_function", target=aten.avg_pool2d.default)
    assert [node.args[4] for node in pools] == [False, False]
    assert pools[1].args[5] is counted


@pytest.mark.parametrize("size", [5, 6, 7, 8, 9])
def test_an_average_at_any_size_counts_padding_and_nothing_behind_it(size: int) -> None:
    """Integer kernels count what a window has behind a padding: none is left to count one."""

    def pooled(x: Tensor) -> Tensor:
        return F.avg_pool2d(x, (5, 3), (3, 2), (2, 1), ceil_mode=True)

    graph, x = capture(Written(pooled), X, axes=(2, 3)), torch.randn(3, X.shape[1], size, size)
    torch.testing.assert_close(graph(x), pooled(x))
    (node,) = graph.graph.find_nodes(op="call_function", target=aten.avg_pool2d.default)
    assert node.args[3:] == ([0, 0], True, False)


@settings(max_examples=12)
@given(st.data())
def test_any_turn_is_a_permutation(data: st.DataObject) -> None:
    rank = data.draw(st.integers(3, 5))
    axes = st.integers(-rank + 1, rank - 1).filter(bool)  # the batch stays in front
    source, destination = data.draw(axes), data.draw(axes)
    x = torch.arange(2.0 * 3 ** (rank - 1)).reshape(2, *[3] * (rank - 1))
    if source % rank and destination % rank:
        spelled(lambda v: v.movedim(source, destination), x)


def test_units_between_other_spellings_are_integer() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1), nn.Conv2d(8, 4, 1)

        def forward(self, x: Tensor) -> Any:
            y = self.a(x).swapaxes(2, 3).float()
            y = torch.concat([y, self.b(y)], 1)
            y = self.c(y)
            return self.b(y * F.relu6(y + 3) / 6)

    plan = Placement(capture(Net(), torch.randn(2, 4, 4, 4)), ORT_CPU).plan()
    assert [(unit.kind, unit.integer) for unit in plan.units] == [
        ("conv", True), ("conv", True), ("concat", True), ("conv", True), ("activation", False), ("conv", True),
    ]  # fmt: skip
