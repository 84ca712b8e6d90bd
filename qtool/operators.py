"""What a node of a captured graph calls, and in how many groups."""

from __future__ import annotations

from typing import Any

from torch.fx import Node


def packet_of(node: Node) -> Any:
    """The ``OpOverloadPacket`` of a node's operator, ``aten.add`` for ``aten.add.Tensor``; None of what calls none."""
    return getattr(node.target, "overloadpacket", None)


def groups_of(node: Node) -> int:
    """The groups of a convolution, in the same place of transposed ones; 1 of a linear layer."""
    value = node.args[6] if len(node.args) > 6 else node.kwargs.get("groups", 1)
    assert isinstance(value, int)
    return value
