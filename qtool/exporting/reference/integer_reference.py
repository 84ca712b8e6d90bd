"""The integer reference: a QDQ file evaluated with the runtime's own arithmetic.

A float simulation of a quantised network differs from the runtime by a step here and there, and over fifty layers the
steps grow. This evaluator does what the runtime does instead (``integer_graph`` says which nodes are one integer
operator, ``integer_kernels`` what each computes), so its outputs equal those of ONNX Runtime's CPU provider on an x86
CPU with AVX512-VNNI bit for bit, for every operator listed in ``covered``.

Between units tensors stay integers. What stored integers alone are multiplied by is rounded in blocks. Operators that
are not fused run in float32: the exact ones of ``float_operators`` are covered too; anything else is listed in
``uncovered``, and its last bits may differ from the runtime's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import torch
from torch import Tensor

from qtool.errors import QtoolError
from qtool.exporting.block_products import rounded_in_blocks
from qtool.exporting.drawn import RANDOM
from qtool.exporting.reference.float_operators import APPROXIMATE, EXACT, evaluate, moves_only
from qtool.exporting.reference.integer_arithmetic import Affine, Quantized, dequantize, quantize
from qtool.exporting.reference.integer_graph import (
    DEQUANTIZE,
    MOVES,
    PROPAGATED,
    QUANTIZE,
    Graph,
    Node,
    Planner,
    Unit,
    clip_limits,
)
from qtool.exporting.reference.integer_kernels import KERNELS
from qtool.form import BLOCK
from qtool.graphs.lstm import OPERATOR, Seen, layer

Value = Tensor | Quantized
CONTROL_FLOW = frozenset({"If", "Loop", "Scan"})
COVERED = frozenset({QUANTIZE, DEQUANTIZE, "Clip", *MOVES, *EXACT})


class IntegerReference:
    """A QDQ ONNX model as a function of numpy arrays, in the runtime's integer arithmetic.

    ``covered`` counts the operators whose results are the runtime's bit for bit; ``uncovered`` lists the others as
    ``{"node", "op", "done"}``; ``units`` are the steps, in order. Where it is ``barred`` by operators (with graphs of
    their own, or random) the file cannot be run here.
    """

    def __init__(self, model: onnx.ModelProto | str | Path) -> None:
        """Read and plan ``model``. Raises :class:`QtoolError` for quantisers whose meaning is not constant."""
        proto = model if isinstance(model, onnx.ModelProto) else onnx.load(str(model))
        self.graph = Graph(proto)
        for node in self.graph.nodes:
            if node.op in (QUANTIZE, DEQUANTIZE) and (node.domain or self.graph.affine(node) is None):
                raise _unknown(node)
        self.barred = sorted({node.op for node in self.graph.nodes} & (CONTROL_FLOW | RANDOM))
        units = Planner(self.graph).plan()
        self.affines = {n.name: self.graph.affine(n) for n in self.graph.nodes if n.op in (QUANTIZE, DEQUANTIZE)}
        self.constants: dict[str, Value] = {n: _tensor(a) for n, a in self.graph.constants.items()}
        weights = [u for u in units if u.node.op == DEQUANTIZE and u.node.inputs[0] in self.constants]
        for unit in weights:
            self.constants.update(self._step(unit, self.constants))
        self.units = [unit for unit in units if unit not in weights]
        products = (unit.node for unit in self.units if not unit.fused)
        self.blocks = {node.name: block for node in products if (block := self._block(node)) is not None}
        self.covered = Counter(unit.node.op for unit in self.units if is_covered(unit))
        self.uncovered = [_told(unit.node) for unit in self.units if not is_covered(unit)]

    def run(self, feeds: Mapping[str, npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
        """The model's outputs for ``feeds`` (input name to array), in the model's order."""
        values = self.trace(feeds, keep=self.graph.outputs)
        return [real(values[name]).cpu().numpy() for name in self.graph.outputs]

    def trace(self, feeds: Mapping[str, npt.NDArray[Any]], keep: list[str] | None = None) -> dict[str, Value]:
        """Every tensor by name, or only those named in ``keep``: integers where the runtime holds integers."""
        if set(feeds) != set(self.graph.inputs):
            raise QtoolError(
                "integer reference", f"inputs {sorted(self.graph.inputs)}", f"{sorted(feeds)}", "feed these by name"
            )
        values: dict[str, Value] = {**self.constants, **{name: _tensor(array) for name, array in feeds.items()}}
        last = {name: i for i, unit in enumerate(self.units) for name in unit.node.inputs}
        with torch.inference_mode():
            for i, unit in enumerate(self.units):
                values.update(self._step(unit, values))
                for name in set(unit.node.inputs) if keep is not None else ():
                    if last[name] == i and name not in (keep or ()) and name not in self.constants:
                        values.pop(name, None)
        return values

    def _step(self, unit: Unit, values: Mapping[str, Value]) -> dict[str, Value]:
        node = unit.node
        inputs = [values[name] if name else None for name in node.inputs]
        if unit.fused:
            return {unit.output: _fused(node, inputs, unit.affine)}
        first = inputs[0] if inputs else None
        if node.op == DEQUANTIZE and isinstance(first, Tensor):
            return {unit.output: Quantized(first, self._affine(node))}
        if node.op == QUANTIZE and first is not None:
            return {unit.output: _quantized(first, self._affine(node))}
        if node.op in PROPAGATED and isinstance(first, Quantized) and first.affine.axis is None:
            moved, *places = self._in_float(node, [first.values, *(None if y is None else real(y) for y in inputs[1:])])
            return dict(zip(node.outputs, (first.with_values(moved), *places), strict=True))
        plain = [None if x is None else real(x) for x in inputs]
        if node.name in self.blocks and plain[0] is not None:
            plain[0] = rounded_in_blocks(plain[0], self.blocks[node.name])
        return dict(zip(node.outputs, self._in_float(node, plain), strict=False))

    def _block(self, node: Node) -> int | None:
        """How many inputs the runtime rounds together to multiply them by a matrix of stored integers, if it does."""
        if node.op not in ("Gemm", "MatMul") or node.attributes.get("transA") or node.attributes.get("transB"):
            return None
        if node.inputs[1] in self.graph.blocks:
            return self.graph.blocks[node.inputs[1]]
        source = self.graph.producers.get(node.inputs[1])
        if source is None or source.op != DEQUANTIZE or self._affine(source).axis != 1:
            return None
        turned = self.graph.producers.get(source.inputs[0])
        stored = turned.inputs[0] if turned is not None and turned.op == "Transpose" else source.inputs[0]
        return BLOCK if stored in self.graph.constants else None

    def _affine(self, node: Node) -> Affine:
        affine = self.affines[node.name]
        assert affine is not None
        return affine

    def _in_float(self, node: Node, inputs: list[Tensor | None]) -> list[Tensor]:
        if node.op == OPERATOR:
            return list(dynamic_lstm(inputs))
        limits = clip_limits(self.graph, node) if node.op == "Clip" else None
        if limits is not None and inputs[0] is not None and inputs[0].is_floating_point():
            return [inputs[0].clamp(*limits)]
        return evaluate(
            node.op, node.attributes, inputs, outputs=len(node.outputs), opsets={"": 21, **self.graph.opsets}
        )


def is_covered(unit: Unit) -> bool:
    """Whether this unit's result is the runtime's bit for bit."""
    node = unit.node
    return (
        unit.fused
        or node.op == OPERATOR
        or (not node.domain and (node.op in COVERED or moves_only(node.op, node.attributes)))
    )


def dynamic_lstm(inputs: list[Tensor | None], seen: Seen | None = None) -> tuple[Tensor, ...]:
    """A DynamicQuantizeLSTM of weights without zero points, as qtool writes it."""
    given = dict(zip(_LSTM_INPUTS, inputs, strict=True))
    x, weight, scales, hidden, hidden_scales, biases, h, c = (
        found for name in ("X", "W", "W_scale", "R", "R_scale", "B", "h", "c") if (found := given[name]) is not None
    )
    return layer(x, (weight, scales, hidden, hidden_scales, biases), h, c, seen)


_LSTM_INPUTS = ("X", "W", "R", "B", "lengths", "h", "c", "P", "W_scale", "W_zero_point", "R_scale", "R_zero_point")


def _fused(node: Node, inputs: list[Value | None], affine: Affine | None) -> Tensor:
    whole = [Quantized(x, Affine.of(1.0, 0, x.dtype)) if isinstance(x, Tensor) else x for x in inputs]
    result = KERNELS[node.op](whole, node.attributes, affine)
    return result.values if isinstance(result, Quantized) else result


def _quantized(x: Value, affine: Affine) -> Tensor:
    if isinstance(x, Quantized) and x.affine.same_as(affine):
        return x.values
    return quantize(real(x), affine).values


def real(value: Value) -> Tensor:
    """A tensor's numbers, dequantized where it holds integers."""
    return dequantize(value) if isinstance(value, Quantized) else value


def _tensor(array: npt.NDArray[Any]) -> Tensor:
    return torch.from_numpy(np.array(array, copy=True))


def _told(node: Node) -> dict[str, str]:
    by = "PyTorch" if node.op in APPROXIMATE else "ONNX's reference operator"
    return {"node": node.name, "op": node.op, "done": f"evaluated in float32 by {by}"}


def _unknown(node: Node) -> QtoolError:
    return QtoolError(
        f"node '{node.name}'",
        f"an ONNX {node.op} with constant, unblocked scales",
        f"one of domain '{node.domain or 'ai.onnx'}' with inputs {node.inputs}",
        "export with constant scales",
    )
