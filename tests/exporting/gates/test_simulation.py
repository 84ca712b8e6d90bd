"""The gates' simulation against the quantized graph itself, and ties found fast against ties looked for one by one."""

from __future__ import annotations

import numpy as np
import torch

from qtool.evaluate import sqnr_db
from qtool.exporting.gates.simulation import QuantizerRecorder, Simulation, fast_simulation, is_tie, ties
from qtool.form import QuantizedModel, quantize_nodes


def test_the_simulation_equals_the_graph_bit_for_bit(gated: tuple[QuantizedModel, torch.Tensor]) -> None:
    quantized, x = gated
    simulated = Simulation(quantized)
    assert torch.equal(simulated(x), quantized(x))
    assert torch.equal(simulated(x[:3]), quantized(x[:3]))  # and nothing was written into a constant


def test_the_recorder_has_every_quantizers_integers_and_ties(gated: tuple[QuantizedModel, torch.Tensor]) -> None:
    quantized, x = gated
    recorder = QuantizerRecorder(quantized)
    integers, output = recorder.record(x)
    assert torch.equal(output, quantized(x))
    nodes = quantize_nodes(quantized.graph)
    assert len(integers) == len(nodes) == len(recorder.ties)
    first = nodes[0].target(x, *nodes[0].args[1:])
    assert np.array_equal(integers[0], first.numpy())


def test_ties_are_found_as_one_by_one() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(4, 5000, generator=generator) * 3
    halves = (torch.arange(-300, 300) + 0.5) * 0.037
    mixed = torch.cat([values.flatten(), halves, halves * (1 + 2.0**-22), halves + 0.037 * 2.0**-11]).reshape(2, -1)
    expected = is_tie(mixed, 0.037).flatten().nonzero().flatten()
    assert len(expected) >= 1200
    assert torch.equal(ties(mixed, 0.037), expected)


def test_the_fast_simulation_is_another_rounding_of_the_same_sums(gated: tuple[QuantizedModel, torch.Tensor]) -> None:
    quantized, x = gated
    exact, fast = Simulation(quantized)(x), fast_simulation(quantized)(x)
    assert sqnr_db(exact, fast) > 30
