"""Modules that say in plain operators what torch.ao's eager quantized modules compute.

Each takes and gives float tensors whose values lie on the grid of a quantizer. A weighted module holds its
weight as int8 behind a dequantize; every module that had a scale and zero point of its own ends in quantize and
dequantize with just these. Activations are clipped at 0 and 255, whatever range their observer was given, since
that is where the kernels clip.

A kernel of fbgemm accumulates integers, multiplies by ``s_x·s_w/s_y`` in float32, adds the zero point and rounds half
to even; the float operator here computes the same value in another order and adds the zero point after rounding,
as ONNX does. The two differ by one step where the value is within a rounding error of a half, or is one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qtool.errors import QtoolError
from qtool.form import quantized

try:
    import torch.ao.nn.intrinsic.quantized as nniq
    import torch.ao.nn.quantized as nnq
    from torch.ao.quantization import FakeQuantizeBase, ObserverBase, convert
except ImportError as missing:
    raise QtoolError(
        "eager model", "a torch with torch.ao's quantized modules", f"torch {torch.__version__} ({missing})",
        "install a torch that has them, or quantize the float model with qtool.quantize",
    ) from missing  # fmt: skip


class Requantized(nn.Module):
    """``operator``, its result put on the grid of ``scale`` and ``zero_point`` (uint8)."""

    def __init__(self, operator: nn.Module, scale: Any, zero_point: Any) -> None:
        super().__init__()
        self.operator = operator
        self.scale, self.zero_point = float(scale), int(zero_point)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The operator's result, quantized and dequantized."""
        grid = (self.scale, self.zero_point, 0, 255, torch.uint8)
        integers = quantized.quantize_per_tensor(self.operator(*args, **kwargs), *grid)
        return quantized.dequantize_per_tensor(integers, *grid)  # type: ignore[no-any-return]


class Leave(nn.Module):
    """Where ``DeQuantStub`` was: what follows is float. The copy is a mark in the captured graph."""

    def forward(self, x: Tensor) -> Tensor:
        """A copy of ``x``."""
        return x.clone()


class Weighted(nn.Module):
    """A convolution or linear layer with an integer weight, and the ReLU that was fused into it."""

    def __init__(self, module: Any, function: Callable[..., Tensor], relu: bool, where: str) -> None:
        super().__init__()
        weight, bias = module.weight(), module.bias()
        scale, zero_point = _weight_qparams(weight, where)
        self.register_buffer("weight", weight.int_repr())
        self.register_buffer("scale", scale)
        self.register_buffer("zero_point", zero_point)
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone(), requires_grad=False)
        self.function, self.relu = function, relu

    def forward(self, x: Tensor) -> Tensor:
        """The float operator on the dequantized weight."""
        weight = quantized.dequantize_per_channel(self.weight, self.scale, self.zero_point, 0, -128, 127, torch.int8)
        y = self.function(x, weight, self.bias)
        return F.relu(y) if self.relu else y


def _weight_qparams(weight: Tensor, where: str) -> tuple[Tensor, Tensor]:
    """Scales float32 and zero points int64, one per output channel."""
    if weight.qscheme() in (torch.per_channel_affine, torch.per_channel_symmetric):
        scale, zero_point, axis = (
            weight.q_per_channel_scales(),
            weight.q_per_channel_zero_points(),
            weight.q_per_channel_axis(),
        )
    else:
        scale, zero_point, axis = torch.tensor(weight.q_scale()), torch.tensor(weight.q_zero_point()), 0
    if weight.dtype != torch.qint8 or axis != 0 or bool(zero_point.any()):
        raise _refusal(where, f"a {weight.dtype} weight along axis {axis} with zero points other than 0")
    channels = weight.shape[0]
    return scale.float().expand(channels).clone(), torch.zeros(channels, dtype=torch.int64)


def _refusal(where: str, got: str) -> QtoolError:
    return QtoolError(
        f"eager model, '{where}'", "a module that can be rebuilt", got,
        "leave it in float, between a DeQuantStub and a QuantStub, or give qtool.quantize the float model",
    )  # fmt: skip


class _Add(nn.Module):
    def __init__(self, relu: bool = False) -> None:
        super().__init__()
        self.relu = relu

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.relu(x + y) if self.relu else x + y


class _Mul(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x * y


class _MatMul(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.matmul(x, y)


class _Cat(nn.Module):
    def forward(self, x: list[Tensor], dim: int = 0) -> Tensor:
        return torch.cat(x, dim)


class Functional(nn.Module):
    """``QFunctional``: each operation a module, so that the captured graph knows it by its path."""

    def __init__(self, module: Any, where: str) -> None:
        super().__init__()
        self.where = where
        operations = {"add": _Add(), "add_relu": _Add(relu=True), "mul": _Mul(), "cat": _Cat(), "matmul": _MatMul()}
        for name, operation in operations.items():
            self.add_module(name, Requantized(operation, module.scale, module.zero_point))

    def add_scalar(self, x: Tensor, y: float) -> Tensor:
        """Refused: torch.ao changes the scale or the zero point of its input, which no unit does."""
        raise _refusal(f"{self.where}.add_scalar", "an operation with a Python number")

    def mul_scalar(self, x: Tensor, y: float) -> Tensor:
        """Refused as ``add_scalar`` is."""
        raise _refusal(f"{self.where}.mul_scalar", "an operation with a Python number")


def _convolution(function: Callable[..., Tensor], *, relu: bool = False) -> Callable[[Any, str], nn.Module]:
    def build(module: Any, where: str) -> nn.Module:
        rest = (module.stride, module.padding, module.dilation, module.groups)

        def zeros(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return function(x, weight, bias, *rest)

        def padded(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            ends = [size for size in reversed(module.padding) for _ in range(2)]
            wide = F.pad(x, ends, mode=module.padding_mode)
            return function(wide, weight, bias, module.stride, 0, module.dilation, module.groups)

        apply = zeros if module.padding_mode == "zeros" else padded
        return Requantized(Weighted(module, apply, relu, where), module.scale, module.zero_point)

    return build


def _linear(*, relu: bool = False) -> Callable[[Any, str], nn.Module]:
    return lambda m, where: Requantized(Weighted(m, F.linear, relu, where), m.scale, m.zero_point)


def _after(operator: Callable[[Any], nn.Module]) -> Callable[[Any, str], nn.Module]:
    """A float operator on the dequantized input, with the module's own output grid."""
    return lambda m, where: Requantized(operator(m), m.scale, m.zero_point)


def _batch_norm(module: Any) -> nn.Module:
    norm = nn.BatchNorm2d(module.num_features, module.eps)
    norm.load_state_dict(
        {key: value for key, value in module.state_dict().items() if key in norm.state_dict()}, strict=False
    )
    return norm.eval()


def _quantize(module: Any, where: str) -> nn.Module:
    if module.dtype != torch.quint8:
        raise _refusal(where, f"activations of {module.dtype}, not quint8")
    return Requantized(nn.Identity(), module.scale, module.zero_point)


REBUILT: dict[type[nn.Module], Callable[[Any, str], nn.Module]] = {
    nnq.Quantize: _quantize,
    nnq.DeQuantize: lambda m, where: Leave(),
    nnq.Conv1d: _convolution(F.conv1d),
    nnq.Conv2d: _convolution(F.conv2d),
    nniq.ConvReLU1d: _convolution(F.conv1d, relu=True),
    nniq.ConvReLU2d: _convolution(F.conv2d, relu=True),
    nnq.Linear: _linear(),
    nniq.LinearReLU: _linear(relu=True),
    nnq.QFunctional: Functional,
    nnq.ReLU6: lambda m, where: nn.ReLU6(),
    nnq.Dropout: lambda m, where: nn.Identity(),
    nnq.BatchNorm2d: _after(_batch_norm),
    nniq.BNReLU2d: _after(lambda m: nn.Sequential(_batch_norm(m), nn.ReLU())),
    nnq.LeakyReLU: _after(lambda m: nn.LeakyReLU(m.negative_slope)),
    nnq.ELU: _after(lambda m: nn.ELU(m.alpha)),
    nnq.Hardswish: _after(lambda m: nn.Hardswish()),
    nnq.Softmax: _after(lambda m: nn.Softmax(m.dim)),
    nnq.Sigmoid: lambda m, where: Requantized(nn.Sigmoid(), m.output_scale, m.output_zero_point),
}


def is_quantized(module: nn.Module) -> bool:
    """Whether ``module`` is one of torch.ao's converted modules."""
    home = type(module).__module__
    return home.startswith(("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")) and not isinstance(
        module, nnq.FloatFunctional | nnq.FXFloatFunctional
    )


def is_observed(module: nn.Module) -> bool:
    """Whether ``module`` is one of torch.ao's observers or fake-quantizers."""
    return isinstance(module, ObserverBase | FakeQuantizeBase)


def converted(model: nn.Module) -> nn.Module:
    """``model``, which torch.ao prepared, converted in place."""
    return convert(model, inplace=True)  # type: ignore[no-untyped-call, no-any-return]


def paths_of(model: nn.Module, kind: type[nn.Module]) -> set[str]:
    """The paths of the modules of one kind."""
    return {path for path, module in model.named_modules(remove_duplicate=False) if isinstance(module, kind)}


def rebuild(model: nn.Module) -> None:
    """Replaces every converted module of ``model`` in place.

    Raises QtoolError naming a module that has no plain counterpart here.
    """
    found = [
        (path, module) for path, module in model.named_modules(remove_duplicate=False) if path and is_quantized(module)
    ]
    made: dict[int, nn.Module] = {}
    for path, module in found:
        if any(path.startswith(f"{other}.") for other, _ in found):
            continue  # a part of a module that is replaced as a whole
        if type(module) not in REBUILT:
            raise _refusal(path, f"a {type(module).__module__}.{type(module).__name__}")
        made.setdefault(id(module), REBUILT[type(module)](module, path))
        model.set_submodule(path, made[id(module)])
