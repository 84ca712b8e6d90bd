"""Language models of GPT-2's shape (Radford et al., "Language Models are Unsupervised Multitask Learners", 2019).

A pre-norm transformer over learned token and position embeddings. Each block adds causal self-attention and a
four-times-wider GELU layer to its input::

    x = x + attention(norm(x));    x = x + project(gelu(expand(norm(x))))

and the logits are the last norm times the token embeddings, whose matrix the head shares. Modules have GPT-2's names
(``transformer.h.0.attn.c_attn`` …); weights are those of ``nn.Linear``, transposed against the published files, which
``transformers:`` reads. Left out on purpose: dropout, and a cache for generating.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qtool.errors import QtoolError

_STD = 0.02


class Attention(nn.Module):
    """Causal self-attention of ``heads`` heads: B×T×width to B×T×width."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.c_attn(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        y: Tensor = self.c_proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return y


class MLP(nn.Module):
    """Expands four times, GELU (tanh form), projects back."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))
        return y


class Block(nn.Module):
    """One layer: attention, then the wide layer, each on a normalised input and added to it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width), Attention(width, heads)
        self.ln_2, self.mlp = nn.LayerNorm(width), MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        y: Tensor = x + self.mlp(self.ln_2(x))
        return y


class GPT(nn.Module):
    """B×T token indices (int64) to B×T×vocabulary logits; T at most ``context``."""

    def __init__(self, vocabulary: int, *, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.context = context
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocabulary, width),
                "wpe": nn.Embedding(context, width),
                "h": nn.ModuleList(Block(width, heads) for _ in range(layers)),
                "ln_f": nn.LayerNorm(width),
            }
        )
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight  # type: ignore[assignment]
        self._initialise(layers)

    def _initialise(self, layers: int) -> None:
        """Normal weights of 0.02, and less by √(2 layers) where a block adds to the residual stream.

        Embeddings have 0.02 · 768 / width: the head's logits, at most width · 0.02 on GPT-2's own, reach as far at any.
        """
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=_STD / (math.sqrt(2 * layers) if "c_proj" in name else 1))
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        width = self.lm_head.in_features
        nn.init.normal_(self.lm_head.weight, std=_STD * 768 / width)

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.shape[1] > self.context:
            raise QtoolError(
                "model 'gpt2'", f"windows of at most {self.context} tokens", str(tokens.shape[1]),
                f"shorten them: --data text:FILE:{self.context}",
            )  # fmt: skip
        parts = self.transformer
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = parts["wte"](tokens) + parts["wpe"](places)
        for block in cast(nn.ModuleList, parts["h"]):
            x = block(x)
        y: Tensor = self.lm_head(parts["ln_f"](x))
        return y


def gpt2(num_classes: int, in_channels: int) -> nn.Module:
    """GPT-2's smallest size: 12 layers of width 768, 12 heads, 1,024 places; 85 million parameters + embeddings."""
    return GPT(num_classes, layers=12, width=768, heads=12, context=1024)


def gpt2_mini(num_classes: int, in_channels: int) -> nn.Module:
    """The same shape for a CPU: 4 layers of width 128, 4 heads, 256 places; 0.8 million parameters for bytes."""
    return GPT(num_classes, layers=4, width=128, heads=4, context=256)
