import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qtool import checkpoint, processes
from qtool.errors import QtoolError, UsageError
from qtool.order import Batches, Order, batch_plan


@given(st.integers(1, 200), st.integers(1, 50), st.integers(0, 5), st.integers(0, 5))
def test_a_plan_is_a_permutation_in_batches(count, batch_size, seed, epoch):
    plan = batch_plan(count, batch_size, seed, epoch)
    assert sorted(i for batch in plan for i in batch) == list(range(count))
    assert all(len(batch) == batch_size for batch in plan[:-1]) or len(plan[-1]) > 1
    if count > 1 and batch_size > 1:
        assert min(map(len, plan)) > 1, "batch-norm cannot train on a single sample"
    assert max(map(len, plan)) <= batch_size + (batch_size > 1)
    assert plan == batch_plan(count, batch_size, seed, epoch)


def test_seed_and_epoch_change_the_order():
    plans = [batch_plan(50, 50, seed, epoch) for seed in range(3) for epoch in range(3)]
    assert len({tuple(plan[0]) for plan in plans}) == 9


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 10

    def batch(self, positions):
        return torch.tensor(positions), torch.tensor(positions)


def test_any_place_of_an_epoch_can_be_had():
    order = Order(Numbers(), 3, 0)
    whole = [x.tolist() for x, _, _ in order.epoch(1, 0, order.num_batches, {})]
    assert [x.tolist() for x, _, _ in order.epoch(1, 2, 3, {})] == whole[2:3]


def test_a_shuffling_loader_is_replayed():
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.arange(12), torch.arange(12)), batch_size=2, shuffle=True
    )
    order = Order(Batches(loader), 99, 0)
    assert order.num_batches == 6
    with checkpoint.seeded(3):
        began = checkpoint.rng_state()
        whole = [x.tolist() for x, _, _ in order.epoch(0, 0, 6, began)]
        after = torch.rand(1)
    with checkpoint.seeded(3):
        torch.rand(5)
        now = checkpoint.rng_state()
        rest = [x.tolist() for x, _, _ in order.epoch(0, 4, 6, began)]
        assert torch.equal(torch.get_rng_state(), now["torch"]), "replaying must not disturb the generators"
    assert rest == whole[4:]
    assert after.numel()


def test_batches_that_several_processes_cannot_share_are_refused(monkeypatch):
    monkeypatch.setattr(processes, "size", lambda: 2)
    with pytest.raises(UsageError, match=r"several processes can share; got an iterable of batches.*map-style"):
        Order(Batches([(torch.zeros(2), torch.zeros(2))]), 2, 0)


def test_a_generator_without_length_is_refused():
    with pytest.raises(UsageError, match="length"):
        Order(Batches(x for x in [1]), 1, 0)


def test_no_data_is_an_error():
    with pytest.raises(QtoolError, match="at least one sample"):
        Order(Batches([]), 1, 0)
