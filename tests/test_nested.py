from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qtool.errors import QtoolError
from qtool.nested import (
    Once,
    call,
    first,
    map_tensors,
    named,
    num_samples,
    per_sample,
    raw_bytes,
    split,
    tensors,
    thinned,
    to_float32,
)


def test_containers_keep_their_type():
    value = {"a": torch.ones(2), "b": (torch.zeros(2), [torch.ones(1)], 3)}
    doubled = map_tensors(lambda t: t * 2, value)
    assert doubled["a"].tolist() == [2, 2]
    assert isinstance(doubled["b"], tuple)
    assert isinstance(doubled["b"][1], list)
    assert doubled["b"][2] == 3
    assert len(list(tensors(value))) == 3


Pair = namedtuple("Pair", "x y")


@dataclass(frozen=True)
class Record:
    x: torch.Tensor
    note: str = "kept"


class Output(OrderedDict):
    """As those of transformers: an entry is an attribute too, and there is no ``update``."""

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def update(self, *_):
        raise AssertionError


def test_named_tuples_dataclasses_and_outputs_of_transformers_stay_what_they_are():
    output = Output()
    output["x"] = torch.ones(2)
    for value in (Pair(torch.ones(2), 3), Record(torch.ones(2)), output):
        doubled = map_tensors(lambda t: t * 2, value)
        assert type(doubled) is type(value)
        assert doubled.x.tolist() == [2, 2]
        assert value.x.tolist() == [1, 1]
        assert [t.tolist() for t in tensors(doubled)] == [[2, 2]]
    assert map_tensors(torch.neg, Record(torch.ones(2))).note == "kept"
    assert map_tensors(torch.neg, Pair(torch.ones(2), 3)).y == 3


@pytest.mark.parametrize(("size", "parts"), [(8, 3), (7, 7), (5, 2), (3, 1)])
def test_split_is_tensor_split_up_to_order(size, parts):
    pieces = split((torch.arange(size), {"x": torch.arange(size) * 10}), parts)
    assert torch.cat([p[0] for p in pieces]).tolist() == list(range(size))
    assert torch.cat([p[1]["x"] for p in pieces]).tolist() == [10 * i for i in range(size)]
    sizes = sorted(len(p[0]) for p in pieces)
    assert sizes == sorted(len(p) for p in torch.tensor_split(torch.arange(size), parts))


def test_split_leaves_scalars_alone():
    assert [p[1].item() for p in split((torch.arange(4), torch.tensor(5.0)), 2)] == [5.0, 5.0]


def test_split_cuts_a_list_of_samples_as_one():
    boxes = [{"boxes": torch.zeros(count, 4)} for count in (3, 0, 1, 4)]
    lengths = [torch.zeros(count) for count in (5, 2, 4, 4)]
    pieces = split((torch.arange(4), boxes, lengths, None, "text"), 2)
    assert [piece[0].tolist() for piece in pieces] == [[0, 1], [2, 3]]
    assert [[len(one["boxes"]) for one in piece[1]] for piece in pieces] == [[3, 0], [1, 4]]
    assert [[len(one) for one in piece[2]] for piece in pieces] == [[5, 2], [4, 4]]
    assert [piece[3:] for piece in pieces] == [(None, "text")] * 2
    two = split((torch.arange(2), [torch.arange(2), torch.arange(2) + 10]), 2)
    assert [[t.tolist() for t in piece[1]] for piece in two] == [[[0], [10]], [[1], [11]]]


def test_split_refuses_what_has_no_share_for_each_sample():
    with pytest.raises(QtoolError, match=r"tensors of 4 samples.*shape \(6, 6\)"):
        split({"x": torch.zeros(4, 6), "mask": torch.zeros(6, 6)}, 2)
    assert split({"x": torch.zeros(4, 6), "mask": torch.zeros(6, 6)}, 1)[0]["mask"].shape == (6, 6)


def test_num_samples():
    assert num_samples({"s": torch.tensor(1.0), "x": torch.zeros(3, 2)}) == 3
    with pytest.raises(ValueError, match="batch dimension"):
        num_samples((torch.tensor(1.0),))


def test_to_float32_touches_16_bit_floats_only():
    value = to_float32((torch.ones(1, dtype=torch.float16), torch.ones(1, dtype=torch.float64), torch.ones(1).long()))
    assert [t.dtype for t in value] == [torch.float32, torch.float64, torch.int64]


def test_call_spreads_arguments():
    def model(a, b=10):
        return a - b

    assert call(model, torch.tensor(3)).item() == -7
    assert call(model, (torch.tensor(3), torch.tensor(1))).item() == 2
    assert call(model, {"b": torch.tensor(1), "a": torch.tensor(3)}).item() == 2


def test_thinned_takes_the_same_share_of_each_batch() -> None:
    batches = [torch.arange(24), torch.arange(100, 108), torch.arange(200, 201)]
    assert [batch.tolist() for batch in thinned(iter(batches), 11)] == [[*range(6)], [100, 101], [200]]
    assert [batch.tolist() for batch in thinned(batches, 99)] == [batch.tolist() for batch in batches]
    assert thinned([], 4) == []
    assert [part.untyped_storage().nbytes() for part in thinned(batches, 11)] == [48, 16, 8]


def test_what_can_be_gone_through_once_leaves_a_share() -> None:
    once = Once(iter(torch.arange(40).split(4)), 10)
    assert torch.cat(list(once)).tolist() == list(range(40))
    assert [torch.cat(list(once)).tolist() for _ in range(2)] == [list(range(0, 40, 4))] * 2


def test_the_first_samples_are_read_and_given_again() -> None:
    once = Once(iter(torch.arange(40).split(4)), 10)
    for _ in range(2):
        assert torch.cat(first(once, 10)).tolist() == list(range(12))
    assert torch.cat(list(once)).tolist() == list(range(40))
    assert torch.cat(list(once)).tolist() == list(range(0, 40, 4))
    left = Once(iter(torch.arange(40).split(4)), 10)
    assert len(first(left, 20)) == 5
    assert torch.cat(list(left)).tolist() == [0, 1, 4, 5, 8, 9, 12, 13, 16, 17]  # a share
    short = Once(iter(torch.arange(6).split(4)), 10)
    assert torch.cat(first(short, 10)).tolist() == torch.cat(list(short)).tolist() == list(range(6))
    assert first([], 3) == []


@given(sizes=st.lists(st.integers(1, 40), max_size=60), most=st.integers(1, 64))
def test_thinned_takes_nearly_as_many_as_are_asked_for_from_everywhere(sizes: list[int], most: int) -> None:
    total = sum(sizes)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    numbers = [torch.arange(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    taken = torch.cat([*thinned(iter(numbers), most), torch.zeros(0, dtype=torch.long)])
    assert len(taken) <= min(most, total)
    if total <= most:
        assert taken.tolist() == list(range(total))
    else:
        assert len(taken) >= most / 2
        assert taken.unique().tolist() == taken.tolist()


def test_samples_by_numbers() -> None:
    shapes = {(): (1, 1), (3,): (3, 1), (3, 4): (3, 4), (3, 4, 5): (3, 20)}
    assert {shape: tuple(per_sample(torch.zeros(shape)).shape) for shape in shapes} == shapes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.bool])
@pytest.mark.parametrize("take", [slice(0, 1), slice(0, 0), slice(None, None, 2)])
def test_the_bytes_of_a_tensor_are_those_of_its_copy(dtype, take) -> None:
    tensor = torch.arange(6).to(dtype)[::2][take]  # of one number with a stride of 2, torch views no bytes
    expected = torch.tensor(tensor.tolist(), dtype=dtype)
    assert bytes(raw_bytes(tensor)) == bytes(expected.view(torch.uint8).tolist())


class Conditioned(torch.nn.Module):
    def forward(self, X, more, pair):
        return X + more["Text-Embeds"] + more["ids"][1] * more["ids"][0] + pair.x + pair.y


def test_arguments_within_arguments_are_named_as_a_captured_graph_names_them():
    draw = torch.Generator().manual_seed(0)
    x, text, first_ids, second_ids, a, b = torch.randn(6, 3, 2, generator=draw)
    batch = {"X": x, "more": {"Text-Embeds": text, "ids": [first_ids, second_ids]}, "pair": Pair(a, b)}
    graph = torch.export.export(Conditioned(), (), batch).graph
    names = [node.name for node in graph.find_nodes(op="placeholder")]
    found = named(batch)
    assert [found[name].tolist() for name in names] == [value.tolist() for value in tensors(batch)]
    assert found["X"] is x
