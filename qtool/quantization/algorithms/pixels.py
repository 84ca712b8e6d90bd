"""Pixels: an input that stands for bytes is quantized to these bytes, and so without an error.

What a network reads of an image was a byte once: ``x_c = (p / 255 − mean_c) / std_c`` has 256 values a channel, other
ones in each. A scale and a zero point for the whole tensor round all of them to something else, and where the mean is
a half, every one lies midway between two integers. With a scale for each channel,

    p = x_c / s_c + ζ_c,    u = p − Z,    Σ W_c x_c = Σ (W_c s_c) u + Σ W_c s_c (Z − ζ_c),

``Z`` one zero point for all and ``ζ`` what zero is on a channel's own scale, no integer as a rule. So the scales go
into the weights that read the image and the rest into their bias (``qtool/pixels.py`` has the operator). Rounding the
input is a fifth of all error in a ResNet-20, an eighth in a ViT and a tenth in a MobileNetV2.

The steps are found in the calibration samples: differences of values that were seen, fitted to all of them. Where a
convolution pads with zeros, and these are another byte in each channel, the image is padded before it is rounded, and
the border is off by half a step at most. Where zero is midway between two bytes, half a step is added first. Either
takes a runtime 0.3 to 0.5 ns a number, which is worth it where the network has many products for each. OpenVINO pads
in bfloat16 by itself where a CPU has AMX, which cost 2 dB more than was gained: for it nothing is padded.

Left as they are: inputs that anything but one convolution reads, and those whose values are no 256 steps apart: resized
after they were made floats, or of few levels; and those that are padded with a zero which lies beside all their bytes.
The bytes begin where all of the calibration has them. Samples that are unlike those are rounded to bytes, and clipped
where these end.
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
from qtool.nested import first, micro_batches
from qtool.pixels import LEVELS, PIXELS, ZERO
from qtool.quantization.algorithms.subject import NothingToDo, Subject
from qtool.quantization.algorithms.walk import arranged
from qtool.quantization.capture import CONVOLUTIONS, aten, call_before, set_parameter
from qtool.quantization.placement import Placement
from qtool.quantization.residence import device_of
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
WORK = 10_000
"""Products for each number of an image from which on a copy of it takes about a hundredth of the time, or less."""
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
    def holds_zero(self) -> bool:
        """Whether zero is rounded to a byte in each channel, and not clipped to one."""
        return bool(((self.zeros.round() >= 0) & (self.zeros.round() <= LEVELS - 1)).all())

    @property
    def shift(self) -> Tensor:
        """What keeps the numbers of a channel away from halves of a step; 0 where they are."""
        fraction = self.zeros - self.zeros.round()
        return self.scales * fraction * (fraction.abs() > HALVES).any()


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
    subject.placement = Placement(subject.graph, subject.placement.target, subject.placement.overrides)
    subject.note(f"pixels: the bytes of {', '.join(grids)} are quantized by channel, without an error")


def _restored(name: str, entry: Mapping[str, Any], conv: Node) -> Grid:
    """A saved grid. Raises UsageError where it is not one of as many channels as the convolution reads."""
    assert isinstance(conv.args[0], Node)
    channels = int(conv.args[0].meta["val"].shape[1])
    try:
        parts = [torch.tensor(entry[part], dtype=torch.float64) for part in ("scales", "zeros")]
        found = f"{' and '.join(str(len(part)) for part in parts)} numbers"
        fits = all(part.shape == (channels,) and bool(part.isfinite().all()) for part in parts) and parts[0].min() > 0
    except (KeyError, TypeError, ValueError):
        found, fits = "none", False
    if not fits:
        raise UsageError(
            "--ranges-from", f"a step above 0 and a zero for each of the {channels} channels of '{name}'", found,
            "use the ranges of the same model, or calibrate anew",
        )  # fmt: skip
    return Grid(*parts)


def _stems(subject: Subject) -> dict[str, Node]:
    """The integer convolutions that alone read an input of the model, by the input's name."""
    readers, placement = readers_of(subject.graph), subject.placement
    found = {}
    for placed in placement.layers:
        conv, source = placed.anchor, placed.anchor.args[0]
        assert isinstance(source, Node)
        others = [user for user in source.users if user is not conv and user.target is not aten.sym_size.int]
        plain = conv.target in CONVOLUTIONS[:3] and _argument(conv, 6, 1) == 1 and owns_weights(conv, readers)
        alone = source.op == "placeholder" and placed.operands == [source] and not others
        if plain and alone and conv.meta["val"].dim() == source.meta["val"].dim():
            few = source.meta["val"].shape[1] <= MOST_CHANNELS
            if few and placement.activation_format(source) == UINT8:
                found[str(source.target)] = conv
    return found


def _grids(subject: Subject, stems: Mapping[str, Node]) -> dict[str, Grid]:
    """The grids of those inputs whose values lie on one, over a few samples, and that are worth what they take."""
    names = [node for node in subject.graph.graph.nodes if node.op == "placeholder"]
    values: dict[str, list[Tensor]] = {name: [] for name in stems}
    samples = (sample for batch in first(subject.batches, SAMPLES) for sample in micro_batches(batch, 1))
    for sample in islice(samples, SAMPLES):
        for node, value in zip(names, arranged(sample, names), strict=True):
            if node.target in stems:
                values[str(node.target)].append(value.transpose(0, 1).flatten(1))
    found = {name: grid for name, channels in values.items() if (grid := grid_of(channels)) is not None}
    found = {name: grid for name, grid in found.items() if grid.holds_zero or not any(_own_padding(stems[name]))}
    if not found:
        raise NothingToDo("the values of no input are 256 steps of one size, with the zeros that a layer pads it by")
    if subject.placement.target.half_pads:
        found = {name: grid for name, grid in found.items() if not _padding(stems[name], grid)}
    if not found:
        raise NothingToDo("the runtime may pad an image in half precision, which its bytes are lost in")
    free = {name: grid for name, grid in found.items() if not (_padding(stems[name], grid) or grid.shift.any())}
    kept = found if _is_worth_a_copy(subject) else free
    if not kept:
        raise NothingToDo("the network is so small that a copy of its image would take a hundredth of its time")
    return kept


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


def _is_worth_a_copy(subject: Subject) -> bool:
    """Whether the layers of a network multiply so often that copying its image is nothing beside it."""
    products = 0
    for anchor in (placed.anchor for placed in subject.placement.layers):
        weight, sizes = anchor.args[1], anchor.meta["val"].shape[1:]
        if not all(isinstance(size, int) for size in sizes) or not isinstance(weight, Node):
            return False
        products += math.prod(sizes) * math.prod(weight.meta["val"].shape[1:])
    images = (node.meta["val"] for node in subject.graph.graph.nodes if node.op == "placeholder")
    return products >= WORK * sum(math.prod(image.shape[1:]) for image in images if isinstance(image, Tensor))


def _own_padding(conv: Node) -> list[int]:
    """What a convolution pads by; one number for each axis, or for all."""
    return list(_argument(conv, 4, ()))


def _padding(conv: Node, grid: Grid) -> list[int]:
    """What the image has to be padded by ahead of its convolution, last axis first; empty where it need not be."""
    own = _own_padding(conv)
    if not any(own) or bool(((grid.zeros - grid.zero_point).abs() <= 0.5).all()):
        return []
    axes = conv.meta["val"].dim() - 2
    return [amount for amount in reversed(own * (axes // len(own))) for _ in range(2)]


def _rewrite(graph: GraphModule, conv: Node, grid: Grid) -> None:
    """Puts the operator between an input and its convolution, and into the latter's weights what it takes out."""
    source = conv.args[0]
    assert isinstance(source, Node)
    padding, zero = _padding(conv, grid), grid.zero_point
    parts = {"scale": grid.scales, "zero_point": grid.zeros.round() - zero, "shift": grid.shift}
    stored = []
    for part, value in parts.items():
        name, column = f"{source.target}_pixels_{part}", value.reshape([-1] + [1] * (conv.meta["val"].dim() - 2))
        set_parameter(graph, name, column.float().to(device_of(graph)))
        with conv.graph.inserting_before(conv):
            stored.append(conv.graph.get_attr(name))
        stored[-1].meta["val"] = source.meta["val"].new_empty(column.shape)
    made = call_before(conv, PIXELS, source, *stored, padding)
    made.meta |= {"unit": str(source.target), ZERO: zero}
    conv.update_arg(0, made)
    if padding:
        conv.update_arg(4, [0] * (len(padding) // 2))
    device = device_of(graph)
    fold(graph, conv, grid.scales.to(device), (grid.scales * (zero - grid.zeros)).to(device))


def _argument(node: Node, index: int, default: Any) -> Any:
    return node.args[index] if len(node.args) > index else default
