"""GPTQ where it costs little, in layers of few inputs, and corrected biases everywhere: what the default does.

GPTQ's algebra is of the order K³ for a layer of K inputs, and its walk wants many samples. Yet most of what rounding
weights costs a network with depthwise convolutions is done in these and in the narrow layers beside them: an output of
nine inputs averages nothing out, and each of its errors goes to every position. Of a pretrained EfficientNet-Lite0,
96 photographs to calibrate, the weights alone left

    ======================================  =======
    rounded to nearest, biases corrected    19.5 dB
    GPTQ in layers of at most 32 inputs     26.0 dB
    of at most 128                          26.5 dB
    in all layers                           26.3 dB
    ======================================  =======

So here GPTQ (``gptq.py``) refits the layers of at most ``FEW`` inputs, and all others get their biases corrected by
the means that they give (``bias.py``), in one walk over ``SAMPLES`` samples: each layer is settled once those before
it are. That order matters, since biases move what a clipped activation lets through (corrected in a walk of their
own, afterwards, they left 24.7 dB instead of 26.0).

Steps of fewer bits are another matter: rounding 4-bit weights to nearest left a ResNet-20 on CIFAR-10 at 25.5 dB, with
its small layers refitted, and a language model of bytes, weights alone, at 42.2 dB; with all of them refitted they are
at 29.8 and 48.7 dB. So with weights of at most 6 bits layers of up to ``FEW_COARSE`` inputs are refitted; beyond that
the algebra takes minutes and gigabytes for a ResNet-50.

Integers and biases are saved beside the ranges, so that a quantization that is repeated from there needs no samples.
"""

from __future__ import annotations

import base64
import dataclasses
import zlib
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor
from torch.fx import Node

from qtool.nested import thinned
from qtool.quantization.algorithms.bias import note_bias, take_biases
from qtool.quantization.algorithms.gptq import fit
from qtool.quantization.algorithms.journal import Journal
from qtool.quantization.algorithms.layers import in_order, leave_shared
from qtool.quantization.algorithms.rows import reason
from qtool.quantization.algorithms.subject import NothingToDo, Subject
from qtool.quantization.stored_weights import integers_of, store_integers
from qtool.units import many

FEW = 128
"""The most inputs of a layer that is refitted."""
COARSE, FEW_COARSE = 31, 1152
"""The largest integer of weights of few bits, 6, and the most inputs of a layer that is refitted with those."""
SAMPLES, ROWS = 128, 2048
"""How many samples are walked, and about how many rows of theirs a layer is fitted to."""
BUDGET = 2**27
"""Bytes that either walk holds in memory, the default's being the only walk that nobody asked for."""


@torch.no_grad()
def gptq_small(subject: Subject) -> None:
    """Refits small layers' integers and corrects the biases of all integer layers, in order, in place."""
    if "gptq" in (subject.config.algorithms or ()):
        raise NothingToDo("gptq refits all layers")
    anchors = subject.anchors()
    if subject.config.ranges_from is not None and _restore(subject, anchors):
        subject.note(f"gptq-small: as saved with the ranges in {many(len(anchors), 'layer')}")
        return
    walked = dataclasses.replace(subject, batches=thinned(subject.batches, SAMPLES))
    journal, shared = Journal(subject, "gptq-small"), leave_shared(subject, "gptq-small")
    refitted = 0
    for count, layer in enumerate(in_order(walked, all_kinds=True, budget=BUDGET)):
        subject.report(f"gptq-small {layer.name}", count, len(anchors))
        before, better = integers_of(subject.graph, layer.node), False
        most = FEW_COARSE if layer.ends[1] <= COARSE else FEW
        if layer.num_inputs > most or layer.node in shared or reason(layer.node):
            layer.correct_bias()
        else:
            better = fit(layer, journal, num_rows=ROWS)
        note_bias(subject, layer.node)
        subject.ranges[layer.name].pop("rounding", None)  # an earlier quantization's, repeated with samples
        if better:
            refitted += 1
            subject.ranges[layer.name]["rounding"] = _packed(integers_of(subject.graph, layer.node), before)
    subject.report("gptq-small", len(anchors), len(anchors))
    subject.note(f"gptq-small: refitted {many(refitted, 'layer')} and corrected the biases of {len(anchors)}")


def _packed(made: Tensor, nearest: Tensor) -> str:
    """By how much integers are others than the nearest, small numbers: compressed int16, base 64."""
    change = made.to(torch.int16) - nearest.to(torch.int16)
    return base64.b64encode(zlib.compress(change.cpu().numpy().astype("<i2").tobytes(), 6)).decode()


def _unpacked(text: str, nearest: Tensor) -> Tensor | None:
    """The integers that ``_packed`` wrote; None where the text is not of as many."""
    try:
        change = np.frombuffer(zlib.decompress(base64.b64decode(text)), "<i2").astype(np.int16)
    except (ValueError, zlib.error):
        return None
    if change.size != nearest.numel():
        return None
    return nearest.to(torch.int16) + torch.from_numpy(change).to(nearest.device).reshape(nearest.shape)


def _restore(subject: Subject, anchors: Iterable[Node]) -> bool:
    """Gives every layer the integers and the bias that were saved; changes nothing and is False unless all fit."""
    saved = {node: subject.ranges.get(str(node.meta["unit"]), {}) for node in anchors}
    nearest = {node: integers_of(subject.graph, node) for node, entry in saved.items() if "rounding" in entry}
    made = {node: _unpacked(saved[node]["rounding"], values) for node, values in nearest.items()}
    for node, values in made.items():
        if values is not None:
            store_integers(subject.graph, node, values)
    if take_biases(subject.graph, saved):
        return True
    for node, values in nearest.items():
        store_integers(subject.graph, node, values)
    return False
