import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader

from qtool.data.samples import Samples
from qtool.errors import QtoolError, UsageError
from qtool.recipe import TrainConfig
from qtool.steps.order import Batches, Order, batch_plan, largest_pass, largest_seen
from qtool.system import generators, processes


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
    with generators.seeded(3):
        began = generators.rng_state()
        whole = [x.tolist() for x, _, _ in order.epoch(0, 0, 6, began)]
        after = torch.rand(1)
    with generators.seeded(3):
        torch.rand(5)
        now = generators.rng_state()
        rest = [x.tolist() for x, _, _ in order.epoch(0, 4, 6, began)]
        assert torch.equal(torch.get_rng_state(), now["torch"]), "replaying must not disturb the generators"
    assert rest == whole[4:]
    assert after.numel()


class Persistent:
    """Batches whose workers stay, as a DataLoader's do: to start them draws a number, and so does each pass."""

    persistent_workers = True

    def __init__(self):
        self._iterator = None

    def __len__(self):
        return 3

    def __iter__(self):
        if self._iterator is None:
            torch.rand(1)
        self._iterator = iter(torch.randperm(6).view(3, 2).split(1))
        return ((x[0], x[0]) for x in self._iterator)


def test_workers_that_stay_are_there_in_an_epoch_that_is_the_first_to_be_resumed():
    with generators.seeded(3):
        order, seen = Order(Batches(Persistent()), 99, 0), []
        for epoch in range(2):
            began = generators.rng_state()
            seen.append([x.tolist() for x, _, _ in order.epoch(epoch, 0, 3, began)])
    for start in (0, 1):
        with generators.seeded(0):
            generators.set_rng_state(began)
            resumed = Order(Batches(Persistent()), 99, 0)
            assert [x.tolist() for x, _, _ in resumed.epoch(1, start, 3, began)] == seen[1][start:]


def test_batches_that_several_processes_cannot_share_are_refused(monkeypatch):
    monkeypatch.setattr(processes, "size", lambda: 2)
    with pytest.raises(UsageError, match=r"several processes can share; got an iterable of batches.*map-style"):
        Order(Batches([(torch.zeros(2), torch.zeros(2))]), 2, 0)


def test_a_generator_without_length_is_refused():
    with pytest.raises(UsageError, match="a generator without one"):
        Order(Batches(x for x in [1]), 1, 0)


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter([(torch.zeros(2), torch.zeros(2))])


def test_a_loader_of_a_set_without_length_is_refused():
    with pytest.raises(UsageError, match=r"a DataLoader without one.*map-style"):
        Order(Batches(torch.utils.data.DataLoader(Endless())), 1, 0)


@pytest.mark.parametrize("batch", [(["a", "b"], torch.zeros(2)), ("text", "label"), np.array(["a", "b"]), {}])
def test_batches_without_tensors_are_told(batch):
    with pytest.raises(QtoolError, match="expected tensors with a batch dimension"):
        list(Order(Batches([batch]), 1, 0).epoch(0, 0, 1, {}))


def test_what_is_no_pair_is_an_input_alone():
    batches = [{"x": torch.zeros(2)}, [torch.ones(3), torch.zeros(3)], (torch.zeros(4), None)]
    found = list(Order(Batches(batches), 1, 0).epoch(0, 0, 3, {}))
    assert [(type(x), y is None, size) for x, y, size in found] == [
        (dict, True, 2), (torch.Tensor, False, 3), (torch.Tensor, True, 4),
    ]  # fmt: skip


class Once:
    """As many as it says, in its first epoch."""

    def __init__(self):
        self.left = iter([(torch.zeros(2), torch.zeros(2))] * 3)

    def __len__(self):
        return 3

    def __iter__(self):
        return self.left


def test_an_epoch_with_fewer_batches_than_it_says_is_an_error():
    """And not one more epoch without any, for ever."""
    order = Order(Batches(Once()), 1, 0)
    assert len(list(order.epoch(0, 0, 3, {}))) == 3
    with pytest.raises(QtoolError, match="3 in each epoch, as their length says; got 0 in this one"):
        list(order.epoch(1, 0, 3, {}))
    with pytest.raises(QtoolError, match="got 1 in this one"):
        list(order.epoch(1, 1, 3, generators.rng_state()))


def test_a_batch_without_samples_is_an_error():
    with pytest.raises(QtoolError, match="training batches: expected samples in each; got a batch without any"):
        list(Batches([(torch.zeros(2, 3), torch.zeros(2)), (torch.zeros(0, 3), torch.zeros(0))]))


def test_no_data_is_an_error():
    with pytest.raises(QtoolError, match="at least one sample"):
        Order(Batches([]), 1, 0)


@pytest.mark.parametrize(("count", "size"), [(33, 16), (32, 16), (16, 16), (17, 16), (3, 1), (9, 16)])
def test_the_largest_pass_is_that_of_the_plan(count, size):
    config = TrainConfig(batch_size=size, step_in_backward=True)
    if count > size:
        assert largest_pass(count, config) == max(map(len, batch_plan(count, size, 0, 0)))
    assert largest_pass(count, TrainConfig(batch_size=size)) == size


@pytest.mark.parametrize(("kind", "seen", "longest"), [("list", 12, 12), ("loader", 8, 9), ("samples", 8, 9)])
def test_a_step_is_predicted_by_the_largest_batch_that_is_looked_at(kind, seen, longest):
    lengths = [2, 9, 3, 4, 5, 6, 7, 8, 1, 1, 1, 12]
    samples = [(torch.randn(length, 3), index % 2) for index, length in enumerate(lengths)]

    def padded(pairs):
        torch.rand(1)
        return nn.utils.rnn.pad_sequence([x for x, _ in pairs], True), torch.tensor([y for _, y in pairs])

    loader = DataLoader(samples, 1, collate_fn=padded)
    train, batches = None, loader
    if kind == "samples":
        train = Samples("data", samples, collate=padded)
    elif kind == "list":
        batches = list(loader)
    before = torch.get_rng_state()
    (inputs, _), count = largest_seen(train, batches, TrainConfig(batch_size=1))
    assert (inputs.shape, count) == ((1, longest, 3), seen)
    assert torch.equal(torch.get_rng_state(), before)


def test_batches_of_one_size_are_predicted_by_the_first():
    stacked = Samples("data", [(torch.full((2,), float(i)), 0) for i in range(9)])
    (inputs, _), count = largest_seen(stacked, None, TrainConfig(batch_size=2))
    assert (inputs.tolist(), count) == ([[0, 0], [1, 1]], 1)
    assert largest_seen(None, [(torch.zeros(2, 2), torch.zeros(2))] * 3, TrainConfig())[1] == 1
