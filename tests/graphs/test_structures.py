"""Containers that are no plain ones, in saved graphs: known again where their classes are not."""

from __future__ import annotations

import importlib
import json
import zipfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from qtool.errors import QtoolError
from qtool.graphs.programs import as_graph, to_program
from qtool.graphs.pt2_files import load_program, save_program
from qtool.graphs.structures import know_dataclasses, know_types, outputs_of, read, written


class Found(NamedTuple):
    boxes: Tensor
    scores: dict[str, Tensor]


class Detector(nn.Module):
    def forward(self, x: Tensor) -> list[Found]:
        return [Found(x + 1, {"score": x.sum(1)})]


def renamed(path: Path, old: str, new: str) -> Path:
    """The archive with another text in its members, as a file next to it."""
    made = path.with_name("renamed.pt2")
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(made, "w", zipfile.ZIP_STORED) as other:
        for name in archive.namelist():
            other.writestr(f"renamed/{name.partition('/')[2]}", archive.read(name).replace(old.encode(), new.encode()))
    return made


def test_a_named_tuple_is_the_same_where_its_class_is_known_and_alike_where_not(tmp_path: Path) -> None:
    x = torch.randn(2, 3)
    for again in range(2):  # the second time the class is registered when the model is captured
        path = tmp_path / f"{again}.pt2"
        save_program(to_program(Detector(), x), path)
        (found,) = as_graph(load_program(path))(x)
        assert type(found) is Found
        (alike,) = as_graph(load_program(renamed(path, ":Found:", f":Other{again}:")))(x)
        assert type(alike).__name__ == f"Other{again}"
        assert torch.equal(alike.boxes, x + 1)
        assert torch.equal(alike.scores["score"], x.sum(1))
        assert f"qtool.namedtuple:Other{again}:boxes,scores" in pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE


@dataclass
class Heads:
    logits: Tensor
    hidden: dict[str, Tensor]
    loss: Tensor | None = None


class TwoHeads(nn.Module):
    def forward(self, x: Tensor) -> Heads:
        return Heads(x + 1, {"first": x.sum(1)})


def test_a_dataclass_that_was_registered_without_a_name_is_stored_by_its_fields(tmp_path: Path) -> None:
    torch.export.register_dataclass(Heads)
    x, path = torch.randn(2, 3), tmp_path / "two.pt2"
    save_program(to_program(TwoHeads(), x), path)
    assert type(as_graph(load_program(path))(x)) is Heads
    alike = as_graph(load_program(renamed(path, ":Heads:", ":Other:")))(x)
    assert (type(alike).__name__, alike.loss) == ("Other", None)
    assert torch.equal(alike.logits, x + 1)
    assert torch.equal(alike.hidden["first"], x.sum(1))


def test_a_structure_that_is_written_is_read_with_what_is_no_tensor_in_it() -> None:
    given = (Heads(torch.ones(2), {"first": torch.ones(3)}), 0.5)
    know_dataclasses(given)
    stored = written(given)
    found, constant = read(stored)
    assert (type(found), found.loss, constant) == (Heads, None, 0.5)
    assert isinstance(found.hidden["first"], Tensor)
    alike, _ = read(stored.replace(":Heads:", ":Else:"))
    assert (type(alike).__name__, alike.loss) == ("Else", None)


def test_what_a_graph_gives_is_told_without_running_it() -> None:
    know_dataclasses(Heads(torch.ones(1), {}))
    x = torch.randn(2, 3)
    graph = as_graph(to_program(TwoHeads(), x))
    wanted, found = (pytree.tree_flatten(value) for value in (graph(x), outputs_of(graph)))
    assert found[1] == wanted[1]
    assert [type(leaf) for leaf in found[0]] == [type(leaf) for leaf in wanted[0]] == [Tensor, Tensor]


def test_types_of_transformers_are_imported_and_no_other_module(monkeypatch: pytest.MonkeyPatch) -> None:
    imported: list[str] = []
    monkeypatch.setattr(importlib, "import_module", imported.append)

    def spec(name: str) -> str:
        return json.dumps(
            {"signature": [{"out_spec": json.dumps([1, {"type": name, "context": "[]", "children_spec": []}])}]}
        )

    for name in (
        "transformers.modeling_outputs.TokenClassifierOutput", "transformers.models.vits.modeling_vits.VitsModelOutput",
        "transformers.trainer.Trainer", "os.path", "evil.modeling_outputs.Output",
    ):  # fmt: skip
        with suppress(QtoolError):  # that it is not registered
            know_types(spec(name))
    named = ["transformers.modeling_outputs", "transformers.models.vits.modeling_vits"]
    assert [name for name in imported if name != "transformers"] == named

    def missing(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'transformers'", name="transformers")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(
        QtoolError, match=r"'transformers\.modeling_outputs': expected .* got No module .*; run: pip install"
    ):
        know_types(spec("transformers.modeling_outputs.BaseModelOutput"))
    with pytest.raises(
        QtoolError, match=r"'mine\.Box': expected .* registered .*; import the module that registers it"
    ):
        know_types(spec("mine.Box"))
