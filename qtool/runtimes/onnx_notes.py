"""What an ONNX file says of itself beside its graph, read without the graph, and how it asks to be opened.

A file is a protobuf message of a few fields (``ModelProto``), each with its number, its kind and, of text and messages,
its length (https://protobuf.dev/programming-guides/encoding). The graph, one field with all weights in it, is skipped:
read by onnx it would take twice the file's size in memory, in a process whose memory and time to load are measured.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Container, Iterator
from pathlib import Path
from typing import BinaryIO

from qtool.system.machine import sums_in_32_bits

SESSION = "qtool.session"
"""Where a file's metadata tells, as a JSON object, with which options of a session it is to be opened."""
OUTPUTS = "qtool.outputs"
"""Where a file's metadata tells what the model's outputs are packed in; a file itself has them one after the other."""
EXACT_SUMS = "session.x64quantprecision"
"""The option by which products of bytes are added in 32 bits on x86 CPUs without VNNI; it changes nothing on others."""
METADATA_PROPS = 14
KEY, VALUE = 1, 2
_VARINT, _LENGTH = 0, 2
_FIXED = {1: 8, 5: 4}


def metadata(path: Path) -> dict[str, str]:
    """A file's metadata, as far as it can be read: what is wrong with a file, who opens it tells."""
    with path.open("rb") as file:
        entries = [dict(_fields(io.BytesIO(content), (KEY, VALUE))) for _, content in _fields(file, (METADATA_PROPS,))]
    return {_text(entry.get(KEY)): _text(entry.get(VALUE)) for entry in entries}


def asks_for_exact_sums(path: Path) -> bool:
    """Whether a file's metadata asks for EXACT_SUMS."""
    try:
        told = json.loads(metadata(path).get(SESSION, "{}"))
    except ValueError:
        return False
    return isinstance(told, dict) and told.get(EXACT_SUMS) == "1"


def needs_exact_sums(path: Path) -> bool:
    """Whether a file asks for EXACT_SUMS, and this CPU does not add so by itself."""
    return not sums_in_32_bits() and asks_for_exact_sums(path)


def _text(content: bytes | None) -> str:
    return (content or b"").decode(errors="replace")


def _fields(stream: BinaryIO, wanted: Container[int]) -> Iterator[tuple[int, bytes]]:
    """The contents of a message's fields of these numbers; ends where the stream does, or is no message."""
    end = stream.seek(0, os.SEEK_END)
    stream.seek(0)
    while (tag := _varint(stream)) is not None:
        number, kind = tag >> 3, tag & 7
        size = (_varint(stream) or 0) if kind in (_VARINT, _LENGTH) else _FIXED.get(kind)
        if size is None or (kind == _LENGTH and size > end - stream.tell()):
            return
        if kind == _LENGTH and number in wanted:
            yield number, stream.read(size)
        elif kind != _VARINT:
            stream.seek(size, os.SEEK_CUR)


def _varint(stream: BinaryIO) -> int | None:
    """A number, seven bits to a byte from the lowest on, of at most ten bytes; None where the stream ends."""
    value = 0
    for shift in range(0, 70, 7):
        if not (byte := stream.read(1)):
            return None
        value |= (byte[0] & 0x7F) << shift
        if byte[0] < 0x80:
            return value
    return None
