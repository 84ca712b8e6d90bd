"""What is inside a run directory or a file, as plain values: an ONNX model, a ``.pt2``, weights, a stage's result.

Of a run directory: what each stage recorded, what became of a contract that was not kept, and of every quantized unit
what it runs in and why, the range of its output, and what quantizing it alone does to the model's output where
``qtool sensitivity`` has measured it.

Any ONNX file can be read, not only those made here. What is counted is the file as it stands, with its external data
and what its branches, loops and functions hold; what a runtime makes of it (fusions, kernels) is the benchmark's and
the export gates' to say.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from qtool.artifacts import STAGES, has_result, read_result
from qtool.benchmarking.size import all_bodies, initializers, load_onnx, model_files
from qtool.errors import QtoolError, UsageError, nearest, one_line
from qtool.lineage import altered, outdated
from qtool.reporting.gather import REFUSED, refused
from qtool.units import MIB

STANDARD = frozenset({"", "ai.onnx", "ai.onnx.ml", "com.microsoft"})


def describe(path: Path) -> dict[str, Any]:
    """The file's kind, its size, and what that kind holds. Raises QtoolError where it cannot be read.

    ``notes`` is there for a file of a run directory that is not the one that its stage wrote.
    """
    if not path.is_file():
        beside = [p.name for p in path.parent.glob("*") if p.suffix in KINDS and p.is_file()]
        do = nearest(path.name, beside) if beside else "check the path"
        raise UsageError(f"artifact '{path}'", "a file or a run directory", "neither", do)
    if path.suffix not in KINDS:
        raise UsageError(f"artifact '{path}'", f"one of {', '.join(KINDS)}", repr(path.suffix), "name such a file")
    try:
        found = KINDS[path.suffix](path)
    except QtoolError:
        raise
    except Exception as error:
        got = one_line(f"{type(error).__name__}: {error}")[:200]
        raise QtoolError(
            f"artifact '{path}'", f"a whole {path.suffix} file", got, "make or download it again"
        ) from error
    notes = [text for result in _results(path.parent).values() for text in altered(result, path.parent, path.name)]
    told = {"notes": notes} if notes else {}
    size = sum(file.stat().st_size for file in model_files(path))
    return {"file": path.name, "size_mib": size / MIB, **told, **found}


def _results(run: Path) -> dict[str, dict[str, Any]]:
    """The results beside a file, as far as they can be read."""
    found = {}
    for stage in STAGES:
        with contextlib.suppress(QtoolError):
            found[stage] = read_result(run, stage, verify=False, stale=True)
    return found


def describe_run(place: Path, whole: Path | None = None) -> dict[str, Any]:
    """The results of each stage in a run directory, its quantized units, and its variants in the same way."""
    found: dict[str, Any] = {"run": str(place)}
    for stage in STAGES:
        if has_result(place, stage):
            found[stage] = read_result(place, stage, verify=False, stale=True)
    notes = outdated({stage: found[stage] for stage in STAGES if stage in found}, place, whole)
    try:
        if outcome := refused(place):
            found["contract"] = outcome
    except QtoolError as error:
        notes.append(str(error))
    if plan := found.get("export", found.get("quantize", {})).get("plan"):
        found["units"] = _units(plan, _ranges(place, notes), found.get("quantize", {}).get("sensitivity") or ())
    found |= {"notes": notes} if notes else {}
    if not plan:
        variants = {folder.name: describe_run(folder, place) for folder in variant_folders(place)}
        found |= {"variants": variants} if variants else {}
    return found


def is_refused(place: Path) -> bool:
    """Whether a contract was not kept there."""
    return (place / REFUSED).exists()


def variant_folders(place: Path) -> list[Path]:
    """The folders within a run directory that hold a quantization, or why there is none."""
    return sorted({path.parent for name in ("quantize.json", REFUSED) for path in place.glob(f"[!.]*/{name}")})


def _units(plan: dict[str, Any], ranges: dict[str, Any], measured: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    alone = {unit["name"]: unit for unit in measured}
    return [
        {key: unit.get(key) for key in ("name", "kind", "integer", "weight_bits", "block", "reason")}
        | {key: ranges.get(unit["name"], {}).get(key) for key in ("low", "high", "method")}
        | {key: alone.get(unit["name"], {}).get(key) for key in ("sqnr_db", "kl")}
        for unit in plan["units"]
    ]


def _ranges(place: Path, notes: list[str]) -> dict[str, Any]:
    """The ranges of a quantization; none where there are none, or none that can be read, which is noted."""
    if not (path := place / "ranges.json").is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not all(isinstance(entry, dict) for entry in found.values()):
            raise ValueError("no ranges")
    except (OSError, ValueError, AttributeError) as error:
        notes.append(f"'{path}' cannot be read: {error}")
        return {}
    return dict(found)


def _onnx(path: Path) -> dict[str, Any]:
    import onnx

    model = load_onnx(path)
    graph = model.graph
    bodies = list(all_bodies(model))
    nodes = [node for body in bodies for node in body.node]
    own = {(function.domain, function.name) for function in model.functions}
    stored = [tensor for body in bodies for tensor in initializers(body)]
    defaults = {tensor.name for tensor in initializers(graph)}  # of inputs, in which older files list all weights
    weights = Counter(onnx.TensorProto.DataType.Name(tensor.data_type) for tensor in stored)
    foreign = [n for n in nodes if n.domain not in STANDARD and (n.domain, n.op_type) not in own]
    found = {
        "kind": "onnx",
        "producer": f"{model.producer_name} {model.producer_version}".strip(),
        "opset": {entry.domain or "ai.onnx": entry.version for entry in model.opset_import},
        "inputs": {value.name: _onnx_shape(value) for value in graph.input if value.name not in defaults},
        "outputs": {value.name: _onnx_shape(value) for value in graph.output},
        "custom_operators": sorted({f"{n.domain}:{n.op_type}" for n in foreign}),
        "operators": dict(Counter(node.op_type for node in nodes).most_common()),
        "num_initializers": {name.lower(): count for name, count in weights.items()},
        "metadata": {entry.key: entry.value for entry in model.metadata_props},
    }
    if (name := _undecoded(found)) is not None:
        raise QtoolError(f"artifact '{path}'", "names in UTF-8", repr(name)[:200], "make or download it again")
    return found


def _undecoded(value: Any) -> bytes | None:
    """The first text within plain values that is no UTF-8, which protobuf leaves as bytes; None without such."""
    if isinstance(value, dict | list):
        parts = [*value, *value.values()] if isinstance(value, dict) else value
        return next((name for part in parts if (name := _undecoded(part)) is not None), None)
    return value if isinstance(value, bytes) else None


def _onnx_shape(value: Any) -> list[int | str | None] | str:
    """Sizes, names of open ones, None where nothing is said; a word for what is no tensor or has no shape."""
    kind = value.type.WhichOneof("value")
    if kind != "tensor_type" or not value.type.tensor_type.HasField("shape"):
        return "unknown shape" if kind == "tensor_type" else str(kind or "unknown").removesuffix("_type")
    dims = value.type.tensor_type.shape.dim
    return [d.dim_param or (d.dim_value if d.HasField("dim_value") and d.dim_value >= 0 else None) for d in dims]


def _program(path: Path) -> dict[str, Any]:
    from qtool.form import QUANTIZE
    from qtool.graphs.programs import as_graph
    from qtool.graphs.pt2_files import load_program

    graph = as_graph(load_program(path))
    operators = Counter(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
    return {
        "kind": "pt2",
        "operators": dict(operators.most_common()),
        "num_quantizers": sum(node.target in QUANTIZE for node in graph.graph.nodes),
        "tensors": _summary(graph.state_dict()),
    }


def _weights(path: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return {"kind": "safetensors", "tensors": _summary(load_file(path))}


def _summary(state: dict[str, Any]) -> dict[str, Any]:
    return {
        name: {"dtype": str(t.dtype).removeprefix("torch."), "shape": list(t.shape), **_range(t)}
        for name, t in state.items()
        if hasattr(t, "dtype")
    }


def _range(tensor: Any) -> dict[str, float]:
    """The least and the largest number, where there are some, with an order, that torch can read."""
    if not tensor.numel() or tensor.is_complex():
        return {}
    try:
        values = tensor.detach().double()
    except NotImplementedError:  # two numbers of 4 bits in a byte
        return {}
    return {"min": values.min().item(), "max": values.max().item()}


def _result(path: Path) -> dict[str, Any]:
    value = json.loads(path.read_text(encoding="utf-8"))
    return {"kind": "result", "content": value}


KINDS: dict[str, Callable[[Path], dict[str, Any]]] = {
    ".onnx": _onnx,
    ".pt2": _program,
    ".safetensors": _weights,
    ".json": _result,
}
