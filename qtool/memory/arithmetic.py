"""What a model of so many parameters needs, from arithmetic alone.

Training keeps, for each parameter, in bytes:

============  =========================================================================================
weights       4, or 2 under 16-true and bf16-true; 2 more for --rounding compensated
gradients     in the dtype of the weights; none together with --step-in-backward
states        AdamW two moments, SGD one (none without momentum), Adafactor rows and columns (next to
              nothing), in the dtype of the weights, in float32 where updates are widened (--rounding, 16-true);
              8-bit ones a byte each, and a float32 scale for every 256
activations   about 8, with the temporaries of a step; about 4 where they are in 16 bits. A rule of
              thumb for the batch that people train with, and the one line here that is no arithmetic:
              it depends on the batch and the architecture. ``qtool memory --model`` computes it.
============  =========================================================================================

So float32 with AdamW is 4 + 4 + 8 + 8 = 24 bytes a parameter, six times the weights, and 10⁹ parameters
are 24 GB (GB = 10⁹ bytes). Autocast's 16-bit copies of the weights are temporaries of the rule of thumb.

FSDP shards weights, gradients and states evenly, and each GPU takes its share of the batch, so all four
lines divide by the number of GPUs; a tenth of each GPU is set aside for the CUDA context, the block that
is gathered at the moment and fragmentation. Adafactor and updates in the backward pass, which FSDP does not take, are
counted as if they could be sharded.
"""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

from qtool.errors import UsageError
from qtool.recipe import OPTIMIZERS, PRECISIONS, TrainConfig

GB = 10**9
SIZES = (1e9, 3e9, 7e9, 13e9, 30e9, 70e9, 175e9, 500e9)
RESERVE = 0.1
"""The share of each GPU that is set aside."""
ACTIVATIONS = 8.0
"""Bytes per parameter of activations and temporaries in float32: a rule of thumb."""
KNOWN = ("optimizer", "precision", "rounding", "momentum", "step_in_backward", "grad_clip")
"""Options that the arithmetic takes into account, or that one of those needs."""
_BLOCK = 256
"""Values that share one float32 scale in bitsandbytes' 8-bit states."""
_MOMENTS = {
    "adamw": 2, "sgd": 1, "adafactor": 0, "adamw8bit": 2, "paged-adamw": 2, "paged-adamw8bit": 2, "lion8bit": 1,
    "torchao-adamw8bit": 2,
}  # fmt: skip
_FORMATS = {"32-bit": 4.0, "16-bit": 2.0, "8-bit": 1.0, "4-bit": 0.5}
_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "kb": 10**3, "mb": 10**6, "gb": 10**9,
          "tb": 10**12}  # fmt: skip
_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


@dataclass(frozen=True)
class PerParameter:
    """Bytes for each parameter of a model in training."""

    weights: float
    gradients: float
    states: float
    activations: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.states + self.activations


def per_parameter(config: TrainConfig) -> PerParameter:
    """What training as ``config`` says keeps for each parameter, in bytes."""
    width = 2.0 if config.precision.endswith("-true") and config.precision != "32-true" else 4.0
    return PerParameter(
        weights=width + (2.0 if config.rounding == "compensated" else 0.0),
        gradients=0.0 if config.step_in_backward else width,
        states=_states(config, width),
        activations=ACTIVATIONS if config.precision == "32-true" else ACTIVATIONS / 2,
    )


def _states(config: TrainConfig, width: float) -> float:
    moments = _MOMENTS[config.optimizer]
    if config.optimizer == "sgd" and config.momentum == 0:
        moments = 0
    if config.optimizer.endswith("8bit"):
        return moments * (1 + 4 / _BLOCK)
    # bitsandbytes keeps float32 moments whatever the weights are; torch those of the weights
    wide = config.rounding != "nearest" or config.optimizer == "paged-adamw" or _widened(config)
    return moments * (4.0 if wide else width)


def _widened(config: TrainConfig) -> bool:
    return config.precision == "16-true" and config.optimizer == "adamw"


def num_gpus(total_bytes: float, gpu_bytes: float) -> int:
    """How many GPUs of ``gpu_bytes`` FSDP needs for ``total_bytes`` in all."""
    return max(1, math.ceil(total_bytes / (gpu_bytes * (1 - RESERVE))))


def estimate(num_params: float, config: TrainConfig, gpu_bytes: float) -> dict[str, Any]:
    """The result of ``qtool memory --params``: in GB of 10⁹ bytes, and in numbers of GPUs of ``gpu_bytes``.

    ``training`` is ``config`` itself, ``weights_gb`` the weights alone in each width, ``table`` every optimizer in
    every precision, ``sizes`` the same config from 1 to 500 billion parameters.
    """
    return {
        "num_params": num_params,
        "gpu_memory_gb": gpu_bytes / GB,
        "optimizer": config.optimizer,
        "precision": config.precision,
        "weights_gb": weights(num_params),
        "training": _training(num_params, config, gpu_bytes),
        "table": [_cell(num_params, o, p, config.momentum, gpu_bytes) for o in OPTIMIZERS for p in PRECISIONS],
        "sizes": [_size(n, config, gpu_bytes) for n in SIZES],
    }


def weights(num_params: float) -> dict[str, float]:
    """The weights alone, in GB, by their width."""
    return {name: num_params * width / GB for name, width in _FORMATS.items()}


def _training(num_params: float, config: TrainConfig, gpu_bytes: float) -> dict[str, Any]:
    each = per_parameter(config)
    parts = {f"{name}_gb": value * num_params / GB for name, value in asdict(each).items()}
    total = each.total * num_params
    return {
        "bytes_per_parameter": asdict(each) | {"total": each.total},
        **parts,
        "total_gb": total / GB,
        "num_gpus": num_gpus(total, gpu_bytes),
    }


def _cell(num_params: float, optimizer: str, precision: str, momentum: float, gpu_bytes: float) -> dict[str, Any]:
    plain = TrainConfig(optimizer=optimizer, precision=precision, momentum=momentum)
    made = _training(num_params, plain, gpu_bytes)
    return {"optimizer": optimizer, "precision": precision, **{k: made[k] for k in ("total_gb", "num_gpus")}}


def _size(num_params: float, config: TrainConfig, gpu_bytes: float) -> dict[str, Any]:
    made = _training(num_params, config, gpu_bytes)
    return {"num_params": num_params, "weights_gb": weights(num_params), "total_gb": made["total_gb"],
            "num_gpus": made["num_gpus"]}  # fmt: skip


def parse_count(text: str) -> float:
    """A number of parameters: ``1e9``, ``7B``, ``350M``. Raises UsageError unless it is a finite one of at least 1.

    >>> parse_count("1.5B")
    1500000000.0
    """
    value = _measure(text, _COUNTS)
    if value is None or not 1 <= value <= 1e15:
        raise UsageError("option '--params'", "a number of parameters, 1 to 1e15", repr(text), "write 1e9, 7B or 350M")
    return value


def parse_bytes(text: str, where: str = "option '--gpu-memory'") -> float:
    """An amount of memory in bytes: ``80GiB``, ``24GB``, ``512MiB``. Raises UsageError unless it is above zero.

    >>> parse_bytes("1.5KiB")
    1536.0
    """
    value = _measure(text, _UNITS)
    if value is None or not 1 <= value <= 1e18:
        raise UsageError(where, "an amount of memory", repr(text), "write for example 80GiB or 24GB")
    return value


def _measure(text: str, units: dict[str, int]) -> float | None:
    found = re.fullmatch(r"(\d+\.?\d*(?:e\+?\d{1,3})?)\s*([a-z]*)", text.strip().lower())
    if not found or found[2] not in units:
        return None
    try:
        return float(Fraction(found[1]) * units[found[2]])
    except OverflowError:
        return None


def estimate_from(params: str, config: TrainConfig, gpu_memory: str = "80GiB") -> dict[str, Any]:
    """:func:`estimate` of the command line's texts. Raises UsageError for an option that it does not take in."""
    plain = TrainConfig()
    for name, value in vars(config).items():
        if name not in KNOWN and value != getattr(plain, name):
            raise UsageError(
                "--params", "options that count for each parameter", f"--{name.replace('_', '-')}",
                "leave it out, or pass --model and --data, from which all options are predicted",
            )  # fmt: skip
    return estimate(parse_count(params), config, parse_bytes(gpu_memory))
