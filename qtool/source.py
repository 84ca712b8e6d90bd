"""Where a run comes from: model, data and task, as objects or as specs, and how a later stage finds them again.

Every result records its *source*: the specs with absolute paths, the sha256 of each user's own factory
file, the identity of the data and what was learned from it (classes, channels, preprocessing). A later
stage opens the same source from that record alone. What was given as a Python object has no spec; the
record says so, and a stage that needs it asks for the object.

A factory is code. It is run again from a record only while its file still has the recorded hash, or with
``trust``; see :func:`qtool.factories.require_same`.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qtool.artifacts import has_result, read_result
from qtool.data import labels
from qtool.data.given import labelled, require_batches
from qtool.errors import QtoolError, UsageError, kind_of, nearest
from qtool.factories import PRETRAINED, anchored, is_factory
from qtool.models.given import (
    HasModel,
    in_host_memory,
    module_of,
    open_model,
    require_float,
    require_model,
)
from qtool.system.files import require_nameable, sha256_of

if TYPE_CHECKING:
    from torch import nn

    from qtool.data.specs import Data
    from qtool.models.materialise import Target
    from qtool.tasks import Task

UNIDENTIFIED = "batches without an identity"
RESULTS = ("benchmark", "export", "quantize", "train")
CLOSEST = "search/closest"
"""Where the closest candidate is, whole, in the run directory of a contract that was not kept."""


@dataclass(frozen=True)
class Source:
    """A model, its data and its task, opened, and the record that opens them again."""

    model: nn.Module | None
    data: Any  # a Data, an iterable of batches, or None
    task: Task
    record: dict[str, Any]
    inputs: dict[str, str]

    @property
    def parts(self) -> Data | None:
        """The data where it has parts, None for a mere iterable of batches."""
        return self.data if hasattr(self.data, "train") else None


def is_run_directory(value: object) -> bool:
    """Whether ``value`` is the path of a folder in which a stage has been committed, or a contract was not kept."""
    if not isinstance(value, str | Path):
        return False
    return any(has_result(Path(value), stage) for stage in RESULTS) or has_result(Path(value) / CLOSEST, "quantize")


def require_run_directory(path: Path, stage: str) -> Path:
    """``path``, made absolute, if ``stage`` was committed there; else UsageError with the nearest folder that does."""
    require_nameable(path)
    if has_result(path, stage):
        return path.absolute()
    if not path.is_dir():
        beside = [p.name for p in path.parent.glob("*") if is_run_directory(p)] if path.parent.is_dir() else []
        do = nearest(path.name, beside) if beside else "check the path"
        got = "a file" if path.exists() else "no such folder"
        raise UsageError(f"run directory '{path}'", "a folder that a stage has written", got, do)
    patterns = ("[!.]*", CLOSEST)
    made = (file for pattern in patterns for file in path.glob(f"{pattern}/{stage}.json"))
    variants = sorted(p.parent.relative_to(path).as_posix() for p in made)
    if variants:
        raise UsageError(
            f"run directory '{path}'", f"one variant with a finished '{stage}' stage",
            f"variants {', '.join(variants)}", f"name one: {path / variants[0]}",
        )  # fmt: skip
    read_result(path, stage)  # raises, listing the stages that are there
    raise AssertionError("unreachable")


def open_source(
    model: nn.Module | HasModel | str | None,
    data: object,
    task: Task | str = "classification",
    weights: str | Path | None = None,
    *,
    seed: int = 0,
    label_smoothing: float = 0.0,
    target: Target | None = None,
    known: Mapping[str, Any] | None = None,
) -> Source:
    """Opens specs and takes objects as they are; with ``target``, see :func:`qtool.models.specs.load_model`.

    What the data do not tell (their classes, their channels) is as it is ``known``, in the record of a run. Raises
    UsageError or QtoolError for a spec that names nothing.
    """
    opened = open_data(data, seed)
    loss = open_task(task, label_smoothing)
    facts = data_facts(opened)
    facts |= {key: known.get(key) for key, value in facts.items() if known and value is None}
    module = open_model(model, facts, weights, seed, target)
    moved = labels.of_model(module) if module is not None else (known or {}).get("labels_moved")
    opened = _with_labels(opened, moved)
    specs = {"model": anchored(model), "data": anchored(data), "task": anchored(task)}
    record: dict[str, Any] = specs | {"weights": _anchored_weights(weights), "data_seed": seed} | facts
    record["labels_moved"] = moved
    record["factories"] = [entry for spec in specs.values() if spec and (entry := _factory(spec))]
    inputs = {
        "model": _identity(specs["model"], module),
        "data": getattr(opened, "identity", UNIDENTIFIED if data is not None else "none"),
        "task": _identity(specs["task"], loss),
        "weights": _weights_identity(weights, module),
    }
    return Source(module, opened, loss, record, inputs)


def recall_source(
    run: Path, stage: str, *, trust: bool = False, model: bool = False, judged: bool = False, stale: bool = False,
    argument: str = "data", data: object = None, task: Task | str | None = None, **options: Any,
) -> Source:  # fmt: skip
    """Opens the source that ``stage`` recorded in ``run``, with ``data`` and ``task`` in place of those recorded.

    With ``model`` the model too: with the weights that a training left there, or with those that another stage was
    given. The task is asked for with it, or where something is ``judged``. ``argument`` is how the caller takes data
    that no record can name. Raises QtoolError where the weights are not what they were, or nothing is recorded, and for
    a result that was marked stale, unless ``stale`` allows it.
    """
    from qtool.factories import require_same

    result = read_result(run, stage, stale=stale)
    record, trained = result["source"], stage == "train"
    for entry in record.get("factories", ()):  # an export of an object records what its data told alone
        require_same(entry, trust=trust)
    given: dict[str, Any] = {
        "data": record.get("data") if data is None else data,
        "task": record.get("task") if task is None else task,
    }
    if not (model or judged):
        given["task"] = "classification"  # which nobody asks for
    asked = ({"model": record.get("model")} if model else {}) | given
    missing = [part for part, value in asked.items() if value is None]
    if missing:
        raise QtoolError(
            f"run directory '{run}'", f"the spec of its {missing[0]}", "one that was given as a Python object",
            f"call the stage from Python with {argument if missing[0] == 'data' else missing[0]}=…",
        )  # fmt: skip
    weights = run if trained else record["weights"]
    source = open_source(
        record["model"] if model else None, given["data"], given["task"], weights if model else None,
        seed=record["data_seed"], known=record, **options,
    )  # fmt: skip
    if not model:
        return dataclasses.replace(source, record=record)
    if not trained and source.inputs["weights"] != result["inputs"]["weights"]:
        raise QtoolError(
            f"weights '{weights}'",
            f"those that '{run}' was made from",
            "others",
            "name them with --model and --weights",
        )
    return dataclasses.replace(source, record=record | ({"trained_in": str(run.resolve())} if trained else {}))


def recall_task(record: Mapping[str, Any], *, trust: bool = False) -> Task | None:
    """The task in a stage's recorded source; None where it was given as a Python object.

    Raises QtoolError where the file that it is in has changed since, unless that is trusted.
    """
    from qtool.factories import require_same

    spec = record.get("task", "classification")
    for entry in record.get("factories", ()):
        if entry["spec"] == spec:
            require_same(entry, trust=trust)
    return None if spec is None else open_task(spec)


def recall_float(run: Path, *, trust: bool = False, **options: Any) -> Source:
    """The float model of ``run`` and its data: what was trained there, or what a quantization there began with, also
    one that did not keep its contract.

    Raises UsageError where neither was done there.
    """
    begun = next((folder for folder in (run, run / CLOSEST) if has_result(folder, "quantize")), None)
    if has_result(run, "train") or begun is None:
        return recall_source(require_run_directory(run, "train"), "train", trust=trust, model=True, **options)
    trained = read_result(begun, "quantize", verify=False, stale=True)["source"].get("trained_in")
    if trained:
        return recall_source(begun / trained, "train", trust=trust, model=True, **options)
    return recall_source(begun, "quantize", trust=trust, model=True, stale=True, **options)


def open_float(
    model: nn.Module | HasModel | str | Path, data: object, task: Task | str, weights: str | Path | None, *,
    trust: bool = False, **options: Any,
) -> tuple[Source, Path | None]:  # fmt: skip
    """The source of a stage that begins with a float model, and the run directory if ``model`` names one.

    That is any Path, or text that is a run directory; with ``data``, if it is no name of a model too.
    """
    from qtool.models.specs import BUILT_INS, copied

    named = isinstance(model, str) and is_run_directory(model) and (data is None or model not in BUILT_INS)
    if isinstance(model, Path) or named:
        if weights is not None:
            raise UsageError("argument 'weights'", "none beside a run directory", str(weights), "leave one of them out")
        own = None if task == "classification" else task
        recalled = recall_float(Path(str(model)), trust=trust, data=data, task=own, **options)
        require_float(recalled.model)
        return recalled, Path(str(model))
    require_model(model)
    require_float(model)
    if weights and not isinstance(model, str):
        model = copied(module_of(model), {})  # the caller's own is left as it was
    source = open_source(model, data, task, weights, **options)
    require_float(source.model)
    return dataclasses.replace(source, model=in_host_memory(source.model)), None


def open_data(data: object, seed: int) -> Any:
    """A spec or a mapping of datasets as Data; a Data, None, or an iterable of batches as it is."""
    from qtool.data import specs as floor

    if isinstance(data, str):
        return floor.load_data(data, seed=seed)
    if data is not None and not isinstance(data, Mapping | floor.Data):
        require_batches(data)
    return floor.from_mapping(data, seed=seed) if isinstance(data, Mapping) else data


def _with_labels(data: Any, moved: bool | None) -> Any:
    """Data whose labels of tokens are ``moved`` on or not, where that is known; of a guess it is told."""
    from qtool.data.samples import Samples

    if data is None or not hasattr(data, "train"):
        return None if data is None else labelled(data, moved)
    parts = {part: getattr(data, part) for part in ("train", "validation", "test")}
    own = {part: samples for part, samples in parts.items() if isinstance(samples, Samples)}
    if moved is not None and own:
        return dataclasses.replace(data, **{p: s.judged_as(labels.Verdict(moved)) for p, s in own.items()})
    if moved is None and "train" in own and own["train"].verdict:
        own["train"].verdict.tell(own["train"].where)
    return data


def open_task(task: Task | str, label_smoothing: float = 0.0) -> Task:
    """A spec or a task object, as a task. Raises UsageError for ``label_smoothing`` of a loss of one's own."""
    from qtool.tasks import BUILT_INS, load_task, require_task

    if label_smoothing and (not isinstance(task, str) or is_factory(task)):
        expected, got = f"{' or '.join(BUILT_INS)} as the task", repr(task) if isinstance(task, str) else kind_of(task)
        raise UsageError("argument 'label_smoothing'", expected, got, "leave it out, and smooth in the task's own loss")
    if isinstance(task, str):
        return load_task(task, label_smoothing=label_smoothing)
    return require_task(task, "argument 'task'")


def has_random_weights(record: Mapping[str, Any]) -> bool:
    """Whether a recorded source is an architecture that nothing gave weights: no file, no library and no training."""
    spec = record.get("model")
    return spec is not None and not is_factory(str(spec)) and not (record.get("weights") or record.get("trained_in"))


def _anchored_weights(weights: str | Path | None) -> str | None:
    """Weights as a later stage finds them: a path made absolute, or the word for those that a library offers."""
    if not weights or str(weights) == PRETRAINED:
        return str(weights) if weights else None
    return str(Path(weights).resolve())


def _weights_identity(weights: str | Path | None, module: Any) -> str:
    """What names the weights: the hash of their file, or of what a library gave, which another version may change."""
    if not weights:
        return "none"
    if str(weights) == PRETRAINED:
        return f"{PRETRAINED} {state_hash(module.state_dict().items())}"
    return sha256_of(weights_file(Path(weights)))


def weights_file(path: Path) -> Path:
    """The file behind ``--weights``: the path itself, or the weights in a run directory."""
    return path / "model.safetensors" if path.is_dir() else path


def _factory(spec: str) -> dict[str, Any] | None:
    from qtool.factories import factory_sha256

    return {"spec": spec, "file_sha256": factory_sha256(spec)} if is_factory(spec) else None


def data_facts(data: Any) -> dict[str, Any]:
    """What later stages must know of the data without opening it."""
    from qtool.data.specs import Data, example_input

    if not isinstance(data, Data):
        return {"num_classes": None, "in_channels": None, "labels": None, "preprocessing": None, "split": ""}
    shape = tuple(getattr(example_input(data), "shape", ()))
    return {
        "num_classes": data.num_classes,
        "in_channels": shape[1] if len(shape) == 4 else None,
        "labels": data.labels,
        "preprocessing": data.preprocessing.as_dict() if data.preprocessing else None,
        "split": data.split,
    }


def _identity(spec: str | None, value: object) -> str:
    """What names a model or task: its spec with its file's hash, or for an object its type and its state's hash."""
    if spec is not None:
        entry = _factory(spec)
        return f"{spec} {entry['file_sha256']}" if entry else spec
    state: Mapping[str, Any] = getattr(value, "state_dict", dict)()
    return f"{type(value).__qualname__} {state_hash(state.items())}" if value is not None else "none"


def state_hash(state: Iterable[tuple[str, Any]]) -> str:
    """The sha256 of named values: names, types, shapes and, of tensors, the bytes."""
    digest = hashlib.sha256()
    for name, value in state:
        if getattr(value, "is_meta", False):
            got = f"'{name}' on the meta device"
            raise UsageError("argument 'model'", "weights with values", got, "load the weights into it first")
        digest.update(f"{name} {getattr(value, 'dtype', '')} {tuple(getattr(value, 'shape', ()))}\0".encode())
        if hasattr(value, "untyped_storage"):
            import torch

            from qtool.nested import raw_bytes

            whole = value.detach()
            digest.update(raw_bytes(whole if whole.layout is torch.strided else whole.to_dense()))
    return digest.hexdigest()
