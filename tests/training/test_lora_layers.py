"""Which layers take an adapter, and what is trained in full beside them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from technique_nets import headed, small_gpt
from torch import nn

from qtool.errors import UsageError
from qtool.recipe import TrainConfig
from qtool.training.lora import require
from qtool.training.lora_layers import layers, targets, trained_in_full


def test_targets_are_ends_of_names() -> None:
    model = small_gpt()
    possible = layers(model)
    assert "lm_head" not in possible  # it is the embedding
    assert targets(model, ("attn.c_attn",), possible) == [f"transformer.h.{i}.attn.c_attn" for i in (0, 1)]
    assert len(targets(model, None, possible)) == 8
    with pytest.raises(UsageError, match=r"--lora-targets: .* got 'c_atn'; did you mean 'c_attn'\?"):
        targets(model, ("c_fc", "c_atn"), possible)
    with pytest.raises(UsageError, match="linear layers in repeated blocks"):
        targets(nn.ReLU(), None, {})
    attention = nn.Sequential(nn.MultiheadAttention(8, 2), nn.Linear(8, 8))
    assert list(layers(attention)) == ["1"]


def test_layers_that_share_their_weights_take_no_adapter() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 2))
    model[2].weight = model[0].weight
    assert list(layers(model)) == ["3"]
    with pytest.raises(UsageError, match="ungrouped convolution; got '2', Linear, which takes no adapter; "):
        targets(model, ("2",), layers(model))


def test_a_layer_that_is_in_several_places_takes_no_adapter() -> None:
    shared, other = nn.Linear(4, 4), nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.ReLU(), shared, other, nn.Linear(4, 2))
    model.register_parameter("table", other.weight)
    assert list(layers(model)) == ["4"]


class Cosine(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, nn.functional.normalize(self.weight), self.bias)


class Standardised(nn.Conv2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._conv_forward(x, self.weight - self.weight.mean(), self.bias)


class Written(nn.Linear):
    """What a linear layer computes, in words of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T + self.bias


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_class_that_makes_something_else_of_its_weights_takes_no_adapter(device: str) -> None:
    """A correction beside it would not be the one that is merged."""
    with torch.device(device):
        model = nn.Sequential(Cosine(6, 6), Standardised(2, 3, 3), Written(6, 6), nn.Linear(6, 2))
        nn.utils.parametrize.register_parametrization(model.append(nn.Linear(2, 2))[4], "bias", nn.ReLU())
    state = torch.get_rng_state()
    assert list(layers(model)) == ["2", "3"]
    assert torch.equal(torch.get_rng_state(), state)


def test_what_is_trained_in_full_takes_no_adapter() -> None:
    model = headed()
    possible = layers(model)
    assert trained_in_full(model, ("out", "head", "norm1")) == ["layers.0.norm1", "layers.1.norm1", "head"]
    assert targets(model, ("linear1",), possible, ["head"]) == ["layers.0.linear1", "layers.1.linear1"]
    plain = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    assert targets(plain, None, layers(plain), ["2"]) == ["0", "1"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora_trained": ("haed",)}, "--lora-trained: expected .*; got 'haed'; did you mean 'head'"),
        ({"lora_trained": ("overhead",)}, "a module with parameters; got 'overhead'"),
        ({"lora_trained": ("layers",)}, "a module with parameters; got 'layers'"),
        ({"lora_trained": ("head",), "lora_targets": ("out",)}, "got 'out', which --lora-trained names too"),
        ({"lora_trained": ("0", "1")}, "--lora-trained: expected a module beside the layers to adapt"),
    ],
)
def test_a_module_that_cannot_be_trained_in_full_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        require(headed(), TrainConfig(device="cpu", lora=2, **options))


def test_a_rank_beyond_every_weight_is_refused() -> None:
    """A weight's own rank is at most its shorter side; of several weights one may take what others cannot."""
    require(small_gpt(), TrainConfig(device="cpu", lora=32))
    with pytest.raises(UsageError, match=r"--lora: expected a rank of at most 32, .*; got 33; lower it, to 8 for"):
        require(small_gpt(), TrainConfig(device="cpu", lora=33))
    with pytest.raises(UsageError, match=r"of at most 4, .*; got 5; lower it, to 4 for"):
        require(headed(), TrainConfig(device="cpu", lora=5, lora_targets=("head.out",)))


def test_a_head_that_is_its_embedding_is_not_trained_alone() -> None:
    with pytest.raises(UsageError, match=r"got 'lm_head', whose weights are those of 'transformer.wte'; name both"):
        require(small_gpt(), TrainConfig(device="cpu", lora=2, lora_trained=("lm_head",)))
