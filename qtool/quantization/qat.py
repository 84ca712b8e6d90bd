"""Quantization-aware training: fine-tuning through fake-quantizers (arXiv 1712.05877, 1806.08342).

The captured training graph keeps its batch-norm live: each convolution is trained as if batch-norm were
already folded, its scaled weight fake-quantized, its statistics still moving. Ranges start from a
calibration pass, so that the first step does not see a network quantized to noise. Then, in order:
batch-norm statistics are frozen after a fraction of the steps, and the ranges after another, so that the
last steps train exactly the integers that will be shipped. A folded weight's range follows its batch-norm, and
is frozen when both are.

Left out on purpose: weights in 16 bits (``16-true``, ``bf16-true``). A weight that is itself rounded to 8 or 11 bits of
significand is not the one whose rounding to integers is to be trained; mixed precision keeps it in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from qtool.errors import QtoolError, UsageError
from qtool.loop import Hooks
from qtool.quantization import pt2e
from qtool.quantization.calibrate import calibrate
from qtool.quantization.capture import aten
from qtool.quantization.distillation import towards
from qtool.quantization.observers import FakeQuantizer
from qtool.quantization.prepared import Prepared, Switch
from qtool.recipe import QatConfig
from qtool.step import LossFunction

FineTune = Callable[[nn.Module, Hooks, LossFunction | None], Any]
_DROPOUTS = (aten.dropout.default, aten.feature_dropout.default)


def require_float32_weights(config: QatConfig) -> None:
    """Raises UsageError for a precision that keeps weights in 16 bits."""
    if config.precision in ("16-true", "bf16-true"):
        raise UsageError(
            "quantize --mode qat", "a precision with float32 weights", f"'{config.precision}'",
            f"use {config.precision.replace('true', 'mixed')} or 32-true",
        )  # fmt: skip


def train_quantized(
    prepared: Prepared, calibration: Iterable[Any], fine_tune: FineTune, config: QatConfig, teacher: nn.Module
) -> dict[str, Any]:
    """Calibrates and fine-tunes a prepared model in place, ready to convert; returns its ranges.

    ``fine_tune(graph, hooks, loss)`` trains the graph in place (the step loop, handed in by the caller);
    ``teacher`` is the float model, whose outputs are the aim when ``config.distill``.
    """
    prepared.switch(prepared.graph, batch_norm=False, dropout=False)
    _start_ranges(prepared.graph, calibration)
    fine_tune(prepared.graph, QatHooks(config, prepared.switch), towards(teacher) if config.distill else None)
    for trained in (prepared.graph, teacher):
        trained.to("cpu")  # the quantized form is made and saved there, wherever it was trained
    prepared.switch(prepared.graph, batch_norm=False, dropout=False)
    return {
        name: {"low": float(fake.low), "high": float(fake.high), "method": "qat"}
        for name, fake in prepared.observers.items()
    }


def _start_ranges(prepared: GraphModule, calibration: Iterable[Any]) -> None:
    """Sets every range to the calibration data's extremes, with quantization off."""
    fakes = pt2e.fake_quantizers(prepared)
    averaging = {id(fake): fake.averaging for fake in fakes if isinstance(fake, FakeQuantizer)}
    for fake in fakes:
        fake.quantizing = False
        if isinstance(fake, FakeQuantizer):
            fake.averaging = None
    calibrate(prepared, calibration)
    for fake in fakes:
        fake.quantizing = True
        if isinstance(fake, FakeQuantizer):
            fake.averaging = averaging[id(fake)]


class QatHooks(Hooks):
    """Switches a captured graph between training and evaluation, and freezes what is to be frozen by then."""

    def __init__(self, config: QatConfig, switch: Switch | None = None) -> None:
        self.config, self.switch = config, switch or set_training
        self.frozen_norms = self.frozen_ranges = False

    def mode(self, model: nn.Module, training: bool) -> None:
        """Sets dropout and, unless frozen, batch-norm; ranges are observed in training alone."""
        graph = _graph_of(model)
        self.switch(graph, batch_norm=training and not self.frozen_norms, dropout=training)
        for fake in pt2e.fake_quantizers(graph):
            moving = not self.frozen_ranges or (fake.is_per_channel and not self.frozen_norms)
            fake.observing = training and moving

    def before_step(self, model: nn.Module, step: int, total: int) -> None:
        """Freezes batch-norm statistics, then ranges, once their fraction of the steps is done."""
        norms, ranges = step >= self.config.freeze_bn * total, step >= self.config.freeze_observers * total
        if (norms, ranges) != (self.frozen_norms, self.frozen_ranges):
            self.frozen_norms, self.frozen_ranges = norms, ranges
            self.mode(model, True)

    def state_dict(self) -> dict[str, Any]:
        """What is frozen."""
        return {"frozen_norms": self.frozen_norms, "frozen_ranges": self.frozen_ranges}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes what ``state_dict`` gave; the next ``mode`` makes it so."""
        self.frozen_norms, self.frozen_ranges = bool(state["frozen_norms"]), bool(state["frozen_ranges"])


def _graph_of(model: nn.Module) -> GraphModule:
    for module in model.modules():
        if isinstance(module, GraphModule):
            return module
    raise QtoolError("qat", "a captured graph", type(model).__name__, "pass the prepared graph to the loop")


def set_training(graph: GraphModule, *, batch_norm: bool, dropout: bool) -> None:
    """Writes the training flag of every batch-norm and dropout in a captured graph.

    A captured graph holds these flags as constants, so ``train()`` and ``eval()`` cannot reach them.
    """
    changed = False
    for node in graph.graph.nodes:
        position, value = (5, batch_norm) if node.target is aten.batch_norm.default else (2, dropout)
        if node.target is aten.batch_norm.default or node.target in _DROPOUTS:
            changed |= node.args[position] is not value
            node.update_arg(position, value)
        elif node.target is aten.add_.Tensor and _counts_batches(node):
            changed |= node.args[1] != int(batch_norm)
            node.update_arg(1, int(batch_norm))
    if changed:
        graph.recompile()


def _counts_batches(node: torch.fx.Node) -> bool:
    source = node.args[0]
    return isinstance(source, torch.fx.Node) and str(source.target).endswith("num_batches_tracked")
