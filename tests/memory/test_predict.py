"""The predicted peak against the real one, technique by technique, on nets whose sums can also be done by hand."""

from __future__ import annotations

import copy
import gc
import importlib
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from nets import FeedForward
from torch import nn

from qtool.errors import QtoolError, UsageError
from qtool.memory import trial
from qtool.memory.measure import highest_sum, measure
from qtool.memory.predict import predict
from qtool.recipe import TrainConfig
from qtool.steps.loop import task_loss
from qtool.steps.setup import plain
from qtool.tasks import load_task
from qtool.training import checkpointing, rules, techniques
from qtool.training.techniques import setup

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
LOSS = task_loss(load_task("classification"))
TECHNIQUES: dict[str, dict[str, Any]] = {
    "plain": {},
    "autocast": {"precision": "bf16-mixed"},
    "bf16": {"precision": "bf16-true"},
    "float16": {"precision": "16-mixed"},
    "sgd": {"optimizer": "sgd"},
    "adafactor": {"optimizer": "adafactor"},
    "8-bit": {"optimizer": "adamw8bit"},
    "checkpointing": {"activation_checkpointing": True},
    "accumulation": {"micro_batches": 4},
    "step in backward": {"step_in_backward": True, "grad_clip": None},
    "compensated": {"precision": "bf16-true", "rounding": "compensated"},
}


def blocks(width: int = 128) -> nn.Module:
    return nn.Sequential(nn.Linear(32, width), *(FeedForward(width) for _ in range(2)), nn.Linear(width, 10))


def batch(size: int = 512) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, 32), torch.zeros(size, dtype=torch.int64)


def config(**options: Any) -> TrainConfig:
    return TrainConfig(device="cpu", **{"batch_size": 512, **options})


@pytest.mark.parametrize("name", TECHNIQUES)
def test_the_prediction_is_near_what_is_allocated(name: str) -> None:
    options = config(**TECHNIQUES[name])
    predicted = predict(blocks, batch(), options, prepare=setup, loss=LOSS)
    measured = measure(blocks, batch(), options, prepare=setup, loss=LOSS)
    ratio = predicted.peak_bytes / measured.peak_bytes
    assert 0.99 < ratio < 1.01
    assert sum(predicted.parts.values()) == predicted.peak_bytes


def test_offloaded_activations_are_not_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each further block its weights are, their gradients and momenta. A device that has no memory is a GPU here."""
    for module in (rules, techniques, importlib.import_module("qtool.memory.predict")):
        monkeypatch.setattr(module, "resolve_device", lambda text: torch.device("meta"))
    size, width, options = 2048, 256, {"activation_offload": True, "optimizer": "sgd", "optimizer_kernels": "foreach"}

    def peak(count: int) -> int:
        net = nn.Sequential(nn.Linear(32, width), *(FeedForward(width) for _ in range(count)), nn.Linear(width, 10))
        wanted = config(batch_size=size, **options)
        return predict(lambda: net, batch(size), wanted, prepare=setup, loss=LOSS).peak_bytes

    assert (peak(4) - peak(2)) / 2 == 3 * sum(p.nbytes for p in FeedForward(width).parameters())


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(32, 64, num_layers=2, batch_first=True), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x.view(-1, 16, 32))[0].mean(1))


def test_steps_that_the_gradient_scaler_skips_are_not_taken_for_a_training() -> None:
    """They make no optimizer states, which are at the peak."""

    def prepare(*args: Any) -> Any:
        made = setup(*args)
        made.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**26)
        return made

    options = config(precision="16-mixed", optimizer_kernels="foreach")
    predicted = predict(blocks, batch(64), options, prepare=setup, loss=LOSS)
    measured = measure(blocks, batch(64), options, prepare=prepare, loss=LOSS, steps=2)
    assert measured.steps == 2
    assert predicted.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.01)


def test_what_an_lstm_keeps_for_its_backward_pass_is_counted() -> None:
    """Its operator returns that, and a fake one returns nothing in its place."""
    wanted, inputs = config(), (torch.randn(64, 16, 32), torch.zeros(64, dtype=torch.int64))
    predicted, measured = (f(Recurrent, inputs, wanted, prepare=setup, loss=LOSS) for f in (predict, measure))
    assert predicted.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.01)


def test_what_the_backward_pass_of_batch_norm_copies_is_counted() -> None:
    def build() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 32, 1), nn.BatchNorm2d(32), nn.Conv2d(32, 1, 1), nn.Flatten(), nn.Linear(4096, 10)
        )

    inputs = (torch.randn(8, 3, 64, 64), torch.zeros(8, dtype=torch.int64))
    predicted, measured = (f(build, inputs, config(), prepare=setup, loss=LOSS) for f in (predict, measure))
    assert predicted.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.01)


class Masked(nn.Linear):
    """As transformers' models: where it may not look into a tensor, it keeps a mask for what else would need none."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tracing = sys.modules["transformers.utils.import_utils"].is_fake_tensor(x)
        mask = torch.ones(len(x), 10) if tracing or not (x == x).all() else 1.0
        return super().forward(x) * mask


def test_masks_that_transformers_makes_for_fake_tensors_alone_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace(is_fake_tensor=lambda value: isinstance(value, torch._subclasses.FakeTensor))
    monkeypatch.setitem(sys.modules, "transformers.utils.import_utils", library)
    told = library.is_fake_tensor
    predicted, measured = (
        f(lambda: Masked(32, 10), batch(), config(), prepare=setup, loss=LOSS) for f in (predict, measure)
    )
    assert predicted.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.01)
    assert library.is_fake_tensor is told


def alike() -> nn.Module:
    return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6)))


@pytest.mark.slow
def test_torchaos_compiled_update_is_predicted_without_compiling_it() -> None:
    """Of a small batch, where the update is what takes most; it is compiled once for each shape of a weight."""
    pytest.importorskip("torchao")
    torch._dynamo.reset()  # what earlier tests left would count as given back, were it to go meanwhile
    gc.collect()
    wanted = config(optimizer="torchao-adamw8bit", precision="bf16-true", step_in_backward=True, grad_clip=None)
    inputs = torch.randn(2, 64), torch.zeros(2, dtype=torch.int64)
    predicted, measured = (f(alike, inputs, wanted, prepare=setup, loss=LOSS) for f in (predict, measure))
    assert predicted.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.01)


def test_code_that_reads_what_it_builds_is_predicted_as_any_other() -> None:
    """Fake tensors have no values: such a model is built with real ones, and its memory is told all the same."""

    def reads() -> nn.Module:
        net = alike()
        net[0].weight.data /= float(net[0].weight.detach().numpy().max())
        return net

    inputs = torch.randn(2, 64), torch.zeros(2, dtype=torch.int64)
    plain, read = (predict(build, inputs, config(), prepare=setup, loss=LOSS) for build in (alike, reads))
    assert read.peak_bytes == plain.peak_bytes

    def broken() -> nn.Module:
        raise ValueError("its own")

    with pytest.raises(ValueError, match="its own"):
        predict(broken, inputs, config(), prepare=setup, loss=LOSS)


def colour() -> nn.Module:
    features = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
    return nn.Sequential(*features, nn.Flatten(), nn.Linear(8, 3))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_images_in_colour_are_copied_to_lie_channels_last(precision: str) -> None:
    images = torch.randn(64, 3, 12, 20), torch.zeros(64, dtype=torch.int64)
    predicted, measured = (
        f(colour, images, config(batch_size=64, precision=precision), prepare=setup, loss=LOSS)
        for f in (predict, measure)
    )
    assert predicted.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.01)


class Scan(nn.Module):
    """Reads its input step by step: gradients of all of it are added up, one for each step."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.head = nn.Linear(32, 2048), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = torch.sigmoid(self.wide(x)).view(len(x), 32, 64)
        state = parts[:, 0]
        for step in range(1, 32):
            state = state * parts[:, step] + parts[:, step - 1]
        return self.head(state)


def test_gradients_are_added_up_in_place_where_nobody_else_holds_them() -> None:
    predicted, measured = (
        f(Scan, batch(256), config(batch_size=256), prepare=setup, loss=LOSS) for f in (predict, measure)
    )
    assert predicted.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.01)


class Largest(nn.Linear):
    """Selects values, whose gradients are put into zeros."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x).view(len(x), 10, -1)
        return (
            y.max(2).values
            + y.gather(2, torch.zeros(len(x), 10, 1, dtype=torch.int64))[:, :, 0]
            + y[:, :, [0, 1]].sum(2)
        )


class Mixing(nn.Module):
    """Mixes places by a linear layer, whose input is a transposed tensor, and is wide there."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.head = nn.Linear(64, 2048), nn.Linear(2048, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.mix(x.transpose(1, 2)).mean(1))


def test_linear_layers_add_their_biases_in_place() -> None:
    sequences = torch.randn(16, 64, 32), torch.zeros(16, dtype=torch.int64)
    wanted = config(batch_size=16)
    predicted, measured = (f(Mixing, sequences, wanted, prepare=setup, loss=LOSS) for f in (predict, measure))
    assert predicted.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.01)


class SummedInto(nn.Linear):
    """Sums rows of a product into those of a tensor in float32, as experts do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(len(x), device=x.device)
        return torch.zeros(len(x), 10, device=x.device).index_add(0, rows, super().forward(x))


def test_a_precision_in_which_types_differ_is_not_predicted() -> None:
    """Else it would be chosen for a budget, and training would fail."""
    assert predict(lambda: SummedInto(32, 10), batch(), config(), prepare=setup, loss=LOSS).peak_bytes > 0
    wanted = config(precision="bf16-mixed")
    for run in (predict, measure):
        with pytest.raises(QtoolError, match=r"same (dtype|scalar type).*one type of floats"):
            run(lambda: SummedInto(32, 10), batch(), wanted, prepare=setup, loss=LOSS)


class Forces(nn.Module):
    """Gives the gradient of an energy, a backward pass within the forward one."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (forces,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)
        return self.head(forces)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_models_with_a_backward_pass_of_their_own_are_predicted(micro_batches: int) -> None:
    wanted = config(micro_batches=micro_batches)
    predicted, measured = (f(Forces, batch(), wanted, prepare=setup, loss=LOSS) for f in (predict, measure))
    assert predicted.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.01)


def test_gradients_of_what_was_selected_are_put_in_place() -> None:
    predicted, measured = (
        f(lambda: Largest(32, 10_000), batch(32), config(batch_size=32), prepare=setup, loss=LOSS)
        for f in (predict, measure)
    )
    assert predicted.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.01)


class Spectral(nn.Linear):
    """Mixes by the lowest frequencies of its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        waves = torch.fft.rfft2(x.view(len(x), 4, 32, 32))[..., :8, :8] * self.weight.view(1, 1, 8, 8)
        return torch.fft.irfft2(waves, s=(32, 32)).mean(3)[:, :, :10].sum(1)


class Asking(nn.Module):
    """Has its input ask for a gradient, as models of transformers do for the sake of checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4096, 16), nn.LayerNorm(16), FeedForward(16), nn.Linear(16, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[:, None]
        x.requires_grad = True
        return self.layers(x)[:, 0]


def orthogonal() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.orthogonal(nn.Linear(64, 64)), nn.Linear(64, 10))


class Paired(nn.Bilinear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x, x)


@pytest.mark.parametrize("build", [orthogonal, lambda: Paired(64, 64, 16)], ids=["orthogonal", "bilinear"])
def test_what_operators_of_matrices_take_for_themselves_is_counted(build: Any) -> None:
    """An exponential of a matrix, and a product of three, beside weights that are made orthogonal as they are drawn."""
    batch = torch.randn(32, 64), torch.zeros(32, dtype=torch.int64)
    predicted, measured = (f(build, batch, config(batch_size=32), prepare=setup, loss=LOSS) for f in (predict, measure))
    assert 0.98 < predicted.peak_bytes / measured.peak_bytes < 1.3  # the exponential of a small matrix takes less


@pytest.mark.parametrize("build", [lambda: Spectral(64, 1, bias=False), Asking], ids=["spectral", "asking"])
def test_what_transforms_take_and_inputs_with_gradients_is_counted(build: Any) -> None:
    images = torch.randn(32, 4096), torch.zeros(32, dtype=torch.int64)
    wanted = config(batch_size=32, micro_batches=4, learning_rate=1e-4)
    predicted, measured = (f(build, images, wanted, prepare=setup, loss=LOSS) for f in (predict, measure))
    assert predicted.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.01)


def test_group_norm_in_autocast_is_as_wide_backward_as_forward() -> None:
    def build() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.ReLU(), nn.Conv2d(32, 1, 1), nn.Flatten(),
            nn.Linear(4096, 10),
        )  # fmt: skip

    images = torch.randn(8, 3, 64, 64), torch.zeros(8, dtype=torch.int64)
    wanted = config(batch_size=8, precision="bf16-mixed")
    predicted, measured = (f(build, images, wanted, prepare=setup, loss=LOSS) for f in (predict, measure))
    assert predicted.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.01)


class Attended(nn.Module):
    """Attention over the places of an image: its kernel is chosen by the strides that a convolution leaves behind."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.norm, self.parts = nn.Conv2d(3, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.Conv2d(32, 96, 1)
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.inputs(x))
        query, key, value = self.parts(x).reshape(len(x), 3, 4, 8, -1).transpose(-1, -2).unbind(1)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        return self.head(x.mean((2, 3)) + mixed.mean(2).flatten(1))


@pytest.mark.parametrize("channels_last", [True, False])
def test_kernels_are_those_of_the_strides_that_there_will_be(channels_last: bool) -> None:
    wanted = config(batch_size=8, channels_last=channels_last)
    images = torch.randn(8, 3, 16, 16), torch.zeros(8, dtype=torch.int64)
    predicted, measured = (f(Attended, images, wanted, prepare=setup, loss=LOSS) for f in (predict, measure))
    assert predicted.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.02)


@pytest.mark.parametrize("layer", [nn.LogSigmoid, lambda: nn.ChannelShuffle(2)])
def test_what_lies_otherwise_than_torch_s_fake_tensors_say_is_copied_as_it_will_be(layer: Any) -> None:
    """Convolutions copy what does not lie channels last: a fifth of the peak too much, or an eighth too little."""

    def build() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), layer(),
            nn.Conv2d(32, 32, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
        )  # fmt: skip

    images = torch.randn(8, 3, 64, 64), torch.zeros(8, dtype=torch.int64)
    wanted = config(batch_size=8)
    predicted, measured = (f(build, images, wanted, prepare=setup, loss=LOSS) for f in (predict, measure))
    assert predicted.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.01)


class Cloned(nn.Module):
    """Layers that are copies of one, which torch makes in the constructor, behind a batch-norm."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.norm = nn.Conv2d(3, 32, 4, 4), nn.BatchNorm2d(32)
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 2)
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.norm(self.inputs(x)).flatten(2).transpose(1, 2)).mean(1))


def test_models_that_copy_their_layers_are_predicted() -> None:
    """torch's copies of fake tensors took what had made them along, and ended the process now and then."""
    images = torch.randn(8, 3, 16, 16), torch.zeros(8, dtype=torch.int64)
    kept: list[Any] = []

    def build() -> nn.Module:
        kept.append(copy.deepcopy(Cloned()))
        return kept[-1]

    predicted, measured = (f(build, images, config(batch_size=8), prepare=setup, loss=LOSS) for f in (predict, measure))
    assert predicted.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.01)
    modes = {value.fake_mode for value in kept[0].state_dict(keep_vars=True).values()}
    assert len(modes) == 1
    assert all(isinstance(value, nn.Parameter) for value in kept[0].parameters())


def test_without_anything_to_train_there_is_nothing_to_predict() -> None:
    for f in (predict, measure):
        with pytest.raises(UsageError, match="requires_grad"):
            f(lambda: blocks().requires_grad_(False), batch(4), config(), prepare=setup, loss=LOSS)


def test_shards_are_not_laid_out_channels_last() -> None:
    net = nn.Sequential(
        nn.Unflatten(1, (2, 4, 4)), *(nn.Conv2d(2**k, 2 ** (k + 1), 3, padding=1) for k in range(1, 7)), nn.Flatten()
    )
    either, other = (
        predict(lambda: net, batch(4), config(devices=2, strategy="fsdp", channels_last=last), prepare=setup, loss=LOSS)
        for last in (True, False)
    )
    assert either.peak_bytes == other.peak_bytes


def test_what_happens_after_the_last_step_is_not_counted() -> None:
    """Weights in bfloat16 become float32 again: twice as large, beside 8-bit states that are no longer there."""
    options = config(precision="bf16-true", optimizer="adamw8bit", step_in_backward=True, grad_clip=None)
    predicted, measured = (
        f(lambda: nn.Sequential(*(FeedForward(32) for _ in range(8))), batch(2), options, prepare=setup, loss=LOSS)
        for f in (predict, measure)
    )
    assert predicted.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.02)


def test_parts_are_those_that_can_be_counted_by_hand() -> None:
    model = blocks()
    size = sum(p.nbytes for p in model.parameters())
    found = predict(lambda: model, batch(2), config(), prepare=setup, loss=LOSS)
    assert found.parts["parameters"] == size
    assert found.parts["optimizer_states"] == 2 * size + 4 * len(list(model.parameters()))  # a step count for each
    assert found.parts["gradients"] + found.parts["temporary"] == pytest.approx(size, rel=0.05)
    assert found.parts["batch"] == 2 * 32 * 4 + 2 * 8
    assert all(type(p) is nn.Parameter and p.grad is None for p in model.parameters())  # left alone


def test_the_moment_and_module_of_the_peak() -> None:
    wide = nn.Sequential(nn.Linear(32, 8), nn.Sequential(nn.Linear(8, 4096), nn.GELU()), nn.Linear(4096, 10))
    found = predict(lambda: wide, batch(), config(optimizer="sgd", momentum=0.0), prepare=plain, loss=LOSS)
    assert (found.moment, found.module) in (("backward", "1.1"), ("backward", "2"))
    heavy = nn.Sequential(nn.Linear(32, 2048), nn.Linear(2048, 2048), nn.Linear(2048, 10))
    found = predict(lambda: heavy, batch(2), config(), prepare=plain, loss=LOSS)
    assert found.moment in ("backward", "optimizer step")


def test_techniques_save_where_they_should() -> None:
    peaks = {}
    for name in ("plain", "checkpointing", "accumulation", "bf16"):
        peaks[name] = predict(
            blocks, batch(2048), config(batch_size=2048, **TECHNIQUES[name]), prepare=setup, loss=LOSS
        )
    plain_peak = peaks.pop("plain").peak_bytes
    assert all(peak.peak_bytes < 0.8 * plain_peak for peak in peaks.values())


def test_more_than_this_machine_holds_can_be_predicted() -> None:
    def huge() -> nn.Module:
        return nn.Sequential(*(nn.Linear(100_000, 100_000, bias=False) for _ in range(3)))

    value = torch.randn(2, 100_000)
    found = predict(huge, (value, torch.zeros(2, dtype=torch.int64)), config(), prepare=plain, loss=LOSS)
    assert found.parts["parameters"] == 3 * 4 * 10**10
    assert found.peak_bytes >= 4 * 3 * 4 * 10**10


def test_random_state_and_buffers_are_left_alone() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 36, 10))
    before = torch.random.get_rng_state(), model[1].running_mean.clone()
    value = torch.randn(4, 3, 8, 8), torch.zeros(4, dtype=torch.int64)
    before = torch.random.get_rng_state(), model[1].running_mean.clone()
    found = predict(lambda: model, value, config(), prepare=setup, loss=LOSS)
    assert torch.equal(torch.random.get_rng_state(), before[0])
    assert torch.equal(model[1].running_mean, before[1])
    assert found.parts["buffers"] == 2 * 8 * 4 + 8


def test_what_each_of_several_devices_keeps_can_be_counted_by_hand() -> None:
    size = sum(p.nbytes for p in blocks().parameters())
    alone, copies, shards = (
        predict(blocks, batch(512), config(**options), prepare=setup, loss=LOSS)
        for options in ({}, {"devices": 4}, {"devices": 4, "strategy": "fsdp"})
    )
    for found in (copies, shards):
        assert found.parts["batch"] * 4 == alone.parts["batch"]
        whole = alone.parts["activations"] / 4 + size  # gathered weights are counted there too
        assert found.parts["activations"] < 1.04 * whole
    assert (copies.parts["parameters"], copies.parts["gradients"]) == (size, size)
    assert copies.parts["optimizer_states"] == alone.parts["optimizer_states"]
    assert shards.parts["optimizer_states"] == pytest.approx(copies.parts["optimizer_states"] / 4, rel=0.02)
    assert shards.parts["parameters"] > size / 4
    largest = max(sum(p.nbytes for p in block.parameters()) for block in checkpointing.blocks(blocks()).values())
    assert (alone.late_bytes, copies.late_bytes) == (0, size)
    assert shards.late_bytes == pytest.approx(2 * 2 * largest, rel=0.02)
    assert not torch.distributed.is_initialized()


def test_of_copies_what_the_loss_does_not_depend_on_has_room_in_the_buckets_and_no_states() -> None:
    model = blocks()
    model[1].unused = nn.Linear(128, 128)
    unused = sum(p.nbytes for p in model[1].unused.parameters())
    alone, copies = (
        predict(lambda: model, batch(64), config(batch_size=64, **options), prepare=setup, loss=LOSS).parts
        for options in ({}, {"devices": 2})
    )
    assert copies["optimizer_states"] == alone["optimizer_states"]
    assert copies["gradients"] == sum(p.nbytes for p in model.parameters()) - unused
    assert copies["batch"] == alone["batch"] / 2 + unused


def test_gradients_of_micro_batches_lie_beside_the_buckets_of_copies() -> None:
    options = {"batch_size": 8, "optimizer": "sgd", "momentum": 0.0, "micro_batches": 2}
    alone, copies = (
        predict(blocks, batch(8), config(**options, **more), prepare=setup, loss=LOSS).peak_bytes
        for more in ({}, {"devices": 2})
    )
    assert copies - alone == pytest.approx(sum(p.nbytes for p in blocks().parameters()), rel=0.05)


class Ragged(nn.Module):
    """Takes samples of any number of rows, which are noted of each pass."""

    passes: ClassVar[list[list[int]]] = []

    def __init__(self) -> None:
        super().__init__()
        self.net = blocks()

    def forward(self, index: torch.Tensor, samples: list[torch.Tensor]) -> torch.Tensor:
        self.passes.append([len(sample) for sample in samples])
        return torch.stack([self.net(sample).mean(0) for sample in samples])


def test_of_micro_batches_alike_some_are_run_and_none_of_another_size_is_missed() -> None:
    """Two steps are taken; what is left out are the four bytes of a loss, of each that is not run."""

    def batch_of(*rows: int) -> Any:
        samples = [torch.randn(count, 32) for count in rows]
        return {"index": torch.arange(len(rows)), "samples": samples}, torch.zeros(len(rows), dtype=torch.int64)

    Ragged.passes.clear()
    alike = predict(Ragged, batch_of(*[64] * 8), config(batch_size=8, micro_batches=8), prepare=setup, loss=LOSS)
    assert Ragged.passes == [[64]] * 3 * 2
    measured = measure(Ragged, batch_of(*[64] * 8), config(batch_size=8, micro_batches=8), prepare=setup, loss=LOSS)
    assert 0 <= measured.peak_bytes - alike.peak_bytes < 0.01 * measured.peak_bytes
    Ragged.passes.clear()
    rows = (1, 1, 700, 1, 2, 1)
    wanted = config(batch_size=6, micro_batches=6)
    predicted = predict(Ragged, batch_of(*rows), wanted, prepare=setup, loss=LOSS)
    assert Ragged.passes == [[1], [1], [700], [2], [1]] * 2
    measured = measure(Ragged, batch_of(*rows), wanted, prepare=setup, loss=LOSS)
    assert predicted.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.01)


def test_other_threads_go_on_for_real_meanwhile() -> None:
    def work() -> torch.dtype:
        layer = nn.Linear(4, 3)
        optimizer = torch.optim.AdamW(layer.parameters())
        layer(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        return layer.to(torch.float64).weight.dtype

    class Beside(nn.Identity):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            done.append(pool.submit(work).result())
            return x

    done: list[torch.dtype] = []
    with ThreadPoolExecutor(1) as pool:
        peaks = [
            predict(lambda kind=kind: nn.Sequential(kind(), blocks()), batch(), config(), prepare=setup, loss=LOSS)
            for kind in (nn.Identity, Beside)
        ]
    assert set(done) == {torch.float64}
    assert peaks[0].peak_bytes == peaks[1].peak_bytes


def test_errors_of_the_step_are_those_of_the_step() -> None:
    with pytest.raises(QtoolError, match="same reduction dim"):
        predict(lambda: nn.Linear(31, 10), batch(2), config(), prepare=plain, loss=LOSS)
    for bias in (False, True):
        two = nn.Sequential(nn.Linear(32, 10), nn.Linear(10, 10, bias).double())
        with pytest.raises(QtoolError, match="same dtype, but got float32 and float64; give inputs, weights"):
            predict(lambda two=two: two, batch(2), config(), prepare=plain, loss=LOSS)  # type: ignore[misc]


class Plainly(nn.Linear):
    """A layer with constants, a count, a generator and what it gave last in plain attributes."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__(width, classes)
        self.table, self.count, self.noise = [torch.ones(width)], torch.zeros(()), torch.Generator()
        self.graph, self.last = torch.eye(classes).to_sparse(), self.weight * 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        self.last = super().forward(x * self.table[0] + torch.rand(x.shape, generator=self.noise))
        return self.last


def test_what_a_model_has_in_plain_attributes_is_copied() -> None:
    """As it is in a model that was made before, which a budget predicts; and nothing of it is written."""
    model = Plainly(32, 10)
    predicted = predict(lambda: model, batch(), config(), prepare=setup, loss=LOSS)
    measured = measure(lambda: Plainly(32, 10), batch(), config(), prepare=setup, loss=LOSS)
    assert predicted.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.01)
    assert not model.count
    assert model.noise.get_state().equal(torch.Generator().get_state())


def test_what_cannot_be_copied_is_shared_and_what_is_sparse_is_told() -> None:
    model = Plainly(32, 10)
    model.library, model.steps = torch, iter(range(9))
    assert predict(lambda: model, batch(), config(), prepare=setup, loss=LOSS).peak_bytes
    model.register_buffer("edges", torch.eye(3).to_sparse())
    with pytest.raises(QtoolError, match="are no sparse tensors; got 'edges'; train without --memory-budget"):
        predict(lambda: model, batch(), config(), prepare=setup, loss=LOSS)


@torch.library.custom_op("qtool_tests::twice", mutates_args=())  # type: ignore[misc]
def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


twice.register_autograd(lambda ctx, gradient: 2 * gradient)


class Outside(nn.Linear):
    """Leaves torch: for an operator of its own that knows real tensors alone, or for numpy."""

    kind = "operator"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return twice(y) if self.kind == "operator" else y * float(y.detach().numpy().max())


@pytest.mark.parametrize(("kind", "got"), [("operator", "no fake impl registered"), ("numpy", r"\.numpy\(\) is not")])
def test_what_takes_real_tensors_alone_is_told_as_not_predicted(kind: str, got: str) -> None:
    """It would train: model and data go together."""
    model = Outside(32, 10)
    model.kind = kind
    assert measure(lambda: model, batch(), config(), prepare=setup, loss=LOSS)
    with pytest.raises(QtoolError, match=f"^prediction: expected a step that .*{got}.*; train without --memory-budget"):
        predict(lambda: model, batch(), config(), prepare=setup, loss=LOSS)


class Selecting(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y + y[y > -1e9].mean()


def selected(model: Any, value: Any, target: Any) -> Any:
    losses = nn.functional.cross_entropy(model(value), target, reduction="none")
    return losses[losses >= 0].sum(), (losses >= 0).sum()


def test_what_a_mask_selects_is_taken_for_all() -> None:
    for build, loss in ((lambda: Selecting(32, 2000), LOSS), (lambda: nn.Linear(32, 2000), selected)):
        predicted, measured = (
            f(build, batch(64), config(batch_size=64), prepare=setup, loss=loss) for f in (predict, measure)
        )
        assert predicted.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.02)


class Experts(nn.Module):
    """Rows sorted by expert, each group of them by a matrix of its own, as transformers' mixtures have it."""

    def __init__(self) -> None:
        super().__init__()
        self.route = nn.Linear(32, 4)
        self.up = nn.Parameter(torch.randn(4, 32, 96) * 0.1)
        self.down = nn.Parameter(torch.randn(4, 96, 16) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, expert = self.route(x).softmax(-1).max(-1)
        order = expert.argsort()
        ends = torch.histc(expert.float(), 4, 0, 3).cumsum(0).to(torch.int32)
        hidden = nn.functional.grouped_mm(x[order], self.up.to(x.dtype), offs=ends).relu()
        found = nn.functional.grouped_mm(hidden, self.down.to(hidden.dtype), offs=ends)
        return torch.zeros_like(found).index_copy(0, order, found) * weight[:, None]


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_experts_in_groups_are_predicted_in_every_precision(precision: str) -> None:
    options = config(precision=precision)
    predicted, measured = (f(Experts, batch(), options, prepare=setup, loss=LOSS) for f in (predict, measure))
    assert predicted.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.02)


class Distinct(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y + y.unique().mean()


def test_sizes_that_depend_on_values_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the model, whose errors are told as its own, and in the loss; of one that is too large to be run."""
    monkeypatch.setattr(trial, "LARGEST", 0)

    def distinct(model: Any, value: Any, target: Any) -> Any:
        return model(value).sum() * target.unique().sum(), float(len(target))

    for build, loss in ((lambda: Distinct(32, 10), LOSS), (lambda: nn.Linear(32, 10), distinct)):
        with pytest.raises(QtoolError, match=r"prediction: expected a step .*got 'aten\._unique.*--memory-budget"):
            predict(build, batch(4), config(batch_size=4), prepare=setup, loss=loss)


def test_the_highest_running_sum() -> None:
    assert highest_sum([]) == 0
    assert highest_sum([-5, 3]) == 0
    assert highest_sum([3, 4, -7, 5]) == 7


def test_a_measurement_counts_parameters_states_and_what_lives_between() -> None:
    found = measure(blocks, batch(2), config(), prepare=plain, loss=LOSS, steps=2)
    size = sum(p.nbytes for p in blocks().parameters())
    assert 4 * size <= found.peak_bytes <= 4.3 * size  # weights, gradients, two moments
    assert found.steps == 2
    assert found.seconds_per_step > 0


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_a_model_that_is_made_in_16_bits_is_predicted(precision: str) -> None:
    """Every precision but the true ones makes it float32 again."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(32, 256), nn.BatchNorm1d(256), nn.Linear(256, 10)).bfloat16()

    predicted, measured = (
        f(build, batch(16), config(batch_size=16, precision=precision), prepare=setup, loss=LOSS)
        for f in (predict, measure)
    )
    assert predicted.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.01)
