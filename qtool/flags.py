"""From typed recipes to command-line options, and from anything that goes wrong to one line.

The options of a command are the fields of its dataclasses in :mod:`qtool.recipe`: the name, the help,
the default, the choices and the bounds are written once, there. A tuple takes a comma list or the option
several times, a table takes ``PATTERN=VALUE`` several times, and ``none`` switches an optional one off.

:class:`Program` is the one place where exceptions become exit codes. Whatever is raised below it, a wrong
option or a full disk, reaches the user as ``qtool: error: where: expected …; got …; do this`` on stderr,
with the traceback before it if ``--debug`` was given. With ``--json`` the same four parts also go to
stdout, so that a script reads one JSON object whatever happened.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args, get_origin, get_type_hints

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from qtool.errors import (
    FAILED_COMPILERS,
    ContractError,
    QtoolError,
    UsageError,
    left,
    nearest,
    one_line,
    says_that_another_ended,
)
from qtool.options import accepted, check, flag, inner_type, nearest_option
from qtool.system.files import NO_ROOM, path_of
from qtool.system.json_files import finite
from qtool.system.signals import Ended, interrupt_behind, interrupting

Decorated = TypeVar("Decorated", bound=Callable[..., Any])
INTERRUPTED = 130
OUTPUT = {
    "--debug": "Show the traceback of an error, and warnings.",
    "--quiet": "Print errors only.",
    "--json": "Print one JSON object on stdout; everything else goes to stderr.",
}
"""What every command takes, before its name as well as behind it."""


class Flag(click.Option):
    """An option that knows the heading it is listed under."""

    def __init__(self, *args: Any, section: str = "Options", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.section = section


class FieldType(click.ParamType):  # type: ignore[type-arg]  # generic only since click 8.4
    """Text from the command line as the type of one config field, checked as a recipe's value would be."""

    name = "value"

    def __init__(self, key: str, hint: Any, metadata: Mapping[str, Any]) -> None:
        self.key, self.hint, self.metadata = key, hint, metadata
        self.kind, self.optional = inner_type(hint)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and value in self.metadata.get("words", ()):
            return value  # what it stands for may lie outside the bounds, and is looked up when the config is made
        parsed = _parsed(value, self.kind, flag(self.key)) if isinstance(value, str) else value
        if self.optional and value == "none":
            parsed = None
        return check(parsed, self.hint, self.metadata, flag(self.key))

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        item = (
            "|".join(accepted(self.metadata))
            if self.metadata["choices"]
            else {int: "N", float: "X"}.get(_item_type(self.kind), "TEXT")
        )
        return {tuple: f"{item},…", dict: f"PATTERN={item}"}.get(get_origin(self.kind), item)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """What it, or the last item of a list, may be by name, or else, where it is a text, files."""
        names = [*accepted(self.metadata), *self.metadata["names"]]
        before, comma, last = incomplete.rpartition(",") if get_origin(self.kind) is tuple else ("", "", incomplete)
        found = [CompletionItem(before + comma + name) for name in names if name.startswith(last)]
        is_text = self.kind is str and not accepted(self.metadata)
        return found or ([CompletionItem(incomplete, type="file")] if is_text else [])


class PathType(click.Path):
    """A path. No text at all, as of a variable that is not set, is none: click has it name the current folder."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        assert param is not None
        assert ctx is not None
        where = flag(str(param.name)) if isinstance(param, click.Option) else param.make_metavar(ctx).strip("[]")
        return super().convert(path_of(value, where, "a path", "name one: '.' is the current folder"), param, ctx)


def _item_type(kind: Any) -> Any:
    return get_args(kind)[0] if get_origin(kind) is tuple else kind


def _parsed(text: str, kind: Any, where: str) -> Any:
    """Text as ``kind`` where it can be read so; else the text itself, which the check then refuses by name."""
    if get_origin(kind) is tuple:
        return tuple(_parsed(part.strip(), get_args(kind)[0], where) for part in text.split(",") if part.strip())
    if get_origin(kind) is dict:
        pattern, equals, value = text.partition("=")
        if not equals:
            raise UsageError(where, "PATTERN=VALUE", repr(text), "write the pattern or the name, '=' and the value")
        return {pattern: value}
    try:
        return kind(text) if kind in (int, float) else text
    except ValueError:
        return text


def field_options(
    kind: type,
    section: str,
    *,
    skip: Sequence[str] = (),
    required: Sequence[str] = (),
    alternative: bool = False,
    hidden: Sequence[str] = (),
) -> Callable[[Decorated], Decorated]:
    """A decorator that gives a command one option per field of ``kind`` (nested tables and ``skip`` left out).

    ``required`` options have no default. Where the section is an ``alternative`` to something else, the command
    itself has to see that they are there. Those ``hidden`` are read and are not in the help: the stage refuses them.
    """
    hints = get_type_hints(kind)

    def decorate(function: Decorated) -> Decorated:
        for field in reversed(dataclasses.fields(kind)):
            if field.name not in skip and not dataclasses.is_dataclass(hints[field.name]):
                how = {"required": field.name in required, "hidden": field.name in hidden}
                function = _field_option(field, hints[field.name], section, alternative, **how)(function)
        return function

    return decorate


def _field_option(
    field: dataclasses.Field[Any], hint: Any, section: str, alternative: bool, *, required: bool, hidden: bool
) -> Callable[[Decorated], Decorated]:
    name = "--" + field.name.replace("_", "-")
    default = None if required or field.default is dataclasses.MISSING else field.default
    word = next((word for word, value in field.metadata["words"].items() if value == default), default)
    shown = f"{field.metadata['help']}{_default_note(word)}"
    if hint is bool:
        return click.option(
            f"{name}/--no-{name[2:]}", field.name, cls=Flag, section=section, default=None, help=shown, hidden=hidden
        )
    multiple = get_origin(inner_type(hint)[0]) in (tuple, dict)
    kind = FieldType(field.name, hint, field.metadata)
    return click.option(
        name, field.name, cls=Flag, section=section, type=kind, multiple=multiple,
        required=required and not alternative, help=shown, hidden=hidden,
    )  # fmt: skip


def _default_note(default: Any) -> str:
    if default is None or default == ():
        return ""
    if isinstance(default, tuple):
        return f" [default: {','.join(map(str, default))}]"
    return f" [default: {str(default).lower() if isinstance(default, bool) else default}]"


def given(ctx: click.Context, kind: type) -> dict[str, Any]:
    """The fields of ``kind`` that were set on the command line, and no others: defaults stay the config's own."""
    names = [f.name for f in dataclasses.fields(kind) if f.name in ctx.params]
    return {n: _merged(ctx.params[n]) for n in names if ctx.get_parameter_source(n) is ParameterSource.COMMANDLINE}


def _merged(value: Any) -> Any:
    """Several uses of one option as one value: tuples joined, tables united."""
    if not isinstance(value, tuple):
        return value
    if None in value:
        return None
    if isinstance(value[0], Mapping):
        return _united(value)
    return tuple(item for part in value for item in part)


def _united(tables: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One table of several. Raises UsageError for a key with two values: the order of keys is that they came in."""
    found: dict[str, Any] = {}
    for key, item in (pair for table in tables for pair in table.items()):
        if found.setdefault(key, item) != item:
            raise UsageError("PATTERN=VALUE", f"one value for '{key}'", f"{found[key]} and {item}", "leave one out")
    return found


class Command(click.Command):
    """A command whose options are listed under headings and whose help ends in an example.

    ``resumes`` says that one that was stopped goes on from what it has left on disk, when it is given again.
    """

    def __init__(self, *args: Any, example: str = "", resumes: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.example, self.resumes = example, resumes

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if isinstance(param, click.Option) and (record := param.get_help_record(ctx)):
                sections.setdefault(getattr(param, "section", "Options"), []).append(record)
        for section, records in sorted(sections.items(), key=lambda item: item[0] == "Output"):
            with formatter.section(section):
                formatter.write_dl(records, col_max=min(34, formatter.width // 2))  # words break in less than that

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.example:
            with formatter.section("Example"):
                for line in self.example.splitlines():
                    formatter.write(f"  {line}\n")


class Program(click.Group):
    """The whole command line: unknown names get the nearest valid one, and every failure is one line."""

    command_class = Command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Each command, in the order of the work, with the first sentence of its help, whole."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.get_short_help_str(200)) for name, command in self.commands.items()])

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Hands the command what was typed before its name and is meant for it."""
        first = list(itertools.takewhile(OUTPUT.__contains__, args))
        rest = args[len(first) :]
        if rest and not rest[0].startswith("-"):
            rest[1:1] = first
        elif "--json" in first and not rest:  # the help would be no JSON object
            raise UsageError("qtool", "a command", "none", "see 'qtool --help'")
        return super().parse_args(ctx, rest)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not ctx.resilient_parsing and not args[0].startswith("-") and args[0] not in self.commands:
            raise UsageError("qtool", "a command", repr(args[0]), nearest(args[0], self.commands))
        return super().resolve_command(ctx, args)

    def main(  # type: ignore[override]
        self, args: Sequence[str] | None = None, prog_name: str | None = "qtool", **extra: Any
    ) -> NoReturn:
        """Runs a command line and leaves with its exit code; click's own error pages are never shown."""
        arguments = list(sys.argv[1:] if args is None else args)
        extra["standalone_mode"] = False
        _stand_in_for_closed()
        if isinstance(sys.stdout, io.TextIOWrapper):  # a sign that it has no bytes for must not cost the result
            sys.stdout.reconfigure(errors="replace")
        came: list[BaseException] = []
        try:
            with interrupting() as came:
                code = super().main(arguments, prog_name, **extra)
        except click.Abort as error:
            if isinstance(error.__cause__, EOFError):  # click takes it for the end of what somebody types
                _leave(_fail(error.__cause__, arguments))
            _leave(self._interrupted(None, arguments))
        except Ended as error:
            _leave(self._interrupted(error, arguments))
        except click.exceptions.NoArgsIsHelpError as error:
            click.echo(error.format_message(), err=True)
            _leave(UsageError.exit_code)
        except SystemExit as error:  # click leaves to this function to end the program: it comes from a user's code
            if "_QTOOL_COMPLETE" in os.environ:  # or from click, which has told a shell what may be typed next
                raise
            if _is_unread(error):  # or from click or rich, where nobody reads the output any more
                _leave(QtoolError.exit_code)
            _leave(_fail(left(error), arguments))
        except Exception as error:
            if ended := interrupt_behind(error) or next(iter(came), None):
                _leave(self._interrupted(ended, arguments))
            _leave(_fail(error, arguments))
        _leave(code if isinstance(code, int) else 0)

    def _interrupted(self, error: BaseException | None, arguments: Sequence[str]) -> int:
        """Tells what ended the program before its time, a signal or an interrupt, and returns the exit code."""
        command = next((self.commands[word] for word in arguments if word in self.commands), None)
        goes_on = isinstance(command, Command) and command.resumes
        do = f"run the same command again{' and it resumes from what is finished' if goes_on else ''}"
        how, got, code = "interrupted", "an interrupt", INTERRUPTED
        if isinstance(error, Ended):
            how, got, code = f"ended by {error.by.name}", error.by.name, 128 + error.by
        with contextlib.suppress(OSError):  # the terminal is gone
            click.echo(f"qtool: {how}; {do}", err=True)
        _tell_json(QtoolError("qtool", "to finish", got, do), code, arguments)
        return code


def _stand_in_for_closed() -> None:
    """Opens standard streams that the program was started without: the next file would be taken for them."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "r" if name == "stdin" else "w", closefd=False))


def _is_unread(error: SystemExit) -> bool:
    """Whether a library ended the program for a broken pipe; click has wrapped the streams then, and says no more."""
    return isinstance(error.__context__, BrokenPipeError) or "PacifyFlushWrapper" in type(sys.stdout).__name__


def _leave(code: int) -> NoReturn:
    """Ends the program; one of several that torchrun started at once."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        from qtool.system.launcher import leave

        leave(code)
    sys.exit(code)


def _fail(error: Exception, arguments: Sequence[str]) -> int:
    """Tells the error and returns the exit code. Looks for its flags in the raw words: parsing may have failed."""
    if "--debug" in arguments:
        import traceback

        traceback.print_exception(error)
    told = explain(error)
    with contextlib.suppress(OSError):  # nobody reads it, or the disk that takes it is full
        click.echo(f"qtool: error: {told}", err=True)
    _tell_json(told, told.exit_code, arguments)
    return told.exit_code


def _tell_json(told: QtoolError, code: int, arguments: Sequence[str]) -> None:
    """Prints the error as the one JSON object that ``--json`` promises, where it was asked for."""
    if "--json" in arguments:
        parts = {"where": told.where, "expected": told.expected, "got": told.got, "do": told.do}
        details = {"details": finite(told.details)} if isinstance(told, ContractError) and told.details else {}
        with contextlib.suppress(OSError):  # the error may be that nothing can be written there
            click.echo(json.dumps({"error": {**parts, "exit_code": code, **details}}))


def explain(error: Exception) -> QtoolError:
    """Any exception as a QtoolError: what the user can act on, and for a defect how to see its traceback."""
    if isinstance(error, UsageError) and (named := re.fullmatch(r"argument '(\w+)'", error.where)):
        return UsageError(flag(named[1]), error.expected, error.got, error.do)  # the Python function's word for it
    if isinstance(error, QtoolError):
        return error
    if isinstance(error, click.ClickException):
        return _usage(error)
    name = type(error).__name__
    if isinstance(error, MemoryError) or name == "OutOfMemoryError":
        return QtoolError("memory", "enough to go on", one_line(f"{name} {error}"), "use a smaller batch size")
    if isinstance(error, OSError):
        full = error.errno in NO_ROOM
        place = "on that disk" if error.filename else "where it goes and in the folder for temporary files (TMPDIR),"
        do = f"free space {place} and run the same command again" if full else "check the path and its permissions"
        at = error.filename2 or error.filename  # of a move where it goes to, since what is there is in the way
        where = f"'{at}'" if at else "a file"
        return QtoolError(where, "to read or write it", f"{name}: {error.strerror or error}", do)
    got = one_line(f"{name}: {error}")
    if name in FAILED_COMPILERS:
        do = "see what the compiler says with --debug, or do without what is compiled"
        return QtoolError("torch.compile", "a compiler that works", got, do)
    if "RANK" in os.environ and says_that_another_ended(error):
        return QtoolError(
            f"process {os.environ['RANK']} of {os.environ.get('WORLD_SIZE')}", "the others to go on", got,
            "see what another one said; the same command goes on from the last whole checkpoint",
        )  # fmt: skip
    return QtoolError("qtool", "no internal error", got, "run it again with --debug for the traceback and report it")


def _meant(error: click.NoSuchOption, ctx: click.Context | None) -> str | None:
    """The option that was probably meant: by what it is called elsewhere or its initials, or else one spelt like it."""
    options = {name.lstrip("-").replace("-", "_"): name for p in (ctx.command.params if ctx else ()) for name in p.opts}
    told = nearest_option(error.option_name.lstrip("-").replace("-", "_"), options)
    if found := re.fullmatch(r"did you mean '(\w+)'\?", told):
        return f"did you mean {options[found[1]]}?"
    close = difflib.get_close_matches(error.option_name, error.possibilities or (), n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else None


def _usage(error: click.ClickException) -> UsageError:
    ctx = getattr(error, "ctx", None)
    where = ctx.command_path if ctx else "qtool"
    see = f"see '{where} --help'"
    if isinstance(error, click.NoSuchOption):
        if error.option_name[1:].isdecimal():
            return UsageError(where, "a known option", error.option_name, "write -- before numbers below zero")
        return UsageError(where, "a known option", error.option_name, _meant(error, ctx) or see)
    if isinstance(error, click.MissingParameter) and error.param:
        name = error.param.opts[0] if isinstance(error.param, click.Option) else error.param.make_metavar(error.ctx)  # type: ignore[arg-type]
        return UsageError(where, name, "nothing", see)
    told = one_line(error.format_message()).rstrip(".").removeprefix("Got ")
    return UsageError(where, "a valid command line", told, see)
