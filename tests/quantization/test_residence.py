"""On a device: everything is brought there, the result is the CPU's, and what comes back is on the CPU again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fake_device import DEVICE, Fake, Hidden
from nets import Bottleneck, conv_bn, pooled_classifier, settled
from torch import Tensor, nn

from qtool.quantization import stage
from qtool.quantization.algorithms import passes, reconstruct
from qtool.quantization.algorithms.bias import set_bias
from qtool.quantization.capturing.capture import capture
from qtool.quantization.qat import fine_tune as qat
from qtool.quantization.residence import Moved, device_of, on
from qtool.recipe import QatConfig, QuantizeConfig


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> None:
    """``cuda`` names the device that is none; what is drawn is drawn on the CPU, which has the only generators."""
    named = {"cuda": DEVICE, "cpu": torch.device("cpu")}
    for module in (stage, passes, qat):
        monkeypatch.setattr(module, "resolve_device", named.__getitem__)
    monkeypatch.setattr(reconstruct, "_drawing", lambda seed, device=None: torch.Generator().manual_seed(seed))


def tensors_of(made: stage.Converted) -> dict[str, Tensor]:
    return dict(made.graph.named_parameters()) | dict(made.graph.named_buffers())


def test_passes_on_a_device_leave_what_they_leave_on_the_cpu(there: None) -> None:
    torch.manual_seed(0)
    layers = conv_bn(3, 4, 3), nn.ReLU(), Bottleneck(4, 2, 1, 4), *pooled_classifier(4, 3)
    model, batches = settled(nn.Sequential(*layers), 8), [torch.randn(6, 3, 8, 8), torch.randn(5, 3, 8, 8)]
    names = ("equalize", "gptq", "brecq", "renorm", "analytic-bias", "bias")

    def made(device: str) -> stage.Converted:
        config = QuantizeConfig(weight_bits=4, ranges="mse", algorithms=names, rounding_steps=3, device=device)
        return stage.convert(model, config, example=batches[0][:2], calibration=batches)

    plain = made("cpu")
    with Fake() as fake:
        moved = made("cuda")
    assert fake.crossed > 100
    assert (moved.ranges, moved.notes) == (plain.ranges, plain.notes)
    expected = tensors_of(plain)
    assert not any(isinstance(value, Hidden) for value in tensors_of(moved).values())
    assert all(torch.equal(value, expected[name]) for name, value in tensors_of(moved).items())


def test_what_is_finished_is_read_back_to_the_device(there: None, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, batches = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).eval(), [torch.randn(32, 6)]
    config = QuantizeConfig(weight_bits=4, algorithms=("adaround",), rounding_steps=3, device="cuda")
    with Fake():
        first, second = (
            stage.convert(model, config, example=batches[0], calibration=batches, scratch=tmp_path) for _ in range(2)
        )
    assert list(tmp_path.rglob("*.safetensors"))
    assert all(torch.equal(value, tensors_of(first)[name]) for name, value in tensors_of(second).items())


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.offset = nn.Embedding(9, 4), torch.full((1,), 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table(torch.arange(x.shape[1], device=x.device)) + self.offset


def test_a_graph_names_the_device_that_it_is_on() -> None:
    model, x = Positions(), torch.randn(3, 5, 4)
    graph = capture(model, x)
    with Fake(), on(DEVICE, graph):
        assert device_of(graph) == DEVICE
        (there,) = Moved([x], DEVICE)
        found = graph(there)
        assert isinstance(found, Hidden)
        with pytest.raises(RuntimeError, match="same device"):
            graph(x)
    assert device_of(graph).type == "cpu"
    torch.testing.assert_close(found.value, model(x))
    torch.testing.assert_close(graph(x), model(x))


def test_a_bias_from_the_host_comes_to_where_its_layer_is() -> None:
    """One that was saved beside the ranges, say."""
    model, x = nn.Linear(4, 3), torch.randn(2, 4)
    graph = capture(model, x)
    with Fake(), on(DEVICE, graph):
        (layer,) = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
        set_bias(graph, layer, torch.ones(3))
        graph.recompile()
        (there,) = Moved([x], DEVICE)
        found = graph(there).value
    torch.testing.assert_close(found, nn.functional.linear(x, model.weight, torch.ones(3)))


@pytest.mark.parametrize("step_size", ["observed", "learned"])
def test_quantization_aware_training_takes_the_graph_along_and_brings_it_back(there: None, step_size: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), Positions(), nn.Linear(4, 2)).eval(), torch.randn(6, 5, 4)
    seen = []

    def one_step(graph: nn.Module, hooks: object, loss: object) -> None:
        (given,) = Moved([x], device_of(graph))  # type: ignore[arg-type]
        out = graph(given)
        out.square().sum().backward()
        with torch.no_grad():
            for parameter in graph.parameters():
                if parameter.grad is not None:
                    parameter.sub_(0.01 * parameter.grad)
        seen.append(type(out))

    def made(device: str) -> stage.Converted:
        config = QuantizeConfig(mode="qat", ranges="minmax", device="cpu")
        tuning = QatConfig(device=device, distill=False, step_size=step_size)  # type: ignore[arg-type]
        return stage.convert(model, config, example=x, calibration=[x], qat=one_step, tuning=tuning)

    plain = made("cpu")
    with Fake():
        moved = made("cuda")
    assert seen == [Tensor, Hidden]
    assert moved.ranges == plain.ranges
    expected = tensors_of(plain)
    assert all(torch.equal(value, expected[name]) for name, value in tensors_of(moved).items())
    torch.testing.assert_close(moved.graph(x), plain.graph(x))
