import pytest
import torch
from torch import nn

from qtool.memory.measure import allocations, highest_sum
from qtool.recipe import TrainConfig
from qtool.steps import trees
from qtool.training import pieces, rounding
from qtool.training.rounding import WideUpdates, round_stochastically
from qtool.training.techniques import setup

BF16 = {"precision": "bf16-true"}


def rounded(value):
    out = torch.empty_like(value, dtype=torch.bfloat16)
    round_stochastically(lost := value.clone(), [lost], [out])
    return out


def test_rounding_is_right_on_average_and_to_a_neighbour():
    torch.manual_seed(0)
    value = torch.tensor([1.0, -1.0, 3.14159, 1e-30, -2.7e30, 1 + 2**-9, 0.0])
    draws = torch.stack([rounded(value) for _ in range(20000)]).double()
    step = value.double().abs() * 2**-7
    assert ((draws - value.double()).abs() <= step).all()
    error = (draws.mean(0) - value.double()).abs()
    assert (error <= 4 * step / (20000**0.5) + 1e-45).all()
    assert len(draws[:, 0].unique()) == 1, "what bfloat16 holds exactly stays"
    assert 0.2 < (draws[:, 5] == 1.0).double().mean() < 0.8, "1 + 2⁻⁹ is a quarter of a step above 1 of 2⁻⁷"


def test_rounding_slice_by_slice_gives_the_same_in_less_memory(monkeypatch):
    value = torch.randn(3 * rounding.SLICE + 17)
    out, lost = torch.empty_like(value, dtype=torch.bfloat16), value.clone()
    torch.manual_seed(1)
    changes, _ = allocations(lambda: round_stochastically(lost, [lost], [out]))
    assert highest_sum(changes) < 1.1 * 6 * rounding.SLICE, "two bytes drawn for each value, and its bits once more"
    monkeypatch.setattr(rounding, "SLICE", 2 * len(value))
    torch.manual_seed(1)
    assert torch.equal(rounded(value), out)


def test_rounding_keeps_infinities_and_finds_nan():
    value = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0, 3.4e38, -1e-40])
    value.view(torch.int32)[3] = 0x7FFF_FFFF  # as CUDA's arithmetic makes it
    for _ in range(20):
        found = rounded(value)
        assert found[:2].tolist() == value[:2].tolist()
        assert found[2:4].isnan().all()
        assert abs(found[4]) > 3.3e38
        assert -2e-40 < found[5].item() <= 0


@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "compensated"])
def test_small_updates_move_a_weight_only_where_they_are_kept(rounding):
    """1,000 updates of 1e-5 on a weight of 1: to nearest nothing happens, the other two arrive near 0.99."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.ones(200, dtype=torch.bfloat16))

    def sgd(parameters):
        return torch.optim.SGD(parameters, lr=1e-5)

    optimizer = WideUpdates([weight], sgd, rounding)
    optimizer.param_groups[0]["lr"] = 1e-5
    for _ in range(1000):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    expected = {"nearest": 1.0, "stochastic": 0.99, "compensated": 0.99}[rounding]
    assert weight.double().mean().item() == pytest.approx(expected, abs=3e-3)  # a step there is 2⁻⁸
    spread = weight.double().std().item()
    assert spread == 0 if rounding != "stochastic" else spread > 0


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_tiny_gradients_of_float16_weights_do_not_divide_by_zero(optimizer):
    weight = nn.Linear(4, 4, bias=False).half()
    before = weight.weight.detach().clone()
    config = TrainConfig(device="cpu", precision="16-true", optimizer=optimizer)
    with pytest.warns(UserWarning, match="65,504"):
        made = setup(weight, config)
    with made:
        optimizer = made.make_optimizer([weight.weight])
        optimizer.param_groups[0]["lr"] = 1e-2
        weight.weight.grad = torch.full_like(weight.weight, 2.0**-14)  # its square is 2⁻²⁸
        optimizer.step()
    moved = weight.weight.detach() - before
    assert moved.isfinite().all()
    assert ((moved > -0.02) & (moved < 0)).all()


def distance(a, b):
    return sum((x.float() - y.float()).norm().item() for x, y in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adafactor", "adamw8bit", "lion8bit"])
def test_every_optimizer_follows_float32_closer(optimizer, run_steps):
    """Compensated bf16 training stays nearer to training with float32 weights than rounding to nearest does."""
    # Lion steps by signs: by larger ones a single difference sends two trainings apart, however they round
    options = {"optimizer": optimizer, "learning_rate": 1e-4 if optimizer == "lion8bit" else 0.01}
    exact = run_steps("transformer", 30, precision="bf16-mixed", **options).model
    nearest = run_steps("transformer", 30, **options, **BF16).model
    compensated = run_steps("transformer", 30, rounding="compensated", **options, **BF16).model
    assert {p.dtype for p in compensated.parameters()} == {torch.bfloat16}
    assert distance(compensated, exact) < distance(nearest, exact)


def test_parameters_in_float32_pass_through(run_steps, same_state):
    """Batch-norm stays in float32 and is updated in place."""
    done = run_steps("convolutions", rounding="stochastic", **BF16)
    norm = done.model[1].norm
    assert norm.weight.dtype == torch.float32
    assert not torch.equal(norm.weight, torch.ones(8))
    assert done.model[0].weight.dtype == torch.bfloat16


def test_chunks_do_not_change_the_result(run_steps, same_state, monkeypatch):
    whole = run_steps("transformer", rounding="compensated", **BF16)
    monkeypatch.setitem(pieces.PIECE, "cpu", 100)
    monkeypatch.setattr(pieces, "SPARE", 0)
    assert same_state(whole.model, run_steps("transformer", rounding="compensated", **BF16).model)


def test_weights_in_two_orders_are_copied_in_one_go_and_updated_alike(monkeypatch):
    """torch takes one by one what it is to copy together, if a single pair lies in two orders."""
    copy, steps = torch._foreach_copy_, []

    def alike(out, values):
        assert [a.stride() for a in out] == [b.stride() for b in values]
        steps.append(len(out))
        copy(out, values)

    monkeypatch.setattr(torch, "_foreach_copy_", alike)
    monkeypatch.setattr(pieces, "SHARE", 1)
    found = []
    for layout in (torch.contiguous_format, torch.channels_last):
        draw = torch.Generator().manual_seed(0)
        convolution = torch.randn(4, 3, 3, 3, generator=draw).bfloat16().to(memory_format=layout)
        weights = [nn.Parameter(torch.randn(5, generator=draw).bfloat16()), nn.Parameter(convolution)]
        for weight in weights:
            weight.grad = torch.empty_like(weight).copy_(torch.randn(weight.shape, generator=draw))
        WideUpdates(weights, lambda wide: torch.optim.AdamW(wide, lr=0.1), "compensated").step()
        found.append(weights)
    assert steps == [2, 2, 2, 2, 1, 1, 1, 1], "weights, gradients, rounded and compensations, of both layouts"
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_no_wide_weight_outlives_the_step(run_steps):
    optimizer = run_steps("transformer", rounding="stochastic", **BF16).step.optimizer
    assert all(p.numel() == 0 and p.grad is None for p in optimizer.stand_ins.values())


@pytest.mark.parametrize("rounding", ["stochastic", "compensated"])
@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
def test_it_resumes_bit_for_bit(rounding, optimizer, run_steps, same_state, tmp_path):
    options = {"rounding": rounding, "optimizer": optimizer} | BF16
    whole = run_steps("transformer", 6, **options)
    half = run_steps("transformer", 3, **options)
    path = tmp_path / "x.safetensors"
    rng = torch.get_rng_state()
    trees.save_tree(path, {"m": half.model.state_dict(), "o": half.step.optimizer.state_dict(), "r": rng})
    again = run_steps("transformer", 0, **options)
    state = trees.load_tree(path)
    again.model.load_state_dict(state["m"])
    again.step.optimizer.load_state_dict(state["o"])
    torch.set_rng_state(state["r"])
    for _ in range(3):
        again.step(torch.randn(16, 16), torch.randint(0, 4, (16,)), 0.01)
    assert same_state(again.model, whole.model)
