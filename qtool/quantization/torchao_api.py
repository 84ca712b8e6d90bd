"""What qtool uses of torchao, imported in one place and quietly.

Importing torchao makes it try its compiled kernels for other accelerators and say of each that it is not for this
machine; none of them is used here.
"""

from __future__ import annotations

from qtool.quantization.quiet import quiet_loggers

with quiet_loggers("torchao", "torch.utils._pytree"):
    from torchao.quantization.pt2e import FakeQuantizeBase, ObserverBase
    from torchao.quantization.pt2e.prepare import prepare
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e
    from torchao.quantization.pt2e.quantizer import (
        QuantizationAnnotation,
        QuantizationSpec,
        Quantizer,
        SharedQuantizationSpec,
    )

__all__ = [
    "FakeQuantizeBase",
    "ObserverBase",
    "QuantizationAnnotation",
    "QuantizationSpec",
    "Quantizer",
    "SharedQuantizationSpec",
    "convert_pt2e",
    "prepare",
]
