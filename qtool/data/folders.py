"""Encoded images: folders of image files, and the sets of the ``datasets`` library.

Each read decodes with Pillow, so that a set larger than memory can be used; what a set weighs is its list of names.
Images are grey if the first one is, colour otherwise. Without a size, all must have the size of the first; with one,
the shorter side is brought to it (bilinear with antialiasing, as Pillow does) and the centre is cut out. What is
hidden (a name that begins with a dot) is no image. Images of more than 8 bits a channel are refused, since Pillow would
cut their values off; of an animation the first picture is taken.

Left out on purpose: decoding in parallel, and the other sizes and crops of the world; a factory can have them all.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qtool.data.datasets import Images, Labels, absent
from qtool.errors import QtoolError, UsageError, nearest, one_line
from qtool.system.imports import imported

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
DEEP = ("I", "F")  # modes of 16 and 32 bits: I;16, I;16B, I, F
Open = Callable[[int], Any]  # position -> PIL.Image


def read_imagefolder(text: str) -> tuple[dict[str, Images], tuple[str, ...]]:
    """``train`` and ``test`` or ``validation`` (or ``val``) or both from ``DIR[:SIZE]``, and the sorted class names.

    The content is named by the files' names and sizes in bytes; the pixels are not hashed.
    """
    place, _, size = text.rpartition(":")
    path, side = (Path(place), int(size)) if place and size.isdecimal() else (Path(text), None)
    if side == 0:
        raise UsageError(f"data 'imagefolder:{text}'", "a size of at least 1", "0", "write for example :224")
    folders = {part: path / part for part in ("train", "test", "validation", "val") if (path / part).is_dir()}
    if path.is_dir() and ("train" not in folders or len(folders) == 1):
        there = ", ".join(sorted(p.name for p in path.iterdir())[:20]) or "nothing"
        expected = "folders 'train' and 'test' (or 'val'), in each a folder for each class"
        raise UsageError(f"data '{path}'", expected, there, "move or link the images into them")
    names = tuple(_classes(folders.get("train", path / "train")))
    like: list[str] = []
    parts = {part.replace("val", "validation") if part == "val" else part: _folder(folder, names, side, like)
             for part, folder in folders.items()}  # fmt: skip
    return parts, names


def _classes(folder: Path) -> list[str]:
    if not folder.is_dir():
        raise absent(folder, "a folder")
    names = sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    if not names:
        raise QtoolError(f"'{folder}'", "a folder for each class", "none", "sort the images into class folders")
    return names


def _folder(folder: Path, names: tuple[str, ...], side: int | None, like: list[str]) -> Images:
    files: list[Path] = []
    labels: list[int] = []
    for name in _classes(folder):
        if name not in names:
            raise QtoolError(f"'{folder}'", "the classes of the training part", f"'{name}'", nearest(name, names))
        found = _image_files(folder / name)
        if not found and folder.name == "train":
            raise _no_images(folder / name)
        files += found
        labels += [names.index(name)] * len(found)
    if not files:
        raise _no_images(folder)
    listing = [f"{file.relative_to(folder).as_posix()} {_size(file)}" for file in files]
    places = [file.absolute() for file in files]  # they are opened later, perhaps from another current folder
    return decoded(
        partial(_opened, places), partial(_told, files), np.array(labels), side, like,
        hashlib.sha256("\n".join([f"size {side}", *listing]).encode()).hexdigest(),
    )  # fmt: skip


def _opened(files: Sequence[Path], index: int) -> Any:
    return _pillow().open(files[index])


def _told(files: Sequence[Path], index: int) -> str:
    return f"'{files[index]}'"


def _image_files(folder: Path) -> list[Path]:
    found = (p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES)
    return sorted(p for p in found if not any(part.startswith(".") for part in p.relative_to(folder).parts))


def _no_images(folder: Path) -> QtoolError:
    return QtoolError(f"'{folder}'", f"image files ({', '.join(SUFFIXES)})", "none", "add some, or remove the folder")


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError as error:
        raise QtoolError(f"'{file}'", "a file that can be read", str(error.strerror), "remove or replace it") from error


def decoded(
    open_image: Open, where: Callable[[int], str], labels: Labels, side: int | None, like: list[Any], sha256: str,
    resized: str = "append :SIZE to the spec",
) -> Images:  # fmt: skip
    """Images that are decoded as they are read. ``like``, empty at first, gets the set's mode and size.

    ``resized`` is what a user is to do where sizes differ.
    """
    read = _Decoder(open_image, where, side, like, resized)
    channels, height, width = read(torch.tensor([0]))[0].shape
    resize = "exact" if side is None else "shorter-side"
    return Images(read, labels, (channels, height, width), sha256, resize, decoded=True)


@dataclass(frozen=True)
class _Decoder:
    """Reads rows as pixels, in any process that it is sent to."""

    open_image: Open
    where: Callable[[int], str]
    side: int | None
    like: list[Any]
    resized: str

    def __call__(self, rows: Tensor) -> Tensor:
        return torch.from_numpy(np.stack([self._pixels(i) for i in rows.tolist()]))

    def _pixels(self, index: int) -> Any:
        where, like = self.where, self.like
        try:
            with self.open_image(index) as opened:
                picture = self._picture(opened, index)
        except QtoolError:
            raise
        except Exception as error:  # of a damaged file each of Pillow's readers raises its own kind
            got = one_line(str(error) or type(error).__name__)
            raise QtoolError(where(index), "an image that Pillow decodes", got, "remove or replace it") from error
        found = [picture.mode, picture.size]
        like.extend(found[len(like) :])
        if found != like:
            got = "{}×{} pixels".format(*picture.size)
            raise QtoolError(where(index), "{}×{} pixels, as the first".format(*like[1]), got, self.resized)
        array = np.array(picture)
        return array[None] if array.ndim == 2 else array.transpose(2, 0, 1)

    def _picture(self, opened: Any, index: int) -> Any:
        """An opened image upright, in the set's mode and at its size."""
        image, ops = _pillow(), importlib.import_module("PIL.ImageOps")
        where, like, side = self.where, self.like, self.side
        picture = ops.exif_transpose(opened)
        if picture.mode.startswith(DEEP):
            do = "save it with 8 bits, or read it with a factory"
            raise QtoolError(where(index), "8 bits a channel", f"Pillow's mode '{picture.mode}'", do)
        mode = like[0] if like else ("L" if picture.mode in ("1", "L") else "RGB")
        if mode == "L" and picture.mode not in ("1", "L"):
            raise QtoolError(where(index), "a grey image, as the first one", picture.mode, "convert one or all")
        picture = picture.convert(mode)
        return picture if side is None else ops.fit(picture, (side, side), image.Resampling.BILINEAR)


def read_hub(text: str) -> tuple[dict[str, Images], tuple[str, ...] | None]:
    """The parts of ``NAME[:SPLIT]`` of the ``datasets`` library; SPLIT (``train[:2000]``, say) is what is trained on,
    and ``train+validation`` has what is validated on held out of both.

    The set needs one image column and one of class labels.
    """
    name, _, split = text.partition(":")
    library = imported("datasets", f"data 'hf:{text}'", "qtool[datasets]")
    try:
        whole = library.load_dataset(name)
        train = library.load_dataset(name, split=split) if split else whole.get("train")
    except Exception as error:
        raise QtoolError(
            f"data 'hf:{text}'", "a set that opens", f"{type(error).__name__}: {error}", "check it"
        ) from error
    splits = {"train": train} | {part: whole[part] for part in ("test", "validation") if part in whole}
    named = {part.partition("[")[0] for part in split.split("+")}
    judged = "test" if "test" in splits else "validation"
    if judged in named & set(splits):
        expected, do = f"other samples to train on than of '{judged}', which is judged", "name others, or use a factory"
        raise QtoolError(f"data 'hf:{text}'", expected, f"'{split}'", do)
    if "validation" in named:  # it is trained on: what is validated on is held out, as where there is none
        splits.pop("validation", None)
    if train is None or len(splits) == 1:
        got = ", ".join(whole) or "none"
        raise QtoolError(f"data 'hf:{text}'", "a train and a test split", got, "use a factory to split it")
    image, label, names = _columns(text, train)
    like: list[Any] = []
    return {part: _split(f"hf:{text}, {part}", rows, image, label, like) for part, rows in splits.items()}, names


def _columns(text: str, rows: Any) -> tuple[str, str, tuple[str, ...] | None]:
    kinds = {column: type(feature).__name__ for column, feature in rows.features.items()}
    images = [column for column, kind in kinds.items() if kind == "Image"]
    labels = [column for column, kind in kinds.items() if kind == "ClassLabel"]
    if len(images) != 1 or len(labels) != 1:
        got = ", ".join(f"{column}: {kind}" for column, kind in kinds.items())
        raise QtoolError(f"data 'hf:{text}'", "one Image and one ClassLabel column", got, "use a factory")
    return images[0], labels[0], tuple(rows.features[labels[0]].names)


def _split(where: str, rows: Any, image: str, label: str, like: list[Any]) -> Images:
    given = list(rows[label])
    if None in given:
        got = f"None, one of {given.count(None)} such"
        raise QtoolError(f"{where}[{given.index(None)}]", "a label", got, "leave such samples out with a factory")
    labels = np.array(given, dtype=np.int64)
    digest = hashlib.sha256(f"{where} {getattr(rows, '_fingerprint', '')} {len(labels)}".encode() + labels.tobytes())
    cell, row = partial(_cell, rows, image), partial(_row, where)
    return decoded(cell, row, labels, None, like, digest.hexdigest(), "use a factory that resizes them")


def _cell(rows: Any, column: str, index: int) -> Any:
    return rows[index][column]


def _row(where: str, index: int) -> str:
    return f"{where}[{index}]"


def _pillow() -> Any:
    return imported("PIL.Image", "image files", "pillow")
