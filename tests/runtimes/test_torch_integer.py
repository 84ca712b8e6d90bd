from __future__ import annotations

import pytest
import torch
import torchao.quantization.pt2e  # noqa: F401  (registers the operators)
from torch import nn

from qtool.runtimes.torch_integer import IntegerProduct, use_integer_products

ops = torch.ops.quantized_decomposed
RANGES = {torch.uint8: (0, 255), torch.int8: (-128, 127)}


class Quantized(nn.Module):
    """quantize, linear, quantize: the form that a linear layer has after conversion."""

    def __init__(self, dtype=torch.uint8, zero_point=117, sizes=(24, 16), bias=True):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        outputs, inputs = sizes
        self.dtype, self.zero_point, self.range = dtype, zero_point, RANGES[dtype]
        self.register_buffer(
            "weight", torch.randint(-127, 128, (outputs, inputs), generator=generator, dtype=torch.int8)
        )
        self.register_buffer("scale", torch.rand(outputs, generator=generator) * 0.01 + 0.001)
        self.register_buffer("zero", torch.zeros(outputs, dtype=torch.int64))
        self.register_buffer("bias", torch.randn(outputs, generator=generator) if bias else None)

    def forward(self, x):
        low, high = self.range
        q = ops.quantize_per_tensor(x, 0.05, self.zero_point, low, high, self.dtype)
        x = ops.dequantize_per_tensor(q, 0.05, self.zero_point, low, high, self.dtype)
        w = ops.dequantize_per_channel(self.weight, self.scale, self.zero, 0, -127, 127, torch.int8)
        return nn.functional.linear(x, w, self.bias)


def captured(model, x):
    return torch.export.export(model, (x,)).module(check_guards=False)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(3, 16), (40, 16), (2, 7, 16)])
def test_integer_products_are_the_simulated_layer(dtype, bias, shape):
    zero_point = 117 if dtype == torch.uint8 else -3
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 3
    graph = captured(Quantized(dtype, zero_point, bias=bias), x)
    before = graph(x)
    assert use_integer_products(graph) == 1
    targets = [str(node.target) for node in graph.graph.nodes]
    assert not any("linear" in t or "dequantize" in t for t in targets)
    torch.testing.assert_close(graph(x), before, rtol=1e-5, atol=1e-5)


def test_every_layer_is_replaced_with_its_own_weights():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = Quantized(sizes=(16, 16)), Quantized(sizes=(8, 16))

        def forward(self, x):
            return self.b(self.a(x).relu())

    x = torch.randn(20, 16, generator=torch.Generator().manual_seed(2))
    graph = captured(Two(), x)
    before = graph(x)
    assert use_integer_products(graph) == 2
    torch.testing.assert_close(graph(x), before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sizes", [(10, 16), (16, 12)])
def test_sizes_that_the_gpu_does_not_take_stay_in_float(sizes):
    graph = captured(Quantized(sizes=sizes), torch.randn(3, sizes[1]))
    assert use_integer_products(graph) == 0


def test_a_float_layer_is_left_alone():
    graph = captured(nn.Linear(16, 16), torch.randn(3, 16))
    assert use_integer_products(graph) == 0


def test_few_rows_are_padded_for_the_gpu(monkeypatch):
    rows = []
    product = torch._int_mm
    monkeypatch.setattr(torch, "_int_mm", lambda a, b: rows.append(a.shape[0]) or product(a, b))
    layer = IntegerProduct(torch.ones(8, 16, dtype=torch.int8), torch.ones(8), 1.0, 0)
    assert layer(torch.ones(1, 16, dtype=torch.int8)).tolist() == [[16.0] * 8]
    layer(torch.ones(30, 16, dtype=torch.int8))
    assert rows == [17, 30]
