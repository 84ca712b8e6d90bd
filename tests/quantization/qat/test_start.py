"""Where training starts, against the formula in numpy: inside the step of each integer, and no farther than needed."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from qtool.quantization.capturing.float_form import float_form
from qtool.quantization.placement import Placement
from qtool.quantization.qat.start import INSIDE, Rounded, begin_at
from qtool.quantization.targets import ORT_CPU

X = torch.randn(4, 6)
GRAPH = float_form(nn.Linear(6, 3), X)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.lists(st.sampled_from([-0.3, -0.01, 0.02, 0.1]), min_size=3, max_size=3))
def test_weights_begin_inside_the_steps_of_their_integers(seed: int, scales: list[float]) -> None:
    draw = torch.Generator().manual_seed(seed)
    placement, weight = Placement(GRAPH, ORT_CPU), torch.randn(3, 6, generator=draw)
    (unit,) = placement.layers
    path, s = str(unit.anchor.args[1].target), torch.tensor(scales)[:, None]
    with torch.no_grad():
        GRAPH.get_parameter(path).copy_(weight)
    q = (weight / s).round().clamp(-127, 127) + torch.randint(-1, 2, (3, 6), generator=draw)
    bias = torch.randn(3, generator=draw)
    begin_at({unit.unit.name: Rounded(q, s, s.flatten(), bias)}, GRAPH, placement)

    made, q64, s64 = GRAPH.get_parameter(path).detach().numpy(), q.double().numpy(), s.double().numpy()
    low, high = np.sort([s64 * (q64 - INSIDE), s64 * (q64 + INSIDE)], axis=0)
    np.testing.assert_allclose(made, np.clip(weight.double().numpy(), low, high), rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(np.round(made / s64), q64)
    np.testing.assert_array_equal(GRAPH.get_parameter(str(unit.anchor.args[2].target)).detach().numpy(), bias.numpy())
