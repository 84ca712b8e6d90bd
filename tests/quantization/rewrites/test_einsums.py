"""Einstein's notation becomes layers and matrix products, which targets have patterns for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from qtool.graphs.operators import aten
from qtool.quantization.capturing.float_form import float_form
from qtool.quantization.placement import Placement
from qtool.quantization.targets import ORT_CPU


class Attention(nn.Module):
    """Relative attention as XLNet has it: heads of queries, keys and values by stored tensors, positions first."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Parameter(torch.randn(6, 2, 3)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.einsum("bih->ibh", x)
        q, k, v = (torch.einsum("ibh,hnd->ibnd", x, weight) for weight in (self.q, self.k, self.v))
        shares = torch.einsum("ibnd,jbnd->bnij", q, k).softmax(-1)
        return torch.einsum("hnd, ibnd -> bih", self.o, torch.einsum("bnij,jbnd->ibnd", shares, v))


class Mixed(nn.Module):
    """One letter on each side, over the channels of an image, and one that stands for one output."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.row = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("oc,bchw->bohw", self.weight, x) * self.row[:, None, None]


MODELS = {"attention": (Attention, (5, 6), 4), "channels": (Mixed, (6, 3, 4), 1)}


@pytest.mark.parametrize("name", MODELS)
def test_with_a_stored_tensor_it_is_a_linear_layer_in_integers(name: str) -> None:
    torch.manual_seed(0)
    build, shape, layers = MODELS[name]
    model, x = build().eval(), torch.randn(2, *shape)
    graph = float_form(model, x, axes=(1,) if name == "attention" else ())
    for batch in (x, x[:1], torch.cat([x, x, x])):
        torch.testing.assert_close(graph(batch), model(batch), rtol=1e-4, atol=1e-4)
    assert aten.einsum.default not in {node.target for node in graph.graph.nodes}
    plan = Placement(graph, ORT_CPU).plan()
    assert [unit.kind for unit in plan.integer_units].count("linear") == layers
    assert {value.requires_grad for value in graph.parameters()} == {True}


class Others(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.one = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.randn(1, 4))

    def forward(self, x: Tensor) -> Tensor:
        diagonal = torch.einsum("bii->bi", x) + torch.einsum("bij->bi", x)
        several = torch.einsum("bij,bjk,kl->bil", x, x, self.weight).sum(1) + torch.einsum(
            "...ij,jk->...ik", x, self.weight
        ).sum(1)
        kept = torch.einsum("bij,ij->bi", x, self.weight) + torch.einsum("bij,ik->bj", x, self.weight)
        return diagonal + several + kept + torch.einsum("bij,jk->bi", x, self.one)


def test_what_no_kernel_computes_so_stays() -> None:
    torch.manual_seed(0)
    model, x = Others().eval(), torch.randn(2, 6, 6)
    graph = float_form(model, x)
    torch.testing.assert_close(graph(x), model(x))
    assert len(graph.graph.find_nodes(op="call_function", target=aten.einsum.default)) == 7
