"""What a node of a captured graph calls, whichever overload it is: ``aten.add`` for ``aten.add.Tensor``."""

from __future__ import annotations

from typing import Any

from torch.fx import Node


def packet_of(node: Node) -> Any:
    """The ``OpOverloadPacket`` of a node's operator; None of what calls none."""
    return getattr(node.target, "overloadpacket", None)
