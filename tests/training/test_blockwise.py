"""The update of 8-bit states on the CPU, against the same done plainly on whole weights."""

import bitsandbytes.functional
import bitsandbytes.optim
import pytest
import torch

from qtool.training import blockwise
from qtool.training.block_states import BLOCK, dequantize, quantize

BETAS, EPS, STEP, RATE, DECAY = (0.9, 0.99), 1e-8, 3, 1e-2, 0.1


def reference(weight, grad, moments):
    m = BETAS[0] * moments[0] + (1 - BETAS[0]) * grad
    decayed = weight * (1 - RATE * DECAY)
    if len(moments) == 1:
        return decayed - RATE * m.sign(), [BETAS[1] * moments[0] + (1 - BETAS[1]) * grad]
    v = BETAS[1] * moments[1] + (1 - BETAS[1]) * grad * grad
    root = (v / (1 - BETAS[1] ** STEP)).sqrt() + EPS
    return decayed - RATE / (1 - BETAS[0] ** STEP) * m / root, [m, v]


@pytest.mark.parametrize("name", ["adamw", "lion"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_in_pieces_is_the_step(name, dtype, monkeypatch):
    monkeypatch.setattr(blockwise, "PIECE", 2 * BLOCK)
    torch.manual_seed(0)
    shape = (5, 37 * 7)  # five blocks and 15 weights
    weight, grad = torch.randn(shape).to(dtype), (torch.randn(shape) * torch.randn(shape).exp()).to(dtype)
    grad[0] = 0.0
    books = [bitsandbytes.functional.create_dynamic_map(signed=signed) for signed in (True, False)]
    books = books if name == "adamw" else books[:1]
    states = [quantize(torch.randn(weight.numel()) ** (1 + i), book) for i, book in enumerate(books)]
    before = [dequantize(*state, book) for state, book in zip(states, books, strict=True)]
    expected, moments = reference(weight.float().flatten(), grad.float().flatten(), before)
    codes, scales = [s[0].view(shape) for s in states], [s[1] for s in states]
    blockwise.update(weight, grad, codes, scales, books, *BETAS, EPS, STEP, RATE, DECAY)
    torch.testing.assert_close(
        weight.flatten(), expected.to(dtype), rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6
    )
    for moment, c, s, book in zip(moments, codes, scales, books, strict=True):
        wanted, sizes = quantize(moment, book)
        torch.testing.assert_close(s, sizes)
        wanted = torch.where((book[0] == 0) & (moment > 0) & (wanted == 0), 1, wanted)
        assert (c.flatten() != wanted).float().mean() < 0.03  # those within 1/4096 of a midpoint
        assert ((c.flatten().int() - wanted.int()).abs() <= 1).all()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_how_a_weight_lies_in_memory_changes_nothing():
    torch.manual_seed(0)
    weights = [torch.randn(32, 16, 3, 3)] * 2
    grads = [torch.randn(32, 16, 3, 3) for _ in range(3)]
    for i, layout in enumerate((torch.contiguous_format, torch.channels_last)):
        weight = torch.nn.Parameter(weights[i].clone(memory_format=layout))
        optimizer = blockwise.on_cpu(bitsandbytes.optim.AdamW8bit)([weight], lr=0.01)
        for grad in grads:
            weight.grad = grad.clone(memory_format=layout)
            optimizer.step()
        weights[i] = weight.detach()
    assert torch.equal(*weights)


def test_a_code_is_the_nearest_one_for_every_size_of_moment():
    torch.manual_seed(0)
    for signed in (True, False):
        book = bitsandbytes.functional.create_dynamic_map(signed=signed)
        table, midpoints = blockwise._table(book.numpy().tobytes()), (book[1:] + book[:-1]) / 2
        value = torch.cat([10 ** -torch.rand(50_000).mul(9), book])
        value = torch.cat([value, -value]) if signed else value
        code = table[(value.view(torch.int32) >> blockwise.CUT) + len(table) // 2].long()
        ends = [torch.bucketize(value * (1 + sign * 2**-12), midpoints) for sign in (-1, 1)]
        if not signed:
            ends = [torch.where(value > 0, end.clamp_min(1), end) for end in ends]
        assert ((code == ends[0]) | (code == ends[1])).all()
        assert (code == ends[0]).float().mean() > 0.98


def test_all_zero_moments_stay_zero():
    book = bitsandbytes.functional.create_dynamic_map(signed=False)
    codes, scales = torch.full((300,), 7, dtype=torch.uint8), torch.ones(2)
    blockwise._put_back(torch.zeros(300), codes, scales, blockwise._table(book.numpy().tobytes()))
    assert not codes.any()
    assert not scales.any()
