from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import qtool
from qtool.exporting import half_masks
from qtool.quantization.capturing.capture import capture

HIDDEN = -1e9


class Attention(nn.Module):
    """Attention over five places, spelt out, whose scores a subclass masks."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))
        self.register_buffer("causal", torch.full((5, 5), HIDDEN).triu(1))

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(1, 2)
        return self.weights(self.masked(scores, kept[:, None])) @ self.value(x)

    def weights(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1)

    def masked(self, scores: Tensor, kept: Tensor) -> Tensor:
        raise NotImplementedError


class Filled(Attention):
    def masked(self, scores: Tensor, kept: Tensor) -> Tensor:
        return scores.masked_fill(kept == 0, HIDDEN)


class Chosen(Attention):
    def masked(self, scores: Tensor, kept: Tensor) -> Tensor:
        return torch.where(kept > 0, scores, torch.tensor(HIDDEN)) / 8**0.5


class Stored(Attention):
    """A stored mask that is scaled with the scores: one that is only added to them is mended before."""

    def masked(self, scores: Tensor, kept: Tensor) -> Tensor:
        return (scores + self.causal) * 1.5 + 0 * kept


class Multiplied(Attention):
    def masked(self, scores: Tensor, kept: Tensor) -> Tensor:
        return scores - 1e9 * (1.0 - kept.float())


class WrittenOut(Filled):
    def weights(self, scores: Tensor) -> Tensor:
        shifted = (scores - scores.amax(-1, keepdim=True)).exp()
        return shifted / shifted.sum(-1, keepdim=True)


class Fused(Attention):
    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        mask = torch.where(kept[:, None] > 0, 0.0, HIDDEN).expand(-1, 5, -1)
        q, k, v = self.query(x), self.key(x), self.value(x)
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class Steep(Attention):
    def masked(self, scores: Tensor, kept: Tensor) -> Tensor:
        return scores * 1e6 + 0 * kept


class Summed(Attention):
    def weights(self, scores: Tensor) -> Tensor:
        return scores + scores.softmax(-1)

    masked = Filled.masked


def _batch(least: int = 1) -> dict[str, Tensor]:
    """Eight samples, of which ``least`` to five places are kept."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.arange(8) % (6 - least) + least
    return {
        "x": torch.randn(8, 5, 8, generator=generator),
        "kept": (torch.arange(5) < lengths[:, None]).long(),
    }


@pytest.mark.parametrize("kind", [Filled, Chosen, Stored, Multiplied, WrittenOut, Fused])
def test_a_mask_beyond_half_hides_by_halfs_limit(kind: type[Attention], tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, batch = kind().eval(), _batch()
    exported = qtool.export(qtool.quantize(net, [batch], algorithms=None, ranges="minmax"), tmp_path, samples=[batch])
    (gate,) = (gate for gate in exported.gates if gate["name"] == "fp16 range")
    assert gate["passed"]
    assert "masks of" in gate["found"]
    feeds = {name: value.numpy() for name, value in batch.items()}
    session = onnxruntime.InferenceSession(str(exported.files["fp16"]))
    np.testing.assert_allclose(session.run(None, feeds)[0], net(**batch).detach().numpy(), atol=4e-3)
    assert session.get_modelmeta().custom_metadata_map["qtool.target"] == "ort-cpu"


@pytest.mark.parametrize(
    ("kind", "least", "why"),
    [(Steep, 1, "not 0 or 1"), (Summed, 1, ""), (Multiplied, 0, "outputs for the samples are others")],
)
def test_what_would_change_a_result_is_left_alone(kind: type[Attention], least: int, why: str) -> None:
    torch.manual_seed(0)
    graph = capture(kind().eval(), _batch(least))
    cut = half_masks.cut(graph, [_batch(least)])
    assert cut.graph is graph
    assert not cut.constants
    assert why in cut.refused
    assert bool(why) == bool(cut.refused)


def test_a_cut_copy_shares_the_weights_and_leaves_the_graph_alone() -> None:
    torch.manual_seed(0)
    batch = _batch()
    graph = capture(Stored().eval(), batch)
    code, expected = graph.code, graph(**batch)
    cut = half_masks.cut(graph, [batch])
    assert cut.constants == (-HIDDEN,)
    assert {p.data_ptr() for p in cut.graph.parameters()} == {p.data_ptr() for p in graph.parameters()}
    torch.testing.assert_close(cut.graph(**batch), expected)
    assert graph.code == code
    (least,) = (float(value.min()) for name, value in cut.graph.named_buffers() if name.endswith("_in_half"))
    assert least == -half_masks.LARGEST
