"""Recipes as TOML files: found, read, overridden key by key, and written out.

A recipe in TOML has the shared keys at the top and a table per stage::

    model = "resnet"
    data = "fashion-mnist"

    [train]
    epochs = 4

    [quantize]
    ranges = "mse"

Files that it names are looked for beside it, as those of a Cargo or Compose file are, and then in the current folder.

``--set train.epochs=8`` overrides one key; values are read as TOML, then as plain text. TOML has no
null, so ``"none"`` switches an optional key off (``grad_clip = "none"``), here and on the command line.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from qtool.errors import UsageError, nearest
from qtool.factories import PRETRAINED, anchored
from qtool.options import as_toml, make, recipe_key
from qtool.recipe import MODES, QuantizeConfig, Recipe, as_dict

_SHIPPED = Path(__file__).parent / "recipes"
SPECS = ("model", "data", "task")
FILES = (("", "weights"), ("quantize", "calibration"), ("quantize", "ranges_from"), ("benchmark", "compare"))
"""The keys, and their stages, that name a file; what has no suffix is a name or a run directory."""


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Reads a TOML recipe and applies ``a.b=c`` overrides. Raises UsageError on anything not understood."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"recipe '{path}'", "a TOML file", str(error), "correct that line") from error
    except OSError as error:
        raise UsageError(
            f"recipe '{path}'", "a readable file", error.strerror or str(error), "check the path"
        ) from error
    return from_table(_found_beside(table, path.parent), overrides, f"recipe '{path}'")


def _found_beside(table: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """A recipe's table with the paths in it as they are from here, where what they name is in ``folder``."""

    def beside(name: str, path: str) -> str:
        return str(folder / name) if path and (folder / path).exists() else name

    return _with_paths(table, beside, lambda name: beside(name, name) if Path(name).suffix else name)


def from_anywhere(recipe: Recipe) -> Recipe:
    """The recipe with the absolute paths of what it names in the current folder: it means the same in any other."""

    def absolute(name: str, path: str) -> str:
        return str(Path(name).absolute()) if path not in ("", PRETRAINED) and Path(path).exists() else name

    return from_table(_with_paths(tomllib.loads(to_toml(recipe)), absolute, lambda name: absolute(name, name)))


def _with_paths(
    table: Mapping[str, Any], of_path: Callable[[str, str], str], of_file: Callable[[str], str]
) -> dict[str, Any]:
    """A recipe's table with other paths in it: ``of_path`` what a spec calls a path, and the path alone."""

    def of_spec(name: str) -> str:
        """A path in a spec, which may have the size of images behind it (``imagefolder:DIR:SIZE``)."""
        head, colon, size = name.rpartition(":")
        return of_path(name, head if colon and size.isdecimal() else name)

    found = {**table, **{key: anchored(table[key], of_spec) for key in SPECS if isinstance(table.get(key), str)}}
    for stage, key in FILES:
        of = found.get(stage) if stage else found
        if isinstance(of, Mapping) and isinstance(name := of.get(key), str):
            moved = {**of, key: of_file(name)}
            found = {**found, stage: moved} if stage else moved
    return found


def from_table(table: Mapping[str, Any], overrides: Sequence[str] = (), where: str = "recipe") -> Recipe:
    """The recipe of plain values, with ``a.b=c`` overrides. Raises UsageError for one that lacks a model or data.

    A quantization's mode that is named beside no variants is the variant to be made.
    """
    whole = {key: _own(value) for key, value in table.items()}
    for text in [overrides] if isinstance(overrides, str) else overrides:
        override(whole, text)
    stage = whole.get("quantize")
    mode = stage.get("mode") if isinstance(stage, Mapping) else None
    alone = {"variants": [mode]} if mode in MODES and "variants" not in whole else {}
    recipe = make(Recipe, whole | alone)
    others = recipe.variants or ()
    if mode not in (None, QuantizeConfig().mode, *others) and others:
        asked = f"one of the variants, {' or '.join(others)}"
        raise UsageError(recipe_key("quantize.mode"), asked, f"'{mode}'", "name it among the variants instead")
    for key in ("model", "data"):
        if key not in whole:
            example = as_toml(getattr(recipe, key))
            raise UsageError(where, f"a '{key}'", "none", f"name it, as in {key} = {example}")
    return recipe


def _own(value: Any) -> Any:
    """A table, and those in it, as one to change; any other value as it is."""
    return {key: _own(item) for key, item in value.items()} if isinstance(value, Mapping) else value


def recipe_names() -> list[str]:
    """The recipes that come with the package, by name."""
    return sorted(path.stem for path in _SHIPPED.glob("*.toml"))


def find_recipe(name: str) -> Path:
    """The file of a recipe: a path to a TOML file, or the name of one that comes with the package.

    Raises UsageError with the nearest name or file where there is none.
    """
    path = Path(name)
    if path.is_file():
        return path
    if (shipped := _SHIPPED / f"{name}.toml").is_file():
        return shipped
    beside = [p.name for p in path.parent.glob("*.toml")] if path.parent.is_dir() else []
    raise UsageError(
        f"recipe '{name}'", "a TOML file or the name of a recipe in the package", "neither",
        nearest(path.name, [*beside, *recipe_names()]),
    )  # fmt: skip


def override(table: dict[str, Any], text: str) -> None:
    """Applies one ``a.b=c`` to a nested table in place; a part with dots in it is quoted, as in TOML."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        got = "no key" if equals else "no '='"
        raise UsageError(f"--set '{text}'", "KEY=VALUE", got, "write for example --set train.epochs=8")
    *parents, last = _key_parts(key.strip())
    for parent in parents:
        table = table.setdefault(parent, {})
        if not isinstance(table, dict):
            raise UsageError(f"--set '{text}'", "a table", f"'{parent}' is a value", "name a key of a stage")
    table[last] = _plain_value(value)


def _key_parts(key: str) -> list[str]:
    """``a."b.c"`` as ``["a", "b.c"]``; what TOML cannot read as a key is split at its dots."""
    try:
        tree: Any = tomllib.loads(f"{key} = 0")
    except tomllib.TOMLDecodeError:
        return key.split(".")
    parts = []
    while isinstance(tree, dict):
        ((part, tree),) = tree.items()
        parts.append(part)
    return parts


def _plain_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text.strip()


def to_toml(recipe: Recipe) -> str:
    """The recipe as TOML with every key written out: ``load_recipe`` of it gives an equal recipe."""
    top = {k: v for k, v in as_dict(recipe).items() if not dataclasses.is_dataclass(getattr(recipe, k))}
    lines = [f"{key} = {as_toml(value)}" for key, value in top.items()]
    for key in (f.name for f in dataclasses.fields(recipe) if f.name not in top):
        lines += ["", f"[{key}]"]
        lines += [f"{name} = {as_toml(value)}" for name, value in _spelled(getattr(recipe, key))]
    return "\n".join(lines) + "\n"


def _spelled(config: Any) -> list[tuple[str, Any]]:
    """Names and plain values, with the words that stand for some of them."""
    words = {f.name: {value: word for word, value in f.metadata["words"].items()} for f in dataclasses.fields(config)}
    return [(name, words[name].get(value, value) if words[name] else value) for name, value in as_dict(config).items()]
