"""Norms in ONNX: group norms as what a runtime has kernels for, batch-norms without tracing the graph anew.

ONNX Runtime's CPU provider has no kernel for ``GroupNormalization``: it writes the operator out as eighteen, shapes and
casts among them. It has kernels for ``InstanceNormalization`` and ``BatchNormalization``, of which two give

    y = (x − mean) / sqrt(variance + ε) · w + b

over groups in less than half the time. The second has mean 0 and variance 1, and is left out where there is neither
``w`` nor ``b``.

A batch-norm that stands behind no layer to be folded into is one operator in ONNX, but torch's exporter knows only what
it decomposes to, and decomposes the whole graph for it: most of the export of a DenseNet's float file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnxscript import opset18 as op  # the least that any target asks for
from torch.fx import Graph, Node

aten = torch.ops.aten


def translations(graph: Graph) -> dict[Any, Callable[..., Any]]:
    """The forms in ONNX of a graph's norms, as far as they have one here."""
    norms = [node for node in graph.nodes if node.target is aten.batch_norm.default]
    known = {aten.batch_norm.default: batch_norm} if all(map(_is_evaluated, norms)) else {}
    return {aten.group_norm.default: group_norm} | known


def group_norm(
    source: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, cudnn_enabled: bool = True
) -> Any:  # fmt: skip
    """The ONNX form of ``aten::group_norm`` in float32, of batch × channels × any sizes."""
    grouped = op.Reshape(source, op.Constant(value_ints=[0, num_groups, -1]))
    normed = op.InstanceNormalization(grouped, *_constants(num_groups, 1, 0), epsilon=eps)
    whole = op.Reshape(normed, _sizes(source))
    if weight is None and bias is None:
        return whole
    channels = source.shape[1]
    return op.BatchNormalization(whole, *_affine(channels, weight, bias), *_constants(channels, 0, 1), epsilon=0.0)


def batch_norm(
    source: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, training: bool = False,
    momentum: float = 0.1, eps: float = 1e-5, cudnn_enabled: bool = True,
) -> Any:  # fmt: skip
    """The ONNX form of ``aten::batch_norm`` in evaluation, float32, of batch × channels and any sizes."""
    affine = _affine(source.shape[1], weight, bias)
    return op.BatchNormalization(source, *affine, running_mean, running_var, epsilon=eps)


def _is_evaluated(norm: Node) -> bool:
    """Whether a batch-norm takes mean and variance from what it has stored."""
    return norm.args[3] is not None and norm.args[4] is not None and norm.args[5] is False


def _affine(channels: int, weight: Any, bias: Any) -> tuple[Any, Any]:
    ones, zeros = _constants(channels, 1, 0)
    return ones if weight is None else weight, zeros if bias is None else bias


def _constants(length: int, *numbers: float) -> list[Any]:
    """A vector of each number."""
    return [op.Constant(value=ir.tensor(np.full(length, number, np.float32))) for number in numbers]


def _sizes(source: Any) -> Any:
    """The sizes of a value, of which the first need not be known and one more may not be."""
    sizes = [0, *(size if isinstance(size, int) else -1 for size in list(source.shape)[1:])]
    return op.Constant(value_ints=sizes) if sizes.count(-1) < 2 else op.Shape(source)
