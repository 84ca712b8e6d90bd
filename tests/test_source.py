"""Sources: what a run came from is recorded, and opened again only while it is the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import TensorDataset

import qtool
from qtool.data.specs import Preprocessing
from qtool.errors import QtoolError, UsageError
from qtool.models import specs as models
from qtool.source import (
    UNIDENTIFIED,
    is_run_directory,
    open_float,
    open_source,
    open_task,
    recall_float,
    recall_source,
    require_run_directory,
)  # fmt: skip
from qtool.stages import exporting
from qtool.tasks import Classification


@pytest.fixture
def trained(tmp_path: Path, small_net: str, small_data: str) -> Path:
    """A run directory with a (hardly) trained model."""
    run = tmp_path / "run"
    qtool.train(small_net, small_data, out=run, max_steps=1)
    return run


def test_a_run_remembers_model_data_and_preprocessing(trained: Path, small_data: str) -> None:
    source = recall_source(trained, "train", model=True)
    assert source.parts is not None
    assert source.parts.spec == small_data
    assert Preprocessing.from_dict(source.record["preprocessing"]) == source.parts.preprocessing
    assert (source.record["num_classes"], source.record["in_channels"]) == (3, 1)
    first, again = (recall_source(trained, "train", model=True).model for _ in range(2))
    assert first is not None
    assert again is not None
    assert all(torch.equal(a, b) for a, b in zip(first.state_dict().values(), again.state_dict().values(), strict=True))


def test_the_weights_that_a_library_offers_are_known_by_what_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offered = [1.0]

    def build(name: str, num_classes: int | None, in_channels: int | None, pretrained: bool) -> nn.Module:
        net = nn.Sequential(nn.Flatten(), nn.Linear(12, 2))
        if pretrained:
            nn.init.constant_(net[1].weight, offered[0])
        return net

    monkeypatch.setitem(models.LIBRARIES, "timm", build)
    (tmp_path / "d.py").write_text(
        "import torch\n"
        "def data():\n"
        "    rows = [(torch.full((1, 3, 4), i / 9), i % 2) for i in range(20)]\n"
        "    return {'train': rows, 'test': rows}\n"
    )
    data = f"{tmp_path / 'd.py'}:data"
    qtool.quantize("timm:net", data, weights="pretrained", out=tmp_path / "run", ranges="minmax")
    recalled = recall_float(tmp_path / "run")
    assert recalled.record["weights"] == "pretrained"
    assert recalled.model is not None
    assert bool((recalled.model[1].weight == 1.0).all())
    offered[0] = 2.0
    with pytest.raises(QtoolError, match=r"weights 'pretrained': expected those that .* was made from; got others"):
        recall_float(tmp_path / "run")
    with pytest.raises(UsageError, match="--weights pretrained: expected the spec of a library's model; got a module"):
        open_source(nn.Linear(2, 2), None, weights="pretrained")


def test_the_weights_of_the_run_are_used(trained: Path, small_net: str, small_data: str) -> None:
    fresh = open_source(small_net, small_data)
    assert fresh.model is not None
    with_weights = open_source(small_net, small_data, weights=trained)
    assert with_weights.model is not None
    recalled = recall_source(trained, "train", model=True).model
    assert recalled is not None
    assert torch.equal(with_weights.model.state_dict()["last.weight"], recalled.state_dict()["last.weight"])
    assert not torch.equal(fresh.model.state_dict()["last.weight"], recalled.state_dict()["last.weight"])
    assert with_weights.inputs["weights"] != fresh.inputs["weights"] == "none"


def test_a_changed_factory_is_run_again_only_when_trusted(trained: Path, small_net: str) -> None:
    file = Path(small_net.rpartition(":")[0])
    file.write_text(file.read_text() + "\nprint('changed')\n")
    with pytest.raises(QtoolError, match="--trust"):
        recall_source(trained, "train", model=True)
    assert recall_source(trained, "train", model=True, trust=True).model is not None


def test_objects_are_identified_by_their_state(small_data: str) -> None:
    net = nn.Linear(2, 2)
    first = open_source(net, small_data).inputs["model"]
    assert first == open_source(net, small_data).inputs["model"]
    with torch.no_grad():
        net.bias[0] += 1
    assert open_source(net, small_data).inputs["model"] != first


def test_batches_are_taken_as_they_are_and_never_taken_for_known() -> None:
    batches = [(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64))]
    source = open_source(nn.Linear(3, 2), batches)
    assert source.data is batches
    assert source.parts is None
    assert source.inputs["data"] == UNIDENTIFIED


def test_a_mapping_of_datasets_is_data() -> None:
    parts = {name: TensorDataset(torch.randn(20, 3), torch.arange(20) % 2) for name in ("train", "test")}
    source = open_source(nn.Linear(3, 2), parts)
    assert source.parts is not None
    assert source.parts.num_classes == 2
    assert source.record["data"] is None


def test_a_stage_that_needs_an_object_that_had_no_spec_says_so(tmp_path: Path, small_data: str) -> None:
    qtool.train(nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), small_data, out=tmp_path, max_steps=1)
    with pytest.raises(QtoolError, match="the spec of its model; got one that was given as a Python object"):
        recall_source(tmp_path, "train", model=True)
    assert recall_source(tmp_path, "train").parts is not None


def test_export_without_gates_reads_samples_where_they_are_recorded(
    tmp_path: Path, small_data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []
    original = exporting._recorded_samples
    monkeypatch.setattr(exporting, "_recorded_samples", lambda run, *rest: (read.append(run), original(run, *rest))[1])
    qtool.quantize(nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), small_data, out=tmp_path)
    qtool.export(tmp_path, gates=False)
    assert read == [tmp_path]


def test_the_argument_that_is_named_is_the_caller_s_own(tmp_path: Path) -> None:
    images = torch.randn(16, 4)
    qtool.quantize(nn.Linear(4, 3), [images], out=tmp_path)
    with pytest.raises(QtoolError, match="call the stage from Python with samples="):
        qtool.export(tmp_path)
    assert qtool.export(tmp_path, gates=False).files["int8"].is_file()
    assert qtool.export(tmp_path, samples=[images]).files["int8"].is_file()
    parts = {"train": [(image,) for image in images], "test": [(image,) for image in images]}
    assert qtool.export(tmp_path, samples=parts).files["int8"].is_file()
    with pytest.raises(QtoolError, match="call the stage from Python with data="):
        recall_source(tmp_path, "quantize")


class Own(Classification):
    """A task that no spec names."""


def test_data_and_task_that_no_record_names_are_given_with_the_run_directory(tmp_path: Path, small_net: str) -> None:
    images, labels = torch.randn(20, 1, 8, 8), torch.arange(20) % 3
    data = {name: TensorDataset(images, labels) for name in ("train", "test")}
    qtool.train(small_net, data, task=Own(), out=tmp_path / "run", max_steps=1)
    for given, missing in (({}, "data"), ({"data": data}, "task")):
        with pytest.raises(QtoolError, match=rf"the spec of its {missing}; got .* Python object; .* {missing}=…"):
            qtool.quantize(str(tmp_path / "run"), **given)  # type: ignore[arg-type]
    trained = load_file(tmp_path / "run" / "model.safetensors")
    for run, given in ((str(tmp_path / "run"), data), (tmp_path / "run", [images])):
        source, folder = open_float(run, given, Own(), None)
        assert folder == tmp_path / "run"
        assert source.model is not None
        state = source.model.state_dict()
        assert all(torch.equal(state[name], value) for name, value in trained.items())
        assert (source.data is given, source.record["num_classes"]) == (given is not data, 3)
    with pytest.raises(UsageError, match="argument 'weights': expected none beside a run directory"):
        open_float(tmp_path / "run", data, Own(), "other.safetensors")


def test_what_holds_no_module_is_told(tmp_path: Path) -> None:
    program = torch.export.export(nn.Linear(4, 3), (torch.zeros(2, 4),))
    with pytest.raises(UsageError, match="got an exported program; pass the module that it was exported from"):
        open_source(program, None)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"what builds a model; got an ONNX file; give the PyTorch model"):
        open_source("model.onnx", None)
    with pytest.raises(UsageError, match=r"what builds a model; got an exported program; give the PyTorch model"):
        open_source("model.pt2", None)
    with pytest.raises(UsageError, match=r"got a file of weights; name the architecture, and give the file as --weig"):
        open_source("runs/model.safetensors", None)


def test_a_wrong_run_directory_gets_the_nearest_one(trained: Path, tmp_path: Path) -> None:
    assert is_run_directory(trained)
    assert not is_run_directory(tmp_path)
    with pytest.raises(UsageError, match=r"did you mean 'run'\?"):
        require_run_directory(tmp_path / "rum", "train")
    with pytest.raises(QtoolError, match="finished stages: train"):
        require_run_directory(trained, "quantize")


def test_a_run_of_several_variants_asks_for_one(trained: Path) -> None:
    (trained / "ptq").mkdir()
    (trained / "ptq" / "quantize.json").write_text("{}")
    with pytest.raises(UsageError, match=r"one variant.*variants ptq.*run/ptq"):
        require_run_directory(trained, "quantize")


def test_weights_beside_a_module_leave_it_as_it_was(tmp_path: Path) -> None:
    model, other = nn.Linear(4, 3), nn.Linear(4, 3)
    save_file(other.state_dict(), tmp_path / "other.safetensors")
    before = model.weight.clone()
    source, _ = open_float(model, [torch.ones(2, 4)], "classification", tmp_path / "other.safetensors")
    assert source.model is not None
    assert torch.equal(source.model.get_parameter("weight"), other.weight)
    assert torch.equal(model.weight, before)


def test_the_float_model_of_a_quantization_is_opened_again(trained: Path, small_net: str, small_data: str) -> None:
    expected = dict(recall_source(trained, "train", model=True).model.named_parameters())  # type: ignore[union-attr]
    qtool.quantize(trained, out=trained / "ptq", calibration="train:8")
    copy = trained.parent / "copy.safetensors"
    copy.write_bytes((trained / "model.safetensors").read_bytes())
    alone = trained.parent / "alone"
    qtool.quantize(small_net, small_data, weights=copy, out=alone, calibration="train:8")
    for run in (trained, trained / "ptq", alone):
        model = recall_float(run).model
        assert model is not None
        assert all(torch.equal(value, expected[name]) for name, value in model.named_parameters())
    assert recall_float(alone).record == recall_source(alone, "quantize").record
    qtool.quantize(alone, ranges="minmax", calibration="train:8")
    save_file({name: value * 2 for name, value in load_file(copy).items()}, copy)
    with pytest.raises(QtoolError, match="name them with --model and --weights"):
        recall_float(alone)


@pytest.mark.parametrize("task", ["tasks.py:make", Classification()])
def test_labels_are_not_smoothed_in_the_loss_of_a_task_of_one_s_own(task: Any) -> None:
    with pytest.raises(UsageError, match="'label_smoothing': expected classification or language"):
        open_task(task, 0.1)
