import math
from types import SimpleNamespace

import pytest
import torch
from fake_device import Hidden
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from qtool.errors import QtoolError
from qtool.recipe import TrainConfig
from qtool.steps.loop import task_loss
from qtool.steps.setup import plain
from qtool.steps.step import NotFinite, Step, _reader, learning_rate
from qtool.system import processes
from qtool.tasks import Classification


def make_model(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).to(dtype)


def cross_entropy(model, value, target):
    return nn.functional.cross_entropy(model(value), target, reduction="sum"), float(len(target))


def token_loss(model, value, target):
    """Squares, weighted by how many 'tokens' each sample counts."""
    y, tokens = target
    return (tokens[:, None] * (model(value) - y) ** 2).sum(), tokens.sum()


def config(**options):
    return TrainConfig(**({"device": "cpu", "optimizer": "sgd", "learning_rate": 0.5, "weight_decay": 0.0} | options))


def one_step(model, cfg, value, target, loss=cross_entropy, scaler=None, rate=0.5):
    setup = plain(model, cfg)
    setup.scaler = scaler or setup.scaler
    step = Step(setup, setup.make_optimizer(list(model.parameters())), loss)
    return step(value, target, rate), step


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_steps_equal_the_loop_written_by_hand_bit_for_bit(optimizer):
    x, y = torch.randn(16, 6), torch.randint(0, 4, (16,))
    cfg = config(optimizer=optimizer, batch_size=16, grad_clip=0.1, weight_decay=0.1)
    ours, bare = make_model(), make_model()
    if optimizer == "sgd":
        by_hand = torch.optim.SGD(bare.parameters(), 0.5, momentum=0.9, nesterov=True, weight_decay=0.1, fused=True)
    else:
        by_hand = torch.optim.AdamW(bare.parameters(), 0.5, weight_decay=0.1, fused=True)
    setup = plain(ours, cfg)
    step = Step(setup, setup.make_optimizer(list(ours.parameters())), cross_entropy)
    for rate in (0.1, 0.5, 0.4, 0.2, 0.1):
        by_hand.param_groups[0]["lr"] = rate
        by_hand.zero_grad()
        loss = nn.functional.cross_entropy(bare(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(bare.parameters(), 0.1)
        by_hand.step()
        assert step(x, y, rate) == loss.item()
    for a, b in zip(ours.parameters(), bare.parameters(), strict=True):
        assert torch.equal(a, b)


@given(size=st.integers(1, 20), micro=st.integers(1, 8), seed=st.integers(0, 99), data=st.data())
@settings(max_examples=40)
def test_micro_batches_give_the_large_batch(size, micro, seed, data):
    """In float64, for a loss whose weights differ from sample to sample and may be zero."""
    tokens = torch.tensor(data.draw(st.lists(st.integers(0, 9), min_size=size, max_size=size)), dtype=torch.float64)
    torch.manual_seed(seed)
    x, y = torch.randn(size, 6, dtype=torch.float64), torch.randn(size, 4, dtype=torch.float64)
    results = []
    for parts in (1, micro):
        model = make_model(dtype=torch.float64)
        mean, _ = one_step(model, config(batch_size=20, micro_batches=parts), x, (y, tokens), token_loss, rate=0.01)
        results.append((mean, torch.cat([p.detach().flatten() for p in model.parameters()])))
    assert math.isclose(results[0][0], results[1][0], rel_tol=1e-12, abs_tol=1e-12)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("size", [16, 13, 3])
def test_micro_batches_of_a_plain_loss_agree_with_the_large_batch(size):
    x, y = torch.randn(size, 6), torch.randint(0, 4, (size,))
    whole, parts = make_model(), make_model()
    one_step(whole, config(batch_size=16), x, y)
    calls = []

    def counted(model, value, target):
        calls.append(len(value))
        return cross_entropy(model, value, target)

    one_step(parts, config(batch_size=16, micro_batches=4), x, y, counted)
    assert sum(calls) == size
    assert max(calls) <= 4
    assert max(calls) - min(calls) <= 1
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_a_scale_of_a_power_of_two_changes_nothing_even_with_clipping():
    """Multiplying by a power of two is exact: clipping before unscaling, or never unscaling, would show."""
    x, y = torch.randn(8, 6), torch.randint(0, 4, (8,))
    scaled, plain_model = make_model(), make_model()
    for micro in (1, 2):
        cfg = config(batch_size=8, grad_clip=0.05, micro_batches=micro)
        one_step(plain_model, cfg, x, y)
        one_step(scaled, cfg, x, y, scaler=torch.amp.GradScaler("cpu", init_scale=2.0**12))
    for a, b in zip(scaled.parameters(), plain_model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("batch", "micro", "sizes"), [(5, 3, [2, 3]), (7, 4, [2, 2, 3]), (6, 6, [1] * 6), (3, 1, [3])])
def test_no_micro_batch_of_batch_norm_is_a_single_sample_that_nobody_asked_for(batch, micro, sizes):
    model, seen = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)), []
    model[0].register_forward_hook(lambda module, inputs, output: seen.append(len(inputs[0])))
    model[1].eval()
    one_step(model, config(batch_size=batch, micro_batches=micro), torch.randn(batch, 6), torch.zeros(batch).long())
    assert seen == sizes


@pytest.mark.parametrize("processes_", [1, 2, 3])
@pytest.mark.parametrize(("batch", "micro"), [(6, 1), (9, 2), (12, 4), (12, 12)])
def test_the_smallest_micro_batch_of_all_processes_is_known_from_sizes(batch, micro, processes_, monkeypatch):
    monkeypatch.setattr(processes, "size", lambda: processes_)
    with plain(
        nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)), config(batch_size=batch, micro_batches=micro)
    ) as setup:
        step = Step(setup, setup.make_optimizer(list(setup.model.parameters())), cross_entropy)
        for total in range(1, batch + 1):
            found = []
            for rank in range(processes_):
                monkeypatch.setattr(processes, "rank", lambda rank=rank: rank)
                count = processes.share(total).count or 1
                found += [len(part.value) for part in step._parts(torch.randn(count, 6), torch.zeros(count), total)]
            assert step.smallest(total) == min(found), total


def test_a_step_whose_gradients_overflow_is_skipped_and_counted():
    model = make_model()
    before = [p.clone() for p in model.parameters()]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    setup = plain(model, config(batch_size=8))
    setup.scaler = scaler
    step = Step(setup, setup.make_optimizer(list(model.parameters())), cross_entropy)
    x, y = torch.randn(8, 6) * 100, torch.randint(0, 4, (8,))
    step(x, y, 0.5)
    assert step.skipped == 1
    assert scaler.get_scale() == 2.0**126
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    while step.skipped < 20 and all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)):
        step(x, y, 0.5)
    assert 1 <= step.skipped < 20, "the scale comes down until steps are made again"


def test_a_loss_that_is_not_finite_leaves_the_parameters_alone():
    model = make_model()
    before = [p.clone() for p in model.parameters()]
    x = torch.full((8, 6), float("nan"))
    with pytest.raises(NotFinite, match="nan") as caught:
        one_step(model, config(batch_size=8, micro_batches=2), x, torch.zeros(8, dtype=torch.long))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert len(caught.value.forward()) == 2


class Halving(torch.autograd.Function):
    """Its gradient cannot be computed."""

    @staticmethod
    def forward(ctx, x):
        return x / 2

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("no gradient here")


class Halved(nn.Linear):
    def forward(self, x):
        return Halving.apply(super().forward(x))


class WritingOver(nn.Linear):
    def forward(self, x):
        gate = torch.sigmoid(super().forward(x))
        y = gate * gate
        gate += 1
        return y


class Remembering(nn.Linear):
    state = 0.0

    def forward(self, x):
        self.state = super().forward(x) + self.state
        return self.state


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (Halved(6, 4), "no gradient here; correct the model, or the"),
        (WritingOver(6, 4), "inplace operation.*; write over nothing that a gradient needs"),
        (Remembering(6, 4), "detach what it keeps from one batch to the next"),
    ],
    ids=["code", "in place", "kept"],
)
def test_a_backward_pass_that_fails_is_told(model, told):
    setup = plain(model, config(batch_size=8))
    step = Step(setup, setup.make_optimizer(list(model.parameters())), cross_entropy)
    with pytest.raises(QtoolError, match=rf"model: expected a backward pass from the loss; got .*{told}"):
        [step(torch.randn(8, 6), torch.arange(8) % 4, 0.1) for _ in range(2)]


def test_memory_that_runs_out_in_a_backward_pass_is_raised_as_it_is(monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch.Tensor, "backward", full)
    with pytest.raises(torch.OutOfMemoryError):
        one_step(make_model(), config(batch_size=8), torch.randn(8, 6), torch.arange(8) % 4)


def test_a_batch_without_counted_tokens_is_a_loss_of_zero():
    model = make_model()
    target = (torch.randn(4, 4), torch.zeros(4))
    for micro in (1, 2):
        mean, _ = one_step(
            model, config(batch_size=4, micro_batches=micro), torch.randn(4, 6), target, token_loss, rate=0.1
        )
        assert mean == 0
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_sums_of_one_element_are_numbers_in_micro_batches_too():
    """``reshape(1)``, as a task of one's own may return: gradients of any shape are corrected by the weight."""
    value, target = torch.randn(7, 6), (torch.randn(7, 4), torch.arange(7.0))
    trained = []
    for shape in ((), (1,)):

        class Weighted(Classification):
            def loss(self, output, target, shape=shape):
                total, tokens = token_loss(lambda x: x, output, target)
                return total.reshape(shape), tokens.reshape(shape)

        cfg = config(batch_size=7, micro_batches=3)
        mean, _ = one_step(model := make_model(), cfg, value, target, task_loss(Weighted()), rate=0.1)
        trained.append((mean, [p.tolist() for p in model.parameters()]))
    assert trained[0] == trained[1]


def test_no_clipping_where_it_is_switched_off():
    x, y = torch.randn(8, 6), torch.randint(0, 4, (8,))
    unclipped, clipped = make_model(), make_model()
    one_step(unclipped, config(batch_size=8, grad_clip=None), x, y)
    one_step(clipped, config(batch_size=8, grad_clip=1e-6), x, y)
    moved = [(m[0].weight - make_model()[0].weight).norm().item() for m in (unclipped, clipped)]
    assert moved[0] > 1000 * moved[1] > 0


def test_the_schedule_is_linear_and_then_a_cosine():
    cfg = config(learning_rate=2.0, warmup=0.1, schedule="cosine")
    rates = [learning_rate(cfg, s, 100) for s in range(100)]
    assert rates[:10] == pytest.approx([0.2 * (s + 1) for s in range(10)])
    assert rates[10] == 2.0
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    reference = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=90)
    for rate in rates[10:]:
        assert rate == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12)
        optimizer.step()
        reference.step()


def test_a_constant_schedule_and_no_warm_up():
    cfg = config(learning_rate=2.0, warmup=0.0, schedule="constant")
    assert {learning_rate(cfg, s, 7) for s in range(7)} == {2.0}
    assert learning_rate(config(warmup=1.0), 3, 4) == 0.5


def test_the_backward_pass_runs_in_the_caller_s_thread():
    """A GPU's would otherwise run in a thread of autograd's, with a second workspace of cuBLAS."""
    model, seen = make_model(), []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: seen.append(torch._C._is_multithreading_enabled()))
    one_step(model, config(batch_size=8), torch.randn(8, 6), torch.randint(0, 4, (8,)))
    assert seen
    assert not any(seen)
    assert torch._C._is_multithreading_enabled()


def test_gradients_in_host_memory_are_corrected_by_a_weight_on_a_gpu():
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    step = Step(plain(make_model(), config()), torch.optim.SGD([parameter], 0.1), cross_entropy)
    step._correct(Hidden(torch.tensor(2.0)))
    assert torch.equal(parameter.grad, torch.full((3,), 2.0))


class Pinned(torch.Tensor):
    """A loss that says it is on a GPU."""

    device = torch.device("cuda", 0)


def test_a_loss_of_one_dimension_is_read_from_a_gpu(monkeypatch):
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory, **options: empty(*shape, **options))
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda: None, synchronize=lambda: None))
    for shape in ((), (1,)):
        assert _reader(torch.full(shape, 2.5).as_subclass(Pinned))() == 2.5


@pytest.mark.parametrize("norm", [True, False])
def test_halved_to_the_end_a_batch_norm_has_two_samples(norm):
    sizes = []

    def loss(model, value, target):
        sizes.append(len(value))
        return cross_entropy(model, value, target)

    model = nn.Sequential(nn.Linear(6, 4), *([nn.BatchNorm1d(4)] if norm else []))
    with plain(model, TrainConfig(device="cpu", batch_size=5)) as setup:
        step = Step(setup, setup.make_optimizer(list(model.parameters())), loss)
        assert [step.halve() for _ in range(4)] == [True, True, not norm, False]
        step(torch.randn(5, 6), torch.tensor([0, 1, 2, 3, 0]), 0.1)
    assert sizes == ([2, 3] if norm else [1] * 5)
