"""Which comparisons of sizes are told of."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from qtool.quantization.capturing.conditions import broken, of_batches, resized

EXAMPLE = {"a": torch.randn(4, 6), "b": torch.arange(4)}


class Keyed(nn.Module):
    """Two inputs by their names."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b[:, None]


class Any(nn.Module):
    """The same of whatever names."""

    def forward(self, **kwargs: Tensor) -> Tensor:
        return kwargs["a"] + kwargs["b"][:, None]


@pytest.mark.parametrize("model", [Keyed(), Any()])
@pytest.mark.parametrize(
    ("guard", "told"),
    [
        ("L['a'].size()[0] <= 4096", True),
        ("L['a'].size()[0] == L['b'].size()[0]", False),
        ("L['b'].size()[0] > 1", False),
        ("32 // L['b'].size()[0] > 0", True),
        ("torch.sym_max(1, 2 * L['a'].size()[0] // L['b'].size()[0]) == 2", False),
        ("torch.sym_max(5, L['a'].size()[0]) == L['a'].size()[0]", True),
        ("torch.sym_float(abs(-L['a'].size()[0])) > 0.5", False),
        ("L['c'].size()[0] > 0", True),  # which cannot be judged
        ("L['c'].size()[1] > 0", False),  # nor this, of no batch
        ("L['a'].size()[1] == 6", False),
    ],
)
def test_what_does_not_hold_for_a_batch_of_every_size(model: nn.Module, guard: str, told: bool) -> None:
    assert of_batches([guard], model, EXAMPLE) == (guard,) * told


def test_inputs_of_another_size_have_no_values() -> None:
    other = resized(EXAMPLE, 1, 9)
    assert {name: (tuple(value.shape), value.device.type) for name, value in other.items()} == {
        "a": ((4, 9), "meta"), "b": ((4,), "meta")
    }  # fmt: skip
    guards = ["L['a'].size()[1] < 9", "L['a'].size()[1] < 7"]
    assert broken(guards, Keyed(), [other, EXAMPLE]) == guards
    assert broken(guards, Keyed(), [EXAMPLE]) == []
