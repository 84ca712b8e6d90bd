"""The command line: parse, call one function of the pipeline, print what it returned.

Nothing is decided here. The options come from the recipe's dataclasses (:mod:`qtool.flags`), the work is
in :mod:`qtool.pipeline`, the tables in :mod:`qtool.reporting`. torch is imported only when a command that
needs it has been parsed without error, so that help, completion and wrong command lines answer at once.

Results go to stdout, everything else to stderr: with ``--json`` stdout is one JSON object.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem, get_completion_class

from qtool.artifacts import read_result, whole
from qtool.errors import ContractError, QtoolError, QtoolWarning, UsageError, warning_line
from qtool.flags import OUTPUT, Command, Flag, PathType, Program, field_options, given
from qtool.options import flag, make
from qtool.recipe import (
    CONTRACT_FIELDS,
    BenchmarkConfig,
    ExportConfig,
    QatConfig,
    QuantizeConfig,
    Recipe,
    TrainConfig,
)
from qtool.recipe_files import recipe_names
from qtool.shells import SHELLS
from qtool.system.control_groups import bound_cores, usable_cores
from qtool.system.files import names_file
from qtool.system.json_files import finite
from qtool.version import __version__

Decorated = TypeVar("Decorated", bound=Callable[..., Any])
RUN_DIR = PathType()
NO_REPORTS = "ORT_DISABLE_TELEMETRY"
"""Keeps ONNX Runtime from sending reports, for which it writes into the home folder, and complains where it cannot."""
HUSH = (
    "HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS", "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT",
)  # fmt: skip
"""What Hugging Face's libraries read, when they are imported, to draw no progress bars, and MLflow to name no links."""


@click.group("qtool", cls=Program, no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="qtool")
def main() -> None:
    """From a PyTorch model to an INT8 ONNX file that is proven to be that model.

    The stages are train, quantize, export and benchmark; each takes the run directory that the one before it
    wrote. 'qtool run' does all four from a recipe: try 'qtool run fashion-mnist'.
    """


def command(name: str, example: str, *, resumes: bool = False) -> Callable[[Callable[..., None]], click.Command]:
    """Registers a command, with an example under its help and the options that every command takes."""

    def register(function: Callable[..., None]) -> click.Command:
        function = click.pass_context(function)
        for word, text in OUTPUT.items():
            inside = word.replace("--", "as_")
            function = click.option(word, inside, cls=Flag, section="Output", is_flag=True, help=text)(function)
        return main.command(name, cls=Command, example=example, resumes=resumes)(function)

    return register


def out_option(text: str, *, required: bool = False) -> Callable[[Decorated], Decorated]:
    """``--out``: the run directory that a stage writes."""
    return click.option("--out", type=RUN_DIR, metavar="RUN_DIR", required=required, help=text)


trust_option = click.option("--trust", is_flag=True, help="Run a recorded file.py:factory although its file changed.")

mlflow_option = click.option(
    "--mlflow",
    metavar="URI",
    help="Also log the run's parameters, metrics and files to this MLflow server or database.",
)


@command(
    "train",
    "qtool train --model resnet --data fashion-mnist --epochs 4 --precision bf16-mixed --out runs/a",
    resumes=True,
)
@out_option("Where the weights and train.json go.", required=True)
@click.option("--resume/--no-resume", default=True, help="Continue a run that was stopped there. [default: resume]")
@field_options(Recipe, "Source", skip=("variants",), required=("model", "data"))
@field_options(TrainConfig, "Training")
def train(ctx: click.Context, out: Path, resume: bool, **_: Any) -> None:
    """Train or fine-tune a model, and write its weights into a run directory."""
    with work(ctx) as pipeline:
        pipeline.train(out=out, resume=resume, progress=loud(ctx), **given(ctx, Recipe), **given(ctx, TrainConfig))
    show(ctx, out, "train")


@command(
    "quantize",
    "qtool quantize runs/a --mode ptq\n"
    "qtool quantize --model net.py:build --weights net.safetensors --data idx:mnist --out runs/b",
    resumes=True,
)
@click.argument("run_dir", type=RUN_DIR, required=False)
@out_option("Where the quantized model and quantize.json go. [default: RUN_DIR]")
@trust_option
@field_options(Recipe, "Source (instead of RUN_DIR)", skip=("variants",), required=("model", "data"), alternative=True)
@field_options(QuantizeConfig, "Quantization")
@field_options(QatConfig, "Fine-tuning, with --mode qat", skip=("seed", "device"))
def quantize(ctx: click.Context, run_dir: Path | None, out: Path | None, trust: bool, **_: Any) -> None:
    """Quantize a model to INT8: the trained one in RUN_DIR, or --model with --weights and --data."""
    source = given(ctx, Recipe)
    if run_dir and source:
        raise click.UsageError(f"RUN_DIR and {', '.join('--' + name for name in source)}, of which one is enough", ctx)
    if not run_dir and not (out and {"model", "data"} <= source.keys()):
        raise click.UsageError("neither RUN_DIR nor all of --model, --data and --out", ctx)
    options = source | given(ctx, QuantizeConfig) | given(ctx, QatConfig)
    with work(ctx) as pipeline:
        pipeline.quantize(
            **({"model": run_dir} | options if run_dir else options), out=out, trust=trust, progress=loud(ctx)
        )
    show(ctx, out or run_dir, "quantize")


@command("sensitivity", "qtool sensitivity runs/a\nqtool sensitivity runs/a/ptq --samples 256 --json", resumes=True)
@click.argument("run_dir", type=RUN_DIR, required=False)
@out_option("Where sensitivity.json goes. [default: RUN_DIR]")
@trust_option
@click.option("--samples", type=click.IntRange(min=1), metavar="N", help="Calibration samples used. [default: 128]")
@click.option("--resume/--no-resume", default=True, help="Use what was measured there before. [default: resume]")
@field_options(Recipe, "Source (instead of RUN_DIR)", skip=("variants",), required=("model", "data"), alternative=True)
@field_options(QuantizeConfig, "Quantization", skip=("mode", *(f for f in CONTRACT_FIELDS if f != "sensitivity")))
def sensitivity(ctx: click.Context, run_dir: Path | None, out: Path | None, **_: Any) -> None:
    """Measure what each quantized unit alone does to the model's output, the most harmful first."""
    source = given(ctx, Recipe)
    if (run_dir is None) != ({"model", "data"} <= source.keys()):
        raise click.UsageError("neither RUN_DIR nor both of --model and --data, or all of them", ctx)
    options = source | given(ctx, QuantizeConfig) | ({"model": run_dir} if run_dir else {})
    options |= {"samples": ctx.params["samples"]} if ctx.params["samples"] else {}
    with work(ctx) as pipeline:
        found = pipeline.sensitivity(
            **options, out=out, trust=ctx.params["trust"], resume=ctx.params["resume"], progress=loud(ctx)
        )
    deliver(ctx, found, "sensitivity")


@command("export", "qtool export runs/a")
@click.argument("run_dir", type=RUN_DIR)
@out_option("Where the ONNX files and export.json go. [default: RUN_DIR]")
@trust_option
@field_options(ExportConfig, "Export")
def export(ctx: click.Context, run_dir: Path, out: Path | None, trust: bool, **_: Any) -> None:
    """Export the quantized model in RUN_DIR to ONNX, and prove that the file computes what the model means."""
    with work(ctx) as pipeline:
        pipeline.export(run_dir, out, trust=trust, progress=loud(ctx), **given(ctx, ExportConfig))
    show(ctx, out or run_dir, "export")


@command(
    "benchmark",
    "qtool benchmark runs/a --batch-sizes 1,32 --threads 2\nqtool benchmark a.onnx b.onnx --shapes x=1x3x224x224",
)
@click.argument("what", type=RUN_DIR, nargs=-1, required=True, metavar="RUN_DIR | FILE.onnx...")
@out_option("Where benchmark.json goes. [default: RUN_DIR]")
@trust_option
@mlflow_option
@field_options(BenchmarkConfig, "Measurement")
def benchmark(
    ctx: click.Context, what: tuple[Path, ...], out: Path | None, trust: bool, mlflow: str | None, **_: Any
) -> None:
    """Measure the exported files in RUN_DIR side by side, or any ONNX files on random inputs."""
    options = {"trust": trust, "progress": loud(ctx), **given(ctx, BenchmarkConfig)}
    files = len(what) > 1 or names_file(what[0])
    if files and mlflow:
        raise click.UsageError("--mlflow without a run directory, whose results it logs", ctx)
    if files and out:
        raise click.UsageError("--out without a run directory: --json prints the figures of files", ctx)
    with measured(ctx), work(ctx) as pipeline, tracked(out or what[0], mlflow):
        if files:
            found = {"metrics": pipeline.benchmark(what, **options)}
        else:
            pipeline.benchmark(what[0], out=out, **options)
            found = None
    deliver(ctx, found, "benchmark") if found else show(ctx, out or what[0], "benchmark")


def complete_recipe(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of recipes in the package and TOML files; where none begins so, files, since one may be in a folder."""
    names = [n for n in [*recipe_names(), *map(str, Path().glob("*.toml"))] if n.startswith(incomplete)]
    return [*map(CompletionItem, names)] or [CompletionItem(incomplete, type="file")]


@command(
    "run",
    "qtool run fashion-mnist\nqtool run my.toml --out runs/a --set train.epochs=8 --set quantize.effort=best",
    resumes=True,
)
@click.argument("recipe", metavar="RECIPE", shell_complete=complete_recipe)
@out_option("Where everything goes. [default: runs/NAME-OF-RECIPE]")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key of the recipe.")
@click.option(
    "--resume/--no-resume", default=True, help="Skip finished stages, continue stopped ones. [default: resume]"
)
@trust_option
@mlflow_option
def run(ctx: click.Context, recipe: str, out: Path | None, overrides: tuple[str, ...], resume: bool, **_: Any) -> None:
    """Do all stages of a recipe: a TOML file, or the name of one in the package.

    Files that a recipe names (nets.py:build, text:book.txt) are looked for beside it, then in the current folder;
    those of --set in the current folder.
    """
    place = out or Path("runs") / Path(recipe).stem
    with done_so_far(ctx, place), work(ctx) as pipeline, tracked(place, ctx.params["mlflow"]):
        report = pipeline.run(
            recipe, out, overrides=overrides, resume=resume, trust=ctx.params["trust"], progress=loud(ctx)
        )
    deliver(ctx, report, "run")


@command("inspect", "qtool inspect runs/a\nqtool inspect runs/a/model.int8.onnx --json")
@click.argument("artifact", type=RUN_DIR)
def inspect(ctx: click.Context, artifact: Path, **_: Any) -> None:
    """Show what is inside a run directory, an ONNX file, a .pt2, a .safetensors or a result."""
    with whole(artifact):
        with work(ctx) as pipeline:
            found = pipeline.inspect(artifact)
        deliver(ctx, found, "inspect")


@command("report", "qtool report runs/a")
@click.argument("run_dir", type=RUN_DIR)
@out_option("Where report.html, report.md and report.json go. [default: RUN_DIR]")
@mlflow_option
def report(ctx: click.Context, run_dir: Path, out: Path | None, mlflow: str | None, **_: Any) -> None:
    """Write a run's report: one HTML page, which needs no network, a Markdown summary, and all of it as JSON."""
    with work(ctx), whole(run_dir), tracked(run_dir, mlflow):
        from qtool.reporting.page import report as write

        found = write(run_dir, out)
    deliver(ctx, found, "report")


@command(
    "memory",
    "qtool memory --model resnet --data fashion-mnist --batch-size 256 --precision bf16-mixed --measure\n"
    "qtool memory --ladder --model resnet --data fashion-mnist --max-steps 50 --out runs/ladder\n"
    "qtool memory --params 7B --optimizer adamw8bit --gpu-memory 24GB",
)
@click.option("--params", metavar="N", help="Answer by arithmetic for this many parameters: 1e9, 7B, 350M.")
@click.option(
    "--gpu-memory", default="80GiB", metavar="SIZE", help="With --params: the memory of one GPU. [default: 80GiB]"
)
@click.option(
    "--ladder",
    is_flag=False,
    flag_value="",
    metavar="[FILE]",
    help="Climb the techniques one on top of the other, or the rungs of a TOML file, each in a process of its own.",
)
@out_option("With --ladder: where ladder.json and ladder.svg go.")
@click.option(
    "--seeds", type=click.IntRange(1), default=1, metavar="N",
    help="With --ladder: train each rung from N seeds, and average. [default: 1]",
)  # fmt: skip
@click.option("--measure", is_flag=True, help="Also take a few real steps in a fresh process, and compare.")
@field_options(
    Recipe, "Source (instead of --params)", skip=("variants", "weights"), required=("model", "data"), alternative=True
)
@field_options(TrainConfig, "Training", hidden=("memory_budget", "keep"))
def memory(
    ctx: click.Context,
    params: str | None,
    gpu_memory: str,
    measure: bool,
    ladder: str | None,
    seeds: int,
    out: Path | None,
    **_: Any,
) -> None:
    """Predict the memory that training needs: for a model and its data, or from a number of parameters."""
    source = given(ctx, Recipe)
    belongs = {"gpu_memory": ladder is None and params is not None, "measure": params is None}
    belongs |= dict.fromkeys(("out", "seeds"), ladder is not None) | {"params": ladder is None}
    for name, fits in belongs.items():
        if not fits and ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{flag(name)}, which is not for this form of the command", ctx)
    if ladder is not None:
        with work(ctx):
            from qtool.stages.ladder import climb

            found = climb(ladder or None, out=out, seeds=seeds, progress=loud(ctx), **source, **given(ctx, TrainConfig))
        deliver(ctx, found, "ladder")
        return
    if params is None and not {"model", "data"} <= source.keys():
        raise click.UsageError("neither --params nor both of --model and --data", ctx)
    if params is not None and source:
        raise click.UsageError(f"--params beside --{next(iter(source))}: arithmetic knows no model", ctx)
    if params is not None:
        from qtool.memory.arithmetic import estimate_from

        found = estimate_from(params, make(TrainConfig, given(ctx, TrainConfig), flag), gpu_memory)
    else:
        with work(ctx):
            from qtool.stages.memory import predict_memory

            found = predict_memory(measure=measure, **source, **given(ctx, TrainConfig))
    deliver(ctx, found, "memory")


@command("numerics", "qtool numerics pi 1e-8 70000 --scale 0.05\nqtool numerics -- -0.1")
@click.argument("values", nargs=-1, metavar="[VALUE]...")
@click.option("--scale", default="1", metavar="X", help="Real units per step of the integer formats. [default: 1]")
def numerics(ctx: click.Context, values: tuple[str, ...], scale: str, **_: Any) -> None:
    """Show what each number format makes of a number: range, stored value, error."""
    from qtool.memory import formats

    deliver(ctx, formats.numerics(values, scale), "numerics")


@main.command("completion", cls=Command, example="qtool completion bash >> ~/.bashrc")
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print the script that teaches a shell to complete qtool's commands and options."""
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(main, {}, "qtool", "_QTOOL_COMPLETE").source())


@contextlib.contextmanager
def work(ctx: click.Context) -> Iterator[ModuleType]:
    """The surroundings of a stage: allocator settings before torch comes in, stdout kept clean, progress on stderr."""
    from qtool.system.allocator import tune

    require_folder()
    os.environ.setdefault(NO_REPORTS, "1")
    if (cores := usable_cores()) < bound_cores() and ctx.params.get("devices") in (None, 1):
        os.environ.setdefault("OMP_NUM_THREADS", str(cores))  # torch would have a thread for each that there is
    tune(huge_pages=ctx.command.name not in ("train", "memory"))
    if not ctx.params["as_debug"]:
        warnings.simplefilter("ignore")
        if loud(ctx) and os.environ.get("RANK", "0") == "0":
            warnings.simplefilter("once", QtoolWarning)
        logging.disable(logging.WARNING)
    if not loud(ctx):
        os.environ.update(dict.fromkeys(HUSH, "1"))
    from qtool import pipeline

    plain, warnings.formatwarning = warnings.formatwarning, warning_line
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield pipeline
    finally:
        warnings.formatwarning = plain


def require_folder() -> None:
    """Raises UsageError where the current folder is gone: MKL would end the program over a file of PyTorch's."""
    try:
        Path.cwd()
    except FileNotFoundError:
        do = 'change to one that is there; if it was made anew: cd "$PWD"'
        raise UsageError("current folder", "one that exists", "one that was removed", do) from None


@contextlib.contextmanager
def measured(ctx: click.Context) -> Iterator[None]:
    """Prints the figures of a benchmark that failed by them as well; with ``--json`` they are the error's details."""
    try:
        yield
    except ContractError as error:
        if error.details and not ctx.params["as_json"]:
            deliver(ctx, {"metrics": error.details}, "benchmark")
        raise


@contextlib.contextmanager
def done_so_far(ctx: click.Context, run_dir: Path) -> Iterator[None]:
    """Prints the tables of a run in which a gate was not met as well; of ``--json`` they are in its ``report.json``."""
    try:
        yield
    except ContractError:
        if not ctx.params["as_json"]:
            from qtool.pipeline import report

            with contextlib.suppress(QtoolError):  # it says less than the error
                deliver(ctx, report(run_dir), "run")
        raise


@contextlib.contextmanager
def tracked(run_dir: Path, uri: str | None) -> Iterator[None]:
    """Logs what is in ``run_dir`` to MLflow at the end, a failed gate's figures too; tells at once if none answers."""
    if uri is None:
        yield
        return
    from qtool.reporting.tracking import log_run, require_answer

    require_answer(uri)
    try:
        yield
    except ContractError:
        log_run(run_dir, uri)
        raise
    log_run(run_dir, uri)


def loud(ctx: click.Context) -> bool:
    """Whether progress is shown."""
    return not ctx.params["as_quiet"]


def show(ctx: click.Context, run_dir: Path | None, stage: str) -> None:
    """Prints the result that a stage committed in its run directory."""
    assert run_dir is not None
    deliver(ctx, read_result(run_dir, stage, verify=False), stage)


def deliver(ctx: click.Context, result: Mapping[str, Any], stage: str) -> None:
    """Prints a result: as JSON, as tables, or not at all; of several processes, the first one's."""
    if os.environ.get("RANK", "0") != "0":
        return
    if ctx.params["as_json"]:
        click.echo(json.dumps(finite(result)))
    elif not ctx.params["as_quiet"]:
        from qtool.reporting import terminal

        terminal.show(stage, result)


if __name__ == "__main__":
    main()
