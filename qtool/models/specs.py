"""Models: what ``--model`` and ``--weights`` mean.

=============================  ==================================================================================
spec                           what it is
=============================  ==================================================================================
``resnet``, ``mobilenet``      the built-in nets for images of 28 to 32 pixels (``nets``)
``gpt2``, ``gpt2-mini``        language models of GPT-2's shape, for any vocabulary (``gpt``)
``vit_l_16``                   ViT-L/16 for 224-pixel images, with torchvision's parameter names (``vit``)
``torchvision:NAME``           a classifier of torchvision, by its name there
``timm:NAME``                  a model of timm
``transformers:NAME``          a model of transformers, by hub name, folder or ``config.json``; gives logits or states
``FILE.py:factory``            a function that returns an ``nn.Module``
``package.module:factory``     the same, from an installed module
=============================  ==================================================================================

Weights come from ``.safetensors``, from ``.pt`` and ``.pth`` through ``torch.load(weights_only=True)`` and in no other
way, or from a qtool run directory, whose hashes are checked. ``pretrained`` asks a library for the weights it offers;
of those, only the classifier is left as initialised where the number of classes is another.

Left out on purpose: loading the keys that happen to fit. Weights are of this architecture or they are refused.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from qtool.artifacts import has_result, output_path, read_result
from qtool.errors import QtoolError, UsageError, kind_of, nearest, one_line, unreadable
from qtool.factories import PRETRAINED, is_factory, load_factory
from qtool.masks import is_finite, masks
from qtool.models.gpt import gpt2, gpt2_mini
from qtool.models.grown import buffers_of, grow
from qtool.models.libraries import LIBRARIES
from qtool.models.materialise import OTHER_WEIGHTS, WHERE, Target, create
from qtool.models.nets import mobilenet, resnet
from qtool.models.vit import vit_l_16
from qtool.nested import NARROW
from qtool.system.files import path_of
from qtool.system.turns import shared
from qtool.units import few

BUILT_INS: dict[str, Callable[[int, int], nn.Module]] = {
    "resnet": resnet,
    "mobilenet": mobilenet,
    "gpt2": gpt2,
    "gpt2-mini": gpt2_mini,
    "vit_l_16": vit_l_16,
}
SUFFIXES = (".safetensors", ".pt", ".pth")
FILES = {
    ".onnx": ("an ONNX file", "give the PyTorch model that it was exported from"),
    ".pt2": ("an exported program", "give the PyTorch model that it was exported from"),
    **dict.fromkeys(SUFFIXES, ("a file of weights", "name the architecture, and give the file as --weights")),
}
"""What the files are that build no model, and what to do with them."""
WRAPPERS = ("state_dict", "model_state_dict", "model")  # under which training scripts store the weights
PREFIXES = ("module.", "_orig_mod.")  # which DataParallel and torch.compile put before every name


def load_model(
    spec: str,
    *,
    num_classes: int | None = None,
    in_channels: int | None = None,
    weights: str | Path | None = None,
    seed: int = 0,
    target: Target | None = None,
) -> nn.Module:
    """Builds the model that ``spec`` names, initialised by ``seed``, and loads ``weights`` where given.

    With ``target`` the weights are read straight to there, and the model is never twice in memory. ``num_classes``
    is needed by the built-ins; ``in_channels`` is 1 for them by default, and 3 elsewhere. The global random state is
    left as it was. Raises UsageError where the spec or a path names nothing, QtoolError where building or loading
    fails, or a weight is not finite.
    """

    if not isinstance(spec, str):
        raise UsageError(
            "argument 'spec'", "a model's spec as text", kind_of(spec), "write 'resnet' or FILE.py:factory"
        )

    def build() -> nn.Module:
        in_use = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
        with torch.random.fork_rng(devices=in_use):  # all of which are seeded; to ask the others takes their memory
            torch.manual_seed(seed)
            return _build(spec, num_classes, in_channels, str(weights) == PRETRAINED)

    if target is not None:
        return create(build, _safetensors(weights), target)
    model = build()
    if weights is not None and str(weights) != PRETRAINED:
        load_weights(model, weights)
    check_finite(model, f"model '{spec}'")
    return model


def _safetensors(weights: str | Path | None) -> Path:
    """The safetensors file that ``weights`` names. Raises UsageError where it is another kind of file, or none."""
    file = weights_file(_weights_path(weights)) if weights is not None and str(weights) != PRETRAINED else None
    if file is None or file.suffix != ".safetensors":
        got = "no --weights" if weights is None else str(weights)
        raise UsageError(WHERE, "--weights FILE.safetensors or a run directory", got, "name such a file")
    return file


def _weights_path(weights: object) -> Path:
    expected = "a file of weights, a run directory or 'pretrained'"
    return path_of(weights, "argument 'weights'", expected, "load what you have into the model, and pass that")


def weights_file(path: Path) -> Path:
    """The file behind ``--weights``: the path itself, or the weights in a run directory, whose hash is checked.

    Raises UsageError for a folder that a library saved a model in, QtoolError for one without a finished training.
    """
    if not path.is_dir():
        return path
    if (path / "config.json").is_file() and not has_result(path, "train"):
        do = f"pass --weights {PRETRAINED} with --model transformers:{path}, or name a file of weights in it"
        raise UsageError(f"weights '{path}'", "a file or a run directory", "a model's folder, with a config.json", do)
    return output_path(path, read_result(path, "train"), "model")


def _build(spec: str, num_classes: int | None, in_channels: int | None, pretrained: bool) -> nn.Module:
    library, colon, name = spec.partition(":")
    if colon and library in LIBRARIES and name:
        return LIBRARIES[library](name, num_classes, in_channels, pretrained)
    if pretrained:
        raise UsageError(
            "--weights pretrained", f"a model of {', '.join(LIBRARIES)}", f"'{spec}'", "name a weights file"
        )
    if spec in BUILT_INS:
        if num_classes is None:
            raise QtoolError(f"model '{spec}'", "a number of classes", "none", "use data with class labels, or text")
        return BUILT_INS[spec](num_classes, in_channels or 1)
    if is_factory(spec):
        return _from_factory(spec)
    if (suffix := Path(spec).suffix) in FILES:
        raise UsageError(f"model '{spec}'", "what builds a model", *FILES[suffix])
    kinds = [*BUILT_INS, *(f"{library}:NAME" for library in LIBRARIES), "FILE.py:factory"]
    raise UsageError(f"model '{spec}'", "a model spec", "none of that name", nearest(spec, kinds))


def _from_factory(spec: str) -> nn.Module:
    model = load_factory(spec)()
    if not isinstance(model, nn.Module):
        raise QtoolError(f"model '{spec}'", "an nn.Module", type(model).__name__, "return the model itself")
    return model


def load_weights(model: nn.Module, path: str | Path) -> None:
    """Loads weights into ``model`` in place, all of its keys and no others, in the model's own dtypes.

    What was made in 16 bits becomes as wide as the file has it: a training in float32 leaves that. From a run directory
    buffers come as large as the training left them.

    ``path`` is a ``.safetensors``, ``.pt`` or ``.pth`` file or a run directory with a finished train stage. Raises
    UsageError for a path that is not there or has another suffix; QtoolError for a file that does not open, holds code,
    is of another architecture (the first keys and shapes that differ are named) or holds NaN or infinity. The model is
    unchanged then.
    """
    path = _weights_path(path)
    file = weights_file(path)
    where = f"weights '{file}'"
    state = _renamed(_read_state(file, where), model)
    free = buffers_of(model).keys() if path.is_dir() else ()  # of a training of this model
    _require_same_keys(where, model, state, free)
    _require_finite(where, model, state)
    grow(model, {key: state[key] for key in free if key in state})
    for key, value in model.state_dict(keep_vars=True).items():
        if value.dtype in NARROW and key in state and state[key].dtype == torch.float32:
            value.data = value.data.float()
    model.load_state_dict(state, strict=False)  # the keys were compared; what is missing is tied to what is there


def _read_state(file: Path, where: str) -> dict[str, Tensor]:
    if file.suffix not in SUFFIXES:
        raise UsageError(where, f"a file ending in {', '.join(SUFFIXES)}", f"'{file.name}'", "convert the file")
    if not file.is_file():
        beside = [p.name for p in file.parent.glob("*") if p.suffix in SUFFIXES] if file.parent.is_dir() else []
        raise UsageError(where, "a file", "none there", nearest(file.name, beside) if beside else "check the path")
    try:
        if file.suffix == ".safetensors":
            tensors_there: dict[str, Tensor] = load_file(file)
            return tensors_there
        state = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise QtoolError(
            where, "tensors and nothing else", f"a pickle that asks for code ({_first_sentence(error)})",
            "save model.state_dict() alone, or use safetensors",
        ) from error  # fmt: skip
    except PermissionError as error:
        raise unreadable(where, f"a whole {file.suffix} file", error) from error
    except (SafetensorError, RuntimeError, EOFError, OSError, ValueError, KeyError, IndexError, TypeError) as error:
        got = f"{type(error).__name__}: {_first_sentence(error)}"
        raise QtoolError(where, f"a whole {file.suffix} file", got, "copy or save the file again") from error
    return _unwrapped(where, state)


def _first_sentence(error: Exception) -> str:
    """What torch itself says, without its advice to load the file unsafely."""
    text = one_line(error)
    start = text.find("WeightsUnpickler error: ")
    text = text[start + len("WeightsUnpickler error: ") :] if start >= 0 else text
    return text.split(". ")[0][:160]


def _unwrapped(where: str, state: Any) -> dict[str, Tensor]:
    if isinstance(state, Mapping):
        state = next((state[key] for key in WRAPPERS if isinstance(state.get(key), Mapping)), state)
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        got = type(state).__name__ if not isinstance(state, Mapping) else f"keys {', '.join(map(str, list(state)[:5]))}"
        raise QtoolError(where, "a state dict: names to tensors", got, "save model.state_dict()")
    return dict(state)


def _renamed(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """The weights without the prefix of a wrapper that was around the model they are of, and is not around this one."""
    own = model.state_dict()
    for prefix in PREFIXES * 2:  # in either order
        if state and all(key.startswith(prefix) for key in state) and not any(key.startswith(prefix) for key in own):
            state = {key.removeprefix(prefix): value for key, value in state.items()}
    return state


def _require_same_keys(where: str, model: nn.Module, state: Mapping[str, Tensor], free: Collection[str]) -> None:
    """Raises QtoolError where names or shapes differ; ``free`` ones may have any shape, or be the state's alone."""
    own = model.state_dict()
    there = {_place(own[key]) for key in state if key in own and own[key].numel()}
    missing = [key for key, value in own.items() if key not in state and _place(value) not in there]
    unexpected = [key for key in state if key not in own and key not in free]
    shapes = [
        f"{key} {tuple(value.shape)} where the model has {tuple(own[key].shape)}"
        for key, value in state.items() if key in own and key not in free and value.shape != own[key].shape
    ]  # fmt: skip
    parts = [("missing", missing), ("not in the model", unexpected), ("other shapes", shapes)]
    if got := "; ".join(f"{name}: {few(keys)}" for name, keys in parts if keys):
        raise QtoolError(where, "weights of this architecture", got, OTHER_WEIGHTS)


def _place(value: Tensor) -> tuple[int, int]:
    return value.data_ptr(), value.numel()


def _require_finite(where: str, model: nn.Module, state: Mapping[str, Tensor]) -> None:
    hiding = masks(model)
    bad = [key for key, value in state.items() if not is_finite(value, mask=key in hiding)]
    if bad:
        got = f"NaN or infinity in {few(bad)}"
        raise QtoolError(where, "finite weights", got, "load other weights, or train with a lower learning rate")


def check_finite(model: nn.Module, where: str = "model") -> None:
    """Raises QtoolError naming the parameters and buffers that hold NaN or infinity: see ``masks``.

    Raises UsageError where one has no shape yet.
    """
    require_shapes(model, where)
    state = {key: value for key, value in model.state_dict().items() if isinstance(value, Tensor)}
    _require_finite(where, model, state)


def require_shapes(model: nn.Module, where: str) -> None:
    """Raises UsageError for a parameter or a buffer of a lazy module, which has no shape before it ran."""
    values = (*model.named_parameters(), *model.named_buffers())
    lazy = [name for name, value in values if is_lazy(value)]
    if lazy:
        raise UsageError(where, "parameters with shapes", f"'{lazy[0]}' without one", "call the model on a batch first")


def copied(model: nn.Module, memo: Mapping[int, Any]) -> nn.Module:
    """A deep copy of ``model``, in which ``memo`` says what stands for what, by id.

    Attributes that cannot be copied are shared: a library, a lock, an iterator, a tensor that was computed.
    """
    with suppress(Exception):
        return copy.deepcopy(model, dict(memo))
    shared = dict(memo)
    for module in model.modules():
        mine = {**vars(module), "_parameters": None, "_modules": None, "_buffers": None}
        for value in (*mine.values(), *module._buffers.values()):
            if id(value) not in memo and not _is_copied(value, memo):
                shared[id(value)] = value
    return copy.deepcopy(model, shared)


def _is_copied(value: Any, memo: Mapping[int, Any]) -> bool:
    try:
        copy.deepcopy(value, dict(memo))
    except Exception:  # whatever its class raises
        return False
    return True


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Gives every module the mode back, training or evaluation, that it had before the block."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def shortcut(taken: bool) -> AbstractContextManager[None]:
    """Whether ``nn.TransformerEncoder`` takes its shortcut in inference, or calls its layers there too.

    It takes their weights itself, and so passes by what lies on them (an adapter). Of padded sequences it returns 0
    behind the end, where the layers compute something, in training and in a captured graph. torch has one setting for
    all threads: it is off while any of them wants it off.
    """
    return nullcontext() if taken else _without_shortcut()


@shared
@contextmanager
def _without_shortcut() -> Iterator[None]:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """Has transformers' models return no keys and values, which are for generating."""
    with _configured(model, "use_cache", True, False):
        yield


@contextmanager
def capturable(model: nn.Module) -> Iterator[None]:
    """Has transformers' models be as a graph of them can be: without a cache, and with experts that ONNX can tell.

    What the experts compute is the same; by default they sort tokens and multiply groups of them, which no file can.
    """
    with without_cache(model), _configured(model, "_experts_implementation", "grouped_mm", "batched_mm"):
        yield


@contextmanager
def _configured(model: nn.Module, name: str, usual: object, now: object) -> Iterator[None]:
    """Sets what transformers' configurations in a model have as usual, and sets it back."""
    configs = {id(found): found for module in model.modules() if (found := getattr(module, "config", None)) is not None}
    changed = [config for config in configs.values() if getattr(config, name, None) == usual]
    for config in changed:
        setattr(config, name, now)
    try:
        yield
    finally:
        for config in changed:
            setattr(config, name, usual)
