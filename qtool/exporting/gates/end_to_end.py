"""The end-to-end gate: the file is as close to the float model as the quantized torch graph is.

Single steps that fall the other way grow through many layers, so that the whole file cannot be asked to equal the torch
graph. What can be asked: over samples i, with e_i the energy of the torch graph's error against the float model and f_i
that of the file's, the file's signal-to-quantization-noise ratio is at most 0.5 dB lower,

    loss = 10 log10 (Σ f_i / Σ e_i)  ≤  0.5 dB.

Both have 10⁻¹⁰ of the signal's energy added, as far as float32 rounds: an output that nothing quantized reaches has no
other error, or none.

A network costs the same for each sample, and most answers are clear after a few. So ρ = Σ f_i / Σ e_i is looked at
after 16, 32, 64 … samples, and the rest is left out once 0.5 dB lies outside

    loss ± z · (10 / ln 10) · s(f_i − ρ e_i) / (√n · mean f_i),      z = 4,

the interval of a ratio of paired means to first order (Cochran, *Sampling Techniques*, 3rd ed., section 6.4). The same
samples in the same order give the same answer. Four standard errors, since it is looked at several times and 16
energies are not normal.

A file that passes is run with other batches and other open sizes as well (``other_sizes.py``). A few samples tell no
tenths of a decibel, and need not: a size that a file has for its own makes another thing of its input. So there the
error's amplitude may be four times that of the torch graph, there or on the samples as they are.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor

from qtool.errors import reason_of
from qtool.evaluate import error_of, ratio_db, signal_of
from qtool.exporting.drawn import drawn
from qtool.exporting.gates.gate import Gate
from qtool.exporting.gates.other_sizes import OtherSizes, sizes_of
from qtool.exporting.gates.parity import feeds_of, threads_for
from qtool.exporting.gates.saturation import may_saturate
from qtool.exporting.gates.simulation import fast_simulation
from qtool.form import QuantizedModel
from qtool.graphs.captured import call_captured, with_constants
from qtool.nested import micro_batches, num_samples, per_sample, tensors
from qtool.runtimes import open_session
from qtool.runtimes.base import Session
from qtool.runtimes.openvino import is_installed
from qtool.system.machine import sums_in_32_bits
from qtool.units import many

MAX_LOSS_DB = 0.5
MAX_ERROR = 4.0
"""By how much the error's amplitude at another size may be greater than the torch graph's."""
MAX_OTHERS = 0.5
"""The share of whole numbers, such as classes, that may be others there."""
ROUNDING = 1e-10
"""The energy of float32's rounding, in that of the signal."""
LITTLE_DB = 6.0
"""Below it the error's amplitude is half of the signal's: not a fault of the file, but nothing to serve."""
FEWEST = 16
Z, DOUBT = 4.0, 2.0
MICRO_BATCH = 4
LOST = "; quantizing lost most of the signal, and qtool sensitivity tells where"
IN_OPENVINO = "serve it with a fixed batch (OpenVINO's reshape) or another OpenVINO, or export it for ort-cpu"
SAMPLED = (
    "leave --dynamic-axes out, since OpenVINO samples where an antialiased Resize averages, or export it for ort-cpu"
)
"""What to do about a Resize that :mod:`.passes.smooth_resizes` left, its sizes being open."""
SATURATED = (
    "quantize with --weight-bits 7, since this CPU has no VNNI and OpenVINO's sums of 8-bit products saturate on it, "
    "or export it for ort-cpu"
)

NOT_NUMBERS = Gate(
    "end-to-end parity", False, "numbers of the float model on the calibration samples", "NaN among them",
    "give samples that it has answers to, or mend what makes NaN of them, as a row of attention that is masked whole",
)  # fmt: skip
ZEROS = Gate(
    "end-to-end parity", None, "SQNR to FP32 as the torch graph's",
    "not run: the float model answers all samples with zeros, and no error shows in these",
    "give samples that it has other answers to, or train it",
)  # fmt: skip


def end_to_end(quantized: QuantizedModel, path: Path, samples: Iterable[Any]) -> Gate:
    """Whether each output of the file is as close to the float model's as the torch graph's is.

    The file is run by the target's own runtime where that is OpenVINO and it is installed, else by ONNX Runtime (one
    for another runtime as it is written, on CPUs whose integer products saturate).
    ``samples`` are batches of inputs, read until the answer is clear. Outputs that random numbers decide are left out.
    """
    model = onnx.load(str(path), load_external_data=False)
    random = drawn(model)
    compared = [value.name not in random for value in model.graph.output]
    if not any(compared):
        return Gate("end-to-end parity", None, "SQNR to FP32 as the torch graph's", "not run: the outputs are random")
    openvino = quantized.plan.target == "openvino" and is_installed()
    # another runtime's file is not to fail for the kernels of this CPU, which can saturate: unfused, products are float
    own = openvino or quantized.plan.target == "ort-cpu" or sums_in_32_bits()
    session = open_session(path, provider="openvino" if openvino else "cpu", threads=threads_for(model), optimize=own)
    simulated = fast_simulation(quantized)
    outputs: list[_Output] = []
    seen, look, clear = 0, FEWEST, False
    first: Any = None
    for batch, wanted, in_torch in _answers(quantized, simulated, samples):
        in_file = _run(session, model, batch)
        first = batch if first is None else first
        outputs = outputs or [_Output() for is_compared in compared if is_compared]
        for value, made in zip(wanted, in_file, strict=True):
            if value.shape != made.shape:
                return _misshapen(made, value, openvino)
        if any(bool(value.isnan().any()) for value in itertools.compress(wanted, compared)):
            return NOT_NUMBERS
        answers = zip(wanted, in_torch, in_file, strict=True)
        for output, values in zip(outputs, itertools.compress(answers, compared), strict=True):
            output.add(*values)
        seen += num_samples(batch)
        if seen >= look:
            look *= 2
            if clear := all(output.clear for output in outputs):
                break
    gate = _gate(_decides(outputs), len(outputs), seen, clear)
    if gate.passed and not any(output.tells for output in outputs):
        return ZEROS
    if gate.passed:
        noise = iter(output.noise for output in outputs)
        noises = [next(noise) if is_compared else None for is_compared in compared]
        gate = _at_other_sizes(gate, quantized, first, simulated, functools.partial(_run, session, model), noises)
    session.close()
    if not openvino:
        return gate
    saturates = not sums_in_32_bits() and may_saturate(quantized.plan, path)
    do = SAMPLED if _samples_open_sizes(model) else SATURATED if saturates else IN_OPENVINO
    return dataclasses.replace(gate, found=f"{gate.found}, in OpenVINO", do=do)


def _run(session: Session, model: onnx.ModelProto, batch: Any) -> list[Tensor]:
    return [torch.from_numpy(np.array(value)) for value in session.run(feeds_of(model, batch))]


def _at_other_sizes(
    gate: Gate, quantized: QuantizedModel, batch: Any, simulated: Callable[[Any], Any],
    in_file: Callable[[Any], list[Tensor]], noises: list[float | None],
) -> Gate:  # fmt: skip
    """``gate``, which passed, with the sizes at which the file was run too; failed where it is wrong at one of them.

    ``noises``: the energy of the torch graph's error for each number of an output, None of one that is not compared.
    """
    assert quantized.float_graph is not None
    sizes = OtherSizes(quantized.float_graph)
    sizes.try_batches(batch)
    sizes.try_open_sizes(batch)
    run = []
    for inputs, output in sizes.taken:
        try:
            answers = zip(_outputs(output), _outputs(simulated(inputs)), in_file(inputs), noises, strict=True)
            wrong = next(filter(None, itertools.starmap(_wrong, answers)), None)
        except Exception as error:  # whatever a runtime, or the quantized graph, says of a size
            wrong = reason_of(error)
        if wrong is not None:
            expected = f"at {sizes_of(inputs)}, which the float model takes, what it computes"
            return Gate(gate.name, False, expected, wrong, "report this model, or leave that size closed", gate.details)
        run.append(sizes_of(inputs))
    refused = f", not at {' and '.join(sizes.refused)}, which the model refuses" if sizes.refused else ""
    found = f"{gate.found}; also run at {' and '.join(run)}{refused}" if run else f"{gate.found}{refused}"
    details = {**gate.details, "other_sizes": run, "refused_sizes": sizes.refused}
    return dataclasses.replace(gate, found=found, details=details)


def _wrong(wanted: Tensor, in_torch: Tensor, in_file: Tensor, noise: float | None) -> str | None:
    """What is wrong with a file's output at another size; None where nothing is, or where it is not compared."""
    if wanted.shape != in_file.shape:
        return f"an output of shape {list(in_file.shape)} instead of {list(wanted.shape)}"
    if noise is None:
        return None
    output = _Output()
    output.add(wanted, in_torch, in_file)
    if not wanted.is_floating_point():
        differ = float((in_torch != in_file).double().mean()) if wanted.numel() else 0.0
        return f"{differ:.1%} of an output's numbers are others than the torch graph's" if differ > MAX_OTHERS else None
    error, error_in_file = (float(energies.sum()) for energies in output.errors)
    if error_in_file <= MAX_ERROR**2 * max(error, noise * wanted.numel()):
        return None
    torch_db, file_db = output.ratios_db
    return f"an output of {file_db:.2f} dB SQNR to FP32, and {torch_db:.2f} dB of the torch graph"


def _misshapen(made: Tensor, wanted: Tensor, openvino: bool) -> Gate:
    """A runtime that computes another shape, as OpenVINO 2026.4 does behind the Fourier transform of real numbers."""
    return Gate(
        "end-to-end parity", False, f"outputs of shape {list(wanted.shape)}",
        f"{list(made.shape)}{', in OpenVINO' if openvino else ''}",
        "export it for ort-cpu, or leave the part that gives it out of the model" if openvino else "report this model",
    )  # fmt: skip


def _samples_open_sizes(model: onnx.ModelProto) -> bool:
    """Whether a file has an antialiased Resize of images whose sizes it does not know."""
    values = (*model.graph.value_info, *model.graph.input, *model.graph.output)
    known = {
        value.name: all(dim.HasField("dim_value") for dim in value.type.tensor_type.shape.dim[-2:]) for value in values
    }
    averaging = [
        node for node in model.graph.node
        if node.op_type == "Resize" and any(told.name == "antialias" and told.i for told in node.attribute)
    ]  # fmt: skip
    return not all(known.get(name) for node in averaging for name in (node.input[0], node.output[0]))


def _decides(outputs: list[_Output]) -> _Output:
    """The output that lost too much, or else the one that is furthest from the float model's."""
    failed = [output for output in outputs if output.failed]
    return max(failed, key=lambda o: o.loss_db) if failed else min(outputs, key=lambda o: o.ratios_db[1])


class _Output:
    """One output of a model: the energies of the float model's answers, of the torch graph's error and the file's."""

    def __init__(self) -> None:
        self.parts: list[Tensor] = []
        self.numbers = 0

    def add(self, wanted: Tensor, in_torch: Tensor, in_file: Tensor) -> None:
        """Takes the three answers to one batch; of whole numbers, such as classes, those that differ are counted."""
        values = [per_sample(value) for value in (wanted, in_torch, in_file)]
        if wanted.is_floating_point():
            values = [value.double() for value in values]
            errors = [signal_of(values[0]), *(error_of(values[0], value) for value in values[1:])]
        else:
            errors = [(value != values[0]).double() for value in values]
            errors[0] = torch.ones_like(errors[0])
        self.parts.append(torch.stack([error.square().sum(1) for error in errors]))
        self.numbers += wanted.numel()

    @property
    def tells(self) -> bool:
        """Whether there is a signal that errors could be seen in."""
        return bool(torch.cat(self.parts, 1)[0].any())

    @property
    def ratios_db(self) -> tuple[float, float]:
        """The signal-to-quantization-noise ratios of the torch graph and of the file."""
        signal, in_torch, in_file = torch.cat(self.parts, 1).sum(1).tolist()
        return ratio_db(signal, in_torch), ratio_db(signal, in_file)

    @property
    def noise(self) -> float:
        """The energy of the torch graph's error for each number."""
        return float(self.errors[0].sum()) / max(self.numbers, 1)

    @property
    def errors(self) -> tuple[Tensor, Tensor]:
        """The energies of the torch graph's error and of the file's, as far as they can be told."""
        signal, in_torch, in_file = torch.cat(self.parts, 1)
        return in_torch + ROUNDING * signal, in_file + ROUNDING * signal

    @property
    def loss_db(self) -> float:
        """By how much the file is further from the float model than the torch graph; 0 where it is not."""
        in_torch, in_file = (float(energies.sum()) for energies in self.errors)
        if in_file <= in_torch:
            return 0.0
        return 10 * math.log10(in_file / in_torch) if math.isfinite(in_file) and in_torch > 0 else math.inf

    @property
    def width_db(self) -> float:
        """Half of the interval that the loss is known to."""
        in_torch, in_file = self.errors
        error = (in_file - in_torch * (in_file.sum() / in_torch.sum())).std()
        mean = float(in_file.mean()) or math.inf
        return Z * 10 / math.log(10) * float(error) / (math.sqrt(len(in_file)) * mean)

    @property
    def failed(self) -> bool:
        """Whether the file lost too much, beyond what these samples leave in doubt."""
        return self.loss_db > MAX_LOSS_DB and not self.loss_db - self.width_db * DOUBT / Z <= MAX_LOSS_DB

    @property
    def clear(self) -> bool:
        """Whether more samples would not change the answer."""
        return abs(self.loss_db - MAX_LOSS_DB) > self.width_db


def _gate(worst: _Output, num_outputs: int, seen: int, clear: bool) -> Gate:
    torch_db, file_db = worst.ratios_db
    told, doubtful = f", which tell the difference to {worst.width_db:.2g} dB", worst.loss_db > MAX_LOSS_DB
    known = told if clear else f"{told} only" if doubtful and seen > 1 else ""
    do = "report this model, with the unit parity above"
    if not clear and seen > 1:
        do = "give more samples"
    return Gate(
        "end-to-end parity", not worst.failed,
        f"SQNR to FP32 no more than {MAX_LOSS_DB} dB below the torch graph's {torch_db:.2f} dB",
        f"{file_db:.2f} dB on {many(seen, 'sample')}{known}{LOST if torch_db < LITTLE_DB else ''}", do,
        {"num_samples": seen, "num_outputs": num_outputs, "sqnr_db_torch": torch_db, "sqnr_db_file": file_db},
    )  # fmt: skip


def sqnr_in_torch(quantized: QuantizedModel, samples: Iterable[Any]) -> float:
    """The least SQNR in dB that an output of the quantized graph has to the float graph's, on batches of inputs."""
    outputs: list[_Output] = []
    for _, wanted, made in _answers(quantized, fast_simulation(quantized), samples):
        outputs = outputs or [_Output() for _ in wanted]
        for output, reference, answer in zip(outputs, wanted, made, strict=True):
            output.add(reference, answer, answer)
    return min(output.ratios_db[0] for output in outputs)


def _answers(
    quantized: QuantizedModel, simulated: Callable[[Any], Any], samples: Iterable[Any]
) -> Iterator[tuple[Any, list[Tensor], list[Tensor]]]:
    """For each small piece of the batches: it, the float graph's outputs, the quantized graph's."""
    given = (with_constants(quantized.graph, batch) for batch in samples)
    for batch in (piece for whole in given for piece in micro_batches(whole, MICRO_BATCH)):
        made = _outputs(simulated(batch))
        with torch.no_grad():
            wanted = _outputs(call_captured(quantized.float_graph, batch))  # type: ignore[arg-type]
        yield batch, wanted, made


def _outputs(output: Any) -> list[Tensor]:
    return [value.detach().cpu() for value in tensors(output)]
