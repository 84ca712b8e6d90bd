"""The built-in language models: against transformers' GPT-2, and what causality means."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from qtool.errors import QtoolError
from qtool.models.gpt import GPT, gpt2
from qtool.models.specs import load_model


def test_no_token_sees_a_later_one() -> None:
    model = load_model("gpt2-mini", num_classes=50).eval()
    tokens = torch.randint(0, 50, (1, 12))
    later = tokens.clone()
    later[0, 7:] = (later[0, 7:] + 1) % 50
    a, b = model(tokens), model(later)
    torch.testing.assert_close(a[:, :7], b[:, :7])
    assert (a[:, 7:] - b[:, 7:]).abs().max() > 1e-3


def test_sizes_are_gpt2s() -> None:
    with torch.device("meta"):
        full = gpt2(50257, 1)
    assert sum(p.numel() for p in full.parameters()) == 124_439_808  # as published for "gpt2"
    assert full.lm_head.weight is full.transformer["wte"].weight


def test_windows_longer_than_the_context_are_refused() -> None:
    with pytest.raises(QtoolError, match="at most 256 tokens; got 257"):
        load_model("gpt2-mini", num_classes=5)(torch.zeros(1, 257, dtype=torch.int64))


@pytest.mark.filterwarnings("ignore")
def test_it_computes_what_transformers_computes() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=40, n_positions=16, n_embd=32, n_layer=2, n_head=4, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0
    )
    reference = transformers.GPT2LMHeadModel(config).eval()
    ours = GPT(40, layers=2, width=32, heads=4, context=16).eval()
    transposed = {name for name, module in ours.named_modules() if isinstance(module, nn.Linear)} - {"lm_head"}
    state = {
        key: value.T if key.removesuffix(".weight") in transposed else value
        for key, value in reference.state_dict().items()
    }
    ours.load_state_dict(state)
    tokens = torch.randint(0, 40, (3, 16))
    torch.testing.assert_close(ours(tokens), reference(tokens).logits, rtol=1e-4, atol=1e-5)
