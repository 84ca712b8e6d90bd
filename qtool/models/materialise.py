"""A model made without its weights, which are then read from their file straight to where they will be.

Made as usual, a model is initialised in float32 on the host, a file of weights is read beside it, and both are
there at once: twice the weights, or four times those of a model in 16 bits. Here a parameter is put on the meta
device, which has shapes and no memory, as soon as a module registers it. Then each is allocated once, on the device and
in the precision asked for, and filled from the file in pieces of a few MiB. Of a sharded model each process reads its
own rows. Between the two, layers may get others around them or in their place (adapters, 4-bit weights): a module is
known by itself, and not by its name.

Only parameters are left out: buffers, also those that no file holds (masks, position numbers), and other tensors
that a constructor makes are made as always. One that is computed *from* a parameter has no value then, and is refused
by name.

The file is read and not mapped: pages of a mapped file count as this process's memory until the system wants them.
Format: huggingface.co/docs/safetensors, a length (8 bytes), a JSON header with dtype, shape and place of each tensor,
the data.
"""

from __future__ import annotations

import abc
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from qtool.errors import QtoolError, one_line
from qtool.masks import is_finite, may_hide
from qtool.norms import keeps_statistics
from qtool.system import processes

PIECE = 4 * 2**20
"""Bytes read at a time."""
WHERE = "--create-on-device"
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
OTHER_WEIGHTS = (
    "name the model that these weights are of, or a factory that loads them and replaces what has other shapes"
)
"""What to do about weights that do not fit a model."""


@dataclass(frozen=True)
class Target:
    """Where a model's parameters shall be, and as what; norms with statistics stay as they are. ``later``: not yet."""

    device: torch.device
    dtype: torch.dtype | None = None
    later: bool = False


class MadeFrom(nn.Module, abc.ABC):
    """Stands in for the layer ``origin[0]``, with parameters and buffers of its own that its weight gives."""

    origin: list[nn.Module]

    @abc.abstractmethod
    def take(self, weight: Tensor) -> None:
        """Sets them from the whole weight, in whose dtype the layer comes back; of sharded parameters, own rows."""


@dataclass(frozen=True)
class _Waiting:
    """Where the weights of a model are, and the places that its modules had in it when it was made."""

    file: Path
    target: Target
    places: WeakKeyDictionary[nn.Module, str]


_WAITING: WeakKeyDictionary[nn.Module, _Waiting] = WeakKeyDictionary()


def create(build: Callable[[], nn.Module], file: Path, target: Target) -> nn.Module:
    """What ``build`` makes, its parameters read from ``file`` (safetensors) to ``target``, all of them and no others.

    Raises QtoolError where the model cannot be made so, or the file is of another architecture or not finite.
    """
    try:
        with _parameters_on_meta():
            model = build()
    except QtoolError:
        raise
    except Exception as error:
        got = f"{type(error).__name__}: {one_line(error)[:200]}"
        raise QtoolError(WHERE, "a model that can be made without its weights", got, "leave it out") from error
    _require_values(model)
    with _Weights(file) as weights:
        weights.require_same(model)
    places = WeakKeyDictionary({module: place for place, module in model.named_modules()})
    _WAITING[model] = _Waiting(file, target, places)
    if not target.later:
        fill(model)
    return model


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    register = nn.Module.register_parameter

    def registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = registered  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _require_values(model: nn.Module) -> None:
    """Raises QtoolError naming the first tensor beside the parameters that was computed from one."""
    for place, module in model.named_modules():
        others = {k: v for k, v in vars(module).items() if isinstance(v, Tensor)}
        for name, value in {**module._buffers, **others}.items():
            if value is not None and value.is_meta:
                got = f"'{f'{place}.{name}'.strip('.')}', computed from one while the model was made"
                raise QtoolError(WHERE, "tensors that do not depend on parameters", got, "leave it out")


def waits(model: nn.Module) -> bool:
    """Whether a model's parameters have no memory yet."""
    return model in _WAITING


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """Allocates the parameters of a model from :func:`create` and reads them; of any other model, nothing."""
    if model not in _WAITING:
        return
    waiting = _WAITING.pop(model)
    made: dict[nn.Parameter, nn.Parameter] = {}
    with _Weights(waiting.file) as weights:
        for module in model.modules():
            place = waiting.places.get(module)
            if isinstance(module, MadeFrom):
                place = waiting.places[module.origin[0]]
                dtype = waiting.target.dtype or module.origin[0].get_parameter("weight").dtype
                module.take(_whole(weights, f"{place}.weight", dtype, waiting.target.device))
            if place is not None:
                _fill(module, place, waiting.target, weights, made)


def _whole(weights: _Weights, key: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    whole = torch.empty(weights.entries[key]["shape"], dtype=dtype, device=device)
    weights.read(key, whole)
    return whole


def _fill(
    module: nn.Module, place: str, target: Target, weights: _Weights, made: dict[nn.Parameter, nn.Parameter]
) -> None:
    """One module's own tensors; what ``made`` has in the place of a parameter is taken for its other names too."""
    for name, parameter in list(module._parameters.items()):
        if parameter is None:
            continue
        if parameter not in made:
            dtype = None if keeps_statistics(module) or not parameter.is_floating_point() else target.dtype
            made[parameter] = _allocated(parameter, target.device, dtype or parameter.dtype)
        if (key := f"{place}.{name}".strip(".")) in weights.entries:
            weights.read(key, made[parameter])
        module._parameters[name] = made[parameter]
    for name, buffer in list(module._buffers.items()):
        key = f"{place}.{name}".strip(".")
        if buffer is not None:
            module._buffers[name] = buffer = buffer.to(target.device)
            if key in weights.entries and name not in module._non_persistent_buffers_set:
                weights.read(key, buffer, mask=may_hide(name))


def _allocated(parameter: nn.Parameter, device: torch.device, dtype: torch.dtype) -> nn.Parameter:
    if not parameter.is_meta:
        return parameter
    return nn.Parameter(torch.empty_like(parameter, dtype=dtype, device=device), parameter.requires_grad)


class _Weights:
    """A safetensors file, read piece by piece. Raises QtoolError where it is damaged."""

    def __init__(self, path: Path) -> None:
        self.where = f"weights '{path}'"
        try:
            self.file: BinaryIO = path.open("rb", buffering=0)
        except OSError as error:
            raise QtoolError(self.where, "a readable file", str(error), "check the path") from error
        try:
            length = int.from_bytes(self.file.read(8), "little")
            if length > path.stat().st_size:
                raise ValueError(f"a header of {length} bytes")
            self.entries: dict[str, dict[str, Any]] = json.loads(self.file.read(length))
            self.entries.pop("__metadata__", None)
            self.begin = 8 + length
            end = max((entry["data_offsets"][1] for entry in self.entries.values()), default=0)
            if path.stat().st_size < self.begin + end:
                raise ValueError(f"{path.stat().st_size} bytes of {self.begin + end}")
        except (OSError, ValueError, KeyError, TypeError) as error:
            self.file.close()
            got = f"{type(error).__name__}: {error}"
            raise QtoolError(self.where, "a whole .safetensors file", got, "copy or save the file again") from error

    def __enter__(self) -> _Weights:
        return self

    def __exit__(self, *exc: object) -> None:
        self.file.close()

    def require_same(self, model: nn.Module) -> None:
        """Raises QtoolError naming keys that only the model or the file has, or that have other shapes."""
        own: dict[str, Tensor] = model.state_dict(keep_vars=True)
        there = {id(value) for key, value in own.items() if key in self.entries}
        missing = [key for key, value in own.items() if id(value) not in there]
        unexpected = [key for key in self.entries if key not in own]
        shapes = [k for k, e in self.entries.items() if k in own and list(own[k].shape) != e["shape"]]
        parts = [("missing", missing), ("not in the model", unexpected), ("other shapes", shapes)]
        if got := "; ".join(f"{name}: {', '.join(keys[:3])}" for name, keys in parts if keys):
            raise QtoolError(self.where, "weights of this architecture", got, OTHER_WEIGHTS)

    def dtype(self, key: str) -> torch.dtype:
        """The type that the file has a tensor in. Raises QtoolError for one that no weights are read from."""
        if (kind := self.entries[key]["dtype"]) not in _DTYPES:
            raise QtoolError(self.where, f"tensors of {', '.join(_DTYPES)}", f"'{key}' of {kind}", "convert the file")
        return _DTYPES[kind]

    def read(self, key: str, tensor: Tensor, *, mask: bool = False) -> None:
        """Fills ``tensor``, or this process's rows of it, converting where its dtype is another.

        Minus infinity is damage but in a ``mask``.
        """
        entry, part = self.entries[key], processes.local(tensor)
        dtype = self.dtype(key)
        skipped = rows_before(tensor) * (tensor.numel() // max(1, tensor.shape[0])) if tensor.dim() else 0
        flat = part.view(-1) if part.is_contiguous() else torch.empty(part.numel(), dtype=part.dtype)
        piece = torch.empty(min(flat.numel(), PIECE // dtype.itemsize), dtype=dtype)
        self.file.seek(self.begin + entry["data_offsets"][0] + skipped * dtype.itemsize)
        for start in range(0, flat.numel(), max(1, piece.numel())):
            now = piece[: flat.numel() - start]
            self._read_exactly(memoryview(now.view(torch.uint8).numpy()))  # type: ignore[arg-type]
            ends = torch.stack((now.float() if dtype.itemsize == 1 else now).aminmax())  # torch compares none of 8 bits
            if dtype.is_floating_point and not is_finite(ends if tensor.dim() else ends[0], mask=mask):
                raise QtoolError(self.where, "finite weights", f"NaN or infinity in {key}", "load other weights")
            flat[start : start + now.numel()].copy_(now)
        if not part.is_contiguous():
            part.copy_(flat.view(part.shape))

    def _read_exactly(self, memory: memoryview) -> None:
        while memory.nbytes:
            count = self.file.readinto(memory)  # type: ignore[attr-defined]
            if not count:
                raise QtoolError(self.where, "a whole .safetensors file", "its end", "copy or save the file again")
            memory = memory[count:]


def rows_before(tensor: Tensor) -> int:
    """The rows of a sharded tensor that processes before this one hold."""
    if processes.local(tensor) is tensor:
        return 0
    return min(tensor.shape[0], processes.rank() * -(-tensor.shape[0] // processes.size()))
