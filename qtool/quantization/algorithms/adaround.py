"""AdaRound: each weight of a layer is rounded down or up as its layer's output wants it (arXiv 2004.10568).

Rounding to nearest makes the least error in each weight, and errors of many weights add up in a layer's output as its
inputs are correlated. Here the rounding of each convolution and linear layer is learned with the activation fused
behind it, from the inputs that the quantized network gives it towards the float network's outputs (the asymmetric
form), with its bias, starting where second-order rounding (``gptq``) ends; ``reconstruct.py`` says how, and what
becomes of a layer that this makes worse.
"""

from __future__ import annotations

from qtool.quantization.algorithms.reconstruct import reconstruct
from qtool.quantization.algorithms.regions import units
from qtool.quantization.algorithms.subject import Subject


def adaround(subject: Subject) -> None:
    """Learns the rounding of every integer convolution and linear layer, one after the other, in place."""
    reconstruct(subject, "adaround", units)
