"""The list of techniques, in the order in which they are applied.

A technique is a function that changes a Setup (``qtool.steps.setup``) before the first step, and the condition
under which a config asks for it. To add one: a file with ``apply(setup, example)``, a line here, a key in
``TrainConfig``, a test.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from qtool.models.materialise import waits
from qtool.models.specs import shortcut
from qtool.recipe import TrainConfig
from qtool.steps.setup import Setup, no_scaler, plain_optimizer
from qtool.system.devices import resolve_device
from qtool.training import (
    checkpointing,
    compiling,
    layout,
    local_shards,
    lora,
    offload,
    optimizers,
    precision,
    replicas,
    rounding,
    rules,
    sharding,
    step_in_backward,
)


@dataclass(frozen=True)
class Technique:
    """``apply(setup, example)`` is called where ``wanted(config)``; ``example`` is a small batch input or None.

    ``require(model, config)`` raises where the model cannot take it.
    """

    name: str
    wanted: Callable[[TrainConfig], bool]
    apply: Callable[[Setup, Any], None]
    require: Callable[[nn.Module, TrainConfig], None] = lambda model, config: None


TECHNIQUES = (
    Technique("lora", lambda c: c.lora is not None, lora.apply, lora.require),
    Technique("precision", lambda c: True, precision.apply),
    Technique("channels last", lambda c: c.channels_last and c.strategy != "fsdp", layout.apply),
    Technique(
        "activation checkpointing", lambda c: c.activation_checkpointing, checkpointing.apply, checkpointing.require
    ),
    Technique("activation offload", lambda c: c.activation_offload, offload.apply),
    Technique("compile", lambda c: c.compile, compiling.apply, compiling.require),
    Technique("replicas", lambda c: c.devices > 1 and c.strategy == "ddp", replicas.apply),
    Technique("sharding", lambda c: c.strategy == "fsdp", sharding.apply),
    Technique("optimizer", lambda c: True, optimizers.apply, optimizers.require),
    Technique("rounding", rounding.wanted, rounding.apply),
    Technique("local shards", lambda c: c.strategy == "fsdp", local_shards.apply),
    Technique("step in backward", lambda c: c.step_in_backward, step_in_backward.apply),
)


def check(model: nn.Module, config: TrainConfig) -> None:
    """Raises UsageError where options exclude each other or ask for what ``model`` does not have; changes nothing."""
    rules.check(config)
    for technique in TECHNIQUES:
        if technique.wanted(config):
            technique.require(model, config)


def setup(model: nn.Module, config: TrainConfig, example: Any = None) -> Setup:
    """The step that ``config`` asks for, its model on the device. Close it (or use ``with``) when training is over.

    ``example`` is an input of one or two samples; techniques that look at the model's shapes need it. Raises what
    :func:`check` raises.
    """
    check(model, config)
    device = resolve_device(config.device)
    made = Setup(model, config, device, plain_optimizer(config), no_scaler(device))
    made.around.append(lambda: shortcut(False))
    try:
        if config.strategy != "fsdp" and not waits(model):
            precision.move(made)
        for technique in TECHNIQUES:
            if technique.wanted(config):
                technique.apply(made, example)
    except BaseException:
        made.close()
        raise
    return made
