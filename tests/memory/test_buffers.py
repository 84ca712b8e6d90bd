"""Buffers of small graphs, counted by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from qtool.memory import buffers
from qtool.memory.buffers import plan


def graph(function, *inputs):
    return make_fx(function)(*inputs).graph


def test_elementwise_results_have_memory_only_where_a_product_reads_them():
    def chain(x, w):
        return (((x.relu() * 2 + 1).exp() @ w).tanh().sum(),)

    made = plan(graph(chain, torch.ones(8, 8), torch.ones(8, 4)), {})
    assert [(buffer.name, buffer.size) for buffer in made.buffers] == [("exp", 256), ("mm", 128), ("sum_1", 4)]
    assert made.buffers[1].after == ("exp",)
    assert made.buffers[2].after == ("mm",)
    assert made.outputs == (frozenset({"sum_1"}),)


def test_what_nobody_reads_again_is_written_over():
    def two(x, w):
        y = x @ w
        return ((y + 1) @ w,)

    made = plan(graph(two, torch.ones(8, 8), torch.ones(8, 8)), {"x_1": "x_1"})
    assert [(b.name, b.before, b.after) for b in made.buffers] == [
        ("mm", (), ("x_1",)), ("add", ("mm",), ()), ("mm_1", (), ("add",)),
    ]  # fmt: skip


def test_each_of_several_results_goes_when_it_is_read(monkeypatch):
    """A convolution's backward gives two gradients: that of the weight stays, that of the input does not."""
    monkeypatch.setattr(buffers, "lays_out", lambda graph: False)

    def backward(grad, x, w):
        of_input, of_weight, _ = torch.ops.aten.convolution_backward(
            grad, x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False]
        )
        return (of_input.sum(), of_weight)

    traced = graph(backward, torch.ones(2, 4, 8, 8), torch.ones(2, 3, 8, 8), torch.ones(4, 3, 3, 3))
    made = plan(traced, {}, SimpleNamespace(of=lambda function, args, kwargs: sum(map(len, args[:3]))))
    assert [(b.name, b.size, b.after) for b in made.buffers if b.size] == [
        ("getitem", 1536, ()), ("getitem_1", 432, ()), ("sum_1", 4, ("getitem",)),
    ]  # fmt: skip
    assert {b.name: b.scratch for b in made.buffers if b.scratch} == {"getitem_2": 2 + 2 + 4}  # when all are there


def test_the_parts_of_a_split_have_no_memory_of_their_own():
    def split(x, w):
        first, second = (x @ w).unbind(0)
        return (first.sum() + second.sum(),)

    made = plan(graph(split, torch.ones(2, 8), torch.ones(8, 4)), {})
    assert [(b.name, b.size, b.after) for b in made.buffers] == [
        ("mm", 32, ()), ("sum_1", 4, ()), ("sum_2", 4, ("mm",)), ("add", 4, ("sum_2",)),
    ]  # fmt: skip


def test_what_generated_code_has_turned_is_convolved_in_the_order_of_its_dimensions():
    """As the images of a ConvNeXt are, whose norm and linear layers have the channels last."""
    images, weights, given = torch.ones(2, 8, 8, 3), torch.ones(4, 3, 3, 3), []

    def convolved(x, w):
        return (torch.convolution((x * 2).permute(0, 3, 1, 2) + 1, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),)

    for turned in (True, False):
        like = images if turned else images.permute(0, 3, 1, 2)
        code = convolved if turned else lambda x, w: (torch.conv2d(x * 2, w, padding=1),)
        plan(
            graph(code, like, weights),
            {},
            SimpleNamespace(of=lambda function, args, kwargs: given.append(args[0]) or 0),
        )
    assert [value.shape == (2, 3, 8, 8) and value.stride() for value in given] == [(192, 64, 8, 1), (192, 1, 24, 3)]


@pytest.mark.parametrize("generated", [False, True])
@pytest.mark.parametrize("channels_last", [False, True])
def test_operands_of_a_depthwise_convolutions_backward_pass_are_copied(generated, channels_last, monkeypatch):
    """As torch's compiler does it: the input along its rows; the gradient so too, and then as the other needs it.

    A weight that generated code has converted lies channels-last; one channel of it may lie anywhere. Where the
    compiler lays the graph out channels-last, as of torch 2.15 it does a backward pass too, all lie so already.
    """
    monkeypatch.setattr(buffers, "lays_out", lambda graph: channels_last)
    given = []

    def backward(grad, x, w):
        arguments = None, [1, 1], [1, 1], [1, 1], False, [0, 0], 4, [True, True, False]
        return torch.ops.aten.convolution_backward(grad * 2, x, w, *arguments)[:2]

    images = torch.ones(2, 8, 8, 4).permute(0, 3, 1, 2)
    weights = torch.ones(4, 1, 3, 3).as_strided((4, 1, 3, 3), (9, 1 if generated else 9, 3, 1))
    made = plan(
        graph(backward, images, images, weights), {"x_1": "x_1"},
        SimpleNamespace(of=lambda function, args, kwargs: given.extend(args[:3]) or 0),
    )  # fmt: skip
    along_rows, as_they_came, plain = (256, 8, 32, 1), (256, 1, 32, 4), (256, 64, 8, 1)
    copies = [(b.size, b.after) for b in made.buffers if b.name.startswith("as_strided_copy")]
    if channels_last:
        assert [value.stride() for value in given[:2]] == [as_they_came] * 2
        assert copies == []
        return
    assert [value.stride() for value in given[:2]] == [as_they_came if generated else plain, along_rows]
    assert [size for size, _ in copies] == [2048] * 3
    assert set(copies[2][1]) == {"mul", "x_1", "as_strided_copy_default_1"}
    assert not copies[0][1]
