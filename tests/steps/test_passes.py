import pytest
import torch
from torch import nn

from qtool.errors import QtoolError
from qtool.steps.passes import answer
from qtool.system import processes


@pytest.mark.parametrize("count", [1, 2])
def test_what_a_model_does_not_take_is_told(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several processes as of one; but not what comes from the end of another one."""
    monkeypatch.setattr(processes, "size", lambda: count)
    with pytest.raises(
        QtoolError, match=r"on the inputs of the data; got RuntimeError: (addmm: )?mat1 and mat2.* go together"
    ):
        answer(nn.Linear(3, 2), torch.ones(1, 4))
    for layer, shape in ((nn.Linear(3, 2), (1, 3)), (nn.Conv2d(3, 2, 1), (1, 3, 4, 4))):
        with pytest.raises(QtoolError, match=r"; return x\.float\(\) for its inputs"):
            answer(layer, torch.ones(shape, dtype=torch.uint8))
    with pytest.raises(QtoolError, match="missing 1 required positional"):
        answer(nn.Bilinear(3, 2, 2), torch.ones(1, 3))

    def full(value):
        raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        answer(full, torch.ones(1))

    def complaining(value):
        raise ValueError("no such class")

    def cut_off(value):
        raise RuntimeError("[gloo/transport/tcp/pair.cc:537] Connection closed by peer [127.0.0.1]:53406")

    with pytest.raises(QtoolError, match="ValueError: no such class"):
        answer(complaining, torch.ones(1))
    with pytest.raises(RuntimeError, match="closed by peer"):
        answer(cut_off, torch.ones(1))


def test_an_index_that_no_table_has_a_row_for_is_told_as_such():
    with pytest.raises(QtoolError, match=r"IndexError.*; give indices .* no longer than its positions .*text:FILE:L"):
        answer(nn.Embedding(4, 2), torch.tensor([[1, 4]]))


def test_a_single_sample_that_batch_norm_does_not_take_is_told_as_such():
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    with pytest.raises(QtoolError, match=r"--batch-size, .* that leave every micro-batch of every process two samples"):
        answer(model, torch.randn(1, 6))


@pytest.mark.parametrize(
    "told",
    ["\"fft\" not implemented for 'Half'", "Unsupported dtype BFloat16", "could not create a primitive descriptor"],
)
def test_what_does_not_run_in_16_bits_is_told_as_the_precision_s(told):
    def model(value):
        raise RuntimeError(told)

    with pytest.raises(QtoolError, match="take another --precision"):
        answer(model, torch.zeros(2))
    with pytest.raises(QtoolError, match=r"must have the same dtype.*one type of floats \(--precision 32-true"):
        answer(nn.Linear(2, 2), torch.zeros(1, 2).half())


ROWS = torch.zeros(2, dtype=torch.int64)


@pytest.mark.parametrize(
    "meet",
    [
        lambda x, y: x.index_add(0, ROWS, y),
        lambda x, y: x.index_put((ROWS,), y),
        lambda x, y: x.scatter_add(0, ROWS[:, None], y),
        lambda x, y: torch.baddbmm(x[None], y[None], y[None]),
        lambda x, y: torch.lerp(x, y, 0.5),
        lambda x, y: nn.GRU(2, 2)(y[None]),
        lambda x, y: nn.functional.conv1d(y[None], y[:, :, None], x[0]),
    ],
    ids=["index_add", "index_put", "scatter_add", "baddbmm", "lerp", "gru", "conv"],
)
def test_operands_of_different_types_are_told_as_that(meet):
    with pytest.raises(QtoolError, match="give inputs, weights and buffers of one type of floats"):
        answer(lambda x: meet(x, x.bfloat16()), torch.zeros(2, 2))
