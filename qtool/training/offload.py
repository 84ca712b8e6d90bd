"""Activations in host memory between the forward and the backward pass.

What autograd saves for the backward pass is copied to pinned host memory as it is saved and back when
it is needed. Parameters, which stay on the device anyway, and tensors of less than 1 MiB, which are not
worth a transfer, are left where they are.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from qtool.steps.setup import Setup

SMALLEST = 2**20


def apply(setup: Setup, example: Any) -> None:
    """Offloads what each training forward pass saves."""
    setup.around.append(lambda: _hooks(setup))


def _hooks(setup: Setup) -> AbstractContextManager[object]:
    # by what holds their memory: to predict a step it is run on tensors whose memory has no address
    kept = {p.untyped_storage()._cdata for p in setup.model.parameters()}
    pin = setup.device.type == "cuda"

    def pack(tensor: Tensor) -> Any:
        if tensor.nbytes < SMALLEST or tensor.untyped_storage()._cdata in kept:
            return tensor
        host = torch.empty_like(tensor, device="cpu", pin_memory=pin)
        host.copy_(tensor, non_blocking=pin)
        return tensor.device, host

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        device, host = packed
        return host.to(device, non_blocking=pin)  # type: ignore[no-any-return]

    return saved_tensors_hooks(pack, unpack)
