from __future__ import annotations

import numpy as np
import onnx
import onnx_files
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper

from qtool.benchmarking.inputs import Layout, as_written, parse_shape, random_feeds, require_known, to_feeds
from qtool.errors import QtoolError, UsageError
from qtool.runtimes import TensorInfo

IMAGE = TensorInfo("x", "float32", ("N", 3, 8, 8))
TOKENS = TensorInfo("ids", "int64", (None, "sequence"))


def test_random_inputs_have_the_shape_and_type_and_are_repeatable():
    feeds = random_feeds([IMAGE], 4, seed=5)
    assert feeds["x"].shape == (4, 3, 8, 8)
    assert feeds["x"].dtype == np.float32
    np.testing.assert_array_equal(feeds["x"], random_feeds([IMAGE], 4, seed=5)["x"])
    assert (feeds["x"] != random_feeds([IMAGE], 4, seed=6)["x"]).any()


def test_integers_stay_within_any_embedding():
    ids = random_feeds([TOKENS], 2, shapes={"ids": "1x50"})["ids"]
    assert ids.shape == (2, 50)
    assert ids.dtype == np.int64
    assert set(ids.ravel()) == {0, 1}


def test_a_size_that_the_file_leaves_open_has_to_be_given():
    with pytest.raises(QtoolError, match=r"input 'ids'.*int64\[\?, sequence\].*ids=1x"):
        random_feeds([TOKENS], 1)


def test_a_size_that_is_given_holds_for_all_inputs_of_its_symbol():
    mask, cache = (TensorInfo(name, "int64", ("N", "L", rest)) for name, rest in (("mask", 2), ("cache", "P")))
    ids = TensorInfo("ids", "int64", ("N", "L"))
    feeds = random_feeds([mask, ids], 3, shapes={"ids": "1x7"})
    assert {name: value.shape for name, value in feeds.items()} == {"ids": (3, 7), "mask": (3, 7, 2)}
    own = random_feeds([mask, ids], 1, shapes={"ids": "1x7", "mask": "1x9x2"})
    assert {name: value.shape for name, value in own.items()} == {"ids": (1, 7), "mask": (1, 9, 2)}
    with pytest.raises(QtoolError, match=r"input 'cache'.*int64\[N, 7, P\]"):
        random_feeds([ids, cache], 1, shapes={"ids": "1x7"})


def test_an_input_of_unknown_shape_takes_any_that_is_given():
    anything = TensorInfo("x", "float32", None)
    assert random_feeds([anything], 2, shapes={"x": "1x8"})["x"].shape == (2, 8)
    with pytest.raises(QtoolError, match=r"input 'x'.*got float32 of unknown shape; give it as x=1x"):
        random_feeds([anything], 1)


@pytest.mark.parametrize("shape", ["1x4x8x8", "1x3x8", "3x8x8x8x8"])
def test_a_given_shape_has_to_fit_the_file(shape):
    with pytest.raises(UsageError, match="input 'x'"):
        random_feeds([IMAGE], 1, shapes={"x": shape})


def test_a_given_shape_may_say_the_batch_that_is_asked_for_and_no_other():
    assert random_feeds([IMAGE], 4, shapes={"x": "4x3x8x8"})["x"].shape == (4, 3, 8, 8)
    with pytest.raises(UsageError, match=r"expected 1 or 2 first, the batch; got 4; .*--batch-sizes 4"):
        random_feeds([IMAGE], 2, shapes={"x": "4x3x8x8"})
    with pytest.raises(UsageError, match=r"expected 1 first, the batch; got 4"):
        random_feeds([IMAGE], 1, shapes={"x": "4x3x8x8"})


def test_a_shape_for_an_input_that_is_not_there_is_refused():
    with pytest.raises(UsageError, match="'y'"):
        require_known({"y": "1x3"}, [[IMAGE], [TOKENS]])
    require_known({"ids": "1x3"}, [[IMAGE], [TOKENS]])


@pytest.mark.parametrize("text", ["", "axb", "1x-3", "1,3", "1x3x", "1.5"])
def test_shapes_are_sizes_and_x(text):
    with pytest.raises(UsageError, match=r"sizes such as .*; correct the shape"):
        parse_shape("x", text)


def test_shapes_of_several_inputs_in_one_option_are_told_apart():
    with pytest.raises(UsageError, match=r"'1x8,m=1x8x1'; give each input a --shapes of its own"):
        parse_shape("ids", "1x8,m=1x8x1")


def test_a_size_of_nothing_is_one_as_an_empty_cache_has():
    cache = TensorInfo("past", "float32", ("N", 8, "past_length", 64))
    assert random_feeds([cache], 2, shapes={"past": "1x8x0x64"})["past"].shape == (2, 8, 0, 64)
    assert random_feeds([TensorInfo("axes", "int64", (0,)), IMAGE], 2)["axes"].shape == (0,)
    with pytest.raises(UsageError, match=r"expected 1 first, the batch; got 0"):
        random_feeds([IMAGE], 1, shapes={"x": "0x3x8x8"})


@pytest.mark.parametrize("dtype", ["float32", "int64"])
@pytest.mark.parametrize("size", [2**45, 2**62])
def test_a_size_beyond_all_memory_is_told(size, dtype):
    with pytest.raises(
        QtoolError, match=rf"'x': expected a size .* memory for; got {dtype}\[1, {size}, 8\]; .*--shapes"
    ):
        random_feeds([TensorInfo("x", dtype, ("N", "M", 8))], 1, shapes={"x": f"1x{size}x8"})


def test_a_scalar_input_has_no_batch():
    assert random_feeds([TensorInfo("s", "float32", ())], 8)["s"].shape == ()


def test_a_fixed_batch_is_kept():
    fixed = TensorInfo("x", "float32", (2, 3))
    assert Layout.of([fixed]).size == 2
    assert Layout.of([IMAGE]).size is None
    assert random_feeds([fixed], 2)["x"].shape == (2, 3)


@pytest.mark.parametrize("kind", [torch.zeros, np.zeros])
def test_a_batch_becomes_feeds_whatever_its_form(kind):
    image, ids = kind((2, 3, 8, 8)), np.zeros((2, 5), np.int32)
    for value in ((image, ids), [image, ids], {"ids": ids, "x": image, "ignored": 1}):
        feeds = to_feeds(value, [IMAGE, TOKENS])
        assert {k: (v.shape, str(v.dtype)) for k, v in feeds.items()} == {
            "x": ((2, 3, 8, 8), "float32"),
            "ids": ((2, 5), "int64"),
        }


def test_values_survive_the_cast():
    value = torch.randn(2, 3, 8, 8)
    half = to_feeds(value, [TensorInfo("x", "float16", IMAGE.shape)])["x"]
    np.testing.assert_array_equal(half, value.numpy().astype(np.float16))


def test_integers_are_never_made_floats_in_silence():
    assert to_feeds(np.zeros((1, 3, 8, 8), np.uint8), [IMAGE])["x"].dtype == np.uint8


def test_the_wrong_number_of_inputs_is_told():
    with pytest.raises(QtoolError, match=r"2 inputs \(x, ids\); got 1"):
        to_feeds(np.zeros((1, 3, 8, 8)), [IMAGE, TOKENS])


@given(st.integers(1, 5), st.integers(0, 5))
def test_padding_repeats_the_last_sample(count, more):
    value = np.arange(count * 2).reshape(count, 2)
    padded = Layout({"x": 0}, None).taken({"x": value}, range(count + more))["x"]
    np.testing.assert_array_equal(padded[:count], value)
    np.testing.assert_array_equal(padded[count:], np.repeat(value[-1:], more, axis=0))


def test_a_batch_that_is_too_large_is_cut():
    assert Layout({"x": 0}, None).taken({"x": np.arange(6)}, range(4))["x"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("read", "told", "shape", "axis"),
    [
        (("N", 8), ("N", 5), (4, 5), 0),
        (("N", 8), (4, "N", 5), (4, 4, 5), 1),  # time × batch × classes
        (("N", 8), (None, None, 5), (7, 4, 5), 1),
        (("N", 8), None, (7, 4, 5), 1),
        (("N", 8), ("M", 5), (12, 5), 0),  # three rows of each sample
        (("N", 8), (1, 5), (4, 5), 0),  # the file's word is not kept
        (("N", 8), (4, 5), (4, 5), None),
        (("N", 8), ("N", 5), (3, 5), None),
        ((4, 8), (4, 5), (4, 5), 0),
        ((4, 8), (7, 4, 5), (7, 4, 5), 1),
        ((4, 8, 8), (10,), (10,), None),  # one image of four channels
        ((), ("N",), (4,), None),
    ],
)
def test_the_axis_of_an_output_that_counts_samples(read, told, shape, axis):
    layout = Layout.of([TensorInfo("x", "float32", read)])
    assert layout.axis(TensorInfo("y", "float32", told), shape, 4) == axis


STATE = TensorInfo("h", "float32", (2, "N", 8))
WIDTH = TensorInfo("t", "float32", (1,))


@pytest.mark.parametrize("order", [1, -1])
def test_samples_are_counted_where_the_files_symbols_say(order):
    inputs = [STATE, IMAGE, WIDTH, TensorInfo("s", "float32", ())][::order]
    feeds = random_feeds(inputs, 4)
    assert {name: value.shape for name, value in feeds.items()} == {
        "h": (2, 4, 8), "x": (4, 3, 8, 8), "t": (1,), "s": (),
    }  # fmt: skip
    layout = Layout.of(inputs)
    assert (layout.size, layout.count(feeds)) == (None, 4)
    part = layout.taken(feeds, range(2, 6))
    np.testing.assert_array_equal(part["h"], feeds["h"][:, [2, 3, 3, 3]])
    np.testing.assert_array_equal(part["x"], feeds["x"][[2, 3, 3, 3]])
    assert part["t"] is feeds["t"]
    assert part["s"] is feeds["s"]
    assert random_feeds(inputs, 3, shapes={"h": "2x3x8"})["h"].shape == (2, 3, 8)
    with pytest.raises(UsageError, match="1 or 3 at axis 1, the batch; got 2"):
        random_feeds(inputs, 3, shapes={"h": "2x2x8"})


def test_inputs_of_different_numbers_of_samples_are_refused():
    with pytest.raises(QtoolError, match="as many samples each; got x with 2, ids with 3"):
        Layout.of([IMAGE, TOKENS]).count({"x": np.zeros((2, 3, 8, 8)), "ids": np.zeros((3, 5))})


@pytest.mark.parametrize(("name", "shape", "axis"), [("x", (), 0), ("h", (8,), 1)])
def test_an_input_without_the_axis_of_samples_is_told(name, shape, axis):
    layout = Layout.of([TensorInfo("x", "float32", ("N", 8)), TensorInfo("h", "float32", (2, "N", 8))])
    with pytest.raises(QtoolError, match=f"an axis {axis} that counts samples; got '{name}' of shape"):
        layout.taken({name: np.zeros(shape)}, range(2))


def test_a_scalar_and_a_half_of_16_bits_become_arrays():
    assert to_feeds(torch.tensor(2.0), [TensorInfo("s", "float32", ())])["s"].shape == ()
    value = torch.randn(2, 3, dtype=torch.bfloat16, requires_grad=True)
    found = to_feeds(value, [TensorInfo("x", "float32", ("N", 3))])["x"]
    np.testing.assert_array_equal(found, value.detach().float().numpy())


def test_a_runtime_that_tells_no_symbols_takes_the_files(tmp_path):
    shapes = {"x": ["N", "T", 8], "h": [1, "N", 8], "free": None, "one": [], "new": [None, 8]}
    onnx.save(onnx_files.model([helper.make_node("Relu", ["x"], ["y"])], shapes, {"y": None}), tmp_path / "m.onnx")
    told = {"x": (None, None, 8), "h": (1, None, 8), "free": None, "one": None, "new": (None, 8), "elsewhere": (None,)}
    found = as_written([TensorInfo(name, "float32", shape) for name, shape in told.items()], tmp_path / "m.onnx")
    assert {info.name: info.shape for info in found} == {
        "x": ("N", "T", 8), "h": (1, "N", 8), "free": None, "one": (), "new": (None, 8), "elsewhere": (None,)
    }  # fmt: skip
    assert Layout.of(found[:2]).axes == {"x": 0, "h": 1}


def test_what_is_within_arguments_is_fed_by_name_or_by_place():
    names = ("x", "more_text", "more_ids_0", "more_ids_1")
    inputs = [TensorInfo(name, "float32", ("N", 2)) for name in names]
    x, text, *ids = np.arange(16, dtype=np.float32).reshape(4, 2, 2)
    by_name = {"more": {"ids": tuple(ids), "text": text}, "x": torch.from_numpy(x)}
    for batch in (by_name, (torch.from_numpy(x), {"text": text, "ids": ids})):
        feeds = to_feeds(batch, inputs)
        assert [feeds[name].tolist() for name in names] == [x.tolist(), text.tolist(), *(one.tolist() for one in ids)]
    with pytest.raises(QtoolError, match="4 inputs"):
        to_feeds((x, {"text": text}), inputs)
