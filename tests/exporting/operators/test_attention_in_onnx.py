"""Attention in the file gives what torch gives, for every kind of mask, rows that see nothing among them."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path

import onnx
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qtool.exporting.baselines import write_fp16
from qtool.exporting.to_onnx import float_to_onnx, save
from qtool.quantization.capturing.float_form import float_form

BATCH, HEADS, L, S, E, FEATURES = 3, 4, 5, 7, 8, 6
Inputs = tuple[Tensor, ...]


def seen(*shape: int) -> Tensor:
    """A mask whose first row sees nothing; where it has a batch, its first sample does not either."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) > 0.4
    mask[..., 0, :] = False
    if len(shape) == 4:
        mask[0] = False
    return mask


def added(mask: Tensor, hidden: float) -> Tensor:
    noise = torch.randn(mask.shape, generator=torch.Generator().manual_seed(2))
    return torch.where(mask, noise, torch.full((), hidden))


GIVEN = {
    "tokens": seen(BATCH, 1, L, S),
    "keys": seen(BATCH, 1, 1, S),
    "each head": seen(BATCH, HEADS, L, S),
    "minus infinity": added(seen(BATCH, 1, L, S), -torch.inf),
    "the lowest number": added(seen(BATCH, HEADS, L, S), torch.finfo(torch.float32).min),
}
STORED = {
    "rows": seen(L, S), "keys": torch.arange(S)[None] < 4, "heads": seen(HEADS, L, S), "one": seen(1, L, S),
    "numbers": added(seen(HEADS, L, S), -torch.inf),
}  # fmt: skip
OPTIONS = {"plain": {}, "causal": {"is_causal": True}, "scale": {"scale": 0.3}, "no scale": {"scale": 0.0}}


def kinds_of(heads: int) -> list[str]:
    """The kinds of masks beside so many keys; one key for all is repeated as one for two is, whatever the mask."""
    return ["tokens", "plain"] if heads == 1 else [*GIVEN, *(f"stored {name}" for name in STORED), *OPTIONS]


class Cores(nn.Module):
    """Attention by each kind of mask, with as many keys as heads, with one for two heads, and with one for all."""

    def __init__(self) -> None:
        super().__init__()
        for name, mask in STORED.items():
            self.register_buffer(name, mask)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *masks: Tensor) -> dict[str, Tensor]:
        kinds = {name: {"attn_mask": mask} for name, mask in zip(GIVEN, masks, strict=True)}
        kinds |= {f"stored {name}": {"attn_mask": getattr(self, name)} for name in STORED} | OPTIONS
        mixed = {}
        for heads in (HEADS, 2, 1):
            mix = partial(F.scaled_dot_product_attention, query, key[:, :heads], value[:, :heads])
            mixed |= {f"{name}, {heads}": mix(**kinds[name], enable_gqa=heads < HEADS) for name in kinds_of(heads)}
        return mixed


def qkv() -> Inputs:
    """Queries, keys and values."""
    torch.manual_seed(0)
    return torch.randn(BATCH, HEADS, L, E), torch.randn(BATCH, HEADS, S, E), torch.randn(BATCH, HEADS, S, FEATURES)


def written(net: nn.Module, inputs: Inputs, folder: Path, axes: tuple[int, ...] = ()) -> Path:
    path = folder / "net.onnx"
    save(float_to_onnx(float_form(net.eval(), inputs, axes=axes), inputs, 21), path)
    return path


def answers(path: Path, inputs: Inputs) -> list[Tensor]:
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    feeds = {told.name: value.numpy() for told, value in zip(session.get_inputs(), inputs, strict=True)}
    return [torch.from_numpy(value) for value in session.run(None, feeds)]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Tensor, Tensor]]:
    """What the file and torch give, by the kind of mask and the number of keys."""
    net, inputs = Cores(), (*qkv(), *GIVEN.values())
    wanted = net(*inputs)
    found = answers(written(net, inputs, tmp_path_factory.mktemp("cores")), inputs)
    return {name: (out, wanted[name]) for name, out in zip(wanted, found, strict=True)}


@pytest.mark.parametrize(("kind", "keys"), [(kind, keys) for keys in (HEADS, 2, 1) for kind in kinds_of(keys)])
def test_the_file_gives_what_torch_gives(both: dict[str, tuple[Tensor, Tensor]], kind: str, keys: int) -> None:
    torch.testing.assert_close(*both[f"{kind}, {keys}"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["tokens", "minus infinity", "stored rows", "stored numbers"])
def test_the_samples_have_rows_that_see_nothing(both: dict[str, tuple[Tensor, Tensor]], kind: str) -> None:
    """Else the test above would show nothing of them: torch gives 0 there."""
    wanted = both[f"{kind}, {HEADS}"][1]
    assert not wanted[:, :, 0].any()
    assert wanted[:, :, 1:].any()


class Causal(nn.Module):
    """Causal attention of a sequence to itself, two queries to a key."""

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x[:, ::2], x[:, 1::2], is_causal=True, enable_gqa=True)


def test_a_causal_mask_of_any_length(tmp_path: Path) -> None:
    net, longer = Causal().eval(), torch.randn(2, HEADS, 9, E)
    path = written(net, (torch.randn(BATCH, HEADS, L, E),), tmp_path, axes=(2,))
    torch.testing.assert_close(answers(path, (longer,)), [net(longer)], rtol=1e-5, atol=1e-5)


def test_a_causal_mask_is_computed_once_and_never_stored(tmp_path: Path) -> None:
    path = written(nn.Sequential(Causal(), Causal()).eval(), (torch.randn(BATCH, HEADS, 200, E),), tmp_path)
    assert path.stat().st_size < 8_000
    assert Counter(node.op_type for node in onnx.load(path).graph.node)["Trilu"] == 1


class Core(nn.Module):
    """Attention alone."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


def test_attention_of_five_axes_with_a_mask(tmp_path: Path) -> None:
    inputs = tuple(value[:, None] for value in (*qkv(), GIVEN["tokens"]))
    path = written(Core(), inputs, tmp_path)
    torch.testing.assert_close(answers(path, inputs), [Core()(*inputs)], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["tokens", "minus infinity"])
def test_in_half_precision_a_row_that_sees_nothing_gives_nothing(kind: str, tmp_path: Path) -> None:
    inputs, path = (*qkv(), GIVEN[kind]), tmp_path / "half.onnx"
    assert write_fp16(float_to_onnx(float_form(Core().eval(), inputs), inputs, 21), path) == ""
    torch.testing.assert_close(answers(path, inputs), [Core()(*inputs)], rtol=1e-2, atol=1e-2)


def test_in_half_precision_a_causal_mask_hides_as_much(tmp_path: Path) -> None:
    net, inputs, path = Causal().eval(), (30 * torch.randn(BATCH, HEADS, L, E),), tmp_path / "half.onnx"
    assert write_fp16(float_to_onnx(float_form(net, inputs), inputs, 21), path) == ""
    torch.testing.assert_close(answers(path, inputs), [net(*inputs)], rtol=1e-2, atol=0.1)


def test_no_more_is_computed_than_attention(tmp_path: Path) -> None:
    path = written(Core(), qkv(), tmp_path)
    operators = Counter(node.op_type for node in onnx.load(path).graph.node)
    assert operators == {"Mul": 1, "Transpose": 1, "MatMul": 2, "Softmax": 1}
