"""Linear layers of a quantized graph as integer matrix products, for a GPU without TensorRT.

In the quantized form a linear layer reads integers through a dequantize:

    y = (s_x (q_x − z_x)) (s_w q_w)ᵀ + b,

computed in float. With integer accumulation the same is

    y = s_x s_w (q_x q_wᵀ − z_x Σ_k q_w) + b,

where Σ q_w is known beforehand and q_x q_wᵀ is ``torch._int_mm``: int8 × int8 → int32, on tensor cores.
Activations stored as uint8 are shifted by 128 to be int8, and the zero point with them. The products
are exact, so the two differ only by float rounding.

Convolutions stay as they are: PyTorch has no integer convolution for CUDA, and they are reported as
float. ``_int_mm`` on CUDA wants more than 16 rows and sizes that are multiples of 8: few rows are
padded, other sizes left in float.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

_LEAST_ROWS = 17
_MULTIPLE = 8


def use_integer_products(graph: GraphModule) -> int:
    """Rewrites ``graph`` in place; gives the number of linear layers that are integer products now."""
    linears = [n for n in graph.graph.nodes if n.target is torch.ops.aten.linear.default]
    replaced = sum(_replace(graph, node) for node in linears)
    if replaced:
        graph.graph.eliminate_dead_code()
        graph.recompile()
    return replaced


def _replace(graph: GraphModule, node: Node) -> bool:
    found = _operands(graph, node)
    if found is None:
        return False
    activation, scale, zero_point, weight, weight_scale = found
    index = sum(name.startswith("integer_product") for name, _ in graph.named_children())
    name = f"integer_product_{index}"
    graph.add_submodule(name, IntegerProduct(weight, weight_scale, scale, zero_point))
    with graph.graph.inserting_before(node):
        bias = node.args[2] if len(node.args) > 2 else None
        product = graph.graph.call_module(name, (activation, bias) if bias is not None else (activation,))
    node.replace_all_uses_with(product)
    graph.graph.erase_node(node)
    return True


def _operands(graph: GraphModule, node: Node) -> tuple[Node, float, int, torch.Tensor, torch.Tensor] | None:
    """The integers that a linear layer reads, or None where it is not one that can be replaced."""
    names = torch.ops.quantized_decomposed
    x, w = node.args[0], node.args[1]
    if not (isinstance(x, Node) and x.target is names.dequantize_per_tensor.default):
        return None
    if not (isinstance(w, Node) and w.target is names.dequantize_per_channel.default):
        return None
    weight, scale, zero_point = (_constant(graph, argument) for argument in w.args[:3])
    if weight is None or scale is None or weight.dtype != torch.int8 or w.args[3] != 0:
        return None
    if (zero_point is not None and zero_point.any()) or any(size % _MULTIPLE for size in weight.shape):
        return None
    if not (isinstance(x.args[0], Node) and x.args[5] in (torch.int8, torch.uint8)):
        return None
    return x.args[0], float(x.args[1]), int(x.args[2]), weight, scale  # type: ignore[arg-type]


def _constant(graph: GraphModule, node: Any) -> torch.Tensor | None:
    """The tensor of a get_attr node."""
    if not (isinstance(node, Node) and node.op == "get_attr"):
        return None
    value = operator.attrgetter(str(node.target))(graph)
    return value if isinstance(value, torch.Tensor) else None


class IntegerProduct(torch.nn.Module):
    """``y = s_x s_w (q_x q_wᵀ − z_x Σ q_w) + b`` for int8 or uint8 activations of any rank, int8 weights O×I."""

    weight: torch.Tensor
    factor: torch.Tensor
    weight_sums: torch.Tensor

    def __init__(self, weight: torch.Tensor, weight_scale: torch.Tensor, scale: float, zero_point: int) -> None:
        super().__init__()
        self.zero_point, self.result = zero_point, torch.float32
        self.register_buffer("weight", weight.detach().clone())
        self.register_buffer("factor", weight_scale.detach().float() * scale)
        self.register_buffer("weight_sums", weight.detach().sum(1, dtype=torch.int32))

    def forward(self, q: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Integers … × I in, … × O out: float32, unless ``result`` is another type."""
        shift = 128 if q.dtype == torch.uint8 else 0
        signed = (q.int() - shift).to(torch.int8) if shift else q
        rows = signed.reshape(-1, signed.shape[-1])
        missing = max(0, _LEAST_ROWS - rows.shape[0])
        padded = torch.nn.functional.pad(rows, (0, 0, 0, missing)) if missing else rows
        product = torch._int_mm(padded, self.weight.t())[: rows.shape[0]]
        exact = product - (self.zero_point - shift) * self.weight_sums
        result = exact.float() * self.factor
        result = result if bias is None else result + bias
        stored = result.to(self.result)
        # inductor stores what is read by strides: once, behind the product, and not as int32 for each of its readers
        stored = stored.as_strided(stored.shape, stored.stride())
        return stored.reshape(*q.shape[:-1], -1)
