"""A recipe's stages in order: what is where, what is skipped, what is done again, and what a kill changes (nothing)."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from torch import nn

import qtool
from qtool import pipeline
from qtool.artifacts import read_result
from qtool.errors import ContractError, QtoolError, UsageError
from qtool.recipe import BenchmarkConfig, Recipe
from qtool.recipe_files import load_recipe
from qtool.reporting.page import report
from qtool.stages.benchmarking import measured
from qtool.system.files import sha256_of
from qtool.system.json_files import finite, write_json

VARIANT = {
    "float.pt2", "int8.pt2", "ranges.json", "quantize.json", "model.fp32.onnx", "model.fp16.onnx", "model.int8.onnx",
    "export.json", "benchmark.json", "report.json",
}  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, small_recipe: Path) -> Path:
    """A run from start to end. Tests take a copy."""
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    qtool.run(small_recipe, out)
    return out


@pytest.fixture
def done(undisturbed: Path, tmp_path: Path) -> Path:
    """A finished run of one's own."""
    return Path(shutil.copytree(undisturbed, tmp_path / "run"))


def test_everything_is_where_it_is_said_to_be(undisturbed: Path) -> None:
    top = {"recipe.toml", "model.safetensors", "train.json", "report.json", "ptq", "qat"}
    assert {p.name for p in undisturbed.iterdir()} == top
    for mode in ("ptq", "qat"):
        assert {p.name for p in (undisturbed / mode).iterdir()} == VARIANT


def test_the_report_holds_every_stage_of_every_variant(undisturbed: Path) -> None:
    report = json.loads((undisturbed / "report.json").read_text())
    assert report["train"]["metrics"]["top1"] > 0.9
    for mode in ("ptq", "qat"):
        variant = report["variants"][mode]
        assert variant["quantize"]["config"]["mode"] == mode
        assert all(gate["passed"] is not False for gate in variant["export"]["metrics"]["gates"])
        accuracy = variant["benchmark"]["metrics"]["variants"]["int8"]["accuracy"]
        assert accuracy["num_samples"] == 96
        assert accuracy["agreement"] > 0.9
    assert json.loads((undisturbed / "qat" / "report.json").read_text())["benchmark"]


def test_the_recipe_that_was_run_is_kept_whole(undisturbed: Path, small_recipe: Path) -> None:
    assert load_recipe(undisturbed / "recipe.toml") == load_recipe(small_recipe)


class Counted:
    """A stage that counts how often it is really done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        from qtool.benchmarking import stage as benchmarking
        from qtool.exporting import stage as exporting
        from qtool.quantization import stage as quantization
        from qtool.training import stage as training

        for name, module in (("train", training), ("quantize", quantization), ("export", exporting),
                             ("benchmark", benchmarking)):  # fmt: skip
            monkeypatch.setattr(module, name, self._counted(name, getattr(module, name)))

    def _counted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def stage(*positional: Any, **named: Any) -> Any:
            self.done.append(name)
            return real(*positional, **named)

        return stage


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


def test_a_finished_run_is_not_done_again(done: Path, small_recipe: Path, counted: Counted) -> None:
    report = qtool.run(small_recipe, done)
    assert counted.done == []
    assert set(report["variants"]) == {"ptq", "qat"}


@pytest.mark.parametrize(
    "options", [{"provider": "torch"}, {"provider": "openvino", "variants": ("fp32", "bf16", "int8")}, {}]
)
def test_a_finished_benchmark_is_known_whatever_was_measured(
    done: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    from qtool.benchmarking import stage

    monkeypatch.setattr(stage, "benchmark", lambda files, *_, **__: {"notes": [], "variants": {}, "files": list(files)})
    config = BenchmarkConfig(allow_slower=True, **options)
    assert not measured(done / "ptq", config)
    if not options:  # as where the weights do not fit into half precision
        recorded = json.loads((done / "ptq" / "export.json").read_text())
        del recorded["outputs"]["fp16"]
        recorded["metrics"]["gates"].append({"name": "fp16 range", "passed": None, "found": "weights beyond it"})
        write_json(done / "ptq" / "export.json", recorded)
    assert ("fp16" in qtool.benchmark(done / "ptq", config=config)["files"]) is (options.get("provider") == "torch")
    assert measured(done / "ptq", config)


def test_a_benchmark_is_done_again_where_it_compares_with_other_figures_or_cannot_be_read(
    done: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from qtool.benchmarking import stage

    monkeypatch.setattr(stage, "benchmark", lambda *_, **__: {"notes": [], "variants": {}})
    config = BenchmarkConfig(allow_slower=True, compare=str(tmp_path / "old.json"))
    write_json(tmp_path / "old.json", {"a": 1})
    qtool.benchmark(done / "ptq", config=config)
    assert measured(done / "ptq", config)
    write_json(tmp_path / "old.json", {"a": 2})
    assert not measured(done / "ptq", config)
    (done / "ptq" / "benchmark.json").write_text("{")
    assert not measured(done / "ptq", config)
    qtool.benchmark(done / "ptq", config=config)
    assert measured(done / "ptq", config)


def test_a_benchmark_that_failed_fails_again(
    done: Path, small_recipe: Path, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slower(found: dict[str, Any], allowed: bool) -> None:
        raise ContractError("INT8", "as fast as FP32", "slower", "look")

    monkeypatch.setattr("qtool.benchmarking.claims.require_not_slower", slower)
    for again in (["benchmark"], []):
        counted.done.clear()
        with pytest.raises(ContractError, match="as fast as FP32"):
            qtool.run(small_recipe, done, overrides=["benchmark.seconds=0.04", 'variants=["ptq"]'])
        assert counted.done == again


@pytest.mark.parametrize(
    ("change", "again"),
    [
        ("benchmark.seconds=0.04", ["benchmark"]),
        ("export.reference_samples=1", ["export", "benchmark"]),
    ],
)
def test_a_changed_option_does_again_what_depends_on_it(
    done: Path, small_recipe: Path, counted: Counted, change: str, again: list[str]
) -> None:
    qtool.run(small_recipe, done, overrides=[change, 'variants=["ptq"]'])
    assert counted.done == again or (change.startswith("export") and counted.done == ["export"])


DATA = """
import torch
from torch.utils.data import TensorDataset

def data():
    images, labels = torch.rand(24, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 3
    train, test = TensorDataset(images[:16], labels[:16]), TensorDataset(images[16:], labels[16:])
    return {"train": train, "test": test, "labels": ["a", "b", "c"]}
"""


def test_other_test_data_and_labels_are_measured_and_handed_on_though_the_model_is_the_same(
    tmp_path: Path, small_recipe: Path, counted: Counted
) -> None:
    net, own, run = small_recipe.parent / "net.py", tmp_path / "own.py", tmp_path / "run"
    own.write_text(DATA)
    recipe = {
        "model": f"{net}:build", "data": f"{own}:data", "variants": ["ptq"],
        "train": {"epochs": 0}, "quantize": {"calibration": "train:8", "effort": "fast"},
        "export": {"gates": False}, "benchmark": {"seconds": 0.0, "variants": ["fp32"]},
    }  # fmt: skip
    qtool.run(recipe, run)
    graph = sha256_of(run / "ptq" / "int8.pt2")
    own.write_text(DATA.replace('"c"]', '"d"]').replace("labels[16:])", "labels[16:] * 0)"))
    lines: list[str] = []
    told = qtool.run(recipe, run, progress=lines.append)
    assert sha256_of(run / "ptq" / "int8.pt2") == graph
    top1 = told["variants"]["ptq"]["benchmark"]["metrics"]["variants"]["fp32"]["accuracy"]["top1"]
    assert top1 == told["train"]["metrics"]["top1"]
    assert "d" in pipeline.inspect(run / "ptq" / "model.int8.onnx")["metadata"]["qtool.labels"]
    assert "export: again, since source changed" in lines
    assert any(line.startswith("benchmark: again, since") and "data" in line for line in lines)
    counted.done.clear()
    qtool.run(recipe, run, progress=lines.append)
    assert counted.done == []
    assert lines[-1] == f"benchmark: as it is in '{run / 'ptq'}', finished with the same settings"


def test_a_lost_file_is_made_again_to_the_same_bits(done: Path, small_recipe: Path, counted: Counted) -> None:
    files = [done / "ptq" / "int8.pt2", done / "qat" / "model.int8.onnx"]
    before = sha256_of(files[1])
    files[1].unlink()
    qtool.run(small_recipe, done)
    assert counted.done == ["export"]
    assert sha256_of(files[1]) == before


def test_a_changed_file_is_refused(done: Path, small_recipe: Path) -> None:
    (done / "ptq" / "model.int8.onnx").write_bytes(b"tampered")
    with pytest.raises(QtoolError, match=r"model\.int8\.onnx.*as recorded in export\.json"):
        qtool.run(small_recipe, done)


def test_a_gate_that_fails_in_one_variant_decides_the_end_and_stops_no_other(
    done: Path, small_recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qtool.exporting import stage

    real = stage.export

    def export(quantized: Any, out: Path, *rest: Any, **named: Any) -> Any:
        if "ptq" in out.parts:
            raise ContractError("gate 'parity'", "equal integers", "others", "look")
        return real(quantized, out, *rest, **named)

    monkeypatch.setattr(stage, "export", export)
    old = (done / "ptq" / "model.int8.onnx").read_bytes()
    lines: list[str] = []
    with pytest.raises(ContractError, match="parity"):
        qtool.run(small_recipe, done, overrides=["export.reference_samples=1"], progress=lines.append)
    assert (done / "ptq" / "model.int8.onnx").read_bytes() == old
    with pytest.raises(QtoolError, match="a stale one"):
        read_result(done / "ptq", "export")
    assert read_result(done / "qat", "export")["config"]["reference_samples"] == 1
    assert any("parity" in line for line in lines)
    assert "stale" in json.loads((done / "report.json").read_text())["variants"]["ptq"]["export"]


def test_an_export_that_fails_leaves_no_file_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from qtool.exporting import stage

    def export(quantized: Any, out: Path, *rest: Any, **named: Any) -> Any:
        (out / "model.int8.onnx").write_text("half")
        raise ContractError("gate", "a", "b", "c")

    import torch

    quantized = qtool.quantize(torch.nn.Sequential(torch.nn.Linear(4, 2)), [torch.randn(3, 4)])
    monkeypatch.setattr(stage, "export", export)
    with pytest.raises(ContractError):
        qtool.export(quantized, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_recipes_as_objects_need_a_place(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="argument 'out'"):
        qtool.run(Recipe())
    with pytest.raises(UsageError, match="did you mean 'model'"):
        qtool.run({"modle": "resnet"}, tmp_path / "run")
    with pytest.raises(UsageError, match=r"'recipe': expected a TOML file, the name of a recipe.*; got a list"):
        qtool.run([("model", "resnet")], tmp_path / "run")  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"qat": {"ema": 0.9, "early_stopping": 1}}, "--ema: expected"),
        ({"quantize": {"metric": "top1"}}, "'metric': expected max_drop"),
        ({"quantize": {"engine": "torch.ao", "weight_bits": 4}}, "--weight-bits: expected 7 or 8"),
        ({"quantize": {"calibration": "fashion"}}, "calibration 'fashion': expected train:N, a set's name or a"),
        ({"quantize": {"calibration": "none.toml"}}, r"none.toml': expected a readable TOML file; got .*No such file"),
        ({"quantize": {"ranges_from": "none.json"}}, r"none.json': expected the ranges.json of a quantize run"),
        ({"quantize": {"device": "cuda:99"}}, "device 'cuda:99': expected that CUDA device"),
        ({"benchmark": {"provider": "torch", "device": "cuda:99"}}, "provider 'torch': expected the CUDA device"),
        ({"benchmark": {"compare": "none.json"}}, "none.json': expected a benchmark.json"),
        ({"benchmark": {"variants": ["fp32", "bf16"]}}, "--variants bf16: expected --provider torch or openvino"),
        ({"benchmark": {"shapes": {"x": "1x1x28x28"}}}, "input shapes: expected none beside data.*; got x; leave"),
    ],
)
def test_what_a_variant_would_refuse_is_told_before_the_training(
    options: dict[str, Any], told: str, tmp_path: Path
) -> None:
    with pytest.raises(QtoolError, match=told):
        qtool.run({"model": "resnet", "data": "fashion-mnist", "train": {"epochs": 0}, **options}, tmp_path / "run")
    assert not (tmp_path / "run").exists()


SORTS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(16, 3)

    def forward(self, x):
        return self.last(torch.kthvalue(x.flatten(1).unflatten(1, (16, 4)), 1)[0])

def build():
    return Net()
"""


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"quantize": {"overrides": {"frist.*": "float"}}}, "overrides: expected patterns that match a .*; got frist"),
        ({"qat": {"distill_features": ["frist"]}}, "--distill-features: expected a module of the model; got 'frist'"),
        ({"quantize": {"dynamic_axes": [7]}}, "--dynamic-axes: expected axes of the inputs .*; got axis 7"),
        ({"quantize": {"activation_bits": 4}, "variants": ["qat"]}, "export: expected .* 8 bits; got fewer"),
        ({"quantize": {"max_drop": 1.0, "metric": "f1"}}, "--metric: expected a metric of task 'classification'; got"),
        ({"quantize": {"max_drop": 1.0}}, "--max-drop: expected at least 381 validation samples .*; got 300"),
        ({"quantize": {"max_kl": 1.0, "validation_samples": 1}}, "--max-kl: expected at least 2 .*; got 1"),
        ({"quantize": {"max_kl": 1.0, "calibration": "own.toml"}}, "not among the calibration samples; got 300 of 300"),
        ({"export": {"tune_seconds": 5.0}}, "'tune_seconds': expected 'tune' beside it; got no tuning"),
        (
            {"export": {"gates": False, "reference_samples": 3}},
            "'reference_samples': expected 'gates' beside it; got no gates",
        ),
        ({"export": {"tune": True}, "quantize": {"target": "tensorrt"}}, "--tune: expected target 'ort-cpu' or"),
        ({"export": {"opset": 20}, "quantize": {"weight_bits": 4}}, "--opset: expected 21 or more for 4-bit weights"),
        ({"model": "sorts.py:build"}, "kthvalue"),
    ],
)
def test_what_a_variant_would_refuse_of_a_model_and_its_data_is_told_before_the_training(
    options: dict[str, Any], told: str, small_net: str, held_out_data: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("sorts.py").write_text(SORTS)
    Path("own.toml").write_text('samples = 512\npart = "validation"\n')
    monkeypatch.setattr(pipeline, "train", None)
    with pytest.raises(QtoolError, match=told):
        qtool.run({"model": small_net, "data": held_out_data, **options}, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_place_that_cannot_be_written_to_is_told_before_anything_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "rehearse", None)
    (tmp_path / "run").touch()
    with pytest.raises(UsageError, match=r"expected a folder to write to; got '.*', which is a file"):
        qtool.run({"model": "resnet", "data": "fashion-mnist"}, tmp_path / "run")


def test_overrides_change_a_mapping_and_are_refused_beside_a_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(pipeline, "train", lambda *_, config, **__: asked.append(config.epochs))
    monkeypatch.setattr(pipeline, "report", lambda folder: {})
    table = {"model": "resnet", "data": "fashion-mnist", "variants": "none", "train": {"seed": 1}}
    for overrides in (["train.epochs=3"], "train.epochs=3"):
        pipeline.run(table, tmp_path, overrides=overrides)
    assert asked == [3, 3]
    assert table["train"] == {"seed": 1}
    with pytest.raises(UsageError, match=r"'train\.epoch'"):
        pipeline.run(table, tmp_path, overrides=["train.epoch=3"])
    with pytest.raises(UsageError, match=r"'overrides': expected none beside a Recipe; got train\.epochs=3"):
        pipeline.run(Recipe(), tmp_path, overrides=["train.epochs=3"])


def test_inspecting_a_run_and_its_files(undisturbed: Path) -> None:
    assert set(pipeline.inspect(undisturbed)["variants"]) == {"ptq", "qat"}
    inside = pipeline.inspect(undisturbed / "ptq")
    assert inside["export"]["metrics"]["gates"]
    assert all(unit["low"] < unit["high"] for unit in inside["units"] if unit["kind"] == "conv")
    onnx = pipeline.inspect(undisturbed / "ptq" / "model.int8.onnx")
    assert onnx["operators"]["QuantizeLinear"] > 0
    assert "int8" in onnx["num_initializers"]
    assert "preprocessing" in "".join(onnx["metadata"])
    assert pipeline.inspect(undisturbed / "ptq" / "int8.pt2")["num_quantizers"] > 0
    weights = pipeline.inspect(undisturbed / "model.safetensors")["tensors"]
    assert weights["last.weight"]["shape"] == [3, 32]
    assert pipeline.inspect(undisturbed / "train.json")["content"]["stage"] == "train"


def test_a_report_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a folder that a stage has written; got no such folder"):
        qtool.report(tmp_path / "none")
    with pytest.raises(QtoolError, match=r"expected a result of train, .*; got none"):
        qtool.report(tmp_path)
    with pytest.raises(UsageError, match=r"'folder': expected the path of a run .*; got a Recipe; pass its out=…"):
        qtool.report(Recipe())  # type: ignore[arg-type]


WRONG = {
    "a folder; got an int": [
        lambda: qtool.quantize(nn.Linear(2, 2), [torch.ones(2, 2)], out=5),  # type: ignore[arg-type]
        lambda: qtool.train(nn.Linear(2, 2), [], out=5),  # type: ignore[arg-type]
        lambda: qtool.run("fashion-mnist", out=5),  # type: ignore[arg-type]
    ],
    "a folder; got ''": [lambda: qtool.quantize(nn.Linear(2, 2), [torch.ones(2, 2)], out="")],
    "a run directory; got None": [lambda: qtool.load_quantized(None)],  # type: ignore[arg-type]
    "'pretrained'; got an OrderedDict": [
        lambda: qtool.quantize(nn.Linear(2, 2), [torch.ones(2, 2)], weights=nn.Linear(2, 2).state_dict()),
        lambda: qtool.load_model("resnet", num_classes=2, weights=nn.Linear(2, 2).state_dict()),
    ],
    "a model's spec as text; got a PosixPath": [lambda: qtool.load_model(Path("net.py"))],  # type: ignore[arg-type]
    "a data spec as text; got None": [lambda: qtool.load_data(None)],  # type: ignore[arg-type]
}


@pytest.mark.parametrize(("told", "call"), [(told, call) for told, calls in WRONG.items() for call in calls])
def test_what_is_no_path_and_no_spec_is_told_by_each_function(told: str, call: Callable[[], Any]) -> None:
    """An empty text, as an environment variable that is not set gives it, would be the current folder."""
    with pytest.raises(UsageError, match=re.escape(told)):
        call()


def test_a_report_is_written_where_it_is_asked_for(done: Path, tmp_path: Path) -> None:
    found = qtool.report(done)
    assert {*found} == {"run", "train", "environment", "variants"}
    assert {*found["variants"]["ptq"]} == {"run", "quantize", "export", "benchmark", "environment"}
    assert not (done / "report.html").exists()
    assert qtool.report(done, tmp_path / "told") == found
    assert json.loads((tmp_path / "told" / "report.json").read_text()) == json.loads(json.dumps(finite(found)))
    assert {p.name for p in (tmp_path / "told").iterdir()} == {"report.html", "report.md", "report.json"}


@pytest.mark.parametrize(("what", "got"), [([], "a list"), ([1], "a list"), (None, "None")])
def test_what_is_no_file_to_benchmark_is_refused(what: Any, got: str) -> None:
    with pytest.raises(UsageError, match=f"'what': expected a run directory, or ONNX files; got {got}; pass what"):
        qtool.benchmark(what)
    with pytest.raises(UsageError, match=f"'what': expected paths of files by name; got {got} as 'int8'; export it"):
        qtool.benchmark({"fp32": "a.onnx", "int8": what})


def test_figures_of_files_are_returned_of_all_and_written_nowhere(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"'out': expected a run directory beside it, .*; got files"):
        qtool.benchmark("a.onnx", out=tmp_path)
    with pytest.raises(UsageError, match="'variants': expected a run directory beside them; got int8"):
        qtool.benchmark(["a.onnx", "b.onnx"], variants=("int8",))
    with pytest.raises(UsageError, match="'samples': expected test data beside it; got files alone; leave it out"):
        qtool.benchmark(["a.onnx", "b.onnx"], samples=5)


@pytest.mark.parametrize("again", ["a.onnx", "a.pt2"])
def test_files_of_one_name_are_refused_since_one_alone_would_be_measured(again: str) -> None:
    with pytest.raises(UsageError, match=f"files: expected each of a name of its own; got '{again}' again"):
        qtool.benchmark(["a.onnx", "b.onnx", again])


def test_a_file_that_was_changed_is_said_wherever_it_is_looked_at(done: Path) -> None:
    weights, graph = done / "model.safetensors", done / "ptq" / "int8.pt2"
    assert not {"notes"} & {*pipeline.inspect(done), *pipeline.inspect(weights), *pipeline.inspect(graph)}
    for path in (weights, graph):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    inside = pipeline.inspect(done)
    for path, place in ((weights, inside), (graph, inside["variants"]["ptq"])):
        (told,) = place["notes"]
        assert f"'{path}': expected sha256" in told
    assert pipeline.inspect(weights)["notes"] == inside["notes"]
    assert any(f"ptq: '{graph}': expected sha256" in told for told in report(done)["notes"])


@pytest.mark.parametrize("name", ["a.onnx", "a.pt2", "a.safetensors", "a.json"])
def test_inspecting_a_damaged_file_is_an_error(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x00damaged")
    with pytest.raises(QtoolError, match=name):
        pipeline.inspect(tmp_path / name)


def test_inspecting_what_is_no_artifact(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(UsageError, match=r"\.onnx"):
        pipeline.inspect(tmp_path / "a.txt")
    with pytest.raises(UsageError, match="a folder without results"):
        pipeline.inspect(tmp_path)


MOMENTS: list[tuple[str, Callable[[Path], bool]]] = [
    ("training", lambda run: any(run.glob("checkpoints/step-*"))),
    ("tuning", lambda run: any((run / "qat").glob("checkpoints/step-*"))),
    ("quantizing", lambda run: (run / "qat" / ".quantize-pending").exists()),
    ("exporting", lambda run: (run / "qat" / ".export-pending" / "model.int8.onnx").exists()),
    ("benchmarking", lambda run: (run / "qat" / "export.json").exists()),
]


def test_a_run_killed_in_every_stage_gives_the_files_of_an_undisturbed_one(
    tmp_path: Path, small_recipe: Path, undisturbed: Path
) -> None:
    out = tmp_path / "run"
    words = ["run", str(small_recipe), "--out", str(out), "--set", 'variants=["qat"]', "--quiet"]
    for name, reached in MOMENTS:
        process = warm.Started(tmp_path / name, warm.command, *words)
        process.wait_for(partial(reached, out))
        process.kill()
    last = warm.Started(tmp_path / "last", warm.command, *words)
    assert last.end() == 0, last.said()
    files = [p.relative_to(undisturbed) for p in undisturbed.rglob("*") if p.is_file()]
    names = [n for n in files if n.parts[0] != "ptq"]
    assert sorted(names) == sorted(p.relative_to(out) for p in out.rglob("*") if p.is_file())
    made = [n for n in names if n.suffix in (".safetensors", ".onnx") or n.name == "ranges.json"]
    assert {n: sha256_of(out / n) for n in made} == {n: sha256_of(undisturbed / n) for n in made}
