"""Placement: which operators become integer units, decided in one pass over the captured graph.

Walking the graph in order, each operator is tried against the target's patterns. An anchor takes the
batch-norm and the activation behind it when nothing else reads what lies between, so that one unit has
one output quantizer, after the activation. A pattern that only makes sense between integers (a sum, a
pooling, a reshape) is taken when all its operands are integers anyway: they leave an integer unit, or a
convolution or linear layer reads them too. Otherwise it stays in float and the plan says why. What nothing reads in
integers is not rounded to them where the kernel can do without: a linear layer before softmax, attention or the end
gives float, and a gate that ends as a probability is no table of 256.

Overrides are patterns (``layer4.*``) of module paths or of unit names, the first that matches an anchor decides. What
reads an integer unit's output still finds it quantized, whether or not it is an integer unit itself.

The result is a list of ``Placed`` units over graph nodes, the source of the pt2e annotations, of the
plan in the artifact and of the coverage gate.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule, Node

from qtool.errors import UsageError
from qtool.form import Plan, Unit
from qtool.graphs.edits import owner
from qtool.graphs.operators import aten
from qtool.graphs.pixels import PIXELS
from qtool.nested import tensors
from qtool.quantization.answers import Answers
from qtool.quantization.limits import clip_limits, keeps_zero
from qtool.quantization.targets import (
    IN_BLOCKS,
    INT8_ACTIVATION,
    INT8_WEIGHT,
    RELU_LIKE,
    SOFTMAX,
    Format,
    Pattern,
    Target,
)

# Operators whose output holds copies of their input's numbers (and zeros) only.
_COPIES = ("move", "pad", "upsample")
# Operators that compute nothing worth a line in the plan.
_SILENT = (aten.sym_size.int, aten.detach.default, aten.alias.default, operator.getitem, PIXELS)

BY_OVERRIDE = "left in float by an override"
LEFT = "left"
"""Where a node's ``meta`` has a pass' reason to leave it in float, which an override to int8 goes before."""


@dataclass
class Placed:
    """A unit over graph nodes: ``nodes[0]`` is the anchor, ``nodes[-1]`` gives the output."""

    unit: Unit
    nodes: list[Node]
    pattern: Pattern | None = None
    operands: list[Node] = field(default_factory=list)
    quantized_output: bool = False
    override: str | None = None

    @property
    def anchor(self) -> Node:
        """The operator that gives the unit its kind."""
        return self.nodes[0]

    @property
    def limits(self) -> tuple[float, float] | None:
        """Between which values the activation that was absorbed lets results pass; None where there is none."""
        clipping = [node for node in self.nodes[1:] if node.target in RELU_LIKE]
        return clip_limits(clipping[-1]) if clipping else None

    @property
    def output(self) -> Node:
        """The node whose value leaves the unit."""
        return self.nodes[-1]


def first_match(overrides: Mapping[str, str], names: Collection[str]) -> str | None:
    """The first pattern of ``overrides`` that one of an operator's names matches, which decides."""
    return next((pattern for pattern in overrides if any(fnmatch.fnmatchcase(name, pattern) for name in names)), None)


class Placement:
    """The units of one graph for one target (``placed``), of which ``layers`` have weights; see the module's text.

    ``names`` are those of the units that give each value, integer or float.
    """

    def __init__(self, graph_module: GraphModule, target: Target, overrides: Mapping[str, str] | None = None) -> None:
        self.graph_module, self.target = graph_module, target
        self.overrides = dict(overrides or {})
        self.placed: list[Placed] = []
        self.layers: list[Placed] = []
        self.names: dict[Node, str] = {}
        self._integer: dict[Node, Placed] = {}
        self._read_as_integer: set[Node] = set()
        self._added_unrounded: set[Node] = set()
        self._joined: set[Node] = set()
        self._taken: set[Node] = set()
        self._signed: set[Node] = set()
        self._answers = Answers()
        self._names: set[str] = set()
        self._used_overrides: set[str] = set()
        self._weighted_anchors = {anchor for p in target.patterns if p.weighted for anchor in p.anchors}
        self._weighted = {owner(node) for node in graph_module.graph.nodes if node.target in self._weighted_anchors}
        self._owners = {owner(node) for node in graph_module.graph.nodes if node.op == "call_function"}
        compute = [node for node in graph_module.graph.nodes if node.op == "call_function" and _is_compute(node)]
        for pattern in (pattern for pattern in target.patterns if pattern.weighted):
            readers = [node for node in compute if pattern.is_about(node) and not self._refusal(node, pattern)]
            for operand in (operand for node in readers for operand in _operands(node, pattern)):
                self._read_as_integer.update(self._moved_from(operand))
        for node in compute:
            if node not in self._taken:
                self._place(node)
        self.layers += (p for p in self.placed if p.pattern is not None and p.pattern.weighted)
        self._settle_weights()
        self._settle_signs()
        if unused := [p for p in self.overrides if p not in self._used_overrides and not self._is_agreed(p)]:
            raise self._unmatched(sorted(unused))

    def _is_agreed(self, pattern: str) -> bool:
        """Whether units match that patterns before it decide alike: a module's own path stands for all its units."""
        units = [(owner(placed.anchor), placed.unit.name) for placed in self.placed]
        found = [first_match(self.overrides, names) for names in units if first_match({pattern: ""}, names)]
        return bool(found) and all(self.overrides[str(first)] == self.overrides[pattern] for first in found)

    def _unmatched(self, unused: list[str]) -> UsageError:
        """What is wrong with overrides that decided on no unit."""
        names = sorted(self._names)
        where, expected, got = "overrides", "patterns that match a unit", ", ".join(unused)
        if any(first_match({pattern: ""}, names) for pattern in unused):
            return UsageError(where, f"{expected} which none before them does", got, "put the narrower pattern first")
        return UsageError(
            where, expected, got, f"use module paths such as {', '.join(names[:3])}, * for any part of it"
        )

    def plan(self, notes: tuple[str, ...] = ()) -> Plan:
        """The plan: reshapes and the like, which cost nothing, are left out. Capture's notes come before ``notes``."""
        units = tuple(placed.unit for placed in self.placed if placed.unit.kind != "move")
        notes = (*self.graph_module.meta.get("notes", ()), *notes)
        return Plan(self.target.name, units, notes, simulated=self.target.activation.bits < 8)

    def name_of(self, value: Node) -> str:
        """What a value goes by, here and in what is prepared of the graph: the unit that gives it, or the input."""
        return str(value.meta["unit"]) if "unit" in value.meta else self.names.get(value, value.name)

    def is_integer(self, node: Node) -> bool:
        """Whether the node's value leaves an integer unit with a quantizer."""
        return node in self._integer

    def weight_format(self, placed: Placed) -> Format:
        """The number format of a unit's weight: the first and the last layer may have one of their own.

        Where weights have 6 bits or fewer, an override 'int8' gives a layer all 8.
        """
        if placed.override == "int8" and self.target.weight.bits < 7:
            return INT8_WEIGHT
        edges = (self.layers[0], self.layers[-1])
        return self.target.edge_weight if placed in edges else self.target.weight

    def activation_format(self, node: Node) -> Format:
        """The number format of a value: what the first and the last layer read may have its own.

        What a kernel without zero points reads is symmetric, unless it is never negative: then its zero point is 0. The
        second operand of a product is in the place of a weight, and symmetric in any case.
        """
        if self.origin(node) in self._signed:
            return INT8_ACTIVATION
        if self.target.edge_activation is None:
            return self.target.activation
        edges = {n for p in (self.layers[0], self.layers[-1]) for o in p.operands for n in self._moved_from(o)}
        return self.target.edge_activation if node in edges else self.target.activation

    def origin(self, node: Node) -> Node:
        """Whose numbers a value holds: what made them, where ``node`` is behind operators that share its quantizer."""
        while (placed := self._integer.get(node)) is not None and placed.pattern is not None and placed.pattern.shares:
            node = placed.operands[0]
        return node

    def _settle_signs(self) -> None:
        """Finds the values that have to be symmetric for the sake of what reads them."""
        readers = [placed for placed in self.placed if placed.pattern is not None and placed.pattern.signed]
        origins = {self.origin(operand) for placed in readers for operand in placed.operands}
        products = [placed for placed in readers if len(placed.operands) > 1]
        weights = {self.origin(placed.operands[-1]) for placed in products}
        self._signed = {node for node in origins if node in weights or not self._is_positive(node)}
        settled = None
        while settled != len(self._signed):  # what is in two joins ties their formats together
            settled = len(self._signed)
            for parts in map(self._parts, self._joined):
                if not all(node not in self._signed and self._is_positive(node) for node in parts):
                    self._signed.update(parts)

    def _parts(self, joined: Node) -> list[Node]:
        """Whose numbers a concatenation without a quantizer of its own holds."""
        return [p for o in joined.all_input_nodes for p in (self._parts(o) if o in self._joined else [self.origin(o)])]

    def _is_positive(self, node: Node) -> bool:
        placed = self._integer.get(node)
        return placed is not None and (placed.anchor.target in SOFTMAX or (placed.limits or (-math.inf,))[0] >= 0)

    def _settle_weights(self) -> None:
        """Tells each unit the bits of its weight."""
        for placed in self.layers:
            bits = self.weight_format(placed).bits
            reason = placed.unit.reason
            placed.unit = dataclasses.replace(
                placed.unit, weight_bits=bits, reason=reason.format(bits=bits),
                block=self.target.block if reason == IN_BLOCKS else None,
            )  # fmt: skip

    def _place(self, node: Node) -> None:
        reason = self._left(node) or self.target.leaves
        for pattern in self.target.patterns:
            if not pattern.is_about(node):
                continue
            reason = self._refusal(node, pattern)
            if not reason:
                self._accept(node, pattern)
                return
        self._leave_float(node, reason)

    def _refusal(self, node: Node, pattern: Pattern, assumed: Collection[Node] = ()) -> str:
        """Why ``pattern`` does not apply to ``node``; empty when it does. ``assumed`` are integers for all we know."""
        if reason := self._left(node):
            return reason
        if pattern.accepts and (reason := pattern.accepts(node)):
            return reason
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.dtype != torch.float32:
            return f"its result is {str(value.dtype).removeprefix('torch.')}, not float32"
        if pattern.weighted and not _is_constant(node.args[1]):
            return "its weight is computed, not stored"
        operands = _operands(node, pattern)
        if any(_is_constant(operand) for operand in operands):
            return "an operand is a constant"
        integers = (self._integer, self._read_as_integer, self._added_unrounded, self._joined, assumed)
        floats = [operand for operand in operands if not any(operand in values for values in integers)]
        if pattern.needs_integer_inputs and floats:
            return f"its operand '{self._maker(floats[0])}' is float"
        unrounded = [operand for operand in operands if operand in self._joined | self._added_unrounded]
        if pattern.shares and unrounded:
            return f"its operand '{self._maker(unrounded[0])}' has no scale of its own to share"
        if pattern.fixed and self._is_read_in_float(node):
            return "its result is read in float, and 256 steps would be coarse"
        return ""

    def _accept(self, node: Node, pattern: Pattern) -> None:
        nodes = [node, *self._tail(node, pattern)]
        # what convolutions give is large, and is joined in bytes
        in_float = pattern.float_output and self._is_read_in_float(nodes[-1], joins=pattern.kind != "conv")
        gives_float = in_float and not self._clips(nodes, pattern)
        quantized_output = pattern.quantizes_output and not gives_float
        if pattern.joins and self._is_read_in_float(nodes[-1]):
            self._joined.add(nodes[-1])
            quantized_output = False
        if pattern.sums and self._is_added(nodes[-1]):
            self._added_unrounded.add(nodes[-1])
            quantized_output = False
        override = self._override(node)
        unit = Unit(
            self._name(node), pattern.kind, tuple(dict.fromkeys(owner(n) for n in nodes if owner(n))),
            integer=not pattern.in_float, reason=pattern.in_float,
            weight_bits=self.target.weight.bits if pattern.weighted else None,
        )  # fmt: skip
        operands = [o for o in _operands(node, pattern) if o not in self._added_unrounded | self._joined]
        placed = Placed(unit, nodes, pattern, operands, quantized_output, override)
        self._add(placed)
        self._taken.update(nodes)
        if quantized_output:
            self._integer[nodes[-1]] = placed

    def _add(self, placed: Placed) -> None:
        self.placed.append(placed)
        self.names[placed.output] = placed.unit.name

    def _clips(self, nodes: list[Node], pattern: Pattern) -> bool:
        """Whether the kernel has no activation of its own: it clips to the range of an output that it rounds.

        With an activation behind it that others read, a kernel that gives float would be the runtime's float one.
        """
        own = pattern.in_float or any(activation not in RELU_LIKE for activation in pattern.activations)
        inner = any(user.op != "output" for user in nodes[-1].users)
        return nodes[-1].target in RELU_LIKE and inner and not own

    def _tail(self, node: Node, pattern: Pattern) -> list[Node]:
        """The batch-norm and the activation that fuse behind ``node``."""
        tail: list[Node] = []
        last = node
        for targets in ((aten.batch_norm.default,) if pattern.batch_norm else (), pattern.activations):
            follower = next(iter(last.users)) if len(last.users) == 1 else None
            if (
                follower is not None
                and follower.target in targets
                and follower.args[0] is last
                and keeps_zero(follower)
            ):
                tail.append(follower)
                last = follower
        return tail

    def _moved_from(self, node: Node) -> list[Node]:
        """The node and what it is a reshaping, padding or repetition of, as far up as there are only such."""
        found = [node]
        while self._is_move(found[-1], _COPIES) and isinstance(source := found[-1].args[0], Node):
            found.append(source)
        return found

    def _maker(self, node: Node) -> str:
        """What the unit goes by whose numbers a value holds, or the input."""
        return self.name_of(self._moved_from(node)[-1])

    def _is_read_in_float(self, node: Node, *, joins: bool = True) -> bool:
        """Whether no integer unit would compute with the value if it were integers, moved or, by ``joins``, joined.

        So are sums of what layers give in float. A maximum over windows is such a move: what compares it with the
        value itself would find many equal integers.
        """
        users = (user for user in node.users if user.op != "output")
        return all(
            self._is_read_in_float(user, joins=joins)
            if self._is_move(user, ("move", "max_pool")) or (joins and (self._joins(user) or self._is_sum(user)))
            else not self._could_be_integer(user)
            for user in users
        )

    def _could_be_integer(self, node: Node) -> bool:
        """Whether an operator runs in integers as far as is known before it is its turn."""
        return self._answers.ask(node, _computes, partial(self._could_be, node, _computes))

    def _could_be(self, node: Node, wanted: Callable[[Pattern], bool]) -> bool:
        """Whether a pattern that is wanted may take an operator; operands whose turn is to come are asked likewise."""
        patterns = [p for p in self.target.patterns if p.is_about(node) and wanted(p)]
        unknown = dict.fromkeys(o for p in patterns for o in _operands(node, p) if o not in self._taken)
        assumed = [o for o in unknown if self._answers.ask(o, _gives, partial(self._could_be, o, _gives))]
        return any(not self._refusal(node, pattern, assumed) for pattern in patterns)

    def _is_added(self, node: Node) -> bool:
        """Whether all that reads the node's value is a sum with an integer that is there already."""
        user = next(iter(node.users), node)
        others = [operand for operand in user.args if operand is not node]
        if len(node.users) != 1 or user.target is not aten.add.Tensor or len(others) != 1:
            return False
        return others[0] in self._integer and self._could_be_integer(user)

    def _is_move(self, node: Node, kinds: tuple[str, ...] = ("move",)) -> bool:
        patterns = (pattern for pattern in self.target.patterns if pattern.is_about(node))
        return any(p.kind in kinds and not (p.accepts and p.accepts(node)) for p in patterns)

    def _joins(self, node: Node) -> bool:
        return any(pattern.joins and pattern.is_about(node) for pattern in self.target.patterns)

    def _is_sum(self, node: Node) -> bool:
        """Whether a sum adds nothing but results of linear layers that nothing else reads, moved, or sums of such."""
        lines = [self._moved_from(part) for part in node.all_input_nodes] if self._is_move(node, ("add",)) else []
        ends = [line[-1] for line in lines if all(len(part.users) == 1 for part in line)]
        alone = all(end.target is aten.linear.default or self._is_sum(end) for end in ends)
        return bool(ends) and len(ends) == len(lines) and alone

    def _leave_float(self, node: Node, reason: str) -> None:
        owners = (owner(node),) if owner(node) else ()
        unit = Unit(self._name(node), self._kind(node), owners, integer=False, reason=reason)
        self._add(Placed(unit, [node]))
        self._taken.add(node)

    def _kind(self, node: Node) -> str:
        """What the pattern that would take an operator calls it, or else its own name."""
        patterns = (pattern for pattern in self.target.patterns if pattern.is_about(node))
        fitting = (pattern.kind for pattern in patterns if not (pattern.accepts and pattern.accepts(node)))
        return next(fitting, _operator(node))

    def _left(self, node: Node) -> str:
        """Why a node stays in float whatever takes it: an override, or what a pass found of the data."""
        override = self._override(node)
        return BY_OVERRIDE if override == "float" else "" if override else str(node.meta.get(LEFT, ""))

    def _override(self, node: Node) -> str | None:
        pattern = first_match(self.overrides, (owner(node), self._free_name(node)))
        if pattern is None:
            return None
        self._used_overrides.add(pattern)
        return self.overrides[pattern]

    def _name(self, node: Node) -> str:
        name = self._free_name(node)
        self._names.add(name)
        return name

    def _free_name(self, node: Node) -> str:
        """The name that a unit with this anchor gets, or would if it were the next: unlike all names so far."""
        kind, path = _operator(node), owner(node)
        own = path and not any(other.startswith(f"{path}.") for other in self._owners)
        own = own and (path not in self._weighted or node.target in self._weighted_anchors)
        name = path if own else f"{path}.{kind}" if path else kind
        unique, count = name, 1
        while unique in self._names:
            count += 1
            unique = f"{name}_{count}"
        return unique


def _computes(pattern: Pattern) -> bool:
    return not pattern.in_float


def _gives(pattern: Pattern) -> bool:
    return pattern.quantizes_output


def _operator(node: Node) -> str:
    return str(node.target).removeprefix("aten.").partition(".")[0]


def _operands(node: Node, pattern: Pattern) -> list[Node]:
    """What an operator reads in integers."""
    found: list[Node] = []
    for index in pattern.operands:
        value = node.args[index]
        found.extend(v for v in (value if isinstance(value, list | tuple) else [value]) if isinstance(v, Node))
    return found


def _is_constant(value: Any) -> bool:
    return isinstance(value, Node) and value.op == "get_attr"


def _is_compute(node: Node) -> bool:
    """Whether the operator makes floating point numbers of others' (bookkeeping and constants stay out of the plan)."""
    reads = any(True for source in node.all_input_nodes for _ in tensors(source.meta.get("val")))
    makes = any(value.is_floating_point() for value in tensors(node.meta.get("val")))
    return reads and makes and node.target not in _SILENT
