"""The command line, through click's runner and as a subprocess: help, errors, exit codes, and who writes where."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import warm
from click.testing import CliRunner, Result

import qtool
from qtool import cli, pipeline
from qtool.cli import NO_REPORTS, main
from qtool.errors import ContractError, QtoolError, UsageError
from qtool.recipe import BenchmarkConfig, ExportConfig, QatConfig, QuantizeConfig, TrainConfig
from qtool.system.signals import Ended

COMMANDS = sorted(main.commands)
WORKING = [name for name in COMMANDS if name != "completion"]
HEAVY = ("torch", "numpy", "rich", "onnx", "onnxruntime")


@pytest.fixture(autouse=True)
def _untouched_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands run inside the tests' own process, whose allocator is not theirs to change."""
    monkeypatch.setenv("QTOOL_MALLOC", "0")


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    import logging

    yield
    logging.disable(logging.NOTSET)


def invoke(*words: str) -> Result:
    return CliRunner().invoke(main, list(words))


def run_python(code: str, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False, **options)


def qtool_process(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "qtool", *words], capture_output=True, text=True, check=False, **options
    )


def told(result: Result) -> str:
    """The one line of error on stderr."""
    lines = [line for line in result.stderr.splitlines() if line]
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("qtool: error: ")
    return lines[0]


def test_own_warnings_are_shown_once_and_no_library_s(small_net: str, small_data: str, tmp_path: Path) -> None:
    words = ["memory", "--model", small_net, "--data", small_data, "--batch-size", "2", "--precision", "16-true"]
    words += ["--device", "cpu"]
    told = "qtool: warning: 16-true: weights, activations and gradients must stay within ±65,504"
    assert [line.partition(";")[0] for line in qtool_process(*words).stderr.splitlines()] == [told]
    quiet = warm.Started(tmp_path / "said", warm.command, *words, "--quiet")
    assert quiet.end() == 0
    assert "warning" not in quiet.said().lower()


# Help


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_and_a_sentence(command: str) -> None:
    result = invoke(command, "--help")
    assert result.exit_code == 0
    assert f"Example:\n  qtool {command}" in result.output
    assert result.output.startswith(f"Usage: qtool {command}")


def test_help_breaks_no_word_on_a_narrow_terminal() -> None:
    done = qtool_process("quantize", "--help", env=os.environ | {"COLUMNS": "40"})
    assert "quantization-aware\n" in done.stdout


@pytest.mark.parametrize(
    "words", [["--help"], ["--version"], *([c, "--help"] for c in COMMANDS), ["completion", "zsh"]]
)
def test_help_version_and_completion_import_nothing_heavy(words: list[str]) -> None:
    code = (
        "import sys, atexit\n"
        f"atexit.register(lambda: print('LOADED', [m for m in {HEAVY!r} if m in sys.modules]))\n"
        "from qtool.cli import main; main()"
    )
    done = run_python(code, *words)
    assert done.returncode == 0, done.stderr
    assert "LOADED []" in done.stdout


def test_import_qtool_imports_nothing_heavy_and_lists_its_api() -> None:
    done = run_python(f"import sys, qtool; print(dir(qtool)); print([m for m in {HEAVY!r} if m in sys.modules])")
    assert done.stdout.splitlines()[1] == "[]"
    for name in ("train", "quantize", "export", "benchmark", "run"):
        assert f"'{name}'" in done.stdout


def test_the_public_names_exist_and_others_do_not() -> None:
    for name in qtool.__all__:
        assert getattr(qtool, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = qtool.trian  # type: ignore[attr-defined]
    assert (Path(qtool.__file__).parent / "py.typed").exists(), "so that a caller's type checker knows their types"


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ("train", TrainConfig),
        ("quantize", QuantizeConfig),
        ("quantize", QatConfig),
        ("export", ExportConfig),
        ("benchmark", BenchmarkConfig),
    ],
)
def test_every_field_is_a_flag_with_its_help_default_and_choices(command: str, kind: type) -> None:
    options = {param.name: param for param in main.commands[command].params}
    for field in dataclasses.fields(kind):
        option: Any = options[field.name]
        assert "--" + field.name.replace("_", "-") in option.opts[0]
        if not (kind is QatConfig and field.name == "seed"):
            assert field.metadata["help"] in option.help
            assert field.default in (None, dataclasses.MISSING) or "[default: " in option.help
        context = main.commands[command].make_context(command, [], resilient_parsing=True)
        assert all(choice in option.make_metavar(context) for choice in field.metadata["choices"])


def test_version() -> None:
    assert invoke("--version").output == f"qtool, version {qtool.__version__}\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_that_names_the_program(shell: str) -> None:
    result = invoke("completion", shell)
    assert result.exit_code == 0
    assert "_QTOOL_COMPLETE" in result.output


@pytest.mark.parametrize(
    ("words", "found"),
    [("qtool tra", "plain,train"), ("qtool train --prec", "plain,--precision"),
     ("qtool run fash", "plain,fashion-mnist"), ("qtool run in/a", "file,in/a"),
     ("qtool quantize --ranges en", "plain,entropy"), ("qtool quantize --ranges = en", "plain,entropy"),
     ("qtool quantize --algorithms pixels,sm", "plain,pixels,smooth"),
     ("qtool train --model mo", "plain,mobilenet"), ("qtool train --weights w", "file,w")],
)  # fmt: skip
def test_completion_completes_commands_options_choices_recipes_names_and_files(words: str, found: str) -> None:
    place = os.environ | {
        "_QTOOL_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1),
    }  # fmt: skip
    done = qtool_process(env=place)
    assert found in done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("shell", "current", "found"), [("zsh", "2", "--mode=ptq"), ("fish", "--mode=p", "plain,--mode=ptq")]
)
def test_completion_keeps_the_option_in_front_of_its_value(shell: str, current: str, found: str) -> None:
    """These shells replace all of the word, of which a bare 'ptq' took away the option."""
    words = {"_QTOOL_COMPLETE": f"{shell}_complete", "COMP_WORDS": "qtool quantize --mode=p", "COMP_CWORD": current}
    assert found in qtool_process(env=os.environ | words).stdout.splitlines()


# Wrong command lines


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["trian"], ["a command", "'trian'", "did you mean 'train'?"]),
        (["numerics", "-1.5"], ["qtool numerics", "-1", "write -- before numbers below zero"]),
        (["train", "--modle", "resnet"], ["qtool train", "--modle", "did you mean --model?"]),
        (["train", "--lr", "1e-3"], ["--lr", "did you mean --learning-rate?"]),
        (["train", "--gradient-accumulation-steps", "4"], ["did you mean --micro-batches?"]),
        (["train", "--output-dir", "x"], ["did you mean --out?"]),
        (["quantize", "--samples", "32"], ["did you mean --calibration?"]),
        (["quantize", "--fuzzy", "32"], ["got --fuzzy; see 'qtool quantize --help'"]),
        (["train", "--data", "fashion-mnist", "--out", "x"], ["qtool train: expected --model; got nothing"]),
        (["train", "--model", "resnet", "--out", "x"], ["expected --data"]),
        (["train", "--model", "resnet", "--data", "fashion-mnist"], ["expected --out"]),
        (["train", "--epochs", "four"], ["option '--epochs'", "a whole number", "'four'"]),
        (["train", "--epochs", "-3"], ["option '--epochs'", "at least 0"]),
        (["train", "--learning-rate", "nan"], ["option '--learning-rate'", "a finite number"]),
        (["train", "--precision", "bf16-mix"], ["did you mean 'bf16-mixed'?"]),
        (["train", "--epochs"], ["'--epochs' requires an argument"]),
        (["quantize"], ["neither RUN_DIR nor"]),
        (["quantize", "runs/x", "--model", "resnet"], ["RUN_DIR and --model"]),
        (["quantize", "nowhere", "--mode", "qta"], ["did you mean 'qat'?"]),
        (["quantize", "nowhere", "--overrides", "layer4"], ["PATTERN=VALUE"]),
        (["quantize", "x", "--overrides", "a=float", "--overrides", "a=int8"], ["one value for 'a'; got float and"]),
        (["export"], ["expected RUN_DIR"]),
        (["export", ""], ["RUN_DIR: expected a path; got ''; name one"]),  # of a variable that is not set
        (["report", "x", "--out", ""], ["--out", "expected a path; got ''"]),
        (["export", "a", "b"], ["qtool export"]),
        (["benchmark", "runs/x", "--batch-sizes", "1,a"], ["option '--batch-sizes'", "'a'"]),
        (["benchmark", "runs/x", "--provider", "gpu"], ["one of cpu, cuda"]),
        (["run"], ["expected RECIPE"]),
        (["run", "fashion-minst"], ["did you mean 'fashion-mnist'?"]),
        (["run", "fashion-mnist", "--set", "train.epoch=3"], ["recipe key 'train.epoch'", "did you mean 'epochs'?"]),
        (["run", "fashion-mnist", "--set", "epochs"], ["--set 'epochs'", "KEY=VALUE"]),
        (["completion", "csh"], ["qtool completion", "csh"]),
        (["inspect", "nothing.onnx"], ["nothing.onnx"]),
        (["inspect", "."], ["artifact '.'", "a folder without results"]),
        (["quantize", "nowhere"], ["run directory 'nowhere'", "no such folder"]),
        (["export", "nowhere"], ["run directory 'nowhere'", "no such folder"]),
        (["benchmark", "a", "--provider", "torch", "--device", "gpu"], ["'--device'", "cuda:N; got 'gpu'"]),
        (["benchmark", "a.onnx", "--threads", "99999999999"], ["at most 4096; got 99999999999; lower"]),
        (["export", "a", "--tune-threads", "5000"], ["at most 4096; got 5000; lower"]),
        (["benchmark", "a.onnx", "--out", "y"], ["--out without a run directory"]),
        (["benchmark", "nowhere"], ["run directory 'nowhere'", "no such folder"]),
        (["quantize", "--model", "resnet", "--data", "fashion-mnist", "--out", "x", "--ranges-from", "no.json"],
         ["'no.json'", "the ranges.json of a quantize run", "no such file"]),
        (["train", "--model", "resnt", "--data", "fashion-mnist", "--out", "x"], ["did you mean 'resnet'?"]),
        (["train", "--model", "resnet", "--data", "fashion-mnst", "--out", "x"], ["did you mean 'fashion-mnist'?"]),
        (["train", "--model", "resnet", "--data", "idx:nowhere", "--out", "x"], ["nowhere"]),
        (["train", "--model", "net.py:f", "--data", "fashion-mnist", "--out", "x"], ["factory", "net.py"]),
        (["train", "--model", "resnet", "--data", "fashion-mnist", "--task", "clasification", "--out", "x"],
         ["did you mean 'classification'?"]),
    ],
)  # fmt: skip
def test_a_wrong_command_line_is_one_line_exit_2_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], parts: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    result = invoke(*words)
    line = told(result)
    for part in parts:
        assert part in line
    assert result.exit_code == 2, line
    assert result.stdout == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [(), ("--debug", "--quiet")])
def test_without_a_command_the_help_is_shown(words: tuple[str, ...]) -> None:
    result = invoke(*words)
    assert result.exit_code == 2
    assert "Commands:" in result.stderr
    assert "Commands:" in invoke(*words, "--help").stdout


# What the functions below are asked, and what becomes of what they raise


class Asked:
    """Stands in for a function of the pipeline and keeps what it was called with."""

    def __init__(self, raises: BaseException | None = None) -> None:
        self.raises = raises
        self.positional: tuple[Any, ...] = ()
        self.named: dict[str, Any] = {}

    def __call__(self, *positional: Any, **named: Any) -> dict[str, Any]:
        self.positional, self.named = positional, named
        print("a library that prints")
        if self.raises:
            raise self.raises
        return {"value": 1.5, "infinite": float("inf")}


def inspect_raises(monkeypatch: pytest.MonkeyPatch, error: BaseException, *words: str) -> Result:
    monkeypatch.setattr(pipeline, "inspect", Asked(error))
    return invoke("inspect", "x", *words)


@pytest.mark.parametrize(
    ("error", "code", "parts"),
    [
        (UsageError("argument 'max_drop'", "a", "b", "c"), 2, ["option '--max-drop': expected a; got b; c"]),
        (ContractError("gate", "parity", "none", "look"), 3, ["gate: expected parity; got none; look"]),
        (OSError(errno.ENOSPC, "No space left on device", "a/b"), 1, ["'a/b'", "No space left", "free space"]),
        (OSError(errno.ENOSPC, "No space left on device"), 1, ["a file: ", "in the folder for temporary files"]),
        (PermissionError(errno.EACCES, "Permission denied", "a/b"), 1, ["'a/b'", "Permission denied"]),
        (PermissionError(errno.EPERM, "Operation not permitted", "a/b", None, "a/c"), 1, ["'a/c': ", "permissions"]),
        (EOFError("Ran out of input"), 1, ["no internal error; got EOFError: Ran out of input"]),
        (MemoryError(), 1, ["memory", "smaller batch"]),
        (ValueError("two\nlines"), 1, ["ValueError: two lines", "--debug"]),
        (KeyError("k"), 1, ["KeyError", "--debug"]),
        (SystemExit(0), 1, ["your code", "sys.exit(0) in ", "test_cli.py:"]),
    ],
)
def test_whatever_is_raised_is_one_line(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, parts: list[str]
) -> None:
    result = inspect_raises(monkeypatch, error, "--quiet")
    lines = result.stderr.splitlines()
    assert result.exit_code == code
    assert lines[-1].startswith("qtool: error: ")
    assert all(part in lines[-1] for part in parts)
    assert "Traceback" not in result.stderr


def test_debug_shows_the_traceback_and_json_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    result = inspect_raises(monkeypatch, RuntimeError("why"), "--debug", "--json")
    assert "Traceback" in result.stderr
    assert json.loads(result.stdout)["error"] == {
        "where": "qtool",
        "expected": "no internal error",
        "got": "RuntimeError: why",
        "do": "run it again with --debug for the traceback and report it",
        "exit_code": 1,
    }


def test_debug_shows_where_a_user_s_code_left(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "raise self.raises" in inspect_raises(monkeypatch, SystemExit(0), "--debug").stderr


def test_of_several_processes_the_end_of_another_one_is_no_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = inspect_raises(monkeypatch, RuntimeError("[gloo] Connection closed by peer"))
    assert "process 1 of 2: expected the others to go on; got RuntimeError: [gloo] Connection" in result.stderr


def test_an_interrupt_is_130_and_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    result = inspect_raises(monkeypatch, KeyboardInterrupt())
    assert result.exit_code == 130
    assert result.stderr.endswith("qtool: interrupted; run the same command again\n")
    told = json.loads(inspect_raises(monkeypatch, KeyboardInterrupt(), "--json").stdout)["error"]
    assert (told["got"], told["exit_code"]) == ("an interrupt", 130)


def test_an_interrupt_of_the_first_imports_is_130_and_no_traceback() -> None:
    code = (
        "import sys\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'click': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "from qtool.__main__ import main; main()"
    )
    done = run_python(code)
    assert (done.returncode, done.stderr) == (130, "qtool: interrupted\n")


def test_what_the_output_cannot_write_is_replaced_and_json_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "inspect", lambda *_: {"drop": "\N{MINUS SIGN}1"})
    printed, parsed = (CliRunner(charset="ascii").invoke(main, ["inspect", "x", *more]) for more in ([], ["--json"]))
    assert (printed.exit_code, printed.stdout) == (0, "drop: ?1\n")
    assert json.loads(parsed.stdout) == {"drop": "\N{MINUS SIGN}1"}


def test_json_is_one_object_whatever_libraries_print(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "inspect", Asked())
    result = invoke("inspect", "x", "--json")
    assert json.loads(result.stdout) == {"value": 1.5, "infinite": None}
    assert "a library that prints" in result.stderr


@pytest.mark.parametrize("words", [("inspect", "x", "--quiet"), ("--debug", "--quiet", "inspect", "x")])
def test_quiet_prints_nothing_on_stdout(monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]) -> None:
    monkeypatch.setattr(pipeline, "inspect", Asked())
    result = invoke(*words)
    assert (result.exit_code, result.stdout) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no such device here")
@pytest.mark.parametrize("words", [("numerics",), ("numerics", "--json")])
def test_output_that_a_full_disk_does_not_take_is_told_in_one_line(words: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "qtool", *words]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("qtool: error: a file: expected to read or write it; got OSError: No space left")
    assert done.stderr.count("\n") == 1


def test_a_current_folder_that_is_gone_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MKL ended the program: it could not load a file of PyTorch's."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    line = told(invoke("export", "x"))
    assert "current folder: expected one that exists; got one that was removed; change to" in line


@pytest.mark.skipif(not Path("/bin/sh").exists(), reason="no such shell here")
def test_streams_that_were_closed_are_open_before_any_file_is() -> None:
    code = """
import os, sys
from qtool.cli import main
try:
    main(["numerics", "--quiet"])
except SystemExit:
    print([os.path.samestat(os.fstat(n), os.stat(os.devnull)) for n in (0, 2)], sys.stderr.write("word"))
"""
    words = ["/bin/sh", "-c", 'exec "$0" -c "$1" <&- 2>&-', sys.executable, code]
    assert subprocess.run(words, capture_output=True, text=True, check=False).stdout == "[True, True] 4\n"


def test_output_that_nobody_reads_to_its_end_is_no_error_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> dict[str, Any]:
        try:
            raise BrokenPipeError
        except BrokenPipeError:
            sys.exit(1)  # as rich's console does

    monkeypatch.setattr(pipeline, "inspect", broken)
    result = invoke("inspect", "x")
    assert (result.exit_code, result.stderr) == (1, "")


@pytest.mark.parametrize(("words", "closed", "code"), [("--help", "stdout", 1), ("nonsense", "stderr", 2)])
def test_a_pipe_that_nobody_reads_ends_the_program_in_silence(words: str, closed: str, code: int) -> None:
    read, write = os.pipe()
    os.close(read)
    streams: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, closed: write}
    done = subprocess.run([sys.executable, "-m", "qtool", words], check=False, **streams)
    os.close(write)
    assert (done.returncode, done.stdout or b"", done.stderr or b"") == (code, b"", b"")


@pytest.mark.parametrize("words", [(), ("--quiet",)])
def test_quiet_has_hugging_faces_libraries_draw_no_bars(monkeypatch: pytest.MonkeyPatch, words: tuple[str]) -> None:
    names = ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS")
    found: list[str | None] = []

    def seen(*_: Any, **__: Any) -> dict[str, Any]:
        found.extend(os.environ.get(name) for name in names)
        return {}

    for name in names:
        monkeypatch.setenv(name, "")  # to have it put back
        monkeypatch.delenv(name)
    monkeypatch.setattr(pipeline, "inspect", seen)
    invoke("inspect", "x", *words)
    assert found == (["1", "1"] if words else [None, None])


@pytest.mark.parametrize(("given", "left"), [(None, "1"), ("0", "0")])
def test_onnx_runtime_sends_no_reports_unless_it_is_told_to(
    monkeypatch: pytest.MonkeyPatch, given: str | None, left: str
) -> None:
    monkeypatch.setenv(NO_REPORTS, given or "")  # to have it put back
    if given is None:
        monkeypatch.delenv(NO_REPORTS)
    inspect_raises(monkeypatch, ValueError())
    assert os.environ[NO_REPORTS] == left


@pytest.mark.parametrize(
    ("cores", "given", "words", "left"),
    [(2, None, (), "2"), (2, "5", (), "5"), (8, None, (), None), (2, None, ("--devices", "2"), None)],
)
def test_threads_are_those_that_a_control_group_gives_the_time_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cores: int, given: str | None, words: tuple[str, ...],
    left: str | None,
) -> None:  # fmt: skip
    monkeypatch.setattr(cli, "bound_cores", lambda: 8)
    monkeypatch.setattr(cli, "usable_cores", lambda: cores)
    monkeypatch.delenv("OMP_NUM_THREADS")
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    asked = Asked(ContractError("a", "b", "c", "d"))
    monkeypatch.setattr(pipeline, "train", asked)
    invoke("train", "--model", "m", "--data", "d", "--out", str(tmp_path), *words)
    assert asked.named["model"] == "m"
    assert os.environ.get("OMP_NUM_THREADS") == left


@pytest.mark.parametrize("command", WORKING)
def test_every_command_takes_json_quiet_and_debug(command: str) -> None:
    names = {name for param in main.commands[command].params for name in param.opts}
    assert {"--json", "--quiet", "--debug"} <= names


def test_only_what_was_given_reaches_the_function(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = Asked(ContractError("a", "b", "c", "d"))
    monkeypatch.setattr(pipeline, "train", asked)
    invoke("train", "--model", "m", "--data", "d", "--out", str(tmp_path), "--grad-clip", "none", "--no-channels-last")
    assert asked.named == {
        "model": "m", "data": "d", "out": tmp_path, "resume": True, "progress": True,
        "grad_clip": None, "channels_last": False,
    }  # fmt: skip


def test_lists_and_tables_are_given_with_commas_or_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(ContractError("a", "b", "c", "d"))
    monkeypatch.setattr(pipeline, "benchmark", asked)
    invoke("benchmark", "x", "--batch-sizes", "1,8", "--batch-sizes", "32", "--variants", "fp32,int8")
    assert (asked.named["batch_sizes"], asked.named["variants"]) == ((1, 8, 32), ("fp32", "int8"))
    invoke("benchmark", "x", "--out", "y")
    assert asked.named["out"] == Path("y")
    monkeypatch.setattr(pipeline, "quantize", asked)
    invoke("quantize", "x", "--overrides", "a.*=float", "--overrides", "b=int8", "--quiet")
    assert asked.named["overrides"] == {"a.*": "float", "b": "int8"}
    assert asked.named["model"] == Path("x")
    assert asked.named["progress"] is False


def test_a_recipe_reaches_the_pipeline_with_its_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(ContractError("a", "b", "c", "d"))
    monkeypatch.setattr(pipeline, "run", asked)
    assert invoke("run", "r.toml", "--set", "a=1", "--set", "b=2", "--no-resume").exit_code == 3
    assert asked.positional == ("r.toml", None)
    assert asked.named["overrides"] == ("a=1", "b=2")
    assert asked.named["resume"] is False


@pytest.mark.parametrize("words", [["inspect"], ["report", "--out", "page"]])
def test_results_that_were_cut_are_told_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    result = {"schema": 1, "stage": "benchmark", "config": {}, "inputs": {}, "outputs": {}, "environment": {}}
    (tmp_path / "benchmark.json").write_text(json.dumps(result | {"metrics": {"variants": {"fp32": {}}}}))
    monkeypatch.chdir(tmp_path)
    done = invoke(words[0], ".", *words[1:])
    assert done.exit_code == 1
    assert "expected results as the stages wrote them; got KeyError: " in done.stderr
    with pytest.raises(QtoolError, match="expected results as the stages wrote them; got KeyError: "):
        pipeline.report(".", out="page")


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        ({"outputs": {"model": {"file": "x", "sha256": "x", "size_bytes": "4 KiB"}}}, "ValueError: "),
        (
            {
                "history": {"losses": [2.0, 1.0], "epochs": [{"validation_top1": 0.5}], "ends": [math.inf]},
                "metric": "top1",
            },
            "OverflowError: ",
        ),
    ],
)
def test_results_with_values_of_another_kind_are_told_as_such(
    tmp_path: Path, damage: dict[str, Any], told: str
) -> None:
    result = {"schema": 1, "stage": "train", "config": {}, "inputs": {}, "outputs": {}, "metrics": {}}
    (tmp_path / "train.json").write_text(json.dumps(result | {"environment": {}} | damage))
    done = invoke("report", str(tmp_path))
    assert done.exit_code == 1
    assert f"expected results as the stages wrote them; got {told}" in done.stderr


def test_json_without_a_command_is_one_object_too() -> None:
    done = invoke("--json")
    assert done.exit_code == json.loads(done.stdout)["error"]["exit_code"] == 2


@pytest.mark.parametrize("words", [[], ["--json"], ["--quiet"]])
def test_a_run_that_misses_a_gate_prints_what_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setattr(pipeline, "run", Asked(ContractError("qat: gate 'parity'", "b", "c", "d")))
    asked = {"run": str(tmp_path), "variants": {"ptq": {"run": "x/ptq", "missing": ["not there yet: benchmark"]}}}
    monkeypatch.setattr(pipeline, "report", lambda place: asked)
    done = invoke("run", "r.toml", "--out", str(tmp_path), *words)
    assert done.exit_code == 3
    if words == ["--json"]:
        assert json.loads(done.stdout)["error"]["where"] == "qat: gate 'parity'"
    else:
        assert ("ptq: not there yet: benchmark" in done.stdout) == (not words)


# As a process


@pytest.mark.parametrize("command", [name for name in WORKING if name != "numerics"])  # which needs none
def test_every_command_as_a_process_tells_a_missing_argument(tmp_path: Path, command: str) -> None:
    done = qtool_process(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(Path(qtool.__file__).parents[1])})
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("qtool: error: ")
    assert len(done.stderr.splitlines()) == 1


def test_an_interrupted_process_leaves_with_130() -> None:
    code = (
        "import signal, os, sys\n"
        "from qtool import pipeline\n"
        "pipeline.inspect = lambda path: os.kill(os.getpid(), signal.SIGINT) or signal.pause()\n"
        "sys.argv[1:] = ['inspect', 'x']\n"
        "from qtool.cli import main; main()"
    )
    done = run_python(code, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
    assert done.returncode == 130
    assert "Traceback" not in done.stderr


ENDED = """
import os, pathlib, signal, sys, tempfile, time
from qtool import pipeline
number = int(sys.argv.pop())
def work(path):
    with tempfile.TemporaryDirectory(dir=os.getcwd()):
        try:
            os.kill(os.getpid(), number)
            pathlib.Path("went on").touch()
        finally:
            if "twice" in sys.argv:
                os.kill(os.getpid(), number)
    return {}
pipeline.inspect = work
from qtool.cli import main
main(["inspect", "x", *(["--json"] if "json" in sys.argv else [])])
"""


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="no such signal here")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_process_that_is_told_to_end_removes_its_temporary_files(tmp_path: Path, name: str) -> None:
    number = signal.Signals[name]
    heeding = f"import signal; signal.signal({int(number)}, signal.SIG_DFL)\n" + ENDED  # these tests may be under nohup
    done = run_python(heeding, "json", str(int(number)), cwd=tmp_path)
    assert done.returncode == 128 + number
    assert done.stderr.startswith(f"qtool: ended by {name}; run the same command again")
    assert json.loads(done.stdout)["error"]["exit_code"] == 128 + number
    assert list(tmp_path.iterdir()) == []
    assert run_python(heeding, "twice", str(int(number)), cwd=tmp_path).returncode == -number


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="no such signal here")
def test_a_hangup_that_is_ignored_stays_ignored(tmp_path: Path) -> None:
    ignoring = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + ENDED
    done = run_python(ignoring, str(int(signal.SIGHUP)), cwd=tmp_path)
    assert (done.returncode, [path.name for path in tmp_path.iterdir()]) == (0, ["went on"])


@pytest.mark.parametrize(("interrupt", "code"), [(KeyboardInterrupt(), 130), (Ended(signal.SIGTERM), 143)])
def test_an_interrupt_that_a_library_made_another_error_is_still_one(
    monkeypatch: pytest.MonkeyPatch, interrupt: BaseException, code: int
) -> None:
    error = RuntimeError("Error calling __set_name__ on 'Field'")
    error.__cause__ = interrupt
    result = inspect_raises(monkeypatch, error)
    assert (result.exit_code, "the same command" in result.stderr, "internal" in result.stderr) == (code, True, False)


@pytest.mark.parametrize(
    ("words", "resumes"),
    [(["quantize", "x"], True), (["export", "x"], False), (["benchmark", "x"], False), (["run", "r.toml"], True)],
)
def test_a_command_that_is_stopped_says_that_it_resumes_only_where_it_does(
    monkeypatch: pytest.MonkeyPatch, words: list[str], resumes: bool
) -> None:
    monkeypatch.setattr(pipeline, words[0], Asked(Ended(signal.SIGTERM)))
    told = invoke(*words).stderr.strip()
    assert told.endswith("resumes from what is finished" if resumes else "; run the same command again")


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
@pytest.mark.parametrize(
    "fails", ["AttributeError()", "QtoolError('x', 'a whole file', 'half of one', 'make it again')"]
)
def test_what_fails_of_an_interrupt_that_something_swallowed_is_told_as_that(name: str, code: int, fails: str) -> None:
    script = (
        "import contextlib, os, signal, sys\n"
        f"signal.signal(signal.{name}, signal.default_int_handler if {name!r} == 'SIGINT' else signal.SIG_DFL)\n"
        "from qtool import pipeline\n"
        "from qtool.errors import QtoolError\n"
        "def work(path):\n"
        "    with contextlib.suppress(BaseException):\n"
        f"        os.kill(os.getpid(), signal.{name}) or signal.pause()\n"
        f"    raise {fails}\n"
        "pipeline.inspect = work\n"
        "from qtool.cli import main; main(['inspect', 'x'])"
    )
    done = run_python(script)
    assert (done.returncode, "the same command" in done.stderr, "make" in done.stderr) == (code, True, False)


def test_signals_are_as_they_were_once_a_command_has_ended() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    invoke("numerics")
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


@pytest.mark.parametrize(("run", "ends"), [("", "the interpreter's end\n"), ("1", "")])
def test_a_process_of_torchruns_ends_at_once(run: str, ends: str) -> None:
    """Threads of gloo's abort the interpreter's own end now and then; what was printed is there all the same."""
    script = (
        "import atexit; from qtool.cli import main; "
        "atexit.register(print, \"the interpreter's end\"); main.main(['--version'])"
    )
    environment = {key: value for key, value in os.environ.items() if key != "TORCHELASTIC_RUN_ID"}
    environment |= {"TORCHELASTIC_RUN_ID": run} if run else {}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout == f"qtool, version {qtool.__version__}\n{ends}"
