"""Fake-quantizers against torch.ao's, against themselves compiled, and with nothing that a step would wait for."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

from qtool.errors import QtoolError
from qtool.quantization.calibration.observers import FakeQuantizer, PerChannelFakeQuantizer
from qtool.quantization.quantizers.fake_quantize import fake_quantize
from qtool.quantization.quantizers.learned import learn_steps


def _activation_fake(averaging: float | None = 0.01) -> FakeQuantizer:
    return FakeQuantizer(torch.uint8, 0, 255, torch.per_tensor_affine, averaging=averaging)


def _weight_fake(paired: int | None = None) -> PerChannelFakeQuantizer:
    return PerChannelFakeQuantizer(torch.int8, -127, 127, torch.per_channel_symmetric, 0, paired=paired)


def fakes() -> dict[str, nn.Module]:
    """One of each kind, the activations' with a few steps behind them."""
    symmetric = FakeQuantizer(torch.int8, -127, 127, torch.per_tensor_symmetric)
    clipped, extremes = _activation_fake(), _activation_fake(None)
    clipped.limits = (0.0, 6.0)
    learned, offset = _weight_fake(), _activation_fake()
    made = {"weight": _weight_fake(), "affine": _activation_fake(), "symmetric": symmetric, "clipped": clipped}
    made |= {"extremes": extremes, "learned": learned, "offset": offset}
    pairs, learned_pairs = _weight_fake(1), _weight_fake(1)
    made |= {"pairs": pairs, "learned pairs": learned_pairs}
    for fake in made.values():
        fake(torch.randn(4, 3, generator=torch.Generator().manual_seed(0)))
    learn_steps([learned, offset, learned_pairs])
    return made


@pytest.mark.parametrize("name", [*fakes()])
def test_a_step_asks_for_no_number(name: str) -> None:
    """A tensor without data has none to give: what would wait for a GPU raises here."""
    fake = fakes()[name]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake(mode.from_tensor(torch.ones(4, 3))).sum()


@settings(max_examples=60, derandomize=True, database=None)
@given(
    axis=st.sampled_from([None, 0, 1, -1]), bits=st.integers(2, 8), affine=st.booleans(), seed=st.integers(0, 2**31),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), last=st.booleans(),
)  # fmt: skip
def test_values_and_gradients_are_those_of_torchs_kernel(
    axis: int | None, bits: int, affine: bool, seed: int, dtype: torch.dtype, last: bool
) -> None:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 4, 5, 6, generator=draw)
    channels = 1 if axis is None else x.shape[axis]
    qmin, qmax = (0, 2**bits - 1) if affine else (1 - 2 ** (bits - 1), 2 ** (bits - 1) - 1)
    scale = torch.rand(channels, generator=draw) * 4 / 2**bits + 1e-3
    if axis is None:  # half-way between two integers the rounding of x · (1/s) decides
        x.view(-1)[:120] = (torch.arange(-60, 60) + 0.5) * scale
    x = x.to(dtype).contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
    zero = torch.randint(qmin, qmax + 1, (channels,), generator=draw, dtype=torch.int32) * affine
    found, expected = x.clone().requires_grad_(), x.clone().requires_grad_()
    ours = fake_quantize(found, scale, zero, qmin, qmax, axis)
    if axis is None:
        theirs = torch.fake_quantize_per_tensor_affine(expected.float(), scale, zero, qmin, qmax).to(dtype)
    else:
        theirs = torch.fake_quantize_per_channel_affine(expected.float(), scale, zero, axis % 4, qmin, qmax).to(dtype)
    assert torch.equal(ours, theirs)
    for y in (ours, theirs):
        y.float().square().sum().backward()
    assert found.grad is not None
    assert expected.grad is not None
    assert torch.equal(found.grad, expected.grad)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by torch's own tracer
@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.float32) for name in fakes()), (next(iter(fakes())), torch.bfloat16)]
)
def test_compiled_whole_it_computes_the_same_and_is_compiled_once(name: str, dtype: torch.dtype) -> None:
    ours, seen = fakes()[name], 0

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        nonlocal seen
        seen += 1
        return lookup_backend("aot_eager")(graph, inputs)

    def twice(fake: nn.Module, x: Tensor) -> Tensor:
        return fake(2 * fake(x))

    torch._dynamo.reset()
    theirs = copy.deepcopy(ours)
    compiled = torch.compile(twice, backend=backend, fullgraph=True)
    for step in range(4):
        x = (torch.randn(4, 3, generator=torch.Generator().manual_seed(step)) * (1 + step)).to(dtype)
        one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        expected, found = twice(ours, one), compiled(theirs, other)
        assert torch.equal(found, expected)
        gradients = (torch.autograd.grad(y.square().sum(), of)[0] for y, of in ((expected, one), (found, other)))
        assert torch.equal(*gradients)
    assert all(torch.equal(value, theirs.state_dict()[key]) for key, value in ours.state_dict().items())
    assert seen == 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", [name for name, fake in fakes().items() if getattr(fake, "learner", None) is None])
def test_what_is_not_finite_is_never_clipped_away(bad: float, name: str) -> None:
    fake, x = fakes()[name], torch.ones(4, 3)
    x[1, 1] = bad
    assert not fake(x).sum().isfinite()
    if isinstance(fake, FakeQuantizer):
        with pytest.raises(QtoolError, match="layer 'activation': expected finite min <= max"):
            fake.calculate_qparams()


def test_a_relu6_is_clipped_by_the_integers_alone() -> None:
    """Moving averages that end near 6 must not leave room between 6 and the greatest integer."""
    for high in (5.97, 5.99, 6.0, 6.01, 6.02):
        fake = fakes()["clipped"]
        assert isinstance(fake, FakeQuantizer)
        fake.set_range(0.0, high)
        scale, zero_point = fake.calculate_qparams()
        assert float((torch.tensor(6.0) / scale).round() + zero_point) >= 255
        assert torch.equal(fake.scale, scale)
        assert float(scale) == pytest.approx(high / 255, rel=0.01)


def test_a_fresh_fake_quantizer_takes_a_saved_ones_state() -> None:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    for make in (_weight_fake, _activation_fake):
        saved, fresh = make(), make()
        saved(x)
        fresh.load_state_dict(saved.state_dict())
        saved.observing = fresh.observing = False
        assert torch.equal(fresh(10 * x), saved(10 * x))  # clipped to the range of x
        assert fresh(10 * x).abs().max() < 2 * x.abs().max()


@pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max:UserWarning:torch")
def test_the_moving_average_is_torch_aos() -> None:
    ours = _activation_fake()
    theirs = FakeQuantize(MovingAverageMinMaxObserver, 0, 255, dtype=torch.quint8, averaging_constant=0.01)
    draw = torch.Generator().manual_seed(0)
    for step in range(5):
        x = torch.randn(32, generator=draw) * (1 + step)
        torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=1e-5)
        torch.testing.assert_close(ours.scale, theirs.scale, rtol=1e-6, atol=0)
        assert int(ours.zero_point) == int(theirs.zero_point)


def test_gradients_pass_inside_the_range_and_nowhere_else() -> None:
    fake = _activation_fake()
    fake.set_range(-1.0, 1.0)
    fake.observing = False
    x = torch.tensor([-3.0, -0.5, 0.2, 0.9, 3.0], requires_grad=True)
    fake(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0, 1, 1, 1, 0]


def test_fake_quantizers_compute_in_float32_under_autocast() -> None:
    fake = _activation_fake()
    x = torch.linspace(-1, 1, 101).to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        y = fake(x)
    assert y.dtype == torch.bfloat16
    assert fake.scale.dtype == fake.low.dtype == torch.float32
    assert (y.float() - x.float()).abs().max() <= float(fake.scale) / 2 + 2**-8


def test_moving_a_graph_moves_its_fake_quantizers() -> None:
    for fake in (_activation_fake(), _weight_fake()):
        fake(torch.randn(4, 3))
        assert {value.device.type for value in fake.to("meta").state_dict().values()} == {"meta"}
