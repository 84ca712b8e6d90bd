"""Analytic bias correction: clipped normals against sampling, the correction against data, and what it is for."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator

import pytest
import torch
from test_bias import mean_of, subject
from torch import Tensor, nn

from qtool.evaluate import sqnr_db
from qtool.graphs.operators import aten
from qtool.quantization.algorithms import Declined
from qtool.quantization.algorithms.analytic import clipped, correct_biases_analytically, distributions
from qtool.quantization.algorithms.equalize import equalize
from qtool.quantization.algorithms.subject import Subject
from qtool.quantization.capturing.float_form import float_form
from qtool.quantization.placement import Placement
from qtool.quantization.stage import quantize
from qtool.quantization.targets import get_target
from qtool.recipe import QuantizeConfig


@pytest.mark.parametrize(("low", "high"), [(0.0, math.inf), (0.0, 6.0), (-1.0, 1.0), (-math.inf, 2.0)])
def test_moments_of_clipped_normals_are_those_of_samples(low: float, high: float) -> None:
    mean, deviation = torch.tensor([-2.0, 0.0, 0.7, 5.0]).double(), torch.tensor([1.0, 0.5, 3.0, 2.0]).double()
    drawn = torch.randn(400_000, 4, generator=torch.Generator().manual_seed(0)).double() * deviation + mean
    drawn = drawn.clamp(low, high)
    found = clipped(mean, deviation.square(), low, high)
    torch.testing.assert_close(found[0], drawn.mean(0), rtol=0, atol=0.01)
    torch.testing.assert_close(found[1], drawn.var(0), rtol=0.01, atol=0.01)


class Residual(nn.Module):
    """Convolutions with batch-norm, a residual sum, a pooled head; statistics are those of ``noise``."""

    def __init__(self, loud: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU6())
        self.body = nn.Sequential(
            nn.Conv2d(16, 16, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 1), nn.BatchNorm2d(16)
        )
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))
        for norm in self.modules():
            if isinstance(norm, nn.BatchNorm2d):
                norm.weight.data.uniform_(-1.5, 1.5)
                norm.bias.data.uniform_(-0.5, 1.5)
                norm.momentum = None
        self.body[1].weight.data[3] *= loud
        self.train()
        with torch.no_grad():
            for seed in range(8):
                self(noise(64, seed))
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.head((y + self.body(y)).relu())


def noise(count: int, seed: int) -> Tensor:
    return torch.randn(count, 3, 10, 10, generator=torch.Generator().manual_seed(seed))


BATCHES = [noise(64, 20), noise(64, 21)]


def test_means_are_carried_through_the_graph() -> None:
    given = subject(Residual(), BATCHES)
    known = distributions(given.reference)
    assert sum(node.target is aten.conv2d.default for node in known) == 3
    for node, (mean, _) in known.items():
        wanted = mean_of(given.reference, node.name, BATCHES)
        torch.testing.assert_close(mean, wanted, rtol=0, atol=0.12)


def test_a_sum_with_a_stored_tensor_is_of_unknown_mean() -> None:
    class Placed(Residual):
        def __init__(self) -> None:
            super().__init__()
            self.places = nn.Parameter(torch.randn(1, 16, 8, 8))

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            return self.head(self.body(y + self.places if hasattr(self, "places") else y))

    graph = float_form(Placed(), noise(4, 0))
    known = {node.target for node in distributions(graph)}
    assert aten.conv2d.default in known
    assert aten.add.Tensor not in known


def test_the_correction_is_about_that_of_data() -> None:
    """Weights far too coarse, activations nearly exact: what is left of each mean shift is small."""
    shifts = []
    for correct in (False, True):
        given = subject(Residual(), BATCHES)
        for node in given.anchors():
            integers = dict(given.graph.named_buffers()) | dict(given.graph.named_parameters())
            stored = integers[node.args[1].args[0].target]
            stored.copy_(((stored.float() / 16).round() * 16).clamp(-112, 112).to(stored.dtype))
        second = list(given.anchors().items())[1]
        if correct:
            correct_biases_analytically(given)
        shifts.append(mean_of(given.graph, second[0].name, BATCHES) - mean_of(given.reference, second[1].name, BATCHES))
    # the first layer's inputs are not known: its own shift is in both, so only the difference counts
    assert float(shifts[1].norm()) < 0.6 * float(shifts[0].norm())
    assert given.notes == ["analytic-bias: corrected in 3 layers; 1 have no batch-norm before them"]


def test_the_output_comes_nearer_without_a_look_at_data() -> None:
    model, test = Residual(), noise(200, 30)
    found = {}
    for algorithms in (None, ("analytic-bias",)):
        config = QuantizeConfig(weight_bits=4, algorithms=algorithms)
        quantized = quantize(model, config, example=BATCHES[0], calibration=BATCHES)
        with torch.no_grad():
            found[algorithms] = sqnr_db(model(test), quantized(test))
    assert found["analytic-bias",] > found[None] + 0.5


def test_statistics_follow_equalization() -> None:
    model = Residual(loud=10)
    graph = float_form(model, BATCHES[0])
    given = Subject(graph, graph, Placement(graph, get_target("ort-cpu")), BATCHES)
    equalize(given)
    for node, (mean, variance) in distributions(given.graph).items():
        if not bool(variance.any()):  # a mean over the image
            continue
        wanted = mean_of(given.graph, node.name, BATCHES)
        assert float(((mean - wanted) / variance.clamp(min=1e-3).sqrt()).abs().max()) < 0.2
    assert any("rescaled" in note and "rescaled 0" not in note for note in given.notes)


def test_statistics_that_the_data_contradict_are_not_believed() -> None:
    """A net that was never trained, whose batch-norms still say what they were born with."""
    model = Residual()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_parameters()
        elif isinstance(module, nn.Conv2d):
            module.weight.data *= 0.05
            module.bias.data *= 0.05
    with pytest.raises(Declined, match="the statistics of the batch-norms are not those of the data"):
        correct_biases_analytically(subject(model, BATCHES))
    model.first[0].weight.data *= 100
    given = subject(model, BATCHES)
    correct_biases_analytically(given)
    assert given.notes[0].endswith("have one whose statistics are not the data's")


def test_a_net_without_batch_norm_is_declined() -> None:
    with pytest.raises(Declined, match="no integer layer has a batch-norm before it"):
        correct_biases_analytically(subject(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1)), BATCHES))


def test_batches_that_come_once_are_not_kept() -> None:
    alive: list[weakref.ref[Tensor]] = []

    def once() -> Iterator[Tensor]:
        for seed in range(6):
            batch = noise(16, 40 + seed)
            alive.append(weakref.ref(batch))
            yield batch
            assert sum(ref() is not None for ref in alive) <= 2

    quantize(
        Residual(), QuantizeConfig(ranges="mse", algorithms=("analytic-bias",)), example=BATCHES[0], calibration=once()
    )
    assert len(alive) == 6
