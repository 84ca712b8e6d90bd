import gc
import random
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from qtool.errors import QtoolError, UsageError
from qtool.recipe import TrainConfig
from qtool.system.generators import seeded
from qtool.training.checkpointing import blocks
from qtool.training.techniques import setup


def saved_bytes(run_steps, net, **options):
    """Bytes that autograd keeps for one backward pass."""
    total = 0

    def pack(tensor):
        nonlocal total
        total += tensor.nbytes
        return tensor

    def watch(made):
        made.around.insert(0, lambda: torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t))

    run_steps(net, 1, watch, **options)
    return total


def test_nothing_changes_but_memory(run_steps, same_state, net):
    """Bit for bit: dropout draws the same numbers again, and batch-norm statistics move once."""
    plain = run_steps(net)
    saving = run_steps(net, activation_checkpointing=True)
    assert saving.losses == plain.losses
    assert same_state(saving.model, plain.model)
    assert saved_bytes(run_steps, net, activation_checkpointing=True) < 0.6 * saved_bytes(run_steps, net)


class CrossAttending(nn.Module):
    """A block that has its keys from what is remembered, once they are there, as an encoder-decoder's."""

    def __init__(self, place):
        super().__init__()
        self.place, self.query, self.key = place, nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x, memory, kept):
        if kept is None or self.place not in kept:
            key = self.key(memory).tanh()
            if kept is not None:
                kept[self.place] = key
        else:
            key = kept[self.place]
        return x + (self.query(x) @ key.T).softmax(-1) @ key


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(use_cache=True)
        self.layers = nn.ModuleList([CrossAttending(place) for place in range(2)])

    def forward(self, x):
        kept, memory = {} if self.config.use_cache else None, x * 2
        for layer in self.layers:
            x = layer(x, memory, kept)
        return x


def test_blocks_that_remember_keys_for_generating_do_without_while_they_train():
    gradients = []
    for wanted in (False, True):
        torch.manual_seed(0)
        model = Decoder()
        with setup(model, TrainConfig(device="cpu", activation_checkpointing=wanted)) as made:
            made.model(torch.linspace(-1, 1, 64).view(4, 16)).square().sum().backward()
        assert model.config.use_cache is True, "generating afterwards remembers again"
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_under_autocast_and_with_micro_batches(run_steps, same_state, net):
    options = {"precision": "bf16-mixed", "micro_batches": 3}
    assert same_state(run_steps(net, **options).model, run_steps(net, activation_checkpointing=True, **options).model)


class Watched(nn.Module):
    """A block of three products, the last of which keeps its input and not its output."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.seen = []

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            self.seen.append((i, torch.is_autocast_enabled("cpu")))
            x = layer(torch.tanh(x))
        self.seen.append("end")
        return x


def watched():
    torch.manual_seed(0)
    model = nn.Sequential(Watched(), Watched())
    return setup(model, TrainConfig(device="cpu", activation_checkpointing=True)), model[0]


def test_a_block_is_computed_again_up_to_the_last_that_it_kept_and_as_it_was_before():
    made, block = watched()
    with made:
        with torch.autocast("cpu", torch.bfloat16):
            y = made.model(torch.randn(2, 4)).float().sum()
        assert block.seen == [(0, True), (1, True), (2, True), "end"]
        del block.seen[:]
        y.backward()
        assert block.seen == [(0, True), (1, True), (2, True)]
        y = made.model(torch.randn(2, 4)).sum()
        del block.seen[:]
        with torch.autocast("cpu", torch.bfloat16):
            y.backward()
        assert block.seen == [(0, False), (1, False), (2, False)]


class Paired(nn.Module):
    """A block that is given a tuple, and tells whether autocast is on for a GPU."""

    def __init__(self):
        super().__init__()
        self.layer, self.seen = nn.Linear(4, 4), []

    def forward(self, pair):
        self.seen.append(torch.is_autocast_enabled("cuda"))
        return self.layer(torch.tanh(pair[0])), pair[1]


def test_autocast_of_a_gpu_is_on_again_whatever_the_block_is_given(monkeypatch):
    monkeypatch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
    model = nn.Sequential(Paired(), Paired())
    with setup(model, TrainConfig(device="cpu", activation_checkpointing=True)) as made:
        with torch.autocast("cuda", torch.float16):
            y = made.model((torch.randn(2, 4), torch.ones(2)))[0].sum()
        y.backward()
    assert model[0].seen == [True, True]


class Codebook(nn.Module):
    """A block whose layer is normed by its spectrum, and which moves by what it has seen of its inputs before."""

    def __init__(self):
        super().__init__()
        self.layer = parametrizations.spectral_norm(nn.Linear(16, 16))
        self.register_buffer("seen", torch.zeros(16))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        with torch.no_grad():
            self.seen.mul_(0.9).add_(x.mean(0))
            self.count = self.count + 1
        return torch.tanh(self.layer(x - self.seen) / self.count).square()


class Centre(nn.Module):
    """Has no weights, and a buffer that 16 bits do not hold."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.full((16,), 0.1), persistent=False)

    def forward(self, x):
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return x - self.mean


class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.centre, self.layer = Centre(), nn.Linear(16, 16)

    def forward(self, x):
        return torch.tanh(self.layer(self.centre(x)))


class Late(nn.Module):
    """A block that begins to move in a later step: a buffer that it replaces and reads, and one that it counts in."""

    def __init__(self):
        super().__init__()
        self.layer, self.steps = nn.Linear(16, 16), 0
        self.register_buffer("mean", torch.ones(16))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        y = self.layer(x * self.mean)
        if self.steps > 0:
            self.mean = self.mean + x.detach().mean(0)
            self.count += 1
        return torch.tanh(y * self.mean)


class Reading(nn.BatchNorm1d):
    """A norm that reads the running statistics before it moves them, and after."""

    def forward(self, x):
        return super().forward(x * self.running_var) + self.running_mean


class Read(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(16, 16), Reading(16)

    def forward(self, x):
        return torch.tanh(self.norm(self.layer(x)))


@pytest.mark.parametrize(
    ("kind", "precision"), [(Codebook, "32-true"), (Centred, "bf16-true"), (Late, "32-true"), (Read, "32-true")]
)
def test_buffers_that_a_block_moves_are_as_they_were_when_it_is_computed_again(kind, precision, same_state):
    found, gradients = [], []
    for wanted in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), kind(), kind())
        with setup(model, TrainConfig(device="cpu", activation_checkpointing=wanted, precision=precision)) as made:
            for steps in range(3):
                for module in model.modules():
                    module.steps = steps
                made.model(made.place(torch.linspace(-1, 1, 64).view(4, 16))).square().sum().backward()
            gradients.append([p.grad for p in model.parameters()])
        found.append(model)
    assert same_state(*found)
    assert all(map(torch.equal, *(m.buffers() for m in found)))
    assert all(map(torch.equal, *gradients))


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.relu = nn.Linear(4, 4), nn.ReLU(inplace=True)

    def forward(self, x):
        return self.layer(self.relu(x))


class Chain(nn.Module):
    def __init__(self, by_name):
        super().__init__()
        self.first, self.blocks, self.by_name = nn.Linear(4, 4), nn.ModuleList([Inner(), Inner()]), by_name

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x=x) if self.by_name else block(x)
        return x


@pytest.mark.parametrize("by_name", [False, True])
def test_a_block_that_writes_over_its_input_is_refused(by_name):
    with setup(Chain(by_name), TrainConfig(device="cpu", activation_checkpointing=True)) as made:
        y = made.model(torch.randn(2, 4)).sum()
        with pytest.raises(QtoolError, match="one that writes over it; build activations with inplace=False"):
            y.backward()


def test_a_second_backward_pass_finds_what_the_first_did():
    made, block = watched()
    with made:
        x = torch.randn(2, 4, requires_grad=True)
        y = made.model(x).sum()
        first = torch.autograd.grad(y, x, retain_graph=True)
        assert torch.equal(first[0], torch.autograd.grad(y, x)[0])
        assert block.seen.count((0, False)) == 3


def test_a_block_that_does_not_do_the_same_twice_is_told():
    made, block = watched()
    with made:
        y = made.model(torch.randn(2, 4)).sum()
        del block.layers[2]
        with pytest.raises(QtoolError, match="does not do the same twice"):
            y.backward()


class Drawing(nn.Module):
    """A block that draws from a generator that is not torch's own."""

    def __init__(self, draw):
        super().__init__()
        self.layer, self.after, self.draw = nn.Linear(4, 4), nn.Linear(4, 4), draw
        self.noise = torch.Generator().manual_seed(1)

    def forward(self, x):
        return x + self.after(self.layer(x).tanh() * (1 + self.draw(self)))


DRAWS = {
    "Python": lambda block: random.random(),
    "numpy": lambda block: np.random.rand(),
    "its own": lambda block: torch.rand(4, generator=block.noise),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_whatever_a_block_draws_from_it_draws_the_same_again(draw):
    found = []
    for checkpointing in (False, True):
        with seeded(0):
            model = nn.Sequential(Drawing(draw), Drawing(draw))
            with setup(model, TrainConfig(device="cpu", activation_checkpointing=checkpointing)):
                for _ in range(2):
                    model(torch.ones(2, 4)).sum().backward()
            found.append([*(p.grad for p in model.parameters()), draw(model[0])])
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_nothing_outlives_the_graph():
    made, _ = watched()
    gc.disable()
    try:
        with made:
            x = torch.randn(2, 4)
            gone, y = weakref.ref(x), made.model(x).sum()
            del x
            assert gone() is not None
            y.backward()
            del y
            assert gone() is None
    finally:
        gc.enable()


def test_closing_leaves_the_model_as_it_was(run_steps):
    done = run_steps("convolutions", 1, activation_checkpointing=True)
    assert "forward" in vars(done.model[1])
    done.setup.close()
    assert "forward" not in vars(done.model[1])
    assert done.model[1].norm.momentum == 0.1


def test_closing_gives_back_a_forward_pass_that_a_block_has_of_its_own():
    """One that was put in the place of its class's."""
    model = Tower()
    for layer in model.layers:
        layer.forward = torch.tanh
    with setup(model, TrainConfig(device="cpu", activation_checkpointing=True)):
        assert model.layers[0].forward is not torch.tanh
    assert all(vars(layer)["forward"] is torch.tanh for layer in model.layers)


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(8, 2, 16) for _ in range(3)])
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Pair(nn.Module):
    """Two towers of one class: the towers are not the blocks, their layers are."""

    def __init__(self):
        super().__init__()
        self.one, self.two = Tower(), Tower()


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Sequential(nn.Linear(2, 2)), None
        self.a, self.b = Tower(), Tower()
        self.a.layers = self.b.layers = nn.Identity()
        self.a.head = nn.TransformerEncoderLayer(8, 2, 16)
        self.b.head = nn.Linear(1, 1)


def test_blocks_are_the_repeated_items_of_lists():
    assert list(blocks(Tower())) == ["layers.0", "layers.1", "layers.2"]
    assert list(blocks(Pair())) == [f"{tower}.layers.{i}" for tower in ("one", "two") for i in range(3)]


def test_blocks_of_stages_with_one_block_each(run_steps):
    net = nn.Sequential(*(nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16)) for _ in range(2)))
    assert list(blocks(net)) == ["0.0", "1.0"]


class Shared(nn.Module):
    """One block, with statistics and draws of its own, that stands in a list three times."""

    def __init__(self):
        super().__init__()
        self.items, self.head = nn.ModuleList([Residue()] * 3), nn.Linear(8, 4)

    def forward(self, x):
        for block in self.items:
            x = block(x)
        return self.head(x)


class Residue(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.2)

    def forward(self, x):
        return x + self.drop(torch.relu(self.norm(self.inner(x))))


@pytest.mark.parametrize("options", [{"activation_checkpointing": True}, {"strategy": "fsdp"}])
def test_one_block_that_stands_in_a_list_several_times_is_one(options, run_steps, same_state, monkeypatch):
    monkeypatch.setitem(run_steps.__globals__["NETS"], "shared", (Shared, (8,)))
    assert list(blocks(Shared())) == ["items.0"]
    plain, changed = run_steps("shared"), run_steps("shared", **options)
    assert changed.losses == plain.losses
    assert "strategy" in options or same_state(changed.model, plain.model)


class Normed(nn.Module):
    def __init__(self, parametrized):
        super().__init__()
        self.wide, self.narrow = (parametrized(nn.Linear(4, 4)) for _ in range(2))

    def forward(self, x):
        return self.narrow(torch.relu(self.wide(x)))


@pytest.mark.parametrize("normed", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_parametrizations_are_no_blocks_and_hide_none(normed):
    layers = nn.Sequential(*(normed(nn.Linear(4, 4)) for _ in range(3)))
    assert not blocks(layers)
    assert list(blocks(nn.Sequential(*(Normed(normed) for _ in range(2))))) == ["0", "1"]
    pairs = [nn.ModuleDict({"a": nn.Linear(2, 2)}) for _ in range(2)]
    assert not blocks(nn.ModuleList(pairs))  # which nobody calls


def test_repeated_modules_outside_lists_will_do():
    assert list(blocks(Named())) == ["a", "b"]


class Sequences(nn.Module):
    """Residual blocks that are plain sequences, one of which it takes apart."""

    def __init__(self):
        super().__init__()
        self.items = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 8))
            for _ in range(6)
        )

    def forward(self, x):
        for item in list(self.items)[:-1]:
            x = x + item(x)
        for layer in self.items[-1]:
            x = layer(x)
        return x


def test_sequences_side_by_side_are_checkpointed_where_there_are_no_other_blocks(run_steps, same_state, monkeypatch):
    monkeypatch.setitem(run_steps.__globals__["NETS"], "sequences", (Sequences, (8,)))
    plain, saving = run_steps("sequences"), run_steps("sequences", activation_checkpointing=True)
    assert saving.losses == plain.losses
    assert same_state(saving.model, plain.model)
    kept = saved_bytes(run_steps, "sequences", activation_checkpointing=True)
    assert kept < 0.6 * saved_bytes(run_steps, "sequences")
    assert not blocks(Sequences())


def test_a_model_without_blocks_is_refused():
    one = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Sequential(), nn.Linear(2, 2)])
    for model in (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), one):
        with pytest.raises(UsageError, match="repeated blocks"):
            setup(model, TrainConfig(device="cpu", activation_checkpointing=True))
