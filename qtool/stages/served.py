"""The contract judged once more, on the file that will be served, in the runtime that will serve it.

A search judges candidates as the torch graph simulates them. The exported file rounds in the runtime's own
arithmetic, and in a deep network that is other answers for a few samples. So before the file takes its name it answers
the same validation samples, against the same float model, and the contract is judged on that: met, or exit 3 and no
file.

Where it cannot be judged (the validation samples or the task were Python objects and are not given again, the runtime
is not on this machine) the gate says so, and counts as not run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qtool.errors import QtoolError
from qtool.options import make
from qtool.recipe import QuantizeConfig
from qtool.source import UNIDENTIFIED, Source, recall_source
from qtool.stages.contract import Pairs, answers
from qtool.units import many

if TYPE_CHECKING:
    from qtool.exporting.gates.gate import Gate
    from qtool.form import QuantizedModel
    from qtool.quantization.contracts.contract import Judge, Verdict
    from qtool.tasks import Task

PROVIDERS = {"ort-cpu": "cpu", "openvino": "openvino", "tensorrt": "tensorrt"}
EXPECTED = "the contract kept by the file itself, with 95 % confidence"


def contract_gate(
    run: Path, recorded: Mapping[str, Any], model: QuantizedModel, path: Path, validation: Iterable[Any] | None,
    task: Task | str | None, trust: bool,
) -> Gate:  # fmt: skip
    """Judges the contract that the quantization in ``run`` was made under on the INT8 file ``path``.

    ``validation`` are batches as quantize took them, by default the validation part of the recorded data; ``task`` is
    by default the recorded one.
    """
    from qtool.exporting.gates.gate import Gate

    if not recorded["contract"]["met"]:
        return Gate("contract", None, EXPECTED, "not run: the quantization did not keep it, and is the closest found")
    try:
        verdict, count = _judged(run, recorded, model, path, validation, task, trust)
    except QtoolError as error:
        return Gate("contract", None, EXPECTED, f"not run: {error}")
    found = f"{'; '.join(map(str, verdict.criteria))}, on {many(count, 'sample')}"
    return Gate(
        "contract", verdict.met, EXPECTED, found,
        "quantize again with a limit that leaves room for the runtime's own rounding, or promise less",
        verdict.as_dict() | {"num_samples": count},
    )  # fmt: skip


def _judged(
    run: Path, recorded: Mapping[str, Any], model: QuantizedModel, path: Path, validation: Iterable[Any] | None,
    task: Task | str | None, trust: bool,
) -> tuple[Verdict, int]:  # fmt: skip
    known = {key: value for key, value in recorded["config"].items() if key in QuantizeConfig.__dataclass_fields__}
    config = make(QuantizeConfig, known)
    with _answers(model, path) as answer:
        judge = _judge(config, _source(run, recorded, config, validation, task, trust), model, validation)
        return judge.verdict(judge.score(answer)), judge.num_samples


def _source(
    run: Path, recorded: Mapping[str, Any], config: QuantizeConfig, validation: Iterable[Any] | None,
    task: Task | str | None, trust: bool,
) -> Source:  # fmt: skip
    if validation is None and recorded["inputs"].get("validation") == UNIDENTIFIED:
        raise QtoolError("contract", "the validation samples", "Python objects", "pass them to export as validation=…")
    return recall_source(
        run, "quantize", trust=trust, judged=config.max_drop is not None, argument="validation", data=validation,
        task=task,
    )  # fmt: skip


def _judge(config: QuantizeConfig, source: Source, model: QuantizedModel, validation: Iterable[Any] | None) -> Judge:
    import torch

    from qtool.quantization.contracts.contract import Judge

    graph = model.float_graph
    if graph is None:
        raise QtoolError("contract", "the float model to compare with", "none", "quantize from the float model")
    with torch.no_grad():
        return Judge(config, Pairs(source, validation, config), answers(graph), source.task)


@contextmanager
def _answers(model: QuantizedModel, path: Path) -> Iterator[Callable[[Any], Any]]:
    """What the file answers to a batch, in the structure of the model's own outputs."""
    import onnx
    import torch

    from qtool.exporting.gates.parity import feeds_of
    from qtool.nested import packed
    from qtool.runtimes import open_session

    header = onnx.load(str(path), load_external_data=False)
    structure = model(model.example)
    session = open_session(path, provider=PROVIDERS[model.plan.target], threads=torch.get_num_threads())

    def answer(inputs: Any) -> Any:
        values = session.run(feeds_of(header, inputs))
        return packed(structure, (torch.from_numpy(value.copy()) for value in values))

    try:
        yield answer
    finally:
        session.close()
