"""Names of weights that a graph module can hold: those of the user's model, but for a few that mean something else."""

from __future__ import annotations

import keyword
from collections.abc import Container

import torch
from torch import nn
from torch.fx import Graph, GraphModule

_TAKEN = {*dir(GraphModule(nn.Module(), Graph())), "range_constraints", "validate_inputs"} - {*dir(nn.Module())}
"""What a captured graph module has beside a module's own attributes, which no submodule is named like."""


def spelled(path: str, others: Container[str] = ()) -> str:
    """The dotted path of a weight as a graph holds it: in its code it is no keyword, in its module no attribute.

    >>> spelled("meta.weight"), spelled("heads.class.weight"), spelled("head.meta.weight")
    ('meta_.weight', 'heads.class_.weight', 'head.meta.weight')
    """
    parts = path.split(".")
    parts = [part + "_" * (keyword.iskeyword(part) or (not at and part in _TAKEN)) for at, part in enumerate(parts)]
    found = ".".join(parts)
    while found != path and found in others:
        found += "_"
    return found


def respell(program: torch.export.ExportedProgram) -> None:
    """Renames the weights and constants of a program so that its graph module can hold them; modules keep theirs."""
    tensors = (program.state_dict, program.constants)
    known = {name for held in tensors for name in held}
    new = {name: spelled(name, known) for name in known}
    for held in tensors:
        for name in [name for name in held if new[name] != name]:
            held[new[name]] = held.pop(name)
    signature = program.graph_signature
    for spec in (*signature.input_specs, *signature.output_specs):
        spec.target = new.get(str(spec.target), spec.target)
