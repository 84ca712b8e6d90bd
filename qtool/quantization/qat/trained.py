"""Which of a model's parameters quantization-aware training moves: those that training the model itself does.

A graph is captured without gradients, so that what runs under ``torch.no_grad()``, such as a backbone that is only read
from, looks like the rest of it. Which parameters a gradient reaches is read off the model's own outputs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from qtool.models.specs import modes_kept
from qtool.nested import call, tensors
from qtool.quantization.capturing.names import spelled
from qtool.quantization.rewrites.norms import ANCHORS


def trained_parameters(model: nn.Module, example: Any) -> dict[str, bool]:
    """Of every parameter, by its name in a captured graph, whether a training of ``model`` moves it.

    It does not where ``requires_grad`` is off or no gradient comes; of a model whose outputs have none at all the
    former alone counts.
    """
    with modes_kept(model), torch.enable_grad():
        model.eval()
        waiting = [output.grad_fn for output in tensors(call(model, example)) if output.grad_fn is not None]
    seen, reached = set(waiting), set()
    while waiting:
        step = waiting.pop()
        reached.add(getattr(step, "variable", None))
        sources = {source for source, _ in step.next_functions if source is not None} - seen
        seen |= sources
        waiting += sources
    return {
        spelled(name): value.requires_grad and (value in reached or not seen)
        for name, value in model.named_parameters(remove_duplicate=False)
    }


def leave_untrained(graph: nn.Module, known: Mapping[str, bool]) -> None:
    """Has those tensors of a graph with live batch-norm stay that do, by ``known``."""
    for name, value in graph.named_parameters(remove_duplicate=False):
        name = spelled(name)
        layer = re.sub(r"\.bn\.\w+$", ".weight", name)  # torch.ao keeps a layer's batch-norm in it
        value.requires_grad_(value.requires_grad and known.get(name, known.get(layer, True)))


def let_train(graph: GraphModule, known: Mapping[str, bool]) -> None:
    """Lets those of a folded graph's tensors be trained that are, by ``known``, and what the model's layers have new.

    A layer whose weight stays as it is keeps its bias too.
    """
    trained = dict(known)
    for node in graph.graph.nodes:
        if node.target in ANCHORS:
            names = [
                str(value.target) for value in node.args[1:3] if isinstance(value, Node) and value.op == "get_attr"
            ]
            weight = known.get(names[0], True) if names else False
            trained |= {name: weight and known.get(name, True) for name in names}
    for name, value in graph.named_parameters(remove_duplicate=False):
        value.requires_grad_(trained.get(name, False))
