"""What a stage's result was made from, and whether that and its files are still what lies beside it.

A result records the sha256 of what it read. A run directory whose quantization was made anew holds an export of one
that is gone: each file is whole, and the two do not belong together. It records the sha256 of its own files as well:
one that was changed since is not what the result tells of. A quantized model that was exported as an object was never a
file: it is known by what it computes with.

Left out on purpose: results in other folders, but for the training whose weights were quantized.
"""

from __future__ import annotations

import hashlib
import operator
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qtool.artifacts import earlier, has_result, output_path
from qtool.errors import QtoolError

if TYPE_CHECKING:
    from torch.fx import GraphModule

SHA256 = 64  # hexadecimal digits
MADE_FROM: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "quantize": ("train", {"weights": "model"}),
    "export": ("quantize", {"quantized": "int8"}),
    "benchmark": ("export", {name: name for name in ("fp32", "fp16", "int8")}),
}
"""The stage whose outputs a stage takes, and what its own result calls them."""


def superseded(results: Mapping[str, Mapping[str, Any]], stage: str) -> str:
    """What ``stage`` was made from and is another now, of the results in one run directory by stage; else empty.

    What is not recorded, or lies elsewhere, is not compared. Beside a stale result only what was made of it is told:
    the rest is of another folder, as an export of the closest candidate is where a contract was not kept, which may
    be the very same file.
    """
    before, pairs = MADE_FROM.get(stage, ("", {}))
    given, source = results.get(stage, {}).get("inputs", {}), results.get(before, {})
    made = source.get("outputs", {})
    if results.get(stage, {}).get("config", {}).get("provider", "").startswith("torch"):
        return ""  # measured from the graphs of the quantization
    same = [
        made[there]["sha256"] == given[name]
        for name, there in pairs.items()
        if len(given.get(name, "")) == SHA256 and there in made
    ]
    contents = given.get("content"), source.get("content")
    of_another = all(contents) and len(set(contents)) > 1
    if "stale" in source:
        here = given.get("quantized_in", ".") == "."
        return f"of a stale {before}" if here and (same or all(contents)) and all(same) and not of_another else ""
    if of_another:
        return f"of another model than {before}"
    return "" if all(same) else f"of an earlier {before}"


def content_of(graph: GraphModule) -> str:
    """The sha256 of what a quantized graph computes with: its stored tensors, and the ranges of activations.

    The same before it was stored and after, when its tensors have other names, and in each capture of one model.
    """
    from torch.fx import GraphModule

    from qtool.form import QUANTIZE, digest_tensor

    parts: set[str] = set()
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            stored = operator.attrgetter(node.target)(graph)
            if isinstance(stored, GraphModule):  # a branch of torch.cond
                parts.add(content_of(stored))
                continue
            digest = hashlib.sha256()
            digest_tensor(digest, "", stored)
            parts.add(digest.hexdigest())
        elif node.target in QUANTIZE:
            parts.add(repr([value for value in node.args if isinstance(value, int | float)]))
    return hashlib.sha256("\n".join(sorted(parts)).encode()).hexdigest()


def outdated(results: Mapping[str, Mapping[str, Any]], run: Path, whole: Path | None = None) -> list[str]:
    """A sentence for each stage of ``run`` whose result is of another than lies there now, with what to do.

    A quantization is compared with the training that its weights came from, wherever that lies. Then one for each
    result that was there and is gone, from ``run`` or the ``whole`` run directory around it, and for each file of
    theirs that is gone or was changed.
    """
    quantized = results.get("quantize", {})
    place = (quantized.get("source") or {}).get("trained_in")
    trained = results.get("train") if place == "." else place and earlier(run / place, "train")
    told = {stage: superseded({**results, "train": trained or {}}, stage) for stage in results}
    words = dict.fromkeys(results, str(run))
    if place:
        mode = " --mode qat" if quantized["config"].get("mode") == "qat" else ""
        words["quantize"] = f"{os.path.normpath(run / place)}{mode}" + (f" --out {run}" if place != "." else "")
    again = {stage: before if "stale" in results.get(before, {}) else stage for stage, (before, _) in MADE_FROM.items()}
    old = [
        f"{stage} is {why}: run 'qtool {again[stage]} {words[again[stage]]}' again"
        for stage, why in told.items()
        if why
    ]
    changed = (text for result in results.values() for text in altered(result, run))
    return [*old, *_lost(results, run, whole or run), *changed]


def _lost(results: Mapping[str, Mapping[str, Any]], run: Path, whole: Path) -> Iterator[str]:
    """What lay further away is not missed: a folder that is handed on alone needs only itself."""
    made_in = {
        "export": results.get("export", {}).get("inputs", {}).get("quantized_in"),
        "quantize": (results.get("quantize", {}).get("source") or {}).get("trained_in"),
    }
    for stage, place in made_in.items():
        before = MADE_FROM[stage][0]
        folder = Path(os.path.normpath(run / (place or "")))
        near = place and folder in (Path(os.path.normpath(run)), Path(os.path.normpath(whole)))
        if near and not has_result(folder, before):
            where, expected = f"'{folder / before}.json'", f"the result that {stage} was made from"
            yield str(QtoolError(where, expected, "no file", f"restore it or run 'qtool {before}' again"))


def altered(result: Mapping[str, Any], run: Path, file: str | None = None) -> Iterator[str]:
    """A sentence for each output of a result (or for ``file`` alone) that is not what the result records."""
    for name, entry in result["outputs"].items():
        try:
            if file in (None, entry["file"]):
                output_path(run, result, name)
        except QtoolError as error:
            yield str(error)
