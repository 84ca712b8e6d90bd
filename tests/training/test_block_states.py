import bitsandbytes.functional as reference
import pytest
import torch

from qtool.system import processes
from qtool.training import block_states

BOOKS = {"state1": reference.create_dynamic_map(True), "state2": reference.create_dynamic_map(False)}


@pytest.fixture
def cut(monkeypatch):
    """``cut(whole, world)``: a state of a weight as so many processes have it; ``cut.back``: as others read it."""

    def as_(rank, world):
        monkeypatch.setattr(processes, "rank", lambda: rank)
        monkeypatch.setattr(processes, "size", lambda: world)

    def parts(value, world):
        chunks = list(value.chunk(world))
        return chunks + [value[:0]] * (world - len(chunks))

    monkeypatch.setattr(processes, "local", lambda p: parts(p, processes.size())[processes.rank()])

    def quantized(whole, world):
        trees = []
        for part in parts(whole, world):
            state = {"step": 7}
            for key, book in BOOKS.items():
                values = part if key == "state1" else part.square()
                if part.numel() < block_states.SMALLEST:
                    state[key] = values
                    continue
                codes, kept = reference.quantize_blockwise(values.flatten(), code=book, blocksize=256)
                state |= {key: codes.view(part.shape), f"absmax{key[-1]}": kept.absmax, f"qmap{key[-1]}": book}
            trees.append({"state": {0: {"nested": state}} if part.numel() else {}, "param_groups": [{"lr": 0.1}]})
        return trees

    def back(trees, weight, world):
        found = []
        for rank in range(world):
            as_(rank, world)
            found.append(block_states.cut_anew(trees, [weight]))
        return found

    quantized.back = back
    return quantized


def values(states, key):
    parts = []
    for state in (tree["state"].get(0, {}) for tree in states):
        if f"absmax{key[-1]}" in state:
            parts.append(
                block_states.dequantize(state[key].flatten(), state[f"absmax{key[-1]}"], state[f"qmap{key[-1]}"])
            )
        elif state:
            parts.append(state[key].flatten())
    return torch.cat(parts)


def test_blocks_are_read_and_written_as_the_library_has_them():
    whole = torch.randn(5000)
    for key, book in BOOKS.items():
        given = whole if key == "state1" else whole.square()
        codes, scales = block_states.quantize(given, book)
        theirs, kept = reference.quantize_blockwise(given, code=book, blocksize=256)
        assert torch.equal(scales, kept.absmax)
        back = reference.dequantize_blockwise(theirs, kept)
        assert torch.allclose(block_states.dequantize(theirs, scales, book), back)
        error = (block_states.dequantize(codes, scales, book) - given).abs()
        assert (error <= (back - given).abs() + 1e-6).all(), "the nearest value of the book, which theirs is nearly"


def test_a_second_moment_that_is_not_zero_does_not_become_zero():
    values = torch.tensor([1.0, 1e-12, 0.0, 0.3])
    codes, _ = block_states.quantize(values, BOOKS["state2"])
    assert codes[1:3].tolist() == [1, 0]
    signed, _ = block_states.quantize(values, BOOKS["state1"])
    assert BOOKS["state1"][signed[1].int()] == 0


@pytest.mark.parametrize(("rows", "columns"), [(130, 72), (128, 64), (3, 5000), (70, 100)])
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 3), (4, 2)])
def test_moments_come_through_another_number_of_processes(cut, rows, columns, before, after):
    weight = torch.randn(rows, columns)
    trees = cut(weight, before)
    found = cut.back(trees, weight, after)
    flat = [{"state": {i: s["nested"] for i, s in t["state"].items()}} for t in trees]
    for key in BOOKS:
        old, new = values(flat, key), values(found, key)
        step = 0.02 if key == "state1" else 0.01
        assert new.shape == old.shape
        assert ((new - old).abs() <= step * old.abs().max()).all()
    assert all(tree["state"][0]["step"] == 7 for tree in found if tree["state"])
    assert found[0]["param_groups"] == [{"lr": 0.1}]


def test_blocks_whose_ends_have_not_moved_are_kept(cut):
    weight = torch.randn(128, 256)
    trees = cut(weight, 4)
    found = cut.back(trees, weight, 2)
    codes = torch.cat([tree["state"][0]["nested"]["state1"] for tree in trees])
    scales = torch.cat([tree["state"][0]["nested"]["absmax1"] for tree in trees])
    assert torch.equal(torch.cat([tree["state"][0]["state1"] for tree in found]), codes)
    assert torch.equal(torch.cat([tree["state"][0]["absmax1"] for tree in found]), scales)


def test_what_has_one_number_per_weight_is_cut_like_the_weight(cut):
    weight = torch.randn(7, 3)
    pieces = weight.bfloat16().chunk(2)
    trees = [{"inner": {"state": {}}, "state": {0: {"compensation": piece}}} for piece in pieces]
    found = cut.back(trees, weight, 3)
    assert torch.equal(torch.cat([tree["state"][0]["compensation"] for tree in found]), weight.bfloat16())
