import errno
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from qtool.errors import QtoolError
from qtool.models.specs import load_weights
from qtool.steps import trees
from qtool.system.files import atomic_path

leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
)


values = st.recursive(
    leaves,
    lambda children: (
        st.lists(children, max_size=3)
        | st.tuples(children, children)
        | st.dictionaries(st.text(max_size=5) | st.integers(), children, max_size=3)
    ),
    max_leaves=8,
)


@given(values)
def test_trees_come_back_equal(tree):
    tensors = {}
    assert trees._decode(trees._encode(tree, "", tensors, {}), tensors) == tree


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
    trees.save_tree(path, tree)
    back = trees.load_tree(path)
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
    trees.save_tree(tmp_path / "x.safetensors", {"a": weight, "b": weight, "c": weight.clone()})
    back = trees.load_tree(tmp_path / "x.safetensors")
    assert back["a"].data_ptr() == back["b"].data_ptr() != back["c"].data_ptr()
    assert len(load_file(tmp_path / "x.safetensors")) == 2


def test_overlapping_parts_of_one_storage(tmp_path):
    base = torch.arange(6.0)
    trees.save_tree(tmp_path / "x.safetensors", {"a": base[:4], "b": base[2:], "c": base})
    back = trees.load_tree(tmp_path / "x.safetensors")
    assert [back[name].tolist() for name in "abc"] == [[0, 1, 2, 3], [2, 3, 4, 5], [0, 1, 2, 3, 4, 5]]


def test_a_subclass_is_stored_as_its_parts(tmp_path):
    state = pytest.importorskip("torchao.optim.subclass_8bit").OptimState8bit
    trees.register_tensor_class(state)
    moment = state.zeros((4, 256), signed=True, block_size=256)
    moment.codes.random_(0, 255)
    trees.save_tree(tmp_path / "x.safetensors", {"m": moment})
    back = trees.load_tree(tmp_path / "x.safetensors")["m"]
    assert type(back) is state
    assert torch.equal(back.codes, moment.codes)
    assert torch.equal(back.dequantize(), moment.dequantize())


def test_a_bit_that_flips_anywhere_changes_nothing_unseen(tmp_path):
    path = tmp_path / "x.safetensors"
    tree = {"a": torch.arange(3.0), "b": torch.zeros(2, dtype=torch.bfloat16), "none": torch.empty(0), "step": 12}
    trees.save_tree(path, tree)
    whole = path.read_bytes()
    for at, byte in enumerate(whole):
        path.write_bytes(whole[:at] + bytes([byte ^ 0x10]) + whole[at + 1 :])
        try:
            found = trees.load_tree(path)
        except QtoolError:
            continue
        assert str(found) == str(tree), "of another name of the checksum, say, nothing is read"


@pytest.mark.parametrize("tree", [{"f": lambda: 0}, [object()], {(1, 2): 3}])
def test_code_and_objects_cannot_be_stored(tree, tmp_path):
    with pytest.raises(TypeError):
        trees.save_tree(tmp_path / "x.safetensors", tree)
    assert not list(tmp_path.iterdir())


def test_damaged_and_foreign_files_are_errors(tmp_path):
    path = tmp_path / "x.safetensors"
    trees.save_tree(path, {"a": torch.ones(100)})
    whole = path.read_bytes()
    for content in (whole[:-20], whole[:10], b"", b"\x80\x04pickle"):
        path.write_bytes(content)
        with pytest.raises(QtoolError, match="whole checkpoint"):
            trees.load_tree(path)
    save_file({"a": torch.ones(1)}, path)
    with pytest.raises(QtoolError, match="whole checkpoint"):
        trees.load_tree(path)


@pytest.mark.skipif(sys.platform == "win32", reason="needs a limit of file sizes")
def test_weights_that_the_disk_does_not_take_are_told_as_those_of_any_file(tmp_path):
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        with pytest.raises(OSError, match="File too large") as caught, atomic_path(tmp_path / "a.bin") as path:
            trees.save_weights(path, nn.Linear(100, 100))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(tmp_path / "a.bin"))
    assert not list(tmp_path.iterdir())


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
    trees.save_tree(tmp_path / "tree.safetensors", model.state_dict())
    trees.save_weights(tmp_path / "weights.safetensors", model)
    tree, weights = (trees.load_tree(tmp_path / "tree.safetensors"), load_file(tmp_path / "weights.safetensors"))
    for name, value in model.state_dict().items():
        assert torch.equal(tree[name], value), name
        assert name == "second.weight" or torch.equal(weights[name], value), name
    assert "second.weight" not in weights
    assert tree["second.weight"].data_ptr() == tree["first.weight"].data_ptr()
    fresh = Views()
    fresh.repeated = torch.zeros(4)
    load_weights(fresh, tmp_path / "weights.safetensors")
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in fresh.state_dict().items())
