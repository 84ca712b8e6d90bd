"""Programs: what ``torch.export`` makes of a model, and what it stores and ONNX is made from.

A model is traced. A captured graph, whose operators are known, is put together as a program without running it through
the tracer again, which takes three to nine times as long: its tensors become inputs, and what is known of each value is
found anew by running the operators on fake tensors.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._export.verifier import TrainingIRVerifier
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ConstantArgument,
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.fx import Graph, GraphModule, Node
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils import _pytree as pytree

from qtool.graphs.own_numbers import exported
from qtool.graphs.pt2_files import load_program, save_program
from qtool.graphs.recurrent import whole_sequences
from qtool.graphs.shapes import input_values, open_axes, symbols_of
from qtool.graphs.structures import know_dataclasses
from qtool.nested import call, map_tensors
from qtool.system import allocator

FIXED_SIZE = "specialized it to be a constant"
"""What ``torch.export`` says of code that takes an open size for a number."""

_KEPT = ("val", "nn_module_stack", "custom", "stack_trace", "unbacked_bindings")
_PREFIXES = {InputKind.PARAMETER: "p", InputKind.BUFFER: "b", InputKind.CONSTANT_TENSOR: "c"}
_PROGRAMS: WeakKeyDictionary[GraphModule, tuple[torch.export.ExportedProgram, Any]] = WeakKeyDictionary()
"""The programs that graphs were opened from or stored as, with their state then: making one again takes its time."""


def open_graph(path: Path) -> tuple[GraphModule, Any]:
    """The graph of a ``.pt2``, and the example inputs in it. Raises QtoolError on a damaged or unsafe file."""
    program = load_program(path)
    graph = as_graph(program)
    _PROGRAMS[graph] = program, _state(graph)
    args, kwargs = program.example_inputs
    return graph, kwargs or (args[0] if len(args) == 1 else args)


def save_graph(graph: GraphModule, example: Any, path: Path) -> None:
    """Writes a graph as ``.pt2``, atomically."""
    program = _new_program(graph, map_tensors(torch.clone, example))  # a view would bring its whole storage
    save_program(program, path)
    _PROGRAMS[graph] = program, _state(graph)


def program_of(graph: GraphModule, example: Any) -> torch.export.ExportedProgram:
    """The program that ``graph`` was opened from or stored as, if it is still that, or else a new one."""
    program, state = _PROGRAMS.get(graph, (None, None))
    return program if program is not None and state == _state(graph) else _new_program(graph, example)


def _state(graph: GraphModule) -> tuple[str, dict[str, int]]:
    """What tells a graph from one that was changed: its code, and which tensors it holds (not what is in them)."""
    tensors = (*graph.named_parameters(remove_duplicate=False), *graph.named_buffers(remove_duplicate=False))
    return graph.code, {name: tensor.data_ptr() for name, tensor in tensors}


def as_graph(program: torch.export.ExportedProgram) -> GraphModule:
    """The program as a graph module without shape guards, which takes pieces of any batch too."""
    module = program.module(check_guards=False)
    assert isinstance(module, GraphModule)
    module.range_constraints = {}  # type: ignore[assignment]
    return module


def _new_program(graph: GraphModule, example: Any) -> torch.export.ExportedProgram:
    """A program of a captured graph: put together, or traced where one of its parts or a size has to be found out."""
    return _put_together(graph, example) or to_program(graph, example)


def _put_together(graph: GraphModule, example: Any) -> torch.export.ExportedProgram | None:
    """The program whose inputs are the tensors that ``graph`` holds and its own; None where only a tracer can tell."""
    given = arguments(map_tensors(_at_least_two, example))
    info = getattr(graph.graph._codegen, "pytree_info", None)
    taken = [node for node in graph.graph.nodes if node.op == "placeholder"]
    values = [*input_values(graph.graph).values()]
    paths = [str(node.target) for node in graph.graph.nodes if node.op == "get_attr"]
    held = {path: operator.attrgetter(path)(graph) for path in paths}
    mode = values[0].fake_mode if values and isinstance(values[0], FakeTensor) else None
    sizes = mode.shape_env if mode else None
    if (
        mode is None
        or sizes is None
        or not hasattr(sizes, "_check_frozen")
        or info is None
        or info.in_spec != pytree.tree_structure(given)
        or any("val" not in node.meta for node in taken)
        or not all(symbols_of(value.shape[0]) for value in values if value.dim())
        or not all(isinstance(value, Tensor) for value in held.values())
    ):
        return None
    flat = Graph()
    copies = {node: flat.node_copy(node) for node in taken}
    for node in taken:
        copies[node].name = str(node.target)  # a name such as "input", of Python's own, is no node's by itself
    inputs, lifted = [], {}
    state, constants = dict[str, Any](), dict[str, Any]()
    for path, (kind, kept) in _kinds(graph, held).items():
        with flat.inserting_before(copies[taken[0]]):
            made = flat.placeholder(f"{_PREFIXES[kind]}_{path.replace('.', '_')}")
        made.target, made.meta["val"] = made.name, mode.from_tensor(held[path], static_shapes=True)
        inputs.append(InputSpec(kind, TensorArgument(made.name), path, kept))
        (state if kept or kind is InputKind.PARAMETER else constants)[path] = held[path]
        lifted[path] = made
    inputs += [InputSpec(InputKind.USER_INPUT, _argument(copies[node]), None) for node in taken]
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            copies[node] = lifted[str(node.target)]
        elif node.op != "placeholder":
            copies[node] = flat.node_copy(node, copies.__getitem__)
    for node in flat.nodes:  # what else is noted of a node may hold the graph that the program is remembered for
        node.meta = {key: node.meta[key] for key in _KEPT if key in node.meta}
    module = GraphModule(nn.Module(), flat)
    if not _propagated(module, mode):
        return None
    (result,) = (node for node in flat.nodes if node.op == "output")
    outputs = [OutputSpec(OutputKind.USER_OUTPUT, _argument(value), None) for value in result.args[0]]
    symbols = {symbol for value in values for size in value.shape for symbol in symbols_of(size)}
    signature = ModuleCallSignature([], [], info.in_spec, info.out_spec, info.orig_args)
    return torch.export.ExportedProgram(
        module, flat, ExportGraphSignature(inputs, outputs), state,
        {symbol: sizes.bound_sympy(symbol) for symbol in symbols}, [ModuleCallEntry("", signature)],
        given, constants, verifiers=[TrainingIRVerifier],
    )  # fmt: skip


class _Guarded(BaseException):
    """An operator asks for a condition on open sizes that capturing the graph has not found.

    It is no Exception, of which torch logs every one that leaves an operator.
    """


def _propagated(module: GraphModule, mode: FakeTensorMode) -> bool:
    """Finds what is known of each value of a flat graph; False, and nothing assumed, where a size would have to be."""

    def refuse(condition: Any, value: Any) -> None:
        raise _Guarded

    known = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
    assert mode.shape_env is not None
    mode.shape_env.pending_fresh_unbacked_symbols.clear()  # the ONNX exporter's, of a run with the same sizes
    with (
        torch.no_grad(),
        allocator.uncollected(),
        enable_python_dispatcher(),
        whole_sequences(),
        _plain_convolutions(),
    ):
        try:
            with mock.patch.object(mode.shape_env, "_check_frozen", refuse):  # asked before a condition is noted
                FakeTensorProp(module, mode).propagate_dont_convert_inputs(*known)
        except _Guarded:
            return False
    return True


def _kinds(graph: GraphModule, paths: Collection[str]) -> dict[str, tuple[InputKind, bool | None]]:
    """What the tensor under each path is, in the order of a state dict, and of a buffer whether that has it."""
    saved = graph.state_dict().keys()
    kinds: dict[str, tuple[InputKind, bool | None]] = {}
    kinds |= {path: (InputKind.PARAMETER, None) for path, _ in graph.named_parameters(remove_duplicate=False)}
    kinds |= {path: (InputKind.BUFFER, path in saved) for path, _ in graph.named_buffers(remove_duplicate=False)}
    kinds |= {path: (InputKind.CONSTANT_TENSOR, None) for path in paths if path not in kinds}
    return {path: kind for path, kind in kinds.items() if path in paths}


def _argument(value: Any) -> TensorArgument | ConstantArgument:
    known = value.meta["val"] if isinstance(value, Node) else value
    name = value.name if isinstance(value, Node) else ""
    return TensorArgument(name) if isinstance(known, Tensor) else ConstantArgument(name, known)


@contextlib.contextmanager
def _plain_convolutions() -> Iterator[None]:
    """Has no library chosen for a convolution, as in tracing: some are chosen by the size of the batch."""
    libraries: list[Any] = [torch.backends.mkldnn, torch.backends.nnpack, torch.backends.cudnn]
    before = [library.set_flags(False) for library in libraries]
    try:
        yield
    finally:
        for library, flags in zip(libraries, before, strict=True):
            library.set_flags(*flags)


def of_unknown_class(error: Exception) -> bool:
    """Whether ``torch.export`` does not know the container of an output; torch 2.11 says that it cannot be hashed.

    It says so of a size in a set, too.
    """
    told = str(error)
    return "register a pytree" in told or ("unhashable type" in told and "SymInt" not in told)


def to_program(model: nn.Module, example: Any, axes: tuple[int, ...] = ()) -> torch.export.ExportedProgram:
    """Exports ``model`` with a dynamic first dimension of every input tensor, and as many of ``axes`` as it leaves so.

    ``example`` is a batch of inputs: a tensor, a tuple of arguments or a dict of keyword arguments. The axes that a
    captured graph has open stay open.
    """
    args, kwargs = arguments(map_tensors(_at_least_two, example))
    know_dataclasses((args, kwargs))
    axes = tuple({*axes, *open_axes(model)})
    with torch.no_grad(), allocator.uncollected(), whole_sequences(), _named(model, kwargs), _hooks_kept():
        shapes = _dynamic(kwargs, axes) if kwargs else _gathered(model, _dynamic(args, axes))
        export = functools.partial(torch.export.export, model, args, kwargs or None, dynamic_shapes=shapes)
        try:
            with _open_sizes(model):
                return exported(export, model)
        except Exception as error:
            if of_unknown_class(error) and know_dataclasses(call(model, example)):
                return to_program(model, example, axes)
            if FIXED_SIZE not in str(error):
                raise
            with contextlib.suppress(Exception):  # the first error is the one that tells
                return export(strict=True)  # which reads the code, and so knows what int() makes of a size
            raise


def _gathered(model: nn.Module, shapes: tuple[Any, ...]) -> tuple[Any, ...]:
    """What belongs to positional arguments, those of a ``*args`` as one tuple."""
    kinds = [parameter.kind for parameter in inspect.signature(model.forward).parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL not in kinds:
        return shapes
    first = kinds.index(inspect.Parameter.VAR_POSITIONAL)
    return (*shapes[:first], shapes[first:])


@contextlib.contextmanager
def _named(model: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Has ``forward`` take keyword arguments of these names, where some of them are its ``**kwargs``.

    ``torch.export`` knows no open sizes of what a model takes under no name of its own, as wrappers do. The method is a
    class's, since reading code it would name constants by the way through a function that the model holds.
    """
    parameters, before = inspect.signature(model.forward).parameters, vars(model).get("forward")
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()) or set(names) <= set(parameters):
        yield
        return
    kind, forward = type(model), before or type(model).forward

    def named(self: nn.Module, **kwargs: Any) -> Any:
        return forward(**kwargs) if before else forward(self, **kwargs)

    kinds = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    named.__signature__ = inspect.Signature([own, *kinds])  # type: ignore[attr-defined]
    vars(model).pop("forward", None)
    model.__class__ = type(kind.__name__, (kind,), {"forward": named, "__module__": kind.__module__})
    try:
        yield
    finally:
        model.__class__ = kind
        if before is not None:
            model.forward = before


@contextlib.contextmanager
def _hooks_kept() -> Iterator[None]:
    """Takes back the hook on all modules' buffers that torch 2.11 leaves where a trace fails; nothing compiles then."""
    hooks = nn.modules.module._global_buffer_registration_hooks
    before = set(hooks)
    try:
        yield
    finally:
        for key in set(hooks) - before:
            del hooks[key]


@contextlib.contextmanager
def _open_sizes(model: nn.Module) -> Iterator[None]:
    """Keeps Python from making a number of an open size unseen, where a model's code is run to be traced.

    ``len`` of a tensor is its first size in the files that the model's classes come from (not in all, since torch keeps
    what it meets). A quotient that is made whole, which torch fixes without a word, is refused: reading the code finds
    what it is.
    """
    own: Any = Tensor.__len__
    whole: Any = torch.SymFloat.__int__

    def length(value: Any, /) -> Any:
        first = isinstance(value, Tensor) and value.dim() and type(value).__len__ is own
        return value.shape[0] if first else len(value)

    def integer(self: Any) -> int:
        if self.node.maybe_as_float() is None:
            raise RuntimeError(f"int() of {self}: {FIXED_SIZE}")
        return int(whole(self))

    names = {type(part).__module__ for part in model.modules()}
    files = [sys.modules[name] for name in names if name in sys.modules and not name.startswith(("torch.", "qtool."))]
    with contextlib.ExitStack() as changes:
        changes.enter_context(mock.patch.object(torch.SymFloat, "__int__", integer))
        for file in files:
            if not hasattr(file, "len"):
                changes.enter_context(mock.patch.object(file, "len", length, create=True))
        yield


def arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch of inputs as the positional and keyword arguments of a model."""
    if isinstance(example, Mapping):
        return (), dict(example)
    return (tuple(example) if isinstance(example, tuple | list) else (example,)), {}


def _at_least_two(value: Tensor) -> Tensor:
    return torch.cat([value, value]) if value.dim() and value.shape[0] == 1 else value


def _dynamic(value: Any, axes: tuple[int, ...]) -> Any:
    """The structure of ``value`` with a dynamic first dimension for each tensor and None for anything else.

    Of ``axes`` those are dynamic that the model does not fix.
    """
    if isinstance(value, Mapping):
        return {key: _dynamic(item, axes) for key, item in value.items()}
    if isinstance(value, tuple | list):
        items = [_dynamic(item, axes) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if is_dataclass(value):  # torch asks for a list of what is in it
        return [_dynamic(leaf, axes) for leaf in pytree.tree_leaves(value)]
    if not isinstance(value, Tensor) or not value.dim():
        return None
    wanted = {axis: torch.export.Dim.AUTO for axis in axes if axis < value.dim()}
    return wanted | {0: torch.export.Dim.DYNAMIC}


def line_of(node: Node | None) -> str:
    """``at file.py:12, `` of the innermost line outside torch that a node was traced from."""
    trace = node.meta.get("stack_trace") if node is not None else None
    places = re.findall(r'File "(.+?)", line (\d+)', trace or "")
    own = [f"at {name}:{line}, " for name, line in places if not re.search(r"^<|[/\\]torch[/\\]", name)]
    return own[-1] if own else ""
