import pytest
import torch
from torch import nn

from qtool.errors import QtoolError
from qtool.recipe import KERNELS, TrainConfig
from qtool.recipe import OPTIMIZERS as NAMES
from qtool.steps import trees
from qtool.steps.loop import task_loss
from qtool.steps.setup import trained
from qtool.steps.step import Step
from qtool.tasks import load_task
from qtool.training import compiling, optimizers
from qtool.training.optimizers import OPTIMIZERS
from qtool.training.techniques import check, setup


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 1))


RATES = {"adafactor": 0.05, "lion8bit": 1e-3}
ON_THE_CPU = sorted(name for name in OPTIMIZERS if not name.startswith(("paged", "torchao")))
COMPILED = {"torchao-adamw8bit"}
NAMED = [pytest.param(name, marks=[pytest.mark.slow] if name in COMPILED else []) for name in sorted(OPTIMIZERS)]


def made_optimizer(model, name, **options):
    config = TrainConfig(device="cpu", optimizer=name, **({"learning_rate": RATES.get(name, 0.01)} | options))
    return OPTIMIZERS[name](config)(list(model.parameters()))


def steps(model, optimizer, count, seed=0):
    torch.manual_seed(seed)
    x = torch.randn(32, 64)
    y = x[:, :1] * 0.5
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_missing_compiler_is_named_before_anything_is_made(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(compiling.shutil, "which", lambda name: None)
    with pytest.raises(QtoolError, match=r"torchao-adamw8bit: expected a C\+\+ compiler"):
        check(make_model(), TrainConfig(device="cpu", optimizer="torchao-adamw8bit"))


def test_every_name_of_the_recipe_has_an_optimizer():
    assert set(NAMES) == set(OPTIMIZERS)


@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", NAMED)
def test_every_optimizer_learns(name):
    model = make_model()
    losses = steps(model, made_optimizer(model, name), 60)
    assert losses[-1] < 0.1 * losses[0]


@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", NAMED)
def test_every_optimizer_resumes_bit_for_bit(name, tmp_path):
    whole = make_model()
    steps(whole, made_optimizer(whole, name), 10)
    first = make_model()
    optimizer = made_optimizer(first, name)
    steps(first, optimizer, 5)
    trees.save_tree(tmp_path / "x.safetensors", {"m": first.state_dict(), "o": optimizer.state_dict()})
    second = make_model()
    state = trees.load_tree(tmp_path / "x.safetensors")
    second.load_state_dict(state["m"])
    optimizer = made_optimizer(second, name)
    optimizer.load_state_dict(state["o"])
    steps(second, optimizer, 5)
    for a, b in zip(whole.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


def state_bytes(optimizer):
    return sum(t.numel() * t.element_size() for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t))


def test_leaner_optimizers_are_leaner():
    sizes = {}
    for name in ON_THE_CPU:
        model = make_model()
        optimizer = made_optimizer(model, name)
        steps(model, optimizer, 1)
        sizes[name] = state_bytes(optimizer)
    assert sizes["sgd"] == pytest.approx(0.5 * sizes["adamw"], rel=0.01)
    assert sizes["adamw8bit"] < 0.4 * sizes["adamw"]
    assert sizes["lion8bit"] < 0.6 * sizes["adamw8bit"]
    assert sizes["adafactor"] < 0.1 * sizes["adamw"]


def test_options_reach_the_optimizer():
    for name in ON_THE_CPU:
        group = made_optimizer(make_model(), name, learning_rate=0.125, weight_decay=0.25).param_groups[0]
        assert (group["lr"], group["weight_decay"]) == (0.125, 0.25)
    group = made_optimizer(make_model(), "sgd", momentum=0.5).param_groups[0]
    assert (group["momentum"], group["nesterov"]) == (0.5, True)
    assert made_optimizer(make_model(), "sgd", momentum=0.0).param_groups[0]["nesterov"] is False


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_whatever_kernels_run_it_an_update_is_the_same(name):
    plain = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[name]
    options = {"momentum": 0.9, "nesterov": True} if name == "sgd" else {}
    expected = make_model()
    steps(expected, plain(expected.parameters(), 0.01, weight_decay=0.01, foreach=False, **options), 5)
    for kernels in KERNELS:
        model = make_model()
        optimizer = made_optimizer(model, name, optimizer_kernels=kernels)
        assert (bool(optimizer.defaults["fused"]), bool(optimizer.defaults["foreach"])) == (
            kernels == "fused", kernels == "foreach",
        )  # fmt: skip
        steps(model, optimizer, 5)
        for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", ["adamw8bit", "lion8bit"])
def test_no_parameter_waits_for_the_device(name, monkeypatch):
    """bitsandbytes' own step does, after each of them."""
    pytest.importorskip("bitsandbytes")
    model = make_model()
    optimizer = made_optimizer(model, name)
    monkeypatch.setattr("bitsandbytes.optim.optimizer.sync_gpu", lambda tensor: pytest.fail("waited"))
    assert steps(model, optimizer, 2)


def test_8_bit_states_are_there_before_the_first_step():
    optimizer = made_optimizer(make_model(), "adamw8bit")
    assert [state["state1"].dtype for state in optimizer.state.values()] == [
        torch.uint8, torch.float32, torch.float32, torch.float32,
    ]  # fmt: skip
    assert {state["step"] for state in optimizer.state.values()} == {0}


@pytest.mark.parametrize("steps_made", [1, 5])
def test_small_parameters_are_updated_together_as_bitsandbytes_would(steps_made, monkeypatch):
    """torch's AdamW kernel on bitsandbytes' 32-bit states: the same formula, to rounding."""
    one, other = make_model(), make_model()
    together = made_optimizer(one, "adamw8bit")
    alone = made_optimizer(other, "adamw8bit")
    monkeypatch.setattr(alone, "_is_small", lambda parameter: False)
    steps(one, together, steps_made)
    steps(other, alone, steps_made)
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6), name
    assert {state["step"] for state in together.state.values()} == {steps_made}


class Waves(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 4, dtype=torch.complex64))

    def forward(self, x):
        return (x.to(torch.complex64) @ self.weight).abs()


def test_parameters_that_an_optimizer_cannot_update_are_told_before_the_training():
    for options, do in (
        ({}, "pass --optimizer-kernels"),
        ({"optimizer": "adafactor"}, "pass --optimizer adamw"),
        ({"optimizer_kernels": "foreach", "precision": "16-mixed"}, "pass --precision bf16-mixed"),
    ):
        with pytest.raises(QtoolError, match=f"real parameters; got 'weight' of torch.complex64; {do}"):
            setup(Waves(), TrainConfig(device="cpu", **options))
    setup(Waves().requires_grad_(False), TrainConfig(device="cpu")).close()
    model = Waves()
    before = model.weight.detach().clone()
    with setup(model, TrainConfig(device="cpu", optimizer_kernels="foreach")) as made:
        step = Step(made, made.make_optimizer([model.weight]), task_loss(load_task("classification")))
        step(torch.randn(4, 16), torch.arange(4), 0.1)
    assert not torch.equal(model.weight, before)
    with pytest.raises(QtoolError, match="'1', an embedding with sparse ones; build it with sparse=False"):
        setup(nn.Sequential(nn.Identity(), nn.Embedding(4, 3, sparse=True)), TrainConfig(device="cpu"))
    wide = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2).double())
    with pytest.raises(QtoolError, match=r"of 32 bits or fewer; got '1\.weight' of float64; pass --optimizer adamw"):
        setup(wide, TrainConfig(device="cpu", optimizer="lion8bit"))
    for options in ({}, {"optimizer": "adamw8bit", "precision": "bf16-true"}):
        setup(wide, TrainConfig(device="cpu", **options)).close()
    model.table, model.head = nn.Embedding(4, 3, sparse=True), nn.Linear(16, 16)
    optimizers.require(model, TrainConfig(device="cpu", lora=1, lora_targets=("head",)))  # above frozen ones any goes
    with pytest.raises(QtoolError, match="'table', an embedding with sparse ones"):
        optimizers.require(model, TrainConfig(device="cpu", lora=1, lora_trained=("table",)))


def test_a_parameter_without_values_is_passed_over_by_adafactor():
    model = nn.ParameterList([torch.ones(3), torch.empty(0, 3)])
    optimizer = optimizers.adafactor(TrainConfig(optimizer="adafactor"))(trained(model))
    sum(p.sum() for p in model).backward()
    optimizer.step()
    assert not torch.equal(model[0], torch.ones(3))
