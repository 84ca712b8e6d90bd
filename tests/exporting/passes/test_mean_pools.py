"""Average pools as convolutions: the exact mean rounded once, in the runtime and in the integer reference."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from qdq_files import Builder, needs_x86, rewritten_by, run
from torch import nn

from qtool.exporting.passes import mean_pools
from qtool.exporting.reference.integer_reference import IntegerReference
from qtool.exporting.stage import export
from qtool.quantization.stage import quantize
from qtool.recipe import ExportConfig, QuantizeConfig
from qtool.runtimes.ort import optimized_graph

applied = functools.partial(rewritten_by, mean_pools.apply)


def pooled(
    kernel: int = 2, stride: int = 2, pad: int = 0, *, scale: float = 0.03, end: str = "", channels: int = 5,
    **attributes: Any,
) -> onnx.ModelProto:  # fmt: skip
    b = Builder()
    x = b.pair(b.input("x", ["n", channels, 9, 8]), 0.03, 110)
    window: dict[str, Any] = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": [pad] * 4} | attributes
    y = b.op("AveragePool", x, **window)
    return b.model(y if end == "float" else b.pair(y, scale, 110))


@needs_x86
@settings(max_examples=15, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(
    kernel=st.integers(1, 4), stride=st.integers(1, 3), pad=st.integers(0, 1), scale=st.sampled_from([0.03, 0.021]),
    seed=st.integers(0, 9),
)  # fmt: skip
def test_the_integers_are_the_means(
    kernel: int, stride: int, pad: int, scale: float, seed: int, tmp_path: Path
) -> None:
    pad = min(pad, kernel - 1)
    model = pooled(kernel, stride, pad, scale=scale, count_include_pad=1)
    changed, rewritten = applied(model)
    assert changed == 1
    onnx.checker.check_model(rewritten, full_check=True)
    x = np.random.default_rng(seed).normal(size=(2, 5, 9, 8)).astype(np.float32)
    got, kernels = run(rewritten, {"x": x}, tmp_path)
    assert "QLinearConv" in kernels
    assert "QLinearAveragePool" not in kernels
    np.testing.assert_array_equal(got[0], IntegerReference(rewritten).run({"x": x})[0])
    integers = np.clip(np.rint(x / np.float32(0.03)), -110, 145)
    means = torch.nn.functional.avg_pool2d(torch.from_numpy(integers.astype(np.float64)), kernel, stride, pad).numpy()
    steps = np.clip(means * 0.03 / scale, -110, 145)
    assert np.abs(got[0] / scale - steps).max() <= 0.5 + 1e-4  # in steps: nothing but the one rounding


@pytest.mark.parametrize(
    "changes",
    [
        {"pad": 1, "count_include_pad": 0}, {"kernel": 3, "ceil_mode": 1}, {"auto_pad": "SAME_UPPER"},
        {"kernel_shape": [9, 8]}, {"end": "float"}, {"dilations": [2, 1]},
    ],
    ids=["fewer at the edges", "ceil", "automatic padding", "the whole image", "a float output", "dilated"],
)  # fmt: skip
def test_others_stay(changes: dict[str, Any]) -> None:
    model = pooled(**changes)
    if "auto_pad" in changes:
        del model.graph.node[2].attribute[[a.name for a in model.graph.node[2].attribute].index("pads")]
    changed, rewritten = applied(model)
    assert changed == 0
    assert [node.op_type for node in rewritten.graph.node] == [node.op_type for node in model.graph.node]


@needs_x86
def test_the_ones_of_large_windows_are_not_stored(tmp_path: Path) -> None:
    changed, rewritten = applied(pooled(4, 4, channels=80))
    assert changed == 1
    onnx.checker.check_model(rewritten, full_check=True)
    assert rewritten.ByteSize() < 1500
    x = np.random.default_rng(0).uniform(-3, 3, size=(2, 80, 9, 8)).astype(np.float32)
    got, kernels = run(rewritten, {"x": x}, tmp_path)
    assert "QLinearConv" in kernels
    assert not {"ConstantOfShape", "Conv", "QLinearAveragePool"} & set(kernels)
    reference = IntegerReference(rewritten)
    assert reference.uncovered == []
    np.testing.assert_array_equal(got[0], reference.run({"x": x})[0])
    means = torch.nn.functional.avg_pool2d(torch.from_numpy(x), 4, 4).numpy()
    assert np.abs(got[0] - means).max() < 0.03


@pytest.mark.parametrize(
    ("pool", "is_integer"),
    [
        (nn.AvgPool2d(2, 2, ceil_mode=True, count_include_pad=False), True),
        (nn.AvgPool2d(3, 1, 1), True),
        (nn.AvgPool2d(3, 1, 1, count_include_pad=False), False),
        (nn.AvgPool2d(3, 2, ceil_mode=True), False),
    ],
)
def test_where_windows_are_not_alike_the_mean_is_taken_in_float(
    pool: nn.Module, is_integer: bool, tmp_path: Path
) -> None:
    """The runtime's own integer pool is many times as slow, and is in neither file."""
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), pool, nn.Conv2d(16, 4, 1)).eval(), torch.randn(8, 3, 12, 12)
    form = quantize(net, QuantizeConfig(effort="fast"), example=x, calibration=[x])
    assert {unit.name: unit.integer for unit in form.plan.units} == {"0": True, "1": is_integer, "2": True}
    exported = export(form, tmp_path, ExportConfig(baselines=None), samples=[x])
    kernels = [node.op_type for node in optimized_graph(exported.files["int8"], weights=False).graph.node]
    assert kernels.count("QLinearConv") == 2 + is_integer
    assert kernels.count("AveragePool") == 1 - is_integer
    assert "QLinearAveragePool" not in kernels
