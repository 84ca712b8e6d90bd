"""The sensitivity stage: each quantized unit's effect on the output, measured once and kept.

``sensitivity.json`` names the model by its weights and the calibration set by its samples, both by hash, so that the
search for a contract can use it again, and a measurement of another model is refused instead of believed. What is
measured is saved as it grows (``sensitivity.part.json``): a stopped measurement goes on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qtool.artifacts import has_result, read_result
from qtool.data.calibration_data import sample_hashes
from qtool.errors import QtoolError, UsageError, unreadable
from qtool.options import argument, check, documented, make
from qtool.recipe import CONTRACT_FIELDS, QuantizeConfig, as_dict
from qtool.source import Source, open_float, state_hash
from qtool.stages.common import (
    AnyPath,
    Progress,
    anywhere,
    calibration_of,
    configured,
    example_of,
    in_turn,
    targets_in,
    teller,
    tidy,
    writable,
)
from qtool.stored import EACH, fault_of, is_decibels, is_number, is_text, or_none
from qtool.system.json_files import finite, from_json, write_json
from qtool.units import many

if TYPE_CHECKING:
    from torch import nn

    from qtool.models.given import HasModel
    from qtool.quantization.capturing.float_form import FloatForms
    from qtool.tasks import Task

FILE = "sensitivity.json"
PART = "sensitivity.part.json"
SCHEMA = 2
READ: dict[str, Any] = {
    "identity": {}, "config": {}, "num_samples": is_number,
    "units": [{"name": is_text, "kind": is_text, "measured": is_text, "sqnr_db": is_decibels,
               "kl": or_none(is_number), "agreement": or_none(is_number)}],
}  # fmt: skip
"""What is read of a ``sensitivity.json``."""
STOPPED: dict[str, Any] = {
    "state": {"kind": is_text, "num_samples": is_number, "signal": [is_number],
              "units": {EACH: {"noise": [is_number], "kl": is_number, "agree?": is_number}}},
}  # fmt: skip
"""What is read of a ``sensitivity.part.json``."""
PLACED_BY = (
    "engine",
    "target",
    "weight_bits",
    "edge_bits",
    "activation_bits",
    "group_size",
    "weights_only",
    "overrides",
)
"""Options that say which units there are, and in how many bits: others leave the most harmful ones what they are."""
_READ = ("sensitivity", "max_kl", "min_agreement")  # the latter have outputs of several positions taken for logits
SAVE_SECONDS = 1.0
SAMPLES = 128


@in_turn
@documented(QuantizeConfig)
def sensitivity(
    model: nn.Module | HasModel | AnyPath,
    data: object = None,
    *,
    out: AnyPath | None = None,
    task: Task | str = "classification",
    weights: AnyPath | None = None,
    samples: int = SAMPLES,
    trust: bool = False,
    resume: bool = True,
    config: QuantizeConfig | None = None,
    progress: Progress = False,
    **options: Any,
) -> dict[str, Any]:
    """Measures what each quantized unit alone does to the output, on the first ``samples`` calibration samples.

    ``model`` is a module, a spec, or a run directory (of a training, or of a quantization, whose options are then the
    defaults). ``options`` are the fields of QuantizeConfig. The result is plain values, ``units`` the most harmful
    first, exact or estimated (``sensitivity=``). It is also written to ``sensitivity.json`` in ``out`` (by default the
    run directory) and into a ``quantize.json`` of these options there, where the report finds it. Raises QtoolError
    where ``sensitivity.json`` is of another model or other samples, unless ``resume`` is off.
    """
    source, folder, recorded = _source(model, data, task, weights, writable(out), trust)
    if unread := next((name for name in options if name in CONTRACT_FIELDS and name not in _READ), None):
        raise UsageError(argument(unread), "options of what is measured", "one of a search", "pass it to quantize")
    config = configured(QuantizeConfig, config, options) if config or not recorded else _updated(recorded, options)
    config = anywhere(config)
    samples = check(samples, int, {"low": 1}, argument("samples"))
    inputs, _ = calibration_of(config, source)
    measuring = Measurement(source, config, inputs, samples)
    with tidy(folder):
        result = measuring.run(folder, resume=resume, tell=teller(progress))
    if folder and has_result(folder, "quantize"):
        quantized = read_result(folder, "quantize", verify=False, stale=True)
        if "stale" not in quantized and measuring.is_of(_made_with(quantized)):
            write_json(folder / "quantize.json", quantized | {"sensitivity": result["units"]})
    return result


def _updated(recorded: Mapping[str, Any], options: Mapping[str, Any]) -> QuantizeConfig:
    known = {key: value for key, value in recorded.items() if key in QuantizeConfig.__dataclass_fields__}
    return make(QuantizeConfig, known | {"mode": "ptq"} | dict(options))


def _source(
    model: nn.Module | HasModel | AnyPath,
    data: object,
    task: Task | str,
    weights: AnyPath | None,
    out: Path | None,
    trust: bool,
) -> tuple[Source, Path | None, dict[str, Any]]:
    """The source, where the result goes, and the options of the quantization that is there."""
    source, run = open_float(model, data, task, weights, trust=trust)
    there = read_result(run, "quantize", verify=False, stale=True) if run and has_result(run, "quantize") else {}
    recorded = {} if "stale" in there or not there else _made_with(there)
    return source, out or writable(run), recorded


def _made_with(quantized: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a quantization: under a contract those that its search chose, which have no effort's name."""
    chosen = quantized["contract"]["options"] | {"effort": None} if "contract" in quantized else {}
    return {**quantized["config"], **chosen}


@dataclasses.dataclass
class Measurement:
    """One measurement: of ``source``'s model, quantized as ``config`` says, on ``samples`` of ``inputs``.

    What was measured on other samples is refused where it was ``asked_for``, and is otherwise measured anew.
    """

    source: Source
    config: QuantizeConfig
    inputs: Iterable[Any]
    samples: int = SAMPLES
    asked_for: bool = True
    forms: FloatForms | None = None

    def __post_init__(self) -> None:
        if iter(self.inputs) is self.inputs:
            self.inputs = list(self.inputs)
        assert self.source.model is not None
        hashes = "".join(sample_hashes(self.inputs))
        self.identity = {
            "model": state_hash(self.source.model.state_dict().items()),
            "calibration": hashlib.sha256(hashes.encode()).hexdigest(),
        }
        asked = {key: value for key, value in as_dict(self.config).items() if key not in CONTRACT_FIELDS}
        self.asked = json.loads(json.dumps(asked)) | {"samples": self.samples, "sensitivity": self.config.sensitivity}

    def is_of(self, recorded: Mapping[str, Any]) -> bool:
        """Whether a quantization with these options is what is measured; how it was trained is no matter."""
        left_out = (*CONTRACT_FIELDS, "mode", "samples")
        return all(recorded.get(key) == value for key, value in self.asked.items() if key not in left_out)

    def is_alike(self, found: Mapping[str, Any]) -> bool:
        """Whether the units of a result are these, in as many bits."""
        return all(found["config"].get(key) == self.asked[key] for key in PLACED_BY)

    def cached(self, folder: Path | None) -> dict[str, Any] | None:
        """The result in ``folder``, whatever its options were. Raises QtoolError for one of another model or data."""
        path = folder / FILE if folder else None
        if path is None or not path.exists():
            return None
        result = read_sensitivity(path)
        for part, told in (("model", "this model's weights"), ("calibration", "these calibration samples")):
            if result["identity"].get(part) != self.identity[part]:
                if part == "calibration" and not self.asked_for:
                    return None
                raise QtoolError(
                    f"'{path}'", f"a measurement with {told}", f"one of another {part} ({_short(result, part)})",
                    "delete it, or measure again with qtool sensitivity --no-resume",
                )  # fmt: skip
        return result

    def run(self, folder: Path | None, *, resume: bool, tell: Callable[[str], None]) -> dict[str, Any]:
        """Measures, or returns what was measured with these options; see ``sensitivity``."""
        found = self.cached(folder) if resume else None
        if found is not None and found["config"] == self.asked:
            return found
        from qtool.quantization.stage import sensitivities

        assert self.source.model is not None
        state = self._part(folder) if resume else None
        measured = sensitivities(
            self.source.model, self.config, example=example_of(self.source, self.inputs), calibration=self.inputs,
            state=state, samples=self.samples, targets=targets_in(self.source), forms=self.forms,
        )  # fmt: skip
        measured.measure(self.inputs, samples=self.samples, after=_Saver(self, folder, tell))
        result = self._told() | {"num_samples": measured.state["num_samples"], "units": measured.results()}
        if folder:
            write_json(folder / FILE, result)
            (folder / PART).unlink(missing_ok=True)
        return dict(from_json(json.dumps(finite(result))))

    def _told(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "identity": self.identity, "config": self.asked}

    def _part(self, folder: Path | None) -> dict[str, Any] | None:
        """What a stopped measurement of the very same left."""
        if folder is None or not (folder / PART).exists():
            return None
        with contextlib.suppress(ValueError, OSError):
            part = json.loads((folder / PART).read_text(encoding="utf-8"))
            if not fault_of(part, STOPPED) and {key: part.get(key) for key in self._told()} == self._told():
                return dict(part["state"])
        return None


def measured_before(
    folder: Path | None, source: Source, config: QuantizeConfig, inputs: Iterable[Any]
) -> dict[str, Any]:
    """What ``sensitivity.json`` in ``folder`` has for this model, quantized like this: for its ``quantize.json``."""
    if folder is None or not (folder / FILE).exists():
        return {}
    measuring = Measurement(source, dataclasses.replace(config, mode="ptq"), inputs)
    try:
        found = measuring.cached(folder)
    except QtoolError:
        return {}  # of another model, which is no fault here
    how = dict.fromkeys(("samples", "sensitivity"))
    same = found is not None and found["config"] | how == measuring.asked | how
    return {"sensitivity": found["units"]} if found and same else {}


class _Saver:
    """Tells and saves a measurement's state, once a second at most."""

    def __init__(self, measurement: Measurement, folder: Path | None, tell: Callable[[str], None]) -> None:
        self.measurement, self.folder, self.tell, self.last = measurement, folder, tell, time.monotonic()

    def __call__(self, state: dict[str, Any]) -> None:
        if time.monotonic() - self.last < SAVE_SECONDS:
            return
        self.tell(f"sensitivity: {many(state['num_samples'], 'sample')}, {many(len(state['units']), 'unit')}")
        if self.folder:
            write_json(self.folder / PART, self.measurement._told() | {"state": state})
        self.last = time.monotonic()


def read_sensitivity(path: Path) -> dict[str, Any]:
    """Reads a ``sensitivity.json``. Raises QtoolError where it is missing or is not one."""
    try:
        result = from_json(path.read_text(encoding="utf-8"))
        if fault := fault_of(result, {"schema": lambda value: value == SCHEMA, **READ}):
            raise ValueError(f"JSON {fault}")
    except OSError as error:
        raise unreadable(f"'{path}'", "what 'qtool sensitivity' wrote", error) from error
    except ValueError as error:
        raise QtoolError(f"'{path}'", "what 'qtool sensitivity' wrote", str(error), "delete it") from error
    return dict(result)


def _short(result: Mapping[str, Any], part: str) -> str:
    return f"sha256 {str(result['identity'].get(part))[:12]}…"
