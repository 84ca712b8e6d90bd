"""Distillation: QAT that trains towards the float model instead of the labels (arXiv 1503.02531).

The aim of quantization is the model that was trained, not another one that scores as well. The float model's
outputs say what that model answers for every sample, with more to learn from than one label: for rows of
logits the loss is ``KL(softmax(teacher) ‖ softmax(student))``, for any other output the mean squared error.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qtool.nested import call, tensors, to_float32
from qtool.step import LossFunction


def towards(teacher: nn.Module) -> LossFunction:
    """The loss of a model against ``teacher``'s outputs for the same inputs; targets are not looked at.

    The teacher is moved to where the inputs are, and computes in float32 unless autocast is on."""

    def loss(model: Any, value: Any, target: Any) -> tuple[Tensor, Tensor | float]:
        teacher.to(next(tensors(value)).device)
        with torch.no_grad():
            wanted = to_float32(call(teacher, value))
        given = to_float32(call(model, value))
        parts = [_distance(w, g) for w, g in zip(tensors(wanted), tensors(given), strict=True)]
        return torch.stack(parts).sum(), float(next(tensors(wanted)).shape[0])

    return loss


def _distance(wanted: Tensor, given: Tensor) -> Tensor:
    """The distance summed over the batch."""
    if wanted.dim() == 2:
        log_p, log_q = wanted.log_softmax(1), given.log_softmax(1)
        return (log_p.exp() * (log_p - log_q)).sum()
    return (wanted - given).square().flatten(1).mean(1).sum()
