"""The built-in Vision Transformer against what is published of torchvision's."""

from __future__ import annotations

import torch
from torch import nn

from qtool.models.vit import SelfAttention, VisionTransformer, vit_l_16
from qtool.quantization.capturing.capture import capture


def test_names_and_sizes_are_torchvisions() -> None:
    with torch.device("meta"):
        model = vit_l_16(1000, 3)
    assert sum(p.numel() for p in model.parameters()) == 304_326_632  # as torchvision documents vit_l_16
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert len(shapes) == 24 * 12 + 8
    expected = {
        "class_token": (1, 1, 1024), "conv_proj.weight": (1024, 3, 16, 16), "conv_proj.bias": (1024,),
        "encoder.pos_embedding": (1, 197, 1024), "encoder.ln.weight": (1024,), "encoder.ln.bias": (1024,),
        "heads.head.weight": (1000, 1024), "heads.head.bias": (1000,),
    }  # fmt: skip
    layer = {
        "ln_1.weight": (1024,), "ln_1.bias": (1024,), "ln_2.weight": (1024,), "ln_2.bias": (1024,),
        "self_attention.in_proj_weight": (3072, 1024), "self_attention.in_proj_bias": (3072,),
        "self_attention.out_proj.weight": (1024, 1024), "self_attention.out_proj.bias": (1024,),
        "mlp.0.weight": (4096, 1024), "mlp.0.bias": (4096,), "mlp.3.weight": (1024, 4096), "mlp.3.bias": (1024,),
    }  # fmt: skip
    for i in range(24):
        expected |= {f"encoder.layers.encoder_layer_{i}.{name}": shape for name, shape in layer.items()}
    assert shapes == expected


def test_it_reads_the_class_token_of_patches_in_place() -> None:
    torch.manual_seed(0)
    model = VisionTransformer(5, image=8, patch=4, layers=2, width=16, heads=2, hidden=32).eval()
    x = torch.randn(2, 3, 8, 8)
    y = model(x)
    assert y.shape == (2, 5)
    swapped = torch.cat([x[..., 4:], x[..., :4]], -1)  # positions tell the patches apart
    assert (model(swapped) - y).abs().max() > 1e-4
    with torch.no_grad():
        model.encoder.pos_embedding.zero_()
    torch.testing.assert_close(model(swapped), model(x))


def test_attention_is_torchs() -> None:
    torch.manual_seed(0)
    ours, theirs = SelfAttention(32, 4, batch_first=True), nn.MultiheadAttention(32, 4, batch_first=True)
    theirs.load_state_dict(ours.state_dict())
    for module in (ours, theirs):
        nn.init.normal_(module.in_proj_bias, generator=torch.Generator().manual_seed(1))
        nn.init.normal_(module.out_proj.bias, generator=torch.Generator().manual_seed(2))
    x = torch.randn(3, 7, 32)
    y, expected = ours(x), theirs(x, x, x)[0]
    torch.testing.assert_close(y, expected)
    for out in (y, expected):
        out.backward(torch.linspace(-1, 1, out.numel()).view(out.shape))
    for parameter, same in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, same.grad)


def test_it_is_captured_for_any_number_of_images() -> None:
    model = VisionTransformer(5, image=8, patch=4, layers=1, width=16, heads=2, hidden=32).eval()
    x = torch.randn(7, 3, 8, 8)
    torch.testing.assert_close(capture(model, x[:2])(x), model(x))
