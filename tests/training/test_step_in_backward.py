import pytest
import torch

from qtool.step import NotFinite
from qtool.training import pieces


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
