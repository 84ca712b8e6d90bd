"""Sizes behind the batch that stay open, from the captured graph to the file that is served."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnxruntime
import pytest
import torch
from qdq_files import needs_vnni
from torch import Tensor, nn
from torch.nn import functional as F

import qtool
from qtool.errors import UsageError
from qtool.quantization.algorithms.part import Part
from qtool.quantization.capturing.capture import capture
from qtool.runtimes import open_session
from qtool.stages.quantization import load_quantized


class Segmenter(nn.Module):
    """Images of any size that 2 divides to maps of classes: down, up again, and beside what was there before."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.down = nn.Conv2d(8, 16, 3, 2, 1)
        self.up = nn.ConvTranspose2d(16, 8, 4, 2, 1)
        self.last = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(torch.cat([x, F.relu(self.up(F.relu(self.down(x))))], 1))  # type: ignore[no-any-return]


class Reader(nn.Module):
    """Tokens, and which of them count, to classes: attention over sequences of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(60, 32)
        self.mix = nn.Linear(32, 96)
        self.out = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 5)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        x = self.words(tokens)
        q, k, v = (part.unflatten(2, (4, 8)).transpose(1, 2) for part in self.mix(x).chunk(3, dim=2))
        mixed = F.scaled_dot_product_attention(q, k, v, mask[:, None, None, :] > 0)
        x = self.norm(x + mixed.transpose(1, 2).flatten(2))
        x = x + self.out(x)
        counted = mask[:, :, None].float()
        return self.head((x * counted).sum(1) / counted.sum(1))  # type: ignore[no-any-return]


def images(count: int, size: int) -> Tensor:
    return torch.randn(count, 3, size, size + 4)


def texts(count: int, length: int) -> dict[str, Tensor]:
    mask = torch.ones(count, length, dtype=torch.int64)
    mask[0, length // 2 :] = 0
    return {"tokens": torch.randint(0, 60, (count, length)), "mask": mask}


NETS: dict[str, tuple[Any, Any, tuple[int, ...], list[str]]] = {
    "images": (Segmenter, images, (2, 3), ["batch", "axis_2", "axis_3"]),
    "texts": (Reader, texts, (1,), ["batch", "axis_1"]),
}


def run(path: Path, inputs: Any) -> Tensor:
    session = open_session(path)
    names = [info.name for info in session.inputs]
    values = inputs if isinstance(inputs, dict) else dict(zip(names, [inputs], strict=True))
    return torch.from_numpy(session.run({name: values[name].numpy() for name in names})[0])


def db(wanted: Tensor, got: Tensor) -> float:
    return float(10 * torch.log10(wanted.square().sum() / (wanted - got).square().sum()))


@pytest.mark.parametrize(
    ("name", "settings"),
    [("images", {}), ("texts", {}), ("texts", {"algorithms": ["adaround", "bias"], "rounding_steps": 5})],
    ids=str,
)
def test_the_file_takes_sizes_that_it_was_not_calibrated_with(
    name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    make, sample, axes, names = NETS[name]
    model = make().eval()
    batches = [sample(8, 8 if index % 2 else 12) for index in range(8)]
    qtool.quantize(model, batches, dynamic_axes=axes, out=tmp_path, **settings)
    quantized = load_quantized(tmp_path)
    assert not [unit for unit in quantized.plan.float_units if unit.kind in ("conv", "linear", "conv_transpose2d")]
    exported = qtool.export(tmp_path, samples=batches, baselines=("fp32",))
    assert all(gate["passed"] for gate in exported.gates)
    session = onnxruntime.InferenceSession(exported.files["int8"], providers=["CPUExecutionProvider"])
    assert all([size for size in value.shape if isinstance(size, str)] == names for value in session.get_inputs())
    for size in (8, 16, 22):
        inputs = sample(3, size)
        with torch.no_grad():
            wanted = model(**inputs) if isinstance(inputs, dict) else model(inputs)
        assert db(wanted, run(exported.files["fp32"], inputs)) > 90
        assert db(wanted, quantized(inputs)) > 20
        assert db(quantized(inputs), run(exported.files["int8"], inputs)) > 25


class Decoder(nn.Module):
    """Tokens behind those whose keys and values are given: a language model that goes on, one step or several."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.mix = nn.Embedding(60, 32), nn.Linear(32, 96)
        self.out = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 60))

    def forward(self, tokens: Tensor, past: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        x, before = self.words(tokens), past[0].shape[2]
        q, k, v = (part.unflatten(2, (4, 8)).transpose(1, 2) for part in self.mix(x).chunk(3, dim=2))
        k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        seen = torch.arange(k.shape[2])[None] <= before + torch.arange(x.shape[1])[:, None]
        mixed = F.scaled_dot_product_attention(q, k, v, seen).transpose(1, 2).flatten(2)
        return self.out(x + mixed), (k, v)


@torch.no_grad()
def test_a_file_with_a_cache_goes_on_from_one_of_any_length(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, nothing = Decoder().eval(), (torch.zeros(4, 4, 0, 8), torch.zeros(4, 4, 0, 8))
    tokens = torch.randint(0, 60, (4, 30))
    starts = (2, 5, 9, 16)
    batches = [{"tokens": tokens[:, at : at + 4], "past": model(tokens[:, :at], nothing)[1]} for at in starts]
    form = qtool.quantize(model, batches, dynamic_axes=[1, 2], effort="fast")
    exported = qtool.export(form, tmp_path, samples=batches, baselines=None)
    assert all(gate["passed"] for gate in exported.gates)
    session = onnxruntime.InferenceSession(exported.files["int8"], providers=["CPUExecutionProvider"])
    shapes = [value.shape for value in session.get_inputs()]
    assert shapes[:2] == [["batch", "axis_1"], ["batch", 4, "axis_2", 8]]
    cache, found = [value.numpy() for value in nothing], []
    for first, end in ((0, 20), (20, 21), (21, 30)):
        given = [tokens[:, first:end].numpy(), *cache]
        answer, *cache = session.run(None, {info.name: x for info, x in zip(session.get_inputs(), given, strict=True)})
        found.append(torch.from_numpy(answer))
    assert db(model(tokens, nothing)[0], torch.cat(found, 1)) > 25


def test_without_the_flag_other_sizes_are_refused() -> None:
    quantized = qtool.quantize(Segmenter(), [images(4, 8)], effort="fast")
    with pytest.raises(qtool.QtoolError, match="N × 3 × 8 × 12"):
        quantized(images(2, 10))


class Fixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8 * 8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.flatten(1))  # type: ignore[no-any-return]


def test_an_axis_that_the_model_fixes_is_refused() -> None:
    with pytest.raises(UsageError, match=r"axis 2, which it fixes to 8; have the model read x\.shape"):
        qtool.quantize(Fixed(), [torch.randn(4, 8, 8)], dynamic_axes=[2])
    with pytest.raises(UsageError, match="axis 5, which no input has; leave it out"):
        qtool.quantize(Fixed(), [torch.randn(4, 8, 8)], dynamic_axes=[5])


def test_of_a_size_of_one_larger_inputs_are_asked_for(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="axis 1, which it fixes to 1; calibrate with larger inputs"):
        qtool.quantize(Reader(), [texts(4, 1)], dynamic_axes=[1])
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "settings",
    [{"engine": "torch.ao"}, pytest.param({"target": "openvino"}, marks=needs_vnni), {"weights_only": True}],
    ids=str,
)
def test_other_ways_of_quantizing_leave_them_open_too(settings: dict[str, Any], tmp_path: Path) -> None:
    if settings.get("target"):
        pytest.importorskip("openvino")
    torch.manual_seed(0)
    model, batches = Segmenter().eval(), [images(8, size) for size in (8, 12)]
    quantized = qtool.quantize(model, batches, dynamic_axes=(2, 3), effort="fast", **settings)
    exported = qtool.export(quantized, tmp_path, samples=batches, baselines=None)
    x = images(3, 18)
    assert db(quantized(x), run(exported.files["int8"], x)) > 25


def test_training_for_quantization_leaves_them_open(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, labels = torch.randn(96, 3, 8, 12), torch.arange(96) % 4

    class Classifier(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(Segmenter(), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    parts = torch.utils.data.TensorDataset(x, labels)
    quantized = qtool.quantize(
        Classifier(), {"train": parts, "test": parts}, mode="qat", dynamic_axes=(2, 3), epochs=1, batch_size=32
    )
    assert quantized(torch.randn(2, 3, 20, 16)).shape == (2, 4)


def test_reconstruction_takes_samples_of_what_counts_them_alone() -> None:
    """A value as long as the sequences are is whole for every part of a batch."""

    class Placed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.arange(x.shape[1]) * 2

    graph = capture(Placed(), torch.randn(4, 6), axes=(1,))
    walk: Any = SimpleNamespace(graph=SimpleNamespace(graph=graph.graph))
    part = Part(region=None, goal={}, walk=walk, plain=walk, sizes=[4], axis=1)  # type: ignore[arg-type]
    axes = {str(node.target): part._batch_axis(node) for node in graph.graph.nodes if node.op == "call_function"}
    assert axes["aten.add.Tensor"] == 0
    assert axes["aten.mul.Tensor"] is None


class TwoWays(nn.Module):
    """A net that pools only what is large, and one that refuses what it cannot view."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.first, self.last, self.way = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 4), way

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        if self.way == "pools" and x.shape[3] > 12:
            x = F.avg_pool2d(x, 2) * 3
        if self.way == "pads" and x.shape[2] % 4:
            x = F.pad(x, (0, 0, 0, 4 - x.shape[2] % 4)) + 1
        if self.way == "views":
            n, c, h, w = x.shape
            x = x.view(n, c, h // 2, 2, w // 2, 2).mean((3, 5)).reshape(n, c, h // 2, w // 2)
        return self.last(x.mean((2, 3)))


@pytest.mark.parametrize(
    ("way", "noted"), [("pools", "axis 3: of size 8,"), ("pads", "axis 2: of size 15,"), ("views", ""), ("", "")]
)
def test_a_model_that_goes_two_ways_by_a_size_is_told_of(way: str, noted: str) -> None:
    notes = qtool.quantize(TwoWays(way), [torch.randn(4, 3, 16, 16)], dynamic_axes=(2, 3), effort="fast").plan.notes
    found = [note for note in notes if "axis" in note or "captured" in note]
    assert [note[: len(noted)] for note in found] == [noted] * bool(noted)


def test_sizes_that_only_together_are_fixed_stay_open(tmp_path: Path) -> None:
    """Tokens that are mixed by a layer of as many inputs: any image of that many patches."""

    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches, self.mix, self.last = nn.Conv2d(3, 8, 4, 4), nn.Linear(16, 16), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.patches(x).flatten(2)
            return self.last((x + F.relu(self.mix(x))).mean(2))

    torch.manual_seed(0)
    model, batches = Mixer().eval(), [torch.randn(4, 3, 16, 16)]
    quantized = qtool.quantize(model, batches, dynamic_axes=(2, 3))
    assert not any("captured" in note for note in quantized.plan.notes)
    file = qtool.export(quantized, tmp_path, samples=batches, baselines=("fp32",)).files["fp32"]
    x = torch.randn(2, 3, 8, 32)
    (found,) = onnxruntime.InferenceSession(file).run(None, {"x": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), model(x).detach(), atol=1e-5, rtol=1e-5)
