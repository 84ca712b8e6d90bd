"""torch's ONNX exporter, without the work that it does for nothing.

``torch.onnx.export`` spends three quarters of its time on a network of plain operators beside the translation:

- it registers some five hundred operators anew in each call, and reads the Python source of each for a name that it
  does not use;
- the rewriter behind it asks each of its rules at each node, and a rule of several outputs sorts the whole graph by
  operator before it looks whether the node in question is one of its own;
- to insert the casts of mixed types it runs the graph once more with fake tensors.

For the length of a block (:func:`quicker`) the registry is kept between calls, a rule is not asked about an operator
that its pattern does not begin with, and the search for casts is left out where nothing is mixed. What comes out is the
same, node for node, and a test holds it. A torch or onnxscript that has these things elsewhere is left as it is.

The exporter's optimizer also makes one of two nodes that compute the same, so that two units whose numbers happen to be
equal (the two heads of a model with fresh weights, two layers that begin as zeros) would lose one of their quantizers,
or one of the layers. :func:`distinct_units` keeps both. And it takes 1e-8 for zero, so that a norm would lose an
epsilon of that size (Helium's) and a row of zeros become NaN. :func:`exact_constants` lets it leave out what adds
nothing at all.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import onnx_ir as ir
import torch
from onnx_ir.passes.common import CommonSubexpressionEliminationPass
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from qtool.exporting.passes.names import QUANTIZE, WEIGHTED

MARK = "unit_number"  # an attribute that tells units apart while equal nodes are sought


@contextlib.contextmanager
def quicker() -> Iterator[None]:
    """Lets ``torch.onnx.export`` be quicker in this block."""
    with contextlib.ExitStack() as undo:
        for patch in (_keep_registry, _ask_fewer_rules, _cast_mixed_only):
            with contextlib.suppress(ImportError, AttributeError):
                patch(undo)
        yield


@contextlib.contextmanager
def distinct_units() -> Iterator[None]:
    """Keeps each quantizer and layer in this block, though another gives the same: the gates know a unit by its own."""
    eliminate: Callable[..., Any] = CommonSubexpressionEliminationPass.call

    @functools.wraps(eliminate)
    def kept(self: Any, model: ir.Model) -> Any:
        units = [node for node in model.graph if node.op_type in (QUANTIZE, *WEIGHTED)]
        for number, node in enumerate(units):
            node.attributes[MARK] = ir.AttrInt64(MARK, number)
        try:
            return eliminate(self, model)
        finally:
            for node in units:
                del node.attributes[MARK]

    with contextlib.ExitStack() as undo:
        _replace(undo, CommonSubexpressionEliminationPass, "call", kept)
        yield


@contextlib.contextmanager
def exact_constants() -> Iterator[None]:
    """Lets the rewriter's rules (``x + 0`` is ``x``) hold for their own constant alone in this block, not near it."""
    from onnxscript.rewriter._matcher import SimplePatternMatcher
    from onnxscript.rewriter._pattern_ir import Constant

    match: Callable[..., bool] = SimplePatternMatcher._match_constant

    @functools.wraps(match)
    def exactly(self: Any, wanted: Constant, value: ir.Value) -> bool:
        return match(self, Constant(wanted.value, rel_tol=0.0, abs_tol=0.0), value)

    with contextlib.ExitStack() as undo:
        _replace(undo, SimplePatternMatcher, "_match_constant", exactly)
        yield


def _replace(undo: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    undo.callback(setattr, owner, name, vars(owner)[name])
    setattr(owner, name, value)


_REGISTRIES: dict[int, Any] = {}


def _keep_registry(undo: contextlib.ExitStack) -> None:
    from onnxscript._internal.values import TracedOnnxFunction
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    build = vars(ONNXRegistry)["from_torchlib"].__func__
    named = property(lambda self: SimpleNamespace(domain=self.opset.domain, name=self.name))

    def kept(cls: Any, opset_version: int = 18) -> Any:
        if opset_version not in _REGISTRIES:
            with contextlib.ExitStack() as block:
                _replace(block, TracedOnnxFunction, "function_ir", named)
                _REGISTRIES[opset_version] = build(cls, opset_version=opset_version)
        own = copy.copy(_REGISTRIES[opset_version])  # for this call, which adds the forms of its own graph
        own.functions = {target: list(forms) for target, forms in own.functions.items()}
        return own

    _replace(undo, ONNXRegistry, "from_torchlib", classmethod(kept))


def _ask_fewer_rules(undo: contextlib.ExitStack) -> None:
    from onnxscript.rewriter._basics import MatchResult
    from onnxscript.rewriter._matcher import SimplePatternMatcher

    match: Callable[..., Any] = SimplePatternMatcher.match

    @functools.wraps(match)
    def asked(self: Any, model: Any, graph: Any, node: Any, **options: Any) -> Any:
        wanted = self.pattern.output_nodes[0].op_identifier()
        if wanted is None or wanted[:2] == (node.domain, node.op_type) or options.get("tracer") is not None:
            return match(self, model, graph, node, **options)
        found = MatchResult()
        found.fail("another operator")
        return found

    _replace(undo, SimplePatternMatcher, "match", asked)


def _cast_mixed_only(undo: contextlib.ExitStack) -> None:
    from torch.onnx._internal.exporter import _fx_passes
    from torch.onnx._internal.fx.passes import type_promotion as promotion

    insert, table = _fx_passes.insert_type_promotion_nodes, promotion.TypePromotionTable()

    def inserted(graph: GraphModule) -> None:
        nodes = [n for m in graph.modules() if isinstance(m, GraphModule) for n in m.graph.nodes]
        calls = [n for n in nodes if n.op == "call_function"]
        if not any((rule := promotion.get_type_promotion_rule(n, table)) and _casts(n, rule) for n in calls):
            return
        for node in calls:
            if node.target is torch.ops.aten.view.default:  # run once more, what it reads may lie in memory otherwise
                node.target = torch.ops.aten.reshape.default
        insert(graph)

    _replace(undo, _fx_passes, "insert_type_promotion_nodes", inserted)


def _casts(node: Node, rule: Any) -> bool:
    """Whether a rule of torch's gives one of a node's arguments another type than it has."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda read: read.meta.get("val"))
    wanted = rule.preview_type_promotion(args, kwargs)
    pairs = [(args[index], dtype) for index, dtype in wanted.args_dtypes.items()]
    pairs += [(kwargs[name], dtype) for name, dtype in wanted.kwargs_dtypes.items()]
    leaves = ((leaf, dtype) for value, dtype in pairs for leaf in pytree.tree_leaves(value))
    return any(dtype is not None and _type_of(leaf) != dtype for leaf, dtype in leaves)


def _type_of(value: Any) -> torch.dtype | None:
    return value.dtype if isinstance(value, torch.Tensor) else _OF_NUMBERS.get(type(value))


_OF_NUMBERS = {bool: torch.bool, int: torch.int64, torch.SymInt: torch.int64, float: torch.float32}
