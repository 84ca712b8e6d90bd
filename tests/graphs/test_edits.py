"""Edits of a captured graph, and what is left of its tensors and operators afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.fx import GraphModule, Node

from qtool.graphs.edits import (
    call_before,
    clean,
    copied,
    drop_unused,
    owner,
    parameter,
    remove_identities,
    set_parameter,
    store_before,
)
from qtool.graphs.operators import aten


@pytest.fixture
def graph() -> GraphModule:
    """Two linear layers with a dropout between them, as torch captures it."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2)).eval()
    return torch.export.export(net, (torch.ones(2, 3),)).module()  # type: ignore[return-value]


def linears(graph: GraphModule) -> list[Node]:
    return [node for node in graph.graph.nodes if node.target is aten.linear.default]


def test_dropout_is_removed_and_a_copy_is_apart(graph: GraphModule) -> None:
    other = copied(graph)
    remove_identities(graph)
    assert not any("dropout" in str(node.target) for node in graph.graph.nodes)
    assert any("dropout" in str(node.target) for node in other.graph.nodes)
    other.get_parameter("2.weight").data.zero_()
    assert bool(graph.get_parameter("2.weight").any())


def test_stored_tensors_are_set_read_and_dropped_by_path(graph: GraphModule) -> None:
    set_parameter(graph, "a.new.place", torch.ones(2))
    set_parameter(graph, "a.new.count", torch.ones(2, dtype=torch.int8))
    set_parameter(graph, "2.weight", torch.zeros(2, 4))
    assert isinstance(graph.get_submodule("a.new").place, nn.Parameter)
    assert not isinstance(graph.get_submodule("a.new").count, nn.Parameter)
    value = parameter(graph, linears(graph)[1].args[1])
    assert value is not None
    assert not bool(value.any())
    assert parameter(graph, None) is None
    drop_unused(graph)
    names = {name for name, _ in [*graph.named_parameters(), *graph.named_buffers()]}
    assert "2.weight" in names
    assert not any(name.startswith("a.") for name in names)


@pytest.mark.parametrize("trains", [True, False])
def test_a_tensor_in_the_place_of_another_trains_as_that_does(graph: GraphModule, trains: bool) -> None:
    graph.get_parameter("0.weight").requires_grad_(trains)
    set_parameter(graph, "0.weight", torch.ones(4, 3), like="0.weight")
    set_parameter(graph, "0.gain", torch.ones(4))
    assert graph.get_parameter("0.weight").requires_grad is trains
    assert not graph.get_parameter("0.gain").requires_grad


def test_what_is_put_before_an_operator_is_computed_and_known(graph: GraphModule) -> None:
    x = torch.arange(6.0).reshape(2, 3)
    (last,), before = linears(graph)[1:], graph(x)
    gain = store_before(graph, last, "gain", torch.tensor(3.0))
    last.args = (call_before(last, aten.mul.Tensor, last.args[0], gain), *last.args[1:])
    clean(graph)
    scaled = last.args[0]
    assert isinstance(scaled, Node)
    assert scaled.meta["val"].shape == (2, 4)
    assert owner(scaled) == owner(last) == "2"
    bias = graph.get_parameter("2.bias")
    torch.testing.assert_close(graph(x) - bias, 3 * (before - bias))


def test_cleaning_leaves_what_is_read(graph: GraphModule) -> None:
    x = torch.ones(2, 3)
    (last,), before = linears(graph)[1:], graph(x)
    call_before(last, aten.relu.default, last.args[0])
    set_parameter(graph, "unread", torch.ones(2))
    clean(graph)
    assert not any(node.target is aten.relu.default for node in graph.graph.nodes)
    assert "unread" not in dict(graph.named_parameters())
    assert torch.equal(graph(x), before)
