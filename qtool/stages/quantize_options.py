"""What :func:`qtool.quantize` is told: its options as two configs, and which of them do not go together.

What needs a model or data to be known is refused where those are open; this is told before a training.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qtool.data import calibration_data
from qtool.errors import UsageError
from qtool.options import argument, nearest_option
from qtool.recipe import QatConfig, QuantizeConfig
from qtool.stages.common import configured


def quantize_configs(
    config: QuantizeConfig | None, qat: QatConfig | None, options: Mapping[str, Any]
) -> tuple[QuantizeConfig, QatConfig | None]:
    """The two configs that the options of quantize are divided between; the second only for QAT."""
    own = {k: v for k, v in options.items() if k in QuantizeConfig.__dataclass_fields__}
    other = {k: v for k, v in options.items() if k not in own}
    known = [*QuantizeConfig.__dataclass_fields__, *QatConfig.__dataclass_fields__]
    for key in other:
        if key not in known:
            raise UsageError(argument(key), "a known name", repr(key), nearest_option(key, known))
    config = configured(QuantizeConfig, config, own)
    _require_use(config)
    if not may_train(config):
        if other or qat is not None:
            name = next(iter(other), "qat")
            raise UsageError(argument(name), "mode 'qat'", f"mode '{config.mode}'", "ask for mode 'qat'")
        return config, None
    shared = {name: own[name] for name in ("device",) if name in own} | {"seed": config.seed}
    tuning = configured(QatConfig, qat, other if qat else shared | other)
    return config, tuning.settled(config.least_bits)


def may_train(config: QuantizeConfig) -> bool:
    """Whether a quantization with these options trains, or its search for a contract may."""
    return config.mode == "qat" or (config.has_contract and config.method == "auto")


def require_options(config: QuantizeConfig, tuning: QatConfig | None) -> None:
    """Raises QtoolError for what is refused of any model: told before a training, and not behind it."""
    from qtool.quantization.calibration.saved_ranges import read_ranges
    from qtool.quantization.stage import require_together
    from qtool.training import rules

    if tuning:
        rules.check(tuning)
    require_together(config, tuning)
    calibration_data.read(config.calibration)
    if config.ranges_from:
        read_ranges(Path(config.ranges_from))


def _require_use(config: QuantizeConfig) -> None:
    """Raises UsageError for what says how numbers are rounded or a contract is judged where nothing reads it."""
    default = QuantizeConfig()
    if not config.has_contract:
        _require_bits_at_edges(config)
        _require_activations(config)
        _require_rounding(config)
    if not config.has_contract and config.percentile != default.percentile and config.ranges != "percentile":
        raise UsageError(
            argument("percentile"), "ranges 'percentile' beside it", f"'{config.ranges}'", "add it, or leave it out"
        )
    for name in ("metric", "method", "validation_samples", "time_budget"):
        if not config.has_contract and getattr(config, name) != getattr(default, name):
            raise unused(name)


def unused(name: str) -> UsageError:
    """The error for what says how a contract is judged, where there is none."""
    return UsageError(
        argument(name), "max_drop, max_kl or min_agreement beside it", "none of them", "say what may be lost"
    )


def _require_bits_at_edges(config: QuantizeConfig) -> None:
    """Raises UsageError where the first and the last layer have the bits of the others, whatever is asked for them."""
    edges, bits = config.edge_bits, config.weight_bits
    if edges not in (QuantizeConfig().edge_bits, bits) and (bits > 6 or edges < bits):
        expected = "weight_bits of 6 or fewer beside it" if bits > 6 else f"at least the {bits} of weight_bits"
        raise UsageError(
            argument("edge_bits"), expected, str(bits if bits > 6 else edges), "change it, or leave it out"
        )


def _require_activations(config: QuantizeConfig) -> None:
    """Raises UsageError where ranges of activations are asked for, and weights alone are quantized.

    Min-max is let by, since it is also what leaves the algorithms out.
    """
    default = QuantizeConfig()
    asked: dict[str, Any] = {"ranges": config.ranges, "percentile": config.percentile}
    for name, value in asked.items():
        if config.weights_only and value not in (getattr(default, name), "minmax"):
            raise UsageError(argument(name), "activations to be quantized", "weights_only", "leave one of the two out")


def _require_rounding(config: QuantizeConfig) -> None:
    """Raises UsageError for steps of learned rounding where no algorithm learns it."""
    learn, names = ("adaround", "brecq"), config.algorithms or ()
    if config.rounding_steps != QuantizeConfig().rounding_steps and not set(learn) & set(names):
        raise UsageError(
            argument("rounding_steps"), f"{' or '.join(learn)} among the algorithms", ", ".join(names) or "none",
            "add one, or leave it out",
        )  # fmt: skip
