"""Pixels: an input that stands for bytes is quantized to these bytes, and so without an error.

What a network reads of an image was a byte once: ``x_c = (p / 255 − mean_c) / std_c`` has 256 values a channel, other
ones in each. A scale and a zero point for the whole tensor round all of them to something else, and where the mean is
a half, every one lies midway between two integers. With a scale for each channel,

    p = x_c / s_c + ζ_c,    u = p − Z,    Σ W_c x_c = Σ (W_c s_c) u + Σ W_c s_c (Z − ζ_c),

``Z`` one zero point for all and ``ζ`` what zero is on a channel's own scale, no integer as a rule. So the scales go
into the weights that read the image and the rest into their bias (``graphs/pixels.py`` has the operator). Rounding the
input is a fifth of all error in a ResNet-20, an eighth in a ViT and a tenth in a MobileNetV2.

A model that normalises by itself, ``f_c p + h_c``, is the same with other scales and zeros: its products and sums go
the same way, and what it is given is quantized. Bytes that it is given as such are not even that.

The steps are found in the calibration samples: differences of values that were seen, fitted to all of them. Where a
convolution pads with zeros, and these are another byte in each channel, one channel more holds a number ``m`` within
the image and Z around it, and the rest has a weight there in place of the bias,

    Σ W_c x_c = Σ (W_c s_c) u + V m,    V = Σ W_c s_c (Z − ζ_c) / m,

which is exact at the border too. Where zero is midway between two bytes, half a step is added first. What takes a
runtime time that it would not take otherwise has to be worth it: the network has to have many products for each number
of the image.

Left as they are: inputs that anything but one convolution reads, and those whose values are no 256 steps apart: resized
after they were made floats, or of few levels. The bytes begin where all of the calibration has them. Samples that are
unlike those are rounded to bytes, and clipped where these end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from qtool.errors import UsageError
from qtool.graphs.edits import call_before, parameter, set_parameter
from qtool.graphs.operators import CONVOLUTIONS, aten
from qtool.graphs.pixels import LEVELS, PIXELS, ZERO
from qtool.nested import first, micro_batches
from qtool.quantization.algorithms.subject import NothingToDo, Subject
from qtool.quantization.algorithms.walk import arranged
from qtool.quantization.residence import device_of
from qtool.quantization.rewrites.affines import affine_at
from qtool.quantization.rewrites.input_affines import fold, owns_weights
from qtool.quantization.rewrites.norms import readers_of
from qtool.quantization.targets.base import UINT8

SAMPLES = 64
"""How many samples the steps are looked for in, where there are so many: the first, so that no others are read."""
ENOUGH = 2**18
"""In about how many values of a channel the steps are found; the others have to agree."""
FEWEST = 64
"""Values that a channel takes at least, and half the steps: one of few levels may be a coarse choice of finer ones."""
MOST_CHANNELS = 16
NOISE = 0.01
"""How far off its step a value may be, in steps: float32 is off by some 10⁻⁵."""
COPY, CHANNEL = 10_000, 100_000
"""Products for each number of an image from which on a copy of it takes about a hundredth of the time, or less, and
from which on a third more of a first layer of stride 2 does, whose channels are four times as many in ONNX Runtime."""
WORD = 4
"""Channels that kernels take at once."""
HALVES = 0.48
"""From here on a fraction is so near a half that rounding it is in doubt."""


@dataclass(frozen=True)
class Grid:
    """The step of each channel of an input, and what zero is in steps above the first, float64 of length C."""

    scales: Tensor
    zeros: Tensor

    @property
    def zero_point(self) -> int:
        """The one for all channels."""
        return int(self.zeros.mean().round().clamp(0, LEVELS - 1))

    @property
    def is_even(self) -> bool:
        """Whether the zero point is the byte nearest to zero in each channel."""
        return bool(((self.zeros - self.zero_point).abs() <= 0.5).all())

    @property
    def shift(self) -> Tensor:
        """What keeps the numbers of a channel away from halves of a step; 0 where they are."""
        fraction = self.zeros - self.zeros.round()
        return self.scales * fraction * (fraction.abs() > HALVES).any()

    def behind(self, factor: Tensor, shift: Tensor) -> Grid:
        """The steps of ``factor · x + shift``, of the same bytes."""
        return Grid(self.scales * factor, self.zeros - shift / (self.scales * factor))


@dataclass(frozen=True)
class Stem:
    """The convolution that alone reads an input of the model, which may be moved and normalised on the way.

    ``moves`` change the order of its axes or its type; ``factor`` and ``shift``, float64 of length C or 1, normalise.
    """

    source: Node
    conv: Node
    moves: tuple[Node, ...]
    factor: Tensor
    shift: Tensor

    @property
    def image(self) -> Tensor:
        """What the convolution reads, without its numbers."""
        assert isinstance(self.conv.args[0], Node)
        image: Tensor = self.conv.args[0].meta["val"]
        return image

    @property
    def pads(self) -> bool:
        """Whether the convolution does."""
        return any(_argument(self.conv, 4, ()))

    @property
    def normalizes(self) -> bool:
        """Whether the model has a product, a sum or a change of type, which take time themselves."""
        return self.source.meta["val"].dtype != self.image.dtype or bool((self.factor != 1).any() or self.shift.any())

    def channels_of(self, value: Tensor) -> Tensor:
        """The numbers of each channel of a value of the input, C × numbers."""
        for move in self.moves:
            value = move.target(value, *move.args[1:])  # type: ignore[operator]
        return value.transpose(0, 1).flatten(1)


@torch.no_grad()
def read_pixels(subject: Subject) -> None:
    """Quantizes an input that holds bytes by channel, in place; notes which.

    Raises Declined where no input of an integer convolution does, or the network is too small for a copy of it.
    """
    if subject.config.weights_only:
        raise NothingToDo("activations stay in float")
    stems = _stems(subject)
    if not stems:
        raise NothingToDo("no input is read by one integer convolution alone")
    if subject.config.ranges_from is not None:
        saved = subject.saved("pixels", stems)
        grids = {name: _restored(name, entry, stems[name]) for name, entry in saved.items()}
    else:
        grids = _grids(subject, stems)
    if not grids:
        return
    for name, grid in grids.items():
        _rewrite(subject.graph, stems[name], grid)
        entry = {"scales": grid.scales.tolist(), "zeros": grid.zeros.tolist()}
        subject.ranges.setdefault(name, {})["pixels"] = entry
    subject.graph.graph.eliminate_dead_code()
    subject.graph.recompile()
    subject.place_anew()
    subject.note(f"pixels: the bytes of {', '.join(grids)} are quantized by channel, without an error")


def _restored(name: str, entry: Mapping[str, Any], stem: Stem) -> Grid:
    """A saved grid. Raises UsageError where it is not one of as many channels as the convolution reads."""
    channels = stem.image.shape[1]
    try:
        parts = [torch.tensor(entry[part], dtype=torch.float64) for part in ("scales", "zeros")]
        found = f"{' and '.join(str(len(part)) for part in parts)} numbers"
        fits = all(part.shape == (channels,) and bool(part.isfinite().all()) for part in parts)
        fits &= bool((parts[0] > 0).all())
    except (KeyError, TypeError, ValueError):
        found, fits = "none", False
    if not fits:
        raise UsageError(
            "--ranges-from", f"a step above 0 and a zero for each of the {channels} channels of '{name}'", found,
            "use the ranges of the same model, or calibrate anew",
        )  # fmt: skip
    return Grid(*parts)


def _stems(subject: Subject) -> dict[str, Stem]:
    """The integer convolutions that alone read an input of the model, by the input's name."""
    readers, placement = readers_of(subject.graph), subject.placement
    layers = {placed.anchor: placed for placed in placement.layers}
    found = {}
    for node in subject.graph.graph.find_nodes(op="placeholder"):
        stem = _stem(subject.graph, node)
        if stem is None or (placed := layers.get(stem.conv)) is None:
            continue
        conv, read = stem.conv, stem.conv.args[0]
        assert isinstance(read, Node)
        plain = conv.target in CONVOLUTIONS[:3] and _argument(conv, 6, 1) == 1 and owns_weights(conv, readers)
        alone = placed.operands == [read] and conv.meta["val"].dim() == read.meta["val"].dim()
        if plain and alone and stem.image.shape[1] <= MOST_CHANNELS and placement.activation_format(read) == UINT8:
            found[str(node.target)] = stem
    return found


def _stem(graph: GraphModule, source: Node) -> Stem | None:
    """The convolution that alone reads an input, behind what moves and normalises it; None where anything else does."""
    node, moves = source, []
    factor, shift = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    while (reader := _only_reader(node)) is not None and reader.target not in CONVOLUTIONS:
        if (found := affine_at(graph, reader, {node}, whole=True)) is not None:
            node, _, more, plus = found
            factor, shift = factor * more.cpu(), shift * more.cpu() + plus.cpu()
        elif _keeps_numbers(reader) and len(factor) == len(shift) == 1:
            node = reader
            moves.append(reader)
        else:
            return None
    value = node.meta["val"]
    fits = isinstance(value, Tensor) and value.dim() > 2 and isinstance(value.shape[1], int) and bool(factor.all())
    return Stem(source, reader, tuple(moves), factor, shift) if reader is not None and fits else None


def _keeps_numbers(node: Node) -> bool:
    """Whether an operator changes the order of axes, or makes floats of at least 32 bits."""
    wide = node.target is aten.to.dtype and node.args[1] in (torch.float32, torch.float64)
    return wide or node.target in (aten.permute.default, aten.transpose.int)


def _only_reader(node: Node) -> Node | None:
    readers = [user for user in node.users if user.target is not aten.sym_size.int]
    return readers[0] if len(readers) == 1 else None


def _grids(subject: Subject, stems: Mapping[str, Stem]) -> dict[str, Grid]:
    """The grids of those inputs whose values lie on one, over a few samples, and that are worth what they take."""
    names = [node for node in subject.graph.graph.nodes if node.op == "placeholder"]
    values: dict[str, list[Tensor]] = {name: [] for name in stems}
    samples = (sample for batch in first(subject.batches, SAMPLES) for sample in micro_batches(batch, 1))
    for sample in islice(samples, SAMPLES):
        for node, value in zip(names, arranged(sample, names), strict=True):
            if node.target in stems and not _is_bytes(node):
                values[str(node.target)].append(stems[str(node.target)].channels_of(value))
    found = {}
    for name, channels in values.items():
        grid = _bytes(stems[name].image.shape[1]) if _is_bytes(stems[name].source) else grid_of(channels)
        if grid is not None:
            found[name] = grid
    if not found:
        raise NothingToDo("the values of no input are 256 steps of one size")
    work = _work(subject)
    kept = {name: grid for name, grid in found.items() if _least_work(stems[name], grid) <= work}
    if not kept:
        raise NothingToDo("the network is so small that this would take more than a hundredth of its time")
    return kept


def _is_bytes(source: Node) -> bool:
    return bool(source.meta["val"].dtype == torch.uint8)


def _bytes(channels: int) -> Grid:
    """The steps of bytes."""
    return Grid(torch.ones(channels, dtype=torch.float64), torch.zeros(channels, dtype=torch.float64))


def grid_of(pieces: Sequence[Tensor]) -> Grid | None:
    """The 256 steps that all values of each channel lie on, of tensors C × values; None where they do not."""
    counted = accumulate(piece.shape[1] for piece in pieces)
    head = [piece for piece, count in zip(pieces, counted, strict=True) if count - piece.shape[1] < ENOUGH]
    lines = [_line(channel) for channel in torch.cat(head, 1).double()] if head else []
    found = [line for line in lines if line is not None]
    if not found or len(found) < len(lines):
        return None
    kind: dict[str, Any] = {"dtype": torch.float64, "device": pieces[0].device}
    steps, starts = (torch.tensor(part, **kind)[:, None] for part in zip(*found, strict=True))
    ends = []
    for piece in pieces:  # one at a time, since large images are as many numbers again in float64
        places = (piece.double() - starts) / steps
        if not bool((places - places.round()).abs().max() <= NOISE):  # nor where one is NaN
            return None
        ends.append(torch.stack(places.aminmax(dim=1)))
    least, most = torch.stack(ends)[:, 0].amin(0).round(), torch.stack(ends)[:, 1].amax(0).round()
    room = LEVELS - 1 - (most - least)
    if bool((room < 0).any()) or bool((room >= LEVELS / 2).any()):
        return None
    zeros = -starts[:, 0] / steps[:, 0] - least  # in steps above the least value that was seen, which is byte ``byte``
    byte = (room // 2).maximum(-zeros.floor()).minimum(LEVELS - 1 - zeros.ceil())  # zero is a byte, where it can be
    byte = byte.minimum(room).maximum(torch.zeros_like(room))
    return Grid(steps[:, 0].cpu(), (zeros + byte).cpu())


def _line(values: Tensor) -> tuple[float, float] | None:
    """The step and the start of the line of steps that all values lie on; None where they are too few or too many."""
    levels = torch.unique(values)
    if not bool(levels.isfinite().all()) or len(levels) < FEWEST:
        return None
    apart = levels.diff() > (levels[-1] - levels[0]) / LEVELS * NOISE
    levels = levels[torch.cat([apart.new_ones(1), apart])]
    if not FEWEST <= len(levels) <= LEVELS:
        return None
    step, start = levels.diff().min(), levels[0]
    for _ in range(2):  # least squares, by the places that the last ones gave
        places = ((levels - start) / step).round()
        centred = places - places.mean()
        step = (centred * levels).sum() / centred.square().sum()
        start = levels.mean() - step * places.mean()
    return float(step), float(start)


def _work(subject: Subject) -> float:
    """How often the layers of a network multiply for each number of its images; 0 where that is open."""
    products = 0
    for anchor in (placed.anchor for placed in subject.placement.layers):
        weight, sizes = anchor.args[1], anchor.meta["val"].shape[1:]
        if not all(isinstance(size, int) for size in sizes) or not isinstance(weight, Node):
            return 0.0
        products += math.prod(sizes) * math.prod(weight.meta["val"].shape[1:])
    images = (node.meta["val"] for node in subject.graph.graph.nodes if node.op == "placeholder")
    return products / sum(math.prod(image.shape[1:]) for image in images if isinstance(image, Tensor))


def _needs_channel(stem: Stem, grid: Grid) -> bool:
    """Whether the zeros that a convolution pads with are other bytes than the zero point."""
    return stem.pads and not grid.behind(stem.factor, stem.shift).is_even


def _least_work(stem: Stem, grid: Grid) -> int:
    """From how much work on a network an image is worth being quantized so; see :func:`_work`.

    A channel is none where a kernel wants them by fours (``exporting/passes/even_inputs.py``), or where what the model
    did before takes as long.
    """
    if grid.shift.any():
        return COPY
    filled = set(_argument(stem.conv, 3, (1,))) == {1} and (stem.image.shape[1] + 1) % WORD == 0
    return CHANNEL if _needs_channel(stem, grid) and not (filled or stem.normalizes) else 0


def _rewrite(graph: GraphModule, stem: Stem, grid: Grid) -> None:
    """Puts the operator between an input and its convolution, and into the latter's weights what it takes out."""
    conv, meant = stem.conv, grid.behind(stem.factor, stem.shift)
    zero, rest = meant.zero_point, meant.scales * (meant.zero_point - meant.zeros)
    inside = _add_channel(graph, conv, meant.scales, rest, zero) if _needs_channel(stem, grid) else None
    parts = {"scale": grid.scales, "zero_point": grid.zeros.round() - zero, "shift": grid.shift}
    stored = []
    for part, value in parts.items():
        name, column = f"{stem.source.target}_pixels_{part}", value.reshape([-1] + [1] * (conv.meta["val"].dim() - 2))
        set_parameter(graph, name, column.float().to(device_of(graph)))
        with conv.graph.inserting_before(conv):
            stored.append(conv.graph.get_attr(name))
        stored[-1].meta["val"] = stem.image.new_empty(column.shape)
    image = stem.source
    for move in stem.moves:
        if move.target is not aten.to.dtype:  # the operator takes any
            image = call_before(move, move.target, image, *move.args[1:])
    made = call_before(conv, PIXELS, image, *stored, inside)
    made.meta |= {"unit": str(stem.source.target), ZERO: zero}
    conv.update_arg(0, made)
    if inside is None:
        fold(graph, conv, meant.scales.to(device_of(graph)), rest.to(device_of(graph)))


def _add_channel(graph: GraphModule, conv: Node, scales: Tensor, rest: Tensor, zero: int) -> float:
    """Gives a convolution's weights the scales and one channel more for the rest; returns what this one is full of.

    That is no greater than it takes for its weights not to be the greatest of any output, since their rounding counts
    by it everywhere.
    """
    node = conv.args[1]
    assert isinstance(node, Node)
    weight, path = parameter(graph, node), str(node.target)
    assert weight is not None
    by_input = [-1] + [1] * (weight.dim() - 2)
    wide = weight.detach().double()
    scaled, more = (wide * part.to(wide.device).reshape(by_input) for part in (scales, rest))
    column = more.sum(1, keepdim=True)
    largest, needed = (part.abs().flatten(1).amax(1) for part in (scaled, column))
    most = max(zero, LEVELS - 1 - zero)
    inside = float((needed / largest).nan_to_num(0, most, most).max().ceil().clamp(1, most))
    inside *= 1 if LEVELS - 1 - zero >= inside else -1
    set_parameter(graph, path, torch.cat([scaled, column / inside], 1).to(weight.dtype), like=path)
    node.meta["val"] = node.meta["val"].new_empty([*weight.shape[:1], weight.shape[1] + 1, *weight.shape[2:]])
    return inside


def _argument(node: Node, index: int, default: Any) -> Any:
    return node.args[index] if len(node.args) > index else default
