"""Captured graphs write into no tensor and still compute what the model computes, views and all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional as F

from qtool.graphs.edits import set_training
from qtool.graphs.operators import aten
from qtool.quantization.capturing.capture import capture
from qtool.quantization.rewrites.functional import mutations

SHAPE = (4, 4, 6, 6)
Forward = Callable[[Tensor], Any]


class Written(nn.Module):
    """A model of one function; its convolution is there to be called."""

    def __init__(self, function: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.function = function
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4).eval()
        self.norm.running_mean.fill_(0.3)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def chain(m: Any, x: Tensor) -> Tensor:
    y = m.norm(m.conv(x))
    y += x
    F.relu_(y)
    y.mul_(2).sub_(1.0)
    F.hardtanh_(y)
    return F.leaky_relu_(y, 0.1) + y


def view_before(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x)
    part = y[:, :2]
    y.relu_()
    return part + y[:, 2:]


def view_of_view(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x)
    flat = y.flatten(1)
    flat.clamp_(min=0.1)
    return y * 2


def view_alone(m: Any, x: Tensor) -> Tensor:
    return m.conv(x).flatten(1).relu_() * 2


def part_assigned(m: Any, x: Tensor) -> Tensor:
    y = m.norm(m.conv(x))
    y[:, 1] = 0
    y[:, :1] += 1
    return m.conv(y)


def overwritten_twice(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x)
    z = y.transpose(1, 2)
    y.relu_()
    y.add_(1)
    return z.contiguous()


def dropped(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x)
    kept = F.dropout(y, 0.5, training=False)  # in evaluation the same tensor
    kept.relu_()
    return y + 1


def input_written(m: Any, x: Tensor) -> Tensor:
    return m.conv(F.relu_(x))


def chunked(m: Any, x: Tensor) -> Tensor:
    a, b = m.conv(x).chunk(2, 1)
    c, d, e = torch.split(x, [1, 2, 1], 1)
    return torch.cat([b, a], 1) + torch.cat([e, d, c], 1) + torch.cat(m.conv(x).split(3, 1)[::-1], 1)


def chunk_written(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x)
    first = y.narrow(1, 0, 2)
    first.relu_()
    return y


def masked(m: Any, x: Tensor) -> Tensor:
    """As torch's own encoder makes a float mask of a padding mask."""
    y = m.conv(x)
    mask = torch.zeros_like(y).masked_fill_(y > 0, float(-3))
    return y.exp_().pow_(2).neg_() + mask


def dropped_in_place(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x)
    F.dropout(y, 0.0, training=True, inplace=True)
    return y + 1


def wider(m: Any, x: Tensor) -> Tensor:
    """What is written into keeps its type."""
    y = m.conv(x)
    y.mul_(torch.full((4, 1, 1), 1 / 3, dtype=torch.float64))
    return y


WRITTEN = [
    chain, view_before, view_of_view, view_alone, part_assigned, overwritten_twice, dropped, input_written, chunked,
    chunk_written, masked, dropped_in_place, wider,
]  # fmt: skip


@pytest.mark.parametrize("function", WRITTEN, ids=lambda f: f.__name__)
def test_the_graph_computes_what_the_model_does_and_writes_nowhere(function: Any) -> None:
    model, x = Written(function).eval(), torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(x.clone())
        graph = capture(model, x.clone())
        assert torch.equal(graph(x.clone()), expected)
        assert torch.equal(graph(x[:1].clone()), model(x[:1].clone()))
    assert mutations(graph) == []


@pytest.mark.parametrize("function", [view_before, view_of_view, part_assigned], ids=lambda f: f.__name__)
def test_training_graphs_take_what_only_functionalization_could_mend(function: Any) -> None:
    x = torch.randn(SHAPE)
    model = Written(function)
    graph = capture(model, x, train=True)
    assert mutations(graph) == []
    set_training(graph, batch_norm=True, dropout=True)
    torch.testing.assert_close(graph(x.clone()), model.train()(x.clone()), rtol=1e-5, atol=1e-5)


def test_dropout_is_told_to_be_off_where_only_functionalization_knows_the_graph() -> None:
    model = nn.Sequential(Written(part_assigned), nn.Dropout(0.5))
    (note,) = capture(model, torch.randn(SHAPE), train=True).meta["notes"]
    assert note.startswith("dropout is off in training too")


@pytest.mark.parametrize(
    "function", [chain, view_alone, input_written, masked, dropped_in_place], ids=lambda f: f.__name__
)
def test_training_graphs_take_the_rest(function: Any) -> None:
    x = torch.randn(SHAPE)
    model = Written(function)
    graph = capture(model, x, train=True)
    model.train()
    torch.testing.assert_close(graph(x.clone()), model(x.clone()), rtol=1e-5, atol=1e-5)


def targets(graph: GraphModule) -> list[Any]:
    return [node.target for node in graph.graph.nodes if node.op == "call_function"]


def test_attention_that_nothing_reads_is_left_out() -> None:
    def unread(m: Any, x: Tensor) -> Any:
        y = m.conv(x)
        F.scaled_dot_product_attention(y, y, y)
        return y

    graph = capture(Written(unread), torch.randn(SHAPE))
    assert [n.target for n in graph.graph.nodes if n.op == "call_function"] == [aten.conv2d.default]


def test_parts_of_a_split_tensor_are_slices_of_it() -> None:
    graph = capture(Written(chunked).eval(), torch.randn(SHAPE))
    assert not any("split" in str(t) or "chunk" in str(t) or "getitem" in str(t) for t in targets(graph))
    widths = [n.meta["val"].shape[1] for n in graph.graph.nodes if n.target is aten.slice.Tensor]
    assert widths == [2, 2, 1, 2, 1, 3, 1]
    assert all(n.meta.get("nn_module_stack") is not None for n in graph.graph.nodes if n.target is aten.slice.Tensor)


@pytest.mark.parametrize(
    ("conv", "shape", "pads"),
    [
        (lambda: nn.Conv2d(3, 4, 3, padding="same"), (2, 3, 7, 6), 0),
        (lambda: nn.Conv2d(3, 4, (3, 5), padding="same", dilation=(2, 1)), (2, 3, 7, 6), 0),
        (lambda: nn.Conv2d(3, 4, (2, 4), padding="same", dilation=(1, 3)), (2, 3, 8, 9), 1),
        (lambda: nn.Conv2d(3, 4, 2, padding="valid", stride=2), (2, 3, 7, 6), 0),
        (lambda: nn.Conv1d(3, 4, 4, padding="same"), (2, 3, 9), 1),
        (lambda: nn.Conv3d(3, 4, (2, 3, 1), padding="same"), (2, 3, 4, 5, 6), 1),
        (lambda: nn.Conv1d(4, 4, 3, padding="same", groups=2, bias=False), (2, 4, 9), 0),
    ],
)
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
def test_padding_in_words_becomes_numbers(conv: Callable[[], nn.Module], shape: tuple[int, ...], pads: int) -> None:
    torch.manual_seed(0)
    model, x = conv(), torch.randn(shape)
    graph = capture(model, x)
    torch.testing.assert_close(graph(x[:1]), model(x[:1]), rtol=1e-5, atol=1e-6)
    assert targets(graph).count(aten.constant_pad_nd.default) == pads
    assert any(t in (aten.conv1d.default, aten.conv2d.default, aten.conv3d.default) for t in targets(graph))


def test_one_spelling_for_relu_and_for_pooling_a_row() -> None:
    class Spelt(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.clamp(min=0) + (x + 1).clamp_min(0) + torch.clip(x + 2, 0) + x.clamp_(0, None)
            return F.adaptive_avg_pool1d(y, 1) + x.clamp(min=-1) + x.clamp(0, 2)

    x = torch.randn(3, 4, 5)
    graph = capture(Spelt(), x)
    assert torch.equal(graph(x.clone()), Spelt()(x.clone()))
    assert targets(graph).count(aten.relu.default) == 3  # the first and the last are one
    assert targets(graph).count(aten.mean.dim) == 1
    assert aten.adaptive_avg_pool1d.default not in targets(graph)
