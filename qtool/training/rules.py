"""Which options exclude each other, in one table, looked at before a model is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from qtool.errors import UsageError
from qtool.recipe import AUTO, QatConfig, TrainConfig
from qtool.system.devices import resolve_device


@dataclass(frozen=True)
class Rule:
    """``broken(config)`` is refused as ``where: expected …; got …; do``; the texts may name fields in braces."""

    where: str
    broken: Callable[[TrainConfig], bool]
    expected: str
    got: str
    do: str


def _without_adapters(name: str) -> Rule:
    """The rule for an option that says how adapters are: without ``lora`` it is not given."""
    return Rule(
        f"--{name.replace('_', '-')}",
        lambda c: c.lora is None and getattr(c, name) != getattr(TrainConfig, name),
        "adapters, which are all that is trained above frozen weights",
        "no --lora",
        "pass for example --lora 8, or leave it out",
    )


RULES = (
    Rule(
        "--micro-batches",
        lambda c: c.micro_batches > c.batch_size != AUTO,
        "at most one micro-batch per sample",
        "{micro_batches} micro-batches of a batch of {batch_size}",
        "lower --micro-batches",
    ),
    Rule(
        "--step-in-backward",
        lambda c: c.step_in_backward and c.micro_batches > 1,
        "whole batches, since a gradient is used and freed before the next micro-batch could be added to it",
        "{micro_batches} micro-batches",
        "pass --micro-batches 1 and a smaller --batch-size",
    ),
    Rule(
        "--step-in-backward",
        lambda c: c.step_in_backward and c.grad_clip is not None,
        "no clipping, since the global norm is known only when all gradients are there",
        "--grad-clip {grad_clip}",
        "pass --grad-clip none",
    ),
    Rule(
        "--step-in-backward",
        lambda c: c.step_in_backward and c.precision == "16-mixed",
        "a precision without loss scaling, since a step is skipped only after all gradients were looked at",
        "--precision 16-mixed",
        "pass --precision bf16-mixed",
    ),
    Rule(
        "--grad-clip",
        lambda c: c.grad_clip == 0,
        "a norm above 0",
        "0, which leaves nothing of any gradient",
        "pass --grad-clip none to switch clipping off",
    ),
    Rule(
        "--optimizer-kernels",
        lambda c: c.optimizer_kernels != "fused" and c.optimizer not in ("adamw", "sgd"),
        "the optimizer's own kernels",
        "{optimizer_kernels} with --optimizer {optimizer}",
        "leave it out, or pass --optimizer adamw or sgd",
    ),
    Rule(
        "--optimizer",
        lambda c: c.optimizer.startswith("paged") and resolve_device(c.device).type == "cpu",
        "a GPU, from which a paged optimizer's states move to host memory under pressure",
        "--optimizer {optimizer} on the CPU",
        "pass --optimizer adamw or adamw8bit",
    ),
    Rule(
        "--rounding",
        lambda c: c.rounding != "nearest" and c.precision != "bf16-true",
        "--precision bf16-true, whose weights are updated in 16 bits",
        "--precision {precision}",
        "pass --precision bf16-true, or leave --rounding out",
    ),
    *map(_without_adapters, ("lora_base", "lora_targets", "lora_trained", "lora_alpha", "lora_dropout")),
    Rule(
        "--lora-alpha",
        lambda c: c.lora_alpha == 0,
        "a number above 0",
        "0, with which adapters change nothing",
        "raise it, to 16 for example",
    ),
    Rule(
        "--lora-dropout",
        lambda c: c.lora_dropout == 1,
        "a share below 1",
        "1, with which adapters are given nothing",
        "lower it, to 0.1 for example",
    ),
    Rule(
        "--label-smoothing",
        lambda c: c.label_smoothing == 1,
        "a share below 1",
        "1, with which all classes are as right",
        "lower it, to 0.1 for example",
    ),
    Rule(
        "--ema",
        lambda c: isinstance(c, QatConfig) and c.ema == 1,
        "a decay below 1",
        "1, with which the average stays at the weights of the beginning",
        "lower it, to 0.999 for example, or leave it out",
    ),
    Rule(
        "--momentum",
        lambda c: c.optimizer != "sgd" and c.momentum != TrainConfig.momentum,
        "--optimizer sgd, which alone has it",
        "--optimizer {optimizer}",
        "pass --optimizer sgd, or leave --momentum out",
    ),
    Rule(
        "--momentum",
        lambda c: c.optimizer == "sgd" and c.momentum >= 1,
        "at least 0 and below 1",
        "{momentum}",
        "lower it, to 0.9 for example",
    ),
    Rule(
        "--micro-batches",
        lambda c: c.batch_size == AUTO and c.micro_batches > 1,
        "one micro-batch to begin with, of the size that is found",
        "{micro_batches} with --batch-size auto",
        "leave --micro-batches out",
    ),
    Rule(
        "--keep",
        lambda c: c.keep is not None and c.memory_budget is None,
        "--memory-budget, which alone changes what was not asked for",
        "none",
        "pass --memory-budget, or leave --keep out",
    ),
    Rule(
        "--activation-offload",
        lambda c: c.activation_offload and resolve_device(c.device).type == "cpu",
        "a GPU, whose memory it saves",
        "the CPU, whose activations are in host memory as they are",
        "leave it out, or pass --device cuda",
    ),
    Rule(
        "--devices",
        lambda c: c.devices > c.batch_size != AUTO,
        "at least one sample of each batch for each device",
        "{devices} devices and --batch-size {batch_size}",
        "raise --batch-size",
    ),
    Rule(
        "--devices",
        lambda c: c.devices > 1 and ":" in c.device,
        "a kind of device, of which each process takes its own",
        "--device {device}",
        "pass --device cuda or cpu",
    ),
    Rule(
        "--step-in-backward",
        lambda c: c.step_in_backward and (c.devices > 1 or c.strategy == "fsdp"),
        "a single process, since a gradient is known only when all processes have added theirs",
        "--devices {devices} --strategy {strategy}",
        "leave --step-in-backward out",
    ),
    Rule(
        "--rounding",
        lambda c: c.rounding == "stochastic" and c.devices > 1 and c.strategy == "ddp",
        "an update that is the same on all devices, where the copies stay alike",
        "--rounding stochastic, which each device draws for itself",
        "pass --rounding compensated or --strategy fsdp",
    ),
    Rule(
        "--optimizer",
        lambda c: c.optimizer == "adafactor" and c.strategy == "fsdp",
        "an update of each weight by itself, which a shard can make alone",
        "--optimizer adafactor, whose second moments are sums over whole rows and columns",
        "pass --optimizer adamw8bit or lion8bit, or --strategy ddp",
    ),
    Rule(
        "--activation-offload",
        lambda c: c.activation_offload and c.strategy == "fsdp",
        "weights that stay in place, so that they can be told from the activations that are moved",
        "--strategy fsdp, which gathers and frees them between its blocks",
        "pass --activation-checkpointing instead, or --strategy ddp",
    ),
    Rule(
        "--no-reshard",
        lambda c: not c.reshard and c.strategy != "fsdp",
        "--strategy fsdp, whose blocks gather weights",
        "--strategy {strategy}",
        "pass --strategy fsdp, or leave --no-reshard out",
    ),
    Rule(
        "--weight-offload",
        lambda c: c.weight_offload and c.strategy != "fsdp",
        "--strategy fsdp, which brings weights to the device block by block (one device is enough)",
        "--strategy {strategy}",
        "pass --strategy fsdp",
    ),
    Rule(
        "--weight-offload",
        lambda c: c.weight_offload and resolve_device(c.device).type == "cpu",
        "a GPU, whose memory it saves",
        "the CPU, whose weights are in host memory as they are",
        "leave it out, or pass --device cuda",
    ),
)


def check(config: TrainConfig) -> None:
    """Raises UsageError for the first rule that ``config`` breaks, QtoolError where its device is not there."""
    resolve_device(config.device)
    for rule in RULES:
        if rule.broken(config):
            values = vars(config)
            raise UsageError(rule.where, rule.expected, rule.got.format(**values), rule.do)
