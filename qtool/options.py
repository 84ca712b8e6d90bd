"""Typed options: what a field of a config dataclass may be, and building one from plain values.

A field made by :func:`option` carries its help, its choices and bounds and the words that stand for values. The same
check serves keys of a recipe, flags of the command line and keyword arguments; only the name that an error
gives the field differs.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import math
import os
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import field
from enum import Enum
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from qtool.errors import UsageError, kind_of, nearest, one_line

Config = TypeVar("Config")
Function = TypeVar("Function", bound=Callable[..., Any])
Naming = Callable[[str], str]


ELSEWHERE = {
    "micro_batches": ("gradient_accumulation_steps", "accumulate_grad_batches", "grad_accum"),
    "batch_size": ("per_device_train_batch_size", "train_batch_size"),
    "epochs": ("num_train_epochs", "max_epochs"),
    "precision": ("fp16", "bf16", "amp", "mixed_precision"),
    "activation_checkpointing": ("gradient_checkpointing",),
    "grad_clip": ("max_grad_norm", "gradient_clip_val"),
    "warmup": ("warmup_ratio", "warmup_steps"),
    "schedule": ("lr_scheduler_type", "lr_scheduler", "scheduler"),
    "checkpoint_every": ("save_steps", "save_strategy"),
    "lora": ("lora_r", "lora_rank"),
    "lora_targets": ("target_modules",),
    "lora_trained": ("modules_to_save",),
    "strategy": ("fsdp", "distributed"),
    "overrides": ("ignored_scope", "nodes_to_exclude", "modules_to_not_convert", "exclude"),
    "calibration": ("subset_size", "samples", "num_samples", "num_calibration_samples", "calibration_samples"),
    "ranges": ("calibrate_method", "calibration_method", "calib_method"),
    "weights_only": ("weight_only",),
    "out": ("output_dir", "save_dir", "default_root_dir"),
    "task": ("loss_fn", "loss", "criterion", "compute_metrics", "eval_fn", "validation_fn"),
}
"""What an option is called in other tools, by its name here."""


def recipe_key(name: str) -> str:
    """How an error names a key of a recipe."""
    return f"recipe key '{name}'"


def argument(name: str) -> str:
    """How an error names a keyword argument of the Python functions."""
    return f"argument '{name}'"


def flag(name: str) -> str:
    """How an error names an option of the command line.

    >>> flag("grad_clip")
    "option '--grad-clip'"
    """
    return f"option '--{name.replace('_', '-')}'"


def make(kind: type[Config], values: Mapping[str, Any], name: Naming = recipe_key, *, prefix: str = "") -> Config:
    """Builds a config dataclass from plain values, checking names, types, choices and bounds.

    ``name`` turns a key into the words of the caller. A config with a method ``knowing`` is told which fields were
    given, since a value may be a default and yet be meant. Raises UsageError naming the key, what it may be
    and the nearest valid name.
    """
    hints = _hints(typing.cast(Any, kind))
    fields = {f.name: f for f in dataclasses.fields(typing.cast(Any, kind))}
    checked: dict[str, Any] = {}
    for key, value in values.items():
        if key not in fields:
            do = _place(key, hints) or nearest_option(key, fields)
            unknown = ", ".join(repr(other) for other in values if other not in fields)
            raise UsageError(name(prefix + key), "a known key" if name is recipe_key else "a known name", unknown, do)
        if dataclasses.is_dataclass(hints[key]):
            table = _table(name(prefix + key), value, f"write a [{key}] table")
            checked[key] = make(typing.cast(type, hints[key]), table, name, prefix=f"{prefix}{key}.")
        else:
            checked[key] = check(value, hints[key], fields[key].metadata, name(prefix + key))
    made = kind(**checked)
    for key, value in checked.items():
        if getattr(made, key) != value:  # the config spells out what a word stands for, over a default given by name
            wanted = f"{getattr(made, key)!r}, which another option stands for"
            raise UsageError(name(prefix + key), wanted, repr(value), "leave one of the two out")
    return made.knowing(checked) if hasattr(made, "knowing") else made


class Checked:
    """A config whose fields are checked when it is built, whoever builds it."""

    def __post_init__(self) -> None:
        """Raises UsageError naming a field with a value that it may not have."""
        hints = _hints(typing.cast(Any, type(self)))
        for made in dataclasses.fields(typing.cast(Any, self)):
            value, hint, where = plain(getattr(self, made.name)), hints[made.name], argument(made.name)
            if dataclasses.is_dataclass(hint):
                require_config(typing.cast(type, hint), value, where)
            elif value == () and inner_type(hint)[1]:
                object.__setattr__(self, made.name, None)
            else:
                kept = value in made.metadata["words"].values()
                object.__setattr__(self, made.name, value if kept else check(value, hint, made.metadata, where))


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def require_config(kind: type[Config], value: Any, where: str) -> Config:
    """``value`` if it is a config of that kind. Raises UsageError for anything else."""
    if not isinstance(value, kind):
        do = f"pass {kind.__name__}(…), or its fields by name"
        raise UsageError(where, f"a {kind.__name__}", kind_of(value), do)
    return value


def _place(key: str, hints: Mapping[str, Any]) -> str:
    """Where a key belongs that is known in a table of these alone; nothing of any other key."""
    kinds = {table: kind for table, kind in hints.items() if dataclasses.is_dataclass(kind)}
    tables = [table for table, kind in kinds.items() if key in (field.name for field in dataclasses.fields(kind))]
    return f"write it as {' or '.join(f'{table}.{key}' for table in tables)}" if tables else ""


def check(value: Any, hint: Any, metadata: Mapping[str, Any], where: str) -> Any:
    """``value`` as the hinted type (a list becomes a tuple, a whole number a float), or a UsageError at ``where``."""
    kind, optional = inner_type(hint)
    value = plain(value)
    if isinstance(value, str) and value in metadata.get("here", ()):
        value = metadata["here"][value]()
    if isinstance(value, str) and value in metadata.get("words", ()):
        return metadata["words"][value]
    if optional and (value is None or value in ("none", ["none"], ("none",))):
        return None
    if get_origin(kind) is dict:
        items = _table(where, value, "give each name its value").items()
        if nested := next((key for key, item in items if isinstance(item, Mapping)), None):
            do = "quote the whole of a name with dots in it"
            raise UsageError(where, f"a value for '{nested}'", f"a table {value[nested]!r}", do)
        return {str(key): check(item, get_args(kind)[1], metadata, where) for key, item in items}
    if get_origin(kind) is tuple:
        if not isinstance(value, list | tuple) or not value:
            got = "an empty list" if value in ([], ()) else repr(value)
            raise UsageError(
                where,
                "a list of at least one value",
                got,
                _as_list(value, kind) if value else f"add one{' or pass none' * optional}",
            )
        return tuple(check(item, get_args(kind)[0], metadata, where) for item in value)
    if kind is str and optional and value == "" and not metadata.get("choices"):  # a variable not set
        raise UsageError(where, "a text", "''", "name what is meant, or leave it out")
    return _bounded(_scalar(value, kind, where, metadata), metadata, where)


def plain(value: Any) -> Any:
    """What a script has in place of a plain value, as that; anything else as it is.

    That is numbers and arrays of numpy and torch, ranges, paths, torch's devices and members of enumerations of text.

    >>> from pathlib import Path
    >>> plain(Path("ranges.json")), plain(range(1, 3)), plain(7)
    ('ranges.json', [1, 2], 7)
    """
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, range):
        return list(value)
    if isinstance(value, Enum) and isinstance(value, str):
        return value.value
    if hasattr(value, "dtype") and hasattr(value, "tolist"):
        return value.tolist()
    kind = type(value)  # torch is not imported for this
    return str(value) if (kind.__module__, kind.__name__) == ("torch", "device") else value


def nearest_option(name: str, names: Iterable[str]) -> str:
    """The end of an error's *do this* for an option of that name: the one that it is elsewhere, or the most like it.

    >>> nearest_option("gradient_accumulation_steps", ["micro_batches"]), nearest_option("epoch", ["epochs"])
    ("did you mean 'micro_batches'?", "did you mean 'epochs'?")
    """
    known = {*names, "out", "task"}  # which are no options of a config
    meant = [here for here, there in ELSEWHERE.items() if name in there and here in known]
    return f"did you mean {meant[0]!r}?" if meant else nearest(name, names)


def _as_list(value: Any, kind: Any) -> str:
    """The advice where no list was given: to write the parts between commas, or those of a set or table, as one."""
    item = get_args(kind)[0]
    if isinstance(value, Iterable) and not isinstance(value, str):
        found = list(map(str, value))
        parts = sorted(found) if isinstance(value, Set) else found  # a set's own order differs in each process
    else:
        text = str(value).strip().removeprefix("[").removesuffix("]")
        parts = [part.strip(" '\"") for part in text.split(",")]
    if item is str:
        return f"write [{', '.join(map(as_toml, parts))}]"
    try:
        list(map(item, parts))
    except ValueError:
        return "write numbers alone, between brackets"
    return f"write [{', '.join(parts)}]"


def inner_type(hint: Any) -> tuple[Any, bool]:
    """The type within ``T | None``, and whether None was allowed.

    >>> inner_type(int | None)
    (<class 'int'>, True)
    """
    allowed = get_args(hint) if get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
    return next(a for a in allowed if a is not type(None)), type(None) in allowed


def _table(where: str, value: Any, do: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UsageError(where, "a table of names and values", repr(value), do)
    return value


def accepted(metadata: Mapping[str, Any]) -> tuple[str, ...]:
    """The choices of a field, and the words that it takes beside them."""
    return (*metadata.get("choices", ()), *metadata.get("words", ()), *metadata.get("here", ()))


def _scalar(value: Any, kind: type, where: str, metadata: Mapping[str, Any]) -> Any:
    if kind is float and type(value) is int:
        value = float(value)
    in_bytes = kind is str and metadata.get("unit") == "bytes"  # text, whose number may have another unit behind it
    if in_bytes and type(value) in (int, float) and value % 1 == 0:
        value = str(int(value))
    if type(value) is not kind:
        text = "text or a whole number of bytes" if in_bytes else "text"
        names = {str: text, int: "a whole number", float: "a number", bool: "true or false"}
        words = accepted(metadata)
        either = " or ".join([names.get(kind, kind.__name__), *words])
        expected = f"one of {', '.join(words)}" if metadata.get("choices") else either
        raise UsageError(where, expected, one_line(repr(value))[:80], "correct the value")
    return value


def _bounded(value: Any, metadata: Mapping[str, Any], where: str) -> Any:
    choices, low, high = metadata.get("choices", ()), metadata.get("low"), metadata.get("high")
    unit = f" {metadata['unit']}" if metadata.get("unit") else ""
    if choices and value not in choices:
        words = accepted(metadata)
        raise UsageError(where, f"one of {', '.join(words)}", repr(value), nearest(str(value), words))
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(where, "a finite number", repr(value), "correct the value")
    if low is not None and value < low:
        raise UsageError(where, f"at least {low}{unit}", repr(value), "raise the value")
    if high is not None and value > high:
        raise UsageError(where, f"at most {high}{unit}", repr(value), "lower the value")
    return value


def option(
    default: Any, help: str, *, choices: Sequence[str] = (), low: float | None = None, high: float | None = None,
    words: Mapping[str, Any] | None = None, here: Mapping[str, Callable[[], Any]] | None = None, unit: str = "",
    names: Sequence[str] = (),
) -> Any:  # fmt: skip
    """A field with its help text, its choices, its bounds (both included), the words that stand for values, its unit.

    ``names`` are among what it may be, for the shell to complete. Words ``here`` stand for what their functions give on
    this machine, which is what a config then holds.
    """
    metadata = {
        "help": help,
        "choices": tuple(choices),
        "low": low,
        "high": high,
        "words": words or {},
        "here": here or {},
        "unit": unit,
        "names": tuple(names),
    }
    if isinstance(default, dict | list):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def documented(*kinds: type) -> Callable[[Function], Function]:
    """Has a function's help end with the options that it takes by keyword: the fields of config dataclasses.

    Of a class derived from another one, its own fields alone are listed.
    """

    def with_options(function: Function) -> Function:
        parts = [inspect.cleandoc(function.__doc__ or "")]
        for kind in kinds:
            parts += [f"Options, the fields of {kind.__name__}:", "\n".join(_entries(kind))]
        function.__doc__ = "\n\n".join(parts)
        return function

    return with_options


def _entries(kind: Any) -> Iterator[str]:
    """A line for each option: its name, its default, what it says, what it may be."""
    for made in dataclasses.fields(kind):
        if made.name in kind.__annotations__:
            factory: Any = made.default_factory
            default = made.default if factory is dataclasses.MISSING else factory()
            words = made.metadata.get("words", {})
            default = next((word for word, value in words.items() if value == default), default)
            choices = accepted(made.metadata) if made.metadata.get("choices") else ()
            text = f"{made.name}={default!r}: {made.metadata['help']}" + (
                f" ({' | '.join(choices)})" if choices else ""
            )
            yield textwrap.fill(text, 110, initial_indent="    ", subsequent_indent="        ")


def as_toml(value: Any) -> str:
    """A plain value as TOML spells it."""
    if value is None:
        return '"none"'
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{as_toml(k)} = {as_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(as_toml, value)) + "]"
    # JSON's spelling of text, numbers and booleans is TOML's, but for the one control character it leaves bare
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
