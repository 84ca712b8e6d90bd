import copy

import pytest
import torch
from torch import nn

from qtool.recipe import TrainConfig
from qtool.steps.step import NotFinite, Step
from qtool.training import block_states, fused_updates, pieces
from qtool.training.techniques import setup


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adafactor", "adamw8bit", "lion8bit"])
def test_the_result_is_the_same(optimizer, run_steps, same_state, net):
    plain = run_steps(net, optimizer=optimizer)
    early = run_steps(net, optimizer=optimizer, step_in_backward=True)
    assert early.losses == plain.losses
    assert same_state(early.model, plain.model)


@pytest.mark.parametrize("rounding", ["compensated", "nearest"])
def test_with_16_bit_weights(rounding, run_steps, same_state):
    options = {"precision": "bf16-true", "rounding": rounding}
    plain, early = run_steps("transformer", **options), run_steps("transformer", step_in_backward=True, **options)
    assert same_state(early.model, plain.model)


def test_gradients_are_freed_as_they_are_used(run_steps, monkeypatch):
    monkeypatch.setitem(pieces.PIECE, "cpu", 1)
    most = 0

    def watch(made):
        def count(parameter):
            nonlocal most
            most = max(most, sum(p.grad is not None for p in made.model.parameters()))

        for parameter in made.model.parameters():
            parameter.register_post_accumulate_grad_hook(count)

    done = run_steps("transformer", 2, watch, step_in_backward=True)
    assert most == 1
    assert all(p.grad is None for p in done.model.parameters())
    most = 0
    run_steps("transformer", 2, watch)
    assert most > 10


@pytest.mark.parametrize("enough", [1, 300, 10**9])
def test_small_gradients_wait_for_each_other_and_none_is_forgotten(enough, run_steps, same_state, monkeypatch):
    plain = run_steps("transformer", 3)
    monkeypatch.setitem(pieces.PIECE, "cpu", enough)
    early = run_steps("transformer", 3, step_in_backward=True)
    assert same_state(early.model, plain.model)
    steps = {state["step"].item() for state in early.step.optimizer.state.values()}
    assert steps == {3}, "no parameter is updated twice in a step"


def test_updates_are_smaller_while_all_activations_are_there(run_steps, monkeypatch):
    monkeypatch.setitem(pieces.PIECE, "cpu", 20_000)
    monkeypatch.setattr(pieces, "SHARE", 1)
    sizes = []

    def watch(made):
        make = made.make_optimizer

        def watched(parameters):
            optimizer = make(parameters)
            count = lambda *_: sizes.append(sum(p.numel() for p in parameters if p.grad is not None))  # noqa: E731
            optimizer.register_step_pre_hook(count)
            return optimizer

        made.make_optimizer = watched

    run_steps("transformer", 2, watch, step_in_backward=True)
    one, two = sizes[: len(sizes) // 2], sizes[len(sizes) // 2 :]
    assert one == two
    assert max(one[:2]) < 20_000 <= one[2]


@pytest.mark.parametrize("rounding", ["nearest", "compensated"])
def test_updates_are_larger_once_a_quarter_is_updated_and_the_same(rounding, run_steps, same_state, monkeypatch):
    """In 16 bits, where updates are cut into pieces a second time."""
    monkeypatch.setitem(pieces.PIECE, "cpu", 20_000)
    monkeypatch.setattr(pieces, "SHARE", 1)
    monkeypatch.setattr(pieces, "SPARE", 20_000)
    options = {"precision": "bf16-true", "rounding": rounding, "step_in_backward": True}
    sizes = []

    def watch(made):
        make = made.make_optimizer

        def watched(parameters):
            optimizer = make(parameters)
            inner = getattr(optimizer, "inner", optimizer)
            inner.register_step_pre_hook(
                lambda *_: sizes.append(sum(p.numel() for p in inner.param_groups[0]["params"] if p.grad is not None))
            )
            return optimizer

        made.make_optimizer = watched

    one = run_steps("transformer", 1, watch, **options)
    before, sizes = sizes, []
    monkeypatch.setitem(pieces.LATE, "cpu", 3)
    three = run_steps("transformer", 1, watch, **options)
    assert same_state(three.model, one.model)
    assert sum(sizes) == sum(before), "none is forgotten"
    updated = [sum(sizes[:i]) for i in range(len(sizes))]
    early = [size for size, already in zip(sizes, updated, strict=True) if already <= sum(sizes) / 4]
    assert early == before[: len(early)]
    assert max(sizes[len(early) : -1]) >= 60_000 > max(before)


def test_what_is_updated_alone_waits_for_nothing_and_is_updated_once(run_steps, monkeypatch):
    """A stand-in for the kernel, which a CPU has not; small parameters wait to the end of the backward pass."""
    alone, most = [], 0

    def step(parameter, group, state, kept, draw):
        nonlocal most
        alone.append((parameter, group["lr"], draw()))
        most = max(most, sum(p.grad is not None for p in large))

    def watch(made):
        large.extend(p for p in made.model.parameters() if p.numel() >= block_states.SMALLEST)

    monkeypatch.setattr(fused_updates, "usable", lambda inner, parameters: True)
    monkeypatch.setattr(fused_updates, "step", step)
    large: list[torch.Tensor] = []
    options = {"precision": "bf16-true", "rounding": "stochastic", "optimizer": "adamw8bit", "step_in_backward": True}
    done = run_steps("transformer", 2, watch, **options)
    assert len(large) > 2
    assert most == 1, "one gradient of these is there at a time"
    assert {id(p) for p, _, _ in alone} == {id(p) for p in large}
    assert len(alone) == 2 * len(large)
    assert all(p.grad is None for p in large)
    seeds = [seed for _, _, seed in alone]
    assert len(set(seeds)) == len(seeds)
    assert seeds[len(large)] != (seeds[len(large) - 1] + 1) % 2**31, "drawn anew for each step"
    for _ in range(2):
        alone.clear()
        torch.manual_seed(5)
        done.step(torch.ones(16, 16), torch.zeros(16, dtype=torch.long), 0.25)
        assert {rate for _, rate, _ in alone} == {0.25}, "at the rate of this step"
        seeds.append(alone[0][2])
    assert seeds[-1] == seeds[-2], "by torch"


def test_a_loss_that_is_not_finite_changes_nothing(run_steps):
    done = run_steps("transformer", 1, step_in_backward=True)
    before = [p.clone() for p in done.model.parameters()]
    with pytest.raises(NotFinite):
        done.step(torch.full((16, 16), float("nan")), torch.zeros(16, dtype=torch.long), 0.1)
    assert all(torch.equal(a, b) for a, b in zip(before, done.model.parameters(), strict=True))


def test_closing_removes_the_hooks(run_steps):
    done = run_steps("transformer", 1, step_in_backward=True)
    done.setup.close()
    done.model(torch.randn(2, 16)).sum().backward()
    assert all(p.grad is not None for p in done.model.parameters())


def test_a_batch_that_a_left_over_sample_has_joined_is_stepped_whole(same_state):
    """In two micro-batches the first would change weights that the second needs as they were."""
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(17, 16, generator=draw), torch.randint(0, 4, (17,), generator=draw)
    models = []

    def loss(model, value, target):
        return nn.functional.cross_entropy(model(value), target, reduction="sum"), float(len(target))

    for options in ({"batch_size": 17}, {"batch_size": 16, "step_in_backward": True}):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Dropout(0.1), nn.Tanh(), nn.Linear(32, 4))
        with setup(model, TrainConfig(device="cpu", grad_clip=None, **options)) as made:
            step = Step(made, made.make_optimizer(list(model.parameters())), loss)
            torch.manual_seed(1)
            step(x, y, 0.01)
            assert not options.get("step_in_backward") or not step.halve()
        models.append(model)
    assert same_state(*models)


def test_what_is_updated_together_is_the_same_after_a_resume(run_steps, same_state):
    """Adafactor takes its epsilon from the first weight of an update, whose order a loaded state may not change."""
    options = {"optimizer": "adafactor", "precision": "bf16-true", "step_in_backward": True}
    whole = run_steps("convolutions", 2, **options)

    def reload(made):
        make = made.make_optimizer

        def loaded(parameters):
            optimizer = make(parameters)
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            return optimizer

        made.make_optimizer = loaded

    assert same_state(run_steps("convolutions", 2, reload, **options).model, whole.model)
