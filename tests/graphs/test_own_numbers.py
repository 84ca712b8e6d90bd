"""Numbers that code reads from a model's own tensors are known; those that depend on inputs are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qtool.errors import QtoolError
from qtool.quantization.capturing.capture import capture


class Reading(nn.Module):
    """A layer, and what is made of its result with numbers read from tensors of the model's own."""

    def __init__(self, make: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.norm, self.make = nn.Linear(8, 8), nn.BatchNorm1d(8), make
        self.register_buffer("count", torch.tensor(2))
        self.register_buffer("bound", torch.tensor([0.5]), persistent=False)
        self.factor = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return self.make(self, self.norm(self.layer(x)), x)


OWN: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "a size": lambda own, y, x: y.view(x.shape[0], int(own.count), -1).sum(1),
    "a stride": lambda own, y, x: y[:, :: int(own.count)],
    "a padding": lambda own, y, x: nn.functional.pad(y, (1, own.count)),
    "paddings": lambda own, y, x: nn.functional.pad(y, (own.count, own.count // 2)),
    "a padding that is computed": lambda own, y, x: nn.functional.pad(y, [0, y.shape[1] * own.count - 3]),
    "how often": lambda own, y, x: sum((y * i for i in range(own.count)), y),
    "a limit": lambda own, y, x: y.clamp(max=float(own.bound)),
    "a factor": lambda own, y, x: y * own.factor.detach().item(),
    "a branch": lambda own, y, x: y + 1 if own.bound > 0.2 and own.count != 3 else y,
}


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", OWN)
def test_numbers_of_the_models_own_are_known(name: str, train: bool, capfd: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model = Reading(OWN[name]).eval()
    graph = capture(model, torch.randn(4, 8), train=train, norms=False)
    x = torch.randn(5, 8)
    torch.testing.assert_close(graph(x), model(x))
    (note,) = (note for note in graph.meta["notes"] if "numbers" in note)
    assert note.rpartition(": ")[2] == {
        "a limit": "bound", "a factor": "factor", "a branch": "bound, count"
    }.get(name, "count")  # fmt: skip
    assert capfd.readouterr() == ("", "")


def counted(own: Any, y: Tensor, x: Tensor) -> Tensor:
    own.count += 1
    return y * int(own.count)


def overwritten(own: Any, y: Tensor, x: Tensor) -> Tensor:
    own.bound[0] = x.mean()
    return y * own.bound.item()


OTHERS: dict[str, tuple[Callable[[Any, Tensor, Tensor], Tensor], str]] = {
    "of an input": (lambda own, y, x: y * x.mean().item(), "got a number that is read from one.*test_own_numbers"),
    "both": (lambda own, y, x: y * own.factor.item() * x.mean().item(), "got a number that is read from one"),
    "a branch": (lambda own, y, x: y if x.sum() > own.bound else -y, "control flow that depend on values"),
    "what is written over": (overwritten, "got a number that is read from one"),
    "what is drawn": (
        lambda own, y, x: y if torch.bernoulli(own.factor) > 0 else -y,
        "control flow that depend on values",
    ),
    "a counter": (counted, "without sizes or Python control flow that depend|a number that is read from one"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_changes_from_call_to_call_is_refused(name: str) -> None:
    make, words = OTHERS[name]
    with pytest.raises(QtoolError, match=words):
        capture(Reading(make).eval(), torch.randn(4, 8))


def test_sizes_that_values_decide_stay_open() -> None:
    model = Reading(lambda own, y, x: y * own.factor.item() + (x[:, 0] > 0).nonzero().reshape(-1).abs().sum()).eval()
    graph = capture(model, torch.randn(4, 8))
    for count in (1, 2, 5):
        x = torch.randn(count, 8)
        torch.testing.assert_close(graph(x), model(x))
