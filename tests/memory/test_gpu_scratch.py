import pytest
import torch

from qtool.memory.gpu_scratch import Gpu

H100, A100 = Gpu((9, 0), 132, 2048), Gpu((8, 0), 108, 2048)


def test_cublas_holds_what_torch_gives_it(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    assert H100.workspace() == 33_554_432
    assert A100.workspace() == 8_519_680
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8")
    assert H100.workspace() == 8_519_680


@pytest.mark.parametrize(
    ("rows", "columns", "size"),
    [
        (6304, 4096, 138_412_032),  # torch's allocator, asked on a device of 132 multiprocessors
        (788, 4096, 0),  # 197 values for each thread: one group is enough
        (6304, 1024, 4 * 1024 * 99 * 128),
        (16, 4096, 0),
    ],
)
def test_a_sum_over_rows_is_split_over_groups(rows, columns, size):
    assert H100.reduction(rows, columns) == size


def test_fewer_multiprocessors_take_less():
    assert A100.reduction(6304, 4096) == 4 * 4096 * 54 * 128


def test_sums_that_keep_the_innermost_dimension_count():
    value = torch.empty(32, 197, 4096, device="meta")
    assert H100.summed((value, [0, 1])) == H100.reduction(32 * 197, 4096) > 0
    assert H100.summed((value, [-1])) == H100.summed((value,)) == 0


def test_the_cpu_is_no_gpu():
    assert Gpu.of(torch.device("cpu")) is None
