"""The parity gate: the file computes what the quantized graph means.

Two questions here; how close the whole is to the float model is the third (``end_to_end.py``).

*Units.* The file is cut at every quantizer: each unit becomes a small network of its own from integers to integers,
all of them in one ONNX model. Fed with the integers that the torch graph produced, each unit's integers must be those
of the torch graph: 99.9 % exactly, or all but one, none off by more than one step. (Torch simulates a unit in
float32; the runtime rounds once from an exact accumulator. They can differ only where a value lies on the edge
between two integers. Where scales have a simple ratio, as a product's may, one value in a hundred does: such ties are
counted apart, and held against no unit.) A unit that returns float is compared in units of its own greatest value,
its inputs unrounded: what the runtime rounds by itself is judged end to end. Choices by value are borders too
(``choices.py``). Units are fed at other sizes as well, where the file leaves sizes open. A unit that reads random
numbers drawn in the file is left out. Made for another runtime, the file is run operator by operator: ONNX Runtime
moves quantizers before a transposition, and of an output that is read there, too, would return what the quantizer
gives.

*Integer reference.* On an x86 CPU the whole file must equal, bit for bit, an evaluation with the
runtime's own arithmetic (``integer_reference.py``). Operators that the reference does not cover are named,
and then the difference is reported instead of required to be none.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import torch
from torch import Tensor
from torch.fx import Node

from qtool.errors import QtoolError
from qtool.exporting.drawn import drawn
from qtool.exporting.gates.choices import pairs, scores_at
from qtool.exporting.gates.gate import Gate
from qtool.exporting.gates.other_sizes import sizes_of
from qtool.exporting.gates.simulation import QuantizerRecorder
from qtool.exporting.passes.even_channels import own_channels
from qtool.exporting.reference.integer_reference import IntegerReference
from qtool.form import QuantizedModel, quantize_nodes, unit_of
from qtool.graphs.lstm import OPERATOR
from qtool.graphs.pixels import PIXELS
from qtool.nested import named, num_samples, samples_of, tensors
from qtool.runtimes import open_session
from qtool.runtimes.base import to_array
from qtool.runtimes.ort import OrtSession
from qtool.system.machine import VNNI, cpu_info
from qtool.units import many

Array = npt.NDArray[Any]
MIN_EQUAL = 0.999
MAX_STEPS = 1
MAX_FLOAT_ERROR = 1e-4
MODELLED_RUNTIMES = ("1.31", "1.32")  # the ONNX Runtimes whose fusions and kernels the integer reference repeats


OF_ONE_SIZE = "report this model, and leave --dynamic-axes out until then"


def cut(model: onnx.ModelProto, chosen: Collection[tuple[str, str]] = ()) -> onnx.ModelProto:
    """The model with every link from a quantizer to its readers replaced by an output and an input.

    Quantizer ``q`` keeps its output name; its readers read the new graph input ``q/fed``. Links inside one
    chain of operators that only move bytes are cut too. So are those from choices to their readers: of ``chosen``,
    (scores, places), the scores are outputs and the places are fed.
    """
    result = onnx.ModelProto()
    result.CopyFrom(model)
    graph = result.graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    kinds = {}
    for node in graph.node:
        if node.op_type == "QuantizeLinear":
            kinds[node.output[0]] = constants[node.input[2]].data_type
    types = {value.name: value.type for value in (*model.graph.value_info, *model.graph.output)}
    given = {value.name for value in graph.output}
    for scores, places in chosen:
        kinds[places] = onnx.TensorProto.INT64
        if scores in types and scores not in given:
            graph.output.append(onnx.ValueInfoProto(name=scores, type=types[scores]))
            given.add(scores)
    for node in graph.node:
        for index, name in enumerate(node.input):
            if name in kinds:
                node.input[index] = f"{name}/fed"
    for name, kind in kinds.items():
        shape = [None] * len(types[name].tensor_type.shape.dim)
        graph.input.append(onnx.helper.make_tensor_value_info(f"{name}/fed", kind, shape))
        if name not in given:
            graph.output.append(onnx.helper.make_tensor_value_info(name, kind, shape))
    return result


def unit_parity(quantized: QuantizedModel, path: Path, samples: Sequence[Any], others: Sequence[Any] = ()) -> Gate:
    """Whether every unit of the file gives the integers of the torch graph; ``samples`` are batches of inputs.

    ``others`` have other sizes, which the float graph takes: where the quantized graph or the file does not, it fails.
    """
    model = onnx.load(str(path))
    quantizers = {node.name: node.output[0] for node in model.graph.node if node.op_type == "QuantizeLinear"}
    names, kept = list(quantizers.values()), _kept(quantized, quantizers)
    outputs = [value.name for value in model.graph.output]
    shapes, places = _shapes(model), own_channels(model)
    recorder = QuantizerRecorder(quantized)
    units = {name: _Unit() for name in names}
    chosen = pairs(quantized.graph, model)
    left_to_scores = {places for _, places in chosen.values()}
    worst_float = 0.0
    with tempfile.TemporaryDirectory() as folder:
        cut_path, parts = Path(folder) / "cut.onnx", cut(model, chosen.values())
        random = drawn(parts)
        onnx.save(parts, str(cut_path), save_as_external_data=model.ByteSize() > 1 << 30)
        own = quantized.plan.target == "ort-cpu"
        session = OrtSession(cut_path, threads=threads_for(parts), optimize=own, rounds=False)
        order = [info.name for info in session.outputs]
        for number, batch in enumerate((*samples, *others)):
            try:
                recorded, output = recorder.record(batch)
                integers, ties = (list(compress(parts, kept)) for parts in (recorded, recorder.ties))
                named_parts = zip(names, integers, strict=True)
                fed = {f"{n}/fed": _as_shape(value, shapes.get(n), places.get(n)) for n, value in named_parts}
                wanted = {info.name for info in session.inputs}
                for node, (_, place) in chosen.items():
                    fed[f"{place}/fed"] = _as_shape(recorder.chosen[node][1].numpy(), shapes.get(place))
                feeds = {**feeds_of(model, batch), **fed}
                got = dict(zip(order, session.run({k: v for k, v in feeds.items() if k in wanted}), strict=True))
            except QtoolError as error:
                if number < len(samples):
                    raise
                takes = f"units that take {sizes_of(batch)}, as the float model does"
                return Gate("unit parity", False, takes, error.got, OF_ONE_SIZE)
            for name, expected, near in zip(names, integers, ties, strict=True):
                if name not in random:
                    given = got[name].take(places[name], 1) if name in places else got[name]
                    units[name].add(*_shared_channels(expected, given, near))
            for node, (scores, place) in chosen.items():
                if place not in random:
                    off = _choice_error(node, *recorder.chosen[node], got.get(scores), got[place])
                    worst_float = max(worst_float, off)
            for name, value in zip(outputs, tensors(output), strict=False):
                if name not in random and name not in left_to_scores:
                    worst_float = max(worst_float, _relative_error(value, got[name], recorder.resolution))
        session.close()
    left_out = [units.pop(name) for name in names if name in random]
    gate = _unit_gate(units, worst_float, sum(num_samples(batch) for batch in samples), len(left_out))
    return dataclasses.replace(gate, details={**gate.details, "other_sizes": [sizes_of(batch) for batch in others]})


def _kept(quantized: QuantizedModel, names: Collection[str]) -> list[bool]:
    """For each quantizer of the graph whether the file has it too: the bytes of an image are what the file is given."""
    nodes = quantize_nodes(quantized.graph)
    images = [getattr(node.args[0], "target", None) is PIXELS for node in nodes]
    return [not image or f"{unit_of(node)}/quantize" in names for node, image in zip(nodes, images, strict=True)]


class _Unit:
    """What was seen of one unit: outputs, unequal ones, ties among these, the greatest difference in steps."""

    NO_INTEGER = 1 << 16  # in the place of what a unit of another shape did not give

    def __init__(self) -> None:
        self.total = self.unequal = self.ties = self.worst = 0

    def add(self, expected: Array, got: Array, ties: Array) -> None:
        expected, got = expected.ravel(), got.ravel()
        if expected.size != got.size:
            got = np.full_like(expected, self.NO_INTEGER, dtype=np.int32)
        unequal = np.flatnonzero(expected != got)
        difference = np.abs(expected[unequal].astype(np.int32) - got[unequal].astype(np.int32))
        self.total += expected.size
        self.unequal += len(unequal)
        self.ties += int(np.count_nonzero(np.isin(unequal, ties)))
        self.worst = max(self.worst, int(difference.max(initial=0)))

    @property
    def equal(self) -> float:
        """The share of equal outputs, ties counted as equal."""
        return 1 - (self.unequal - self.ties) / max(self.total, 1)

    @property
    def agrees(self) -> bool:
        """Whether the gate lets it pass: a share of few outputs is none, and one of them may be another."""
        return self.unequal - self.ties <= max(1.0, (1 - MIN_EQUAL) * self.total) and self.worst <= MAX_STEPS


def _unit_gate(units: Mapping[str, _Unit], worst_float: float, samples: int, random: int) -> Gate:
    failing = [name for name, unit in units.items() if not unit.agrees]
    total = sum(unit.total for unit in units.values())
    unequal = sum(unit.unequal for unit in units.values())
    worst = max((unit.worst for unit in units.values()), default=0)
    passed = not failing and worst_float <= MAX_FLOAT_ERROR
    equal = f"{1 - unequal / max(total, 1):.6%} of {total} integers equal, at most {many(worst, 'step')} apart"
    found = f"{many(len(units), 'unit')}, {equal}" if units else "no unit computes in integers"
    if random:
        found += f", {random} more read random numbers and are not compared"
    if ties := sum(unit.ties for unit in units.values()):
        found += f", {ties} of the others ties"
    if failing:
        name = min(failing, key=lambda n: units[n].equal)
        found += f"; worst '{name}' with {units[name].equal:.4%} equal, {many(units[name].worst, 'step')}"
    if worst_float > MAX_FLOAT_ERROR:
        found += f"; float output off by {worst_float:.2g} of its greatest value"
    return Gate(
        "unit parity", passed,
        f"at least {MIN_EQUAL:.1%} of each unit's integers equal, or all but one, none more than one step off",
        found, "try other --algorithms, or these units in float (--overrides), and report this model",
        {
            "num_samples": samples, "num_integers": total, "num_unequal": unequal, "num_ties": ties,
            "max_steps": worst,
            "equal_share": 1 - unequal / max(total, 1), "failing_units": failing, "max_float_error": worst_float,
        },
    )  # fmt: skip


def integer_parity(path: Path, reference: IntegerReference, samples: Sequence[Any]) -> Gate:
    """Whether the file in ONNX Runtime equals ``reference``, which was made of it, bit for bit."""
    expected = "every output equal to the integer reference, bit for bit"
    features = cpu_info()["features"]
    if not {"avx2", *VNNI} & set(features):
        return Gate("integer reference", None, expected, "not run: it models x86 CPUs")
    session = open_session(path, threads=1 if OPERATOR in reference.covered else torch.get_num_threads())
    unequal = total = 0
    worst = 0.0
    for batch in samples:
        feeds = by_name(reference.graph.inputs, batch)
        for want, got in zip(reference.run(feeds), session.run(feeds), strict=True):
            unequal += int(np.count_nonzero(want != got))
            total += got.size
            worst = max(worst, _greatest_difference(want, got))
    session.close()
    uncovered = sorted({str(entry["op"]) for entry in reference.uncovered})
    found = f"{total - unequal} of {total} outputs equal on {many(sum(map(num_samples, samples)), 'sample')}"
    if uncovered:
        found += f"; not covered, so not required: {', '.join(uncovered)} (greatest difference {worst:.3g})"
    passed: bool | None = unequal == 0 or bool(uncovered)
    if not passed and ".".join(onnxruntime.__version__.split(".")[:2]) not in MODELLED_RUNTIMES:
        passed = None
        modelled = " and ".join(MODELLED_RUNTIMES)
        found += f"; not required: this is ONNX Runtime {onnxruntime.__version__}, modelled: {modelled}"
    return Gate(
        "integer reference", passed, expected, found,
        "report this model: the runtime's arithmetic is not what this version expects",
        {
            "num_outputs": total, "num_unequal": unequal, "max_difference": worst, "uncovered": reference.uncovered,
            "covered": dict(reference.covered), "cpu_features": features,
        },
    )  # fmt: skip


def threads_for(model: onnx.ModelProto) -> int:
    """How many threads a file is compared on: one where each would round its share of a batch by itself."""
    return 1 if any(node.op_type == OPERATOR for node in model.graph.node) else torch.get_num_threads()


def feeds_of(model: onnx.ModelProto, batch: Any) -> dict[str, Array]:
    """A batch of inputs as the file's feeds: by name for a dict, else in order."""
    initializers = {tensor.name for tensor in model.graph.initializer}
    names = [
        value.name for value in model.graph.input if value.name not in initializers and not value.name.endswith("/fed")
    ]
    return by_name(names, batch)


def by_name(names: Sequence[str], batch: Any) -> dict[str, Array]:
    """A batch of inputs under these names: those of a dict's arguments and of what is in them, else in order."""
    if isinstance(batch, Mapping):
        given = named(batch)
        return {name: to_array(given[name]) for name in names}
    return {name: to_array(value) for name, value in zip(names, tensors(batch), strict=True)}


def _shapes(model: onnx.ModelProto) -> dict[str, list[int]]:
    """The sizes of the file's tensors; 0 where one is dynamic."""
    return {
        v.name: [dim.dim_value for dim in v.type.tensor_type.shape.dim]
        for v in model.graph.value_info
        if v.type.tensor_type.HasField("shape")
    }


def _as_shape(value: Array, shape: list[int] | None, places: Sequence[int] | None = None) -> Array:
    """``value`` as the file has it: with unit axes that the graph dropped, and the channels that are quantized there.

    A file fills channels up for its kernels, behind the graph's own or with these at ``places``, and puts one that
    holds a single number behind the quantizer.
    """
    if shape is None:
        return value
    value = value.reshape(*value.shape, *[1] * (len(shape) - value.ndim))
    added = shape[1] - value.shape[1] if len(shape) > 1 and shape[1] else 0
    if added < 0:
        return value[:, :added]
    if added == 0:
        return value
    wide = np.zeros((len(value), shape[1], *value.shape[2:]), value.dtype)
    wide[:, slice(value.shape[1]) if places is None else places] = value
    return wide


def _shared_channels(expected: Array, got: Array, ties: Array) -> tuple[Array, Array, Array]:
    """The channels that both the graph and the file quantize, and the places of ties among these."""
    if expected.ndim < 2 or expected.shape[1] == got.shape[1]:
        return expected, got, ties
    count = min(expected.shape[1], got.shape[1])
    tied = np.isin(np.arange(expected.size), ties).reshape(expected.shape)
    return expected[:, :count], got[:, :count], np.flatnonzero(tied[:, :count])


def _relative_error(expected: Tensor, got: Array, resolution: float = 0.0) -> float:
    """The greatest difference in units of the greatest value; of whole numbers how many differ, where too many do.

    A difference of no more than ``resolution``, which counts in the outputs' own units, is none.
    """
    if expected.numel() != got.size:
        return float("inf")
    if not expected.is_floating_point():
        share = float(np.mean(expected.cpu().numpy().ravel() != got.ravel())) if got.size else 0.0
        return share if share > 1 - MIN_EQUAL else 0.0
    want = expected.detach().float().cpu().numpy().ravel()
    greatest = float(np.abs(want[np.isfinite(want)]).max(initial=0)) or 1.0
    difference = _greatest_difference(want, got.ravel())
    return 0.0 if difference <= resolution else difference / greatest


def _choice_error(node: Node, scores: Tensor, places: Tensor, theirs: Array | None, chosen: Array) -> float:
    """By how much the file's scores are others, and those of what it has ``chosen``: none where it took equals."""
    error = 0.0 if theirs is None else _relative_error(scores, theirs)
    if chosen.size != places.numel():
        return float("inf")
    other = scores_at(node, scores, torch.from_numpy(chosen).reshape(places.shape))
    return max(error, _relative_error(scores_at(node, scores, places), other.numpy()))


def _greatest_difference(want: Array, got: Array) -> float:
    """Between arrays of one shape; infinite where one is NaN or infinite and the other not the same."""
    differ = (want != got) & ~(np.isnan(want) & np.isnan(got)) if want.dtype.kind == "f" else want != got
    difference = np.abs(want[differ].astype(np.float64) - got[differ].astype(np.float64))
    return float(np.nan_to_num(difference, nan=np.inf, posinf=np.inf).max(initial=0))


def take(samples: Iterable[Any], count: int) -> Iterator[Any]:
    """The first ``count`` samples of an iterable of batches, the last batch cut to fit."""
    left = count
    for batch in samples:
        size = num_samples(batch)
        yield batch if size <= left else samples_of(batch, 0, left)
        left -= size
        if left <= 0:
            break
