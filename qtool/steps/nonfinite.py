"""Where the first NaN or infinity comes from.

When a loss is not finite, the forward pass is run once more with a watch on every layer, and the first
one whose output holds a NaN or an infinity is named. A parameter that is already damaged is named before
that, since it is the cause and its layer's output only the symptom; a running statistic is not, since the
forward pass that went wrong has spoiled it too. In a captured graph the watch is on
every node, named by the module it came from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from qtool.masks import is_finite, masks
from qtool.nested import tensors
from qtool.system import processes

INPUTS = "the inputs of the model"
BETWEEN = "what the model does between its layers"
QUANTIZES = "what quantizes "
LOSS = "the loss, of outputs that are finite"


class _Found(Exception):
    """Ends the second forward pass at the layer that it names: whatever torch adds to the text on its way."""

    def __init__(self, where: str) -> None:
        super().__init__(where)
        self.where = where


def first_bad_parameter(model: nn.Module, *, buffers: bool = False) -> str | None:
    """The name of the first parameter (or buffer, if asked for) that holds a NaN or an infinity, or None."""
    return next((name for name in processes.gather(_bad_value(model, buffers)) if name is not None), None)


def _bad_value(model: nn.Module, buffers: bool) -> str | None:
    hiding = masks(model)
    values = dict(model.named_parameters()) | (dict(model.named_buffers()) if buffers else {})
    bad = (name for name, value in values.items() if not is_finite(processes.local(value), mask=name in hiding))
    return next(bad, None)


def told(model: nn.Module, name: str) -> str:
    """A parameter or buffer by its name, and one that a quantizer in a captured graph learns by the layer's."""
    nodes = model.graph.nodes if isinstance(model, fx.GraphModule) else ()
    called = (n for n in nodes if n.op == "call_module" and name.startswith(f"{n.target}."))
    found = next((n for n in called if hasattr(model.get_submodule(n.target), "calculate_qparams")), None)
    return f"'{name}'" if found is None else f"the quantization steps of {_told(found).removeprefix(QUANTIZES)}"


def loss_told(model: nn.Module, value: float, rate: float, forward: Callable[[], Any]) -> str:
    """What a step at learning rate ``rate`` got whose loss is ``value``, which is not finite; ``forward`` makes it."""
    cause = first_bad_layer(model, forward) or "a value that a second forward pass did not repeat"
    return f"{value} at learning rate {rate:.3g}, first non-finite in {cause}"


def remedy(got: str, precision: str, *, stepped: bool) -> str:
    """What to do about a value that is not finite, by what was told of it and by whether steps went before."""
    hint = "lower --learning-rate" if stepped else "correct the model, its weights or the task's loss"
    hint = "correct the data" if INPUTS in got else hint
    if precision.startswith("16"):
        hint += " or use --precision " + precision.replace("16-", "bf16-") + " (fp16 ends at 65,504)"
    return hint


def first_bad_layer(model: nn.Module, forward: Callable[[], Any]) -> str | None:
    """What first made a value that is not finite when ``forward`` ran ``model``; None where nothing did this time.

    Returns ``parameter 'NAME'``, ``layer 'NAME'``, or that it was the inputs, the model between its layers, or the
    loss, of which ``forward`` returns the value. It is called once, without gradients.
    """
    if (name := first_bad_parameter(model)) is not None:
        where = told(model, name)
        return f"parameter {where}" if where.startswith("'") else where
    found: list[str] = []
    modules = [("", model)] if isinstance(model, fx.GraphModule) else model.named_modules()  # its nodes are watched
    handles = [
        module.register_forward_hook(_watch(f"layer '{name}'" if name else BETWEEN, found))
        for name, module in modules
        if not isinstance(module, nn.Sequential | nn.ModuleList)
    ]
    handles.append(model.register_forward_pre_hook(_watch_inputs(found), with_kwargs=True))
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"), _watched_graph(model):
            if _bad(forward()) and not found:
                found.append(LOSS)
    except _Found as end:
        found.append(end.where)
    finally:
        for handle in handles:
            handle.remove()
    return next((name for names in processes.gather(found[:1]) for name in names), None)


def _bad(value: Any) -> bool:
    return any(t.is_floating_point() and not bool(torch.isfinite(t).all()) for t in tensors(value))


def _watch(where: str, found: list[str]) -> Callable[[nn.Module, Any, Any], None]:
    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        _note(output, where, found)

    return hook


def _watch_inputs(found: list[str]) -> Callable[[nn.Module, Any, Any], None]:
    def hook(module: nn.Module, inputs: Any, named: Any) -> None:
        _note((inputs, named), INPUTS, found)

    return hook


def _note(value: Any, where: str, found: list[str]) -> None:
    """Alone, a forward pass ends at the first bad value; among processes that exchange parameters in it, it goes on."""
    if not found and _bad(value):
        if processes.size() == 1:
            raise _Found(where)
        found.append(where)


class _Watched(fx.Interpreter):
    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.op not in ("placeholder", "get_attr", "output") and isinstance(value, Tensor) and _bad(value):
            raise _Found(_told(n))
        return value


def _told(node: fx.Node) -> str:
    """A node as whoever wrote the model knows it: what stands between layers belongs to the one that it reads from."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    if stack:
        return f"layer '{stack[-1][0] or node.name}'"
    if node.op == "get_attr":
        return f"layer '{str(node.target).rpartition('.')[0] or node.target}'"
    if node.op == "placeholder":
        return f"{QUANTIZES}input '{node.target}'"
    return _told(node.all_input_nodes[0]) if node.all_input_nodes else f"layer '{node.name}'"


class _watched_graph:
    """Inside the block, a captured graph is interpreted node by node; other models are left alone."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model if isinstance(model, fx.GraphModule) else None

    def __enter__(self) -> None:
        if self.model is not None:
            self.model.forward = _Watched(self.model).run

    def __exit__(self, *exc: object) -> None:
        if self.model is not None:
            del self.model.forward
