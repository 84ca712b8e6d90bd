"""Low-rank adapters: the weights stay as they are, and each chosen layer learns a small correction to its own.

For a layer y = Wx the adapter adds (alpha / r) B A x, A of r rows and B of r columns (arXiv 2106.09685): r (in + out)
numbers to train instead of in × out, and gradients and optimizer states for those alone. B begins at zero, so training
begins at the base model. peft makes the adapters. At the end they are merged, W ← W + (alpha / r) B A, and the model is
the one that came in, for quantization and export; beside it the adapters are stored alone, as peft reads them.

Under FSDP frozen weights, in 4 bits too, and adapters are cut alike, and the adapters' gradients alone are exchanged;
both are put together again before the merge.

QLoRA (arXiv 2305.14314) keeps the frozen weights in 4 bits: see ``nf4``. What it merges into is what it trained with,
the base rounded to NF4.

Chosen by default is every linear layer within the model's repeated blocks, and where there are none every one but the
last. Two kinds are no targets: a layer that shares its weights with another, as a head does with the embedding, whose
merge would change both; and layers inside ``nn.MultiheadAttention``, which takes their weights without calling them.

A convolution's A is one like it, dilated and padded as it is, and B a 1×1 one; peft itself makes A without dilation and
padded with zeros, and does so where it loads the adapters unmerged.

Left out on purpose: embeddings, transposed and grouped convolutions.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qtool import processes
from qtool.errors import QtoolError, UsageError, nearest, one_line
from qtool.materialise import fill
from qtool.recipe import TrainConfig
from qtool.step import Setup
from qtool.training import nf4
from qtool.training.checkpointing import blocks

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_REACH = ("dilation", "padding_mode", "_reversed_padding_repeated_twice")
"""What says which inputs a convolution reads, beside the size, stride and padding that peft copies."""
_NAME = "default"
_PREFIX = "base_model.model."
"""What peft's own wrapper puts before a module's name."""


@dataclass(frozen=True)
class Adapter:
    """The adapters alone, under peft's names, on the CPU, and peft's configuration of them as plain values."""

    tensors: dict[str, Tensor]
    config: dict[str, Any]


def apply(setup: Setup, example: Any) -> None:
    """Freezes the model and puts adapters to its layers."""
    model, config = setup.model, setup.config
    possible = layers(model)
    chosen = targets(model, config.lora_targets, possible)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    model.requires_grad_(False)
    setup.on_close.append(lambda: _merge(model, trained))
    peft = _peft()
    try:
        peft.inject_adapter_in_model(_config(peft, config, chosen), model)
    except ValueError as error:  # it knows layers whose model reads their weights past them, Mamba's
        raise UsageError(
            "--lora", "layers that peft puts adapters to", one_line(error), "name others with --lora-targets"
        ) from error
    _begin(model, config.seed, setup.device)
    if config.lora_base == "nf4":
        _quantize(model, {*chosen, *_usual(model, possible)})
    if config.strategy != "fsdp":
        fill(model)


def require(model: nn.Module, config: TrainConfig) -> None:
    """Raises UsageError for a target that is no layer of the model, QtoolError where peft is not there.

    A model that has adapters already is refused: those would be merged with the others.
    """
    if (name := next((name for name, _ in _adapted(model)), None)) is not None:
        raise UsageError(
            "--lora", "a model without adapters", f"one with them, at '{name}'",
            "leave --lora out, and they are trained as they are, or merge them first",
        )  # fmt: skip
    targets(model, config.lora_targets, layers(model))
    _peft()


@torch.no_grad()
def _begin(model: nn.Module, seed: int, device: torch.device) -> None:
    """What adapters begin with, A uniform within ±1/√in and B zero: the same on every device and in every process.

    Those of a model without memory yet are put where it will be.
    """
    generator = torch.Generator().manual_seed(seed)
    for _, layer in _adapted(model):
        a, b = layer.lora_A[_NAME], layer.lora_B[_NAME]
        if isinstance(a, _CONVOLUTIONS):
            vars(a).update({key: vars(layer.base_layer)[key] for key in _REACH})
        bound = a.weight[0].numel() ** -0.5
        for module, low, high in ((a, -bound, bound), (b, 0.0, 0.0)):
            value = torch.empty(module.weight.shape).uniform_(low, high, generator=generator)
            place = device if module.weight.is_meta else module.weight.device
            module.weight = nn.Parameter(value.to(place, module.weight.dtype))


def layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that can take an adapter, by name: linear ones, transformers' ``Conv1D``, ungrouped convolutions."""
    holders = Counter(id(weight) for m in model.modules() if (weight := m._parameters.get("weight")) is not None)
    inside = {id(m) for a in model.modules() if isinstance(a, nn.MultiheadAttention) for m in a.modules()}
    return {
        name: module
        for name, module in model.named_modules()
        if _fits(module) and holders[id(module.weight)] == 1 and id(module) not in inside
    }


def _fits(module: nn.Module) -> bool:
    if isinstance(module, _CONVOLUTIONS):
        return module.groups == 1
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def targets(model: nn.Module, wanted: tuple[str, ...] | None, possible: dict[str, nn.Module]) -> list[str]:
    """The names of the layers to adapt: those that end in one of ``wanted``, or the default ones.

    Raises UsageError naming the first of ``wanted`` that no layer ends in, and the names most like it.
    """
    if wanted is None:
        return _default(model, possible)
    found: list[str] = []
    for target in wanted:
        matching = [name for name in possible if f".{name}".endswith(f".{target}")]
        if not matching:
            ends = {name.rpartition(".")[2] for name in possible} | set(possible)
            raise UsageError(
                "--lora-targets", "the end of the name of a linear layer or ungrouped convolution",
                _named(model, target),
                nearest(target, ends if len(ends) < 40 else {name.rpartition(".")[2] for name in possible}),
            )  # fmt: skip
        found += [name for name in matching if name not in found]
    return found


def _named(model: nn.Module, target: str) -> str:
    """The target, and what of the model it names."""
    kinds = [type(module).__name__ for name, module in model.named_modules() if f".{name}".endswith(f".{target}")]
    return f"'{target}', {kinds[0]}, which takes no adapter" if kinds else f"'{target}'"


def _usual(model: nn.Module, possible: dict[str, nn.Module]) -> list[str]:
    linear = [name for name, module in possible.items() if not isinstance(module, _CONVOLUTIONS)]
    repeated = tuple(f"{name}." for name in blocks(model))
    return [name for name in linear if name.startswith(repeated)] if repeated else linear[:-1]


def _default(model: nn.Module, possible: dict[str, nn.Module]) -> list[str]:
    chosen = _usual(model, possible)
    if not chosen:
        raise UsageError(
            "--lora", "a model with linear layers in repeated blocks", f"a {type(model).__name__} without any",
            "name layers with --lora-targets, or train all of it",
        )  # fmt: skip
    return chosen


def adapter(model: nn.Module) -> Adapter | None:
    """The adapters that are in ``model`` now, or None. Of a sharded model all processes have to ask."""
    found = dict(_adapted(model))
    if not found:
        return None
    weights = {
        f"{_PREFIX}{name}.{part}.weight": getattr(layer, part)[_NAME].weight
        for name, layer in found.items() for part in ("lora_A", "lora_B")
    }  # fmt: skip
    tensors = {
        name: processes.whole(weight.detach()).float().cpu().clone(memory_format=torch.contiguous_format)
        for name, weight in weights.items()
    }
    first = next(iter(found.values()))
    config = {
        "peft_type": "LORA", "r": first.r[_NAME], "lora_alpha": first.lora_alpha[_NAME],
        "lora_dropout": float(getattr(first.lora_dropout[_NAME], "p", 0.0)), "target_modules": list(found),
        "fan_in_fan_out": any(getattr(layer, "fan_in_fan_out", False) for layer in found.values()), "bias": "none",
        "base_model_name_or_path": None,
    }  # fmt: skip
    return Adapter(tensors, config)


def _config(peft: Any, config: TrainConfig, chosen: list[str]) -> Any:
    return peft.LoraConfig(
        r=config.lora, lora_alpha=config.lora_alpha, lora_dropout=config.lora_dropout, target_modules=chosen
    )


def _adapted(model: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((name, module) for name, module in model.named_modules() if hasattr(module, "lora_A"))


def _quantize(model: nn.Module, names: set[str]) -> None:
    """The layers of those names in 4 bits, below their adapters or where they have none."""
    for name in names:
        layer: Any = model.get_submodule(name)
        base = layer.base_layer if hasattr(layer, "lora_A") else layer
        if isinstance(base, _CONVOLUTIONS):
            continue
        small = nf4.quantized(base)
        if base is layer:
            _replace(model, name, small)
        else:
            layer.base_layer = small


@torch.no_grad()
def _merge(model: nn.Module, trained: set[str]) -> None:
    """Puts the layers back where the adapters were, their corrections added, and lets them be trained again."""
    for name, layer in list(_adapted(model)):
        delta = layer.get_delta_weight(_NAME)
        base = _restored(layer.base_layer)
        base.weight.add_(delta.to(base.weight.dtype))
        _replace(model, name, base)
    for name, layer in [(n, m) for n, m in model.named_modules() if isinstance(m, nf4.NF4Linear)]:
        _replace(model, name, layer.restored())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)


def _restored(base: Any) -> Any:
    return base.restored() if isinstance(base, nf4.NF4Linear) else base


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)


def _peft() -> Any:
    try:
        return importlib.import_module("peft")
    except (ImportError, RuntimeError) as error:  # a torchvision that does not fit torch raises RuntimeError
        raise QtoolError("--lora", "the package 'peft'", str(error), "run: pip install 'qtool[lora]'") from error
