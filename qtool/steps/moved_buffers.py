"""What a compiled backward pass may compute again: nothing from buffers that the forward pass has moved by then.

torch's partitioner has the backward pass compute again what is cheap to, from what the forward pass was given. It may
take a buffer that the forward pass writes for such an input, which then holds what was written: of ``x - mean`` whose
mean moves afterwards, torch 2.13 gives other gradients than uncompiled, without a word. So whatever is computed from
such a buffer is marked as to be kept, checkpointed or not. Views are followed: they hold what the buffer does. Left out
is batch-norm as one operator: its gradient does not depend on the statistics that it moves.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy


def keep(graph: fx.Graph) -> None:
    """Marks, in a graph of a forward and its backward pass, what is computed from inputs that it writes."""
    copies = graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    found = [node.args[0] for node in copies]
    while found:
        for user in found.pop().users:
            if user in copies or user.op == "output" or "batch_norm" in str(user.target):
                continue
            if getattr(user.target, "is_view", False) or isinstance(user.meta.get("val"), tuple | list):
                found.append(user)  # what is taken out of several results is marked
            else:
                user.meta["recompute"] = CheckpointPolicy.MUST_SAVE


@cache
def options() -> dict[str, Any]:
    """What ``torch.compile`` is told for it. The compiler is imported."""
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class Keep(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            keep(graph)

        def uuid(self) -> Any:
            return get_hash_for_files((__file__,))

    return {"joint_custom_pre_pass": Keep()}
