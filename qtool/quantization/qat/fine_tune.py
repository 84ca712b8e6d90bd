"""Quantization-aware training: fine-tuning through fake-quantizers (arXiv 1712.05877, 1806.08342).

The graph that is trained is the one that is shipped, the model's evaluation form, with dropout live in it: drop paths,
noise and outputs for training alone have no part in it. By default training begins where post-training quantization
ends: batch-norm folded, channels equalized and ordered, ranges those of least output error, weights at the integers
that its algorithms chose (``start.py``). All of this but the weights stays as it is, so that every step trains the
integers that will be shipped. From weights rounded to the nearest, a ResNet of 4-bit weights ended at 27.1 dB and a
MobileNet at 18.8, where post-training quantization has 31.4 and 23.5.

With ``freeze_bn`` above 0 batch-norm is live instead, as the model has it, and no pass goes over the graph: each
convolution is trained as if batch-norm were already folded, its scaled weight fake-quantized. Then, in order: its
statistics are frozen after a fraction of the steps, and the ranges after another. A folded weight's range follows its
batch-norm, and is frozen when both are. Batches of fine-tuning are small and few, and seldom augmented as those of
training were: live statistics alone, without one step of the weights, took a ResNet-20 from 37.4 dB at the logits to
26.2. Moving averages of their extremes undo the ranges of least output error that training starts from, which cost a
small ResNet 1.2 dB at 8 bits and 2.3 at 4; learned ranges are frozen after 0.7. The learning rate matters as much:
Adam's first steps move every weight by it whatever the gradient, and an 8-bit step is some 2e-3 of a weight, so that
rates of ordinary fine-tuning are noise in the last bits.

Left out on purpose: weights in 16 bits (``16-true``, ``bf16-true``). A weight that is itself rounded to 8 or 11 bits of
significand is not the one whose rounding to integers is to be trained; mixed precision keeps it in float32.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn
from torch.fx import GraphModule

from qtool.errors import QtoolError, UsageError
from qtool.graphs.edits import set_training
from qtool.quantization.calibration.calibrate import calibrate, require_reached
from qtool.quantization.calibration.observers import FakeQuantizer
from qtool.quantization.engines import pt2e
from qtool.quantization.prepared import Prepared, Switch
from qtool.quantization.qat.averaging import Average
from qtool.quantization.qat.distillation import mean_squares, tapped, towards
from qtool.quantization.quantizers.learned import learn_steps
from qtool.quantization.residence import Moved, on
from qtool.recipe import AUTO, QatConfig
from qtool.steps.loop import Hooks
from qtool.steps.setup import LossFunction
from qtool.system.devices import resolve_device

FineTune = Callable[[nn.Module, Hooks, LossFunction | None], Any]


def check_tuning(config: QatConfig) -> None:
    """Raises UsageError for a precision that keeps weights in 16 bits, and for options that exclude each other."""
    if config.ema is not None and config.early_stopping is not None:
        raise UsageError(
            "--ema", "the average of all steps or the best epoch", "--early-stopping too", "leave one of them out"
        )
    if config.distill_features and not config.distill:
        raise UsageError("--distill-features", "--distill", "--no-distill", "leave one of them out")
    if config.label_smoothing and config.distill:
        raise UsageError(
            "--label-smoothing", "--no-distill, whose aim the labels are", "--distill", "leave one of them out"
        )
    if config.distill_features and config.compile:
        raise UsageError("--distill-features", "a model that is not compiled", "--compile", "leave one of them out")
    if config.activation_checkpointing:
        raise UsageError(
            "quantize --mode qat", "options for a captured graph, which has no blocks", "--activation-checkpointing",
            "pass --micro-batches to save memory",
        )  # fmt: skip
    if config.lora is not None or config.batch_size == AUTO or config.memory_budget is not None:
        raise UsageError(
            "quantize --mode qat", "a --batch-size, no --lora and no --memory-budget", "one of them",
            "use them in training, whose weights QAT goes on from",
        )  # fmt: skip
    if config.precision in ("16-true", "bf16-true"):
        raise UsageError(
            "quantize --mode qat", "a precision with float32 weights", f"'{config.precision}'",
            f"use {config.precision.replace('true', 'mixed')} or 32-true",
        )  # fmt: skip
    _require_one_process(config)


def _require_one_process(config: QatConfig) -> None:
    """Raises UsageError for options of training on several devices: observers would see a share of the data each."""
    if config.devices > 1 or config.strategy == "fsdp" or config.create_on_device:
        raise UsageError(
            "quantize --mode qat", "one process with the whole model", "an option of training on several devices",
            "leave devices, strategy and create_on_device out",
        )  # fmt: skip


def train_quantized(
    prepared: Prepared, calibration: Iterable[Any], fine_tune: FineTune, config: QatConfig, teacher: GraphModule,
    ranges: Mapping[str, Any] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Calibrates and fine-tunes a prepared model in place, ready to convert; returns its ranges.

    ``fine_tune(graph, hooks, loss)`` trains the graph in place (the step loop, handed in by the caller);
    ``teacher`` is the float model, whose outputs are the aim when ``config.distill``. ``ranges`` of a post-training
    quantization are where training starts; without them it is the calibration data's extremes.
    """
    prepared.switch(prepared.graph, batch_norm=False, dropout=False)
    _start_ranges(prepared, calibration, ranges or {}, learned=config.step_size == "learned")
    if config.step_size == "learned":
        learn_steps(pt2e.fake_quantizers(prepared.graph))
    hooks = QatHooks(config, prepared.switch)
    graphs, device = (prepared.graph, teacher), resolve_device(config.device)
    with (
        on(device, *graphs),
        tapped(teacher, prepared.graph, config.distill_features or ()) as taps,
    ):
        squares = mean_squares(teacher, taps, Moved(calibration, device))
        fine_tune(prepared.graph, hooks, towards(teacher, taps, squares) if config.distill else None)
        hooks.finish(prepared.graph)
    prepared.switch(prepared.graph, batch_norm=False, dropout=False)
    return {
        name: dict(zip(("low", "high"), fake.range(), strict=True)) | {"method": "qat"}
        for name, fake in prepared.observers.items()
    }


def _start_ranges(prepared: Prepared, calibration: Iterable[Any], ranges: Mapping[str, Any], *, learned: bool) -> None:
    """Sets every range to that of ``ranges`` or the calibration data's extremes, learned weights' to the least error.

    Quantization is off meanwhile. One batch is enough where all ranges are there: weights are the same for all samples.
    """
    fakes = pt2e.fake_quantizers(prepared.graph)
    averaging = {id(fake): fake.averaging for fake in fakes if isinstance(fake, FakeQuantizer)}
    for name in prepared.observers.keys() & ranges.keys():
        prepared.observers[name].set_range(float(ranges[name]["low"]), float(ranges[name]["high"]))
    for fake in fakes:
        fake.quantizing = False
        if isinstance(fake, FakeQuantizer):
            fake.averaging, fake.observing = None, not fake.reached
            continue
        fake.observing = False  # the first sample has its weight looked at
        if learned:
            fake.method = "mse"
    whole = any(isinstance(fake, FakeQuantizer) and fake.observing for fake in fakes)
    require_reached(prepared, calibrate(prepared.graph, calibration if whole else itertools.islice(calibration, 1)))
    for fake in fakes:
        fake.observing = fake.quantizing = True
        if isinstance(fake, FakeQuantizer):
            fake.averaging = averaging[id(fake)]
            fake.calculate_qparams()  # raises where the data were not finite


class QatHooks(Hooks):
    """Switches a captured graph between training and evaluation, and freezes what is to be frozen by then."""

    def __init__(self, config: QatConfig, switch: Switch | None = None) -> None:
        self.config, self.switch = config, switch or set_training
        self.frozen_norms = self.frozen_ranges = False
        self.average = Average(config.ema) if config.ema is not None else None

    def mode(self, model: nn.Module, training: bool) -> None:
        """Sets dropout and, unless frozen, batch-norm; ranges are observed in training alone."""
        graph = _graph_of(model)
        self.switch(graph, batch_norm=training and not self.frozen_norms, dropout=training)
        for fake in pt2e.fake_quantizers(graph):
            moving = not self.frozen_ranges or (fake.is_per_channel and not self.frozen_norms)
            fake.observing = training and moving

    def before_step(self, model: nn.Module, step: int, total: int) -> None:
        """Freezes batch-norm statistics, then ranges, once their fraction of the steps is done."""
        if self.average is not None:
            self.average.update(_graph_of(model), step)
        norms, ranges = step >= self.config.freeze_bn * total, step >= self.config.frozen_from * total
        if (norms, ranges) != (self.frozen_norms, self.frozen_ranges):
            self.frozen_norms, self.frozen_ranges = norms, ranges
            self.mode(model, True)

    def after_epoch(self, model: nn.Module, epoch: int, metrics: Mapping[str, float]) -> None:
        """Takes the last step of the epoch into the average."""
        if self.average is not None:
            self.average.update(_graph_of(model), self.average.step + 1)

    def finish(self, graph: GraphModule) -> None:
        """Puts the averaged weights into the graph, once training is over."""
        if self.average is not None:
            self.average.put(graph)

    def state_dict(self) -> dict[str, Any]:
        """What is frozen, and the average."""
        average = {"average": self.average.state_dict()} if self.average is not None else {}
        return {"frozen_norms": self.frozen_norms, "frozen_ranges": self.frozen_ranges, **average}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes what ``state_dict`` gave; the next ``mode`` makes it so."""
        self.frozen_norms, self.frozen_ranges = bool(state["frozen_norms"]), bool(state["frozen_ranges"])
        if self.average is not None:
            self.average.load_state_dict(state["average"])


def _graph_of(model: nn.Module) -> GraphModule:
    for module in model.modules():
        if isinstance(module, GraphModule):
            return module
    raise QtoolError("qat", "a captured graph", type(model).__name__, "pass the prepared graph to the loop")
