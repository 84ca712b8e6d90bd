"""Block reconstruction: the roundings of a whole residual block are learned together (BRECQ, arXiv 2102.05426).

A layer that is reconstructed alone cannot know that the one behind it, or the path beside it, can make good what it
does. Within a block they learn together; between blocks errors are nearly independent. Blocks are found on the graph
(``regions.py``): what lies between two values that everything passes through. Half of the activations of a block are
left in float at random while it learns (QDrop, arXiv 2203.05740). ``reconstruct.py`` says how the rest is done.
"""

from __future__ import annotations

from torch.fx import Node

from qtool.quantization.algorithms.reconstruct import reconstruct
from qtool.quantization.algorithms.regions import MOST, Region, blocks
from qtool.quantization.algorithms.subject import Subject
from qtool.quantization.algorithms.walk import Segment
from qtool.units import few

DROP = 0.5


def brecq(subject: Subject) -> None:
    """Learns the rounding of every integer layer, block after block, in place."""

    def cut(segments: list[Segment], layers: list[Node]) -> list[Region]:
        found, large = blocks(segments, layers)
        if large:
            subject.note(f"brecq: more than {MOST} layers in a block, taken one by one: {few(large)}")
        return found

    reconstruct(subject, "brecq", cut, drop=DROP)
