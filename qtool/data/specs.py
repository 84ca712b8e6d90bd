"""Data: what ``--data`` means, and how samples are drawn from it.

A set has three parts, each a map-style dataset of (input, target): ``train``, ``validation`` and ``test``. Whatever
chooses (early stopping, search) chooses on ``validation``; ``test`` is judged once. A set without a validation part
has a tenth of its training part held out, stratified by label where targets are class indices, always by the same
seed, so that no stage ever validates on what another one trained on. Of a set with a validation part and no test part
(ImageNet's layout) that part is the one judged, and validation is held out as well: ``Data.split`` says so.

=============================  ===========================================================================
spec                           what it is
=============================  ===========================================================================
``fashion-mnist``              the embedded sample: 6,000 and 1,000 images, 28×28 grey, ten classes
``idx:DIR``                    MNIST-style files, gz or not
``alice[:LENGTH]``             the embedded text, *Alice's Adventures in Wonderland*, as bytes
``text:FILE[:LENGTH][:JSON]``  a text, or a folder of ``*.txt``, as bytes or by a ``tokenizer.json``
``npz:DIR`` or ``npz:FILE``    arrays ``images`` (uint8, N×H×W or N×H×W×C) and ``labels``
``imagefolder:DIR[:SIZE]``     ``train/CLASS/*.png`` and so on; with SIZE, shorter side to it and the centre
``hf:NAME[:SPLIT]``            a set of the ``datasets`` library with an image and a class-label column
``FILE.py:factory``            a function that returns a mapping: ``train``, and ``test`` or ``validation`` or both
``package.module:factory``     the same, from an installed module
=============================  ===========================================================================

A factory's mapping may also hold ``labels`` (class names), ``num_classes`` and ``preprocessing`` (see
:class:`Preprocessing`). A part may be a DataLoader of a map-style dataset (see ``loaders``). Inputs are tensors,
or tuples or dicts of tensors, and are taken as they are; a sample may also be one dict, with the target in it as
``labels`` (see ``given``), as a ``DatasetDict`` of Hugging Face has them. Where nothing is trained, samples may
be inputs alone: calibration, agreement with FP32 and contracts on it ask for no targets.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from qtool.data.datasets import Images, Labels, Preprocessing, measure, read_idx, read_npz
from qtool.data.folders import read_hub, read_imagefolder
from qtool.data.labels import IGNORED
from qtool.data.loaders import opened
from qtool.data.samples import Samples, targets_of
from qtool.data.text import LENGTH, read_text
from qtool.errors import QtoolError, UsageError, kind_of, nearest
from qtool.factories import is_factory, load_factory

__all__ = [
    "Data", "Preprocessing", "batches", "example_input", "from_mapping", "load_data", "stratified_sample", "targets_of",
]  # fmt: skip

EMBEDDED = Path(__file__).parent / "embedded"
KINDS = ("fashion-mnist", "alice", "text:FILE", "idx:DIR", "npz:DIR", "imagefolder:DIR", "hf:NAME", "FILE.py:factory")
KEYS = ("train", "test", "validation", "labels", "num_classes", "preprocessing")
MOST_CLASSES = 1_000_000
"""A greater label is an identifier: a model would get a layer with as many outputs."""
NO_TEST = "no test part: the validation part is judged as the test part, and validation is held out of train"

Part = TypeVar("Part")


@dataclass(frozen=True)
class Data:
    """A data set in three parts, and what is known of it.

    ``identity`` is a sha256 that names the content. ``num_classes`` and ``labels`` are None where targets are not class
    indices or have no names; ``preprocessing`` is None where inputs are taken as a factory gave them. ``split`` is a
    line about parts that are not used as their names say, empty where there is nothing to say.
    """

    spec: str
    train: Dataset[Any]
    validation: Dataset[Any]
    test: Dataset[Any]
    labels: tuple[str, ...] | None
    preprocessing: Preprocessing | None
    num_classes: int | None
    identity: str
    split: str = ""


def load_data(spec: str, *, seed: int = 0) -> Data:
    """Opens the set that ``spec`` names.

    ``seed`` draws the validation part of a set that has none; every stage of a run must use the same. Raises UsageError
    where the spec is not understood or names nothing, QtoolError where the content is wrong.
    """
    if not isinstance(spec, str):
        do = "write 'imagefolder:DIR', say; datasets are taken by the stages as they are"
        raise UsageError("argument 'spec'", "a data spec as text", kind_of(spec), do)
    kind, _, rest = spec.partition(":")
    if spec == "fashion-mnist":
        folder = EMBEDDED / "fashion_mnist"
        names = tuple((folder / "labels.txt").read_text(encoding="utf-8").splitlines())
        return _from_images(spec, read_npz(folder), names, seed)
    if kind == "alice":
        return _from_text(spec, f"{EMBEDDED / 'alice' / 'alice.txt'}:{rest or LENGTH}")
    if kind == "text" and rest:
        return _from_text(spec, rest)
    if kind in ("idx", "npz") and rest:
        return _from_images(spec, {"idx": read_idx, "npz": read_npz}[kind](Path(rest)), None, seed)
    if kind in ("imagefolder", "hf") and rest:
        parts, classes = {"imagefolder": read_imagefolder, "hf": read_hub}[kind](rest)
        return _from_images(spec, parts, classes, seed)
    if is_factory(spec):
        factory = load_factory(spec)
        return from_mapping(factory(), seed=seed, spec=spec, digest=factory.file_sha256 or "")
    raise UsageError(f"data '{spec}'", "a data spec", "none of that kind", nearest(spec, KINDS))


def from_mapping(mapping: Any, *, seed: int = 0, spec: str = "mapping", digest: str = "") -> Data:
    """Data from what a data factory returns; see the module for the keys.

    Every dataset's targets are read once: at once where it has ``targets`` (or ``tensors``), sample by sample
    otherwise. ``identity`` covers ``digest``, the targets, and the inputs that are held in memory (a TensorDataset, a
    list). Raises QtoolError for a missing or unknown key, for datasets that are empty or no datasets, and for targets
    out of range, naming the sample.
    """
    given = _checked_mapping(spec, mapping)
    preprocessing = given.get("preprocessing")
    if isinstance(preprocessing, Mapping):
        preprocessing = Preprocessing.from_dict(preprocessing)
    there, split = _judged({part: given[part] for part in KEYS[:3] if given.get(part) is not None})
    parts = opened(spec, there)
    parts = {part: samples.judged_as(parts["train"].verdict) for part, samples in parts.items()}
    names = tuple(map(str, given["labels"])) if given.get("labels") is not None else None
    labels = {part: samples.targets.numpy() for part, samples in parts.items() if samples.targets is not None}
    count = len(names) if names else given.get("num_classes")
    num_classes = _num_classes(spec, labels, count) if "train" in labels else count
    identity = _digest({"factory": digest} | {part: samples.content() for part, samples in parts.items()})
    train, validation = parts["train"], parts.get("validation")
    if validation is None:
        kept, held = hold_out(train.targets, len(train), seed)
        train, validation = train.subset(kept), train.subset(held)
    return Data(spec, train, validation, parts["test"], names, preprocessing, num_classes, identity, split)


def _judged(parts: Mapping[str, Part]) -> tuple[Mapping[str, Part], str]:
    """The parts with a test part, which is judged once, and a line where the validation part has to be it."""
    if "test" in parts:
        return parts, ""
    return {"test" if part == "validation" else part: value for part, value in parts.items()}, NO_TEST


def _checked_mapping(spec: str, mapping: Any) -> Mapping[str, Any]:
    if not isinstance(mapping, Mapping):
        got = type(mapping).__name__
        raise QtoolError(f"data '{spec}'", "a mapping with 'train' and 'test'", got, "return {'train': …, 'test': …}")
    for key in mapping:
        if key not in KEYS:
            raise QtoolError(f"data '{spec}'", f"keys of {', '.join(KEYS)}", repr(key), nearest(str(key), KEYS))
    judged = "test" if mapping.get("validation") is None else "validation"
    if missing := [part for part in ("train", judged) if mapping.get(part) is None]:
        do = "return 'train' too" if missing[0] == "train" else "return 'test' or 'validation' too"
        raise QtoolError(f"data '{spec}'", "'train', and 'test' or 'validation'", f"no '{missing[0]}'", do)
    return mapping


def _from_images(spec: str, given: Mapping[str, Images], names: tuple[str, ...] | None, seed: int) -> Data:
    parts, split = _judged(given)
    num_classes = _num_classes(spec, {part: images.labels for part, images in parts.items()}, len(names or ()))
    _same_shape(spec, parts)
    rows: dict[str, Sequence[int]] = {part: range(len(images.labels)) for part, images in parts.items()}
    if "validation" not in parts:
        labels = torch.from_numpy(parts["train"].labels)
        rows["train"], rows["validation"] = hold_out(labels, len(labels), seed)
    preprocessing = measure(parts["train"], rows["train"])
    sets = {part: parts.get(part, parts["train"]).at(rows[part], preprocessing) for part in rows}
    identity = _digest({part: images.sha256 for part, images in parts.items()})
    return Data(
        spec, sets["train"], sets["validation"], sets["test"], names, preprocessing, num_classes, identity, split
    )  # fmt: skip


def _from_text(spec: str, text: str) -> Data:
    """The classes of a text are the tokens of its vocabulary."""
    found = read_text(text)
    parts = found.parts
    return Data(
        spec, parts["train"], parts["validation"], parts["test"], None, None, found.vocabulary, found.sha256
    )  # fmt: skip


def _same_shape(spec: str, parts: Mapping[str, Images]) -> None:
    expected = parts["train"].shape
    for part, images in parts.items():
        if images.shape != expected:
            where = f"data '{spec}', {part}"
            raise QtoolError(where, f"C×H×W {expected} as in train", f"{images.shape}", "give all parts one image size")


def _digest(parts: Mapping[str, str]) -> str:
    return hashlib.sha256("\n".join(f"{key} {value}" for key, value in sorted(parts.items())).encode()).hexdigest()


def _num_classes(spec: str, labels: Mapping[str, Labels], known: int | None) -> int:
    """``known``, or one more than the greatest training label; raises QtoolError naming the first label beyond it.

    Targets of −100 are those that tasks do not count: a part may hold some, with others.
    """
    for part, classes in labels.items():
        if len(classes) and (classes == IGNORED).all():
            got = f"{IGNORED}, which is not counted, of all {len(classes)}"
            raise QtoolError(f"data '{spec}', {part}", "samples with a label", got, "give some of them one")
    count = known or max(0, int(labels["train"].max())) + 1
    if known is None and count > MOST_CLASSES:
        where = f"data '{spec}', train[{int(labels['train'].argmax())}]"
        do = "number the classes 0, 1, 2, …, or say with num_classes how many there are"
        raise QtoolError(where, f"the index of a class, below {MOST_CLASSES:,}", str(count - 1), do)
    for part, classes in labels.items():
        wrong = np.flatnonzero(((classes < 0) & (classes != IGNORED)) | (classes >= count))
        if len(wrong):
            where, got = f"data '{spec}', {part}[{wrong[0]}]", f"{classes[wrong[0]]}, one of {len(wrong)} such"
            raise QtoolError(where, f"a label of 0 to {count - 1}", got, "correct the labels or the number of classes")
    return count


def hold_out(targets: Tensor | None, count: int, seed: int) -> tuple[list[int], list[int]]:
    """Splits ``count`` positions into nine tenths and one tenth, each rising; by label where ``targets`` are given."""
    if count < 2:
        raise QtoolError("data, train", "at least 2 samples", str(count), "add samples or give a validation part")
    held = sample(targets, count, max(1, count // 10), seed)
    without = set(held)
    return [i for i in range(count) if i not in without], held


def stratified_sample(dataset: Any, count: int, seed: int) -> list[int]:
    """``count`` positions of ``dataset``, rising, drawn by ``seed``; labels keep their shares where there are any.

    Raises QtoolError where ``count`` is less than 1 or more than the dataset holds.
    """
    if not 1 <= count <= len(dataset):
        raise QtoolError("sample", f"1 to {len(dataset)} samples", str(count), "ask for as many as there are")
    return sample(targets_of(dataset), len(dataset), count, seed)


def sample(targets: Tensor | None, total: int, count: int, seed: int) -> list[int]:
    """``count`` of ``total`` positions; each label's share as near as whole numbers allow (largest remainders)."""
    draw = np.random.default_rng(seed)
    labels = np.zeros(total, np.int64) if targets is None else targets.numpy()
    groups = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    shares = np.array([len(group) for group in groups]) * (count / total)
    quota = np.floor(shares + 1e-9).astype(int)
    largest = np.argsort(quota - shares, kind="stable")
    quota[largest[: count - quota.sum()]] += 1
    chosen = [draw.choice(group, size, replace=False) for group, size in zip(groups, quota, strict=True)]
    return sorted(int(i) for i in np.concatenate(chosen))


def batches(dataset: Any, batch_size: int, *, order: Sequence[int] | None = None) -> Iterator[tuple[Any, Any]]:
    """Stacked (input, target) batches in ``order`` (by default as stored); the last may be short.

    Tensors of a TensorDataset or of an image set are indexed, other datasets read sample by sample. Raises QtoolError
    naming the sample whose input holds NaN or infinity, is float64, or has another shape.
    """
    source: Any = dataset if hasattr(dataset, "batch") else Samples("data", dataset, read_targets=False)
    order = range(len(source)) if order is None else order
    for start in range(0, len(order), batch_size):
        yield source.batch(list(order[start : start + batch_size]))


def example_input(data: Any) -> Any:
    """A batch of two inputs, for capture: ``torch.export`` would take a batch of one for a constant."""
    dataset = data.train if isinstance(data, Data) else data
    return next(batches(dataset, 2))[0]
