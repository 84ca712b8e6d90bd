"""Whether the captured graph is the model: both compute the same samples, and have to agree.

All that follows is proven against the float graph, so that a fault of the capture itself (a value overwritten through
another name, a branch merged that should not have been) would be proven faithfully to the end. Rounding in another
order leaves 100 dB and more between the two, a wrong operator rarely 40.

Where axes behind the batch are open, both compute inputs of other sizes as well, where what torch wrote down of sizes
does not hold: a model whose code goes two ways by a size is told of, since its graph goes one. A model that takes
neither half nor twice the size of an axis does not leave it open.

A model that is random in evaluation differs from itself as much, and one whose outputs are all but nothing (some
untrained ones give 1e-41) from itself in float64. That is noted: there nothing can be told apart. So is a padded
sequence behind whose end torch's transformers have 0 in inference and numbers otherwise: the graph has the numbers.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from qtool.errors import QtoolError, UsageError
from qtool.evaluate import sqnr_db
from qtool.forward import passes_told
from qtool.graphs.shapes import input_values, open_axes
from qtool.graphs.structures import quiet_pytree
from qtool.models.specs import capturable, modes_kept, shortcut
from qtool.nested import call, map_tensors, num_samples, repeated, samples_of, tensors
from qtool.quantization.capturing.conditions import broken, resized
from qtool.system.devices import out_of_memory
from qtool.units import many

LEAST_DB = 60.0
ROUNDING_DB = 12.0
"""How much further than the model itself the graph may be from the model in float64."""
SAMPLES = 2
PADDED = (
    "torch's shortcut for transformers in inference puts 0 behind the end of a padded sequence: the graph has what the "
    "layers compute there, as training has"
)
RANDOM = "the captured graph was not compared with the model, which is random in evaluation"


def require_faithful(graph: GraphModule, model: nn.Module, example: Any) -> None:
    """Raises QtoolError where the graph's outputs are not the model's in evaluation, on samples of ``example``.

    Where nothing can be compared, the reason is added to the notes in the graph's ``meta``.
    """
    few = samples_of(example, 0, SAMPLES) if graph.meta.get("any_batch") else example
    if few is example:
        _require_single(model, example)
    _require_other_sizes(graph, model, few)
    wanted, found = _wanted(model, few, example), _floats(graph, few)
    least = _least(wanted, found)
    if least >= LEAST_DB:
        for axis in sorted(open_axes(graph)):
            _note_other_sizes(graph, model, few, axis)
        _note_padding(graph, model, example)
        return
    if _least(wanted, _evaluated(model, few)) < LEAST_DB:
        _note(graph, RANDOM)
        return
    exact = _exact(model, few)
    own = _least(exact, wanted)
    if own < LEAST_DB + ROUNDING_DB and _least(exact, found) > own - ROUNDING_DB:
        _note(graph, f"rounding decides what the model computes: in float32 it is {own:.1f} dB from itself in float64")
        return
    raise QtoolError(
        f"model '{type(model).__name__}'", f"a captured graph that computes what it does, to {LEAST_DB:.0f} dB",
        f"{least:.1f} dB on {many(num_samples(few), 'sample')}", "report this model: the capture changed its meaning",
    )  # fmt: skip


def _wanted(model: nn.Module, few: Any, example: Any) -> list[Tensor]:
    """What the model computes of ``few`` samples of ``example``. Raises QtoolError where it does not take them."""
    where = f"model '{type(model).__name__}' on {many(num_samples(few), 'sample')} of the first batch"
    try:
        with passes_told(where):
            return _evaluated(model, few)
    except QtoolError as error:
        if few is not example and _takes(model, example):
            raise QtoolError(
                where, "inputs with the samples along the first axis", f"{error.got}, though it takes the whole",
                "put a batch axis first: of a graph's nodes and edges, say, which belong together, in each input",
            ) from error.__cause__  # fmt: skip
        raise


def _require_single(model: nn.Module, example: Any) -> None:
    """Raises QtoolError where batches have to be of a multiple of samples: ranges and gates ask for each by itself."""
    where = f"model '{type(model).__name__}'"
    try:
        with passes_told(where):
            _evaluated(model, samples_of(example, 0, 1))
    except QtoolError as error:
        if _takes(model, example):
            raise QtoolError(
                where, "batches of any number of samples",
                f"{error.got}, of one sample, though it takes {num_samples(example)}",
                "give what it folds into the batch (frames, views) an axis of its own, and fold it in forward",
            ) from error.__cause__  # fmt: skip
        raise


def _takes(model: nn.Module, inputs: Any) -> bool:
    with contextlib.suppress(Exception):
        _evaluated(model, inputs)
        return True
    return False


def _require_other_sizes(graph: GraphModule, model: nn.Module, inputs: Any) -> None:
    """Raises UsageError for an open axis of which the model refuses both half and twice the size of ``inputs``.

    All open axes together may still be what it takes, since height and width can have to be equal; a model that takes
    one larger where another is smaller (as many patches as before) is noted. Where other inputs have the axis and it
    is another matter there, nothing is asked.
    """
    axes = sorted(open_axes(graph))
    for axis in axes:
        sizes = [value.shape[axis] for value in input_values(graph.graph).values() if value.dim() > axis]
        if not all(str(size).isidentifier() for size in sizes):  # a number, or computed from another size
            continue
        alike = [dict.fromkeys(among, factor) for among in ([axis], axes) for factor in (0.5, 2)]
        opposed = [{changed: factor if changed == axis else 1 / factor for changed in axes} for factor in (0.5, 2)]
        if (told := _refusal(model, inputs, alike)) is None:
            continue
        if len(axes) > 1 and _refusal(model, inputs, opposed) is None:
            _note(graph, f"axis {axis}: the model takes another size only where another axis makes up for it")
            return
        got = f"axis {axis}, where the model refuses half and twice the size: {type(told).__name__}: {told}"[:300]
        do = "have the model take any size (a mean or an adaptive pooling before a linear layer), or leave it out"
        raise UsageError("--dynamic-axes", "axes of the inputs whose size the model leaves open", got, do)


def _refusal(model: nn.Module, inputs: Any, changes: Iterable[dict[int, float]]) -> Exception | None:
    """What the model says last of inputs with axes so many times as long; None where it takes some of them."""
    told: Exception | None = None
    for change in changes:
        changed = inputs
        for axis, factor in change.items():
            changed = map_tensors(functools.partial(_scaled, axis=axis, factor=factor), changed)
        try:
            _evaluated(model, changed)
            return None
        except Exception as error:  # whatever a model's own code may say of a size
            if out_of_memory(error):
                return None
            told = error
    return told


def _scaled(value: Tensor, axis: int, factor: float) -> Tensor:
    return repeated(value, axis, max(1, int(value.shape[axis] * factor))) if value.dim() > axis else value


def _note_padding(graph: GraphModule, model: nn.Module, inputs: Any) -> None:
    """Notes where torch's own transformer, in inference, does not return what its layers compute."""
    if not any(isinstance(module, nn.TransformerEncoder) for module in model.modules()):
        return
    if _least(_evaluated(model, inputs), _evaluated(model, inputs, quick=True)) < LEAST_DB:
        _note(graph, PADDED)


def _note_other_sizes(graph: GraphModule, model: nn.Module, inputs: Any, axis: int) -> None:
    """Notes the first size of an open axis, near that of ``inputs``, at which model and graph part.

    They can where a guard does not hold, and that says nothing where the model refuses the size itself.
    """
    guards = graph.meta.get("guards", ())
    given = next(int(value.shape[axis]) for value in tensors(inputs) if value.dim() > axis)
    for size in (given // 2, given - 1, given + 1, given * 2):
        told = broken(guards, model, [resized(inputs, axis, size)])
        if told and not _agree(graph, model, map_tensors(functools.partial(repeated, axis=axis, size=size), inputs)):
            short = min(told, key=len)
            _note(graph, f"axis {axis}: of size {size}, the model computes another thing than its graph, "
                         f"which was captured for {short}")  # fmt: skip
            return


def _agree(graph: GraphModule, model: nn.Module, inputs: Any) -> bool:
    """Whether the model and its graph compute the same of inputs, or the model refuses them."""
    try:
        wanted = _evaluated(model, inputs)
    except Exception:  # whatever a model's own code may say of a size
        return True
    try:
        return _least(wanted, _floats(graph, inputs)) >= LEAST_DB
    except Exception:  # the graph's operators, of a size that is not theirs
        return False


def _exact(model: nn.Module, inputs: Any) -> list[Tensor]:
    """What the model computes in float64; nothing where it cannot."""
    wide = map_tensors(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor, inputs)
    try:
        return [value.float() for value in _evaluated(copy.deepcopy(model).double(), wide)]
    except Exception:  # whatever a model's own code may say of another type, or of being copied
        return []


def _evaluated(model: nn.Module, inputs: Any, *, quick: bool = False) -> list[Tensor]:
    """What the model computes in evaluation, ``quick``: with torch's shortcut; modes and buffers are as before."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        with modes_kept(model), capturable(model), shortcut(quick):
            return _floats(model.eval(), inputs)
    finally:
        for buffer, before in buffers:
            buffer.copy_(before)


def _floats(model: nn.Module, inputs: Any) -> list[Tensor]:
    with torch.no_grad(), quiet_pytree():
        leaves = pytree.tree_leaves(call(model, map_tensors(torch.clone, inputs)))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _least(wanted: list[Tensor], found: list[Tensor]) -> float:
    """The least agreement of two lists of outputs in dB; −infinite where they are not finite in the same places."""
    agreements = [float("inf") if len(wanted) == len(found) else float("-inf")]
    for one, other in zip(wanted, found, strict=False):
        finite = one.isfinite()
        same = one.shape == other.shape and torch.equal(finite, other.isfinite())
        agreements.append(sqnr_db(one[finite], other[finite]) if same else float("-inf"))
    return min(agreements)


def _note(graph: GraphModule, reason: str) -> None:
    graph.meta["notes"] = (*graph.meta.get("notes", ()), reason)
