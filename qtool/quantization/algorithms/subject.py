"""What an algorithm is given to work on, and how it says that it will not."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from qtool.errors import UsageError
from qtool.quantization.integers import WEIGHTED
from qtool.quantization.placement import Placed, Placement
from qtool.quantization.residence import device_of
from qtool.recipe import QuantizeConfig

Report = Callable[[str, int, int], None]
"""Takes what is being done, how many parts of it are done, and how many there are."""


def silent(what: str, done: int, total: int) -> None:
    """Reports nothing."""


class Declined(Exception):
    """An algorithm does not apply; the text is the reason for the report."""


class NothingToDo(Declined):
    """The model has nothing that an algorithm works on, which is told to whoever named the algorithm."""


@dataclass
class Subject:
    """A graph to change in place, the float graph it stands for, and what is known of both.

    ``reference`` is the float graph that ``placement`` was made for, or a copy with the same node names; at the
    moment ``float``, ``graph`` is that graph itself, and a pass that adds operators to it places it anew. ``batches``
    are inputs that can be gone through again and again.
    ``ranges`` is what will be written as ranges.json. ``report`` takes the progress of long passes, and ``scratch`` is
    where they keep what is finished, so that a run that was killed goes on there.
    """

    graph: GraphModule
    reference: GraphModule
    placement: Placement
    batches: Iterable[Any]
    ranges: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    config: QuantizeConfig = field(default_factory=QuantizeConfig)
    report: Report = silent
    scratch: Path | None = None

    @property
    def device(self) -> torch.device:
        """Where the graph is."""
        return device_of(self.graph)

    def place_anew(self) -> None:
        """Makes the placement of the graph as it is now, to which operators were added."""
        self.placement = Placement(self.graph, self.placement.target, self.placement.overrides)

    def note(self, text: str) -> None:
        """Adds a line to the plan's notes."""
        self.notes.append(text)

    def saved(self, kind: str, places: Collection[str]) -> dict[str, Any]:
        """What is to be repeated of the changes of one ``kind`` that are beside the saved ranges, by their places.

        Raises UsageError for one whose place is not among ``places``: ranges would be of another graph than this one.
        """
        found = {name: entry[kind] for name, entry in self.ranges.items() if kind in entry}
        for name in found:
            if name not in places:
                raise UsageError(
                    "--ranges-from", f"a place for what {kind} changed at '{name}' when the ranges were saved", "none",
                    "use the ranges of the same model and target, or calibrate anew",
                )  # fmt: skip
        return found

    def anchors(self) -> dict[Node, Node]:
        """The convolutions and linear layers of ``graph`` that run in integers, each with its node in ``reference``.

        Without those that read as many rows as the data decides (:meth:`data_sized`): a pass would have none to look at
        for some samples, and other ones than the float layer's for others.
        """
        by_name = {node.name: node for node in self.reference.graph.nodes}
        wanted = {p.unit.name: p for p in self.placement.layers}
        found = {}
        for node in self.graph.graph.nodes:
            placed: Placed | None = wanted.get(str(node.meta.get("unit")))
            if node.target in WEIGHTED and placed is not None and placed.anchor.name in by_name:
                found[node] = by_name[placed.anchor.name]
        return {node: other for node, other in found.items() if not is_data_sized(other)}

    def data_sized(self) -> list[str]:
        """The units whose layers the data decides the size of, such as a mixture's experts that share tokens out."""
        return [p.unit.name for p in self.placement.placed if p.unit.weight_bits and is_data_sized(p.anchor)]


def saved_numbers(kind: str, name: str, numbers: Any, count: int) -> torch.Tensor:
    """What was saved for each of ``count`` channels of a place, (count,); raises UsageError where it is not that."""
    try:
        found = torch.tensor(numbers, dtype=torch.float32)
        got, fits = f"{found.numel()}", found.shape == (count,) and bool(found.isfinite().all())
    except (TypeError, ValueError):
        got, fits = "something else", False
    if not fits:
        raise UsageError(
            "--ranges-from", f"{count} finite numbers of what {kind} changed at '{name}'", got,
            "use the ranges of the same model, or calibrate anew",
        )  # fmt: skip
    return found


def is_data_sized(node: Node) -> bool:
    """Whether a value in a captured graph has a size that the data decides."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and bool(free_unbacked_symbols(tuple(value.shape)))
