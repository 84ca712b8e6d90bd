"""Low-rank adapters: the weights stay as they are, and each chosen layer learns a small correction to its own.

For a layer y = Wx the adapter adds (alpha / r) B A x, A of r rows and B of r columns (arXiv 2106.09685): r (in + out)
numbers to train instead of in × out, and gradients and optimizer states for those alone. B begins at zero, so training
begins at the base model. peft makes the adapters. At the end they are merged, W ← W + (alpha / r) B A, and the model is
the one that came in, for quantization and export; beside it the adapters are stored alone, as peft reads them. The sum
is made in float32 and rounded once; where the weights have 16 bits and much of a correction is less than their
spacing, a warning tells.

Under FSDP frozen weights, in 4 bits too, and adapters are cut alike, and the adapters' gradients alone are exchanged;
both are put together again before the merge.

QLoRA (arXiv 2305.14314) keeps the frozen weights in 4 bits: see ``nf4``. What it merges into is what it trained with,
the base rounded to NF4.

Which layers take one, and what is trained in full beside them, is in ``lora_layers``.

A convolution's A is one like it, dilated and padded as it is, and B a 1×1 one; peft itself makes A without dilation and
padded with zeros, and does so where it loads the adapters unmerged.

A layer that begins at random, a new head, learns nothing from frozen weights: ``lora_trained`` names modules that are
trained in full beside the adapters. They take none, stay out of 4 bits, and are stored whole with the adapters, as
peft's ``modules_to_save``.

Left out on purpose: adapters of embeddings, of transposed and of grouped convolutions.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from qtool.errors import QtoolError, QtoolWarning, UsageError, one_line
from qtool.models.materialise import fill
from qtool.nested import NARROW
from qtool.recipe import TrainConfig
from qtool.steps import unreached
from qtool.steps.setup import Setup
from qtool.system import processes
from qtool.system.imports import imported
from qtool.training import nf4
from qtool.training.lora_layers import (
    CONVOLUTIONS,
    adapted_layers,
    layers,
    learns,
    outside,
    require_low,
    require_own,
    targets,
    trained_in_full,
    usual_layers,
)
from qtool.units import few

_REACH = ("dilation", "padding_mode", "_reversed_padding_repeated_twice")
"""What says which inputs a convolution reads, beside the size, stride and padding that peft copies."""
TOLD = 0.1
"""From what share of their size on the error of merged corrections is told."""
_NAME = "default"
_NOTES = "peft_config"
"""The attribute of a model in which peft notes what it put there."""
_PREFIX = "base_model.model."
"""What peft's own wrapper puts before a module's name."""


@dataclass(frozen=True)
class Adapter:
    """The adapters and what was trained in full, under peft's names, on the CPU, and peft's configuration of them."""

    tensors: dict[str, Tensor]
    config: dict[str, Any]


def apply(setup: Setup, example: Any) -> None:
    """Freezes the model and puts adapters to its layers."""
    model, config = setup.model, setup.config
    possible, full = layers(model), trained_in_full(model, config.lora_trained)
    chosen = targets(model, config.lora_targets, possible, full)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    model.requires_grad_(False)
    setup.on_close.append(lambda: _merge(model, trained))
    setup.on_close.append(_unnoted(model))
    peft = _peft()
    try:
        peft.inject_adapter_in_model(_config(peft, config, model, chosen), model)
    except ValueError as error:  # it knows layers whose model reads their weights past them, Mamba's
        raise UsageError(
            "--lora", "layers that peft puts adapters to", one_line(error), "name others with --lora-targets"
        ) from error
    for name in full:
        for parameter in filter(learns, model.get_submodule(name).parameters()):
            parameter.requires_grad_(True)
    setup.tell_unreached = partial(_tell_unreached, model)
    _begin(model, config.seed, setup.device)
    if config.lora_base == "nf4":
        _quantize(model, {*chosen, *outside(full, usual_layers(model, possible))})
    if config.strategy != "fsdp":
        fill(model)


def require(model: nn.Module, config: TrainConfig) -> None:
    """Raises UsageError for a name that is none of the model, QtoolError where peft is not there.

    A model that has adapters already is refused: those would be merged with the others.
    """
    if (name := next((name for name, _ in adapted_layers(model)), None)) is not None:
        raise UsageError(
            "--lora", "a model without adapters", f"one with them, at '{name}'",
            "leave --lora out, and they are trained as they are, or merge them first",
        )  # fmt: skip
    full = trained_in_full(model, config.lora_trained)
    require_own(model, full)
    possible = layers(model)
    require_low(config, [possible[name] for name in targets(model, config.lora_targets, possible, full)])
    _peft()


def _tell_unreached(model: nn.Module, names: list[str], when: str) -> None:
    """Tells of adapters, and of what is trained in full, that no gradient reached. Raises where all adapters are."""
    adapted = [f"{name}." for name, _ in adapted_layers(model)]
    idle = [name[:-1] for name in adapted if any(other.startswith(f"{name}lora_") for other in names)]
    got = f"no gradient for {few(idle)} in {when}"
    why = "a layer whose weight other code reads, or that is passed by, is adapted in vain"
    if len(idle) == len(adapted):
        do = "name layers that the model calls with --lora-targets, or leave --lora out"
        raise QtoolError("--lora", "adapters that the loss depends on", f"{got}: {why}", do)
    if idle:
        warnings.warn(f"--lora: {got}: {why}; --lora-targets names those to adapt", QtoolWarning, stacklevel=2)
    if rest := [name for name in names if not name.startswith(tuple(adapted))]:
        unreached.tell(rest, when)


@torch.no_grad()
def _begin(model: nn.Module, seed: int, device: torch.device) -> None:
    """What adapters begin with, A uniform within ±1/√in and B zero: the same on every device and in every process.

    Those of a model without memory yet are put where it will be.
    """
    generator = torch.Generator().manual_seed(seed)
    for _, layer in adapted_layers(model):
        a, b = layer.lora_A[_NAME], layer.lora_B[_NAME]
        if isinstance(a, CONVOLUTIONS):
            vars(a).update({key: vars(layer.base_layer)[key] for key in _REACH})
        bound = a.weight[0].numel() ** -0.5
        for module, low, high in ((a, -bound, bound), (b, 0.0, 0.0)):
            value = torch.empty(module.weight.shape).uniform_(low, high, generator=generator)
            place = device if module.weight.is_meta else module.weight.device
            module.weight = nn.Parameter(value.to(place, module.weight.dtype))


def adapter(model: nn.Module, config: TrainConfig) -> Adapter | None:
    """The adapters that are in ``model`` now, with what ``config`` trains in full beside them, or None.

    Of a sharded model all processes have to ask.
    """
    found = dict(adapted_layers(model))
    if not found:
        return None
    full = trained_in_full(model, config.lora_trained)
    state, inside = model.state_dict(), tuple(f"{name}." for name in full)
    values = {
        f"{name}.{part}.weight": state[f"{name}.{part}.{_NAME}.weight"]
        for name in found for part in ("lora_A", "lora_B")
    } | {name: value for name, value in state.items() if name.startswith(inside)}  # fmt: skip
    tensors = {f"{_PREFIX}{name}": _stored(value) for name, value in values.items()}
    first = next(iter(found.values()))
    plain = {
        "peft_type": "LORA", "r": first.r[_NAME], "lora_alpha": first.lora_alpha[_NAME],
        "lora_dropout": float(getattr(first.lora_dropout[_NAME], "p", 0.0)),
        "target_modules": _exactly(model, [*found]),
        "modules_to_save": [_unmistaken(model, full, name) for name in full] or None,
        "fan_in_fan_out": any(getattr(layer, "fan_in_fan_out", False) for layer in found.values()), "bias": "none",
        "base_model_name_or_path": None,
    }  # fmt: skip
    return Adapter(tensors, plain)


def _stored(value: Tensor) -> Tensor:
    """A whole tensor of its own on the CPU, in float32 if it is of floats."""
    whole = processes.whole(value.detach())
    return (whole.float() if whole.is_floating_point() else whole).cpu().clone(memory_format=torch.contiguous_format)


def _unmistaken(model: nn.Module, full: list[str], name: str) -> str:
    """A module's name for peft, which takes each whose name ends so, 'decode_head' for 'head': then the one in peft."""
    others = (other for other, _ in model.named_modules() if other not in full)
    return f"{_PREFIX}{name}" if any(other.endswith(name) for other in others) else name


def _config(peft: Any, config: TrainConfig, model: nn.Module, chosen: list[str]) -> Any:
    return peft.LoraConfig(
        r=config.lora, lora_alpha=config.lora_alpha, lora_dropout=config.lora_dropout,
        target_modules=_exactly(model, chosen),
    )  # fmt: skip


def _exactly(model: nn.Module, names: list[str]) -> list[str] | str:
    """Names of layers for peft, which takes each whose name ends so; a pattern where that is more than those."""
    ends = tuple(f".{name}" for name in names)
    if any(name.endswith(ends) for name in outside(names, (n for n, _ in model.named_modules()))):
        return "|".join(map(re.escape, names))
    return names


def _quantize(model: nn.Module, names: set[str]) -> None:
    """The layers of those names in 4 bits, below their adapters or where they have none."""
    for name in names:
        layer: Any = model.get_submodule(name)
        base = layer.base_layer if hasattr(layer, "lora_A") else layer
        if isinstance(base, CONVOLUTIONS):
            continue
        small = nf4.quantized(base)
        if base is layer:
            _replace(model, name, small)
        else:
            layer.base_layer = small


@torch.no_grad()
def _merge(model: nn.Module, trained: set[str]) -> None:
    """Puts the layers back where the adapters were, their corrections added, and lets them be trained again."""
    lost = added = 0.0
    for name, layer in list(adapted_layers(model)):
        base = _restored(layer.base_layer)
        for part in (layer.lora_A, layer.lora_B):
            part[_NAME].float()
        delta = layer.get_delta_weight(_NAME)
        merged = base.weight + delta
        base.weight.copy_(merged)
        if base.weight.dtype in NARROW and not delta.is_meta:
            lost, added = lost + float((base.weight - merged).square().sum()), added + float(delta.square().sum())
        _replace(model, name, base)
    _tell_lost(math.sqrt(lost / added) if added else 0.0)
    for name, layer in [(n, m) for n, m in model.named_modules() if isinstance(m, nf4.NF4Linear)]:
        _replace(model, name, layer.restored())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)


def _unnoted(model: nn.Module) -> Callable[[], None]:
    """Takes off what peft has noted on the model; gives what puts that back in the place of its new notes.

    By them peft takes a model for one with adapters, and joins the next ones' configuration to theirs.
    """
    before = vars(model).pop(_NOTES, None)

    def put_back() -> None:
        vars(model).pop(_NOTES, None)
        if before is not None:
            vars(model)[_NOTES] = before

    return put_back


def _tell_lost(share: float) -> None:
    if share > TOLD:
        warnings.warn(
            f"--lora: merged into weights of 16 bits, the adapters' corrections are off by {share:.0%} of their size; "
            "the adapters themselves are whole, and so is a merge into a model of float32",
            QtoolWarning,
            stacklevel=2,
        )


def _restored(base: Any) -> Any:
    return base.restored() if isinstance(base, nf4.NF4Linear) else base


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)


def _peft() -> Any:
    return imported("peft", "--lora", "qtool[lora]")
