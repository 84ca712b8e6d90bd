"""A model of one function, for tests of how the operators of a model are rewritten."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

Forward = Callable[[Tensor], Any]


class Written(nn.Module):
    def __init__(self, function: Forward) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)
