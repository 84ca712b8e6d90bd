"""Random numbers in a file: a model that samples (a variational autoencoder) does so in evaluation too.

What is computed from them is another number in every run, and nothing can be compared with it. The gates leave it out,
say so, and judge the rest.
"""

from __future__ import annotations

import onnx

RANDOM = frozenset({
    "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial",
})  # fmt: skip


def drawn(model: onnx.ModelProto) -> set[str]:
    """The names of the values that depend on random numbers, the shapes of values that do apart."""
    found: set[str] = set()
    for node in model.graph.node:
        if node.op_type in RANDOM or (node.op_type not in ("Shape", "Size") and found & set(node.input)):
            found.update(node.output)
    return found
