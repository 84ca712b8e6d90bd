"""The quantized form: what quantization hands to exporting, inspection and measurement.

A ``QuantizedModel`` is a graph in which quantization is explicit: integers are made by
``quantized_decomposed.quantize_per_tensor`` and read by ``dequantize_per_tensor``; weights and biases
are integer constants behind ``dequantize_per_channel``. Between a dequantize and the next quantize
stands one *unit*: a convolution with its folded batch-norm and activation, a residual sum, a pooling.
The ``Plan`` beside the graph lists every unit, integer or float, with the reason where it is float.

The form is stored as three files of one folder: ``int8.pt2`` (``torch.export``), ``float.pt2`` (the
float model it was made from, for baselines and comparison) and the plan inside ``quantize.json``.
No code in a ``.pt2`` is ever run; see ``pt2_files.py``.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.fx import GraphModule, Node

from qtool.errors import QtoolError, UsageError
from qtool.forward import passes_told
from qtool.graphs.captured import arguments, as_called, call_captured, check_constants, with_constants
from qtool.graphs.programs import open_graph, save_graph
from qtool.graphs.shapes import input_values, symbols_of
from qtool.graphs.structures import quiet_pytree
from qtool.nested import from_arrays, raw_bytes, tensors

quantized = torch.ops.quantized_decomposed
QUANTIZE = (quantized.quantize_per_tensor.default, quantized.quantize_per_channel.default)
DEQUANTIZE = (quantized.dequantize_per_tensor.default, quantized.dequantize_per_channel.default)

BLOCK = 32
"""Inputs that runtimes round together where stored weights alone are integers, all of an output with one scale."""


@dataclass(frozen=True)
class Unit:
    """Operators that the target runs as one kernel, or one operator that stays in float.

    ``name`` is unique in a plan and is the module path where there is one. ``kind`` is the placement
    table's word (conv, linear, add, …). ``modules`` are the paths of what was fused. ``block``: how many inputs the
    runtime rounds to 8 bits together, as they come, to multiply them by stored integers; None where it does not.
    """

    name: str
    kind: str
    modules: tuple[str, ...] = ()
    integer: bool = True
    reason: str = ""
    weight_bits: int | None = None
    block: int | None = None


@dataclass(frozen=True)
class Plan:
    """What is integer, what is float and why, for one target; ``simulated`` where no runtime has such kernels."""

    target: str
    units: tuple[Unit, ...] = ()
    notes: tuple[str, ...] = ()
    simulated: bool = False

    @property
    def integer_units(self) -> tuple[Unit, ...]:
        """The units that the target is to run in integers."""
        return tuple(unit for unit in self.units if unit.integer)

    @property
    def float_units(self) -> tuple[Unit, ...]:
        """The units left in float, each with its reason."""
        return tuple(unit for unit in self.units if not unit.integer)

    def as_dict(self) -> dict[str, Any]:
        """The plan as plain values for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Plan:
        """The plan that ``as_dict`` wrote."""
        units = (Unit(**{**unit, "modules": tuple(unit["modules"])}) for unit in value["units"])
        return cls(value["target"], tuple(units), tuple(value.get("notes", ())), value.get("simulated", False))


@dataclass(repr=False)
class QuantizedModel:
    """A quantized graph, the float graph it stands for, and the plan of what is integer.

    ``graph`` and ``float_graph`` take the same inputs, batch first; ``float_graph`` is None only for a
    model that arrived already quantized. ``example`` is one batch of inputs (a tensor, a tuple of
    arguments or a dict of keyword arguments). ``ranges`` maps each quantized tensor's name to the range
    it was given and the observer state that the range was read from. ``training`` is what happened in its QAT, plain
    values as in a training's result: ``history``, and the ``metric`` that decides.
    """

    graph: GraphModule
    plan: Plan
    example: Any
    float_graph: GraphModule | None = None
    ranges: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        """The target, how much is integer, and where to look for the rest: weights and ranges would fill pages."""
        plan, units = self.plan, len(self.plan.units)
        stored = sum(unit.weight_bits is not None for unit in plan.float_units)
        weights = f", {stored} with integer weights" if stored else ""
        return (
            f"QuantizedModel(target={plan.target!r}, {len(plan.integer_units)} of {units} units integer{weights}: "
            "see .plan)"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the quantized graph on a batch, integers simulated in float32.

        It takes what the model takes, or all of that as one tuple or dict, also as numpy's arrays, and what is no
        tensor may be left out. Raises QtoolError for inputs of another number, name, size or type than the graph's, or
        another constant.
        """
        if args and kwargs:
            raise UsageError("inputs", "all by position or all by name", "some of both", "name all of them")
        inputs = kwargs or (as_called(self.graph, args[0]) if len(args) == 1 else args)
        inputs = with_constants(self.graph, from_arrays(inputs))
        check_inputs(self.graph, inputs, "inputs")
        names = arguments(self.graph) or input_values(self.graph.graph)
        expected = f"the model's arguments ({', '.join(names)})"
        with torch.no_grad(), passes_told("inputs", expected):
            return call_captured(self.graph, inputs)

    def save(self, folder: str | Path) -> dict[str, Path]:
        """Writes ``int8.pt2`` (and ``float.pt2``) into ``folder``; returns the files by name."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        files = {"int8": folder / "int8.pt2"}
        save_graph(self.graph, self.example, files["int8"])
        if self.float_graph is not None:
            files["float"] = folder / "float.pt2"
            save_graph(self.float_graph, self.example, files["float"])
        return files

    @classmethod
    def load(cls, folder: Path, plan: Plan) -> QuantizedModel:
        """Reads what ``save`` wrote. Raises QtoolError on a damaged or unsafe file."""
        graph, example = open_graph(folder / "int8.pt2")
        float_path = folder / "float.pt2"
        return cls(graph, plan, example, open_graph(float_path)[0] if float_path.exists() else None)

    def __reduce__(self) -> Any:
        """Pickles what ``save`` writes: torch's graphs themselves cannot be pickled."""
        with TemporaryDirectory() as folder:
            files = {path.name: path.read_bytes() for path in self.save(folder).values()}
        return _unpickled, (files, self.plan, self.ranges, self.training)

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedModel:
        with quiet_pytree():
            return QuantizedModel(*(copy.deepcopy(getattr(self, f.name), memo) for f in dataclasses.fields(self)))


def _unpickled(
    files: Mapping[str, bytes], plan: Plan, ranges: dict[str, Any], training: dict[str, Any]
) -> QuantizedModel:
    with TemporaryDirectory() as folder:
        for name, data in files.items():
            (Path(folder) / name).write_bytes(data)
        return dataclasses.replace(QuantizedModel.load(Path(folder), plan), ranges=ranges, training=training)


def check_inputs(graph: GraphModule, inputs: Any, where: str) -> None:
    """Raises QtoolError, naming ``where``, unless ``inputs`` have the graph's number, types and sizes (batch aside).

    What is no tensor has the value that the graph was captured with.
    """
    kinds = list(input_values(graph.graph).items())
    given = list(tensors(inputs))
    told = str(len(given))
    if isinstance(inputs, Mapping):
        told = ", ".join(map(str, inputs)) or told
        if len(given) == len(kinds) and all(name in inputs for name, _ in kinds):
            given = [inputs[name] for name, _ in kinds]
    if len(given) != len(kinds) and kinds:
        names = ", ".join(name for name, _ in kinds)
        raise QtoolError(where, f"{len(kinds)} input tensors ({names})", told, "pass what the model takes")
    for (name, value), tensor in zip(kinds, given, strict=False):
        if tensor.dtype != value.dtype or not _fits(tensor.shape, value.shape):
            what = "size" if tensor.dtype == value.dtype else "type"
            do = f"use data of the {what} that the model was captured with"
            if axes := _might_be_open(tensor, value):
                do += f", or leave it open when quantizing: --dynamic-axes {','.join(map(str, axes))}"
            raise QtoolError(f"{where}, '{name}'", _describe(value), _describe(tensor), do)
    check_constants(graph, inputs, where)


def _fits(shape: torch.Size, wanted: torch.Size) -> bool:
    sizes = [(size, fixed) for size, fixed in zip(shape, wanted, strict=False) if not symbols_of(fixed)]
    return len(shape) == len(wanted) and all(size == fixed for size, fixed in sizes)


def _might_be_open(tensor: torch.Tensor, wanted: torch.Tensor) -> list[int]:
    """Where nothing but lengths of sequences, or heights and widths of images, are not those wanted: their axes."""
    sizes = enumerate(zip(tensor.shape, wanted.shape, strict=False))
    axes = [axis for axis, (size, fixed) in sizes if not symbols_of(fixed) and size != fixed]
    lengths = tensor.dim() == 3 or (tensor.dim() == 2 and not tensor.is_floating_point())
    usual = {1} if lengths else set(range(2, tensor.dim()))
    return axes if tensor.dtype == wanted.dtype and tensor.dim() == wanted.dim() and usual.issuperset(axes) else []


def _describe(value: torch.Tensor) -> str:
    sizes = " × ".join("N" if symbols_of(size) else str(size) for size in value.shape)
    return f"{str(value.dtype).removeprefix('torch.')} of {sizes or 'one value'}"


def graph_sha256(graph: GraphModule) -> str:
    """The sha256 of what a graph computes, its operators and its stored tensors, in hex."""
    digest = hashlib.sha256(str(graph.graph).encode())
    for name, value in (dict(graph.named_parameters()) | dict(graph.named_buffers())).items():
        digest_tensor(digest, name, value)
    return digest.hexdigest()


def digest_tensor(digest: hashlib._Hash, name: str, value: torch.Tensor) -> None:
    """Adds a tensor to a hash: its name, its type, its shape and its bytes."""
    digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
    digest.update(raw_bytes(value))


def quantize_nodes(graph: GraphModule) -> list[Node]:
    """The activation quantize nodes of a quantized graph, in order."""
    return [node for node in graph.graph.nodes if node.target is quantized.quantize_per_tensor.default]


def unit_of(node: Node) -> str:
    """The unit that a node of a labelled graph belongs to."""
    return str(node.meta["custom"]["unit"])


def padding_of(node: Node, number: float = 0) -> list[int] | None:
    """The amounts of a padding with zeros, or another number, last axis first; None for any other operator."""
    if node.target is torch.ops.aten.constant_pad_nd.default:
        given: dict[str, Any] = dict(zip(("pad", "value"), node.args[1:], strict=False)) | node.kwargs
    elif node.target is torch.ops.aten.pad.default:
        given = dict(zip(("pad", "mode", "value"), node.args[1:], strict=False)) | node.kwargs
    else:
        return None
    if given.get("mode", "constant") != "constant" or (given.get("value") or 0) != number:
        return None
    amounts = list(given["pad"])
    return amounts if all(isinstance(amount, int) and amount >= 0 for amount in amounts) else None
