"""Integer convolutions against the same sums in float64, and the graphs that have none."""

from __future__ import annotations

import pytest
import torch
import torchao.quantization.pt2e  # noqa: F401  (registers the operators)
from torch import nn

from qtool.runtimes import torch_integer_conv
from qtool.runtimes.torch_integer_conv import is_exact_here, with_integer_convolutions

ops = torch.ops.quantized_decomposed
pytestmark = pytest.mark.skipif(not is_exact_here(), reason="needs a CPU with VNNI")


class Quantized(nn.Module):
    """quantize, convolution, perhaps ReLU: the form that a convolution has after conversion."""

    def __init__(self, dtype=torch.uint8, zero_point=117, channels=(6, 8), groups=1, bias=True, relu=False, stride=2,
                 dilation=1, kernel=(3, 3)):  # fmt: skip
        super().__init__()
        g = torch.Generator().manual_seed(0)
        shape = (channels[1], channels[0] // groups, *kernel)
        self.dtype, self.zero_point, self.groups, self.relu, self.stride = dtype, zero_point, groups, relu, stride
        self.dilation = dilation
        self.low, self.high = (0, 255) if dtype == torch.uint8 else (-128, 127)
        self.register_buffer("weight", torch.randint(-127, 128, shape, generator=g, dtype=torch.int8))
        self.register_buffer("scale", torch.rand(channels[1], generator=g) * 0.01 + 0.001)
        self.register_buffer("zero", torch.zeros(channels[1], dtype=torch.int64))
        self.register_buffer("bias", torch.randn(channels[1], generator=g) if bias else None)

    def forward(self, x):
        qparams = (0.05, self.zero_point, self.low, self.high, self.dtype)
        x = ops.dequantize_per_tensor(ops.quantize_per_tensor(x, *qparams), *qparams)
        w = ops.dequantize_per_channel(self.weight, self.scale, self.zero, 0, -127, 127, torch.int8)
        y = nn.functional.conv2d(x, w, self.bias, self.stride, 1, self.dilation, self.groups)
        return y.relu() if self.relu else y


def captured(model, x):
    return torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},)).module(check_guards=False)


@pytest.mark.parametrize(
    "how",
    [{}, {"bias": False}, {"relu": True}, {"zero_point": 0}, {"groups": 2}, {"channels": (8, 8), "groups": 8},
     {"stride": 1, "relu": True}, {"channels": (600, 8), "zero_point": 3}],
)  # fmt: skip
def test_a_convolution_is_the_exact_sum(how):
    model = Quantized(**how)
    x = torch.randn((5, model.weight.shape[1] * model.groups, 9, 11), generator=torch.Generator().manual_seed(1)) * 3
    graph = captured(model, x)
    lowered, replaced = with_integer_convolutions(graph)
    assert replaced == 1
    assert not any("dequantize_per" in str(node.target) for node in lowered.graph.nodes)
    q = ops.quantize_per_tensor(x, 0.05, model.zero_point, 0, 255, torch.uint8).double() - model.zero_point
    exact = nn.functional.conv2d(q, model.weight.double(), None, model.stride, 1, 1, model.groups)
    exact = exact * (model.scale.double() * 0.05).view(-1, 1, 1)
    exact = exact if model.bias is None else exact + model.bias.double().view(-1, 1, 1)
    exact = exact.relu() if model.relu else exact
    for size in (5, 2, 5):
        assert (lowered(x[:size]).double() - exact[:size]).abs().max() < 3e-7 * exact.abs().max()
    torch.testing.assert_close(lowered(x), graph(x), rtol=1e-4, atol=1e-4)


# the first of 16 channels and 16 taps is not asked of the library, whose kernel never ends
@pytest.mark.parametrize(
    ("how", "width", "replaced"),
    [({"groups": 2, "channels": (18, 66)}, 17, 0), ({"groups": 2, "channels": (18, 32)}, 17, 1),
     ({"stride": 2, "channels": (32, 64)}, 2, 0), ({"dilation": 2}, 17, 0),
     ({"stride": 1, "channels": (16, 16), "groups": 16, "kernel": (1, 16)}, 96, 0),
     ({"stride": 1, "channels": (16, 16), "groups": 16, "kernel": (1, 13)}, 96, 1),
     ({"stride": 1, "channels": (32, 32), "groups": 32, "kernel": (1, 16)}, 96, 1),
     ({"stride": 1, "channels": (1, 16), "kernel": (1, 16)}, 96, 1)],
)  # fmt: skip
def test_what_the_library_gets_wrong_is_added_up_in_float(how, width, replaced):
    model = Quantized(**how)
    x = torch.randn((4, model.weight.shape[1] * model.groups, 17, width), generator=torch.Generator().manual_seed(1))
    graph = captured(model, x)
    lowered, count = with_integer_convolutions(graph)
    assert count == replaced
    torch.testing.assert_close(lowered(x), graph(x), rtol=1e-4, atol=1e-4)


def test_the_graph_it_was_made_of_stays():
    x = torch.randn(2, 6, 8, 8)
    graph = captured(Quantized(), x)
    before, code = graph(x), graph.code
    with_integer_convolutions(graph)
    assert graph.code == code
    assert torch.equal(graph(x), before)


def test_signed_activations_and_other_readers_of_the_convolution():
    x = torch.randn(2, 6, 8, 8)
    assert with_integer_convolutions(captured(Quantized(torch.int8, -3), x))[1] == 0

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = Quantized()

        def forward(self, x):
            y = self.layer(x)
            return y.relu(), y + 1

    graph = captured(Both(), x)
    lowered, replaced = with_integer_convolutions(graph)
    assert replaced == 1
    torch.testing.assert_close(lowered(x), graph(x), rtol=1e-4, atol=1e-4)


def test_a_cpu_that_saturates_is_known(monkeypatch):
    monkeypatch.setattr(torch_integer_conv, "cpu_info", lambda: {"features": ["avx2", "avx512f"]})
    assert not is_exact_here()
