"""Computed weights become stored ones, with the same numbers, and quantization-aware training quantizes them."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from qat_runs import config, qat
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from qtool.quantization.capturing.parametrized import with_stored_weights


def old(norm: Callable[..., nn.Module]) -> Callable[[nn.Module], nn.Module]:
    def normed(module: nn.Module) -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return norm(module)

    return normed


NORMS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "weight norm": parametrizations.weight_norm,
    "spectral norm": parametrizations.spectral_norm,
    "weight norm by a hook": old(nn.utils.weight_norm),
    "spectral norm by a hook": old(nn.utils.spectral_norm),
}
NORMS["pruning"] = lambda module: prune.l1_unstructured(module, "weight", 0.5)
NORMS["pruning twice, and of the bias"] = lambda module: prune.random_unstructured(
    prune.ln_structured(prune.l1_unstructured(module, "weight", 0.5), "weight", 0.25, 2, 0), "bias", 0.25
)
X = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))


class Normed(nn.Module):
    """Two convolutions whose weights are computed, and a layer whose weight is not."""

    def __init__(self, norm: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = norm(nn.Conv2d(1, 8, 3)), norm(nn.Conv2d(8, 8, 3))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x).relu()).relu()
        result: Tensor = self.head(x.mean((2, 3)))
        return result


@pytest.mark.parametrize("name", NORMS)
def test_the_copy_stores_them_and_the_model_keeps_its_own(name: str) -> None:
    model = Normed(NORMS[name])
    model(X), model.eval()
    expected, before = model(X), {key: value.clone() for key, value in model.state_dict().items()}
    model.train()
    stored = with_stored_weights(model)
    assert {key for key, _ in stored.named_parameters()} == {
        f"{layer}.{kind}" for layer in ("first", "second", "head") for kind in ("weight", "bias")
    }
    torch.testing.assert_close(stored(X), expected)
    assert model.training
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, before[key], rtol=0, atol=0)


def test_another_parametrization_is_one_too_and_a_plain_model_is_itself() -> None:
    class Doubled(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    layer = nn.Linear(3, 2)
    assert with_stored_weights(layer) is layer
    parametrize.register_parametrization(layer, "weight", Doubled())
    stored = with_stored_weights(layer)
    assert stored.weight.is_leaf
    torch.testing.assert_close(stored.weight, layer.weight)


@pytest.mark.parametrize("name", NORMS)
def test_training_quantizes_the_weights_that_they_come_to(name: str) -> None:
    model = Normed(NORMS[name]).eval()
    form = qat(model, "pt2e", config(max_steps=2))
    assert [unit.name for unit in form.plan.integer_units if unit.kind == "conv"] == ["first", "second"]
    assert form.plan.float_units == ()
    assert any("were pruned" in note for note in form.plan.notes) == name.startswith("pruning")
