"""Number formats of compute and weights.

===========  =======  ==========  ======  ==================================================
precision    weights  activations update  what it needs
===========  =======  ==========  ======  ==================================================
32-true      float32  float32     float32
16-mixed     float32  float16     float32 loss scaling: float16 gradients underflow below 2⁻²⁴
bf16-mixed   float32  bfloat16    float32
16-true      float16  float16     float32 values within ±65,504
bf16-true    bfloat16 bfloat16    bfloat16 8 bits of significand: small updates round away
===========  =======  ==========  ======  ==================================================

*Mixed* is autocast (arXiv 1710.03740): matrix products and convolutions in 16 bits, reductions and the
loss in 32. For float16 the loss is multiplied by a scale before the backward pass and the gradients are
divided by it before they are clipped; a step whose gradients overflow is skipped and the scale halved.

*True* casts the model. Norms with running statistics stay in float32, weights and statistics: averages would stand
still in 16 bits, and such a norm is a thousandth of a model; so do the scales of 4-bit weights. Weights are cast
where they come from: what a GPU would hold of them in 32 bits leaves gaps that nothing as large fills. At the
end the weights are float32 again, with the values that training left in them; those of a model that was made in 16
bits stay so, and of one that was created on the device. Buffers that training has not moved are what they came as, and
constants that no file holds count in full already meanwhile, where a module without weights computes with them: rounded
to 8 bits, the frequencies of rotary positions are off by turns after some hundred tokens.

A model that comes in 16 bits, as many are published, is made float32 by every other precision, and stays it: what a
step changes would mostly round away. With LoRA frozen weights stay as narrow as they are; the adapters are float32, and
so is what is trained in full beside them: until the end it computes in float32, and what it gives on is narrow again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from qtool.errors import QtoolWarning
from qtool.nested import NARROW, map_tensors, to_float32
from qtool.norms import keeps_statistics
from qtool.steps.forwards import take_place
from qtool.steps.setup import Setup
from qtool.training.lora_layers import trained_in_full
from qtool.training.nf4 import NF4Linear


def apply(setup: Setup, example: Any) -> None:
    """Sets up the precision that the config names."""
    width, kind = setup.config.precision.split("-")
    dtype = torch.float16 if width == "16" else torch.bfloat16
    if weight_dtype(setup.config.precision) is None:
        _widen(setup)
        if kind == "mixed":
            _mixed(setup, dtype)
        elif setup.config.lora is not None:
            setup.input_dtype = _frozen_in(setup.model)
    else:
        _true(setup, dtype)


def move(setup: Setup) -> None:
    """Moves the model to the device, in the dtype that its weights will have there."""
    dtype = weight_dtype(setup.config.precision)
    if dtype is not None and setup.config.lora is None:  # adapters are made as wide as what they are added to
        for name, value in _cast_values(setup.model):
            setup.widths[name] = value.dtype
            _cast(setup, name, value, setup.device, dtype)
    setup.model = setup.model.to(setup.device)


def weight_dtype(precision: str) -> torch.dtype | None:
    """What a precision keeps weights in, where that is not what they came in."""
    return {"16-true": torch.float16, "bf16-true": torch.bfloat16}.get(precision)


def _widen(setup: Setup) -> None:
    """Makes what came in 16 bits float32: all of a model, or with LoRA its adapters and its batch-norm."""
    adapters = setup.config.lora is not None
    modules = [m for m in setup.model.modules() if not adapters or keeps_statistics(m)]
    values = [v for m in modules for v in (*m.parameters(recurse=False), *m.buffers(recurse=False))]
    values += [p for p in setup.model.parameters() if p.requires_grad]
    narrow = [value for value in values if value.dtype in NARROW]
    if narrow and not adapters:
        warnings.warn(
            f"{setup.config.precision}: the model came in {str(narrow[0].dtype).removeprefix('torch.')}; its weights "
            "are trained in float32 and stay it; bf16-true keeps 16 bits",
            QtoolWarning,
            stacklevel=2,
        )
    for name in trained_in_full(setup.model, setup.config.lora_trained):
        _until_the_end(setup, setup.model.get_submodule(name))
    for value in narrow:
        value.data = value.data.float()


def _frozen_in(model: nn.Module) -> torch.dtype | None:
    """The 16 bits that all frozen weights outside norms have, and so take inputs in; None where they have not."""
    values = (p for m in model.modules() if not keeps_statistics(m) for p in m.parameters(recurse=False))
    found = {p.dtype for p in values if p.is_floating_point() and not p.requires_grad}
    return found.pop() if len(found) == 1 and found <= set(NARROW) else None


def _until_the_end(setup: Setup, module: nn.Module) -> None:
    """Has a module among frozen ones in 16 bits, whose own weights are about to be float32, go on working with them."""
    before = {name: value.dtype for name, value in _cast_values(module) if value.dtype in NARROW}
    if not before:
        return

    def narrow() -> None:
        for name, value in _cast_values(module):
            value.grad, value.data = None, value.data.to(before.get(name, value.dtype))

    setup.on_close += [narrow, _in_full(module, {}, setup.device, next(iter(before.values())))]


def _mixed(setup: Setup, dtype: torch.dtype) -> None:
    setup.around.append(lambda: torch.autocast(setup.device.type, dtype))
    if dtype == torch.float16:
        setup.scaler = _host_scaler() if setup.config.weight_offload else torch.amp.GradScaler(setup.device.type)


def _host_scaler() -> torch.amp.GradScaler:
    """A scaler of gradients in host memory, its numbers there too.

    torch would copy those of one on a GPU without waiting for the copy, and read memory that has not come: gradients
    of any scale, and an overflow that is written over.
    """
    scaler = torch.amp.GradScaler("cpu")
    scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
    return scaler


def _true(setup: Setup, dtype: torch.dtype) -> None:
    first: dict[int, str] = {}  # a shared weight has come in under its first name
    before = {
        name: dtype if value.is_meta else setup.widths.get(first.setdefault(id(value), name), value.dtype)
        for name, value in _cast_values(setup.model)
    }
    if dtype == torch.float16:
        warnings.warn(
            "16-true: weights, activations and gradients must stay within ±65,504; bf16-true has float32's range",
            QtoolWarning,
            stacklevel=2,
        )
    for name, value in _cast_values(setup.model):
        _cast(setup, name, value, value.device, dtype)
    setup.input_dtype = dtype
    setup.on_close.append(lambda: _restore(setup, before))
    for name, module in setup.model.named_modules():
        kept = {key: setup.exact.get(f"{name}.{key}") for key in module._non_persistent_buffers_set}
        constants = {key: value for key, value in kept.items() if value is not None}
        if constants and next(module.parameters(), None) is None:
            setup.on_close.append(_in_full(module, constants, setup.device, dtype))


def _cast(setup: Setup, name: str, value: Tensor, device: torch.device, dtype: torch.dtype) -> None:
    """Casts a weight or a buffer in place, where it is, and moves it; a buffer that this rounds is kept as it was."""
    whole = value.detach()
    value.data = whole.to(dtype)
    if not isinstance(value, nn.Parameter) and not _same(value.to(whole.dtype), whole):
        setup.exact[name] = whole
    value.data = value.data.to(device)


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two buffers hold the same; of fake ones nobody knows."""
    if a.layout is not torch.strided:
        a, b = a.to_dense(), b.to_dense()
    return not isinstance(a, FakeTensor) and torch.equal(a, b)


def _in_full(
    module: nn.Module, constants: dict[str, Tensor], device: torch.device, dtype: torch.dtype
) -> Callable[[], None]:
    """Has a module compute in float32, with its constants as they came; what takes that back.

    One that it replaces is the new one from then on, and one that it moves goes on from there. Meanwhile they are
    buffers of the module under names of their own, so that whoever keeps or exchanges buffers finds them.
    """
    forward = module.forward
    names = {key: f"{key} in float32" for key in constants}
    for key, value in constants.items():
        module.register_buffer(names[key], value.to(device, torch.float32, copy=True), persistent=False)
    versions = {key: module._buffers[name]._version for key, name in names.items()}  # type: ignore[union-attr]

    def computed(*args: Any, **kwargs: Any) -> Any:  # in words that a compiler knows
        rounded = {}
        for key, name in names.items():
            buffer = module._buffers.get(key)
            if buffer is not None and buffer.dtype == dtype:
                rounded[key], module._buffers[key] = buffer, module._buffers[name]
        try:
            result = forward(*to_float32(args), **to_float32(kwargs))
        finally:
            for key, buffer in rounded.items():
                if module._buffers.get(key) is module._buffers[names[key]]:
                    module._buffers[key] = buffer
        return map_tensors(lambda t: t.to(dtype) if t.dtype == torch.float32 else t, result)

    give_back = take_place(module, computed)

    def restore() -> None:
        give_back()
        for key, name in names.items():
            buffer, wide = module._buffers.get(key), module._buffers[name]
            delattr(module, name)
            if buffer is not None and wide is not None and buffer.dtype == dtype and wide._version != versions[key]:
                buffer.data = wide

    return restore


def _cast_values(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The floating-point parameters and buffers but of norms with statistics and of 4-bit weights."""
    return [
        (f"{name}.{key}", value)
        for name, module in model.named_modules()
        if not (isinstance(module, NF4Linear) or keeps_statistics(module))
        for key, value in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        if value.is_floating_point()
    ]


def _restore(setup: Setup, before: dict[str, torch.dtype]) -> None:
    for name, value in _cast_values(setup.model):
        value.grad = None
        whole = setup.exact.get(name)
        unmoved = whole is not None and _same(value, whole.to(value.device, value.dtype))
        value.data = (whole if unmoved and whole is not None else value.data).to(value.device, before[name])
