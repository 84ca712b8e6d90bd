"""What a target is: operators that its runtime runs as one integer kernel, and the number formats of those kernels.

A ``Pattern`` names the operators that can stand first in a fused kernel (*anchors*), whether a
batch-norm may follow, and which activations the kernel absorbs. A ``Target`` is a list of patterns with
the number formats of its integer kernels. pt2e annotations and torch.ao's ``BackendConfig`` are both
generated from it; a new runtime is a new file of this folder.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from qtool.graphs.operators import ADAPTIVE_POOLS, AVERAGE_POOLS, CONVOLUTIONS, MAX_POOLS, PADS, aten

RELU_LIKE = (
    aten.relu.default, aten.relu6.default, aten.hardtanh.default, aten.clamp.default, aten.clamp_min.default,
    aten.clamp_max.default,
)  # fmt: skip
GATE_RANGE = (0.0, 255 / 256)
"""Steps of 1/256 from 0: a gate's 0.5 is an integer, and its 1 the last integer's nearest."""
UNSAFE = "products of activations of 8 bits can saturate on the CPUs for which weights have 7"
IN_FLOAT = "its {bits}-bit weights are dequantized and it runs in float: what they gain is size"
IN_BLOCKS = "its {bits}-bit weights are multiplied by inputs that the runtime rounds to 8 bits as they come"


@dataclass(frozen=True)
class Format:
    """An integer number format: its storage type, its least and greatest value, symmetric or affine."""

    dtype: torch.dtype
    qmin: int
    qmax: int
    symmetric: bool

    @property
    def bits(self) -> int:
        """Bits that a value takes, the sign included."""
        return int(self.qmax - self.qmin).bit_length()

    @property
    def steps(self) -> int:
        """How many steps the integer farthest from 0 stands for."""
        return max(-self.qmin, self.qmax)

    def narrowed(self, bits: int) -> Format:
        """So many bits in the same storage: −(2^(bits−1) − 1) to 2^(bits−1) − 1, or 0 to 2^bits − 1 where affine."""
        most = 2 ** (bits - 1) - 1 if self.symmetric else 2**bits - 1
        return dataclasses.replace(self, qmin=-most if self.symmetric else 0, qmax=most)


UINT8 = Format(torch.uint8, 0, 255, symmetric=False)
INT8_ACTIVATION = Format(torch.int8, -128, 127, symmetric=True)
INT8_WEIGHT = Format(torch.int8, -127, 127, symmetric=True)


def weight_format(bits: int) -> Format:
    """Weights of so many bits, stored as int8; of 6 or fewer with a level more at one end (see ``qparams.py``)."""
    form = INT8_WEIGHT.narrowed(bits)
    return form if bits > 6 else dataclasses.replace(form, qmin=form.qmin - 1)


@dataclass(frozen=True)
class Pattern:
    """Operators that run as one integer kernel: an anchor, an optional batch-norm, an optional activation.

    ``weighted``: argument 1 is a constant weight, quantized per output channel. ``shares``: the output
    has the input's scale and zero point, the kernel only moves or compares bytes. ``float_output``:
    the kernel can return float where nothing integer reads it. ``operands``: which arguments are
    activations. ``needs_integer_inputs``: placed only where every operand is already integer. ``in_float``: why the
    operator itself runs in float, its input dequantized and its output quantized for the integer kernels behind it;
    empty where it has an integer kernel. ``fixed``: the output's range where the operator alone decides it.
    ``quantizes_output``: False where the result is float whoever reads it. ``sums``: the kernel adds an integer tensor
    to its result before it rounds; where only such a sum reads the result, it has no quantizer of its own.
    ``joins``: the result holds its operands' numbers as they are, each part with its scale, and has no quantizer where
    only float reads it; its operands are of one format, without zero points.
    ``signed``: the kernel knows no zero points, so that what it reads is symmetric int8, or, but for the second of two
    operands, never negative. ``stored``: its weights are bytes, and nothing is calibrated for it (see ``stored.py``).
    ``accepts``: why an operator is refused, ``meant``: whether it is one of those that the pattern is about at all.
    """

    kind: str
    anchors: tuple[Any, ...]
    batch_norm: bool = False
    activations: tuple[Any, ...] = ()
    weighted: bool = False
    shares: bool = False
    float_output: bool = False
    operands: tuple[int, ...] = (0,)
    needs_integer_inputs: bool = False
    in_float: str = ""
    fixed: tuple[float, float] | None = None
    quantizes_output: bool = True
    sums: bool = False
    joins: bool = False
    signed: bool = False
    stored: bool = False
    accepts: Callable[[torch.fx.Node], str] | None = None
    meant: Callable[[torch.fx.Node], bool] | None = None

    def is_about(self, node: torch.fx.Node) -> bool:
        """Whether an operator can stand first in the kernel, if nothing is against it."""
        return node.target in self.anchors and (self.meant is None or self.meant(node))


@dataclass(frozen=True)
class Target:
    """A runtime's integer kernels: patterns in order of preference, and number formats.

    ``products``: activations that it runs faster as a gate and a product (see ``rewrites/products.py``).
    ``integer_bias``: biases are int32 in the accumulator's unit; otherwise they stay float32. ``weight`` is the format
    of all weights but those of the first and the last layer, which is ``edge_weight``; ``edge_activation`` is that of
    what these two read, where it is another. ``flat_linears``: linear layers are products of two matrices (see
    ``rewrites/matrices.py``). ``attention``: it is written as its products, which are integer (see
    ``rewrites/attention.py``). ``bare_moves``: what only moves numbers has no pair of its own behind it (see
    :func:`qtool.quantization.integers.drop_pairs`). ``scales_in_float``: a batch-norm with nothing to fold into is a
    product and a sum in float rather than a depthwise convolution. ``adds_pairs``: on x86 CPUs without VNNI it adds
    products of bytes in pairs, in 16 bits (see ``pair_sums.py``). ``channels_last``: its integer convolutions are, and
    rows of channels quicker to shuffle than bytes (see ``rewrites/shuffles.py``), and depthwise ones have an output for
    each channel (see ``rewrites/repeated_inputs.py``). ``integer_lstm``: it computes LSTMs in integers (see
    :mod:`qtool.graphs.lstm`). ``group_width``: how many channels the groups of a convolution are to be filled up to, 0
    where they stay as they are (see ``rewrites/filled_groups.py``). ``leaves``: why operators without a pattern stay in
    float. ``block``: how many inputs of a linear layer whose weights alone are integers it rounds to
    8 bits together, to multiply them by these; None where it dequantizes such weights. ``block_outputs``: how many
    outputs a layer has at least that it does so for, ``block_shared`` whether it does so for weights that several
    layers share.
    """

    name: str
    patterns: tuple[Pattern, ...]
    products: tuple[Any, ...] = ()
    integer_bias: bool = True
    activation: Format = UINT8
    weight: Format = INT8_WEIGHT
    edge_weight: Format = INT8_WEIGHT
    edge_activation: Format | None = None
    flat_linears: bool = True
    attention: bool = False
    bare_moves: bool = False
    scales_in_float: bool = False
    adds_pairs: bool = False
    channels_last: bool = False
    block: int | None = None
    block_outputs: int = 1
    block_shared: bool = True
    integer_lstm: bool = False
    group_width: Callable[[torch.fx.Node], int] | None = None
    leaves: str = "no integer kernel on this target"

    def with_weights(self, bits: int, edge_bits: int) -> Target:
        """The same kernels over weights of fewer bits.

        Where 7 bits are for the sake of CPUs whose kernels saturate, the edges have them too, and what multiplies
        activations by each other, which have 8, runs in float.
        """
        edges = bits if bits == 7 else max(bits, edge_bits)
        made = dataclasses.replace(self, weight=weight_format(bits), edge_weight=weight_format(edges))
        if bits != 7:
            return made
        patterns = tuple(
            dataclasses.replace(pattern, operands=(), in_float=UNSAFE) if pattern.kind == "matmul" else pattern
            for pattern in self.patterns
        )
        return dataclasses.replace(made, patterns=patterns, attention=False)

    def with_weights_only(self) -> Target:
        """Layers whose weights alone are integers: everything else is float, as far as the plan has a say in it."""
        layers = self._layers(IN_FLOAT)
        patterns = tuple(found for p in layers for found in (self._from_weights(p) if p.weighted else [p]))
        patterns += tuple(pattern for pattern in self.patterns if pattern.stored)
        return dataclasses.replace(
            self, patterns=patterns, flat_linears=True, integer_lstm=False, group_width=None,
            leaves="only weights are quantized",
        )  # fmt: skip

    def _from_weights(self, pattern: Pattern) -> list[Pattern]:
        dequantized = dataclasses.replace(pattern, operands=(), in_float=IN_FLOAT)
        if pattern.kind != "linear" or self.block is None:
            return [dequantized]
        return [dataclasses.replace(dequantized, in_float=IN_BLOCKS, accepts=self._without_product), dequantized]

    def _without_product(self, node: torch.fx.Node) -> str:
        """Why a linear layer's stored weight is not multiplied as it is."""
        outputs, weight = node.meta["val"].shape[-1], node.args[1]
        if outputs < self.block_outputs:
            return f"a layer of {outputs} outputs has no such kernel"
        layers = [other for other in node.graph.nodes if other.target is node.target]
        readers = sum(getattr(other.args[1], "target", None) == getattr(weight, "target", 0) for other in layers)
        return "" if self.block_shared or readers < 2 else "several layers share its weight"

    def with_activations(self, bits: int) -> Target:
        """Layers whose weights and inputs are integers of so many bits, as in the literature: sums stay in float.

        No runtime has kernels for it. The first and the last layer read 8 bits; biases are float, since the step of
        an accumulator of 4-bit products is too coarse for them.
        """
        return dataclasses.replace(
            self, patterns=self._layers(f"{bits}-bit activations are simulated: no runtime has kernels for them"),
            activation=self.activation.narrowed(bits), edge_activation=self.activation,
            leaves="only the inputs and weights of layers are quantized", integer_bias=False, block=None,
            integer_lstm=False, group_width=None,
        )  # fmt: skip

    def _layers(self, in_float: str) -> tuple[Pattern, ...]:
        """The patterns of layers with weights, their results in float; and moves, which any format passes through."""
        layers = (
            dataclasses.replace(pattern, in_float=in_float, quantizes_output=False, accepts=None)
            for pattern in self.patterns
            if pattern.weighted
        )
        return (*layers, *(pattern for pattern in self.patterns if pattern.kind == "move"))


def global_mean(node: torch.fx.Node) -> str:
    """Why a mean is not a global average pooling; empty when it is."""
    value = node.args[0]
    assert isinstance(value, torch.fx.Node)
    rank = value.meta["val"].dim()
    axes = node.args[1] if len(node.args) > 1 else None
    wanted = list(range(2, rank))
    if isinstance(axes, list | tuple) and rank > 2 and sorted(int(str(a)) % rank for a in axes) == wanted:
        return ""
    return "a mean over other than all spatial axes has no integer kernel"


def pool_to_one(node: torch.fx.Node) -> str:
    size = node.args[1]
    ones = all(s == 1 for s in size) if isinstance(size, list | tuple) else size == 1
    return "" if ones else "adaptive pooling to more than one cell has no integer kernel"


def plain_sum(node: torch.fx.Node) -> str:
    if any(not isinstance(arg, torch.fx.Node) for arg in node.args[:2]):
        return "an operand is a Python number"
    return "" if node.kwargs.get("alpha", 1) == 1 else "a scaled addition (alpha) has no integer kernel"


def averaging(pool: torch.fx.Node) -> tuple[bool, bool, bool]:
    """Of an average pool: whether it pads, whether its last window may be cut off, whether it counts its padding."""
    pads, ceil, counted = [*pool.args[3:6], *[0, False, True][max(len(pool.args) - 3, 0) :]][:3]
    return any(pads) if isinstance(pads, list | tuple) else bool(pads), bool(ceil), bool(counted)


def makes_no_angle(node: torch.fx.Node) -> str:
    """Why a layer that gives angles stays in float, those whose sine and cosine are taken (Fourier features).

    They go round many times, so that a step of 256 may be a good part of a turn. Sines alone, as in networks that have
    them for an activation, are of small angles.
    """
    turned = {user.target for user in _readers(node, (*MOVES, *SCALINGS))}
    angle = {aten.sin.default, aten.cos.default} <= turned
    return "it gives angles, and 256 steps would be a good part of a turn" if angle else ""


def makes_no_logarithm(node: torch.fx.Node) -> str:
    """Why a layer stays in float whose result a logarithm is taken of, as of the powers that a mel filter bank gives.

    Most of these are less than a step of 256, and by their logarithms count as much as the largest. It is otherwise
    where many of them are added up before, by a pool or another layer.
    """
    taken = any(user.target in LOGARITHMS for user in _readers(node, (*MOVES, *SCALINGS, *POWERS, *RELU_LIKE)))
    return "its logarithm is taken, and 256 steps would make one of most small numbers" if taken else ""


def makes_no_peaks(node: torch.fx.Node) -> str:
    """Why a layer stays in float whose result is compared with its own maxima over windows (CenterNet's peaks).

    Of 256 steps neighbours have the same, and each of them would be a peak.
    """
    found = _readers(node, (*MOVES, *RELU_LIKE, aten.sigmoid.default, aten.hardsigmoid.default))
    maxima = {user for pool in found if pool.target in MAX_POOLS for user in _readers(pool, MOVES)}
    compared = any(user.target in COMPARISONS and user in maxima for user in found)
    return "it is compared with its own maxima, and neighbours would be equal in 256 steps" if compared else ""


def _readers(layer: torch.fx.Node, through: Collection[Any]) -> list[torch.fx.Node]:
    """What reads a layer's result, also behind such operators, of it and constants alone, or of squares of results."""
    found: dict[torch.fx.Node, None] = {}
    waiting = [layer]
    while waiting:
        users = [user for user in waiting.pop().users if user not in found]
        found.update(dict.fromkeys(users))
        for user in users:
            parts = [source for source in user.all_input_nodes if not _is_constant(source)]
            squares = user.target is aten.add.Tensor and all(map(_is_square, parts))
            if user.target is aten.batch_norm.default or (user.target in through and (len(parts) == 1 or squares)):
                waiting.append(user)
    return list(found)


def _is_square(node: torch.fx.Node) -> bool:
    product = node.target is aten.mul.Tensor and node.args[0] is node.args[1]
    return product or node.target in (aten.pow.Tensor_Scalar, aten.square.default)


def _is_constant(node: torch.fx.Node) -> bool:
    while len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return node.op == "get_attr"


def _first_reason(rules: tuple[Callable[[torch.fx.Node], str] | None, ...], node: torch.fx.Node) -> str:
    return next((reason for rule in rules if rule is not None and (reason := rule(node))), "")


def pad_in_integers(node: torch.fx.Node) -> str:
    """Why a padding writes numbers that need not be integers of its input; empty when it does not."""
    given = dict(zip(("mode", "value"), node.args[2:], strict=False)) | node.kwargs
    if node.target is aten.constant_pad_nd.default:
        given = {"value": node.args[2] if len(node.args) > 2 else node.kwargs.get("value")}
    constant = given.get("mode", "constant") == "constant"
    return "padding with another value than zero" if constant and given.get("value") not in (None, 0) else ""


MOVES = (
    aten.flatten.using_ints, aten.unflatten.int, aten.reshape.default,
    aten.permute.default, aten.transpose.int, aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default,
    aten.contiguous.default, aten.clone.default, aten.slice.Tensor, aten.select.int, aten.expand.default,
    aten.pixel_shuffle.default, aten.pixel_unshuffle.default, aten.channel_shuffle.default, aten.dropout.default,
    aten.feature_dropout.default, aten.alpha_dropout.default, aten.feature_alpha_dropout.default,
)  # fmt: skip
SCALINGS = (
    aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.add.Tensor, aten.sub.Tensor,
    aten.neg.default,
)  # fmt: skip
POWERS = (
    aten.pow.Tensor_Scalar, aten.square.default, aten.sqrt.default, aten.abs.default, aten.maximum.default,
    aten.max.other,
)  # fmt: skip
LOGARITHMS = (aten.log.default, aten.log2.default, aten.log10.default, aten.log1p.default)
COMPARISONS = (
    aten.eq.Tensor, aten.ne.Tensor, aten.ge.Tensor, aten.gt.Tensor, aten.le.Tensor, aten.lt.Tensor,
)  # fmt: skip

SMOOTH = (
    aten.hardswish.default, aten.silu.default, aten.gelu.default, aten.elu.default, aten.tanh.default,
    aten.mish.default,
)  # fmt: skip
POINTWISE = (*RELU_LIKE, *SMOOTH, aten.sigmoid.default, aten.hardsigmoid.default, aten.leaky_relu.default)
SOFTMAX = (aten.softmax.int, aten._softmax.default)
UPSAMPLES = (aten.upsample_nearest1d.vec, aten.upsample_nearest2d.vec)
BLENDS = (
    aten.upsample_linear1d.vec, aten.upsample_bilinear2d.vec, aten.upsample_bicubic2d.vec,
    aten.upsample_trilinear3d.vec,
)  # fmt: skip
"""Upsamplings whose results lie between those numbers that there are."""
BINARY: dict[str, Any] = {"activations": RELU_LIKE, "operands": (0, 1), "accepts": plain_sum}
BETWEEN: dict[str, Any] = {"needs_integer_inputs": True}
FLOAT_BETWEEN: dict[str, Any] = {
    "needs_integer_inputs": True, "float_output": True, "in_float": "it runs in float between integers",
}  # fmt: skip
"""Operators without an integer kernel: what they give is quantized where integers read it, so that these stay so."""
POOLS_AND_MOVES = (
    Pattern("global_avg_pool", ADAPTIVE_POOLS, accepts=pool_to_one, **BETWEEN),
    Pattern("global_avg_pool", (aten.mean.dim,), accepts=global_mean, **BETWEEN),
    Pattern("avg_pool", AVERAGE_POOLS, **BETWEEN),
    Pattern("max_pool", MAX_POOLS, shares=True, **BETWEEN),
    Pattern("move", MOVES, shares=True, **BETWEEN),
    Pattern("pad", PADS, shares=True, accepts=pad_in_integers, **BETWEEN),
)
POOLS_AND_JOINS = (Pattern("concat", (aten.cat.default,), **BETWEEN), *POOLS_AND_MOVES)
"""What every target so far runs in integers between integers."""


def weighted(activations: tuple[Any, ...], **convolutions: Any) -> tuple[Pattern, ...]:
    """Convolutions, of which more is told by name, and linear layers: their kernels take batch-norm and these in."""
    common: dict[str, Any] = {"batch_norm": True, "activations": activations, "weighted": True}
    # a kernel that gives float rounds no peaks
    peaks = None if convolutions.get("float_output") else makes_no_peaks
    rules = (convolutions.pop("accepts", None), makes_no_logarithm, peaks)
    return (
        Pattern("conv", CONVOLUTIONS[:3], accepts=partial(_first_reason, rules), **common, **convolutions),
        Pattern(
            "linear",
            (aten.linear.default,),
            float_output=True,
            accepts=partial(_first_reason, (makes_no_angle, makes_no_logarithm)),
            **common,
        ),
    )
