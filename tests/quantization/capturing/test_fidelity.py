"""A captured graph has to compute what the model does; a model that is random is said to be so."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree
from torch.utils.data import TensorDataset

import qtool
from qtool.errors import QtoolError, UsageError
from qtool.graphs.operators import aten
from qtool.quantization.capturing.capture import capture
from qtool.quantization.capturing.fidelity import PADDED, RANDOM, require_faithful
from qtool.quantization.capturing.float_form import float_form

X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5))


class Square(nn.Module):
    """Images as wide as they are high."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x.transpose(2, 3)


def broken(graph: GraphModule, old: Any, new: Any) -> GraphModule:
    """The graph with one operator for another."""
    for node in graph.graph.nodes:
        node.target = new if node.target is old else node.target
    graph.recompile()
    return graph


def test_a_graph_that_is_the_model_passes_without_a_note() -> None:
    model = net().train()
    graph = capture(model, X)
    require_faithful(graph, model, X)
    assert graph.meta["notes"] == ()
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize(
    ("model", "refused"),
    [
        (
            nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 5)),
            "2x4 and 36x5|2x196 and 36x5",
        ),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)), ""),
        (Square(), ""),
    ],
)
def test_open_axes_of_a_model_that_takes_no_other_size_are_refused(model: nn.Module, refused: str) -> None:
    graph = capture(model, X, axes=(2, 3))
    told = pytest.raises(UsageError, match=f"axis 2, where the model refuses half and twice the size.*({refused})")
    with told if refused else contextlib.nullcontext():
        require_faithful(graph, model, X)


@pytest.mark.parametrize("new", [aten.sigmoid.default, aten.relu6.default, aten.gelu.default])
def test_one_wrong_operator_is_found(new: Any) -> None:
    model = net()
    model[0].weight.data *= 20  # type: ignore[operator]
    with pytest.raises(
        QtoolError, match=r"model 'Sequential': expected a captured graph that .* 60 dB; got -?\d+\.\d dB"
    ):
        require_faithful(broken(capture(model, X), aten.relu.default, new), model, X)


def test_a_weight_a_thousandth_off_is_found_and_rounding_is_not() -> None:
    model, graph = net(), capture(net(), X)
    with torch.no_grad():
        next(graph.parameters()).mul_(1 + 1e-6)
        require_faithful(graph, model, X)
        graph.get_parameter("4.weight").mul_(1.005)
    with pytest.raises(QtoolError, match="on 2 samples"):
        require_faithful(graph, model, X)


def test_what_is_not_finite_has_to_be_so_in_the_same_places() -> None:
    class Logarithm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.log(x)

    graph = capture(Logarithm(), X)
    require_faithful(graph, Logarithm(), X)
    with pytest.raises(QtoolError, match="got -inf dB"):
        require_faithful(broken(graph, aten.log.default, aten.abs.default), Logarithm(), X)


def test_every_output_counts_and_integers_do_not() -> None:
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 4), nn.Linear(8, 4)

        def forward(self, x: Tensor, scale: Tensor) -> dict[str, Any]:
            return {"a": self.a(x), "more": [self.b(x * scale), x.argmax(-1)]}

    torch.manual_seed(0)
    model, example = Several(), {"x": X, "scale": torch.rand(4, 1, 1, 1)}
    graph = capture(model, example)
    require_faithful(graph, model, example)
    with torch.no_grad():
        graph.get_parameter("b.bias").add_(0.1)
    with pytest.raises(QtoolError, match="dB"):
        require_faithful(graph, model, example)


def test_a_random_model_is_noted() -> None:
    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.rand_like(x)

    graph = capture(Noisy(), X)
    require_faithful(graph, Noisy(), X)
    assert graph.meta["notes"] == (RANDOM,)


def test_a_model_that_rounding_decides_is_noted_and_a_wrong_one_of_its_kind_is_found() -> None:
    class Cancelling(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return ((x + 1e6) - 1e6).relu()

    class Otherwise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return ((x + 2e6) - 2e6).relu()

    graph = capture(Otherwise(), X)
    require_faithful(graph, Cancelling(), X)
    assert [note.partition(":")[0] for note in graph.meta["notes"]] == ["rounding decides what the model computes"]
    with pytest.raises(QtoolError, match="changed its meaning"):
        require_faithful(broken(graph, aten.relu.default, aten.neg.default), Cancelling(), X)


def test_buffers_are_as_before() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            return x.relu()

    model = Counting()
    require_faithful(capture(model, X), model, X)
    assert model.count.item() == 0


def test_a_batch_of_a_size_that_the_graph_asks_for_is_taken_whole() -> None:
    class Even(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.tanh() if x.shape[0] % 2 else x.sigmoid()

    sizes: list[int] = []

    class Seen(Even):
        def forward(self, x: Tensor) -> Tensor:
            sizes.append(len(x))
            return super().forward(x)

    graph = capture(Even(), torch.cat([X, X]))
    require_faithful(graph, Seen(), torch.cat([X, X]))
    assert sizes == [1, 8]


@pytest.fixture
def mistaken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture whose ReLU is gone, as a fault of its own would have it."""
    monkeypatch.setattr(
        "qtool.quantization.capturing.float_form.capture",
        lambda *args, **words: broken(capture(*args, **words), aten.relu.default, aten.neg.default),
    )


@pytest.mark.usefixtures("mistaken")
def test_the_float_form_is_held_to_it() -> None:
    with pytest.raises(QtoolError, match="the capture changed its meaning"):
        float_form(net(), X)


class Padded(nn.Module):
    """torch's own transformer over sequences that 0 fills up, their places averaged, those behind the end as well."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(20, 16), nn.Linear(16, 3)
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.words(x), src_key_padding_mask=x == 0).mean(1))  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
def test_behind_the_end_of_a_padded_sequence_the_graph_is_the_model_in_training() -> None:
    model, x = Padded().eval(), torch.randint(1, 20, (16, 7), generator=torch.Generator().manual_seed(0))
    assert float_form(model, x).meta["notes"] == ()
    x[3, 4:] = 0
    graph = float_form(model, x)
    assert graph.meta["notes"] == (PADDED,)
    torch.testing.assert_close(graph(x), model(x), rtol=1e-4, atol=1e-5)  # gradients are on, and with them the layers
    part = TensorDataset(x, torch.arange(16) % 3)
    trained = qtool.train(model, {"train": part, "test": part}, epochs=1, device="cpu")
    with torch.no_grad():
        shortcut = nn.functional.cross_entropy(trained.model(x), part.tensors[1]).item()
    loss = nn.functional.cross_entropy(trained.model(x), part.tensors[1]).item()
    assert trained.metrics["loss"] == pytest.approx(loss, rel=1e-5)
    assert loss != pytest.approx(shortcut, rel=1e-3)


def test_a_batch_that_has_to_be_a_multiple_of_frames_is_refused_before_the_work() -> None:
    """Calibration, which looks at sample by sample, ended in an error of a view."""

    class Frames(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.first(x).view(-1, 4, 8).mean(1)

    with pytest.raises(QtoolError, match=r"'Frames': .*any number of samples; got .*of one sample, though it takes 8;"):
        qtool.quantize(Frames().eval(), [torch.randn(8, 8)])


class Box:
    """A container that torch is told of and qtool does not look into."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


def test_outputs_in_a_class_of_ones_own_are_refused() -> None:
    class Boxing(nn.Linear):
        def forward(self, x: Tensor) -> dict[str, list[Box]]:
            return {"all": [Box(super().forward(x))]}

    if Box not in pytree.SUPPORTED_NODES:
        pytree.register_pytree_node(Box, lambda box: ([box.value], None), lambda values, _: Box(*values))
    with pytest.raises(QtoolError, match=r"expected outputs in tuples, lists, dicts.*got a Box; return its tensors in"):
        float_form(Boxing(3, 2), torch.randn(4, 3))
