"""The observers of the engine ``torch.ao``: in the shape it expects, and those that the placement asks for.

torch.ao puts an observer wherever a ``BackendConfig`` could want one. Which of them stay, and what they are called, is
decided here by the placement; what only moves values shares the observer of the values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.ao.quantization import ObserverBase, QConfig
from torch.fx import GraphModule, Node
from torch.nn import functional as F

from qtool.quantization.calibration import observers as own
from qtool.quantization.calibration.observers import FakeQuantizer, RangeObserver, named
from qtool.quantization.engines.align import quantized_values
from qtool.quantization.placement import Placed, Placement
from qtool.quantization.targets import Format, Target

TRANSPARENT = (nn.Identity, nn.Dropout, nn.Dropout2d, F.dropout, F.dropout2d)
STORAGE = {torch.uint8: torch.quint8, torch.int8: torch.qint8}


class Carrier(ObserverBase):
    """One of qtool's observers or fake-quantizers in the shape that torch.ao expects."""

    def __init__(self, inner: Any) -> None:
        super().__init__(dtype=STORAGE[inner.dtype])
        self.inner = inner
        self.quant_min, self.quant_max, self.qscheme = inner.quant_min, inner.quant_max, inner.qscheme
        self.ch_axis = getattr(inner, "ch_axis", -1)

    def forward(self, x: Tensor) -> Tensor:
        """What the inner observer makes of ``x``."""
        return self.inner(x)  # type: ignore[no-any-return]

    def calculate_qparams(self, **_: Any) -> tuple[Tensor, Tensor]:
        """The inner observer's scale and zero point."""
        return self.inner.calculate_qparams()  # type: ignore[no-any-return]


def qconfig(target: Target, *, train: bool, detailed: bool = False, weight_ranges: str = "minmax") -> Any:
    """torch.ao's pair of constructors, for the target's formats of activations and weights."""

    def activation(**_: Any) -> Carrier:
        scheme = torch.per_tensor_symmetric if target.activation.symmetric else torch.per_tensor_affine
        make: Any = FakeQuantizer if train else RangeObserver
        return Carrier(make(*_limits(target.activation), scheme, detailed=detailed))

    def weight(**_: Any) -> Carrier:
        make: Any = own.PerChannelFakeQuantizer if train else own.PerChannelWeightObserver
        return Carrier(make(*_limits(target.weight), torch.per_channel_symmetric, 0, method=weight_ranges))

    return QConfig(activation=activation, weight=weight)  # type: ignore[no-untyped-call]


def _limits(form: Format) -> tuple[torch.dtype, int, int]:
    return form.dtype, form.qmin, form.qmax


def keep_wanted(graph: GraphModule, placement: Placement, units: Mapping[str, Placed]) -> dict[str, Any]:
    """Takes out the observers that the placement does not ask for; returns those that stay, by name."""
    modules = dict(graph.named_modules(remove_duplicate=False))
    carriers = {
        n: modules[str(n.target)]
        for n in graph.graph.nodes
        if n.op == "call_module" and isinstance(modules[str(n.target)], Carrier)
    }
    last = {id(units[n.name]): n for n in graph.graph.nodes if n.name in units}
    naming = _Naming(placement, units, last, carriers, modules)
    kept: dict[str, Carrier] = {}
    for node, carrier in carriers.items():
        name = naming.of(node)
        if name is None:
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
        elif isinstance(carrier.inner, RangeObserver | FakeQuantizer) and carrier not in kept.values():
            kept[name] = carrier
    graph.delete_all_unused_submodules()
    graph.recompile()
    _share(placement, kept)
    return named({name: carrier.inner for name, carrier in kept.items()})


def _share(placement: Placement, kept: dict[str, Carrier]) -> None:
    """Gives what only moves values the observer of the values, and takes its own out of ``kept``."""
    for placed in placement.placed:
        if placed.pattern is not None and placed.pattern.shares:
            source, moved = map(placement.name_of, (placed.operands[0], placed.output))
            if {source, moved} <= kept.keys() and isinstance(kept[source].inner, RangeObserver):
                kept.pop(moved).inner = kept[source].inner


@dataclass
class _Naming:
    """Which tensor an observer watches, by the name that the default engine would give it."""

    placement: Placement
    units: Mapping[str, Placed]
    last: Mapping[int, Node]
    carriers: Mapping[Node, Any]
    modules: Mapping[str, nn.Module]

    def __post_init__(self) -> None:
        self.wanted = quantized_values(self.placement)
        self.inputs = [n for n in self.placement.graph_module.graph.nodes if n.op == "placeholder"]

    def of(self, carrier: Node) -> str | None:
        """The name of what ``carrier`` watches; None where nothing is to be quantized."""
        source = self._source(carrier.args[0])
        if source.op == "get_attr":
            return str(source.target) if self._reader(carrier) else None
        if source.op == "placeholder":
            value = self.inputs[[n for n in source.graph.nodes if n.op == "placeholder"].index(source)]
            return value.name if value in self.wanted else None
        placed = self.units.get(source.name)
        if placed is None:  # an operator that is quantized nowhere; it may still feed one that is
            reader = self._reader(carrier)
            return self.placement.name_of(reader.operands[0]) if reader else None
        if self.last[id(placed)] is not source or placed.output not in self.wanted:
            return None
        return placed.unit.name

    def _source(self, value: Any) -> Node:
        while value in self.carriers or self._is_transparent(value):
            value = value.args[0]
        assert isinstance(value, Node)
        return value

    def _is_transparent(self, node: Node) -> bool:
        written = type(self.modules[str(node.target)]) if node.op == "call_module" else node.target
        return node.op.startswith("call") and node.name not in self.units and written in TRANSPARENT

    def _reader(self, carrier: Node) -> Placed | None:
        placed = (self.units.get(user.name) for user in carrier.users)
        return next((p for p in placed if p is not None and p.pattern is not None), None)
