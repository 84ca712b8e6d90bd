"""Minus infinity in a mask that a model keeps is no damage, wherever damage is looked for."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import qtool
from qtool.errors import QtoolError
from qtool.masks import is_finite
from qtool.memory.measure import allocations, highest_sum
from qtool.models.materialise import Target, create
from qtool.models.specs import check_finite, load_weights
from qtool.steps.nonfinite import first_bad_parameter


class Hiding(nn.Module):
    """A mask to add, among the buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.layer(x))
        return ((y[:, :, None] * y[:, None] + self.mask[None]).softmax(-1) * y[:, None]).sum(-1)  # type: ignore[no-any-return, operator]


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta")
def test_of_a_sparse_tensor_the_values_are_read() -> None:
    for graph in (torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr()):
        assert is_finite(graph)
        assert not is_finite(graph * math.nan)


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_looking_takes_next_to_no_memory(dtype: torch.dtype, mask: bool) -> None:
    """Each checkpoint looks through all weights, beside gradients and states."""
    value = torch.ones(1000, 10).to(dtype)
    changes, finite = allocations(lambda: is_finite(value, mask=mask))
    assert finite
    assert highest_sum(changes) < value.nbytes / 20
    assert is_finite(value[:0])
    for bad in (math.nan, math.inf):
        value[-1, -1] = bad
        assert not is_finite(value, mask=mask)


def test_a_mask_passes_wherever_damage_is_looked_for(tmp_path: Path) -> None:
    save_file(Hiding().state_dict(), tmp_path / "w.safetensors")
    load_weights(model := Hiding(), tmp_path / "w.safetensors")
    check_finite(model)
    assert first_bad_parameter(model, buffers=True) is None
    made = create(Hiding, tmp_path / "w.safetensors", Target(torch.device("cpu"), None))
    torch.testing.assert_close(made.state_dict(), model.state_dict())


@pytest.mark.parametrize(
    ("name", "value"),
    [("layer.weight", -torch.inf), ("norm.running_var", -torch.inf), ("mask", torch.inf), ("mask", torch.nan)],
)
def test_damage_does_not(name: str, value: float, tmp_path: Path) -> None:
    broken = Hiding()
    broken.state_dict()[name].view(-1)[1] = value
    assert first_bad_parameter(broken, buffers=True) == name
    save_file(broken.state_dict(), tmp_path / "w.safetensors")
    for look in (
        lambda: check_finite(broken),
        lambda: load_weights(Hiding(), tmp_path / "w.safetensors"),
        lambda: create(Hiding, tmp_path / "w.safetensors", Target(torch.device("cpu"), None)),
    ):
        with pytest.raises(QtoolError, match=f"NaN or infinity in {name}"):
            look()


@pytest.mark.parametrize("value", [torch.inf, -torch.inf])
def test_a_bound_that_is_not_set_is_no_damage(value: float, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("bound", torch.tensor(value))
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    load_weights(model, tmp_path / "w.safetensors")
    check_finite(model)
    assert first_bad_parameter(model, buffers=True) is None
    for spoilt in (torch.tensor(torch.nan), torch.tensor([torch.inf])):
        model.bound = spoilt
        with pytest.raises(QtoolError, match="NaN or infinity in bound"):
            check_finite(model)


def test_a_model_with_a_mask_is_trained_and_quantized(tmp_path: Path) -> None:
    torch.manual_seed(0)
    samples = [(torch.randn(3), index % 3) for index in range(16)]
    done = qtool.train(Hiding(), {"train": samples, "test": samples}, out=tmp_path, device="cpu", epochs=1)
    assert qtool.quantize(done.model, [torch.randn(16, 3)], effort="fast").plan.integer_units
    data = {"train": samples, "validation": samples}
    assert qtool.quantize(done.model, data, mode="qat", device="cpu", epochs=1).plan.integer_units
