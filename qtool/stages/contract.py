"""Quantizing under a contract: the search over real candidates, kept on disk as it goes, and its outcome.

Candidates are made from the calibration samples and judged on the validation part, which must not share a sample with
them; the test part is not looked at. What each candidate made of every validation sample is kept in ``search/``, named
by a hash of its options, the model, both sets of samples and what the task makes of the float model's answers: a search
that was killed goes on, one with another limit starts from what is known, and with other labels or another task it
begins anew. A contract that is met leaves the artifact and removes ``search/``; one that is not leaves
``contract.json`` and no artifact of the final name; the closest candidate is in ``search/closest``, whole, its record
saying that the contract is not kept, for whoever wants to export and time it all the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qtool.artifacts import mark_stale, read_result
from qtool.data.calibration_data import sample_hashes
from qtool.data.given import labelled, pairs_of
from qtool.errors import ContractError, QtoolError, UsageError
from qtool.recipe import CONTRACT_FIELDS, QatConfig, QuantizeConfig, as_dict
from qtool.source import CLOSEST, Source, state_hash
from qtool.stages.common import example_of
from qtool.stages.cost import Cost
from qtool.stages.sensitivity import Measurement
from qtool.system.json_files import write_json
from qtool.units import MIB, many

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from qtool.data.specs import Data
    from qtool.form import QuantizedModel
    from qtool.quantization.capturing.float_form import FloatForms
    from qtool.quantization.contracts.contract import Scores
    from qtool.quantization.contracts.search import Search, Trial
    from qtool.tasks import Task

    Judged = tuple[Scores, dict[str, Any]]

FOLDER = "search"
OUTCOME = "contract.json"
SCHEMA = 3
"""Of what is kept of a candidate in ``search/``."""
Make = Callable[[QuantizeConfig, Path | None], "QuantizedModel"]
"""Quantizes with these options; training goes on, and is saved, in the folder."""
Keep = Callable[[Path, QuantizeConfig, "QuantizedModel", dict[str, Any]], None]
"""Commits a model that was quantized with these options to a folder, with its contract's outcome."""


class Pairs:
    """(inputs, targets) of validation samples, again and again; targets are None where there are none.

    Raises UsageError for batches without tensors, and QtoolError where they are others than the first time: answers are
    compared sample by sample.
    """

    def __init__(self, source: Source, given: Iterable[Any] | None, config: QuantizeConfig) -> None:
        if given is None and source.parts is None:
            raise UsageError(
                "contract", "validation samples", "batches to calibrate with only", "pass validation=… too"
            )
        self.source, self.config = source, config
        self.given = None if given is None else pairs_of(labelled(given, source.record.get("labels_moved")))
        self.seen: list[int] = []

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        from qtool.nested import cut, num_samples

        left = self.config.validation_samples
        for index, (inputs, targets) in enumerate(self._all()):
            self._recognise(index, inputs)
            size = num_samples(inputs)
            if left is not None and size > left:
                inputs, targets, size = cut(inputs, 0, left, size), cut(targets, 0, left, size), left
            yield inputs, targets
            left = None if left is None else left - size
            if left == 0:
                return

    def count(self) -> int | None:
        """How many samples there are, without reading them; None where that takes reading them."""
        if self.given is not None or self.source.parts is None:
            return None
        size = len(self.source.parts.validation)  # type: ignore[arg-type]
        return min(size, self.config.validation_samples or size)

    def _recognise(self, index: int, inputs: Any) -> None:
        from qtool.nested import checksum, tensors

        if not any(tensor.dim() for tensor in tensors(inputs)):
            got = type(inputs).__name__
            raise UsageError(f"validation batch {index}", "tensors, batch first", got, "pass validation=[batch, …]")
        mark = checksum(inputs)
        if index == len(self.seen):
            self.seen.append(mark)
        elif self.seen[index] != mark:
            raise QtoolError(
                "contract", "the same validation samples in the same order each time",
                f"others in batch {index}", "pass batches that are neither shuffled nor augmented",
            )  # fmt: skip

    def _all(self) -> Iterator[tuple[Any, Any]]:
        if self.given is not None:
            yield from self.given
        else:
            from qtool.data.specs import batches

            parts = self.source.parts
            assert parts is not None
            yield from batches(parts.validation, self.config.calibration_batch_size)


class Candidates:
    """Makes, judges and remembers the candidates for one contract."""

    def __init__(
        self, source: Source, config: QuantizeConfig, inputs: Iterable[Any], pairs: Pairs, make: Make,
        folder: Path | None, tell: Callable[[str], None], tuning: QatConfig | None, forms: FloatForms,
    ) -> None:  # fmt: skip
        self.source, self.config, self.make, self.tell, self.tuning = source, config, make, tell, tuning
        self.run_folder, self.folder = folder, folder / FOLDER if folder else None
        self.measurement = Measurement(source, config, inputs, asked_for=False, forms=forms)
        self.identity = self.measurement.identity | {"validation": _apart(self.measurement.inputs, pairs)}
        self.measurement.cached(folder)  # one of another model is refused before any work
        self.cost, self.seconds = Cost(), 0.0
        self.kept: tuple[Trial, QuantizedModel] | None = None
        self.judged: dict[str, tuple[str, Judged]] = {}
        self.units: list[dict[str, Any]] = []
        graph = forms(config, example_of(source, self.measurement.inputs))
        self.judge = _judge(graph, config, source.task, pairs)
        self.identity |= {"answers": state_hash(self.judge.known.items())}

    def attempt(self, name: str, config: QuantizeConfig) -> Trial:
        """A candidate with these options: remembered, or made and judged unless it is the model of an earlier one.

        Raises OutOfTime before a new one.
        """
        from qtool.quantization.contracts.search import OutOfTime, Trial

        found, model = self._remembered(config), None
        if found is None:
            budget = self.config.time_budget
            if budget is not None and self.seconds >= budget:
                raise OutOfTime
            self.tell(f"contract: trying {name}")
            model, found = self._made(config)
        scores, facts = found
        self.seconds += facts["seconds"]
        first, _ = self.judged.setdefault(facts["model_sha256"], (name, found))
        trial = Trial(name, config, scores, self.judge.verdict(scores), facts, None if first == name else first)
        what = (
            f"the model of '{first}', which is not judged again"
            if trial.same_as
            else "; ".join(map(str, trial.verdict.criteria))
        )
        self.tell(f"contract: {name}: {what}")
        if model is not None and (self.kept is None or _rank(trial) < _rank(self.kept[0])):
            self.kept = trial, model
        return trial

    def _made(self, config: QuantizeConfig) -> tuple[QuantizedModel, Judged]:
        from qtool.form import graph_sha256

        start = time.monotonic()
        model = self._make(config)
        digest = graph_sha256(model.graph)
        scores, facts = self.judged[digest][1] if digest in self.judged else self._judge(model)
        found = scores, facts | {"model_sha256": digest, "seconds": time.monotonic() - start}
        if self.folder:
            from qtool.steps.trees import save_tree

            self.folder.mkdir(parents=True, exist_ok=True)
            save_tree(self._path(config), {"scores": vars(scores), "facts": found[1]})
        return model, found

    def _judge(self, model: QuantizedModel) -> Judged:
        scores = self.judge.score(model)
        speedup = None if self.judge.verdict(scores).met else self.cost.speedup(model)
        floats = sum(unit.weight_bits is None for unit in model.plan.float_units)  # those whose weights stay float, too
        return scores, {"size_bytes": self.cost.size_bytes(model), "num_float_units": floats, "speedup": speedup}

    def _remembered(self, config: QuantizeConfig) -> Judged | None:
        if self.folder is None or not self._path(config).exists():
            return None
        from qtool.quantization.contracts.contract import as_scores
        from qtool.steps.trees import load_tree

        tree = load_tree(self._path(config))
        return as_scores(tree["scores"]), tree["facts"]

    def _path(self, config: QuantizeConfig) -> Path:
        """Where a candidate's scores are: named by all that they depend on."""
        assert self.folder is not None
        options = {key: value for key, value in as_dict(config).items() if key not in CONTRACT_FIELDS}
        asked = [SCHEMA, options, self.identity, self.config.max_drop is not None]
        if config.mode == "qat" and self.tuning:
            asked.append(as_dict(self.tuning))
        digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
        return self.folder / f"{digest[:24]}.safetensors"

    def model_of(self, trial: Trial) -> QuantizedModel:
        """The quantized model of a trial, made again where it is not at hand."""
        if self.kept is not None and self.kept[0].config == trial.config:
            return self.kept[1]
        return self._make(trial.config)

    def _make(self, config: QuantizeConfig) -> QuantizedModel:
        """The model of a candidate, whose training is no other candidate's."""
        return self.make(config, self._path(config).with_suffix("") if self.folder else None)

    def save(self, trial: Trial, place: Path, keep: Callable[[QuantizedModel], None]) -> None:
        """Has a trial's model kept in a folder, unless it is there, whole; the file that names it comes last."""
        name = self._path(trial.config).stem
        if (place / name).exists():
            with contextlib.suppress(QtoolError):
                read_result(place, "quantize")
                return
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        keep(self.model_of(trial))
        (place / name).touch()

    def harmful(self, config: QuantizeConfig) -> list[dict[str, Any]]:
        """The integer units, the most harmful first: measured with these options, or before for the same units.

        Harm is KL divergence where nothing but the first output's answers is promised, and noise in all outputs else.
        """
        if not self.units:
            start = time.monotonic()
            measuring = dataclasses.replace(self.measurement, config=dataclasses.replace(config, mode="ptq"))
            found = measuring.cached(self.run_folder)
            if found is None or not measuring.is_alike(found):
                found = measuring.run(self.run_folder, resume=True, tell=self.tell)
            self.units = found["units"]
            if self.config.max_drop is None and all(unit["kl"] is not None for unit in self.units):
                self.units = sorted(self.units, key=lambda unit: unit["kl"], reverse=True)
            self.seconds += time.monotonic() - start
        return self.units


def _rank(trial: Trial) -> tuple[bool, float]:
    return not trial.verdict.met, trial.verdict.excess


def _judge(
    graph: GraphModule, config: QuantizeConfig, task: Task, pairs: Iterable[tuple[Any, Any]], total: int | None = None
) -> Any:
    import torch

    from qtool.quantization.contracts.contract import Judge

    with torch.no_grad():
        return Judge(config, pairs, answers(graph), task, total)


def rehearse(graph: GraphModule, config: QuantizeConfig, source: Source, inputs: Iterable[Any]) -> None:
    """Raises QtoolError for a contract that could not be judged, or never be met, whatever a training makes of it.

    One batch tells what there is to judge; ``graph`` is the float form of the model, which is not trained yet.
    """
    pairs = Pairs(source, None, config)
    _judge(graph, config, source.task, list(itertools.islice(pairs, 1)), pairs.count())
    _apart(inputs, pairs)


def answers(graph: GraphModule) -> Callable[[Any], Any]:
    """What a float graph answers to validation inputs, which are looked at first."""
    from qtool.form import check_inputs
    from qtool.forward import passes_told
    from qtool.graphs.captured import call_captured

    def answer(inputs: Any) -> Any:
        check_inputs(graph, inputs, "validation samples")
        with passes_told("the model on the validation samples"):
            return call_captured(graph, inputs)

    return answer


def _apart(inputs: Iterable[Any], pairs: Pairs) -> str:
    """The hash of the validation samples. Raises QtoolError where one of them is a calibration sample."""
    calibrated = set(sample_hashes(inputs))
    held = list(sample_hashes(value for value, _ in pairs))
    if shared := sum(digest in calibrated for digest in held):
        raise QtoolError(
            "contract", "validation samples that are not among the calibration samples",
            f"{shared} of {len(held)} that are (equal bytes)", "calibrate on the training part, or hold out others",
        )  # fmt: skip
    return hashlib.sha256("".join(held).encode()).hexdigest()


def fulfil(
    source: Source, config: QuantizeConfig, inputs: Iterable[Any], validation: Iterable[Any] | None, make: Make,
    keep: Keep, *, folder: Path | None, tell: Callable[[str], None], tuning: QatConfig | None, forms: FloatForms,
) -> tuple[QuantizedModel, dict[str, Any]]:  # fmt: skip
    """The cheapest quantization found that keeps the contract in ``config``, and the outcome as plain values.

    Raises ContractError, with the outcome as its ``details``, where none does; QtoolError or UsageError before any
    candidate is made where the contract cannot be judged.
    """
    from qtool.quantization.contracts.contract import require_agreeable
    from qtool.quantization.contracts.search import Search, frontier

    pairs = Pairs(source, validation, config)
    if (count := pairs.count()) is not None:
        require_agreeable(config, count)
    candidates = Candidates(source, config, inputs, pairs, make, folder, tell, tuning, forms)
    labelled = source.parts is not None and _labelled(source.parts)
    with candidates.cost:
        search = Search(
            config, candidates.judge, candidates.attempt, candidates.harmful, tuning is not None and labelled
        )
        if (count := candidates.judge.num_outputs) > 1 and (config.max_kl, config.min_agreement) != (None, None):
            search.notes.append(f"KL and agreement are those of the first of {count} outputs")
        met = search.run()
        if met is None and not search.out_of_time:
            candidates.harmful(search.base.config)
        if met is None and tuning is not None and source.parts is not None and not labelled:
            search.notes.append("no training was tried: the data have no labels")
        if not search.trials:
            raise ContractError("contract", "time for one candidate", "a time budget of 0", "raise --time-budget")
        for note in search.notes:
            tell(f"contract: {note}")
        outcome = _outcome(search, met, candidates)
        if met is None:
            for trial in frontier(search.trials):
                tell(f"contract: frontier: {_line(trial)}")
            error = _refused(search, candidates, outcome, keep)
            if folder is not None:
                tell(f"contract: the closest is in '{folder / CLOSEST}', for 'qtool export' to write")
            raise error
        return candidates.model_of(met), outcome


def _labelled(data: Data) -> bool:
    """Whether there are targets to train with and to validate the training on."""
    from qtool.data.specs import batches

    return all(next(batches(part, 1))[1] is not None for part in (data.train, data.validation))


def _outcome(search: Search, met: Trial | None, candidates: Candidates) -> dict[str, Any]:
    from qtool.quantization.contracts.search import frontier

    chosen = met or search.closest
    asked, judge = as_dict(search.config), candidates.judge
    has_metric = search.config.max_drop is not None
    return {
        "met": met is not None,
        "chosen": chosen.name,
        "method": search.config.method,
        "options": {key: value for key, value in as_dict(chosen.config).items() if value != asked[key]},
        "criteria": chosen.verdict.as_dict()["criteria"],
        "metric": judge.metric if has_metric else None,
        "higher_is_better": judge.higher_is_better if has_metric else None,
        "source": {part: candidates.source.record[part] for part in ("model", "data")},
        "num_samples": judge.num_samples,
        "trials": [_told(trial) for trial in search.trials],
        "trained": search.trained,
        "notes": search.notes,
        "frontier": [trial.name for trial in frontier(search.trials)],
        "harmful": candidates.units,
        "seconds": candidates.seconds,
        "out_of_time": search.out_of_time,
    }


def _line(trial: Trial) -> str:
    speed = f", {trial.facts['speedup']:.2f}x FP32's speed" if trial.facts["speedup"] else ""
    size = trial.facts["size_bytes"] / MIB
    return f"{trial.name}: {'; '.join(map(str, trial.verdict.criteria))}, {size:.3f} MiB{speed}"


def _told(trial: Trial) -> dict[str, Any]:
    return {"name": trial.name, **trial.verdict.as_dict(), **trial.facts}


def _refused(search: Search, candidates: Candidates, outcome: dict[str, Any], keep: Keep) -> ContractError:
    """The error that ends a search in vain; leaves the outcome and the closest candidate."""
    closest = search.closest
    wanted = ", ".join(
        f"{c.name} {'≥' if c.name == 'agreement' else '≤'} {c.limit:g}" for c in closest.verdict.criteria
    )
    worst = ", ".join(unit["name"] for unit in candidates.units[:3])
    found = f"'{closest.name}' is closest: {'; '.join(map(str, closest.verdict.criteria))}"
    needed = max((c.needed or 0 for c in closest.verdict.criteria), default=0)
    if search.out_of_time:
        do = "give more time: the search goes on where it stopped"
    elif closest.verdict.within:
        do = f"too few samples to tell it from noise: give about {many(needed, 'validation sample')}"
    else:
        more = "give labelled training data" if search.config.method == "auto" else "allow more by --method auto"
        do = f"promise less, {'' if search.trained else f'{more}, '}or look at those units"
    samples = many(candidates.judge.num_samples, "sample")
    error = ContractError(
        "contract", f"{wanted}, with 95 % confidence",
        f"{found}, on {samples}{'; units that hurt: ' + worst if worst else ''}", do,
    )  # fmt: skip
    if (folder := candidates.run_folder) is not None:
        place = folder / CLOSEST
        candidates.save(closest, place, lambda model: keep(place, closest.config, model, outcome))
        write_json(folder / OUTCOME, outcome)
        mark_stale(folder, "quantize", f"a later quantization did not keep its contract ({found})")
    error.details = outcome
    return error


def forget(folder: Path) -> None:
    """Removes what the search kept: the contract is met."""
    shutil.rmtree(folder / FOLDER, ignore_errors=True)
    (folder / OUTCOME).unlink(missing_ok=True)
