"""Fills channels up to whole vectors where that is quicker than computing without them.

ONNX Runtime's integer kernels take 16 channels at a time. A depthwise convolution has the rest of them one by one, a
matrix product its last outputs in smaller tiles: over 12 channels a depthwise convolution takes over twice the time of
one over 16, and the convolution that makes these 12 takes longer than one that makes 16. The channels added here are
zeros in every weight that makes them and in every weight that reads them, so that no sum changes:

    y = W₂ · f(W₁ x) = [W₂ 0] · f([W₁; 0] x).

What has to be filled up together is ``channels``' to say: a block gets its zeros behind its last
channel, in every tensor that has it. Blocks that are neighbours are filled up at once, to eights or sixteens, where all
that makes and reads them takes 3 % less time then; those that gain most for their weights first, until the file's
constants are 2 % more (of a small file by 1 kB). The model of the time is measured on AVX2.

Where zeros stand between a tensor's channels, and not behind them, the file's metadata say which channels are its own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir

from qtool.exporting.passes.biases import drop_unused
from qtool.exporting.passes.channels import Channels, Numbers, is_depthwise, is_single
from qtool.exporting.passes.parts import MOST_GROWTH, constant, dequantized, room, shape_of

VECTOR = 16
FILLS = (VECTOR // 2, VECTOR)
LEAST_GAIN, LEAST_OF_ALL = 0.03, 0.001
FEW = 1024
"""Numbers that a small file may grow by in any case."""
OWN_CHANNELS = "qtool.own_channels"
"""The metadata's key: for each quantized tensor with zeros between its channels, where its own begin and how many."""
FREE = ("QuantizeLinear", "DequantizeLinear", "Relu", "Clip", "Identity")
"""Operators that become part of others."""


def apply(model: ir.Model) -> int:
    """Rewrites in place; returns how many convolutions read or make more channels now."""
    channels = Channels(model.graph)
    left = max(room(model, MOST_GROWTH), FEW)
    added: dict[int, int] = {}
    for offers in sorted(_offers(channels), key=lambda offers: -offers[0].saved / offers[0].growth):
        for offer in offers:
            growth = _growth(channels, offer.readers, added, added | offer.added)
            if growth <= left:
                added |= offer.added
                left -= growth
                break
    changed = _widen(model, channels, added) if added else 0
    drop_unused(model)
    return changed


def own_channels(model: onnx.ModelProto) -> dict[str, list[int]]:
    """The places of the channels that a file's tensors had before, of those that have others between them."""
    told = {entry.key: entry.value for entry in model.metadata_props}
    runs = json.loads(told.get(OWN_CHANNELS, "{}")).items()
    return {name: [place for first, count in found for place in range(first, first + count)] for name, found in runs}


@dataclass(frozen=True)
class _Offer:
    """How many channels may be added to which blocks, what reads or gives them, and the time and bytes of that."""

    added: dict[int, int]
    readers: list[ir.Node]
    saved: float
    growth: int


def _offers(channels: Channels) -> list[list[_Offer]]:
    """What may be added to neighbours, what saves most first, for all of whom something saves enough."""
    readers: dict[int, dict[ir.Node, None]] = {}
    for node in channels.readers:
        for value in (*node.inputs, *node.outputs):
            for block in channels.rows.get(value, ()) if value is not None else ():
                readers.setdefault(block, {})[node] = None
    found = []
    times = {node: _time(channels, node, {}) for node in channels.readers}
    least = LEAST_OF_ALL * sum(times.values())
    for blocks in channels.neighbours():
        touched = list({node: None for block in blocks for node in readers.get(block, ())})
        before = sum(times[node] for node in touched)
        offers = []
        for fill in FILLS:
            free = [block for block in blocks if block not in channels.fixed and channels.sizes[block] % fill]
            added = {block: -channels.sizes[block] % fill for block in free}
            saved = before - sum(_time(channels, node, added) for node in touched)
            if added and saved > max(LEAST_GAIN * before, least):
                offers.append(_Offer(added, touched, saved, _growth(channels, touched, {}, added)))
        if offers:
            found.append(sorted(offers, key=lambda offer: -offer.saved))
    return found


def _num(channels: Channels, value: ir.Value | None, added: Mapping[int, int]) -> int:
    """How many channels a tensor has with what is added to its blocks."""
    row = channels.rows[value] if value is not None else []
    return sum(channels.sizes[block] + added.get(block, 0) for block in row)


def _growth(channels: Channels, nodes: list[ir.Node], before: Mapping[int, int], after: Mapping[int, int]) -> int:
    """How many bytes the weights, biases and scales of convolutions have more."""

    def numel(node: ir.Node, added: Mapping[int, int]) -> int:
        inputs = 1 if is_depthwise(node) else _num(channels, node.inputs[0], added)
        return (inputs * _taps(node) + 9) * _num(channels, node.outputs[0], added)

    return sum(numel(node, after) - numel(node, before) for node in nodes if node.op_type == "Conv")


def _time(channels: Channels, node: ir.Node, added: Mapping[int, int]) -> float:
    """About how long an operator takes over one image, in nanoseconds; where its size is open, over one place of it."""
    if node.op_type in FREE:
        return 0.0
    places, outputs = _num_places(node.outputs[0]), _num(channels, node.outputs[0], added)
    if node.op_type != "Conv":
        return 0.3 * outputs * max(_num_places(value) for value in (*node.inputs, *node.outputs) if value is not None)
    whole, rest = divmod(outputs, VECTOR)
    if is_depthwise(node):
        return places * _taps(node) * (0.7 * whole + 0.9 * rest)
    products = _taps(node) * _num(channels, node.inputs[0], added)
    narrow = 0 if rest in (0, VECTOR // 2) else 1 if rest < VECTOR // 2 else 2
    multiplied = 0.011 * products * VECTOR * (whole + (rest > 0))
    return places * (multiplied + narrow * (5 + 0.03 * products) + (10 if products % 4 else 0))


def _num_places(value: ir.Value) -> int:
    """Of an image, the product of the sizes that are known."""
    return math.prod(size for size in shape_of(value)[2:] if isinstance(size, int))


def _taps(conv: ir.Node) -> int:
    return math.prod(size for size in shape_of(conv.inputs[1])[2:] if isinstance(size, int))


def _widen(model: ir.Model, channels: Channels, added: Mapping[int, int]) -> int:
    """Adds channels to blocks, notes where tensors have them in between, and returns how many convolutions changed."""
    wider = {
        value: _places(channels, row, added) for value, row in channels.rows.items() if not added.keys().isdisjoint(row)
    }
    changed = 0
    for node in channels.readers:
        read, given = node.inputs[0], node.outputs[0]
        if node.op_type != "Conv" or read is None or wider.keys().isdisjoint((read, given)):
            continue
        changed += 1
        if depthwise := is_depthwise(node):
            node.attributes["group"] = ir.AttrInt64("group", len(wider[read]))
        _spread(model, node, 1, [wider.get(given), None if depthwise else wider.get(read)])
        if len(node.inputs) > 2 and given in wider:
            _spread(model, node, 2, [wider[given]])
    own = {}
    for value, places in wider.items():
        value.shape = ir.Shape([shape_of(value)[0], len(places), *shape_of(value)[2:]])
        source, runs = value.producer(), _runs(places)
        if source is not None and source.op_type == "QuantizeLinear" and len(runs) > 1:
            own[value.name] = runs
    if own:
        model.metadata_props[OWN_CHANNELS] = json.dumps(own)
    return changed


def _places(channels: Channels, row: list[int], added: Mapping[int, int]) -> Numbers:
    """For each channel that a tensor will have which one of its own that is; -1 for one that is added."""
    places: list[int] = []
    own = 0
    for block in row:
        places += [*range(own, own + channels.sizes[block]), *[-1] * added.get(block, 0)]
        own += channels.sizes[block]
    return np.array(places)


def _runs(places: Numbers) -> list[tuple[int, int]]:
    """Where a tensor's own channels begin and how many stand side by side, run for run."""
    own = np.flatnonzero(places >= 0)
    return [(int(run[0]), len(run)) for run in np.split(own, np.flatnonzero(np.diff(own) > 1) + 1)]


def _spread(model: ir.Model, node: ir.Node, index: int, places: Sequence[Numbers | None]) -> None:
    """Gives a convolution's weight or bias zeros, by axis; new output channels have the scale of those before them."""
    value = node.inputs[index]
    if value is None:
        return
    base = f"{node.name or node.outputs[0].name}/even/{index}"
    source = value.producer()
    if source is None:
        node.replace_input_with(index, _longer(model, value, base, places))
        return
    stored, *factors = source.inputs
    assert stored is not None
    inputs = [_longer(model, stored, base, places)]
    last = None if places[0] is None else np.maximum.accumulate(places[0])
    for place, factor in enumerate(factors):
        longer = last is not None and factor is not None and not is_single(factor)
        inputs.append(_longer(model, factor, f"{base}/{place}", [last]) if longer and factor else factor)
    dequantized(model, node, index, inputs, f"{base}/float")


def _longer(model: ir.Model, value: ir.Value, name: str, places: Sequence[Numbers | None]) -> ir.Value:
    """A new constant: of ``value``, along each axis, the entries at ``places``, zeros at -1; all where it says none."""
    assert value.const_value is not None
    numbers = value.const_value.numpy()
    for axis, chosen in enumerate(places):
        if chosen is not None:
            numbers = numbers.take(np.maximum(chosen, 0), axis)
            np.moveaxis(numbers, axis, 0)[chosen < 0] = 0
    return constant(model, name, numbers)
