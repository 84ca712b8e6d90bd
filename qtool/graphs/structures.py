"""What a model's inputs and outputs are packed in, written into a saved graph and known again in another process.

torch stores a graph's structure by the names of its container types, and opens the graph where types of these names
are registered. Tuples, lists, dicts and named tuples always are, dataclasses once they are met. A named tuple or a
dataclass is of the user's own class, so its name and fields are stored, and a process without that class gets a like
one, with the same attributes. The output types of transformers register themselves when their module is imported.
Left out on purpose: types of other packages, which have to be imported, and registered with torch, by whoever opens
the file.
"""

from __future__ import annotations

import json
import re
import warnings
from collections import namedtuple
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, make_dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from qtool.errors import QtoolError
from qtool.nested import entries
from qtool.system.imports import imported

_NAMED = re.compile(r"qtool\.(namedtuple|dataclass):(\w+):(\w*(?:,\w+)*)")
_TRANSFORMERS = re.compile(r'"(transformers\.(?:models\.\w+\.)?modeling_\w+)\.\w+')


def name_types(program: torch.export.ExportedProgram) -> None:
    """Gives each class of named tuples and dataclasses of a program's inputs and outputs a name for a file."""
    for spec in (program.call_spec.in_spec, program.call_spec.out_spec):
        _name_types(spec)


def _name_types(spec: Any) -> None:
    for kind in _classes(spec):
        if is_dataclass(kind):
            _name_dataclass(kind)
        elif kind not in pytree.SUPPORTED_SERIALIZED_TYPES:
            _register(kind)


def written(value: Any) -> str:
    """What the tensors of ``value`` are packed in, as JSON: its containers, and what else is in them.

    >>> read(written({"logits": torch.ones(2), "states": (torch.ones(1), None)}))
    {'logits': tensor([]), 'states': (tensor([]), None)}
    """
    found, spec = pytree.tree_flatten(value)
    _name_types(spec)
    others = {str(index): leaf for index, leaf in enumerate(found) if not isinstance(leaf, torch.Tensor)}
    return json.dumps({"spec": pytree.treespec_dumps(spec), "others": others})


def outputs_of(graph: GraphModule) -> Any:
    """What a captured graph gives: its containers, and an empty tensor for each of its tensors."""
    given = pytree.tree_leaves(graph.graph.output_node().args[0])
    codegen: Any = graph.graph._codegen
    empty = [torch.empty(0) if isinstance(leaf, Node) else leaf for leaf in given]
    return pytree.tree_unflatten(empty, codegen.pytree_info.out_spec)


def read(structure: str) -> Any:
    """What :func:`written` was given, with empty tensors in it. Raises QtoolError as :func:`know_types` does."""
    stored = json.loads(structure)
    _know(stored["spec"])
    spec = pytree.treespec_loads(stored["spec"])
    return pytree.tree_unflatten([stored["others"].get(str(i), torch.empty(0)) for i in range(spec.num_leaves)], spec)


def know_dataclasses(value: Any) -> bool:
    """Makes the classes of dataclasses in ``value`` known to torch, as named tuples are; whether one was not."""
    found = [type(value)] if is_dataclass(value) and type(value) not in pytree.SUPPORTED_NODES else []
    for kind in found:
        torch.export.register_dataclass(kind)
    return any([*found, *(know_dataclasses(item) for _, item in entries(value))])


def output_names(spec: pytree.TreeSpec) -> list[str | None]:
    """What a program calls each of its outputs: the keys on the way to it, or None where places alone lead there.

    >>> output_names(pytree.tree_structure({"logits": 0, "states": (1, 2)}))
    ['logits', 'states.0', 'states.1']
    >>> output_names(pytree.tree_structure((0, [1]))), output_names(pytree.tree_structure(0))
    ([None, None], [None])
    """
    paths = dict(_paths(pytree.tree_unflatten(list(range(spec.num_leaves)), spec), ()))
    found = [paths.get(leaf, ()) for leaf in range(spec.num_leaves)]
    return [".".join(map(str, path)) if any(isinstance(key, str) for key in path) else None for path in found]


def _paths(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Each leaf of a structure, with the keys, fields and places that lead to it."""
    if not isinstance(value, Mapping | tuple | list) and not is_dataclass(value):
        yield value, path
    for key, item in entries(value):
        yield from _paths(item, (*path, key))


def foreign(spec: pytree.TreeSpec) -> str | None:
    """The first container of a structure that torch looks into and nothing here does; None where there is none."""
    kind = spec.type
    if isinstance(kind, type) and not issubclass(kind, Mapping | tuple | list) and not is_dataclass(kind):
        return kind.__name__
    return next(filter(None, map(foreign, spec.children())), None)


def know_types(program: str) -> None:
    """Registers the container types that the JSON of a saved program names, as far as they are not known here.

    Raises QtoolError where they are of transformers, which does not import, or of another package, which was not.
    """
    for spec in _specs(json.loads(program)):
        _know(spec)


def _know(spec: str) -> None:
    for module in _TRANSFORMERS.findall(spec):
        imported(module, f"saved graph with types of '{module}'", "qtool[text]")
    for found in _NAMED.finditer(spec):
        if found[0] not in pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE:
            _make(*found.groups())
    if foreign := next((name for name in _names(spec) if name not in pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE), None):
        raise QtoolError(
            f"saved graph with the type '{foreign}'", "a type that is registered with torch in this process",
            "one that is not", "import the module that registers it, and open the file after that",
        )  # fmt: skip


def _make(sort: str, name: str, joined: str) -> None:
    """Registers a class like the one that a file names."""
    names = joined.split(",") if joined else []
    if sort == "namedtuple":
        _register(namedtuple(name, names))
    else:
        kind: Any = make_dataclass(name, [(field, Any) for field in names])
        torch.export.register_dataclass(kind, serialized_type_name=f"qtool.dataclass:{name}:{joined}")


def _name_dataclass(kind: Any) -> None:
    """Names a dataclass that was registered without a name. Transformers' output types have one."""
    known = pytree.SUPPORTED_SERIALIZED_TYPES[kind]
    if known.serialized_type_name == pytree.NO_SERIALIZED_TYPE_NAME_FOUND:
        name = f"qtool.dataclass:{kind.__name__}:{','.join(field.name for field in fields(kind))}"
        pytree.SUPPORTED_SERIALIZED_TYPES[kind] = known._replace(serialized_type_name=name)
        pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE[name] = kind


def _register(kind: Any) -> None:
    name = f"qtool.namedtuple:{kind.__name__}:{','.join(kind._fields)}"
    pytree._register_namedtuple(kind, serialized_type_name=name)


def _classes(spec: Any) -> Iterator[Any]:
    """The classes of named tuples and dataclasses in a structure."""
    if spec is None:
        return
    for kind in (spec.type, spec.context):
        if isinstance(kind, type) and (is_dataclass(kind) or (issubclass(kind, tuple) and hasattr(kind, "_fields"))):
            yield kind
    for child in spec.children():
        yield from _classes(child)


def _specs(value: Any) -> Iterator[str]:
    """The structures in the JSON of a program, each a text."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        if key in ("in_spec", "out_spec") and isinstance(item, str):
            yield item
        else:
            yield from _specs(item)


def _names(spec: str) -> Iterator[str]:
    """What a structure calls its container types, each that is nested in another too."""
    found = [json.loads(spec)[1]]
    for node in found:
        found += node["children_spec"]
        if node["type"] is not None:  # which a leaf has none of
            yield node["type"]


@contextmanager
def quiet_pytree() -> Iterator[None]:
    """Drops torch's warning of deprecated leaves in its own records of a graph's inputs, which copying one gives."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
        yield
