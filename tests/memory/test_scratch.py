"""What operators take for themselves, against what they take when the caller counts."""

from __future__ import annotations

import itertools

import bitsandbytes  # noqa: F401
import pytest
import torch
from torch import distributed
from torch._subclasses.fake_tensor import FakeTensorMode

from qtool.memory import scratch
from qtool.memory.measure import allocations
from qtool.memory.scratch import Scratch
from qtool.system import processes
from qtool.training import blockwise  # noqa: F401

MM = torch.ops.aten.mm.default
LAST = torch.channels_last


def test_a_fake_call_takes_what_a_real_one_takes() -> None:
    a, b = torch.randn(512, 512).bfloat16().t(), torch.randn(512, 128).bfloat16()
    changes, _ = allocations(lambda: MM(a, b))
    with FakeTensorMode() as mode:
        found = Scratch().of(MM, (mode.from_tensor(a), mode.from_tensor(b)), None)
    assert found == sum(change for change in changes[1:] if change > 0)
    assert changes[0] == 512 * 128 * 2  # the result itself


def test_an_8_bit_update_takes_memory_of_its_own() -> None:
    weight, codes, scales, book = torch.ones(32, 16, 3, 3), torch.zeros(32, 16, 3, 3), torch.ones(18), torch.ones(256)
    codes = codes.to(torch.uint8)
    args = (weight, weight, [codes], [scales], [book], 0.9, 0.99, 1e-8, 1, 0.01, 0.0)
    assert Scratch().of(torch.ops.qtool.update_8bit.default, args, None) > weight.nbytes


def test_what_is_copied_depends_on_how_operands_lie() -> None:
    images = torch.ones(2, 8, 16, 16)
    resize = torch.ops.aten.upsample_bilinear2d.default
    taken = [Scratch().of(resize, (x, [32, 32], False), None) for x in (images, images.contiguous(memory_format=LAST))]
    assert taken[0] > images.nbytes
    assert taken[1] < images.nbytes


@pytest.mark.parametrize("name", ["pixel_shuffle", "pixel_unshuffle"])
def test_pixels_of_a_part_of_an_image_are_copied_before_they_are_shuffled(name: str) -> None:
    shuffle, image = getattr(torch.ops.aten, name).default, torch.ones(2, 8, 18, 18).contiguous(memory_format=LAST)
    part = image[:, :, 1:-1, 1:-1]
    assert Scratch().of(shuffle, (part, 2), None) == part.numel() * 4
    assert Scratch().of(shuffle, (part.contiguous(memory_format=LAST), 2), None) == 0


@pytest.mark.parametrize("name", ["add", "add_", "mul", "sub"])
def test_values_of_several_dtypes_are_converted_before_they_meet(name: str) -> None:
    """A residual in float32 beside a branch in bfloat16: torch converts the branch as a whole."""
    wide, narrow = torch.ones(64, 100), torch.ones(64, 100).bfloat16()
    operator = getattr(torch.ops.aten, name).Tensor
    assert Scratch().of(operator, (wide, narrow), None) == wide.nbytes
    assert Scratch().of(operator, (wide, torch.ones((), dtype=torch.float64)), None) == 0


@pytest.mark.parametrize("foreach", [False, True])
def test_what_large_values_of_several_dtypes_take_is_told_by_some_rows_of_them(foreach, monkeypatch) -> None:
    """Weights in bfloat16 and what is added to them in float32 may be all that a model has."""
    wide, narrow = torch.ones(64, 100), torch.ones(64, 100).bfloat16()
    monkeypatch.setattr(scratch, "LARGEST", wide.nbytes // 4)
    counted = Scratch()
    with FakeTensorMode() as mode:
        large = mode.from_tensor(wide), mode.from_tensor(narrow)
        if foreach:
            found = counted.of(torch.ops.aten._foreach_add_.List, tuple([each] for each in large), None)
        else:
            found = counted.of(torch.ops.aten.add_.Tensor, large, None)
    assert found == pytest.approx(wide.nbytes, rel=0.02)
    assert 0 < max(taken for taken, _ in counted.known.values()) < scratch.LARGEST


def expanded(*shape: int) -> torch.Tensor:
    """A gradient as a mean gives it: one value for all places."""
    return torch.ones(*shape[:-2], 1, 1).expand(shape)


IMAGES, INDICES = torch.randn(2, 8, 20, 20), torch.zeros(2, 8, 20, 20, dtype=torch.int64)
CALLS = {
    "replication_pad2d_backward": (expanded(2, 8, 24, 24), IMAGES, [2] * 4),
    "_upsample_bilinear2d_aa_backward": (expanded(2, 8, 30, 30), [30, 30], [2, 8, 20, 20], False),
    "adaptive_max_pool2d_backward": (expanded(2, 8, 20, 20), IMAGES, INDICES),
    "grid_sampler_2d_backward": (expanded(2, 8, 20, 20), IMAGES, torch.zeros(2, 20, 20, 2), 0, 0, False, [True, True]),
    "embedding_dense_backward": (expanded(2, 50, 64), torch.zeros(2, 50, dtype=torch.int64), 100, -1, False),
    "_softmax_backward_data": (IMAGES.transpose(1, 3), IMAGES.transpose(1, 3), 1, torch.float32),
    "_cdist_forward": (torch.randn(2, 40, 20).transpose(1, 2), torch.randn(2, 40, 20).transpose(1, 2), 2.0, 2),
    "_euclidean_dist": (torch.randn(2, 40, 20), torch.randn(2, 40, 20)),
    "kthvalue": (IMAGES, 3, 1),
    "sort": (torch.randn(5000),),
    "scatter_add": (IMAGES.bfloat16(), 1, INDICES, IMAGES.bfloat16()),
    "binary_cross_entropy_with_logits": (IMAGES, IMAGES, None, None, 1),
}


@pytest.mark.parametrize("name", CALLS)
def test_operators_that_copy_an_operand_are_called(name: str) -> None:
    packet = getattr(torch.ops.aten, name)
    operator = getattr(packet, "default" if "default" in packet.overloads() else "dim")
    with torch.no_grad():
        changes, results = allocations(lambda: operator(*CALLS[name]))
    running = list(itertools.accumulate(changes))
    assert Scratch().of(operator, CALLS[name], None) == max(running) - running[-1] > 1000
    del results


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_a_fused_update_takes_images_weights_gradients_as_copies(optimizer: type) -> None:
    shapes = (8, 16, 3, 3), (4, 16, 3, 3), (64, 64)
    weights = [torch.ones(shape, requires_grad=True) for shape in shapes]
    for weight in weights[:2]:
        weight.data = weight.data.contiguous(memory_format=LAST)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    update = optimizer(weights, lr=0.1, fused=True)
    update.step()
    changes, _ = allocations(update.step)
    grads = [weight.grad for weight in weights]
    found = Scratch().of(torch.ops.aten._fused_sgd_.default, (weights, grads), None)
    assert found == weights[0].nbytes == max(changes)
    assert Scratch().of(torch.ops.aten._fused_adamw_.default, (weights[2:], grads[2:]), None) == 0


def test_other_operators_and_large_ones_are_not_called(monkeypatch) -> None:
    taken = Scratch()
    x = torch.ones(4, 4)
    assert taken.of(torch.ops.aten.add.Tensor, (x, x), None) == 0
    assert taken.known == {}
    monkeypatch.setattr(scratch, "LARGEST", 100)
    assert taken.of(MM, (x, x), None) == 0
    assert taken.known == {}


def test_each_kind_of_call_is_made_once() -> None:
    taken = Scratch()
    for _ in range(3):
        taken.of(MM, (torch.ones(4, 8), torch.ones(8, 4)), None)
    taken.of(MM, (torch.ones(4, 8), torch.ones(4, 8).t()), None)
    assert len(taken.known) == 2


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch 2.13 renames the exchanges
def test_gloo_copies_what_it_exchanges() -> None:
    part, whole = torch.ones(50_000), torch.empty(50_000)
    with processes.joined(torch.device("cpu")):
        for exchange, operator, args in (
            (distributed.all_gather_into_tensor, torch.ops.c10d._allgather_base_.default, (whole, part)),
            (distributed.reduce_scatter_tensor, torch.ops.c10d._reduce_scatter_base_.default, (part, whole)),
        ):
            changes, _ = allocations(lambda exchange=exchange, args=args: exchange(*args))
            assert Scratch().of(operator, args, None) == whole.nbytes == max(changes)
