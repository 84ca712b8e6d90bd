import copy
import warnings
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from fake_device import DEVICE, Fake, Hidden
from torch import nn
from torch.utils.data import TensorDataset

from qtool.errors import QtoolError, QtoolWarning
from qtool.recipe import PRECISIONS, TrainConfig
from qtool.steps.loop import fit
from qtool.steps.order import Batches
from qtool.steps.setup import plain
from qtool.tasks import load_task
from qtool.training import precision
from qtool.training.techniques import setup

TASK = load_task("classification")


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)
    )


def make_data(scale=1.0):
    torch.manual_seed(1)
    target = torch.randint(0, 3, (48,))
    images = (torch.randn(48, 2, 6, 6) + target[:, None, None, None]) * scale
    set_ = TensorDataset(images, target)
    loader = torch.utils.data.DataLoader(set_, batch_size=16)
    return SimpleNamespace(train=Batches(loader), validation=Batches(loader))


def config(precision, **options):
    return TrainConfig(
        **({"device": "cpu", "epochs": 6, "batch_size": 16, "learning_rate": 0.02} | options), precision=precision
    )


def trained(precision, hooks=None, data=None, **options):
    model = make_model()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "16-true")
        with setup(model, config(precision, **options)) as made:
            history = fit(model, data or make_data(), TASK, config(precision, **options), setup=made)
            dtypes = {name: value.dtype for name, value in model.state_dict().items()}
    return model, history, dtypes


def test_weights_are_cast_before_they_are_moved(monkeypatch):
    """On a GPU they never lie in 32 bits, which would leave gaps."""
    moved = []
    move = nn.Module.to

    def watched(module, *args):
        moved.append({p.dtype for p in module.parameters()})
        return move(module, *args)

    monkeypatch.setattr(nn.Module, "to", watched)
    model = make_model()
    with setup(model, config("bf16-true"), torch.zeros(2, 2, 6, 6)) as made:
        assert moved == [{torch.bfloat16, torch.float32}]
        assert model[0].weight.dtype == torch.bfloat16
        assert made.memory_format == torch.channels_last, "the trial of a layout is made in the dtype of the weights"
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_precision_learns_what_float32_learns(precision):
    _, reference, _ = trained("32-true")
    model, history, _ = trained(precision)
    assert history.epochs[-1]["validation_loss"] == pytest.approx(reference.epochs[-1]["validation_loss"], abs=0.05)
    assert history.epochs[-1]["validation_top1"] >= reference.epochs[-1]["validation_top1"] - 0.1
    assert history.losses != reference.losses or precision == "32-true", "the arithmetic must be another"
    assert {p.dtype for p in model.parameters()} == {torch.float32}, "the weights come back as they were"


def seen_dtypes(precision):
    """The dtypes of a convolution's output and of the loss's input inside a step."""
    model, seen = make_model(), {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "16-true")
        made = setup(model, config(precision))
    model[0].register_forward_hook(lambda m, i, o: seen.update(conv=o.dtype, weight=m.weight.dtype))
    model[1].register_forward_hook(lambda m, i, o: seen.update(norm=m.running_mean.dtype))
    output = made.predict(torch.randn(2, 2, 6, 6))
    made.close()
    return seen | {"output": output.dtype, "scaled": made.scaler.is_enabled()}


@pytest.mark.parametrize(
    ("precision", "compute", "weight", "scaled"),
    [
        ("32-true", torch.float32, torch.float32, False),
        ("16-mixed", torch.float16, torch.float32, True),
        ("bf16-mixed", torch.bfloat16, torch.float32, False),
        ("16-true", torch.float16, torch.float16, False),
        ("bf16-true", torch.bfloat16, torch.bfloat16, False),
    ],
)
def test_what_is_computed_in_what(precision, compute, weight, scaled):
    seen = seen_dtypes(precision)
    assert seen["conv"] == compute
    assert seen["weight"] == weight
    assert seen["scaled"] is scaled
    assert seen["norm"] == torch.float32
    assert seen["output"] == torch.float32


def test_true_precision_leaves_16_bit_values_in_float32_weights():
    model, _, dtypes = trained("bf16-true")
    assert dtypes["0.weight"] == torch.bfloat16
    assert dtypes["1.running_mean"] == torch.float32
    assert torch.equal(model[0].weight, model[0].weight.bfloat16().float())


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.filterwarnings("ignore:--strategy fsdp.*gathered whole")
def test_averages_of_an_instance_norm_do_not_stand_still(strategy):
    """They move by less than bfloat16 holds of a number near 1."""
    norm = nn.InstanceNorm1d(4, momentum=1e-3, affine=True, track_running_stats=True)
    with setup(
        nn.Sequential(nn.Linear(6, 6), norm, nn.ReLU(inplace=True)), config("bf16-true", strategy=strategy)
    ) as made:
        assert norm.weight.dtype == torch.float32
        made.model(made.place(torch.ones(2, 4, 6))).sum().backward()
        assert norm.weight.grad is not None
    assert torch.allclose(norm.running_var, torch.full((4,), 0.999), atol=1e-3)
    assert not torch.equal(norm.running_var, torch.ones(4))


def test_gradients_in_host_memory_are_scaled_by_what_is_there():
    """torch copies a GPU's scale to them without waiting for it."""
    made = plain(make_model(), config("32-true"))
    made.config, made.device = config("16-mixed", weight_offload=True, strategy="fsdp"), DEVICE
    precision.apply(made, None)
    weight = nn.Parameter(torch.ones(2))
    with Fake():
        scaled = made.scaler.scale(Hidden(torch.ones(2)))
    assert made.scaler._scale.device.type == "cpu"
    weight.grad = scaled.value
    made.scaler.unscale_(torch.optim.SGD([weight], 1.0))
    assert torch.equal(weight.grad, torch.ones(2))


def test_16_mixed_skips_overflowing_steps_and_goes_on():
    """A loss that is finite but whose scaled gradients overflow float16 costs a few steps, not the run."""
    model = make_model()
    with setup(model, config("16-mixed")) as made:
        made.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**26)
        history = fit(model, make_data(), TASK, config("16-mixed"), setup=made)
    assert 0 < history.skipped_steps < history.steps
    assert all(torch.isfinite(p).all() for p in model.parameters())
    before, after = make_model()[5].weight, model[5].weight
    assert not torch.equal(before, after)


@pytest.mark.parametrize("precision", ["16-true", "bf16-true"])
@pytest.mark.filterwarnings("ignore:16-true")
def test_a_shared_weight_gets_its_width_back(precision):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    setup(model, config(precision)).close()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model[1].weight is model[0].weight


def test_16_true_says_that_its_range_is_small():
    with pytest.warns(UserWarning, match="65,504"):
        setup(make_model(), config("16-true")).close()


def test_an_overflow_in_16_true_names_the_layer_and_suggests_bf16():
    with pytest.raises(QtoolError, match=r"layer '0'.*bf16-true"):
        trained("16-true", data=make_data(scale=1e4), learning_rate=1e3)
    with pytest.raises(QtoolError, match=r"the inputs of the model.*bf16-true"):
        trained("16-true", data=make_data(scale=1e6))


def test_the_scaler_is_part_of_an_exact_resume(tmp_path):
    def run(out, stop=None):
        def report(at):
            if at.step == stop:
                raise KeyboardInterrupt

        model = make_model()
        options = config("16-mixed", checkpoint_every=1)
        with setup(model, options) as made:
            made.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**26, growth_interval=4)
            history = fit(model, make_data(), TASK, options, setup=made, out=out, progress=report)
            return copy.deepcopy(model.state_dict()), history, made.scaler.state_dict()

    expected = run(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "parts", stop=13)
    found = run(tmp_path / "parts")
    assert found[2] == expected[2]
    assert found[1].skipped_steps == expected[1].skipped_steps > 0
    assert all(torch.equal(a, b) for a, b in zip(found[0].values(), expected[0].values(), strict=True))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_model_that_comes_in_16_bits_is_trained_in_float32(precision, dtype):
    """As the same model that came in float32 with those values."""
    losses = []
    for model in (make_model().to(dtype), make_model().to(dtype).float()):
        told = pytest.warns(QtoolWarning, match="came in") if not losses else nullcontext()
        with told, setup(model, config(precision)) as made:
            losses.append(fit(model, make_data(), TASK, config(precision), setup=made).losses)
        assert {v.dtype for v in model.state_dict().values() if v.is_floating_point()} == {torch.float32}
    assert losses[0] == losses[1]


def test_adapters_of_a_model_in_16_bits_are_float32():
    pytest.importorskip("peft", exc_type=ImportError)
    model = make_model().bfloat16()
    with setup(model, config("bf16-mixed", lora=2, lora_targets=("5",))) as made:
        assert {p.dtype for p in made.model.parameters() if p.requires_grad} == {torch.float32}
        assert torch.bfloat16 in {p.dtype for p in made.model.parameters()}
        made.predict(torch.randn(2, 2, 6, 6))
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)).bfloat16()
    with setup(plain, config("32-true", lora=2, lora_targets=("0",))) as made:  # what comes in is as wide as the base
        made.predict(torch.randn(2, 4))


class Angles(nn.Module):
    """Positions turned by frequencies that 16 bits do not hold, as rotary embeddings have them."""

    def __init__(self):
        super().__init__()
        self.register_buffer("frequencies", 0.1 ** torch.arange(4.0), persistent=False)
        self.seen = []

    def forward(self, x):
        self.seen.append((self.frequencies, x.dtype))
        return x + (torch.arange(6.0)[:, None] * self.frequencies).sin()


class Turning(nn.Module):
    def __init__(self):
        super().__init__()
        self.angles, self.layer = Angles(), nn.Linear(4, 4)
        self.register_buffer("third", torch.full((4,), 1 / 3))
        self.register_buffer("moving", torch.full((4,), 1 / 3))

    def forward(self, x):
        with torch.no_grad():
            self.moving.add_(1.0)
        return self.layer(self.angles(x)) + self.third + self.moving


class Changing(nn.Module):
    """A module without weights whose buffers are no constants: one is moved, the other replaced for longer inputs."""

    def __init__(self):
        super().__init__()
        self.register_buffer("moved", torch.full((4,), 0.1), persistent=False)
        self.register_buffer("replaced", torch.full((4,), 0.1), persistent=False)

    def forward(self, x):
        self.moved.add_(1.0)
        if self.replaced[0] < 1:
            self.register_buffer("replaced", torch.full((4,), 1.1), persistent=False)
        return x + self.moved + self.replaced


def test_buffers_that_a_module_without_weights_moves_or_replaces_go_on_from_there():
    model = nn.Sequential(Changing(), nn.Linear(4, 4))
    with setup(model, config("bf16-true")) as made:
        for _ in range(3):
            made.model(made.place(torch.zeros(2, 4)))
    assert torch.allclose(model[0].moved, torch.full((4,), 3.1))
    assert torch.equal(model[0].replaced, torch.full((4,), 1.1))


class Centring(nn.Module):
    """Subtracts a running mean, and the first one, in buffers that no state has."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.full((4,), 0.1), persistent=False)
        self.register_buffer("first", torch.zeros(4), persistent=False)

    def forward(self, x):
        self.mean.lerp_(x.mean(0), 0.1)
        self.first = self.first if self.first.any() else x.mean(0).float() / 3
        return x - self.mean - self.first


def test_buffers_that_a_module_without_weights_moves_are_resumed(tmp_path):
    def run(stop=None, **more):
        torch.manual_seed(0)
        model, options = nn.Sequential(Centring(), nn.Linear(4, 3)), config("bf16-true", epochs=2, learning_rate=0.05)
        with setup(model, options) as made:
            told = (lambda at: 1 / (at.step - stop)) if stop else None
            history = fit(model, data, TASK, options, setup=made, progress=told, **more)
        return history.losses, model[0].mean, model[0].first

    inputs = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
    data = SimpleNamespace(train=TensorDataset(inputs, torch.arange(48) % 3), validation=None, identity="")
    losses, *expected = run()
    with pytest.raises(ZeroDivisionError):
        run(stop=4, out=tmp_path)
    resumed, *found = run(out=tmp_path)
    assert resumed == losses
    assert all(map(torch.equal, found, expected))


def test_a_compiler_captures_constants_in_full_as_a_part_of_the_model():
    with setup(nn.Sequential(Angles(), nn.Linear(4, 4)), config("bf16-true")) as made:
        assert torch._dynamo.explain(made.model)(torch.zeros(2, 6, 4).bfloat16()).graph_count == 1


@pytest.mark.parametrize(("precision", "dtype"), [("16-true", torch.float16), ("bf16-true", torch.bfloat16)])
def test_constants_count_in_full_and_are_what_they_were_in_the_end(precision, dtype):
    model, frequencies = Turning(), 0.1 ** torch.arange(4.0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "16-true")
        with setup(model, config(precision)) as made:
            y = made.model(made.place(torch.zeros(2, 6, 4)))
            assert y.dtype == model.angles.frequencies.dtype == dtype
            ((used, given),) = model.angles.seen
            assert torch.equal(used, frequencies)
            assert given == torch.float32
    assert torch.equal(model.angles.frequencies, frequencies)
    assert torch.equal(model.third, torch.full((4,), 1 / 3))
    assert torch.equal(model.moving, (torch.full((4,), 1 / 3).to(dtype) + 1).float())
    assert "forward" not in vars(model.angles)
