"""A compiled model's buffers: counted by hand on a small graph, and the peak beside what a compiled step allocates."""

from __future__ import annotations

import pytest
import torch
from nets import FeedForward
from torch import nn
from torch._functorch import partitioners
from torch._subclasses.fake_tensor import FakeTensorMode

from qtool.errors import QtoolError
from qtool.memory import buffers, compiled
from qtool.memory.compiled import capture
from qtool.memory.predict import predict
from qtool.memory.scratch import Scratch
from qtool.memory.tracker import Prediction
from qtool.recipe import TrainConfig
from qtool.steps.loop import task_loss
from qtool.tasks import load_task
from qtool.training.techniques import setup

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
LOSS = task_loss(load_task("classification"))


def test_what_is_kept_for_the_backward_pass_is_what_the_partitioner_keeps():
    """Of a block: what goes into it, the normalised, the product before the activation and after it, the gradients."""
    size, width = 512, 64
    net = nn.Sequential(nn.Linear(32, width), FeedForward(width), nn.Linear(width, 10))
    batch = torch.randn(size, 32), torch.zeros(size, dtype=torch.int64)
    config = TrainConfig(device="cpu", batch_size=size, compile=True)
    found = predict(lambda: net, batch, config, prepare=setup, loss=LOSS)
    unit = size * width * 4
    weights = sum(p.nbytes for p in net.parameters())
    assert found.parts["parameters"] == weights
    assert 9 * unit < found.peak_bytes - 3 * weights < 17 * unit
    assert all(p.grad is None for p in net.parameters())


class Centre(nn.Module):
    """Reads a buffer that it moves."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(64))

    def forward(self, x):
        y = x - self.mean
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return torch.sin(y) * torch.cos(y * 2)


def test_what_is_computed_from_a_buffer_that_moves_is_kept_and_what_follows_from_it_computed_again():
    """Of each pair of layers: what is left of the first's output, and what goes into the next."""
    size = 512
    net = nn.Sequential(nn.Linear(32, 64), Centre(), nn.Linear(64, 64), Centre(), nn.Linear(64, 10))
    batch = torch.randn(size, 32), torch.zeros(size, dtype=torch.int64)
    config = TrainConfig(device="cpu", batch_size=size, compile=True)
    found = predict(lambda: net, batch, config, prepare=setup, loss=LOSS)
    assert found.parts["activations"] == pytest.approx(4 * size * 64 * 4, rel=1e-3)
    assert not any(bool(buffer.any()) for buffer in net.buffers())


def test_any_number_of_captures_of_any_size_are_independent():
    """More than the eight of one function that torch leaves it at."""
    peaks = []
    for size in (*range(2, 11), 2):
        batch = torch.randn(size, 32), torch.zeros(size, dtype=torch.int64)
        config = TrainConfig(device="cpu", batch_size=size, compile=True)
        net = nn.Linear(32, 10)
        peaks.append(predict(lambda net=net: net, batch, config, prepare=setup, loss=LOSS).peak_bytes)
    assert peaks[-1] == peaks[0] < peaks[-2]


@pytest.mark.parametrize(
    ("asks", "got"), [(False, "2 graphs"), (True, r"'aten\._local_scalar_dense\.default', which asks for a value")]
)
def test_a_model_that_is_captured_in_pieces_is_refused(asks, got):
    """``nn.TransformerEncoder`` asks whether its mask is a causal one."""

    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            if not asks or (torch.arange(2) < 2).all():
                torch._dynamo.graph_break()
            return self.linear(y[:, :1].expand(-1, 32))

    batch = torch.randn(4, 32), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(QtoolError, match=f"--compile: .* captured whole; got {got}.*; leave it out"):
        predict(Broken, batch, TrainConfig(device="cpu", batch_size=4, compile=True), prepare=setup, loss=LOSS)


def test_what_a_compiled_product_takes_for_itself_is_counted(monkeypatch):
    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    monkeypatch.setattr(Scratch, "of", lambda scratch, function, args, kwargs: 0)
    without = predicted(net, 16, compile=True).peak_bytes
    monkeypatch.setattr(Scratch, "of", lambda scratch, function, *_: (function is torch.ops.aten.mm.default) * 10**6)
    assert predicted(net, 16, compile=True).peak_bytes == pytest.approx(without + 10**6, rel=0.05)


def blocks(count: int = 4, width: int = 64) -> nn.Module:
    return nn.Sequential(nn.Linear(32, width), *(FeedForward(width) for _ in range(count)), nn.Linear(width, 10))


def predicted(net: nn.Module, size: int = 512, **options) -> Prediction:
    batch = torch.randn(size, 32), torch.zeros(size, dtype=torch.int64)
    config = TrainConfig(device="cpu", batch_size=size, **options)
    return predict(lambda: net, batch, config, prepare=setup, loss=LOSS)


INSIDE = {"step_in_backward": True, "grad_clip": None}
SHARDED = {"strategy": "fsdp", "devices": 2}


@pytest.mark.parametrize("options", [INSIDE, SHARDED], ids=["step in backward", "fsdp"])
def test_of_equal_blocks_one_is_captured_and_each_allocates(options, monkeypatch):
    captured = []
    monkeypatch.setattr(compiled, "capture", lambda *given: captured.append(given) or capture(*given))
    few, many = (predicted(blocks(count), compile=True, **options) for count in (2, 3))
    assert len(captured) == 2  # one for each net
    share = options.get("devices", 1)
    grown = many.peak_bytes - few.peak_bytes
    kept = 512 // share * 64 * 4  # one value for each feature of each sample
    weights = 3 * sum(p.nbytes for p in blocks()[1].parameters()) / share  # with two moments
    assert weights + 3 * kept < grown < weights + 13 * kept  # the block's input, and what its four-fold inside keeps


class Rectified(FeedForward):
    def forward(self, x):
        return x + self.down(torch.relu(self.up(torch.relu(x))))


@pytest.mark.parametrize(("block", "values"), [(FeedForward, 10), (Rectified, 5)])
def test_a_block_s_input_is_held_where_its_backward_pass_reads_it(block, values):
    """The input, its norm and twice its four-fold inside; of ReLU the results are enough, two in all."""
    few, many = (
        predicted(nn.Sequential(nn.Linear(32, 64), *(block(64) for _ in range(count))), compile=True, **INSIDE)
        for count in (2, 4)
    )
    weights = 3 * sum(parameter.nbytes for parameter in block(64).parameters())
    grown = (many.peak_bytes - few.peak_bytes) / 2 - weights
    assert grown == pytest.approx(values * 512 * 64 * 4, rel=0.02)


def test_blocks_of_other_widths_and_of_other_inputs_are_captured_each(monkeypatch):
    captured = []
    monkeypatch.setattr(compiled, "capture", lambda *given: captured.append(given[1:3]) or capture(*given))
    layers = [FeedForward(32) for _ in range(4)]
    layers[2].up, layers[2].down = nn.Linear(32, 48), nn.Linear(48, 32)
    net = nn.Sequential(nn.Linear(32, 32), nn.Unflatten(0, (-1, 2)), *layers, nn.Flatten(0, 1), FeedForward(32))
    predicted(net, 8, compile=True, **INSIDE)
    seen = [(block.up.out_features, values[0].shape) for block, values in captured]
    assert seen == [(128, (4, 2, 32)), (48, (4, 2, 32)), (128, (8, 32))]


@pytest.mark.parametrize("options", [INSIDE, SHARDED], ids=["step in backward", "fsdp"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_net_compiled_block_by_block_takes_about_what_it_takes_uncompiled(options, checkpointing):
    plain, inside = (
        predicted(blocks(2), compile=compile, activation_checkpointing=checkpointing, **options)
        for compile in (False, True)
    )
    assert inside.peak_bytes == pytest.approx(plain.peak_bytes, rel=0.1)


class Attending(nn.Module):
    """Within sequences of 64; torch takes attention for what draws numbers, which for dropout it does."""

    def __init__(self, width):
        super().__init__()
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        query, key, value = self.project(x).view(-1, 64, 3, 1, x.shape[-1]).transpose(1, 3).unbind(2)
        return x + self.out(nn.functional.scaled_dot_product_attention(query, key, value).reshape(x.shape))


def test_what_draws_within_a_checkpointed_block_is_run_again_from_a_saved_state(monkeypatch):
    """On a GPU too, whose generators would else be inputs of both graphs. Its results take memory the second time too:
    here the mixed values and the logarithms of the sums of weights, and then three gradients."""
    captured, states, partition = [], [], partitioners.min_cut_rematerialization_partition

    def watched(*args, **kwargs):
        states.append(not partitioners.config.graphsafe_rng_functionalization)
        return partition(*args, **kwargs)

    monkeypatch.setattr(partitioners, "min_cut_rematerialization_partition", watched)
    monkeypatch.setattr(compiled, "capture", lambda *given: captured.append(capture(*given)) or captured[-1])
    net = nn.Sequential(nn.Linear(32, 64), Attending(64), Attending(64), nn.Linear(64, 10))
    predicted(net, compile=True, activation_checkpointing=True, **INSIDE)
    parts = [
        [b.size for b in made.buffers if "getitem" in b.name] for made in (captured[0].forward, captured[0].backward)
    ]
    mixed, sums = 512 * 64 * 4, 512 * 4
    assert (len(captured), states) == (1, [True])
    assert parts == [[mixed], [mixed, sums, mixed, mixed, mixed]]


def test_a_sharded_block_with_batch_norm_is_refused():
    net = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32)) for _ in range(2)), nn.Linear(32, 10))
    with pytest.raises(QtoolError, match=r"'0\.1', which is sharded by itself within its block"):
        predicted(net, compile=True, **SHARDED)


def test_outputs_that_are_no_tensors_are_passed_on():
    """As transformers' models return their cache beside the logits."""

    class Told(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 10)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None, str]:
            return self.linear(x), None, "told"

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.told = Told()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logits, nothing, word = self.told(x)
            assert (nothing, word) == (None, "told")
            return logits

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        net, x = Net(), torch.empty(4, 32)
        net.told.forward = compiled.StandIn(net.told.forward, net.told, mode, Scratch(), {})
        assert net(x).shape == (4, 10)
        net(x).sum().backward()
        assert net.told.linear.weight.grad.shape == (10, 32)


@pytest.mark.parametrize(("channels_last", "backward"), [(True, False), (False, False), (False, True)])
def test_what_is_kept_of_a_convolution_lies_as_the_compiler_lays_it_out(channels_last, backward, monkeypatch):
    """Channels-last whatever came, the weight in 16 bits too, which decides how its gradient is computed.

    Until torch 2.15 the compiler lays no ``backward`` pass out by itself.
    """
    monkeypatch.setattr(buffers, "lays_out", lambda graph: backward)
    given = []

    def of(scratch, function, args, kwargs):
        if function is torch.ops.aten.convolution_backward.default:
            given.append([value.stride() for value in args[:3]])
        return 0

    monkeypatch.setattr(Scratch, "of", of)
    net = nn.Sequential(nn.Conv2d(4, 4, 3, groups=4), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=4), nn.Flatten())
    batch = torch.randn(2, 4, 6, 6), torch.zeros(2, dtype=torch.int64)
    options = {"precision": "bf16-mixed", "channels_last": channels_last, "compile": True}
    predict(lambda: net, batch, TrainConfig(device="cpu", batch_size=2, **options), prepare=setup, loss=LOSS)
    assert given[-2] == [(16, 1, 8, 4), (64, 1, 16, 4) if backward else (64, 4, 16, 1), (9, 1, 3, 1)]
