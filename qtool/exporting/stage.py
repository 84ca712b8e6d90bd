"""The export stage: a quantized model in, ONNX files that have proven themselves out.

Files are written into the folder given, which the caller publishes only when this returns; a failed gate raises
before that. The order of work is the order of cost: translate, size, coverage, parity of units, the integer
reference, saturation, end to end, and last the baselines.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import onnx
from torch.fx import GraphModule

from qtool.errors import QtoolError
from qtool.exporting import baselines, half_masks
from qtool.exporting.gates import openvino_coverage, parity
from qtool.exporting.gates.coverage import coverage
from qtool.exporting.gates.end_to_end import end_to_end
from qtool.exporting.gates.gate import Gate
from qtool.exporting.gates.other_sizes import OtherSizes
from qtool.exporting.gates.saturation import saturation, saturation_in_openvino
from qtool.exporting.gates.size import size
from qtool.exporting.reference.integer_reference import IntegerReference
from qtool.exporting.to_onnx import default_opset, float_to_onnx, quantized_to_onnx, require_opset, save
from qtool.exporting.tuning import require_timed
from qtool.form import Plan, QuantizedModel
from qtool.graphs.structures import outputs_of, written
from qtool.nested import micro_batches
from qtool.recipe import ExportConfig
from qtool.runtimes.onnx_notes import OUTPUTS, asks_for_exact_sums
from qtool.system import allocator
from qtool.version import __version__

FILES = {"int8": "model.int8.onnx", "fp32": "model.fp32.onnx", "fp16": "model.fp16.onnx"}
OWN_NOTES = ("version", "target", "opset", "variant", "outputs", "session", "own_channels", "num_stored")
"""What a file's metadata holds behind ``qtool.`` for qtool itself."""
UNIT_SAMPLES = 8
UNIT_BATCH = 2


class Read(Protocol):
    """What reads a file's integer reference once, until it is told to forget it (a cached function)."""

    def __call__(self) -> IntegerReference: ...

    def cache_clear(self) -> None: ...


@dataclass(frozen=True)
class ExportResult:
    """The files by variant (``int8``, ``fp32``, ``fp16``), the gates as plain values, and what tuning found."""

    files: dict[str, Path]
    gates: list[dict[str, Any]] = field(repr=False)
    tuning: dict[str, Any] | None = field(default=None, repr=False)

    @property
    def folder(self) -> Path:
        """Where they are."""
        return next(iter(self.files.values())).parent


def export(
    quantized: QuantizedModel,
    out: Path,
    config: ExportConfig,
    *,
    samples: Iterable[Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> ExportResult:
    """Writes ``model.int8.onnx`` with the FP32 and FP16 baselines asked for into ``out``, and proves the INT8 file.

    ``samples`` are batches of inputs for the parity gates; without them units are compared on the example
    inputs and the end-to-end gate is reported as not run. ``metadata`` (preprocessing, labels and
    what else a caller wants) is stored in the files as JSON.

    Raises ContractError when a gate fails, QtoolError for an operator without an ONNX form and for a quantization that
    is simulated only.
    """
    _require_kernels(quantized.plan)
    opset = config.opset or default_opset(quantized.plan)
    with allocator.settled():
        return _export(quantized, out, config, samples, opset, _metadata(quantized, opset, metadata or {}))


def rehearse(float_graph: GraphModule, example: Any, plan: Plan, config: ExportConfig) -> None:
    """Raises QtoolError for a simulation, a target that is not tuned, operators and weights without an ONNX form."""
    _require_kernels(plan)
    if config.tune:
        require_timed(plan)
    opset = config.opset or default_opset(plan)
    require_opset(plan, opset)
    float_to_onnx(float_graph, example, opset, plan.target)


def _require_kernels(plan: Plan) -> None:
    if plan.simulated:
        raise QtoolError(
            "export", "activations of 8 bits", "fewer, which no runtime has kernels for: they are simulated only",
            "quantize with --activation-bits 8, or measure the simulation with 'qtool benchmark --provider torch'",
        )  # fmt: skip


def _export(
    quantized: QuantizedModel,
    out: Path,
    config: ExportConfig,
    samples: Iterable[Any] | None,
    opset: int,
    notes: Mapping[str, str],
) -> ExportResult:
    files = {"int8": out / FILES["int8"]}
    save(quantized_to_onnx(quantized, opset), files["int8"], {**notes, "qtool.variant": "int8"})
    allocator.release()
    if samples is not None and iter(samples) is samples:  # to be gone through once only, and several gates do
        samples = list(parity.take(samples, config.parity_samples))
    few = _few(quantized, samples)
    gates = list(_gates(quantized, files["int8"], samples, few, config)) if config.gates else []
    if quantized.float_graph is not None and config.baselines:
        gates += _baselines(quantized, out, opset, notes, config.baselines, files, few)
    return ExportResult(files, [gate.as_dict() for gate in gates])


def _metadata(quantized: QuantizedModel, opset: int, metadata: Mapping[str, Any]) -> dict[str, str]:
    own = {"version": __version__, "target": quantized.plan.target, "opset": str(opset)}
    told = {key: json.dumps(value, ensure_ascii=False) for key, value in metadata.items()}
    return {f"qtool.{key}": value for key, value in {**own, **told}.items()} | {
        OUTPUTS: written(outputs_of(quantized.graph))
    }


def _few(quantized: QuantizedModel, samples: Iterable[Any] | None) -> list[Any]:
    """What units are compared on: a few of the samples or else the example, in batches whose trace stays small."""
    taken = list(parity.take(samples or (), UNIT_SAMPLES)) or list(parity.take([quantized.example], UNIT_SAMPLES))
    return [piece for batch in taken for piece in micro_batches(batch, UNIT_BATCH)]


def _of_other_sizes(quantized: QuantizedModel, inputs: Any) -> list[Any]:
    sizes = OtherSizes(quantized.float_graph or quantized.graph)
    sizes.try_open_sizes(inputs)
    return [resized for resized, _ in sizes.taken]


def _gates(
    quantized: QuantizedModel, path: Path, samples: Iterable[Any] | None, few: list[Any], config: ExportConfig
) -> Iterable[Gate]:
    """Runs the gates in order; the first that fails raises."""
    read = functools.cache(lambda: IntegerReference(path))  # two gates ask it
    steps: list[Callable[[], Gate]] = [
        lambda: size(quantized, path),
        lambda: _coverage(quantized, path, few),
        lambda: parity.unit_parity(quantized, path, few, _of_other_sizes(quantized, few[0])),
        lambda: _integer(quantized, path, read, few, config),
        lambda: _saturation(quantized, path, read, few),
        lambda: _end_to_end(quantized, path, samples, config),
    ]
    for step in steps:
        gate = step()
        allocator.release()  # each gate runs another engine, whose blocks do not fit into the last one's gaps
        gate.require()
        yield gate


def _coverage(quantized: QuantizedModel, path: Path, few: list[Any]) -> Gate:
    """Coverage in the target's own runtime, as far as it is here."""
    target = quantized.plan.target
    if target == "openvino":
        model = onnx.load(str(path), load_external_data=False)
        return openvino_coverage.coverage(quantized.plan, path, parity.feeds_of(model, few[0]))
    if target == "tensorrt":
        reason = "not run: TensorRT builds its engine on the GPU; 'qtool benchmark --provider tensorrt' there tells"
        return Gate("coverage", None, "units, integer in the plan, to be so in TensorRT's engine", reason)
    return coverage(quantized.plan, path)


def _integer(
    quantized: QuantizedModel,
    path: Path,
    read: Read,
    few: list[Any],
    config: ExportConfig,
) -> Gate:
    if config.reference_samples == 0:
        return Gate("integer reference", None, "bit-equal outputs", "not run: reference_samples is 0")
    if quantized.plan.target != "ort-cpu":
        return Gate("integer reference", None, "bit-equal outputs", "not run: it models ONNX Runtime's CPU kernels")
    reference = read()
    if reference.barred:
        reason = f"not run: it evaluates no {' or '.join(reference.barred)}"
        return Gate("integer reference", None, "bit-equal outputs", reason)
    return parity.integer_parity(path, reference, list(parity.take(few, config.reference_samples)))


def _saturation(quantized: QuantizedModel, path: Path, read: Read, few: list[Any]) -> Gate:
    """What CPU the file needs, told on one sample."""
    if quantized.plan.target == "openvino":
        return saturation_in_openvino(quantized.plan, path)
    if quantized.plan.target != "ort-cpu":
        return Gate("saturation", None, "no product beyond 16 bits", "not run: it concerns ONNX Runtime's CPU kernels")
    reference = read()
    read.cache_clear()  # nobody asks after this gate
    if reference.barred:
        reason = f"not run: the reference evaluates no {' or '.join(reference.barred)}"
        return Gate("saturation", None, "no product beyond 16 bits", reason)
    feeds = parity.by_name(reference.graph.inputs, next(parity.take(few, 1)))
    return saturation(reference, feeds, exact=asks_for_exact_sums(path))


def _end_to_end(quantized: QuantizedModel, path: Path, samples: Iterable[Any] | None, config: ExportConfig) -> Gate:
    given = None if samples is None else next(iter(samples), None)
    if given is None or quantized.float_graph is None:
        reason = "no samples were given" if given is None else "the model came without its float reference"
        return Gate("end-to-end parity", None, "SQNR to FP32 as the torch graph's", f"not run: {reason}")
    return end_to_end(quantized, path, parity.take(samples or (), config.parity_samples))


def _baselines(
    quantized: QuantizedModel,
    out: Path,
    opset: int,
    notes: Mapping[str, str],
    asked: Collection[str],
    files: dict[str, Path],
    few: list[Any],
) -> list[Gate]:
    assert quantized.float_graph is not None
    model = float_to_onnx(quantized.float_graph, quantized.example, opset, quantized.plan.target)
    if "fp32" in asked:
        files["fp32"] = out / FILES["fp32"]
        save(model, files["fp32"], {**notes, "qtool.variant": "fp32"})
    if "fp16" not in asked:
        return []
    half, masks = out / FILES["fp16"], half_masks.cut(quantized.float_graph, few)
    if masks.constants:
        model = float_to_onnx(masks.graph, quantized.example, opset, quantized.plan.target)
    refused = baselines.write_fp16(model, half, notes)
    del model
    allocator.release()
    finite, refused = (False, refused) if refused else baselines.answers(half, quantized.float_graph, few)
    if refused:
        half.unlink(missing_ok=True)
    else:
        files["fp16"] = half
    return [baselines.fp16_gate(masks, few, finite, refused)]
