"""Which layers of a model take an adapter, and which modules are trained in full beside them: see :mod:`.lora`.

Chosen by default is every linear layer within the model's repeated blocks, and where there are none every one but the
last. Three kinds are no targets: a layer that shares its weights with another, as a head does with the embedding, or
that is in several places itself, since a merge would change them all; layers inside ``nn.MultiheadAttention``, which
takes their weights without calling them; and those whose class makes something else of their weights (normalises them,
say), above which a correction is not the one that is merged.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._python_dispatch import _disable_current_modes

from qtool.errors import OWN, UsageError, kind_of, nearest
from qtool.recipe import TrainConfig
from qtool.training.checkpointing import blocks

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that can take an adapter, by name: linear ones, transformers' ``Conv1D``, ungrouped convolutions."""
    places = (child for parent in model.modules() for child in parent._modules.values() if child is not None)
    holders = Counter(id(value) for place in (model, *places) for value in place._parameters.values())
    inside = {id(m) for a in model.modules() if isinstance(a, nn.MultiheadAttention) for m in a.modules()}
    return {
        name: module
        for name, module in model.named_modules()
        if _fits(module) and holders[id(module._parameters["weight"])] == 1 and id(module) not in inside
    }


def _fits(module: nn.Module) -> bool:
    if module._parameters.get("weight") is None or is_parametrized(module):  # its bias may be
        return False
    plain = next((kind for kind in (nn.Linear, *CONVOLUTIONS) if isinstance(module, kind)), None)
    if plain is None:
        return type(module).__name__ == "Conv1D"
    return getattr(module, "groups", 1) == 1 and _computes_as(module, plain)


@torch.no_grad()
def _computes_as(module: Any, plain: Any) -> bool:
    """Whether a layer whose class has a forward pass of its own gives what that of ``plain`` does: tried on noise."""
    if type(module).forward is plain.forward:
        return True
    with _disable_current_modes(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tried = copy.copy(module)
        tried._parameters = {k: v if v is None else torch.randn(v.shape) for k, v in module._parameters.items()}
        reach = zip(getattr(tried, "dilation", ()), tried.weight.shape[2:], strict=True)
        noise = torch.randn(2, tried.weight.shape[1], *(step * taps + 2 for step, taps in reach))
        try:
            for tried.training in (True, False):
                torch.testing.assert_close(type(module).forward(tried, noise), plain.forward(tried, noise))
        except (*OWN, AssertionError):
            return False
    return True


def targets(
    model: nn.Module, wanted: tuple[str, ...] | None, possible: dict[str, nn.Module], full: Iterable[str] = ()
) -> list[str]:
    """The names of the layers to adapt: those that end in one of ``wanted``, or the default ones.

    Layers within modules that are trained in full (``full``) are left out. Raises UsageError naming the first of
    ``wanted`` that no layer ends in, with the names most like it, or that names only such as are left out.
    """
    if wanted is None:
        return _default(model, possible, full)
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
        if not (free := outside(full, matching)):
            raise UsageError(
                "--lora-targets", "layers that are not trained in full", f"'{target}', which --lora-trained names too",
                "name it in one of the two",
            )  # fmt: skip
        found += [name for name in free if name not in found]
    return found


def _named(model: nn.Module, target: str) -> str:
    """The target, and what of the model it names."""
    kinds = [type(module).__name__ for name, module in model.named_modules() if f".{name}".endswith(f".{target}")]
    return f"'{target}', {kinds[0]}, which takes no adapter" if kinds else f"'{target}'"


def usual_layers(model: nn.Module, possible: dict[str, nn.Module]) -> list[str]:
    """The names of the layers that are adapted where nobody names any."""
    linear = [name for name, module in possible.items() if not isinstance(module, CONVOLUTIONS)]
    repeated = tuple(f"{name}." for name in blocks(model))
    return [name for name in linear if name.startswith(repeated)] if repeated else linear[:-1]


def _default(model: nn.Module, possible: dict[str, nn.Module], full: Iterable[str]) -> list[str]:
    usual = usual_layers(model, possible)
    chosen = outside(full, usual)
    if usual and not chosen:
        raise UsageError(
            "--lora-trained", "a module beside the layers to adapt", "one that has all of them",
            "name a smaller one, or leave --lora out and train all of it",
        )  # fmt: skip
    if not chosen:
        raise UsageError(
            "--lora", "a model with linear layers in repeated blocks", f"{kind_of(model)} without any",
            "name layers with --lora-targets, or train all of it",
        )  # fmt: skip
    return chosen


def trained_in_full(model: nn.Module, wanted: tuple[str, ...] | None) -> list[str]:
    """The names of the modules to train in full, none within another: those that end in one of ``wanted``.

    Lists of modules, which are not called, are none. The same with adapters in the model as without. Raises UsageError
    naming the first of ``wanted`` that no module ends in, and the names most like it.
    """
    if wanted is None:
        return []
    there = outside(
        [name for name, _ in adapted_layers(model)], (name for name, m in model.named_modules() if _trains(m))
    )
    found: set[str] = set()
    for target in wanted:
        matching = [name for name in there if f".{name}".endswith(f".{target}")]
        if not matching:
            raise UsageError(
                "--lora-trained", "the end of the name of a module with parameters", f"'{target}'",
                nearest(target, {name.rpartition(".")[2] for name in there}),
            )  # fmt: skip
        found.update(matching)
    return [name for name in there if name in found and not any(name.startswith(f"{other}.") for other in found)]


def _trains(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward and any(map(learns, module.parameters()))


def untrained_head(model: nn.Module, config: TrainConfig) -> str | None:
    """The module that the model's last linear layer belongs to, where nothing of it is adapted or trained; or None."""
    possible, full = layers(model), trained_in_full(model, config.lora_trained)
    taken = [*blocks(model), *targets(model, config.lora_targets, possible, full), *full]
    linear = [name for name, module in possible.items() if not isinstance(module, CONVOLUTIONS)]
    for last in outside(taken, linear[-1:]):
        parts = last.split(".")
        for path in (".".join(parts[: depth + 1]) for depth in range(len(parts))):
            beside = not any(f"{other}.".startswith(f"{path}.") for other in taken)
            if beside and _trains(model.get_submodule(path)):
                return path
    return None


def require_own(model: nn.Module, full: list[str]) -> None:
    """Raises UsageError where training one of the modules would change another, as a head changes its embedding."""
    own = {id(p): name for name in full for p in model.get_submodule(name).parameters()}
    modules = dict(model.named_modules())
    for other in ("", *outside(full, modules)):
        for parameter in modules[other].parameters(recurse=False):
            if id(parameter) in own:
                raise UsageError(
                    "--lora-trained", "modules that share no weights with others", f"'{own[id(parameter)]}', whose "
                    f"weights are those of '{other}'", "name both, or leave it out",
                )  # fmt: skip


def require_low(config: TrainConfig, adapted: list[Any]) -> None:
    """Raises UsageError where the rank is beyond every weight's own: more takes more numbers and can say no more."""
    largest = max(min(len(layer.weight), layer.weight[0].numel()) for layer in adapted)
    if config.lora is not None and config.lora > largest:
        raise UsageError(
            "--lora", f"a rank of at most {largest}, the most that a weight to adapt can have", str(config.lora),
            f"lower it, to {min(8, largest)} for example, or leave it out and train the weights themselves",
        )  # fmt: skip


def learns(parameter: Tensor) -> bool:
    """Whether training can change it: NF4 and index tables are of whole numbers."""
    return parameter.is_floating_point() or parameter.is_complex()


def outside(modules: Iterable[str], names: Iterable[str]) -> list[str]:
    """Those of ``names`` that are neither one of ``modules`` nor within one, nor the whole model."""
    inside = tuple(f"{module}." for module in modules)
    return [name for name in names if name and not f"{name}.".startswith(inside)]


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The layers that have an adapter, with their names."""
    return ((name, module) for name, module in model.named_modules() if hasattr(module, "lora_A"))
