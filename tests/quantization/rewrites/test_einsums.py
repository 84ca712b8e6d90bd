"""Einstein's notation becomes layers and matrix products, which targets have patterns for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from qtool.graphs.operators import aten
from qtool.quantization.capturing.float_form import float_form
from qtool.quantization.placement import Placement
from qtool.quantization.rewrites import einsums
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


class Mixture(nn.Module):
    """The weights of three experts, for each of two groups in ``pairs``; ``given`` multiplies by some."""

    def __init__(self, given: Callable[[Mixture, Tensor], Tensor]) -> None:
        super().__init__()
        self.given = given
        self.up, self.down = nn.Parameter(torch.randn(3, 6, 4)), nn.Parameter(torch.randn(3, 6, 4))
        self.pairs = nn.Parameter(torch.randn(2, 3, 6, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.given(self, x)


def applied_twice(m: Mixture, x: Tensor) -> Tensor:
    once = torch.bmm(x.flatten(0, 1).expand(3, -1, -1), m.up)
    return torch.bmm(torch.bmm(once, m.down.mT), m.up)


def gated(m: Mixture, x: Tensor) -> Tensor:
    hidden = torch.einsum("btd,edf->btef", x, m.up)
    return torch.einsum("btef,edf,bte->btd", hidden, m.down, x[..., :3])


MIXTURES: dict[str, tuple[Callable[[Mixture, Tensor], Tensor], int, int]] = {
    "bmm": (lambda m, x: torch.bmm(x.flatten(0, 1).expand(3, -1, -1), m.up), 3, 72),
    "of what one layer gives": (lambda m, x: torch.bmm(x.flatten(0, 1) @ m.up, m.down.transpose(1, 2)), 4, 144),
    "for each sample": (lambda m, x: x.unsqueeze(1).expand(-1, 3, -1, -1) @ m.up.flatten().view(3, 6, 4), 3, 72),
    "stored first": (lambda m, x: m.up.mT @ x.mT.unsqueeze(1).expand(-1, 3, -1, -1), 3, 72),
    "letters": (lambda m, x: torch.einsum("ebtk,ekn->ebtn", x.expand(3, -1, -1, -1), m.up), 3, 72),
    "in another order": (lambda m, x: torch.einsum("nke,btek->bnet", m.down, x[:, :, None].repeat(1, 1, 4, 1)), 4, 72),
    "groups": (lambda m, x: torch.einsum("btk,gekn->btgen", x, m.pairs), 1, 144),
    "groups of experts": (lambda m, x: (x[:, None, None] + m.pairs[..., :1, 0, None]) @ m.pairs, 6, 144),
    "gated": (gated, 2, 144),
    "twice": (applied_twice, 9, 144),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXTURES)
def test_a_product_with_stored_experts_is_a_layer_of_each(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(einsums, "LEAST_WEIGHTS", 18)
    torch.manual_seed(0)
    given, layers, weights = MIXTURES[name]
    model, x = Mixture(given).eval(), torch.randn(2, 5, 6)
    graph = float_form(model, x, axes=(1,))
    for batch in (x, x[:1], torch.randn(3, 7, 6)):
        torch.testing.assert_close(graph(batch), model(batch), rtol=1e-4, atol=1e-4)
    plan = Placement(graph, ORT_CPU).plan()
    assert [unit.kind for unit in plan.integer_units].count("linear") == layers
    matrices = [value for value in graph.parameters() if value.dim() == 2]
    assert sum(value.numel() for value in matrices) == weights  # stored once
    assert {value.requires_grad for value in matrices} == {True}


@pytest.mark.parametrize(("most", "least"), [(2, 12), (64, 25)])
@pytest.mark.parametrize("name", ["bmm", "stored first", "letters"])
def test_many_or_small_experts_stay_whole(name: str, most: int, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(einsums, "MOST_LAYERS", most)
    monkeypatch.setattr(einsums, "LEAST_WEIGHTS", least)
    model, x = Mixture(MIXTURES[name][0]).eval(), torch.randn(2, 5, 6)
    graph = float_form(model, x)
    torch.testing.assert_close(graph(x), model(x))
    (unit,) = (unit for unit in Placement(graph, ORT_CPU).plan().units if unit.kind in ("bmm", "matmul", "einsum"))
    assert unit.reason == "its 72 stored numbers are few"
