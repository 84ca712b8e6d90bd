"""What qtool uses of torchao, imported in one place and quietly.

Importing torchao makes it try its compiled kernels for other accelerators and say of each that it is not for this
machine; none of them is used here.

torchao and torch.ao remember the device of each module that they have asked for it, and with it the module, for as long
as the process lives. That is forgotten here: a search of many candidates would keep the weights of all of them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from qtool.system.quiet import quiet_loggers

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
    "modules_forgotten",
    "prepare",
]

_REMEMBER = {
    "torchao.utils": "_assert_and_get_unique_device",
    "torch.ao.quantization.fx.utils": "assert_and_get_unique_device",
}


@contextmanager
def modules_forgotten() -> Iterator[None]:
    """At the end of it neither torchao nor torch.ao holds a module."""
    try:
        yield
    finally:
        for module, name in _REMEMBER.items():
            if forget := getattr(getattr(sys.modules.get(module), name, None), "cache_clear", None):
                forget()
