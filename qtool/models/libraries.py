"""Models of other libraries, by their names there: torchvision, timm and transformers, each an optional extra.

Without ``pretrained`` a library gives its architecture with random weights; nothing is downloaded but, for
transformers, the configuration that a hub name stands for. Left out on purpose: a number of input channels that a
library's own constructor does not offer.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from qtool.errors import QtoolError, UsageError, nearest, one_line
from qtool.system.imports import imported

Builder = Callable[[str, int | None, int | None, bool], nn.Module]
_ON_THE_HUB = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
"""What a name of Hugging Face's hub looks like; a relative path may too."""
_CLASSES = ("MODEL_FOR_CAUSAL_LM", "MODEL_FOR_SEQUENCE_CLASSIFICATION", "MODEL_FOR_IMAGE_CLASSIFICATION", "MODEL")
"""The tables of transformers that tell the class of a configuration, those for the tasks here first."""


def torchvision_model(name: str, num_classes: int | None, in_channels: int | None, pretrained: bool) -> nn.Module:
    """A torchvision classifier; where it is pretrained for other classes, its last layer alone starts afresh."""
    library = imported("torchvision.models", f"model 'torchvision:{name}'", "qtool[vision]")
    _known("torchvision", name, library.list_models())
    if in_channels not in (None, 3):
        raise QtoolError(f"model 'torchvision:{name}'", "images of 3 channels", str(in_channels), "use colour images")
    kwargs = {} if num_classes is None else {"num_classes": num_classes}
    fresh = _without_weights(library.get_model_builder(name))
    model: nn.Module = _built("torchvision", name, lambda: library.get_model(name, **fresh, **kwargs))
    if pretrained:
        given = _built("torchvision", name, lambda: library.get_model(name, weights="DEFAULT")).state_dict()
        own = model.state_dict()
        model.load_state_dict(
            {key: value for key, value in given.items() if key in own and own[key].shape == value.shape}, strict=False
        )
    return model


def _without_weights(builder: Callable[..., nn.Module]) -> dict[str, None]:
    """What asks for nothing to be fetched, which models with a backbone (segmentation, detection) do for it too."""
    return dict.fromkeys({"weights", "weights_backbone"} & set(inspect.signature(builder).parameters))


def timm_model(name: str, num_classes: int | None, in_channels: int | None, pretrained: bool) -> nn.Module:
    """A timm model, with timm's own handling of classes and channels."""
    library = imported("timm", f"model 'timm:{name}'", "qtool[vision]")
    _known("timm", name.partition(".")[0], library.list_models())
    model: nn.Module = _built(
        "timm", name,
        lambda: library.create_model(name, pretrained=pretrained, num_classes=num_classes, in_chans=in_channels or 3),
    )  # fmt: skip
    return model


def _logits(model: nn.Module) -> nn.Module:
    """A transformers model whose output is the logits alone, a tensor; one without a head gives what it has.

    A hook leaves its layers the names that its files, and peft, know them by.
    """
    model.register_forward_hook(_logits_of)
    return model


def _logits_of(module: nn.Module, inputs: Any, output: Any) -> Any:
    return getattr(output, "logits", output)  # an encoder of sentences gives states


def transformers_model(name: str, num_classes: int | None, in_channels: int | None, pretrained: bool) -> nn.Module:
    """The architecture that the configuration of ``name`` (a hub name or a folder) records; of its outputs the logits.

    Its weights are float32, whatever the checkpoint's are: what computes in fewer bits is the stages' to say.
    """
    _require_there(name, pretrained)
    library: Any = imported("transformers", f"model 'transformers:{name}'", "qtool[text]")
    kwargs = {} if num_classes is None else {"num_labels": num_classes}

    def build() -> nn.Module:
        config = library.AutoConfig.from_pretrained(name, **kwargs)
        config.use_cache = False  # keys and values are kept for generating, which nothing here does
        kind = _architecture(library, name, config)
        _require_vocabulary(name, config, kind, num_classes)
        if pretrained:
            return _logits(kind.from_pretrained(name, config=config, ignore_mismatched_sizes=True).float())
        return _logits(kind(config).float())

    do = "check the name and its needs" if Path(name).exists() else "check the name, which is no folder here"
    model: nn.Module = _built("transformers", name, build, do)
    return model


def _require_there(name: str, pretrained: bool) -> None:
    """Raises UsageError for a path that leads nowhere, which no hub name looks like, and for one without weights."""
    path = Path(name)
    if (path.suffix == ".json" or not _ON_THE_HUB.fullmatch(name)) and not path.exists():
        where, expected = f"model 'transformers:{name}'", "a folder, a config.json or a name of Hugging Face's hub"
        raise UsageError(where, expected, "a path to nothing", "check the path")
    if pretrained and path.is_file():
        do = f"name the folder that has them beside it: transformers:{path.parent}"
        raise UsageError("--weights pretrained", "a model with weights", f"'{name}', a configuration alone", do)


def _architecture(library: Any, name: str, config: Any) -> Any:
    recorded = (config.architectures or [""])[0]
    if not hasattr(library, recorded or "none"):
        tables = (getattr(library, f"{table}_MAPPING", {}) for table in _CLASSES)
        found = [table[type(config)] for table in tables if type(config) in table][:2]
        kinds = [(kind[0] if isinstance(kind, tuple) else kind).__name__ for kind in found]
        example = " or ".join(f'["{kind}"]' for kind in kinds or ("GPT2LMHeadModel",))
        raise QtoolError(
            f"model 'transformers:{name}'", "'architectures' in its config.json that transformers has",
            recorded or "none recorded", f'write there for example "architectures": {example}',
        )  # fmt: skip
    return getattr(library, recorded)


def _require_vocabulary(name: str, config: Any, kind: Any, needed: int | None) -> None:
    """A causal language model has an output for each token of its vocabulary, whatever the data's classes are."""
    size = getattr(config, "vocab_size", None)
    if needed and size and kind.__name__.endswith(("LMHeadModel", "ForCausalLM")) and size < needed:
        raise QtoolError(
            f"model 'transformers:{name}'", f"a vocabulary of at least the data's {needed} tokens", str(size),
            "use the model's own tokenizer.json: --data text:FILE:128:tokenizer.json",
        )  # fmt: skip


def _known(library: str, name: str, names: list[str]) -> None:
    if name not in names:
        do = nearest(name, names) if len(names) < 20 else _close(name, names)
        raise UsageError(f"model '{library}:{name}'", f"a model of {library}", "none of that name", do)


def _close(name: str, names: list[str]) -> str:
    found = nearest(name, names)
    return found if found.startswith("did") else "list them with the library's list_models()"


def _built(library: str, name: str, build: Callable[[], Any], do: str = "check the name and its needs") -> Any:
    try:
        return build()
    except QtoolError:
        raise
    except Exception as error:
        got = f"{type(error).__name__}: {one_line(error)[:300]}"
        raise QtoolError(f"model '{library}:{name}'", "a model that builds", got, do) from error


LIBRARIES: dict[str, Builder] = {
    "torchvision": torchvision_model,
    "timm": timm_model,
    "transformers": transformers_model,
}
