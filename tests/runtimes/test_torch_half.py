"""Captured graphs in half precision, those with integers in them above all: as they are made for a GPU, on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torchao.quantization.pt2e  # noqa: F401  (registers the operators)
from torch import nn
from torch._inductor import config as inductor

from qtool.runtimes import torch as runtime
from qtool.runtimes.base import TensorInfo
from qtool.runtimes.torch_half import halve, is_quantized

ops = torch.ops.quantized_decomposed
INPUTS = (TensorInfo("x", "float32", (6, 3, 8, 8)),)


class Quantized(nn.Module):
    """What a GPU has no integer kernel for, a convolution and a pooling, and two layers of which one has."""

    def __init__(self, scale=1e-3):
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        for name, shape in (("filters", (8, 3, 3, 3)), ("wide", (16, 32)), ("narrow", (5, 16))):
            self.register_buffer(name, torch.randint(-127, 128, shape, generator=draw, dtype=torch.int8))
            self.register_buffer(f"{name}_scale", torch.rand(shape[0], generator=draw) * scale + scale / 10)
            self.register_buffer(f"{name}_zero", torch.zeros(shape[0], dtype=torch.int64))
        self.register_buffer("colour_scale", torch.tensor([0.02, 0.03, 0.04]))
        self.register_buffer("colour_zero", torch.tensor([128, 120, 130]))
        self.bias = nn.Parameter(torch.randn(16, generator=draw))

    def weight(self, name):
        scale, zero = getattr(self, f"{name}_scale"), getattr(self, f"{name}_zero")
        return ops.dequantize_per_channel(getattr(self, name), scale, zero, 0, -127, 127, torch.int8)

    def forward(self, x):
        colours = (self.colour_scale, self.colour_zero, 1, 0, 255, torch.uint8)
        x = ops.dequantize_per_channel(ops.quantize_per_channel(x, *colours), *colours)
        x = nn.functional.conv2d(x, self.weight("filters"), padding=1).relu()
        x = nn.functional.max_pool2d(rounded(x, 0.01, 0), 4).flatten(1)
        x = nn.functional.linear(rounded(x, 0.01, 3), self.weight("wide"), self.bias)
        return nn.functional.linear(rounded(nn.functional.gelu(x), 0.02, 10), self.weight("narrow"))


def rounded(x, scale, zero_point):
    grid = (scale, zero_point, 0, 255, torch.uint8)
    return ops.dequantize_per_tensor(ops.quantize_per_tensor(x, *grid), *grid)


def graph_of(model):
    return torch.export.export(model.eval(), (torch.zeros(6, 3, 8, 8),)).module(check_guards=False)


def images(seed=1):
    return np.random.default_rng(seed).standard_normal((6, 3, 8, 8), np.float32)


def find(graph):
    return [node.target for node in graph.nodes if node.op == "call_function"]


def decibels(found, expected):
    return 10 * np.log10(np.square(expected).sum() / np.square(found - expected).sum())


@pytest.mark.parametrize(("precision", "least"), [("fp16", 40), ("bf16", 25)])
def test_a_quantized_graph_in_halves_computes_what_it_does(precision, least):
    model = Quantized()
    expected = graph_of(model)(torch.from_numpy(images())).detach().numpy()
    session = runtime.TorchSession(graph_of(model), INPUTS, device="cpu", precision=precision)
    assert decibels(session.run({"x": images()})[0], expected) > least
    assert session.stored == "int8", "that is what the file holds, whatever is computed"


class Masking(nn.Module):
    """Attention that hides by what no half holds: as a number, as a tensor, and by float32's limit."""

    def __init__(self):
        super().__init__()
        self.register_buffer("hidden", torch.ones(8, 8, dtype=torch.bool).triu(1))
        self.register_buffer("added", torch.zeros(8, 8).masked_fill(self.hidden, -1e9))

    def forward(self, x):
        limit = torch.finfo(torch.float32).min
        scores = (x @ x.mT).masked_fill(self.hidden, -1e10) + self.added
        return torch.where(self.hidden, torch.full((8, 8), limit), scores.clamp(min=limit)).softmax(-1) @ x


@pytest.mark.parametrize(("precision", "least"), [("fp16", 50), ("bf16", 35)])
def test_masks_hide_by_the_limit_of_the_type(precision, least):
    model, x = Masking(), images()
    session = runtime.TorchSession(graph_of(model), INPUTS, device="cpu", precision=precision)
    (found,) = session.run({"x": x})
    assert decibels(found, model(torch.from_numpy(x)).numpy()) > least


class TimeSteps(nn.Module):
    """A diffusion model's embedding of its time step, by its sines and by a row of its own, and the step itself."""

    def __init__(self):
        super().__init__()
        self.register_buffer("rates", torch.exp(-9.2 * torch.arange(32) / 32))
        self.layer, self.rows = nn.Linear(65, 16), nn.Embedding(1000, 16)

    def forward(self, step):
        angle = step[:, None].float() * self.rates
        return self.layer(torch.cat([angle.cos(), angle.sin(), step[:, None] / 1000], 1)) + self.rows(step.long())


@pytest.mark.parametrize("kind", ["float32", "int64"])
@pytest.mark.parametrize(("precision", "least"), [("fp16", 50), ("bf16", 35)])
def test_sines_of_time_steps_are_those_of_float32(precision, least, kind):
    model, steps = TimeSteps().eval(), torch.tensor([999, 873, 641, 502, 257, 3]).to(getattr(torch, kind))
    expected = model(steps).detach().numpy()
    graph = torch.export.export(model, (steps,)).module(check_guards=False)
    session = runtime.TorchSession(graph, (TensorInfo("step", kind, (6,)),), device="cpu", precision=precision)
    (found,) = session.run({"step": steps.numpy()})
    assert decibels(found, expected) > least


def test_as_it_is_made_for_a_gpu_no_operator_of_onednns_patterns_is_left():
    graph = graph_of(Quantized())
    assert runtime._lowered_for_gpu(graph, None) == "fp16"
    assert halve(graph, torch.float16) == {"x"}
    names = {str(node.target) for node in graph.graph.nodes}
    assert not any(name.startswith("quantized_decomposed") for name in names)
    convolution = next(node for node in graph.graph.nodes if node.target is torch.ops.aten.conv2d.default)
    assert convolution.args[1].op == "get_attr", "weights that are dequantized are so once"
    assert "integer_product_0" in names
    assert sum("linear" in name for name in names) == 1, "five outputs are too odd for an integer product"
    types = {name: value.dtype for name, value in graph.named_buffers()}
    assert types["integer_product_0.weight"] == torch.int8
    assert types["integer_product_0.factor"] == torch.float32


@pytest.mark.slow
@pytest.mark.parametrize("for_gpu", [True, False])
def test_as_it_is_made_for_a_gpu_it_compiles_without_onednns_integer_kernels(for_gpu):
    """Inductor's patterns for them ask for no device: what they leave alone on the CPU they leave alone on a GPU."""
    graph, lowered = graph_of(Quantized()), []
    precision = runtime._lowered_for_gpu(graph, None) if for_gpu else None
    session = runtime.TorchSession(graph, INPUTS, provider="torch-compile", device="cpu", precision=precision)
    with inductor.patch(post_grad_custom_post_pass=lambda found: lowered.extend(map(str, find(found)))):
        found = session.run({"x": images()})[0]
    kernels = [name for name in lowered if name.startswith(("onednn.q", "quantized"))]
    assert bool(kernels) is not for_gpu
    expected = graph_of(Quantized())(torch.from_numpy(images())).detach().numpy()
    assert decibels(found, expected) > (40 if for_gpu else 20)


def test_a_float_graph_has_no_integers():
    assert not is_quantized(graph_of(nn.Sequential(nn.Flatten(), nn.Linear(192, 4))))
    assert runtime._lowered_for_gpu(graph_of(nn.Sequential(nn.Flatten(), nn.Linear(192, 4))), None) is None


class Norms(nn.Module):
    """Norms written out: of squares beyond half, a row of zeros that only an epsilon divides, E[x²] − E[x]², a sum."""

    def forward(self, x):
        x = x.flatten(1) @ torch.eye(192)  # a layer
        large, none = 200 * x, x.relu() * (x[:, :1] > 0)
        shares = (x * (none / (none + 1e-9)), x * (none / none.clamp(min=1e-12)))
        mean = (x + 5).mean(1, keepdim=True)
        variance = (x + 5).pow(2).mean(1, keepdim=True) - mean * mean
        return (
            large / large.pow(2).sum(1, keepdim=True).sqrt(), none / (none.sum(1, keepdim=True) + 1e-9),
            (x + 5 - mean) * torch.rsqrt(variance + 1e-5), (x + 900).sum(1) / x.shape[1], *shares,
        )  # fmt: skip


@pytest.mark.parametrize(("precision", "least"), [("fp16", 50), ("bf16", 35)])
def test_sums_that_leave_the_range_of_half_are_those_of_float32(precision, least):
    model, x = Norms(), images()
    session = runtime.TorchSession(graph_of(model), INPUTS, device="cpu", precision=precision)
    for found, expected in zip(session.run({"x": x}), model(torch.from_numpy(x)), strict=True):
        assert decibels(found, expected.numpy()) > least


def test_an_average_of_plain_values_is_in_half():
    graph = graph_of(Averaged())
    halve(graph, torch.float16)
    assert torch.float32 not in {value for node in graph.graph.nodes for value in node.args}


class Averaged(nn.Module):
    """What pools the channels of a net, behind a swish."""

    def forward(self, x):
        return (x * x.sigmoid()).mean((2, 3))


class Spectra(nn.Module):
    """Complex numbers, of which torch has none in bfloat16, and distances, for which it has no kernel in 16 bits."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x):
        rows = self.layer(x.flatten(2))
        turned = torch.view_as_complex(rows.reshape(6, 3, 32, 2)) * torch.polar(torch.ones(32), torch.arange(32.0))
        filtered = torch.fft.irfft(torch.fft.rfft(rows) * 0.5, n=64)
        return filtered, torch.fft.fft2(rows).real, torch.view_as_real(turned), torch.cdist(rows, rows + 1)


@pytest.mark.parametrize(("precision", "least"), [("fp16", 50), ("bf16", 35)])
def test_what_has_no_kernel_in_16_bits_is_computed_in_float32(precision, least):
    model, x = Spectra().requires_grad_(False), images()
    wanted = model(torch.from_numpy(x))
    session = runtime.TorchSession(graph_of(model), INPUTS, device="cpu", precision=precision)
    for found, expected in zip(session.run({"x": x}), wanted, strict=True):
        assert decibels(found, expected.numpy()) > least


@pytest.mark.parametrize(("precision", "least"), [("fp16", 50), ("bf16", 35)])
def test_what_is_taken_off_inputs_is_taken_off_them_in_float32(precision, least):
    class Scaled(nn.Module):
        def forward(self, x):
            return (x - x.mean((2, 3), keepdim=True)) / 7

    x = 5000 + images()
    session = runtime.TorchSession(graph_of(Scaled()), INPUTS, device="cpu", precision=precision)
    assert decibels(session.run({"x": x})[0], Scaled()(torch.from_numpy(x)).numpy()) > least
