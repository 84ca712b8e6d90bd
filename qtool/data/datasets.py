"""Image sets: what lies on disk becomes normalised float32 samples.

Pixels stay uint8 as stored, in memory where the set is a few arrays, on disk where it is a folder of files, and are
normalised as they are fetched:

    x = (pixel * scale - mean[c]) / std[c],    scale = 1 / 255

in float32 and in that order, so that numpy on a phone gives the same bits. ``mean`` and ``std`` belong to the data:
they are measured on the training part (exactly, from 256 counts a channel) and travel with the artifact.

Left out on purpose: augmentation, and resizing beyond "shorter side, then centre". A set that needs more is a factory.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from qtool.errors import QtoolError, UsageError, nearest

Pixels = NDArray[np.uint8]
Labels = NDArray[np.int64]
STATISTICS_IMAGES = 2048  # image files that are decoded for mean and std; evenly spaced through the training part


@dataclass(frozen=True)
class Preprocessing:
    """What was done to a pixel before the model saw it; a file without it cannot be used on new images.

    ``mean`` and ``std`` are per channel, in units of ``pixel * scale``. ``size`` is (height, width); ``resize`` says
    how an image gets there: ``exact`` (it has it), or ``shorter-side`` (shorter side to it, bilinear, then centre).
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    scale: float = 1 / 255
    size: tuple[int, int] = (0, 0)
    resize: str = "exact"
    layout: str = "NCHW"

    def apply(self, pixels: Tensor) -> Tensor:
        """uint8 N×C×H×W pixels as normalised float32 of the same shape."""
        mean, std = (torch.tensor(v, dtype=torch.float32).view(1, -1, 1, 1) for v in (self.mean, self.std))
        return pixels.to(torch.float32).mul_(self.scale).sub_(mean).div_(std)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON and for a file's metadata."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Preprocessing:
        """The inverse of :meth:`as_dict`, lists accepted for tuples."""
        plain: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in values.items()
        }
        return cls(**plain)


class ImageSet(Dataset[tuple[Tensor, Tensor]]):
    """Labelled images, normalised as they are fetched: (C×H×W float32, int64) for an index, N of them for a batch.

    ``read`` gives the uint8 pixels (N×C×H×W) of the rows it is handed (int64), from memory or from files.
    """

    def __init__(self, read: Callable[[Tensor], Tensor], targets: Tensor, preprocessing: Preprocessing) -> None:
        self.read, self.targets, self.preprocessing = read, targets, preprocessing

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        images, targets = self.batch([index % len(self)])
        return images[0], targets[0]

    def batch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The samples at ``indices``, stacked."""
        rows = torch.as_tensor(indices)
        return self.preprocessing.apply(self.read(rows)), self.targets[rows]


@dataclass(frozen=True)
class Images:
    """One part of a set as stored: how to read pixels, the labels, and a sha256 that names the content."""

    read: Callable[[Tensor], Tensor]
    labels: Labels
    shape: tuple[int, int, int]
    sha256: str
    resize: str = "exact"
    decoded: bool = False  # each read opens and decodes a file

    def at(self, positions: Sequence[int], preprocessing: Preprocessing) -> ImageSet:
        """The images at ``positions`` as a dataset."""
        rows = torch.as_tensor(positions)
        labels = torch.from_numpy(self.labels)[rows]
        return ImageSet(partial(_read_at, self.read, rows), labels, preprocessing)


def _read_at(read: Callable[[Tensor], Tensor], positions: Tensor, rows: Tensor) -> Tensor:
    """The pixels of ``rows`` among the images at ``positions``: a function of a module, which other processes find."""
    return read(positions[rows])


def _rows_of(pixels: Tensor, rows: Tensor) -> Tensor:
    return pixels[rows]


def in_memory(where: str, images: NDArray[Any], labels: NDArray[Any]) -> Images:
    """Checks arrays (uint8 N×H×W or N×H×W×C; N whole numbers) and keeps them as N×C×H×W pixels."""
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or 0 in images.shape:
        got = f"{images.dtype} {'×'.join(map(str, images.shape)) or 'scalar'}"
        raise QtoolError(where, "images as uint8, N×H×W or N×H×W×C, none of them 0", got, "convert the images")
    if images.ndim == 4 and images.shape[1] <= 4 < images.shape[3]:
        got = f"{'×'.join(map(str, images.shape))}, where only the second is a number of channels"
        raise QtoolError(where, "images as N×H×W×C", got, "store images.transpose(0, 2, 3, 1)")
    if labels.shape != images.shape[:1] or labels.dtype.kind not in "iu":
        got = f"{labels.dtype} of shape {labels.shape}"
        raise QtoolError(where, f"{len(images)} whole-number labels", got, "give one class index per image")
    pixels = np.ascontiguousarray(images[:, None] if images.ndim == 3 else images.transpose(0, 3, 1, 2))
    classes = labels.astype(np.int64)
    digest = hashlib.sha256(f"{pixels.shape}".encode())
    digest.update(pixels.data)
    digest.update(np.ascontiguousarray(classes).data)
    stored = torch.from_numpy(pixels)
    channels, height, width = pixels.shape[1:]
    return Images(partial(_rows_of, stored), classes, (channels, height, width), digest.hexdigest())


def measure(train: Images, positions: Sequence[int]) -> Preprocessing:
    """Mean and standard deviation per channel over the images at ``positions``, from exact counts of each pixel value.

    A channel that never varies gets std 1: there is nothing to scale. Image files are sampled, see STATISTICS_IMAGES.
    """
    if train.decoded and len(positions) > STATISTICS_IMAGES:
        even = np.linspace(0, len(positions) - 1, STATISTICS_IMAGES).round().astype(int)
        positions = [positions[i] for i in even]
    counts = torch.zeros(train.shape[0], 256, dtype=torch.float64)
    for start in range(0, len(positions), 256):
        pixels = train.read(torch.as_tensor(positions[start : start + 256]))
        counts += torch.stack([torch.bincount(channel.reshape(-1), minlength=256) for channel in pixels.unbind(1)])
    values = torch.arange(256, dtype=torch.float64) / 255
    share = counts / counts.sum(1, keepdim=True)
    mean = share @ values
    std = (share * (values - mean[:, None]) ** 2).sum(1).sqrt()
    std[std == 0] = 1.0
    return Preprocessing(tuple(mean.tolist()), tuple(std.tolist()), size=train.shape[1:], resize=train.resize)


def read_npz(path: Path) -> dict[str, Images]:
    """``train`` and ``test`` or ``validation`` (or ``val``) or both from a folder of npz files, or from one file.

    A folder holds ``train.npz`` and so on, each with ``images`` and ``labels``; one file holds ``train_images``,
    ``train_labels`` and so on.
    """
    if path.is_dir():
        names = {"train": "train", "test": "test", "val": "validation", "validation": "validation"}
        files = {part: path / f"{name}.npz" for name, part in names.items() if (path / f"{name}.npz").exists()}
        files = {part: files.get(part, path / f"{part}.npz") for part in _parts(files)}
        return {part: _npz_part(file, _open_npz(file), "") for part, file in files.items()}
    arrays = {re.sub("^val_", "validation_", key): value for key, value in _open_npz(path).items()}
    return {part: _npz_part(path, arrays, f"{part}_") for part in _parts({key.split("_")[0] for key in arrays})}


def _parts(there: Collection[str]) -> list[str]:
    """Those of a set, the train part first: what has a validation part needs no test part."""
    needed = ("train",) if "validation" in there else ("train", "test")
    return [part for part in ("train", "test", "validation") if part in there or part in needed]


def _npz_part(path: Path, arrays: Mapping[str, NDArray[Any]], prefix: str) -> Images:
    names = (f"{prefix}images", f"{prefix}labels")
    if missing := [name for name in names if name not in arrays]:
        got = ", ".join(arrays) or "nothing"
        raise QtoolError(f"'{path}'", f"arrays {' and '.join(names)}", got, f"add {' and '.join(missing)}")
    images, labels = (arrays[name] for name in names)
    return in_memory(f"'{path}'", images, labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels)


def _open_npz(path: Path) -> dict[str, NDArray[Any]]:
    try:
        with path.open("rb") as stream, zipfile.ZipFile(stream):  # a file that is no archive is told apart here
            return dict(np.load(stream, allow_pickle=False))
    except FileNotFoundError as error:
        raise absent(path) from error
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error, TypeError) as error:
        raise QtoolError(
            f"'{path}'", "an npz file of plain arrays", str(error), "store arrays of numbers with numpy.savez"
        ) from error


def read_idx(path: Path) -> dict[str, Images]:
    """``train`` and ``test`` from MNIST-style files: ``train-images-idx3-ubyte`` …, ``t10k-`` or ``test-``."""
    test = "t10k" if _idx_file(path, "t10k-images-idx3-ubyte") else "test"
    return {part: _idx_part(path, prefix) for part, prefix in (("train", "train"), ("test", test))}


def _idx_part(path: Path, prefix: str) -> Images:
    arrays = []
    for name in (f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte"):
        file = _idx_file(path, name)
        if file is None:
            raise absent(path / f"{name}.gz")
        arrays.append(_idx_array(file))
    return in_memory(f"'{path / prefix}-*'", *arrays)


def _idx_file(path: Path, name: str) -> Path | None:
    dotted = name.replace("-idx", ".idx")  # both spellings are in circulation
    found = (path / f"{stem}{end}" for stem in (name, dotted) for end in ("", ".gz"))
    return next((file for file in found if file.is_file()), None)


def _idx_array(path: Path) -> NDArray[Any]:
    """An IDX file of unsigned bytes: two zero bytes, the type 8, the rank, rank big-endian int32 sizes, the data."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        kind, rank = struct.unpack(">HBB", raw[:4])[1:] if raw[:2] == b"\0\0" else (0, 0)
        shape = struct.unpack(f">{rank}I", raw[4 : 4 + 4 * rank])
    except (OSError, EOFError, zlib.error, struct.error) as error:
        raise QtoolError(f"'{path}'", "an IDX file", str(error), "fetch the file again") from error
    if kind != 8 or len(raw) != 4 + 4 * rank + math.prod(shape):
        got = f"type {kind}, sizes {shape}, {len(raw)} bytes in all"
        raise QtoolError(f"'{path}'", "an IDX file of unsigned bytes, whole", got, "fetch the file again")
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * rank).reshape(shape).copy()  # frombuffer is read-only


def absent(path: Path, what: str = "a file") -> UsageError:
    """The error for a path that is not there, with the nearest name beside it."""
    if not path.parent.is_dir():
        return UsageError(f"data '{path}'", what, f"no folder '{path.parent}'", "check the path")
    beside = sorted(p.name for p in path.parent.iterdir())
    do = nearest(path.name, beside) if 0 < len(beside) < 30 else "check the path"
    return UsageError(f"data '{path}'", what, "nothing of that name", do)
