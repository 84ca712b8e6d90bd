"""What is marked as to be kept: all that is computed from an input that the graph writes; views are followed."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from qtool.steps.moved_buffers import keep


def test_what_reads_a_buffer_that_moves_is_kept() -> None:
    def step(x: Tensor, mean: Tensor, constant: Tensor) -> Tensor:
        top, _ = mean.max(0)
        y = ((x - mean.view(1, 3)) / constant).exp() * top
        y = torch.native_batch_norm(y, None, None, mean, mean, True, 0.1, 1e-5)[0]
        mean.copy_(mean * 0.5)
        return y

    graph = make_fx(step, tracing_mode="fake")(torch.ones(2, 3), torch.ones(3), torch.ones(3)).graph
    keep(graph)
    assert [node.name for node in graph.nodes if "recompute" in node.meta] == ["getitem", "getitem_1", "sub", "mul_1"]
