"""What a file says it is, against what ran: the difference between an INT8 file and INT8 arithmetic.

A file's *stored* format is the one that holds most of its weights; its *arithmetic* is what the
runtime executed its multiplying operations in. Where a runtime has no kernel for a format it converts
and carries on, and the figure is one of something else. Each such case is said in a sentence.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from qtool.benchmarking.size import all_bodies, all_tensors, load_onnx
from qtool.errors import ContractError
from qtool.system.machine import VNNI

SMALL_MS = 0.2
HALVES = ("float16", "bfloat16")
FAR_DB = 20.0
"""Of outputs in 16 bits: these keep 40 dB or so, which a deep net may halve."""
NO_VNNI = "this CPU has no VNNI, without which integers gain little"
SLOW_SUMS = (
    "this CPU has no VNNI, and adds products of 8-bit weights without saturating only in slower kernels: quantize with "
    "'pairs' among the algorithms or, where an output layer shares an embedding table, which 'pairs' leaves as it is, "
    "--weight-bits 7, whose sums are exact in the quick ones"
)
_FORMATS = {
    "FLOAT": "float32", "FLOAT16": "float16", "BFLOAT16": "bfloat16", "DOUBLE": "float64", "INT16": "int16",
    "UINT16": "int16", "INT8": "int8", "UINT8": "int8", "INT4": "int4", "UINT4": "int4", "INT2": "int2",
    "UINT2": "int2", "FLOAT8E4M3FN": "float8", "FLOAT8E4M3FNUZ": "float8", "FLOAT8E5M2": "float8",
    "FLOAT8E5M2FNUZ": "float8", "FLOAT4E2M1": "float4",
}  # fmt: skip
_PACKED = {"MatMulNBits": (1, "int"), "GatherBlockQuantized": (0, "int"), "MatMulBnb4": (1, "float")}
"""ONNX Runtime's operators that read several weights out of each byte: at which input, and what they are."""


def stored_format(path: Path) -> str | None:
    """The number format of most of an ONNX file's weights; None for another kind of file or no weights."""
    if path.suffix != ".onnx":
        return None
    import onnx

    model = load_onnx(path)
    held: Counter[str] = Counter()
    packed = {name: told for body in all_bodies(model) for name, told in _packed(body.node)}
    for tensor in all_tensors(model):
        kind = onnx.TensorProto.DataType.Name(tensor.data_type)
        if kind == "UINT8" and tensor.name in packed:
            base, bits = packed[tensor.name]
            held[f"{base}{bits}"] += math.prod(tensor.dims) * 8 // bits
        elif kind in _FORMATS:
            held[_FORMATS[kind]] += math.prod(tensor.dims)
    return held.most_common(1)[0][0] if held else None


def _packed(nodes: Iterable[Any]) -> Iterator[tuple[str, tuple[str, int]]]:
    """The names of tensors whose bytes hold several weights, with the kind and the bits of these."""
    for node in nodes:
        if node.op_type in _PACKED:
            place, base = _PACKED[node.op_type]
            yield node.input[place], (base, next((a.i for a in node.attribute if a.name == "bits"), 0) or 4)


def check_claim(name: str, stored: str | None, ran: Mapping[str, int], provider: str) -> str | None:
    """A sentence where the file's format is not what was computed in, or None.

    ``ran`` counts multiplying operations by format (:func:`qtool.runtimes.base.arithmetic`).
    """
    total = sum(ran.values())
    if stored not in (*HALVES, "int8") or not total:
        return None
    same, other = ran.get(stored, 0), max(ran, key=lambda dtype: ran[dtype])
    if same == total:
        return None
    if same == 0 and stored == "int8" and is_simulation(provider):
        return (
            f"{name}: simulated in float on {provider}, which tells nothing of its speed; --provider torch-compile does"
        )
    if same == 0 and stored != "int8":
        return f"{name}: {stored} is storage only on {provider}; all {total} multiplying operations ran in {other}"
    if same == 0:
        return f"{name}: not INT8 arithmetic on {provider}; all {total} multiplying operations ran in {other}"
    rest = ", ".join(f"{count} in {dtype}" for dtype, count in ran.items() if dtype != stored)
    return f"{name}: {same} of {total} multiplying operations ran in {stored}, {rest}"


def far_sentence(name: str, reference: str, accuracy: Mapping[str, Any]) -> str | None:
    """A sentence where a variant in 16 bits is further from the reference than rounding to these explains, or None."""
    if (found := accuracy.get("sqnr_db", math.inf)) >= FAR_DB:
        return None
    return (
        f"{name}: its outputs are far from those of {reference} ({found:.1f} dB, where 16 bits keep about 40): "
        "the runtime computes a layer wrongly in them, or the model takes no such rounding"
    )


def is_integer(name: str, entry: Mapping[str, Any], reference: Mapping[str, Any]) -> bool:
    """Whether a variant is to be faster by its integers: it holds or computes with some, and the reference does not.

    Of a file that does not tell what it stores (a ``.pt2``) the name is taken for it.

    >>> [is_integer("b", {"stored": "int8"}, {"stored": other}) for other in ("float32", "int8")]
    [True, False]
    """
    return _has_integers(entry, name) and not _has_integers(reference)


def _has_integers(entry: Mapping[str, Any], name: str = "") -> bool:
    stored, ran = entry.get("stored"), entry.get("arithmetic") or {}
    return stored in ("int8", "int4", "int2") or "int8" in ran or (stored is None and name.startswith("int8"))


def is_simulation(provider: str) -> bool:
    """Whether integers are computed in float there by design, so that being slower is no fault."""
    return provider == "torch"


def slower_sentence(name: str, reference: str, timed: Mapping[str, Any], causes: Sequence[str]) -> str | None:
    """A sentence where a variant is not faster than the reference beyond doubt, with the causes that are known."""
    interval = timed["speedup_ci95"]
    low = interval[0] if interval else timed["speedup"]
    if low > 1:
        return None
    text = f"{name} {_not_faster(reference, timed)} ({timed['speedup']:.2f}x{_interval(interval)})"
    return f"{text}: {'; '.join(causes)}" if causes else text


def _not_faster(reference: str, timed: Mapping[str, Any]) -> str:
    return f"is not faster than {reference} at batch size {timed['batch_size']}"


def _interval(bounds: Sequence[float] | None) -> str:
    return f", 95 % CI {bounds[0]:.2f} to {bounds[1]:.2f}" if bounds else ""


def slower_causes(
    variant: Mapping[str, Any], timed: tuple[Mapping[str, Any], Mapping[str, Any]], where: Mapping[str, Any]
) -> list[str]:
    """What is known to keep an INT8 variant from being faster, from what ran.

    ``timed`` is the latency of the reference and that of the variant, at the batch size that is told of.
    ``where``: the provider, the CPU's features and, if known, the target that the file was quantized for. Of a variant
    counts whether it was opened for ``exact_sums``, which a CPU without VNNI has in slower kernels only.
    """
    ran, causes = variant["arithmetic"], []
    made_for = (where.get("target") or where["provider"]).removeprefix("ort-")
    if made_for != where["provider"] and not where["provider"].startswith("torch"):
        causes.append(f"it was quantized for {made_for}, where --provider {made_for} measures it")
    if floats := sum(count for dtype, count in ran.items() if dtype != "int8"):
        causes.append(f"{floats} of {sum(ran.values())} multiplying operations run in float")
    if (between := variant.get("num_conversions", 0)) > max(2, sum(ran.values()) // 4):
        causes.append(f"{between} kernels only convert between float and integer")
    if where["provider"] == "cpu" and not {*VNNI, "asimddp"} & set(where["features"]):
        causes.append(SLOW_SUMS if variant.get("exact_sums") else NO_VNNI)
    took = [entry["latency_p50_ms"] for entry in timed]
    if max(took) < SMALL_MS:
        causes.append(f"the model takes {took[0]:.2g} ms, most of it in calling kernels")
    return causes


def require_not_slower(result: Mapping[str, Any], allow: bool) -> None:
    """Raises ContractError where an INT8 variant is slower than the reference beyond doubt, unless that is allowed.

    A ratio whose 95 % interval holds 1 is told in the notes and fails nothing: noise must not fail a run.
    """
    slower = [
        note
        for name, entry in result["variants"].items()
        for timed in entry["latency"]
        if is_integer(name, entry, result["variants"][result["reference"]])
        and timed["speedup_ci95"] and timed["speedup_ci95"][1] < 1
        for note in result["notes"]
        if note.startswith(f"{name} {_not_faster(result['reference'], timed)} ")
    ]  # fmt: skip
    if slower and not allow:
        error = ContractError(
            "benchmark", f"INT8 faster than {result['reference']}", "; ".join(slower),
            "leave what is slow in float with --overrides, or accept it with --allow-slower",
        )  # fmt: skip
        error.details = result
        raise error
