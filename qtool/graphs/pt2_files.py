"""Opens a ``.pt2`` without ever running code that it holds.

A ``.pt2`` is a zip archive of tensors, a JSON graph and pickled example inputs, and ``torch.export.load`` trusts all
of it: it unpickles, loads compiled libraries, evaluates symbolic sizes as Python and resolves an operator's name to
any function that hangs below ``torch``. So every member is checked first, against what ``torch.export.save`` writes
for a graph of plain operators:

- members of other names (compiled code, scripted or opaque objects, older layouts) are refused, and so is an archive
  that two zip readers read differently;
- weights and constants are raw bytes; pickles are opened by torch's weights-only unpickler alone, here and in
  ``torch.export.load``, whose fallback to full unpickling is switched off for the call;
- operators are those of a few known libraries, symbolic sizes are sums and products of symbols.

Saving leaves out the stack traces that torch keeps for each operator: they tell of the machine that wrote the file.

Left out on purpose: signatures. A file that passes computes what it says, which may still not be what its sender said.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import logging
import os
import re
import types
import typing
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO
from unittest import mock

import torch

from qtool.errors import QtoolError, one_line
from qtool.graphs import lstm, pixels  # noqa: F401 - they register torch.ops.qtool
from qtool.graphs.structures import know_types, name_types
from qtool.system import allocator
from qtool.system.files import atomic_path
from qtool.system.turns import taking_turns

try:  # registers torch.ops.quantized_decomposed, which a file's operators are looked up in
    from torch.ao.quantization.fx import _decomposed  # noqa: F401
except ImportError:  # a later torch has it in torchao alone
    import torchao.quantization.pt2e  # noqa: F401

_WEIGHTS_CONFIG, _CONSTANTS_CONFIG = (
    "data/weights/model_weights_config.json",
    "data/constants/model_constants_config.json",
)
_PROGRAM, _INPUTS = "models/model.json", "data/sample_inputs/model.pt"
_MEMBERS = re.compile(
    rf"data/weights/weight_\d+|data/constants/tensor_\d+|{_WEIGHTS_CONFIG}|{_CONSTANTS_CONFIG}|{_PROGRAM}|{_INPUTS}"
    r"|archive_format|archive_version|byteorder|\.data/(version|serialization_id|alignment)|\.format_version|version"
)
_OPERATOR = re.compile(
    r"torch\.ops\.(aten|quantized_decomposed|torchvision)\.(?!from_file|__)\w+\.(?!__)\w+"
    r"|torch\.ops\.qtool\.(lstm|pixels)\.default"
    r"|torch\.ops\.higher_order\.cond"  # calls one of the file's own subgraphs, which are looked through too
    r"|torch\.ops\.aten\.__(and|or|xor|lshift|rshift)__\.(Tensor|Scalar)"  # ATen's names of masks' arithmetic
)
_ARITHMETIC = re.compile(
    r"_operator\.(add|sub|mul|truediv|floordiv|mod|pow|neg|pos|eq|ne|ge|gt|le|lt|and_|or_)"
    r"|math\.(ceil|floor|trunc|sqrt)|torch\.sym_(float|int|ite|max|min|not|sum)"
)
_FUNCTION = re.compile(
    "Symbol|Integer|Float|Rational|Add|Mul|Pow|Mod|PythonMod|Max|Min|Abs|FloorDiv|CleanDiv|CeilDiv|IntTrueDiv"
    "|FloatTrueDiv|ToFloat|TruncToInt|FloorToInt|CeilToInt|Eq|Ne|Ge|Gt|Le|Lt|Equality|Unequality|GreaterThan|LessThan"
    "|StrictGreaterThan|StrictLessThan|And|Or|Not|Identity|ModularIndexing|Where"
)
_LOGGERS = ("torch.export", "torch.export.pt2_archive._package")
_TRACES = ("stack_trace", "from_node", "torch_fn", "source_fn_stack")
_SYNTAX = (ast.Expression, ast.Call, ast.keyword, ast.Name, ast.Load, ast.Constant, ast.BinOp, ast.UnaryOp)
_SIGNS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.USub, ast.UAdd)


@taking_turns
def save_program(program: torch.export.ExportedProgram, path: Path) -> None:
    """Writes a program as ``.pt2``, atomically; its operators lose their stack traces."""
    for node in program.graph.nodes:
        for key in _TRACES:
            node.meta.pop(key, None)
    name_types(program)
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        stream = _Forgiving(file)  # a stream, lest the archive's inner folder take the temporary name
        with _overheard([]), _unproved(), allocator.uncollected():
            torch.export.save(program, stream)  # type: ignore[arg-type]
        if stream.error is not None:
            raise stream.error


class _Forgiving:
    """A stream that keeps its first error for later: torch's writer ends the process when a write fails."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        try:
            if self.error is None:
                self.file.write(data)
                self.file.flush()
        except OSError as error:
            self.error = error
        return len(data)


@taking_turns
def load_program(path: Path) -> torch.export.ExportedProgram:
    """Opens a ``.pt2`` of plain operators.

    Raises QtoolError when the file is missing, truncated, no ``.pt2``, or holds anything that loading or
    running it could run code from.
    """
    if not path.is_file():
        raise QtoolError(f"'{path}'", "a .pt2 file", "no file of that name", "run 'qtool quantize' first")
    said: list[BaseException] = []
    try:
        know_types(check_archive(path))
        with _weights_only(), _overheard(said), _hints_once(), allocator.uncollected():
            return torch.export.load(path)
    except QtoolError:
        raise
    except Exception as error:
        reason = (said or [error])[0]
        raise QtoolError(
            f"'{path}'", "a whole .pt2 file", one_line(f"{type(reason).__name__}: {reason}")[:200],
            "make it again with 'qtool quantize'",
        ) from error  # fmt: skip


@contextlib.contextmanager
def _overheard(said: list[BaseException]) -> Iterator[None]:
    """Keeps the errors that torch logs, instead of printing them: the one it raises names no cause.

    torch 2.11 also remarks that a stream has no file name, and that tensors read from a file are read only; and, of
    parts of one tensor, that it puts the whole together from them.
    """

    def keep(record: logging.LogRecord) -> bool:
        said.extend([record.exc_info[1]] if record.exc_info and record.exc_info[1] else [])
        return False

    loggers, silenced = [logging.getLogger(name) for name in _LOGGERS], logging.root.manager.disable
    for logger in loggers:
        logger.addFilter(keep)
    logging.disable(logging.NOTSET)  # the command line silences warnings, and this one has to be heard
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
            warnings.filterwarnings("ignore", "No complete tensor found in the group", UserWarning)
            yield
    finally:
        logging.disable(silenced)
        for logger in loggers:
            logger.removeFilter(keep)


@contextlib.contextmanager
def _weights_only() -> Iterator[None]:
    """torch's own switch that turns every ``torch.load`` into a weights-only one, for the block."""
    name = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextlib.contextmanager
def _unproved() -> Iterator[None]:
    """Lets torch's writer not prove that a program has a canonical form, which it does not write: half of its time."""
    from torch._export.serde import serialize

    with mock.patch.object(serialize, "canonicalize", lambda program, *_: program, create=True):
        yield


@contextlib.contextmanager
def _hints_once() -> Iterator[None]:
    """Lets torch's reader ask for the fields of a class once, not once for each object: a third of its time."""
    from torch._export.serde import serialize

    known: dict[type, dict[str, Any]] = {}

    def hints(cls: type, **names: Any) -> dict[str, Any]:
        if cls not in known:
            known[cls] = typing.get_type_hints(cls, **names)
        return known[cls]

    told = types.SimpleNamespace(**vars(typing) | {"get_type_hints": hints})
    with mock.patch.object(serialize, "typing", told, create=True):
        yield


def check_archive(path: Path) -> str:
    """The JSON of the archive's program. Raises QtoolError when it holds anything but tensors and known operators."""
    reader = torch._C.PyTorchFileReader(str(path))  # what torch.export.load reads with
    names = reader.get_all_records()
    with zipfile.ZipFile(path) as archive:
        others = [name.partition("/")[2] for name in archive.namelist()]
    if sorted(names) != sorted(others) or len(set(names)) != len(names):
        raise _unsafe(path, "the list of members", "it reads differently twice")
    for name in names:
        if not _MEMBERS.fullmatch(name):
            raise _unsafe(path, name, "nothing that a graph of plain operators has")
    for name in (_WEIGHTS_CONFIG, _CONSTANTS_CONFIG):
        _check_config(path, name, json.loads(reader.get_record(name)))
    _check_pickle(path, _INPUTS, reader.get_record(_INPUTS))
    program = reader.get_record(_PROGRAM).decode()
    try:
        _check_graph(json.loads(program))
    except _Refused as refused:
        raise _unsafe(path, _PROGRAM, str(refused)) from None
    return program


def _check_config(path: Path, name: str, config: Any) -> None:
    for entry in config["config"].values():
        if entry["use_pickle"] or not re.fullmatch(r"(weight|tensor)_\d+", entry["path_name"]):
            raise _unsafe(path, f"{name}: {entry['path_name']}", "a pickle")


def _check_pickle(path: Path, name: str, data: bytes) -> None:
    try:
        torch.load(io.BytesIO(data), map_location="meta", weights_only=True)
    except Exception as error:
        raise _unsafe(path, name, one_line(error)[:160]) from error


class _Refused(Exception):
    """What in the graph is not arithmetic; the text says it."""


def _check_graph(value: Any) -> None:
    """Walks the JSON of a program, subgraphs included."""
    if isinstance(value, list):
        for item in value:
            _check_graph(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            if key in ("target", "as_operator"):
                _check_operator(item)
            elif key == "expr_str":
                _check_size(item)
            else:
                _check_graph(item)


def _check_operator(name: Any) -> None:
    if not (isinstance(name, str) and (_OPERATOR.fullmatch(name) or _ARITHMETIC.fullmatch(name))):
        raise _Refused(f"operator {str(name)[:80]!r}")


def _check_size(text: Any) -> None:
    """A size is written as a sympy expression, which sympy reads by evaluating it as Python."""
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, TypeError, RecursionError):
        raise _Refused(f"size {str(text)[:80]!r}") from None
    for node in ast.walk(tree):
        if not isinstance(node, _SYNTAX + _SIGNS) or (
            isinstance(node, ast.Call) and not _FUNCTION.fullmatch(_name(node))
        ):
            raise _Refused(f"size {str(text)[:80]!r}")
    symbols = {id(a) for n in ast.walk(tree) if isinstance(n, ast.Call) and _name(n) == "Symbol" for a in n.args}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes) and (
            id(node) not in symbols or not re.fullmatch(r"\w+", str(node.value))
        ):  # fmt: skip
            raise _Refused(f"size {str(text)[:80]!r}")


def _name(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _unsafe(path: Path, name: str, reason: str) -> QtoolError:
    return QtoolError(
        f"'{path}'", "tensors and a graph of known operators",
        f"member '{name}', which loading could run code from ({reason})",
        "use a file that 'qtool quantize' wrote, from a source you trust",
    )  # fmt: skip
