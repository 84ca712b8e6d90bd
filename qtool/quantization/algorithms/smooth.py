"""SmoothQuant: outlier channels behind a normalisation are moved into the weights that read them.

In a transformer a few channels of what a layer norm hands to the linear layers behind it are many times as large as the
rest, for every token. They set the one scale of the tensor, and all other channels share a handful of steps. Weights
have no such channels, so part of the spread is handed to them (Xiao et al., arXiv 2211.10438):

    s_c = max|x_c|^α / max|w_c|^(1−α),      γ' = γ / s,   β' = β / s,   W' = W · diag(s)

which computes the same. ``max|w_c|`` is over all the layers that read the norm (query, key and value share one). The
paper takes α = ½ for most models and more for some. Here a few are tried on a sample of rows, each by what it is about:
the mean squared error of the readers' outputs with inputs and weights rounded, bias-corrected (the mean error is taken
out) and summed over readers, each relative to its own output. Where none is better than leaving the norm as it is, it
is left. Of few rows (a norm behind a pooling has one a sample) each quarter is judged by the extremes of the others:
α near 1 makes all that was seen of each channel fill the range, and clips what was not. A pass over the first
``SAMPLES`` samples is all that it costs, and a model without such norms costs nothing.

The factors are saved beside the ranges that were observed behind them, and taken from there where these are repeated.

A norm is a layer norm, a root-mean-square norm, or a product with a stored number for each channel, as many models end
the latter. What reads it are linear layers and, where its channels are moved to the front (ConvNeXt), convolutions:
each of their taps is judged like an output of its own.

The model's own inputs are worse: the columns of a table, or the sensors of a series, have units, and one of them is a
thousand times as large as another, or has a tail. What such layers read of inputs, normalised, taken apart or joined
with others before, gets a product of its own, ``x / s``, where that takes half of their error away (``INPUT_GAIN``).

Left out on purpose: images, whose channels have one unit, and layers behind anything else. Between two linear layers
that is equalization's business (``equalize.py``), and behind a GELU nothing can be moved. So is a norm that a residual
sum reads too (BERT).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from qtool.nested import first
from qtool.quantization.algorithms.streams import groups_of, unfit
from qtool.quantization.algorithms.subject import Declined, NothingToDo, Subject
from qtool.quantization.algorithms.verify import QMAX
from qtool.quantization.algorithms.walk import interpret
from qtool.quantization.capture import CONVOLUTIONS, aten, parameter, set_parameter
from qtool.quantization.placement import Placement
from qtool.quantization.residence import device_of
from qtool.quantization.rewrites.affines import affine_at
from qtool.quantization.targets.base import CELLS, RECURRENT
from qtool.shapes import same_sizes

SAMPLES = 128
"""How many samples channels are observed on, where there are so many."""
ALPHAS = (0.25, 0.4, 0.5, 0.6, 0.75, 0.9)
ROWS = 2048
"""About how many rows of each norm's output are kept to judge by."""
HELD = 4
"""How many parts few rows are judged in."""
GAIN = 0.98
"""The share of the error that has to be left for a change to be made."""
INPUT_GAIN = 0.5
"""The same for an input: the product is an operator more."""
_VECTORS: dict[Any, tuple[int, ...]] = {aten.layer_norm.default: (2, 3), aten.rms_norm.default: (2,)}
_TURNS = (aten.permute.default, aten.transpose.int)
_MOVES = (aten.reshape.default, aten.clone.default, aten.dropout.default, aten.contiguous.default)
_RECURRENT = RECURRENT.anchors[: -len(CELLS)]
_PARTS = (aten.select.int, aten.slice.Tensor)


@dataclass(eq=False)
class Place:
    """A norm, the layers that read it, the greatest integer of their weights, and what was seen of it.

    Its channels lie along ``axis``; ``gain`` is the share of the error that has to be left for a change to be made.
    """

    norm: Node
    readers: list[Node]
    axis: int = -1
    gain: float = GAIN
    qmax: int = QMAX
    low: Tensor = field(default_factory=lambda: torch.zeros(()))
    high: Tensor = field(default_factory=lambda: torch.zeros(()))
    kept: list[Tensor] = field(default_factory=list)
    rows: int = 0


@torch.no_grad()
def smooth(subject: Subject) -> None:
    """Moves outlier channels out of every norm's output that gains by it, in place; notes how many and why not others.

    Raises Declined where no norm is read by linear layers and convolutions alone.
    """
    if subject.config.weights_only:
        raise NothingToDo("activations stay in float")
    products = _give_products(subject)
    try:
        found = {node: place_of(node) for node in subject.graph.graph.nodes if _vectors(node)}
        for place in map(found.get, products):
            if isinstance(place, Place):
                place.gain = INPUT_GAIN
        if subject.config.ranges_from is not None:
            told = _repeat(subject, found, products)
        else:
            told = _choose(subject, _places(subject, found), products)
    finally:
        _take_back(subject, products)
    subject.note(f"smooth: {told}")


def _give_products(subject: Subject) -> dict[Node, Node]:
    """Multiplies what integer layers read of the inputs, or saved factors are for, by ones: product → what it is of."""
    products: dict[Node, Node] = {}
    raw: set[Node] = set()
    graph, integer = subject.graph, set(_rounded_weights(subject))
    saved = subject.ranges if subject.config.ranges_from is not None else {}
    for node in list(graph.graph.nodes):
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or value.dtype != torch.float32 or not _is_raw(graph, node, raw):
            continue
        raw.add(node)
        for axis in range(value.dim() - 1, 0, -1) if value.dim() in (2, 3) else ():
            layers = [user for user in node.users if user.args[0] is node and _reads(user, axis)]
            fit = integer.issuperset(layers) or _product_name(node) in saved
            several = isinstance(value.shape[axis], int) and value.shape[axis] > 1
            if layers and fit and several and not (_vectors(node) and _axis(node) == axis):
                products[_multiply(graph, node, axis, layers)] = node
    if products:
        _place_anew(subject)
    return products


def _is_raw(graph: GraphModule, node: Node, raw: set[Node]) -> bool:
    """Whether a node is an input of the model, or moves, joins or normalises some of ``raw``."""
    if node.op == "placeholder" or raw.isdisjoint(node.all_input_nodes):
        return node.op == "placeholder"
    if node.target in (*_PARTS, *_TURNS, *_MOVES, aten.cat.default, aten.to.dtype):
        return True
    return any(affine_at(graph, node, raw, axis, whole=True) is not None for axis in (-1, 1))


def _product_name(node: Node) -> str:
    return f"{node.name}_columns"


def _multiply(graph: GraphModule, node: Node, axis: int, layers: list[Node]) -> Node:
    """A product of each channel with 1 between a node and these of its readers."""
    value, name = node.meta["val"], _product_name(node)
    ones = torch.ones([value.shape[axis]] + [1] * (value.dim() - 1 - axis), device=device_of(graph))
    set_parameter(graph, f"{name}_scale", ones)
    with graph.graph.inserting_after(node):
        stored = graph.graph.get_attr(f"{name}_scale")
    stored.meta["val"] = value.new_empty(ones.shape)
    with graph.graph.inserting_after(stored):
        product = graph.graph.create_node("call_function", aten.mul.Tensor, (node, stored), name=name)
    product.meta |= {**node.meta, "val": value}
    for layer in layers:
        layer.update_arg(0, product)
    return product


def _take_back(subject: Subject, products: Mapping[Node, Node]) -> None:
    """Takes away the products that are by 1 still."""
    graph = subject.graph
    for product, node in products.items():
        stored = product.args[1]
        value = parameter(graph, stored)
        assert isinstance(stored, Node)
        assert value is not None
        if bool((value == 1).all()):
            product.replace_all_uses_with(node)
            graph.graph.erase_node(product)
            graph.graph.erase_node(stored)
            delattr(graph, str(stored.target))
    if products:
        _place_anew(subject)
    graph.recompile()


def _place_anew(subject: Subject) -> None:
    subject.placement = Placement(subject.graph, subject.placement.target, subject.placement.overrides)


def _places(subject: Subject, found: Mapping[Node, Place | str]) -> tuple[list[Place], list[Node]]:
    """What is worth moving, and all norms; notes why others are left."""
    told = {norm: _unrounded(place, subject) if isinstance(place, Place) else place for norm, place in found.items()}
    norms = [norm for norm, reason in told.items() if norm.target in _VECTORS or not reason]
    if not norms:
        raise NothingToDo("there is no layer norm")
    for reason, count in sorted(Counter(told[norm] for norm in norms if told[norm]).items()):
        subject.note(f"smooth: {count} of {len(norms)} norms left as they are: {reason}")
    places = [place for norm in norms if not told[norm] and isinstance(place := found[norm], Place)]
    if not places:
        raise Declined("no norm is read by integer layers alone")
    return places, norms


def _repeat(subject: Subject, found: Mapping[Node, Place | str], products: Collection[Node]) -> str:
    """Applies the factors that were saved with the ranges, whichever layers are integer this time."""
    places = {norm.name: place for norm, place in found.items() if isinstance(place, Place)}
    saved = subject.saved("smooth", places)
    norms = [norm for norm in found if norm.target in _VECTORS or norm.name in saved]
    if not norms:
        raise NothingToDo("there is no layer norm")
    for name, scales in saved.items():
        apply(subject.graph, places[name], torch.tensor(scales).to(subject.device))
    return f"as saved with the ranges in {_counted([places[name].norm for name in saved], norms, products)}"


def _choose(subject: Subject, found: tuple[list[Place], list[Node]], products: Collection[Node]) -> str:
    """Finds and applies each norm's best factors, and saves them."""
    places, norms = found
    _observe(subject, places)
    form = subject.placement.target.activation
    levels, changed = form.qmax - form.qmin, {}
    for place in places:
        alpha = best_alpha(subject.graph, place, levels)
        if alpha is not None:
            scales = factors(subject.graph, place, alpha)
            apply(subject.graph, place, scales)
            subject.ranges[place.norm.name] = {"smooth": scales.tolist()}
            changed[place.norm] = alpha
        place.kept.clear()
    if not changed and set(norms) <= set(products):
        raise NothingToDo("there is no layer norm, and no input whose channels are as far apart")
    told = f", α {min(changed.values()):g} to {max(changed.values()):g}" if changed else ""
    return f"rescaled {_counted(changed, norms, products)}{told}"


def _counted(changed: Collection[Node], norms: Collection[Node], products: Collection[Node]) -> str:
    """How many of the norms were changed, and of the inputs, where any was."""
    inputs = sum(norm in products for norm in norms)
    counts = {"norms": len(norms) - inputs, "inputs": inputs}
    done = sum(norm in products for norm in changed)
    parts = zip(counts.items(), (len(changed) - done, done), strict=True)
    return " and ".join(
        f"{part} of {count} {name}" for (name, count), part in parts if part or (count and name == "norms")
    )


def place_of(norm: Node) -> Place | str:
    """What of a norm can be moved, or why nothing can, whatever is quantized."""
    stored = [norm.args[i] for i in _vectors(norm) if i < len(norm.args)]
    if not stored or not isinstance(stored[0], Node):  # a bias alone is no place for a factor
        return "it has no weights"
    if reason := unfit(stored):
        return reason
    if norm.target in _VECTORS and len(norm.args[1]) != 1:  # type: ignore[arg-type]
        return "it normalises several dimensions"
    readers: list[Node] = []
    axis = _axis(norm)
    if (stranger := _gather(norm, axis, readers)) is not None:
        name = "the graph's output" if stranger.op == "output" else str(stranger.target).removeprefix("aten.")
        return f"{name.partition('.')[0]} reads it"
    reasons = (unfit(_weights(reader)) for reader in readers)
    return next(filter(None, reasons), "") or Place(norm, readers, axis)


def _unrounded(place: Place, subject: Subject) -> str:
    """Why nothing is gained by moving; empty where integer layers alone read the norm, whose bits are noted."""
    steps = _rounded_weights(subject)
    if not place.readers or not all(reader in steps for reader in place.readers):
        return "not all layers that read it are integer"
    place.qmax = min(steps[reader] for reader in place.readers)
    return ""


def _rounded_weights(subject: Subject) -> dict[Node, int]:
    """The layers whose weights will be integers, and the greatest of these; recurrent ones read floats with them."""
    steps = {p.anchor: subject.placement.weight_format(p).steps for p in subject.placement.layers}
    recurrent = {p.anchor: QMAX for p in subject.placement.placed if p.pattern and p.pattern.kind == RECURRENT.kind}
    return steps | recurrent


def _vectors(node: Node) -> tuple[int, ...]:
    """Which arguments of a node multiply or shift its channels; none for anything but a norm."""
    if node.target is not aten.mul.Tensor:
        return _VECTORS.get(node.target, ())
    held = [a.meta.get("val") if isinstance(a, Node) and a.op == "get_attr" else None for a in node.args[:2]]
    stored = [isinstance(value, Tensor) and _is_by_channel(value.shape, _shape(node)) for value in held]
    return (stored.index(True),) if sum(stored) == 1 else ()


def _is_by_channel(shape: torch.Size, whole: torch.Size) -> bool:
    """Whether numbers of this shape multiply along one axis of a tensor of shape ``whole``: C, C × 1, ..."""
    ahead = len(whole) - len(shape)
    return bool(shape) and ahead >= 0 and same_sizes(shape[:1], whole[ahead : ahead + 1]) and set(shape[1:]) <= {1}


def _axis(norm: Node) -> int:
    """The axis that a norm's channels lie along: the last one, but for a product with numbers of another shape."""
    if norm.target is not aten.mul.Tensor:
        return len(_shape(norm)) - 1
    return len(_shape(norm)) - len(_shape(norm.args[_vectors(norm)[0]]))


def _gather(node: Node, axis: int, readers: list[Node]) -> Node | None:
    """Collects the layers that read a node's channels, which lie along ``axis``, through moves; the first stranger."""
    for user in node.users:
        if user.args[0] is node and _reads(user, axis):
            readers.append(user)
        elif user.target is aten.sym_size.int:  # which reads no values
            continue
        elif (moved := _moved(user, axis)) is None:
            return user
        elif (stranger := _gather(user, moved, readers)) is not None:
            return stranger
    return None


def _reads(layer: Node, axis: int) -> bool:
    """Whether a layer's weights are for channels that lie along this axis of its input."""
    if layer.target not in (aten.linear.default, *_RECURRENT, *CONVOLUTIONS[:3]):
        return False
    rank = len(_shape(layer.args[0]))
    if layer.target not in CONVOLUTIONS:
        return axis == rank - 1
    return axis == rank - len(_shape(layer.args[1])) + 1 and groups_of(layer) == 1


def _moved(node: Node, axis: int) -> int | None:
    """Where a node that only moves a tensor's rows, or takes some of them, leaves its channels; None for any other."""
    if node.target not in (*_PARTS, *_TURNS, *_MOVES):
        return None
    before, after = _shape(node.args[0]), _shape(node)
    if node.target in _PARTS:
        dim = cast(int, node.args[1] if len(node.args) > 1 else 0) % len(before)
        return None if dim == axis else axis - (len(after) < len(before) and dim < axis)
    if node.target in _TURNS:
        turn = cast(Callable[..., Tensor], node.target)
        return turn(torch.empty(tuple(range(len(before))), device="meta"), *node.args[1:]).shape.index(axis)
    if node.target is aten.reshape.default:
        kept = axis == len(before) - 1 and same_sizes(after[-1:], before[-1:])
        return len(after) - 1 if kept else None
    return axis


def _shape(node: Any) -> torch.Size:
    shape: torch.Size = node.meta["val"].shape
    return shape


class _Observe(Interpreter):
    """Keeps a sample of rows and the extremes of each channel of some nodes."""

    def __init__(self, graph: GraphModule, places: list[Place]) -> None:
        super().__init__(graph)
        self.places = {place.norm: place for place in places}
        self.count = 0

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if n in self.places:
            place = self.places[n]
            flat = result.detach().movedim(place.axis, -1).flatten(0, -2)
            low, high = torch.aminmax(flat, dim=0)
            place.low, place.high = torch.minimum(place.low, low), torch.maximum(place.high, high)
            draw = torch.Generator().manual_seed(self.count)
            few = torch.randperm(len(flat), generator=draw)[: max(1, ROWS // 8)]
            if len(place.kept) < 16:
                place.kept.append(flat[few.to(flat.device)].clone())
            place.rows += len(flat)
        return result


def _observe(subject: Subject, places: list[Place]) -> None:
    watch = _Observe(subject.graph, places)
    for batch in first(subject.batches, SAMPLES):
        interpret(watch, batch)
        watch.count += 1
    if not watch.count:
        raise Declined("no calibration data")


def factors(graph: GraphModule, place: Place, alpha: float) -> Tensor:
    """s of each channel, scaled to a geometric mean of 1; 1 where a channel or its weights are all zero."""
    values = torch.maximum(place.high, -place.low)
    weights = torch.stack([_weight(graph, reader).abs().amax((0, 1)) for reader in place.readers]).amax(0)
    used = (values > 0) & (weights > 0)
    logs = torch.where(used, alpha * values.log() - (1 - alpha) * weights.log(), 0.0)
    logs = torch.where(used, logs - logs[used].mean() if bool(used.any()) else 0.0, 0.0)
    return logs.clamp(-14.0, 14.0).exp()


def best_alpha(graph: GraphModule, place: Place, levels: int) -> float | None:
    """The α of least error; None where leaving the norm as it is does about as well."""
    parts = _parts(place)
    plain = sum(output_error(graph, part, torch.ones_like(part.high), levels) for part in parts)
    errors = {a: sum(output_error(graph, part, factors(graph, part, a), levels) for part in parts) for a in ALPHAS}
    best = min(errors, key=errors.__getitem__)
    return best if errors[best] < place.gain * plain else None


def _parts(place: Place) -> list[Place]:
    """What a norm is judged by: the rows that were kept or, where these are all, each quarter by the others' range."""
    rows = torch.cat(place.kept)
    if place.rows > len(rows):
        return [place]
    parts = rows.tensor_split(min(HELD, max(1, len(rows) // 2)))
    others = [torch.cat([p for p in parts if p is not part] or [part]) for part in parts]
    ends = [torch.aminmax(rest, dim=0) for rest in others]
    return [
        dataclasses.replace(place, kept=[part], low=low.clamp(max=0.0), high=high.clamp(min=0.0))
        for part, (low, high) in zip(parts, ends, strict=True)
    ]


def output_error(graph: GraphModule, place: Place, scales: Tensor, levels: int) -> float:
    """The variance of the readers' output errors over that of their outputs, both quantized, with ``scales`` for s."""
    x = torch.cat(place.kept)
    low, high = (place.low / scales).amin().clamp(max=0.0), (place.high / scales).amax().clamp(min=0.0)
    step = ((high - low) / levels).clamp(min=1e-30)
    zero = (-low / step).round()
    rounded = (((x / scales) / step).round().clamp(-zero, levels - zero)) * step
    total = 0.0
    for reader in place.readers:
        weight = _weight(graph, reader)
        own = (weight * scales).abs().amax((1, 2), keepdim=True).clamp(min=1e-30) / place.qmax
        wanted, got = (
            rows @ taps.flatten(0, 1).T
            for rows, taps in ((x, weight), (rounded, (weight * scales / own).round() * own))
        )
        total += float((wanted - got).var(0).sum() / wanted.var(0).sum().clamp(min=1e-30))
    return total


def apply(graph: GraphModule, place: Place, scales: Tensor) -> None:
    """Divides the norm's weights by ``scales`` and multiplies the columns of its readers, in place."""
    for index in _vectors(place.norm):
        stored = place.norm.args[index] if index < len(place.norm.args) else None
        if isinstance(stored, Node):
            value = parameter(graph, stored)
            assert value is not None
            set_parameter(graph, str(stored.target), value / scales.reshape(value.shape))
    for stored in (stored for reader in place.readers for stored in _weights(reader)):
        weight = parameter(graph, stored)
        assert weight is not None
        set_parameter(graph, str(stored.target), weight * scales.reshape(-1, *[1] * (weight.dim() - 2)))


def _weights(reader: Node) -> list[Node]:
    """What a layer multiplies its input with: one weight, or that of each direction of a recurrent layer's first."""
    if reader.target not in _RECURRENT:
        return [cast(Node, reader.args[1])]
    parameters, _, count = cast(tuple[list[Node], bool, int], reader.args[2:5])
    directions = 2 if reader.args[7] else 1
    return parameters[: len(parameters) // count : len(parameters) // count // directions]


def _weight(graph: GraphModule, reader: Node) -> Tensor:
    """A layer's weights: outputs × taps × inputs."""
    found = [parameter(graph, stored) for stored in _weights(reader)]
    weight = torch.cat([part for part in found if part is not None])
    return weight.flatten(2).transpose(1, 2) if weight.dim() > 2 else weight[:, None]
