import pytest
import torch
from torch import nn

from qtool.errors import QtoolError, UsageError
from qtool.recipe import QatConfig, TrainConfig
from qtool.training.rules import RULES, check
from qtool.training.techniques import setup

BROKEN = [
    ({"batch_size": 4, "micro_batches": 5}, "5 micro-batches of a batch of 4"),
    ({"step_in_backward": True, "micro_batches": 2, "grad_clip": None}, "whole batches"),
    ({"step_in_backward": True}, "pass --grad-clip none"),
    ({"step_in_backward": True, "grad_clip": None, "precision": "16-mixed"}, "bf16-mixed"),
    ({"grad_clip": 0.0}, "pass --grad-clip none to switch"),
    ({"optimizer": "adamw8bit", "optimizer_kernels": "foreach"}, "foreach with --optimizer adamw8bit"),
    ({"optimizer": "paged-adamw"}, "paged-adamw on the CPU"),
    ({"rounding": "stochastic"}, "bf16-true"),
    ({"lora_base": "nf4"}, "--lora-base: expected adapters.*; got no --lora; pass for example --lora 8"),
    ({"lora_targets": ("query",)}, "--lora-targets: expected adapters"),
    ({"lora_trained": ("classifier",)}, "--lora-trained: expected adapters"),
    ({"lora_alpha": 32.0}, "--lora-alpha: expected adapters"),
    ({"lora_dropout": 0.1}, "--lora-dropout: expected adapters"),
    ({"lora": 2, "lora_alpha": 0.0}, "--lora-alpha: expected a number above 0"),
    ({"lora": 2, "lora_dropout": 1.0}, "--lora-dropout: expected a share below 1"),
    ({"label_smoothing": 1.0}, "--label-smoothing: expected a share below 1"),
    ({"ema": 1.0}, "--ema: expected a decay below 1"),
    ({"optimizer": "sgd", "momentum": 1.5}, "--momentum: expected at least 0 and below 1; got 1.5"),
    ({"momentum": 0.5}, "--momentum: expected --optimizer sgd.*; got --optimizer adamw; pass --optimizer sgd"),
    ({"reshard": False}, "--no-reshard: expected --strategy fsdp.*; got --strategy ddp"),
    ({"keep": ("precision",)}, "pass --memory-budget"),
    ({"activation_offload": True}, "host memory"),
    ({"devices": 8, "batch_size": 4}, "8 devices and --batch-size 4"),
    ({"devices": 2, "device": "cuda:0"}, "takes its own"),
    ({"step_in_backward": True, "grad_clip": None, "devices": 2}, "single process"),
    ({"rounding": "stochastic", "precision": "bf16-true", "devices": 2}, "compensated"),
    ({"strategy": "fsdp", "optimizer": "adafactor"}, "rows and columns"),
    ({"batch_size": 0, "micro_batches": 2}, "of the size that is found"),
    ({"strategy": "fsdp", "activation_offload": True, "device": "cuda"}, "stay in place"),
    ({"weight_offload": True, "device": "cuda"}, "pass --strategy fsdp"),
    ({"weight_offload": True, "strategy": "fsdp"}, "weights are in host memory"),
]


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


@pytest.mark.parametrize(("options", "text"), BROKEN)
def test_options_that_exclude_each_other_are_refused(options, text, two_gpus):
    with pytest.raises(UsageError, match=text):
        check(_config(options))


def _config(options):
    return (QatConfig if "ema" in options else TrainConfig)(**({"device": "cpu"} | options))


def test_every_rule_has_a_case(two_gpus):
    assert len(BROKEN) == len(RULES)
    for options, _ in BROKEN:
        assert sum(rule.broken(_config(options)) for rule in RULES) == 1, options


def test_what_goes_together_passes():
    check(TrainConfig(device="cpu"))
    check(
        TrainConfig(device="cpu", step_in_backward=True, grad_clip=None, precision="bf16-true", rounding="stochastic")
    )


def test_a_setup_is_checked_and_so_is_the_device(monkeypatch):
    model = nn.Linear(2, 2)
    with pytest.raises(UsageError):
        setup(model, TrainConfig(device="cpu", step_in_backward=True))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(QtoolError, match="CUDA"):
        check(TrainConfig(device="cuda"))
