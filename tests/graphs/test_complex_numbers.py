"""What moves and multiplies complex numbers is written into a file as what does so with their parts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qtool.exporting import to_onnx
from qtool.quantization.capturing.float_form import float_form

SIZE, MODES, WIDTH = 16, 4, 3


class Spectral(nn.Module):
    """A Fourier layer: some frequencies multiplied by a stored matrix each, and what ``whole`` makes of them."""

    def __init__(self, whole: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.whole = nn.Parameter(torch.randn(WIDTH, WIDTH, MODES, dtype=torch.cfloat)), whole

    def forward(self, x: Tensor) -> Tensor:
        waves = torch.fft.rfft(x)
        kept = torch.einsum("bim,iom->bom", waves[..., :MODES], self.weight)
        return torch.fft.irfft(self.whole(waves, kept), n=SIZE)


def written(waves: Tensor, kept: Tensor) -> Tensor:
    """Into zeros, as neural operators have it."""
    zeros = torch.zeros(len(waves), WIDTH, SIZE // 2 + 1, dtype=torch.cfloat)
    zeros[..., :MODES] = kept
    return zeros


def written_alike(waves: Tensor, kept: Tensor) -> Tensor:
    zeros = torch.zeros_like(waves)
    zeros[:, :, 2 : 2 + MODES] = kept
    zeros[:, :, 0] = kept[:, :, 1]
    return zeros


def joined(waves: Tensor, kept: Tensor) -> Tensor:
    return torch.cat([kept, kept.new_zeros(len(kept), WIDTH, SIZE // 2 + 1 - MODES)], -1)


def padded(waves: Tensor, kept: Tensor) -> Tensor:
    return F.pad(kept, (0, SIZE // 2 + 1 - MODES))


def short(waves: Tensor, kept: Tensor) -> Tensor:
    """The transform itself adds what is missing."""
    return kept


def turned(waves: Tensor, kept: Tensor) -> Tensor:
    flat = kept.unsqueeze(1).expand(-1, 2, -1, -1).flatten(1, 2)
    return flat.reshape(-1, 2, WIDTH, MODES).select(1, 1).index_select(-1, torch.tensor([3, 2, 1, 0]))


@pytest.mark.parametrize("whole", [written, written_alike, joined, padded, short, turned], ids=lambda f: f.__name__)
def test_spectra_are_put_together_of_parts(whole: Callable[[Tensor, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    check(Spectral(whole).eval(), torch.randn(2, WIDTH, SIZE))


class Open(nn.Module):
    """A Fourier layer for signals of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, MODES, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        waves = torch.fft.rfft(x)
        spectrum = torch.zeros_like(waves)
        spectrum[..., :MODES] = torch.einsum("bim,iom->bom", waves[..., :MODES], self.weight)
        spectrum[..., 0] = spectrum[..., 1]
        return torch.fft.irfft(spectrum, n=x.shape[-1])


def test_what_is_written_into_a_spectrum_of_open_size_has_the_models_gradient() -> None:
    torch.manual_seed(0)
    model, x = Open().eval(), torch.randn(2, WIDTH, SIZE)
    graph = float_form(model, x, axes=(2,))
    for size in (SIZE, SIZE + 3):
        other = torch.randn(3, WIDTH, size)
        gradients = []
        for made in (model, graph):
            value = other.clone().requires_grad_()
            made(value).square().sum().backward()
            assert value.grad is not None
            gradients.append(value.grad)
        torch.testing.assert_close(gradients[1], gradients[0])


class Rows(nn.Module):
    """Products with one stored complex matrix, by an operator and by letters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SIZE, 40, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        waves = torch.fft.fft(x)
        return (waves @ self.weight).real, torch.einsum("bcx,xo->boc", waves, self.weight).imag


def test_a_complex_matrix_is_no_layer_and_is_stored_once() -> None:
    torch.manual_seed(0)
    model = Rows().eval()
    made = check(model, torch.randn(2, WIDTH, SIZE))
    assert sum(value.const_value.nbytes for value in made.graph.initializers.values()) < 1.1 * model.weight.nbytes


def check(model: nn.Module, example: Tensor) -> ir.Model:
    """The file, whose outputs are the model's for other inputs."""
    made = to_onnx.float_to_onnx(float_form(model, example), example, 21)
    session = onnxruntime.InferenceSession(ir.serde.serialize_model(made).SerializeToString())
    other = torch.randn(3, *example.shape[1:])
    wanted = model(other)
    found = session.run(None, {session.get_inputs()[0].name: other.numpy()})
    for result, right in zip(found, wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
        np.testing.assert_allclose(result, right.detach().numpy(), atol=2e-5)
    return made
