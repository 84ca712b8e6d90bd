"""The training stage: a model and its data, to weights that a run directory holds."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from qtool.artifacts import output_path, read_result, staging, write_result
from qtool.errors import OutOfMemory, QtoolError, UsageError, kind_of
from qtool.models.given import require_model
from qtool.options import documented
from qtool.recipe import AUTO, TrainConfig, as_dict
from qtool.source import Source, has_random_weights, open_source
from qtool.stages.choice import Choice, at_work, ended, halve, halvings, was_killed
from qtool.stages.common import (
    AnyPath,
    Progress,
    checkpointing,
    configured,
    drop_checkpoints,
    finished,
    teller,
    tidy,
    writable,
)
from qtool.stages.fitting import explained, fitted, gives_way, held, memory_ended, on_host
from qtool.stages.surroundings import apart
from qtool.system.files import atomic_path
from qtool.system.json_files import write_json
from qtool.system.machine import is_slow_in_bfloat16

if TYPE_CHECKING:
    from torch import nn

    from qtool.models.materialise import Target
    from qtool.tasks import Task
    from qtool.training.lora import Adapter
    from qtool.training.stage import TrainResult


@apart
@documented(TrainConfig)
def train(
    model: nn.Module | str,
    data: object,
    *,
    out: AnyPath | None = None,
    task: Task | str = "classification",
    weights: AnyPath | None = None,
    resume: bool = True,
    config: TrainConfig | None = None,
    progress: Progress = False,
    **options: Any,
) -> TrainResult:
    """Trains ``model`` on ``data`` and returns it with its metrics; with ``out`` it also writes the run directory.

    ``model`` is a module (trained in place) or a spec; ``data`` a spec, a Data, a mapping of datasets or an iterable
    of batches: (input, target), or dicts of arguments with the target as ``labels``. With ``resume`` a run that was
    stopped in ``out`` continues, and a finished one whose configuration and inputs are the same is returned as it is.
    ``options`` are the fields of TrainConfig.
    """
    from qtool.system import processes
    from qtool.system.devices import require_gpus
    from qtool.system.launcher import require_main
    from qtool.training import rules

    require_main()
    require_model(model)
    config = together(configured(TrainConfig, config, options))
    rules.check(config)
    folder = writable(out)
    if config.devices > 1 and not processes.launched():
        require_gpus(config.device, config.devices)
        return _launched(model, data, folder, task, weights, resume, config, progress)
    return _train(model, data, folder, task, weights, resume, config, progress)


def together(config: TrainConfig) -> TrainConfig:
    """``config`` with as many devices as processes were launched. Raises UsageError where it names another number."""
    from qtool.system import processes

    if not processes.launched():
        return config
    size = int(os.environ["WORLD_SIZE"])
    if config.devices not in (1, size):
        raise UsageError("--devices", f"{size}, as many as were launched", str(config.devices), "leave --devices out")
    return dataclasses.replace(config, devices=size)


def _launched(
    model: nn.Module | str, data: object, folder: Path | None, task: Task | str, weights: AnyPath | None,
    resume: bool, config: TrainConfig, progress: Progress,
) -> TrainResult:  # fmt: skip
    """Trains in processes of their own, and returns what they left in the run directory (or in a temporary one)."""
    from qtool.steps.order import not_shared
    from qtool.system.launcher import launch

    def opened() -> Source:
        return open_source(model, data, task, weights, seed=config.seed, label_smoothing=config.label_smoothing)

    if not isinstance(data, str | Mapping) and not hasattr(data, "train"):
        raise not_shared()
    with TemporaryDirectory() if folder is None else nullcontext(folder) as place:
        run = Path(place)
        while True:
            before = halvings(run) if resume else 0
            try:
                with _kills_told(run, config):
                    launch(_train, config.devices, model, data, run, task, weights, resume, config, progress is True)
                return _trained(run, opened())
            except OutOfMemory as error:
                source = opened()
                assert source.model is not None
                wanted = fitted(config, source, run, True, False).config
                if halvings(run) <= before and not (gives_way(config) and halve(run, wanted, before, source.model)):
                    raise explained(error, config, wanted, source, progress) from None
                teller(progress)(
                    f"{error.where}: out of memory; again from the last checkpoint in smaller micro-batches"
                )
                resume = True


@contextmanager
def _kills_told(run: Path, config: TrainConfig) -> Iterator[None]:
    """Raises OutOfMemory for a process that the system has killed for lack of host memory.

    Processes that are stopped for another reason, an interrupt or an error in one of them, leave no note of their work.
    """
    from qtool.system.devices import memory_free, memory_kills, resolve_device
    from qtool.system.launcher import Killed

    kills, free = memory_kills(), None
    with suppress(QtoolError):
        free = memory_free(resolve_device("cpu"))
    try:
        yield
    except Killed as error:
        raise memory_ended(error, run, config, kills, free) or error from None
    except BaseException:
        ended(run)
        raise


def _train(
    model: nn.Module | str, data: object, folder: Path | None, task: Task | str, weights: AnyPath | None,
    resume: bool, config: TrainConfig, progress: Progress,
) -> TrainResult:  # fmt: skip
    """Trains in this process, alone or as one of a group."""
    from qtool.system import processes
    from qtool.system.devices import resolve_device
    from qtool.training.techniques import check

    source = open_source(
        model, data, task, weights, seed=config.seed, label_smoothing=config.label_smoothing, target=_target(config)
    )
    assert source.model is not None
    check(source.model, config)
    if folder:
        _require_storable(source.model)
    with checkpointing(folder if processes.is_first() else None, "train"), tidy(folder):
        tell = teller(progress if processes.is_first() else False)
        done = bool(folder and resume and finished(folder, "train", as_dict(config), source.inputs, tell))
        found = Choice(config)
        if processes.is_first() and not done:  # before they meet: a prediction makes a group of its own
            _tell_beginning(source, tell)
            _tell_head(config, source, tell)
            _tell_slow(config, tell)
            found = fitted(config, source, folder, resume, progress)
            _after_a_kill(folder, config, found, source, progress)
        with processes.joined(resolve_device(config.device)) if config.devices > 1 else nullcontext():
            if folder and processes.from_first(done):
                return _trained(folder, source)
            return _fit(source, folder, resume, config, processes.from_first(found), progress)


def _tell_beginning(source: Source, tell: Callable[[str], None]) -> None:
    """Says where a library's architecture begins at random although the library has trained weights of it."""
    from qtool.models.libraries import LIBRARIES

    spec = str(source.record.get("model"))
    library, _, name = spec.partition(":")
    if library in LIBRARIES and has_random_weights(source.record) and not Path(name).is_file():
        tell(f"train: '{spec}' begins with random weights; --weights pretrained takes the trained ones")


def _tell_head(config: TrainConfig, source: Source, tell: Callable[[str], None]) -> None:
    """Says which module of a classifier answers as it did before the training, and at random if it is new."""
    from qtool.training.lora_layers import untrained_head

    if config.lora is None or source.task.name != "classification":
        return
    assert source.model is not None
    if head := untrained_head(source.model, config):
        tell(f"train: '{head}' stays as it came, at random if it is new; --lora-trained {head} trains it")


def _tell_slow(config: TrainConfig, tell: Callable[[str], None]) -> None:
    """Says where the CPU has no instructions for bfloat16: PyTorch took five times as long as in float32 there."""
    if on_host(config) and config.precision.startswith("bf16") and is_slow_in_bfloat16():
        tell("train: this CPU computes bfloat16 several times slower than float32; --precision 32-true is quicker here")


def _require_storable(model: nn.Module) -> None:
    """Raises QtoolError naming what in a model's state no file of weights holds, or gives back to the model."""
    from torch import _debug_has_internal_overlap

    from qtool.steps.trees import is_storable

    for name, value in model.state_dict().items():
        if not hasattr(value, "untyped_storage"):
            got, do = f"'{name}', {kind_of(value)}", "have get_extra_state return a tensor"
        elif value.is_sparse or value.is_sparse_csr:
            got, do = f"'{name}', a sparse tensor", "register it with persistent=False"
        elif not is_storable(value.dtype):
            got, do = f"'{name}' of {value.dtype}", "keep it in another type (torch.complex64 is one that is known)"
        elif _debug_has_internal_overlap(value) == 1:
            got, do = f"'{name}', a view of less memory, which cannot be written", "register its .contiguous()"
        else:
            continue
        raise QtoolError(
            "model", "a state dict of tensors, which can be written", got, f"{do}, or train without a run directory"
        )


def _after_a_kill(folder: Path | None, config: TrainConfig, found: Choice, source: Source, progress: Progress) -> None:
    """Halves the micro-batches of a run that the system has probably killed, where their size was left to qtool."""
    if folder and was_killed(folder) and on_host(config):
        assert source.model is not None
        halved = gives_way(config) and halve(folder, found.config, halvings(folder), source.model)
        teller(progress)(
            "the last attempt was killed, probably for lack of host memory: "
            + (
                "it goes on in smaller micro-batches"
                if halved
                else "--memory-budget or a smaller --batch-size may help"
            )
        )


def _fit(
    source: Source, folder: Path | None, resume: bool, config: TrainConfig, found: Choice, progress: Progress
) -> TrainResult:
    """Trains as ``found`` says, which is ``config`` fitted to the memory there is, and commits the result."""
    from qtool.system import processes
    from qtool.training import stage
    from qtool.training.progress import each_epoch

    first, alone, yields = processes.rank() == 0, processes.size() == 1, gives_way(config)
    begun = processes.from_first(halvings(folder)) if yields else 0
    assert source.model is not None
    try:
        with held(found.config), at_work(folder if first else None):
            result = stage.train(
                source.model, source.data, found.config, task=source.task, out=folder, resume=resume,
                progress=first and each_epoch(progress), identity=source.inputs, backs_off=alone and yields,
                halvings=begun,
            )  # fmt: skip
    except OutOfMemory as error:
        if alone:
            raise explained(error, config, found.config, source, progress) from None
        goes_on = folder is not None and yields and halve(folder, found.config, begun, source.model)
        raise _told_in_group(error, config, found.config, goes_on) from None
    if folder and first:
        _commit_train(folder, config, source, result, found)
    processes.wait()
    return result


def _told_in_group(error: OutOfMemory, asked: TrainConfig, wanted: TrainConfig, goes_on: bool) -> OutOfMemory:
    """The end of one process of several, without a prediction, which makes a group of its own."""
    more = f"pass --micro-batches {2 * wanted.micro_batches}, --batch-size auto or a smaller one"
    if asked.batch_size == AUTO:
        more = "pass --strategy fsdp and more --devices, or take a smaller model"
    again = "run the same command again (torchrun --max-restarts 9 does): it goes on in smaller micro-batches"
    return type(error)(
        error.where, error.expected, error.got, f"{again if goes_on else more}; {error.last}", error.last
    )


def _target(config: TrainConfig) -> Target | None:
    """Where and as what the model is made, if not on the host in float32.

    A sharded one is when it has been cut, one in 4 bits when it is known what is kept in them.
    """
    if not config.create_on_device:
        return None
    from qtool.models.materialise import Target
    from qtool.system.devices import resolve_device
    from qtool.training.precision import weight_dtype

    device = resolve_device("cpu" if config.weight_offload else config.device)
    return Target(device, weight_dtype(config.precision), later=config.strategy == "fsdp" or config.lora_base == "nf4")


def _write_adapter(folder: Path, result: TrainResult) -> dict[str, Path]:
    """The adapters alone, under the names that peft's ``from_pretrained`` of a folder looks for."""
    from qtool.steps.trees import write_tensors

    if result.adapter is None:
        return {}
    files = {"adapter": folder / "adapter_model.safetensors", "adapter_config": folder / "adapter_config.json"}
    with atomic_path(files["adapter"]) as temporary:
        write_tensors(temporary, result.adapter.tensors)
    write_json(files["adapter_config"], result.adapter.config)
    return files


def _trained(run: Path, source: Source) -> TrainResult:
    """The result of a finished training, with its weights in the model."""
    from qtool.models.specs import load_weights
    from qtool.steps.history import History
    from qtool.training.stage import TrainResult

    assert source.model is not None
    result = read_result(run, "train")
    load_weights(source.model, run)
    return TrainResult(source.model.eval(), result["metrics"], History(**result["history"]), _adapter(run, result))


def _adapter(run: Path, result: Mapping[str, Any]) -> Adapter | None:
    """The adapters that a run directory has, or None."""
    from safetensors.torch import load_file

    from qtool.training.lora import Adapter

    if "adapter" not in result["outputs"]:
        return None
    tensors, config = (output_path(run, result, name) for name in ("adapter", "adapter_config"))
    return Adapter(load_file(tensors), json.loads(config.read_text(encoding="utf-8")))


def _memory(found: Choice) -> dict[str, Any]:
    """What the result says of memory, where any of it was left open."""
    return {} if found.memory is None else {"memory": found.memory}


def _commit_train(run: Path, config: TrainConfig, source: Source, result: TrainResult, found: Choice) -> None:
    from qtool.steps.trees import save_weights

    with staging(run, "train") as folder:
        weights = folder / "model.safetensors"
        with atomic_path(weights) as temporary:
            save_weights(temporary, result.model)
        write_result(
            run, "train", config=as_dict(config), inputs=source.inputs,
            outputs={"model": weights, **_write_adapter(folder, result)},
            metrics=result.metrics,
            extra={
                "source": source.record, "history": as_dict(result.history), "metric": source.task.metric,
                **_memory(found),
            },
        )  # fmt: skip
    drop_checkpoints(run)
