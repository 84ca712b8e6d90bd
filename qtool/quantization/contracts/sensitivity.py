"""Sensitivity: what each quantized unit alone does to the output.

For one unit at a time the network runs in float and only that unit as the quantized graph has it: its inputs rounded to
their integers, its weight the integers that will be shipped, its output rounded. With ``z`` the float network's output
and ``z_u`` the output with only unit u quantized, over all samples,

    SQNR_u = 10 log10(Σ z² / Σ (z − z_u)²) dB,    KL_u = mean over samples of KL(softmax z ‖ softmax z_u) nats

Of several outputs the noise is each one's share of its own signal, Σ (z − z_u)² / Σ z², and the mean of these shares,
so that one in pixels does not drown one in logits; KL and agreement are of the first, of logits of tokens or pixels
the mean over all of a sample. Where a model gives whole numbers
alone, those that differ are counted: 10 log10(number / number that differ).
Run naively that is one forward pass per unit. What stands before a unit does not change, so each slice of the
calibration set passes through the float network once, its intermediate values are kept, and for a unit only what
lies behind it is computed again: half a pass on average. Sums add up over slices, so a stopped measurement goes on
where it was, to the same bits.

Noise of several units adds up only to first order: the sum over units is a guess at the whole network's error, and
the ranking is what it is for. Where half a pass for each unit is too slow, ``second_order.py`` estimates all of
them from one pass forward and a few back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node, map_arg

from qtool.errors import QtoolError
from qtool.evaluate import class_axis, divergence, error_of, signal_of
from qtool.form import quantized
from qtool.nested import num_samples, per_sample, samples_of, tensors
from qtool.quantization.algorithms.walk import arranged, execute
from qtool.quantization.placement import Placed, Placement
from qtool.quantization.rewrites.constants import constant_nodes

SLICE = 8
"""Samples whose intermediate values are held at once."""
After = Callable[[dict[str, Any]], None]
_QUANTIZE = quantized.quantize_per_tensor.default
_DEQUANTIZE = quantized.dequantize_per_tensor.default


@dataclass(frozen=True)
class Alone:
    """One unit as the quantized graph has it (``match``, its first operator there), and what it feeds in float."""

    placed: Placed
    match: Node
    output: tuple[Any, ...] | None
    behind: tuple[Node, ...]


class Sensitivities:
    """Measures every integer unit of a converted ``graph`` against ``reference``, the float graph of ``placement``.

    ``graph`` is labelled with the placement's units; ``reference`` has the node names of the placement's graph.
    ``state`` is what an earlier measurement left (``self.state``), plain data. ``targets`` of a few samples, or that it
    is ``asked`` for, tell which axis of outputs that are no N×C counts classes (``evaluate.class_axis``).
    """

    kind = "exact"
    empty: Mapping[str, float] = {"kl": 0.0, "agree": 0.0}

    def __init__(
        self, graph: GraphModule, reference: GraphModule, placement: Placement, state: Mapping[str, Any] | None = None,
        *, targets: Any = None, asked: bool = False,
    ) -> None:  # fmt: skip
        self._axis_of = partial(class_axis, targets=targets, asked=asked)
        self.graph, self.reference = graph, reference
        self._constants: dict[Node, Any] = {}
        self._constant_nodes = constant_nodes(graph) | constant_nodes(reference)
        nodes = {node.name: node for node in reference.graph.nodes}
        self.units = [alone for placed in placement.placed if (alone := self._alone(placed, nodes)) is not None]
        empty = {alone.placed.unit.name: {"noise": [], **self.empty} for alone in self.units}
        self.state: dict[str, Any] = {
            "kind": self.kind, "num_samples": 0, "signal": [], "units": empty, "class_axis": None
        }  # fmt: skip
        if state is not None:
            self._restore(state)

    def _restore(self, state: Mapping[str, Any]) -> None:
        if set(state.get("units", ())) != set(self.state["units"]) or state.get("kind") != self.kind:
            raise QtoolError(
                "sensitivity", "a measurement of these units", "one of others", "measure again with --no-resume"
            )
        self.state = {**state, "units": {name: dict(sums) for name, sums in state["units"].items()}}

    def _alone(self, placed: Placed, nodes: Mapping[str, Node]) -> Alone | None:
        unit = placed.unit
        if not (unit.integer or unit.weight_bits) or unit.kind == "move" or placed.pattern is None:
            return None
        here = [n for n in self.graph.graph.nodes if n.meta.get("unit") == unit.name]
        spelled = (placed.anchor.target, torch.ops.qtool.lstm.default)
        match = next((n for n in here if n.target in spelled), None)
        if match is None:
            return None
        chain = [nodes[node.name] for node in placed.nodes]
        mapped = Placed(unit, chain, placed.pattern)
        return Alone(mapped, match, _output_quantizer(match, unit.name), _behind(chain[-1]))

    @torch.no_grad()
    def measure(self, batches: Iterable[Any], *, samples: int | None = None, after: After | None = None) -> None:
        """Adds up ``batches`` of inputs, the first ``samples`` of them; those that ``state`` has seen are passed over.

        ``after(state)`` is called after every slice. Raises QtoolError without a sample.
        """
        seen = 0
        for piece in _slices(batches, samples):
            size = num_samples(piece)
            if seen >= self.state["num_samples"]:
                self._add(piece)
                self.state["num_samples"] += size
                if after is not None:
                    after(self.state)
            seen += size
        if not self.state["num_samples"]:
            raise QtoolError("sensitivity", "at least one sample", "none", "pass at least one batch of inputs")

    def _add(self, piece: Any) -> None:
        values = self._float_pass(piece)
        wanted = self._outputs(values)
        self.state["signal"] = added(self.state["signal"], map(energy, wanted))
        for alone in self.units:
            given = self._outputs({**values, **self._with_only(alone, values)})
            self._compare(self.state["units"][alone.placed.unit.name], wanted, given)

    def _outputs(self, values: Mapping[Node, Any]) -> list[Tensor]:
        """The outputs that are floating point numbers; where there are none, the whole numbers."""
        result = next(node for node in self.reference.graph.nodes if node.op == "output").args[0]
        found = list(tensors(map_arg(result, values.__getitem__)))
        return [t for t in found if t.is_floating_point()] or found

    def _compare(self, sums: dict[str, Any], wanted: list[Tensor], given: list[Tensor]) -> None:
        sums["noise"] = added(sums["noise"], map(_error, wanted, given))
        axis = self._class_axis(wanted)
        if axis is None:
            return
        one, other = (outputs[0].movedim(axis, -1) for outputs in (wanted, given))
        sums["kl"] += float(per_sample(divergence(one.double(), other.double())).mean(1).sum())
        sums["agree"] += float(per_sample((one.argmax(-1) == other.argmax(-1)).double()).mean(1).sum())

    def _class_axis(self, outputs: list[Tensor]) -> int | None:
        axis = self.state["class_axis"] = self._axis_of(outputs[0])
        return axis

    def _float_pass(self, piece: Any) -> dict[Node, Any]:
        places = [node for node in self.reference.graph.nodes if node.op == "placeholder"]
        values: dict[Node, Any] = dict(zip(places, arranged(piece, places), strict=True))
        for node in self.reference.graph.nodes:
            if node.op not in ("placeholder", "output"):
                constant = node in self._constant_nodes
                values[node] = self._constant(self.reference, node) if constant else self._seen(
                    node, execute(self.reference, node, values.__getitem__)
                )  # fmt: skip
        return values

    def _seen(self, node: Node, value: Any) -> Any:
        """A value of the float pass, on its way to those who read it."""
        return value

    def _with_only(self, alone: Alone, values: Mapping[Node, Any]) -> dict[Node, Any]:
        """The values that change when this unit is quantized."""
        changed = self._within(alone, values)
        for node in alone.behind:
            changed[node] = execute(self.reference, node, lambda n: changed[n] if n in changed else values[n])
        return changed

    def _within(self, alone: Alone, values: Mapping[Node, Any]) -> dict[Node, Any]:
        """The values of a unit's own operators when it is quantized."""
        anchor, *tail = alone.placed.nodes
        inputs = dict(zip(alone.match.all_input_nodes, _in_order(anchor, alone.match), strict=True))

        def operand(node: Node) -> Any:
            if node in self._constant_nodes:
                return self._constant(self.graph, node)
            source = inputs[node]
            assert source is not None
            value = values[source]
            return _rounded(value, _quantizer_of(node)) if node.target is _DEQUANTIZE else value

        changed = {anchor: execute(self.graph, alone.match, operand)}
        for node in tail:
            changed[node] = execute(self.reference, node, lambda n: changed.get(n, values[n]))
        if alone.output is not None:
            changed[alone.placed.output] = _rounded(changed[alone.placed.output], alone.output)
        return changed

    def _constant(self, graph: GraphModule, node: Node) -> Any:
        if node not in self._constants:
            self._constants[node] = execute(graph, node, lambda n: self._constant(graph, n))
        return self._constants[node]

    def results(self) -> list[dict[str, Any]]:
        """One entry for each unit, the most harmful first: ``name``, ``kind``, ``sqnr_db``, ``kl`` and ``agreement``.

        ``sqnr_db`` is infinite where the unit changes nothing; ``kl`` (nats) and ``agreement`` (a share) are None
        where the first output is no logits. ``kind`` of measurement is told as ``measured``.
        """
        count, found = self.state["num_samples"], []
        for alone in self.units:
            sums = self.state["units"][alone.placed.unit.name]
            logits, counted = self.state["class_axis"] is not None, "agree" in sums
            found.append({
                "name": alone.placed.unit.name, "kind": alone.placed.unit.kind,
                "sqnr_db": _decibels(self.state["signal"], sums["noise"]),
                "kl": max(sums["kl"], 0.0) / count if logits else None,  # rounding can make nothing less than that
                "agreement": sums["agree"] / count if logits and counted else None, "measured": self.kind,
            })  # fmt: skip
        return sorted(found, key=lambda entry: float(entry["sqnr_db"]))


def added(sums: list[float], terms: Iterable[float]) -> list[float]:
    """Sums, one for each output, with another slice's terms; none before the first."""
    terms = list(terms)
    return [a + b for a, b in zip(sums or [0.0] * len(terms), terms, strict=True)]


def energy(value: Tensor) -> float:
    """The squares of an output, summed; of whole numbers, how many there are."""
    return signal_of(value.double()).square().sum().item() if value.is_floating_point() else float(value.numel())


def _error(wanted: Tensor, given: Tensor) -> float:
    """The squares of the difference, summed; of whole numbers, how many differ."""
    if not wanted.is_floating_point():
        return float((wanted != given).sum())
    return error_of(wanted.double(), given.double()).square().sum().item()


def _slices(batches: Iterable[Any], samples: int | None) -> Iterator[Any]:
    """The batches in pieces of at most ``SLICE`` samples, up to ``samples``."""
    left = math.inf if samples is None else samples
    for batch in batches:
        for start in range(0, num_samples(batch), SLICE):
            if left <= 0:
                return
            stop = min(start + SLICE, num_samples(batch), start + left)
            yield samples_of(batch, start, int(stop))
            left -= stop - start


def _behind(output: Node) -> tuple[Node, ...]:
    """Everything that depends on a node, in order; the graph's output aside."""
    found = {output}
    for node in output.graph.nodes:
        if node.op != "output" and any(source in found for source in node.all_input_nodes):
            found.add(node)
    return tuple(node for node in output.graph.nodes if node in found and node is not output)


def _in_order(anchor: Node, match: Node) -> list[Node | None]:
    """The operand of ``anchor`` for each input node of ``match``, the same operator in another graph."""
    ours: list[Any] = []
    map_arg((anchor.args, anchor.kwargs), lambda n: ours.append(n))
    theirs: list[Any] = []
    map_arg((match.args, match.kwargs), lambda n: theirs.append(n))
    by_input = dict(zip(theirs, [*ours, *[None] * (len(theirs) - len(ours))], strict=False))
    return [by_input.get(node) for node in match.all_input_nodes]


def _quantizer_of(node: Node) -> tuple[Any, ...]:
    """The arguments of the quantizer that a dequantize reads."""
    source = node.args[0]
    while isinstance(source, Node) and source.target is not _QUANTIZE:
        source = source.args[0]
    assert isinstance(source, Node)
    return source.args[1:]


def _output_quantizer(match: Node, unit: str) -> tuple[Any, ...] | None:
    """The arguments of the quantizer behind a unit's last operator; None where its output stays float."""
    node: Node | None = match
    while node is not None:
        for user in node.users:
            if user.target is _QUANTIZE:
                return user.args[1:]
        node = next((user for user in node.users if user.meta.get("unit") == unit), None)
    return None


def _rounded(value: Tensor, quantizer: tuple[Any, ...]) -> Tensor:
    """Quantized and dequantized."""
    return quantized.dequantize_per_tensor.default(  # type: ignore[no-any-return]
        quantized.quantize_per_tensor.default(value, *quantizer), *quantizer
    )


def _decibels(signal: list[float], noise: list[float]) -> float:
    """The SQNR of outputs together: minus the mean of their shares of noise."""
    shares = [n / s if s else math.inf if n else 0.0 for s, n in zip(signal, noise, strict=True)]
    share = sum(shares) / len(shares)
    return -10 * math.log10(share) if share else math.inf
