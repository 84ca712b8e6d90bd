"""The default engine: torchao's pt2e, told by qtool's placement where to quantize.

``prepare`` writes each placed unit as pt2e annotations (inputs and weight on the anchor, the output on
the unit's last node, moves sharing their input's quantizer) and lets torchao insert the observers or,
for QAT, fake-quantizers. ``convert`` turns them into quantize and dequantize nodes. Batch-norm while training
is qtool's own (``norms.py``): torchao's knows convolutions with affine batch-norm only, divides by γ even where
that is 0, and finds them by tracing some hundred patterns, which takes half a minute.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from qtool.errors import QtoolError
from qtool.graphs.operators import output_axis
from qtool.quantization.calibration.observers import (
    FAKE_QUANTIZERS,
    FakeQuantizer,
    PerChannelFakeQuantizer,
    PerChannelWeightObserver,
    RangeObserver,
    named,
)
from qtool.quantization.placement import Placed, Placement
from qtool.quantization.quantizers.pair_sums import PAIRED
from qtool.quantization.rewrites.norms import ANCHORS, make_live, settle_live, weight_edge
from qtool.quantization.stored_weights import integers_of, store_integers
from qtool.quantization.torchao_api import (
    QuantizationAnnotation,
    QuantizationSpec,
    Quantizer,
    SharedQuantizationSpec,
    convert_pt2e,
    modules_forgotten,
)
from qtool.quantization.torchao_api import prepare as insert_observers

ANNOTATION = "quantization_annotation"


class PlacementQuantizer(Quantizer):  # type: ignore[misc]
    """Hands a placement to pt2e as annotations."""

    def __init__(self, placement: Placement, *, train: bool, detailed: bool, weight_ranges: str = "minmax") -> None:
        self.placement = placement
        self.train = train
        self.detailed = detailed
        self.weight_ranges = weight_ranges

    def annotate(self, model: GraphModule) -> GraphModule:
        """Writes an annotation on every node of every integer unit."""
        for placed in self.placement.placed:
            if placed.pattern is not None:
                self._annotate(placed)
        return model

    def validate(self, model: GraphModule) -> None:
        """The placement only offers what the target supports; there is nothing left to refuse."""

    def _annotate(self, placed: Placed) -> None:
        pattern = placed.pattern
        assert pattern is not None
        inputs: dict[Node, Any] = {node: self._activation_spec(node) for node in placed.operands}
        if pattern.weighted:
            weight, reader = weight_edge(placed.anchor)
            spec = self._weight_spec(placed)
            if reader is placed.anchor:
                inputs[weight] = spec
            else:
                reader.meta[ANNOTATION] = QuantizationAnnotation(input_qspec_map={weight: spec}, _annotated=True)
        output: Any = None
        if placed.quantized_output:
            shared = SharedQuantizationSpec((placed.operands[0], placed.anchor)) if pattern.shares else None
            output = shared or self._activation_spec(placed.output)
        for node in placed.nodes:
            node.meta["unit"] = placed.unit.name
            node.meta[ANNOTATION] = QuantizationAnnotation(
                input_qspec_map=inputs if node is placed.anchor else {},
                output_qspec=output if node is placed.output else None,
                _annotated=True,
            )

    def _activation_spec(self, node: Node) -> QuantizationSpec:
        form = self.placement.activation_format(node)
        observer = FakeQuantizer if self.train else RangeObserver.with_args(detailed=self.detailed)
        scheme = torch.per_tensor_symmetric if form.symmetric else torch.per_tensor_affine
        return QuantizationSpec(form.dtype, observer, form.qmin, form.qmax, scheme)

    def _weight_spec(self, placed: Placed) -> QuantizationSpec:
        form, axis = self.placement.weight_format(placed), output_axis(placed.anchor)
        paired = placed.anchor.meta.get(PAIRED)
        if self.train:
            observer: Any = PerChannelFakeQuantizer.with_args(paired=paired)
        else:
            observer = PerChannelWeightObserver.with_args(method=self.weight_ranges, paired=paired)
        return QuantizationSpec(form.dtype, observer, form.qmin, form.qmax, torch.per_channel_symmetric, axis)


def prepare(
    graph: GraphModule, placement: Placement, *, train: bool = False, detailed: bool = False,
    weight_ranges: str = "minmax",
) -> GraphModule:  # fmt: skip
    """Inserts observers (or fake-quantizers with ``train``) where the placement says; ``graph`` is consumed.

    Raises QtoolError where no operator of the graph is to be integer.
    """
    if not any(placed.pattern for placed in placement.placed):
        reasons = (
            "; ".join(dict.fromkeys(unit.reason for unit in placement.plan().float_units)) or "it has no operators"
        )
        raise QtoolError(
            "quantize", f"a model with operators that '{placement.target.name}' runs in integers", f"none: {reasons}",
            "choose another model, target or overrides",
        )  # fmt: skip
    quantizer = PlacementQuantizer(placement, train=train, detailed=detailed, weight_ranges=weight_ranges)
    if train:
        make_live(graph, [placed.nodes for placed in placement.placed if placed.pattern is not None])
    with modules_forgotten():
        prepared = insert_observers(quantizer.annotate(graph), {}, is_qat=train)  # prepare_pt2e would fold batch-norm
    assert isinstance(prepared, GraphModule)
    return prepared


def convert(prepared: GraphModule) -> GraphModule:
    """Turns observers into quantize and dequantize nodes and folds the weights to integers.

    Batch-norm that trained is folded first; torchao would look for it by tracing a hundred patterns. Integers whose
    pairs have to fit do, also of a weight that was trained on after its range was frozen.
    """
    settle_live(prepared)
    with modules_forgotten():
        converted = convert_pt2e(prepared, fold_quantize=True)
    assert isinstance(converted, GraphModule)
    for layer in converted.graph.nodes:
        if PAIRED in layer.meta and layer.target in ANCHORS:
            store_integers(converted, layer, integers_of(converted, layer))
    return converted


def observers(prepared: GraphModule, placement: Placement) -> dict[str, Any]:
    """The activation observers or fake-quantizers of a prepared graph by the tensor they watch.

    The name is the placement's for that tensor, and from here on the observer's own in errors. A shared observer is
    listed once, under the first tensor.
    """
    modules = dict(prepared.named_modules(remove_duplicate=False))
    found: dict[int, tuple[str, Any]] = {}
    for node in prepared.graph.nodes:
        module = modules.get(str(node.target)) if node.op == "call_module" else None
        if isinstance(module, RangeObserver | FakeQuantizer) and id(module) not in found:
            found[id(module)] = (placement.name_of(node.args[0]), module)
    return named(dict(found.values()))


def fake_quantizers(prepared: GraphModule) -> list[Any]:
    """Every fake-quantizer of a graph prepared for QAT, weights' included."""
    return [module for module in prepared.modules() if isinstance(module, FAKE_QUANTIZERS)]
