"""What a caller gives as a model: a spec, a module, or what holds one. What is no float model is told by its kind."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from qtool.errors import UsageError, kind_of, one_line
from qtool.factories import PRETRAINED

if TYPE_CHECKING:
    from torch import nn

    from qtool.models.materialise import Target

_QUANTIZED = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")
_FIXED_MODE = ("ExportedProgram", "_disallow_eval_train")
"""What refuses train() and eval() of a program's graph: torch.export, and torchao where it prepares or converts one."""


class HasModel(Protocol):
    """What stands for the model that it holds: the result of a training, a trainer."""

    @property
    def model(self) -> nn.Module:
        """The model, to be read: a frozen result's cannot be set, and a checker would refuse it for that."""
        ...


def open_model(
    model: nn.Module | HasModel | str | None,
    facts: Mapping[str, Any],
    weights: str | Path | None,
    seed: int,
    target: Target | None = None,
) -> nn.Module | None:
    """A spec, a module or what holds one, with ``weights`` in it if any are given. Raises UsageError for all else."""
    from qtool.models.specs import load_model, load_weights

    if isinstance(model, str):
        classes, channels = facts["num_classes"], facts["in_channels"]
        return load_model(model, num_classes=classes, in_channels=channels, weights=weights, seed=seed, target=target)
    module = None if model is None else module_of(model)
    if module is not None and str(weights) == PRETRAINED:
        raise UsageError("--weights pretrained", "the spec of a library's model", "a module", "leave it out")
    if target is not None:
        raise UsageError("--create-on-device", "a model's spec", "a model that is there already", "leave it out")
    if module is not None and weights:
        load_weights(module, weights)
    return module


def require_model(given: Any) -> None:
    """Raises UsageError for an object that is no model, None too: ``open_source`` takes it for the data alone."""
    if not isinstance(given, str):
        module_of(given)


def module_of(given: Any) -> nn.Module:
    """The module that was given, or what holds one. Raises UsageError for anything else, and for one without shapes."""
    from qtool.models.specs import require_shapes

    where, expected = "argument 'model'", "an nn.Module, a spec or a run directory"
    held: Any = getattr(given, "model", None)
    model: Any = held if hasattr(held, "named_parameters") and not hasattr(given, "named_parameters") else given
    if isinstance(model, type) or not hasattr(model, "named_parameters"):
        got = f"the class {model.__name__}" if isinstance(model, type) else kind_of(model)
        raise UsageError(where, expected, got, "pass the float model")
    if type(model).__name__ == "ExportedProgram":
        raise UsageError(where, expected, "an exported program", "pass the module that it was exported from")
    if any(kind.__name__ == "ScriptModule" for kind in type(model).__mro__):
        raise UsageError(where, expected, "TorchScript, whose Python code is gone", "pass the module it was made from")
    if getattr(vars(model).get("train"), "__qualname__", "").startswith(_FIXED_MODE):
        raise UsageError(where, expected, "an exported program's graph", "pass the module that it was exported from")
    module: nn.Module = model
    require_shapes(module, where)
    require_float(module, _is_converted)
    return module


def _is_of_torch_ao(kind: type) -> bool:
    """Whether a class is one of torch.ao's observers, fake-quantizers or converted modules."""
    return kind.__name__ in ("ObserverBase", "FakeQuantizeBase") or _is_converted(kind)


def _is_converted(kind: type) -> bool:
    """Whether a class is one of torch.ao's converted modules, beside which that of sums in float has its home."""
    return kind.__module__.startswith(_QUANTIZED) and kind.__name__ not in ("FloatFunctional", "FXFloatFunctional")


def require_float(model: Any, is_other: Callable[[type], bool] = _is_of_torch_ao) -> None:
    """Raises UsageError for modules of torch.ao's that ``is_other`` finds, which are no layers, and torchao's weights.

    Those are no numbers that a gradient or a capture reads.
    """
    where, expected = "argument 'model'", "a float model"
    modules = dict(model.named_modules()) if hasattr(model, "named_modules") else {}
    for path, module in modules.items():
        if any(map(is_other, type(module).__mro__)):
            raise UsageError(
                where, expected, f"one that torch.ao prepared or converted: '{path}' is a {type(module).__name__}",
                "pass the float model, or this one to qtool.export",
            )  # fmt: skip
        for name, value in module.named_parameters(path, recurse=False):
            if type(value).__module__.startswith("torchao."):
                got = f"one that torchao quantized: '{name}' is {kind_of(value)}"
                raise UsageError(where, expected, got, "pass the float model")


def in_host_memory(model: nn.Module | None) -> nn.Module | None:
    """The model, or a copy of one that is on a GPU, as training leaves it: capture and comparisons begin on the CPU."""
    held = itertools.chain(model.parameters(), model.buffers()) if model is not None else ()
    place = next((value.device for value in held if value.device.type != "cpu"), None)
    if model is None or place is None:
        return model
    from qtool.models.specs import copied

    try:
        return copied(model, {}).cpu()
    except RuntimeError as error:  # no room for both
        got = f"one on {place}, and no copy: {one_line(error)}"
        raise UsageError("argument 'model'", "a model on the CPU", got, "pass model.cpu()") from error
