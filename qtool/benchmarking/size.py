"""How large a model file is: on disk, without what its exporter left in it, and compressed.

On disk means the file and the external data that it names. Exporters write stack traces and module
paths beside every node; for a small network these weigh as much as the weights, so the size without
them is given too, and it is that one in which INT8 is compared with FP32. Compressed (zlib, level 6)
is what a download costs.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from qtool.errors import QtoolError, one_line, require_file
from qtool.runtimes.base import all_graphs
from qtool.units import MIB

_CHUNK = MIB


def measure_size(path: Path) -> dict[str, Any]:
    """Sizes of a model file in bytes and MiB: on disk, stripped (ONNX only) and compressed.

    Raises QtoolError where the file is missing, is no ONNX or names external data that is not there.
    """
    files = model_files(path)
    on_disk = sum(file.stat().st_size for file in files)
    compressed = compressed_bytes(files)
    stripped = stripped_bytes(path) if path.suffix == ".onnx" else on_disk
    return {
        "size_bytes": on_disk,
        "size_mib": on_disk / MIB,
        "size_stripped_mib": stripped / MIB,
        "size_compressed_mib": compressed / MIB,
        "num_files": len(files),
    }


def model_files(path: Path) -> list[Path]:
    """The file and, for ONNX, the external data files that it names, each once; for OpenVINO's own, its weights."""
    if path.suffix != ".onnx":
        require_file(path, "a model file")
        weights = path.with_suffix(".bin")
        return [path, weights] if path.suffix == ".xml" and weights.is_file() else [path]
    return [path, *_external(path, load_onnx(path))]


def load_onnx(path: Path) -> Any:
    """The ONNX model without its external data. Raises UsageError for no file, QtoolError for what is not ONNX."""
    import onnx

    require_file(path, "an ONNX file")
    try:
        model = onnx.load(path, load_external_data=False)
    except Exception as error:
        raise QtoolError(f"'{path}'", "an ONNX file", one_line(error)[:200], "make or download it again") from error
    if not model.HasField("graph") or not (model.graph.node or model.graph.output):
        raise QtoolError(f"'{path}'", "an ONNX file", "no graph in it", "make or download it again")
    return model


def _external(path: Path, model: Any) -> list[Path]:
    names = {
        str(entry.value, errors="replace") if isinstance(entry.value, bytes) else entry.value  # bytes are no UTF-8
        for tensor in all_tensors(model)
        for entry in tensor.external_data
        if entry.key == "location" and tensor.data_location == tensor.EXTERNAL
    }
    for name in sorted(names):
        file = path.parent / name
        if not os.path.isfile(file):  # also where no system has files of such a name
            got = "a folder" if os.path.isdir(file) else "no such file"
            raise QtoolError(f"'{path}'", f"its external data '{name}'", got, "put that file there, beside the model")
    return [path.parent / name for name in sorted(names)]


def all_bodies(model: Any) -> Iterator[Any]:
    """The graph of a model, those within it, and its functions with those within them."""
    for body in (model.graph, *model.functions):
        yield from all_graphs(body)


def all_tensors(model: Any) -> Iterator[Any]:
    """Every tensor that a model stores; of a sparse one, the values that it is made of."""
    for body in all_bodies(model):
        yield from initializers(body)
        for node in body.node:
            yield from (attribute.t for attribute in node.attribute if attribute.HasField("t"))
            yield from (a.sparse_tensor.values for a in node.attribute if a.HasField("sparse_tensor"))


def initializers(body: Any) -> list[Any]:
    """Those of a graph, sparse ones by their values, which bear the name; a function has none."""
    sparse = [tensor.values for tensor in getattr(body, "sparse_initializer", ())]
    return [*getattr(body, "initializer", ()), *sparse]


def stripped_bytes(path: Path) -> int:
    """Bytes of an ONNX model without doc strings, per-node metadata and recorded intermediate shapes."""
    model = load_onnx(path)
    external = sum(file.stat().st_size for file in _external(path, model))
    model.ClearField("doc_string")
    for part in all_bodies(model):
        part.ClearField("value_info")
        _strip([part, *part.node])
        if hasattr(part, "initializer"):
            _strip([*part.initializer, *part.input, *part.output])
    return int(model.ByteSize()) + external


def _strip(parts: Iterable[Any]) -> None:
    for part in parts:
        part.ClearField("doc_string")
        if hasattr(part, "metadata_props"):
            part.ClearField("metadata_props")


def compressed_bytes(files: Iterable[Path]) -> int:
    """Bytes after zlib at level 6, the files one after the other."""
    total = 0
    for file in files:
        squeeze = zlib.compressobj(6)
        with file.open("rb") as stream:
            while chunk := stream.read(_CHUNK):
                total += len(squeeze.compress(chunk))
        total += len(squeeze.flush())
    return total
