import errno
import random
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from qtool.artifacts import atomic_path
from qtool.errors import QtoolError
from qtool.models.specs import load_weights
from qtool.steps import checkpoint

leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
)
trees = st.recursive(
    leaves,
    lambda children: (
        st.lists(children, max_size=3)
        | st.tuples(children, children)
        | st.dictionaries(st.text(max_size=5) | st.integers(), children, max_size=3)
    ),
    max_leaves=8,
)


@given(trees)
def test_trees_come_back_equal(tree):
    tensors = {}
    assert checkpoint._decode(checkpoint._encode(tree, "", tensors, {}), tensors) == tree


def test_tensors_come_back_bit_for_bit(tmp_path):
    tree = {
        "last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "part": torch.arange(10)[3:7],
        "strided": torch.arange(12).view(3, 4)[:, ::2],
        "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
        "empty": torch.empty(0, 3),
        "odd": torch.tensor([float("nan"), -0.0, float("inf")], dtype=torch.float16),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "list": [torch.tensor(True), 1],
        7: "seven",
    }
    path = tmp_path / "x.safetensors"
    checkpoint.save_tree(path, tree)
    back = checkpoint.load_tree(path)
    assert list(back) == list(tree)
    for name in ("last", "part", "strided", "scalar", "empty", "bytes"):
        assert torch.equal(back[name], tree[name])
        assert back[name].dtype == tree[name].dtype
    assert back["last"].stride() == tree["last"].stride(), "fused optimizers need moments laid out as parameters"
    assert torch.equal(back["odd"].view(torch.int16), tree["odd"].view(torch.int16))
    assert back["list"] == [torch.tensor(True), 1]
    assert back[7] == "seven"


def test_shared_tensors_stay_shared(tmp_path):
    weight = torch.randn(3, 3)
    checkpoint.save_tree(tmp_path / "x.safetensors", {"a": weight, "b": weight, "c": weight.clone()})
    back = checkpoint.load_tree(tmp_path / "x.safetensors")
    assert back["a"].data_ptr() == back["b"].data_ptr() != back["c"].data_ptr()
    assert len(load_file(tmp_path / "x.safetensors")) == 2


def test_overlapping_parts_of_one_storage(tmp_path):
    base = torch.arange(6.0)
    checkpoint.save_tree(tmp_path / "x.safetensors", {"a": base[:4], "b": base[2:], "c": base})
    back = checkpoint.load_tree(tmp_path / "x.safetensors")
    assert [back[name].tolist() for name in "abc"] == [[0, 1, 2, 3], [2, 3, 4, 5], [0, 1, 2, 3, 4, 5]]


def test_a_subclass_is_stored_as_its_parts(tmp_path):
    state = pytest.importorskip("torchao.optim.subclass_8bit").OptimState8bit
    checkpoint.register_tensor_class(state)
    moment = state.zeros((4, 256), signed=True, block_size=256)
    moment.codes.random_(0, 255)
    checkpoint.save_tree(tmp_path / "x.safetensors", {"m": moment})
    back = checkpoint.load_tree(tmp_path / "x.safetensors")["m"]
    assert type(back) is state
    assert torch.equal(back.codes, moment.codes)
    assert torch.equal(back.dequantize(), moment.dequantize())


def test_a_bit_that_flips_anywhere_changes_nothing_unseen(tmp_path):
    path = tmp_path / "x.safetensors"
    tree = {"a": torch.arange(3.0), "b": torch.zeros(2, dtype=torch.bfloat16), "none": torch.empty(0), "step": 12}
    checkpoint.save_tree(path, tree)
    whole = path.read_bytes()
    for at, byte in enumerate(whole):
        path.write_bytes(whole[:at] + bytes([byte ^ 0x10]) + whole[at + 1 :])
        try:
            found = checkpoint.load_tree(path)
        except QtoolError:
            continue
        assert str(found) == str(tree), "of another name of the checksum, say, nothing is read"


@pytest.mark.parametrize("tree", [{"f": lambda: 0}, [object()], {(1, 2): 3}])
def test_code_and_objects_cannot_be_stored(tree, tmp_path):
    with pytest.raises(TypeError):
        checkpoint.save_tree(tmp_path / "x.safetensors", tree)
    assert not list(tmp_path.iterdir())


def test_damaged_and_foreign_files_are_errors(tmp_path):
    path = tmp_path / "x.safetensors"
    checkpoint.save_tree(path, {"a": torch.ones(100)})
    whole = path.read_bytes()
    for content in (whole[:-20], whole[:10], b"", b"\x80\x04pickle"):
        path.write_bytes(content)
        with pytest.raises(QtoolError, match="whole checkpoint"):
            checkpoint.load_tree(path)
    save_file({"a": torch.ones(1)}, path)
    with pytest.raises(QtoolError, match="whole checkpoint"):
        checkpoint.load_tree(path)


def test_a_full_disk_keeps_the_old_checkpoint(tmp_path, monkeypatch):
    first = checkpoint.commit(tmp_path, 5, {"a": 1})

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(QtoolError, match=r"No space left.*make room"):
        checkpoint.commit(tmp_path, 6, {"a": 2})
    assert list(tmp_path.iterdir()) == [first]
    assert checkpoint.latest(tmp_path) == first


@pytest.mark.skipif(sys.platform == "win32", reason="needs a limit of file sizes")
def test_weights_that_the_disk_does_not_take_are_told_as_those_of_any_file(tmp_path):
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        with pytest.raises(OSError, match="File too large") as caught, atomic_path(tmp_path / "a.bin") as path:
            checkpoint.save_weights(path, nn.Linear(100, 100))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(tmp_path / "a.bin"))
    assert not list(tmp_path.iterdir())


def test_commit_keeps_the_latest_alone(tmp_path):
    (tmp_path / "best.safetensors").touch()
    for step in (9, 10, 100):
        path = checkpoint.commit(tmp_path, step, {"step": step})
    assert checkpoint.latest(tmp_path) == path
    assert sorted(p.name for p in tmp_path.iterdir()) == ["best.safetensors", path.name]
    assert checkpoint.latest(tmp_path / "nowhere") is None


def draw():
    return random.random(), np.random.rand(), torch.rand(1).item()


class Collecting(nn.Linear):
    """Keeps what it has seen: one buffer grows, one comes into being."""

    def __init__(self):
        super().__init__(4, 2)
        self.register_buffer("seen", torch.zeros(0, 4))
        self.register_buffer("last", None)

    def forward(self, x):
        self.seen, self.last = torch.cat([self.seen, x]), x.clone()
        return super().forward(x)


def test_buffers_that_have_grown_come_back(tmp_path):
    model, again, files = Collecting(), Collecting(), checkpoint.Files()
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (model, again)]
    model(torch.randn(3, 4))
    path = files.commit(tmp_path, 1, {}, model, optimizers[0])
    files.restore(files.read(path), again, optimizers[1])
    assert again.seen.equal(model.seen)
    assert again.last.equal(model.last)
    files.keep_best(tmp_path, model)
    model(torch.randn(3, 4))
    files.take_best(tmp_path, model)
    assert model.seen.equal(again.seen)
    kept = checkpoint.copied(model)
    model(torch.randn(3, 4))
    checkpoint.put_back(model, kept)
    assert model.seen.equal(again.seen)
    assert model.last.equal(again.last)


def test_generators_resume_from_a_stored_state(tmp_path):
    with checkpoint.seeded(1):
        draw()
        checkpoint.save_tree(tmp_path / "x.safetensors", checkpoint.rng_state())
        expected = draw()
        draw()
        checkpoint.set_rng_state(checkpoint.load_tree(tmp_path / "x.safetensors"))
        assert draw() == expected


def test_seeding_is_repeatable_and_leaves_the_caller_alone():
    before = checkpoint.rng_state()
    draws = []
    for _ in range(2):
        with checkpoint.seeded(7):
            draws.append(draw())
    assert draws[0] == draws[1]
    assert checkpoint.rng_state()["python"] == before["python"]
    assert torch.equal(torch.get_rng_state(), before["torch"])
    assert torch.equal(checkpoint.rng_state()["numpy"][1], before["numpy"][1])


def test_a_machine_with_fewer_gpus_takes_the_generators_that_it_has(monkeypatch):
    told = []
    state = checkpoint.rng_state() | {"cuda": ["first", "second"]}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", told.append)
    checkpoint.set_rng_state(state)
    assert told == [["first"]]


def test_a_buffer_that_a_pass_has_made_is_forgotten_with_it():
    model = nn.Module()
    model.register_buffer("mean", torch.zeros(2))
    model.register_buffer("seen", None)
    restore = checkpoint.restorer(model, model.buffers())
    model.seen = torch.ones(2)
    model.mean += 1
    restore()
    assert model.seen is None
    assert torch.equal(model.mean, torch.zeros(2))


class Views(nn.Module):
    """A weight with two names and a transposed one, a buffer that repeats its memory, a part of another."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.register_buffer("turned", self.first.weight.detach().t())
        self.register_buffer("repeated", torch.ones(1).expand(4))
        self.register_buffer("part", torch.arange(6.0)[2:4])


def test_views_of_one_memory_are_stored_apart(tmp_path):
    model = Views()
    checkpoint.save_tree(tmp_path / "tree.safetensors", model.state_dict())
    checkpoint.save_weights(tmp_path / "weights.safetensors", model)
    tree, weights = (checkpoint.load_tree(tmp_path / "tree.safetensors"), load_file(tmp_path / "weights.safetensors"))
    for name, value in model.state_dict().items():
        assert torch.equal(tree[name], value), name
        assert name == "second.weight" or torch.equal(weights[name], value), name
    assert "second.weight" not in weights
    assert tree["second.weight"].data_ptr() == tree["first.weight"].data_ptr()
    fresh = Views()
    fresh.repeated = torch.zeros(4)
    load_weights(fresh, tmp_path / "weights.safetensors")
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in fresh.state_dict().items())
