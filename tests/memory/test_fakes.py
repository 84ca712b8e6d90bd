"""Fake tensors as predictions have them lie as real ones do: what lies otherwise is copied, or not, by what follows."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from qtool.memory.fakes import answered

RUN = {
    "roll": lambda x: torch.roll(x, (1, 1), (2, 3)),
    "channel_shuffle": lambda x: F.channel_shuffle(x, 2),
    "max_unpool2d": lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2),
    "reflect": lambda x: F.pad(x, (1,) * (2 * x.dim() - 4), mode="reflect"),
    "replicate": lambda x: F.pad(x, (1,) * (2 * x.dim() - 4), mode="replicate"),
    "batch_norm": lambda x: F.batch_norm(x, torch.zeros(4), torch.ones(4), training=True),
    "logsigmoid": F.logsigmoid,
    "log_softmax": lambda x: x.log_softmax(1),
    "glu": lambda x: F.glu(x, 1),
    "rrelu": lambda x: F.rrelu(x, training=True),
}
LAYOUTS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)


def strides(run: Callable[[Tensor], Tensor], given: torch.memory_format, back: torch.memory_format) -> list[list[int]]:
    """How the result lies, and the gradient that its backward pass makes of one that lies as ``back`` says."""
    solid = torch.channels_last_3d in (given, back)
    x = torch.ones(2, 4, *[6] * (2 + solid)).to(memory_format=given).requires_grad_()
    y = run(x)
    (grad,) = torch.autograd.grad(y, x, torch.ones_like(y).contiguous(memory_format=back))
    return [list(y.stride()), list(grad.stride())]


@pytest.mark.parametrize("name", RUN)
@pytest.mark.parametrize(
    ("given", "back"), [(LAYOUTS[1], LAYOUTS[1]), (LAYOUTS[1], LAYOUTS[0]), (LAYOUTS[0], LAYOUTS[1]), LAYOUTS[:1] * 2]
)
def test_results_lie_as_they_do_for_real(name: str, given: torch.memory_format, back: torch.memory_format) -> None:
    real = strides(RUN[name], given, back)
    with FakeTensorMode(allow_non_fake_inputs=True), answered():
        assert strides(RUN[name], given, back) == real


@pytest.mark.parametrize("name", ["roll", "channel_shuffle", "reflect", "replicate", "batch_norm", "glu"])
def test_results_of_three_dimensions_lie_as_they_do_for_real(name: str) -> None:
    for given, back in ((LAYOUTS[2], LAYOUTS[2]), (LAYOUTS[2], LAYOUTS[0])):
        real = strides(RUN[name], given, back)
        with FakeTensorMode(allow_non_fake_inputs=True), answered():
            assert strides(RUN[name], given, back) == real
