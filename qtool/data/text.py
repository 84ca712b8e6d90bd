"""Text: files become one stream of tokens, packed into windows of equal length.

Tokens are the bytes of the file (a vocabulary of 256), or what a ``tokenizer.json`` of the ``tokenizers`` library makes
of it. Documents (the file, or every ``*.txt`` of a folder in the order of their names) are joined into one stream t,
with an end-of-text token between them where the tokenizer has one (byte 0 for bytes), and the stream is cut::

    input  i = t[iL], …, t[iL+L-1]        target i = t[iL+1], …, t[iL+L]

so no place of a batch is padding but the end of the last window. Two kinds of targets are ``IGNORED``: that padding,
and the first token of a document, which nothing before it announces. Windows therefore count different numbers of
tokens, and means have to be weighted by them.

The parts are contiguous, as neighbouring windows share words: eight tenths to train, one to validate, one to test.

Left out on purpose: attention that stops at a document's beginning, and tokenizing a text larger than memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from qtool.data.datasets import absent
from qtool.data.labels import IGNORED
from qtool.errors import QtoolError, UsageError, one_line
from qtool.system.imports import imported

LENGTH = 128
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")


@dataclass(frozen=True)
class Text:
    """The three parts of a text, the size of its vocabulary, and a sha256 that names tokens and windows."""

    parts: dict[str, Windows]
    vocabulary: int
    sha256: str


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows ``first`` … ``last``-1 of a stream: (L tokens, L targets) as int64 for an index, N of them for a batch.

    ``begins`` marks the tokens with which a document begins.
    """

    def __init__(self, stream: Tensor, begins: Tensor, length: int, first: int, last: int) -> None:
        self.stream, self.begins, self.length, self.first, self.last = stream, begins, length, first, last

    def __len__(self) -> int:
        return self.last - self.first

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        inputs, targets = self.batch([index % len(self)])
        return inputs[0], targets[0]

    def batch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The windows at ``indices``, stacked."""
        starts = (torch.as_tensor(indices) + self.first) * self.length
        at = starts[:, None] + torch.arange(self.length + 1)
        beyond = at >= len(self.stream)
        at = at.clamp(max=len(self.stream) - 1)
        tokens = self.stream[at].long()
        inputs = tokens[:, :-1].masked_fill(beyond[:, :-1], 0)
        return inputs, tokens[:, 1:].masked_fill((beyond | self.begins[at])[:, 1:], IGNORED)


def read_text(text: str) -> Text:
    """Opens ``PATH[:LENGTH][:TOKENIZER.json]``. Raises UsageError for a path that names nothing, QtoolError for a text
    that is too short or does not open.
    """
    path, length, tokenizer = parse(text)
    documents = [_read(file) for file in _files(path)]
    encoder = _Bytes() if tokenizer is None else _Tokenizer(tokenizer)
    stream, begins = _packed([encoder.encode(document) for document in documents], encoder.end)
    count = -(-(len(stream) - 1) // length)
    if count < 3:
        got = f"{len(stream)} tokens, {max(count, 0)} windows of {length}"
        raise QtoolError(f"data 'text:{text}'", "at least 3 windows", got, "give a longer text or a shorter length")
    tenth = max(1, count // 10)
    bounds = {"train": (0, count - 2 * tenth), "validation": (count - 2 * tenth, count - tenth)}
    parts = {
        part: Windows(stream, begins, length, *b) for part, b in (bounds | {"test": (count - tenth, count)}).items()
    }
    digest = hashlib.sha256(f"{length} {encoder.size}".encode())
    digest.update(stream.numpy().tobytes() + begins.numpy().tobytes())
    return Text(parts, encoder.size, digest.hexdigest())


def parse(text: str) -> tuple[Path, int, Path | None]:
    """``PATH[:LENGTH][:TOKENIZER.json]`` in its parts.

    >>> parse("book.txt"), parse("book.txt:64:tok.json")
    ((PosixPath('book.txt'), 128, None), (PosixPath('book.txt'), 64, PosixPath('tok.json')))
    """
    rest, _, last = text.rpartition(":")
    tokenizer = Path(last) if rest and last.endswith(".json") else None
    if tokenizer is not None:
        text = rest
    rest, _, last = text.rpartition(":")
    path, length = (Path(rest), int(last)) if rest and last.isdecimal() else (Path(text), LENGTH)
    if length < 1:
        raise UsageError(f"data 'text:{text}'", "windows of at least 1 token", str(length), "write for example :128")
    return path, length, tokenizer


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise absent(path)
    if not (found := sorted(path.glob("*.txt"))):
        raise QtoolError(f"data 'text:{path}'", "*.txt files in the folder", "none", "name the file itself")
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # a mark of the order of bytes is no part of the text
    except (OSError, UnicodeDecodeError) as error:
        raise QtoolError(f"data '{path}'", "a readable text in UTF-8", one_line(error), "convert the file") from error


def _packed(documents: Sequence[Sequence[int]], end: int | None) -> tuple[Tensor, Tensor]:
    """The stream (int32), and where in it documents begin."""
    pieces: list[Any] = []
    begins: list[int] = []
    size = 0
    for document in documents:
        between = [end] if pieces and end is not None else []
        begins.append(size + len(between))
        pieces += [np.array(between, np.int32), np.asarray(document, np.int32)]
        size += len(between) + len(document)
    marked = torch.zeros(size, dtype=torch.bool)
    marked[[place for place in begins if place < size]] = True
    return torch.from_numpy(np.concatenate(pieces)), marked


class _Bytes:
    size, end = 256, 0

    def encode(self, text: str) -> Sequence[int]:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)  # type: ignore[return-value]


class _Tokenizer:
    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise absent(path)
        self.where = f"tokenizer '{path}'"
        library = imported("tokenizers", self.where, "qtool[text]")
        try:
            self.inner = library.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises a bare Exception
            raise QtoolError(
                self.where, "a tokenizer.json", one_line(error)[:200], "save it with tokenizer.save()"
            ) from error
        self.inner.no_truncation()  # files keep the settings of whoever used them last, for sentences
        self.inner.no_padding()
        known = self.inner.get_vocab()
        self.size = max(known.values()) + 1
        self.end = next((known[word] for word in _ENDS if word in known), None)

    def encode(self, text: str) -> Sequence[int]:
        try:
            ids: list[int] = self.inner.encode(text, add_special_tokens=False).ids
        except Exception as error:  # the library raises a bare Exception here, too
            do = "train it on such text, or give it a token for what it does not know"
            raise QtoolError(self.where, "tokens for all of the text", one_line(error)[:200], do) from error
        return ids
