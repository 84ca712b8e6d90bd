"""Vision Transformers (arXiv 2010.11929) under torchvision's parameter names, whose weights therefore load.

An image is cut into patches, each made a token by one convolution; a class token is put before them, learned positions
are added, and a pre-norm transformer follows, whose first token the head reads. Left out on purpose: dropout, which
torchvision's own recipe leaves at zero, and images of any other size than the one the positions are for.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SelfAttention(nn.MultiheadAttention):
    """Multi-head self-attention under ``nn.MultiheadAttention``'s names: B×T×width to the same.

    Queries, keys and values stay where one product put them; torch's forward pass copies them apart, and back.
    """

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        three = F.linear(x, self.in_proj_weight, self.in_proj_bias)
        query, key, value = three.view(*x.shape[:2], 3, self.num_heads, self.head_dim).transpose(1, 3).unbind(2)
        mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        return F.linear(mixed, self.out_proj.weight, self.out_proj.bias)


class EncoderBlock(nn.Module):
    """Self-attention and an MLP with GELU, each on a normalised input and added to it: B×T×width to the same."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width, eps=1e-6)
        self.self_attention = SelfAttention(width, heads, batch_first=True)
        self.ln_2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(  # torchvision's names count its dropouts
            OrderedDict({"0": nn.Linear(width, hidden), "1": nn.GELU(), "3": nn.Linear(hidden, width)})
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attention(self.ln_1(x))
        y: Tensor = x + self.mlp(self.ln_2(x))
        return y


class Encoder(nn.Module):
    """Positions, the blocks, the last norm."""

    def __init__(self, tokens: int, layers: int, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.pos_embedding = nn.Parameter(torch.empty(1, tokens, width).normal_(std=0.02))
        blocks = {f"encoder_layer_{i}": EncoderBlock(width, heads, hidden) for i in range(layers)}
        self.layers = nn.Sequential(OrderedDict(blocks))
        self.ln = nn.LayerNorm(width, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.ln(self.layers(x + self.pos_embedding))
        return y


class VisionTransformer(nn.Module):
    """N×C×S×S images to N×classes logits, S = ``image``, in patches of ``patch``×``patch``."""

    def __init__(
        self, num_classes: int, in_channels: int = 3, *, image: int, patch: int, layers: int, width: int, heads: int,
        hidden: int,
    ) -> None:  # fmt: skip
        super().__init__()
        self.conv_proj = nn.Conv2d(in_channels, width, patch, patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.encoder = Encoder((image // patch) ** 2 + 1, layers, width, heads, hidden)
        self.heads = nn.Sequential(OrderedDict({"head": nn.Linear(width, num_classes)}))

    def forward(self, x: Tensor) -> Tensor:
        patches = self.conv_proj(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_token.expand(x.shape[0], -1, -1), patches], 1)
        y: Tensor = self.heads(self.encoder(tokens)[:, 0])
        return y


def vit_l_16(num_classes: int, in_channels: int) -> nn.Module:
    """ViT-L/16 for 224-pixel images: 24 blocks of width 1,024, 16 heads; 304 million parameters."""
    return VisionTransformer(
        num_classes, in_channels, image=224, patch=16, layers=24, width=1024, heads=16, hidden=4096
    )
