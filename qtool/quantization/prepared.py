"""What both engines hand to calibration and training: a model with observers, and the way to convert it.

An engine is a function from a model to a ``Prepared``. What happens in between, calibrating or fine-tuning,
is the same for all, and so is what they convert to: the quantized form before its biases are integers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch.fx import GraphModule

from qtool.quantization.placement import Placement


class Switch(Protocol):
    """Sets a prepared model's batch-norm and dropout to training or to evaluation, each on its own."""

    def __call__(self, graph: GraphModule, *, batch_norm: bool, dropout: bool) -> None: ...


@dataclass(frozen=True)
class Prepared:
    """A model with observers, or with fake-quantizers where it is to be trained.

    ``observers`` holds those of activations by the name of the tensor they watch: the unit that makes it, or
    the input. ``convert`` gives the quantized graph, its nodes labelled with the units of ``placement``.
    """

    graph: GraphModule
    placement: Placement
    observers: dict[str, Any]
    convert: Callable[[], GraphModule]
    switch: Switch
