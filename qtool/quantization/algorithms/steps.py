"""Steps: the scales of all activations and all biases, learned together towards the float model's own outputs.

Every other pass settles one tensor or one layer at a time, from what it sees there. Only the whole network tells how
much an error matters at its end, which rare large values may be clipped, and what one layer can make up for another.
With y the float network's outputs, ŷ the quantized one's, Adam minimises over the calibration samples

    L = ‖ŷ − y‖² / ‖y‖²

in the scales and biases (``student.py``), as QAT with learned steps does in these and the weights (arXiv 1902.08153).
No labels are asked for, and as many numbers are learned as there are channels, so that a few hundred samples do. Where
L is not ``LEAST_GAIN`` smaller in the end, everything is undone, and the note says so. Every eighth sample is never
trained on and can undo it as well, where it contradicts with 95 % confidence: few samples, of which one may have a
fifth of all error, show harm and no gain. (On two draws of 512 images a MobileNetV2 came 1.0 and 1.2 dB nearer on
those it learned from, 0.8 and 1.1 on 2,000 others, and −0.9 and 0.7, each ± 0.6, on the 64 held out.)

Memory does not grow with the set: a step's gradients are added up over pieces of ``PIECE`` samples, and of the whole
set the float outputs alone are kept, in files beyond a budget. A step takes four times a float forward pass, the whole
about ``4 · EPOCHS`` passes over the set. After each epoch what was learned so far goes into the journal.

The ranges in ``ranges.json`` stay those that were calibrated; what was learned stands beside them, and is taken as it
is where a quantization is repeated from there and comes to the same integers.

Left out on purpose: zero points, which gained nothing (a MobileNetV2 on CIFAR-10, 32.1 dB at its logits, came to 33.3
by scales alone, 32.8 by biases, 32.1 by zero points, 33.7 by all), and weights, which need more samples than these.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from qtool.nested import call, map_tensors, micro_batches, num_samples
from qtool.quantization.algorithms.journal import Journal, State
from qtool.quantization.algorithms.spool import Store
from qtool.quantization.algorithms.student import Student
from qtool.quantization.algorithms.subject import Declined, Subject
from qtool.quantization.algorithms.verify import parted
from qtool.quantization.outputs import floating, rates, vector
from qtool.units import many

EPOCHS, BATCH, PIECE, HELD = 8, 32, 8, 8
SAMPLES = 256
"""With fewer the steps are too few: after 28 a pretrained MobileNetV2 was farther off on the samples they were for."""
LEAST_GAIN = 0.3
"""In dB, on the samples learned from: what is worth its while."""
RATE, WARMUP = 0.005, 0.05
"""The greatest step of ln s, and of a bias in tenths of a deviation; what part of the steps leads up to it."""


@torch.enable_grad()
def learn_steps(subject: Subject) -> None:
    """Learns every activation's scale and every integer layer's bias, in place; undoes it where that is worse.

    Raises Declined without an activation whose range could be learned, for fewer than ``SAMPLES`` samples, and for a
    model that gives whole numbers alone.
    """
    student = Student(subject)
    if subject.config.ranges_from is not None and student.restore():
        subject.note(f"steps: as saved with the ranges, {len(student.groups)} scales")
        return
    count = sum(num_samples(batch) for batch in subject.batches)
    if count < SAMPLES:
        raise Declined(f"{many(count, 'calibration sample')}, and {SAMPLES} are the fewest to learn from")
    if not floating([node.meta["val"] for node in subject.reference.graph.output_node().all_input_nodes]):
        raise Declined("the model gives no floating point numbers to learn from")
    with Samples(subject, held=True) as unseen, Samples(subject, held=False) as seen:
        student.prepare(next(iter(seen))[0])
        before = [errors(student, samples) for samples in (seen, unseen)]
        _train(subject, student, seen)
        after = [errors(student, samples) for samples in (seen, unseen)]
    gain = 10 * math.log10(float(before[0].sum()) / float(after[0].sum()))
    held = 10 * torch.log10(before[1] / after[1])
    mean, error = float(held.mean()), float(held.std()) / math.sqrt(len(held))
    told = f"{gain:+.1f} dB on samples learned from, {mean:+.1f} ± {error:.1f} dB on others"
    if not (gain >= LEAST_GAIN and mean > -2 * error):
        subject.note(f"steps: undone, {told}")
        return
    student.store()
    subject.note(
        f"steps: {many(len(student.groups), 'scale')} and the biases of {many(len(student.layers), 'layer')}, {told}"
    )


class Samples:
    """Pieces of the calibration set, or one by one those held out, each with the float model's outputs as one vector.

    Each output counts by its own root mean square, so that several of different sizes matter alike.
    """

    @torch.no_grad()
    def __init__(self, subject: Subject, *, held: bool) -> None:
        self.batches, self.held = subject.batches, held
        self.store, self._key = Store(device=subject.device), next(iter(subject.reference.graph.nodes))
        self._rates: list[Tensor] = []
        for index, piece in enumerate(self._pieces()):
            wanted = call(subject.reference, piece)
            self._rates = self._rates or rates(wanted)
            self.store.put(self._key, index, self.vector(wanted))

    def __enter__(self) -> Samples:
        return self

    def __exit__(self, *_: object) -> None:
        self.store.close()

    def __iter__(self) -> Iterator[tuple[Any, Tensor]]:
        for index, piece in enumerate(self._pieces()):
            yield piece, self.store.get(self._key, index)

    def steps(self) -> Iterator[list[tuple[Any, Tensor]]]:
        """The pieces in groups of ``BATCH`` samples, the last of which may have fewer."""
        group: list[tuple[Any, Tensor]] = []
        for pair in self:
            group.append(pair)
            if sum(num_samples(piece) for piece, _ in group) >= BATCH:
                yield group
                group = []
        if group:
            yield group

    def vector(self, outputs: Any) -> Tensor:
        """All floating point outputs in one dimension, float32."""
        return vector(outputs, self._rates)

    def _pieces(self) -> Iterator[Any]:
        for batch in parted(self.batches, held=self.held, share=HELD):
            for piece in micro_batches(batch, 1 if self.held else PIECE):
                yield map_tensors(self._laid_out, piece)

    def _laid_out(self, value: Tensor) -> Tensor:
        return value.contiguous(memory_format=torch.channels_last) if value.dim() == 4 else value


@torch.no_grad()
def errors(student: Student, samples: Samples) -> Tensor:
    """‖ŷ − y‖² of each piece of the samples, float64: of each sample where they are held out."""
    found = [(samples.vector(student(piece)) - wanted).double().square().sum() for piece, wanted in samples]
    return torch.stack(found).cpu().clamp(min=1e-30)


def _train(subject: Subject, student: Student, samples: Samples) -> None:
    journal = Journal(subject, "steps")
    optimizer = torch.optim.Adam([student.learned], betas=(0.9, 0.99))
    total = EPOCHS * sum(1 for _ in samples.steps())
    for epoch in range(EPOCHS):
        state = journal.once(str(epoch), partial(_epoch, subject, student, samples, optimizer, epoch, total))
        student.learned.data.copy_(state["learned"])
        moments = {key: state[key] for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[student.learned] = {"step": state["step"].cpu(), **moments}
    subject.report("steps", total, total)


def _epoch(
    subject: Subject, student: Student, samples: Samples, optimizer: torch.optim.Adam, epoch: int, total: int
) -> State:
    """Goes through the samples once; returns where that led to."""
    for step, group in enumerate(samples.steps(), epoch * total // EPOCHS):
        subject.report("steps", step, total)
        rise = min(1.0, (step + 1) / (WARMUP * total))
        optimizer.param_groups[0]["lr"] = RATE * rise * (1 + math.cos(math.pi * step / total)) / 2
        optimizer.zero_grad(set_to_none=True)
        for piece, wanted in group:
            (samples.vector(student(piece)) - wanted).square().mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        student.limit()
    return {"learned": student.learned.detach().clone(), **optimizer.state[student.learned]}
