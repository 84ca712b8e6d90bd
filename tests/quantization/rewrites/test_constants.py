from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from qtool.form import quantized
from qtool.graphs.operators import aten
from qtool.quantization.capturing.capture import capture
from qtool.quantization.capturing.float_form import float_form
from qtool.quantization.rewrites.constants import constant_nodes, fold_computed


class Embedded(nn.Module):
    """Positions looked up for the length at hand, as language models do; the words' table also gives the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(1200, 8), nn.Embedding(16, 8)
        self.register_buffer("places", torch.arange(16)[None])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.positions(self.places[:, : ids.shape[1]])
        return x @ self.words.weight.t()


def _targets(graph: torch.fx.GraphModule) -> list[object]:
    return [node.target for node in graph.graph.nodes if node.op == "call_function"]


def test_positions_are_stored_for_the_length_at_hand() -> None:
    torch.manual_seed(0)
    model, ids = Embedded().eval(), torch.randint(0, 20, (3, 6))
    graph = float_form(model, ids)
    assert _targets(graph).count(aten.embedding.default) == 1
    assert torch.equal(graph(ids), model(ids))
    stored = dict(graph.named_parameters()) | dict(graph.named_buffers())
    assert sorted(tuple(value.shape) for value in stored.values()) == [(1, 6, 8), (1200, 8)]


def test_positions_that_are_counted_out_are_looked_up_beforehand() -> None:
    class Counted(Embedded):
        def forward(self, ids: Tensor) -> Tensor:
            return self.words(ids) + self.positions(torch.arange(ids.shape[1]))

    model, ids = Counted().eval(), torch.randint(0, 20, (3, 6))
    graph = float_form(model, ids)
    assert _targets(graph) == [aten.embedding.default, aten.add.Tensor]
    assert torch.equal(graph(ids), model(ids))


def test_a_tensor_that_is_read_otherwise_too_is_not_stored_twice() -> None:
    class Moved(Embedded):
        def forward(self, ids: Tensor) -> Tensor:
            return self.words(ids).sum(1)[:, :, None] + self.words.weight.t()

    graph = float_form(Moved().eval(), torch.randint(0, 20, (3, 6)))
    assert aten.permute.default in _targets(graph)


def test_a_weight_that_the_model_normalises_becomes_a_weight() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(parametrizations.weight_norm(nn.Conv2d(3, 4, 3)), nn.ReLU()).eval()
    x = torch.randn(2, 3, 8, 8)
    graph = float_form(model, x)
    (conv,) = (node for node in graph.graph.nodes if node.target is aten.conv2d.default)
    assert conv.args[1].op == "get_attr"
    torch.testing.assert_close(graph(x), F.relu(F.conv2d(x, model[0].weight, model[0].bias)))


def test_random_numbers_of_a_stored_tensor_s_size_are_drawn_each_time() -> None:
    class Noisy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + torch.randn_like(self.bias)

    x = torch.randn(2, 4)
    graph = float_form(Noisy(4, 3).eval(), x)
    assert not torch.equal(graph(x), graph(x))


def test_a_constant_may_be_read_by_another() -> None:
    class Angles(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            angles = torch.arange(4) / 4
            return x * angles + angles.cos() * x.sin()

    x = torch.randn(2, 4)
    graph = float_form(Angles(), x)
    assert sorted(map(str, _targets(graph))) == [
        "aten.add.Tensor",
        "aten.mul.Tensor",
        "aten.mul.Tensor",
        "aten.sin.default",
    ]
    torch.testing.assert_close(graph(x), Angles()(x))


def test_what_a_quantizer_made_stays() -> None:
    class Dequantized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.arange(-8, 8, dtype=torch.int8))

        def forward(self, x: Tensor) -> Tensor:
            values = quantized.dequantize_per_tensor.default(self.steps, 0.5, 0, -128, 127, torch.int8)
            return x + values[:4]

    graph = capture(Dequantized(), torch.randn(2, 4))
    fold_computed(graph)
    assert quantized.dequantize_per_tensor.default in _targets(graph)


def test_constants_are_what_no_input_reaches() -> None:
    graph = capture(Embedded().eval(), torch.randint(0, 20, (3, 6)))
    inputs = {node for node in graph.graph.nodes if node.op == "placeholder"}
    reached = set(inputs)
    for node in graph.graph.nodes:
        if any(source in reached for source in node.all_input_nodes):
            reached.add(node)
    found = constant_nodes(graph)
    assert found
    assert not found & reached


class Crossed(nn.Module):
    """Attention between two sequences, whose three weights torch packs into one: 192 × 64 values, above 8,192."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(64, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x[:, :2], x[:, 2:], x[:, 2:], need_weights=False)[0]


def test_weights_that_are_packed_into_one_are_stored_apart() -> None:
    torch.manual_seed(0)
    model, x = Crossed().eval(), torch.randn(2, 5, 64)
    graph = float_form(model, x)
    layers = [node for node in graph.graph.nodes if node.target is aten.linear.default]
    assert len(layers) > 1
    assert all(source.op == "get_attr" for layer in layers for source in layer.args[1:])
    assert sum(value.numel() for value in graph.parameters()) == sum(value.numel() for value in model.parameters())
    torch.testing.assert_close(graph(x), model(x))


def test_parts_of_a_weight_train_on_their_own() -> None:
    torch.manual_seed(0)
    model, x = Crossed(), torch.randn(4, 5, 64)
    graph = capture(model, x, train=True)
    fold_computed(graph, train=True)
    graph(x).square().sum().backward()
    model.eval()(x).square().sum().backward()
    found = torch.cat([v.grad for k, v in graph.named_parameters() if k.endswith("folded") and v.dim() == 2])
    torch.testing.assert_close(found, model.attention.in_proj_weight.grad)


def test_training_computes_what_is_no_part_of_a_weight() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.mask = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.ones(4, 3))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight * self.mask)

    x = torch.randn(2, 3)
    for train, stored in ((True, False), (False, True)):
        graph = capture(Masked(), x, train=train)
        fold_computed(graph, train=train)
        (layer,) = (node for node in graph.graph.nodes if node.target is aten.linear.default)
        assert (layer.args[1].op == "get_attr") is stored


def test_a_weight_that_is_also_read_whole_is_not_stored_twice() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(200, 100))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight).sum(1, keepdim=True) + F.linear(x, self.weight[:50])

    graph = capture(Both(), torch.randn(2, 100))
    fold_computed(graph)
    assert sum(value.numel() for value in graph.parameters()) == 20000
