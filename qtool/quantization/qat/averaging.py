"""The exponential moving average of a model's weights: what is shipped is the middle of where training went.

After step t, with decay d (Polyak and Juditsky 1992 in the form of arXiv 1806.05594's comparison),

    a ← d_t · a + (1 − d_t) · w,    d_t = min(d, (1 + t) / (10 + t))

so that short runs are not averaged with where they began. Parameters only: batch-norm statistics are averages
already, and ranges stay those that training ended with: read anew from the averaged weights, they changed what short
trainings of a small net gave by 0.1 dB at most, to either side. Validation during training sees the weights themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


class Average:
    """The average of a model's parameters over the steps; ``step`` counts the optimizer steps that are in it."""

    def __init__(self, decay: float) -> None:
        self.decay, self.step = decay, 0
        self.values: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Takes in the parameters after ``step`` steps; a second call for the same step changes nothing."""
        if self.values and step <= self.step:
            return
        self.step = step
        decay = min(self.decay, (1 + step) / (10 + step))
        for name, parameter in model.named_parameters():
            if name not in self.values:
                self.values[name] = parameter.detach().clone()
            else:
                self.values[name] = self.values[name].to(parameter.device).lerp_(parameter.detach(), 1 - decay)

    @torch.no_grad()
    def put(self, model: nn.Module) -> None:
        """Makes the average the model's parameters; before any step, nothing."""
        for name, parameter in model.named_parameters():
            if name in self.values:
                parameter.copy_(self.values[name])

    def state_dict(self) -> dict[str, Any]:
        """What a resume has to give back."""
        return {"step": self.step, "values": dict(self.values)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes what ``state_dict`` gave."""
        self.step, self.values = int(state["step"]), dict(state["values"])
