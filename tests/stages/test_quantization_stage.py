"""The quantize stage's options: those of one config, and those that two share."""

from __future__ import annotations

from qtool.recipe import QatConfig
from qtool.stages.quantization import _quantize_configs


def test_a_device_that_is_named_is_that_of_training_too() -> None:
    config, tuning = _quantize_configs(None, None, {"mode": "qat", "device": "cuda:1", "seed": 3})
    assert (config.device, config.seed) == ("cuda:1", 3)
    assert tuning is not None
    assert (tuning.device, tuning.seed) == ("cuda:1", 3)
    config, tuning = _quantize_configs(None, QatConfig(device="cpu", seed=5), {"mode": "qat", "device": "cuda"})
    assert tuning is not None
    assert (tuning.device, tuning.seed) == ("cpu", 5)
    config, tuning = _quantize_configs(None, None, {"mode": "qat"})
    assert tuning is not None
    assert (config.device, tuning.device) == ("cpu", "auto")
