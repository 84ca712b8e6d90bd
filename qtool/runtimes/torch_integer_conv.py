"""Convolutions of a quantized graph as integer convolutions, on a CPU that has instructions for them.

In the quantized form a convolution reads integers through a dequantize, and its weights too:

    y = Σ s_x (q_x − z_x) · s_w q_w + b,

computed in float. The sum of the products of integers is an integer, which oneDNN, PyTorch's own library, adds
exactly in int32 and multiplies by s_x s_w once. The two differ only by float rounding, and the integer one is nearer
to what the form means; VNNI makes it several times faster. A ReLU behind the convolution is done with it.

The quantizers stay as they are: this is the same graph, with its sums computed otherwise.

Left out on purpose: CPUs without VNNI, where such a product saturates at 16 bits; activations that are not uint8; what
oneDNN gets wrong on CPUs with AMX (see :mod:`qtool.runtimes.onednn`), windows whose rows are set apart, which now
and then write beyond their memory there, and depthwise ones of 16 channels with long rows of taps (an EEGNet's), whose
kernel is never done: with AVX-512, 14 taps and more, side by side, and 29 columns and more.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from qtool.form import padding_of
from qtool.runtimes import onednn
from qtool.system.machine import VNNI, cpu_info

aten, names = torch.ops.aten, torch.ops.quantized_decomposed
_ENDLESS_CHANNELS, _ENDLESS_TAPS = 16, 14


def is_exact_here() -> bool:
    """Whether this CPU adds products of bytes in 32 bits, and torch has the library that asks it to."""
    fits = bool(set(VNNI) & set(cpu_info()["features"]))
    return fits and torch._C._has_mkldnn and hasattr(torch.ops.onednn, "qconv2d_pointwise")


def with_integer_convolutions(graph: GraphModule) -> tuple[GraphModule, int]:
    """A graph of the same tensors whose convolutions are integer ones, where they can be; and how many are."""
    lowered = GraphModule(graph, _copied(graph), "Lowered")
    convolutions = [node for node in lowered.graph.nodes if node.target is aten.conv2d.default]
    replaced = sum(_replace(lowered, node, index) for index, node in enumerate(convolutions))
    lowered.graph.eliminate_dead_code()
    lowered.recompile()
    return lowered, replaced


def _copied(graph: GraphModule) -> torch.fx.Graph:
    copied = torch.fx.Graph()
    found: dict[Node, Node] = {}
    copied.output(copied.graph_copy(graph.graph, found))
    copied.set_codegen(graph.graph._codegen)
    return copied


def _replace(graph: GraphModule, node: Node, index: int) -> bool:
    x, w, bias, strides, pads, dilations, groups = _arguments(node)
    x, before = _padded(x)
    weight = _integers(graph, w)
    if weight is None or not _is_bytes(x) or isinstance(pads, str):
        return False
    geometry = onednn.Geometry(weight[0].shape, strides, dilations, groups, _sizes(node))
    if dilations[0] > 1 or _never_ends(geometry) or onednn.errs(geometry):
        return False
    scale, zero_point = float(x.args[1]), int(x.args[2])
    convolution = IntegerConvolution(*weight, scale, zero_point, (list(strides), list(pads), list(dilations), groups))
    users = list(node.users)
    last = users[0] if len(users) == 1 and users[0].target in (aten.relu.default, aten.relu_.default) else node
    convolution.before = before
    convolution.activation = "none" if last is node else "relu"
    graph.add_submodule(f"integer_convolution_{index}", convolution)
    with graph.graph.inserting_before(last):
        product = graph.graph.call_module(f"integer_convolution_{index}", (x.args[0], bias))
    last.replace_all_uses_with(product)
    graph.graph.erase_node(last)
    return True


def _never_ends(conv: onednn.Geometry) -> bool:
    """Whether oneDNN's kernel for a depthwise convolution runs for ever on inputs that are wide enough."""
    return conv.groups == conv.weight[0] == _ENDLESS_CHANNELS and conv.weight[-1] >= _ENDLESS_TAPS


def _arguments(node: Node) -> tuple[Any, Any, Any, Any, Any, Any, int]:
    """x, weight, bias, strides, pads, dilations and groups, with the operator's defaults."""
    defaults = {"bias": None, "stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1}
    names = ("input", "weight", *defaults)
    given: dict[str, Any] = {**defaults, **dict(zip(names, node.args, strict=False)), **node.kwargs}
    x, w, bias, *spatial, groups = (given[name] for name in names)
    strides, pads, dilations = (tuple(s) * 2 if isinstance(s, list | tuple) and len(s) == 1 else s for s in spatial)
    return x, w, bias, strides, pads, dilations, groups


def _sizes(node: Node) -> list[int | None]:
    """The size of each axis of a result, as far as it is known."""
    value = node.meta.get("val")
    sizes = value.shape[2:] if value is not None else [None, None]
    return [size if isinstance(size, int) else None for size in sizes]


def _padded(x: Any) -> tuple[Any, list[int]]:
    """What is padded with zeros in front of a convolution, and by how much, last axis first."""
    amounts = padding_of(x) if isinstance(x, Node) else None
    return (x.args[0], amounts) if amounts is not None else (x, [])


def _is_bytes(x: Any) -> bool:
    """Whether ``x`` is what a dequantize makes of any of the 256 values of a byte."""
    return (
        isinstance(x, Node)
        and x.target is names.dequantize_per_tensor.default
        and isinstance(x.args[0], Node)
        and x.args[0].op == "call_function"
        and tuple(x.args[3:6]) == (0, 255, torch.uint8)
    )


def _integers(graph: GraphModule, w: Any) -> tuple[Tensor, Tensor] | None:
    """The int8 weight behind a dequantize for each output channel, and its scales; None for any other."""
    if not (isinstance(w, Node) and w.target is names.dequantize_per_channel.default and w.args[3] == 0):
        return None
    if any(not isinstance(a, Node) or a.op != "get_attr" for a in w.args[:3]):
        return None
    weight, scale, zero_point = (operator.attrgetter(str(a.target))(graph).detach() for a in w.args[:3])  # type: ignore[union-attr]
    return (weight, scale) if weight.dtype == torch.int8 and not bool(zero_point.any()) else None


class IntegerConvolution(torch.nn.Module):
    """``y = s_x s_w Σ (q_x − z_x) q_w + b`` for uint8 N×C×H×W, in float32; ``activation`` is "none" or "relu".

    ``before`` is a padding of q_x with z_x, last axis first.
    """

    activation: str = "none"
    before: Sequence[int] = ()

    def __init__(
        self, weight: Tensor, weight_scale: Tensor, scale: float, zero_point: int, shape: tuple[Any, Any, Any, int]
    ) -> None:
        super().__init__()
        self.scale, self.zero_point, self.shape = scale, zero_point, shape
        self.weight, self.weight_scale = weight, weight_scale.float()
        self.weight_zero = torch.zeros(len(weight_scale), dtype=torch.int32)
        self.packed: tuple[torch.Size, Tensor] | None = None

    def forward(self, q: Tensor, bias: Tensor | None = None) -> Tensor:
        """Integers in, float32 out."""
        q = torch.nn.functional.pad(q, list(self.before), value=self.zero_point) if self.before else q
        result: Tensor = torch.ops.onednn.qconv2d_pointwise(
            q, self.scale, self.zero_point, self._packed(q.shape), self.weight_scale, self.weight_zero, bias,
            *self.shape, 1.0, 0, torch.float32, self.activation, [], "",
        )  # fmt: skip
        return result

    def _packed(self, size: torch.Size) -> Tensor:
        """The weight in the order of the kernel for inputs of this size; any other order costs ten times the sum."""
        if self.packed is None or self.packed[0] != size:
            packed = torch.ops.onednn.qconv_prepack(
                self.weight, self.weight_scale, self.scale, self.zero_point, *self.shape, list(size)
            )
            self.packed = size, packed
        return self.packed[1]
