"""Capture: from an ``nn.Module`` to the one graph that everything here works on.

``torch.export`` with a dynamic batch gives a graph of ATen operators in which batch-norm, dropout and
activations are still whole. It is then made uniform, so that a placement has one spelling of each operator
to look for (``functional.py``, ``linears.py``); the guards that torch inserts are dropped, since shapes are the ONNX
file's contract and not the graph's; calls that repeat another become one (``repeats.py``); and every operator learns
which module it came from (``owner``), the name that a user knows it by. Modules that the graph leaves out, such as a
head for training alone, are named in its ``meta["notes"]``, and so is what it asks of a batch's size; ``any_batch``
there says that it asks nothing, and ``guards`` what it asks of sizes at all (``conditions.py``).

What becomes of batch-norm is told in ``norms.py``. What is left out on purpose: FX symbolic tracing as a
second way in.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.nn.modules import transformer
from torch.utils import _pytree as pytree

from qtool.errors import QtoolError, UsageError, reason_of
from qtool.forward import made_in_inference
from qtool.graphs.edits import drop_unused, owner
from qtool.graphs.operators import CONVOLUTIONS
from qtool.graphs.own_numbers import NOTES, READING, UNKNOWN
from qtool.graphs.programs import FIXED_SIZE, as_graph, line_of, of_unknown_class, to_program
from qtool.graphs.shapes import input_values, open_axes
from qtool.graphs.structures import foreign
from qtool.models.specs import capturable, modes_kept
from qtool.nested import call, map_tensors, misnamed, tensors
from qtool.quantization.capturing.conditions import guards_of, of_batches
from qtool.quantization.capturing.names import respell, spelled
from qtool.quantization.rewrites.bfloats import write_floats
from qtool.quantization.rewrites.functional import functionalized, make_functional, mutations
from qtool.quantization.rewrites.linears import write_linears
from qtool.quantization.rewrites.repeats import merge_repeats
from qtool.system.quiet import quiet_export

DEFAULT_MOMENTUM = 0.1
NORM_LAYERS = (nn.modules.batchnorm._BatchNorm,)
DROPOUT_LAYERS = (nn.modules.dropout._DropoutNd,)
"""Layers that are captured as in training where the graph is to be trained; ``set_training`` switches them."""
_REAL = "have its forward return torch.view_as_real of it"
NO_NUMPY = dict.fromkeys((torch.complex32, torch.complex64, torch.complex128), _REAL) | {
    torch.bfloat16: "have its forward return .float() of it"
}
"""Types of outputs that numpy or ONNX does not have, and what to do about them."""


def capture(
    model: nn.Module, example: Any, *, train: bool = False, norms: bool = True, axes: tuple[int, ...] = ()
) -> GraphModule:
    """Captures ``model`` with a dynamic first dimension of every input tensor.

    ``example`` is a batch of inputs: a tensor, a tuple of arguments or a dict of keyword arguments, batch
    first (a single sample is doubled, since torch treats a batch of one as a constant). Evaluation mode is captured,
    since that is what is shipped; with ``train`` dropout layers are live in it, and with ``norms`` batch-norm too. What
    else a model does in training alone (drop paths, noise, outputs for a loss of their own) has no part in either.
    The model itself, its weights included, is left as it was. Batch-norm that averages cumulatively (momentum None) is
    captured with torch's default momentum, since a graph cannot hold a momentum that depends on a count. ``axes`` are
    those behind the first whose size is open as well, in every input that has them.

    Raises UsageError for one of ``axes`` that the model fixes, QtoolError naming the user's line when the model refuses
    the example or ``torch.export`` cannot capture it, when weights or inputs are floats of another size than 32
    bits, when it has control flow beyond a ``torch.cond``, and when outputs are numbers or sizes, or tensors in a type
    that runtimes do not give.
    """
    _require_float32(("example input", value) for value in tensors(example))
    parameters = [(f"parameter '{name}'", value) for name, value in model.named_parameters()]
    averages = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._NormBase) and m.momentum is None]
    with modes_kept(model), capturable(model):
        set_modes(model, train=train, norms=norms)
        try:
            for norm in averages:
                norm.momentum = DEFAULT_MOMENTUM
            with quiet_export(), _masks_unread():
                program = to_program(model, example, axes)
        except Exception as error:
            _require_float32(parameters)
            raise _refused(model, example, error) from error
        finally:
            for norm in averages:
                norm.momentum = None
    read = {id(program.state_dict.get(name)) for name in _read(program)}
    _require_float32((where, value) for where, value in parameters if id(value) in read)
    respell(program)
    graph_module = as_graph(program)
    _require_tensors(model, graph_module)
    _require_no_numbers(graph_module)
    for axis in axes:
        _require_open(graph_module, axis)
    make_functional(graph_module)
    _require_branches(graph_module)
    if mutations(graph_module):
        if train:
            return _evaluated(model, example, axes)
        graph_module = functionalized(program)
    guards = guards_of(program)
    conditions = tuple(f"captured for batches with {guard}" for guard in of_batches(guards, model, example))
    graph_module.meta["guards"] = guards
    numbers = program.graph_module.meta.get(NOTES, ())
    graph_module.meta["notes"] = (*_left_out(model, graph_module), *_fixed(graph_module), *numbers, *conditions)
    graph_module.meta["any_batch"] = not conditions
    _detach_parameters(graph_module)
    _require_groups(graph_module)
    write_floats(graph_module)
    if write_linears(graph_module):
        drop_unused(graph_module)
    for node in graph_module.graph.nodes:
        if node.op == "call_function":
            node.meta["owner"] = owner(node)
    if merge_repeats(graph_module):
        drop_unused(graph_module)
    return graph_module


@contextmanager
def _masks_unread() -> Iterator[None]:
    """torch's transformers compare a mask with a causal one, whose values no graph can ask for, to choose a kernel.

    Unread, the mask is applied as it is.
    """
    with mock.patch.object(transformer, "_detect_is_causal_mask", lambda _, is_causal=None, size=None: bool(is_causal)):
        yield


def set_modes(model: nn.Module, *, train: bool, norms: bool = True) -> None:
    """Evaluation mode; with ``train`` dropout is in training mode all the same, and with ``norms`` batch-norm."""
    live = (*NORM_LAYERS, *DROPOUT_LAYERS) if norms else DROPOUT_LAYERS
    model.eval()
    for module in model.modules():
        module.training = train and isinstance(module, live)


def _require_open(graph_module: GraphModule, axis: int) -> None:
    if axis in open_axes(graph_module):
        return
    values = input_values(graph_module.graph).values()
    sizes = [int(value.shape[axis]) for value in values if value.dim() > axis]
    got = f"axis {axis}, which it fixes to {sizes[0]}" if sizes else f"axis {axis}, which no input has"
    do = "have the model read x.shape instead of a number, or leave it out" if sizes else "leave it out"
    if set(sizes) == {1}:
        do = "calibrate with larger inputs: torch.export takes a size of 1 for the model's own"
    raise UsageError("--dynamic-axes", "axes of the inputs whose size the model leaves open", got, do)


def _require_tensors(model: nn.Module, graph_module: GraphModule) -> None:
    (result,) = (node for node in graph_module.graph.nodes if node.op == "output")
    if kind := foreign(graph_module.graph._codegen.pytree_info.out_spec):  # type: ignore[attr-defined]
        raise QtoolError(
            f"model '{type(model).__name__}'", "outputs in tuples, lists, dicts, named tuples or dataclasses",
            f"a {kind}", "return its tensors in one of those, in a module around the model",
        )  # fmt: skip
    given = {value.dtype for value in input_values(graph_module.graph).values()}  # of which the first call tells
    for leaf in pytree.tree_leaves(result.args[0]):
        if leaf is not None and not (isinstance(leaf, Node) and isinstance(leaf.meta.get("val"), Tensor)):
            got = repr(leaf)[:40] if not isinstance(leaf, Node) else f"a size, {leaf.meta.get('val')}"
            raise QtoolError(
                f"model '{type(model).__name__}'", "outputs that are tensors, or None", got,
                "have its forward return tensors alone",
            )  # fmt: skip
        if leaf is not None and leaf.meta["val"].dtype in NO_NUMPY.keys() - given:
            raise QtoolError(
                f"model '{type(model).__name__}'", "outputs of a type that runtimes hand out",
                str(leaf.meta["val"].dtype).removeprefix("torch."), NO_NUMPY[leaf.meta["val"].dtype],
            )  # fmt: skip
    if any(isinstance(value, torch.Generator) for value in vars(graph_module).values()):
        raise _draws_by_itself(model)


def _require_no_numbers(graph_module: GraphModule) -> None:
    """No float is read from a tensor by code that goes on with it: files compute with tensors."""
    for node in graph_module.graph.nodes:
        if node.target in READING and isinstance(node.meta.get("val"), torch.SymFloat):
            raise QtoolError(
                "model", "code that computes with tensors", "a number that is read from one, as .item() does",
                f"{line_of(node)}go on with the tensor itself",
            )  # fmt: skip


def _require_groups(graph_module: GraphModule) -> None:
    """No file could hold a convolution in groups as many as the batch has samples, each with a kernel of its own."""
    for node in graph_module.graph.nodes:
        if node.target in CONVOLUTIONS and any(isinstance(groups, Node) for groups in node.args[6:7]):
            raise QtoolError(
                f"module '{owner(node)}'" if owner(node) else "model", "convolutions whose groups are a number",
                f"'{node.name}', whose groups are counted from the inputs, where ONNX has a fixed number",
                f"{line_of(node)}have no kernel for each sample: scale what goes into one and what comes out, or mix "
                "what several give",
            )  # fmt: skip


def _require_branches(graph_module: GraphModule) -> None:
    """Of what is called as a graph within the graph, files hold the branches of ``torch.cond`` alone."""
    held = {name for name, child in graph_module.named_children() if isinstance(child, GraphModule)}
    for node in graph_module.graph.nodes:
        within = [getattr(graph_module, str(a.target)) for a in node.all_input_nodes if a.target in held]
        nested = [inner for part in within for inner in part.children() if isinstance(inner, GraphModule)]
        if within and (node.target is not torch.ops.higher_order.cond or nested):
            name = "torch.cond within torch.cond" if node.target is torch.ops.higher_order.cond else str(node.target)
            place = next(filter(None, (line_of(n) for n in (node, *within[0].graph.nodes))), "")
            raise QtoolError(
                "model", "control flow of torch.cond alone, no branch of which has control flow in turn", name,
                f"{place}write it as plain operators, without autocast, or quantize the modules around it",
            )  # fmt: skip


def _draws_by_itself(model: nn.Module) -> QtoolError:
    return QtoolError(
        f"model '{type(model).__name__}'", "random numbers of torch's own generator", "a torch.Generator of its own",
        "have it draw without generator=…, and seed with torch.manual_seed",
    )  # fmt: skip


def _require_float32(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raises QtoolError where one of some values is a float of another size than 32 bits."""
    for where, value in named:
        if value.is_floating_point() and value.dtype != torch.float32:
            found = str(value.dtype).removeprefix("torch.")
            raise QtoolError(where, "float32", found, "convert the model and its inputs with .float() first")


def _read(program: torch.export.ExportedProgram) -> set[str]:
    """The names of the parameters that a program reads."""
    taken = program.graph_signature.inputs_to_parameters
    return {taken[node.name] for node in program.graph.nodes if node.name in taken and node.users}


def _refused(model: nn.Module, example: Any, error: Exception) -> QtoolError:
    """What to tell of a failed capture: that the model itself refuses the example, or that it cannot be captured."""
    where = f"model '{type(model).__name__}'"
    try:
        with torch.no_grad():
            call(model.eval(), example)
    except QtoolError as refusal:  # a part of a model that was rebuilt says itself what it cannot do
        return refusal
    except Exception as refusal:
        shapes = ", ".join(_described(value) for value in tensors(example))
        do = misnamed(refusal, model) or (
            "give batches of tensors, such as torch.from_numpy makes of arrays" if not shapes
            else "check the size, the channels and the type of the inputs"
        )  # fmt: skip
        return QtoolError(
            where, "inputs that it takes", f"inputs {shapes or 'without a tensor'}: {reason_of(refusal)}",
            f"{user_line(refusal)}{do}",
        )  # fmt: skip
    if "torch._C.Generator" in str(error):  # torch 2.11 does not capture it
        return _draws_by_itself(model)
    if found := re.search(r"Unsupported input type <class '(?:.+\.)?(.+?)'>", str(error)):
        return QtoolError(
            where, "inputs of tensors, in tuples, lists, dicts and dataclasses", f"one of class {found[1]}",
            f"wrap it in a module that takes the tensors, and makes the {found[1]} of them in forward",
        )  # fmt: skip
    wanted = "a graph that torch.export can capture with a dynamic batch"
    if FIXED_SIZE in str(error):
        if len({value.shape[0] for value in tensors(example) if value.dim()}) > 1:
            return QtoolError(
                where, "inputs that all count samples by their first dimension",
                ", ".join(map(_described, tensors(example))),
                "have it take a recurrent state batch first, and turn it in forward: state.transpose(0, 1)",
            )  # fmt: skip
        do = "write x.shape[0] for len(x), and -1 for the batch in a view"
        if all(value.dim() < 2 for value in tensors(example)):
            do += f"; or give batches, if {', '.join(map(_described, tensors(example)))} is one sample"
        return QtoolError(
            where, wanted, "code that takes the batch size for a constant", f"{_fixed_batch(model, example)}{do}"
        )
    return QtoolError(where, wanted, reason_of(error), f"{user_line(error)}{_what_to_do(error)}")


def _what_to_do(error: Exception) -> str:
    """The way out of a failed capture, by what torch says of it."""
    if of_unknown_class(error):
        return "return a tuple, a dict or a dataclass"
    if told := made_in_inference(error):
        return told
    if UNKNOWN in str(error):
        return (
            "rewrite that part without sizes or Python control flow that depend on values, or quantize the model "
            "without it: of a detector a module of its backbone and heads, with what chooses boxes outside"
        )
    return "rewrite that part without Python control flow that depends on values or the batch size"


def _described(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} of shape {list(value.shape)}"


def _fixed_batch(model: nn.Module, example: Any) -> str:
    """Where the model refuses a batch of one sample more; empty where it does not."""
    try:
        with torch.no_grad():
            call(model, map_tensors(lambda tensor: torch.cat([tensor, tensor[:1]]), example))
    except Exception as refusal:
        return user_line(refusal)
    return ""


def _evaluated(model: nn.Module, example: Any, axes: tuple[int, ...]) -> GraphModule:
    """The evaluation form where the training form writes into tensors: torch's functionalization knows it alone."""
    graph_module = capture(model, example, axes=axes)
    if any(isinstance(module, DROPOUT_LAYERS) for module in model.modules()):
        note = "dropout is off in training too, since the model writes into tensors while views of them are read"
        graph_module.meta["notes"] = (*graph_module.meta["notes"], note)
    return graph_module


def _left_out(model: nn.Module, graph_module: GraphModule) -> tuple[str, ...]:
    """A note for each outermost module with parameters of which the graph reads none."""
    read = {str(node.target) for node in graph_module.graph.nodes if node.op == "get_attr" and node.users}
    names = [(name, id(value)) for name, value in model.named_parameters(remove_duplicate=False)]
    alive = {key for name, key in names if name in read or spelled(name) in read}
    found: list[str] = []
    for path, module in model.named_modules():
        keys = {id(value) for value in module.parameters()}
        if path and keys and not keys & alive and not any(path.startswith(f"{other}.") for other in found):
            found.append(path)
    return tuple(f"module '{path}' is no part of the captured graph" for path in found)


def _fixed(graph_module: GraphModule) -> tuple[str, ...]:
    """A note for each input that is a number or a word, which the graph holds as a constant."""
    inputs = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    given = [(node.target, node.meta.get("val")) for node in inputs]
    return tuple(
        f"input '{name}' is fixed to {value!r}" for name, value in given if isinstance(value, str | int | float)
    )


def _detach_parameters(graph_module: GraphModule) -> None:
    """Gives the graph its own copy of the weights, so that folding never writes into the user's model."""
    seen: dict[int, Tensor] = {}
    for module in graph_module.modules():
        for name, value in list(module._parameters.items()):
            if value is not None:
                key = id(value)
                seen.setdefault(key, nn.Parameter(value.detach().clone(), requires_grad=value.requires_grad))
                module._parameters[name] = seen[key]  # type: ignore[assignment]
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                seen.setdefault(id(buffer), buffer.detach().clone())
                module._buffers[name] = seen[id(buffer)]


def user_line(error: BaseException) -> str:
    """``at file.py:12, `` of the innermost frame outside torch and qtool, for the error's *do this*."""
    found = ""
    current: BaseException | None = error
    while current is not None:
        frame = current.__traceback__
        while frame is not None:
            name = frame.tb_frame.f_code.co_filename
            if not any(part in name for part in _NOT_THE_USERS):
                found = f"at {name}:{frame.tb_lineno}, "
            frame = frame.tb_next
        current = current.__cause__ or current.__context__
    return found


_NOT_THE_USERS = ("/torch/", "\\torch\\", str(Path(__file__).parents[2]), os.path.dirname(os.__file__) + os.sep, "<")
