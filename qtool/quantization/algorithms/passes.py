"""The algorithms of one quantization, run when their moment comes, their notes kept together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from qtool.form import check_inputs
from qtool.graphs.edits import copied
from qtool.quantization.algorithms import check_names, run_passes
from qtool.quantization.algorithms.subject import Report, Subject, silent
from qtool.quantization.placement import Placement
from qtool.quantization.residence import Moved, on
from qtool.recipe import DEFAULT_ALGORITHMS, QuantizeConfig
from qtool.system.devices import resolve_device
from qtool.units import few


class _Checked:
    """Batches, each looked at before a pass stumbles over one that the graph does not take."""

    def __init__(self, batches: Iterable[Any], graph: GraphModule) -> None:
        self.batches, self.graph = batches, graph

    def __iter__(self) -> Iterator[Any]:
        for index, batch in enumerate(self.batches):
            check_inputs(self.graph, batch, f"calibration batch {index}")
            yield batch


class Passes:
    """What ``config.algorithms`` asks for, over calibration ``batches`` that can be gone through again and again.

    ``reference`` is the float graph as the passes over it left it, where one of them or ``keep`` asks for it. ``saved``
    is what an earlier ranges.json holds, and then what the passes over the float graph add to the next one. Long
    passes tell ``report`` how far they are and keep what is finished in ``scratch``.
    """

    def __init__(
        self, config: QuantizeConfig, batches: Iterable[Any], *, saved: Mapping[str, Any] | None = None,
        keep: bool = False, report: Report = silent, scratch: Path | None = None,
    ) -> None:  # fmt: skip
        self.names, self.device = tuple(config.algorithms or ()), resolve_device(config.device)
        self.batches = Moved(batches, self.device)
        self.report, self._subject = report, partial(Subject, config=config, report=report, scratch=scratch)
        check_names(self.names)
        self.notes: list[str] = []
        live = "mode 'qat' trains weights and ranges instead where batch-norm is live"
        self._declined = live if config.mode == "qat" else ""
        self.reference: GraphModule | None = None
        self.saved = dict(saved or {})
        self._keep = keep

    def improve(self, graph: GraphModule, placement: Placement) -> Placement:
        """Runs the passes over the float graph in place, and remembers what it then computes; returns its placement.

        Over one whose batch-norm is to live nothing runs but what goes for that too.
        """
        subject = self._subject(graph, graph, placement, _Checked(self.batches, graph), self.saved)
        if self.names:
            self._run("train" if self._declined else "float", subject)
        if (self.names or self._keep) and not self._declined:
            self.reference = copied(graph)
        return subject.placement

    def decline_float(self, reason: str, reference: GraphModule) -> None:
        """Says that the float graph is not what will be quantized; ``reference`` is what the placement is over."""
        if self.names and not self._declined:
            self.notes += run_passes(self._asked(), "float", None, reason)
        if (self.names or self._keep) and not self._declined:
            self.reference = reference

    def correct(self, graph: GraphModule, placement: Placement, ranges: dict[str, Any]) -> tuple[str, ...]:
        """Runs the passes over the converted graph in place; returns the notes of all."""
        if self.names and self.reference is not None:
            subject = self._subject(graph, self.reference, placement, self.batches, ranges)
            self._run("integer", subject)
            if names := subject.data_sized():
                self.notes.append(f"no pass corrects layers that read as many rows as the data decides: {few(names)}")
        return tuple(self.notes)

    def left_out(self) -> tuple[str, ...]:
        """The notes of all where the converted graph is one that was trained."""
        return (*self.notes, *(f"{name} declined: {self._declined}" for name in self._asked()))

    def _asked(self) -> list[str]:
        """The names that are no defaults: what nobody asked for is not refused."""
        return [name for name in self.names if name not in DEFAULT_ALGORITHMS]

    def _run(self, moment: str, subject: Subject) -> None:
        with on(self.device, subject.graph, subject.reference):
            self.notes += run_passes(self.names, moment, subject)
