"""Recipes: what goes in comes out, and what is wrong is named."""

from __future__ import annotations

import dataclasses
import json
import pydoc
import re
import tomllib
from enum import StrEnum
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import qtool
from qtool import tasks
from qtool.data import specs as data
from qtool.errors import UsageError
from qtool.models import specs as models
from qtool.options import argument, flag, inner_type, make
from qtool.recipe import (
    PRECISIONS,
    BenchmarkConfig,
    ExportConfig,
    QatConfig,
    QuantizeConfig,
    Recipe,
    TrainConfig,
    as_dict,
)
from qtool.recipe_files import find_recipe, from_anywhere, from_table, load_recipe, override, recipe_names, to_toml
from qtool.stages.common import configured
from qtool.system import machine

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20).filter(lambda text: text != "none")


class Mode(StrEnum):
    """How services name such choices."""

    PTQ = "ptq"


def _values(hint: Any, metadata: Any) -> st.SearchStrategy[Any]:
    """Any valid value of a field."""
    kind, optional = inner_type(hint)
    if get_origin(kind) is tuple:
        found = st.lists(_values(get_args(kind)[0], metadata), min_size=1, max_size=3, unique=True).map(tuple)
    elif get_origin(kind) is dict:
        found = st.dictionaries(TEXT, _values(get_args(kind)[1], metadata), max_size=3)
    elif metadata["choices"]:
        found = st.sampled_from(metadata["choices"])
    elif kind is str:
        found = TEXT
    elif kind is bool:
        found = st.booleans()
    elif kind is int:
        found = st.integers(int(metadata["low"] or 0), int(metadata["high"] or 10**6))
    else:
        found = st.floats(metadata["low"] or 0, metadata["high"] or 1e9)
    return st.none() | found if optional else found


def configs(kind: type) -> st.SearchStrategy[Any]:
    """Any valid config of a kind."""
    hints = get_type_hints(kind)
    return st.builds(
        kind,
        **{
            f.name: configs(hints[f.name])
            if dataclasses.is_dataclass(hints[f.name])
            else st.none()  # an effort goes with settings of its own alone
            if f.name == "effort"
            else st.just(f.default)  # any other goes with a provider that runs there, and with a comparison
            if kind is BenchmarkConfig and f.name in ("device", "tolerance")
            else _values(hints[f.name], f.metadata)
            for f in dataclasses.fields(kind)
        },
    )


BUILT_IN = {"model": "resnet", "data": "fashion-mnist"}


@given(configs(Recipe))
def test_a_recipe_written_as_toml_reads_back_equal(recipe: Recipe) -> None:
    assert make(Recipe, tomllib.loads(to_toml(recipe))) == recipe


@given(configs(Recipe))
def test_a_recipe_made_from_its_own_values_is_equal(recipe: Recipe) -> None:
    assert make(Recipe, as_dict(recipe)) == recipe


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("effort", [None, "fast", "best"])
def test_an_effort_is_its_settings_written_out(effort: str | None, bits: int) -> None:
    recipe = make(Recipe, {"quantize": {"effort": effort, "weight_bits": bits}})
    found = recipe.quantize
    wanted = {
        (None, 4): ("network", "minmax", ("pixels", "smooth", "equalize", "pairs", "analytic-bias", "gptq-small")),
        (None, 8): ("network", "minmax", ("pixels", "smooth", "equalize", "pairs", "analytic-bias", "gptq-small")),
        ("fast", 4): ("minmax", "minmax", None),
        ("fast", 8): ("minmax", "minmax", ("pairs",)),
        ("best", 4): ("network", "mse", ("pixels", "smooth", "brecq")),
        ("best", 8): ("network", "minmax", ("pixels", "smooth", "equalize", "pairs", "gptq", "steps")),
    }
    assert (found.ranges, found.weight_ranges, found.algorithms) == wanted[effort, bits]
    assert found.effort == effort
    assert make(Recipe, tomllib.loads(to_toml(recipe))) == recipe
    assert QuantizeConfig(effort=effort, weight_bits=bits) == found


def test_min_max_by_name_is_min_max_alone_unless_algorithms_are_named_too() -> None:
    alone = make(QuantizeConfig, {"ranges": "minmax"})
    assert alone == make(QuantizeConfig, {"ranges": "minmax", "algorithms": "none"})
    assert alone == dataclasses.replace(make(QuantizeConfig, {"effort": "fast"}), effort=None, algorithms=None)
    names = ("pixels", "smooth", "equalize", "pairs", "analytic-bias", "gptq-small")
    assert make(QuantizeConfig, {"ranges": "minmax", "algorithms": names}).algorithms == names
    assert make(QuantizeConfig, {"ranges": "percentile"}).algorithms == names


@pytest.mark.parametrize("other", [{"ranges": "mse"}, {"ranges": "entropy"}, {"algorithms": ["bias"]}])
def test_an_effort_beside_other_settings_is_refused(other: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="leave one of the two out"):
        make(Recipe, {"quantize": {"effort": "best", **other}})


@given(configs(TrainConfig))
def test_overrides_of_every_key_give_that_config(config: TrainConfig) -> None:
    table: dict[str, Any] = {}
    for line in to_toml(Recipe(train=config)).partition("[train]")[2].partition("[quantize]")[0].split("\n"):
        if line:
            override(table, "train." + line)
    assert make(Recipe, table).train == config


def test_defaults_are_valid_by_their_own_rules() -> None:
    assert make(Recipe, as_dict(Recipe())) == Recipe()


@pytest.mark.parametrize(
    ("table", "parts"),
    [
        ({"modle": "resnet"}, ["recipe key 'modle'", "did you mean 'model'?"]),
        ({"modle": "resnet", "outt": 1}, ["expected a known key; got 'modle', 'outt'; did"]),
        ({"batch_size": 8}, ["recipe key 'batch_size'", "write it as train.batch_size or qat.batch_size"]),
        ({"knowing": 8}, ["choose one of: benchmark"]),
        ({"train": {"epoch": 3}}, ["recipe key 'train.epoch'", "did you mean 'epochs'?"]),
        ({"train": {"max_grad_norm": 1.0}}, ["did you mean 'grad_clip'?"]),
        ({"train": {"optimizer": 3}}, ["'train.optimizer'", "one of adamw, sgd", "got 3"]),
        ({"train": {"epochs": "four"}}, ["'train.epochs'", "a whole number", "'four'"]),
        ({"train": {"epochs": True}}, ["'train.epochs'", "a whole number", "True"]),
        ({"train": {"epochs": 1.0}}, ["a whole number", "1.0"]),
        ({"train": {"epochs": -1}}, ["at least 0", "-1"]),
        ({"train": {"seed": 2**63}}, ["'train.seed'", f"at most {2**63 - 1}; got {2**63}"]),
        ({"train": {"batch_size": 0}}, ["'train.batch_size'", "at least 1"]),
        ({"train": {"learning_rate": float("nan")}}, ["a finite number", "nan"]),
        ({"train": {"learning_rate": float("inf")}}, ["a finite number"]),
        ({"train": {"warmup": 1.5}}, ["at most 1", "1.5"]),
        ({"train": {"precision": "bf16"}}, ["one of 32-true", "choose one of: bf16-mixed, bf16-true"]),
        ({"train": 3}, ["recipe key 'train'", "a table", "[train]"]),
        ({"variants": "ptq, qat"}, ["'variants'", 'write ["ptq", "qat"]']),
        ({"benchmark": {"batch_sizes": "1,32"}}, ["'benchmark.batch_sizes'", "write [1, 32]"]),
        ({"benchmark": {"batch_sizes": 4}}, ["write [4]"]),
        ({"benchmark": {"batch_sizes": "[1,x]"}}, ["got '[1,x]'; write numbers alone, between brackets"]),
        ({"variants": "[ptq, 'qat']"}, ['write ["ptq", "qat"]']),
        ({"variants": {"qat", "ptq"}}, ['write ["ptq", "qat"]']),
        ({"variants": {"qat": 1, "ptq": 2}}, ['write ["qat", "ptq"]']),
        ({"quantize": {"dynamic_axes": {3, 2}}}, ["write [2, 3]"]),
        ({"train": {"memory_budget": 0.5}}, ["expected text or a whole number of bytes; got 0.5"]),
        ({"quantize": {"overrides": {"a": {"*": "float"}}}}, ["a value for 'a'", "a table {'*': 'float'}", "quote"]),
        ({"variants": ["ptq", "qat", "ptq"]}, ["'variants'", "each variant once; got 'ptq' again"]),
        ({"variants": []}, ["'variants'", "at least one value", "an empty list"]),
        ({"variants": "ptq"}, ["a list", "'ptq'"]),
        ({"variants": ["pptq"]}, ["did you mean 'ptq'?"]),
        ({"quantize": {"overrides": {"a.*": "flaot"}}}, ["did you mean 'float'?"]),
        ({"quantize": {"overrides": "float"}}, ["'quantize.overrides'", "a table"]),
        ({"model": None}, ["recipe key 'model'", "text", "None"]),
    ],
)
def test_a_wrong_recipe_names_the_key_and_the_cure(table: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        make(Recipe, table)
    for part in parts:
        assert part in str(caught.value)


def test_whole_numbers_serve_as_numbers_and_lists_as_tuples() -> None:
    assert make(TrainConfig, {"learning_rate": 1}).learning_rate == 1.0
    assert make(BenchmarkConfig, {"batch_sizes": [1, 8]}).batch_sizes == (1, 8)


def test_none_switches_an_optional_key_off_and_no_other() -> None:
    assert make(TrainConfig, {"grad_clip": "none"}).grad_clip is None
    for spelled in ("none", ["none"], ("none",)):  # as a list of algorithms may say
        assert make(QuantizeConfig, {"algorithms": spelled}).algorithms is None
    with pytest.raises(UsageError, match="a number"):
        make(TrainConfig, {"learning_rate": "none"})


def test_the_error_speaks_the_callers_language() -> None:
    with pytest.raises(UsageError, match="argument 'grad_clip'"):
        make(TrainConfig, {"grad_clip": -1}, argument)
    with pytest.raises(UsageError, match="option '--grad-clip'"):
        make(TrainConfig, {"grad_clip": -1}, flag)


def test_qat_inherits_the_training_options_with_its_own_defaults() -> None:
    training = {f.name for f in dataclasses.fields(TrainConfig)}
    assert training < {f.name for f in dataclasses.fields(QatConfig)}
    assert QatConfig().settled(8).learning_rate == 1e-5
    assert QatConfig().settled(4).learning_rate == 1.6e-4 < TrainConfig().learning_rate
    assert make(QatConfig, {"learning_rate": 0.5}).settled(4).learning_rate == 0.5
    assert make(QatConfig, {"learning_rate": 0}).settled(8).learning_rate == 0.0  # asked for, and not auto
    assert make(QatConfig, {"learning_rate": "auto", "freeze_observers": "auto"}) == QatConfig()
    assert QatConfig().settled(8).freeze_observers == 0.0
    assert QatConfig(step_size="learned").settled(8).freeze_observers == 0.7
    assert QatConfig(step_size="learned", freeze_observers=0.0).settled(8).freeze_observers == 0.0
    assert "16-mixed" in PRECISIONS


@pytest.mark.parametrize(
    ("text", "table"),
    [
        ("train.epochs=8", {"train": {"epochs": 8}}),
        ("model=resnet", {"model": "resnet"}),
        ('model="resnet"', {"model": "resnet"}),
        ("benchmark.batch_sizes=[1, 32]", {"benchmark": {"batch_sizes": [1, 32]}}),
        ("data=idx:/a=b", {"data": "idx:/a=b"}),
        ("model = mobilenet", {"model": "mobilenet"}),
        ('quantize.overrides."layer4.*"=float', {"quantize": {"overrides": {"layer4.*": "float"}}}),
        ("a b.c=1", {"a b": {"c": 1}}),
    ],
)
def test_an_override_is_read_as_toml_then_as_text(text: str, table: dict[str, Any]) -> None:
    found: dict[str, Any] = {}
    override(found, text)
    assert found == table


@pytest.mark.parametrize("text", ["train.epochs", "=3", "model.x=1"])
def test_an_override_that_cannot_be_applied_is_named(text: str) -> None:
    with pytest.raises(UsageError, match="--set"):
        override({"model": "resnet"}, text)


def test_a_recipe_file_with_overrides(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text('model = "mobilenet"\ndata = "fashion-mnist"\n[train]\nepochs = 2\n')
    recipe = load_recipe(path, ["train.epochs=3", "quantize.ranges=entropy"])
    assert (recipe.model, recipe.train.epochs, recipe.quantize.ranges) == ("mobilenet", 3, "entropy")
    assert recipe.quantize == QuantizeConfig(ranges="entropy")


def test_files_that_a_recipe_names_are_found_beside_it_and_then_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there" / "photos").mkdir(parents=True)
    (tmp_path / "train").mkdir()
    for name in ("there/nets.py", "there/w.pt", "there/set.toml", "here.py", "there/train"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    text = 'model = "nets.py:build"\ndata = "imagefolder:photos:64"\ntask = "here.py:task"\nweights = "w.pt"\n'
    Path("there/r.toml").write_text(text + '[quantize]\ncalibration = "set.toml"')
    read = load_recipe(Path("there/r.toml"))
    assert (read.model, read.data) == ("there/nets.py:build", "imagefolder:there/photos:64")
    assert (read.task, read.weights, read.quantize.calibration) == ("here.py:task", "there/w.pt", "there/set.toml")
    Path("there/r.toml").write_text('model = "resnet"\ndata = "a"\n[quantize]\ncalibration = "train:8"')
    kept = load_recipe(Path("there/r.toml"), ["model=nets.py:build"])  # what is typed is meant from here
    assert (kept.model, kept.quantize.calibration) == ("nets.py:build", "train:8")


def test_a_recipe_means_the_same_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "runs" / "a").mkdir(parents=True)
    for name in ("nets.py", "pretrained", "before.json"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    tables: dict[str, Any] = {"quantize": {"calibration": "train:8"}, "benchmark": {"compare": "before.json"}}
    given = from_table({"model": "nets.py:build", "data": "imagefolder:photos:64", "weights": "runs/a", **tables})
    kept = from_anywhere(given)
    monkeypatch.chdir("/")
    assert kept.model == f"{tmp_path}/nets.py:build"
    assert kept.data == f"imagefolder:{tmp_path}/photos:64"
    assert (kept.weights, kept.benchmark.compare) == (f"{tmp_path}/runs/a", f"{tmp_path}/before.json")
    assert kept.quantize == given.quantize
    assert from_anywhere(kept) == kept
    monkeypatch.chdir(tmp_path)
    assert from_anywhere(Recipe(weights="pretrained")) == Recipe(weights="pretrained")


@pytest.mark.parametrize(
    ("features", "precision"),
    [(["avx2"], "32-true"), (["avx2", "avx512f"], "bf16-mixed"), (["avx2", "avx_vnni"], "32-true"), ([], "bf16-mixed")],
)
def test_auto_is_what_this_machine_is_quick_at(
    features: list[str], precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "cpu_info", lambda: {"features": features})
    monkeypatch.setattr(machine.Path, "exists", lambda path: False)  # of a GPU's driver
    found = make(Recipe, {"train": {"precision": "auto"}})
    assert found.train.precision == precision
    assert TrainConfig(precision="auto") == found.train
    assert f'precision = "{precision}"\n' in to_toml(found), "what is kept says what was done"
    monkeypatch.setattr(machine.Path, "exists", lambda path: True)
    assert TrainConfig(precision="auto").precision == "bf16-mixed"
    assert TrainConfig().precision == "32-true"
    assert QuantizeConfig().weight_bits == 8
    with pytest.raises(UsageError, match=r"bf16-true, auto; got 'autoo'; did you mean 'auto'\?"):
        TrainConfig(precision="autoo")


def test_a_mode_that_is_named_alone_is_the_variant(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text('model = "resnet"\ndata = "fashion-mnist"\n[quantize]\nmode = "qat"\n')
    recipe = load_recipe(path)
    assert recipe.variants == ("qat",)
    assert load_recipe(path, ["quantize.mode=ptq"]).variants == ("ptq",)
    assert from_table(BUILT_IN).variants == Recipe().variants == ("ptq", "qat")
    with pytest.raises(UsageError, match=r"quantize\.mode"):
        load_recipe(path, ["quantize.mode=pqt"])
    with pytest.raises(
        UsageError, match=r"quantize\.mode': expected one of the variants, ptq; got 'qat'; name it among"
    ):
        load_recipe(path, ['variants=["ptq"]'])
    path.write_text(to_toml(Recipe(variants=("qat",))))
    assert load_recipe(path).variants == ("qat",)


@pytest.mark.parametrize(
    ("text", "told"), [("", "a 'model'"), ("model = 'resnet'", "a 'data'"), ("[train]", "a 'model'")]
)
def test_a_recipe_says_what_it_is_of(text: str, told: str, tmp_path: Path) -> None:
    """A file that is empty by mistake would train what nobody asked for."""
    path = tmp_path / "a.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=rf"recipe '.*a\.toml': expected {told}; got none; name it, as in "):
        load_recipe(path)
    assert load_recipe(path, ["model=mobilenet", "data=alice"]).data == "alice"


@pytest.mark.parametrize("content", [b"model = ", b"\xff\xfe", b"[train]\n[train]\n"])
def test_a_file_that_is_no_toml_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"bad\.toml.*a TOML file"):
        load_recipe(path)


def test_a_missing_recipe_gets_the_nearest_name(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("")
    with pytest.raises(UsageError, match=r"did you mean 'mine\.toml'\?"):
        find_recipe(str(tmp_path / "mien.toml"))
    with pytest.raises(UsageError, match="did you mean 'fashion-mnist'"):
        find_recipe("fashionmnist")
    with pytest.raises(UsageError, match="readable"):
        load_recipe(tmp_path)


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_in_the_package_is_valid(name: str) -> None:
    assert isinstance(load_recipe(find_recipe(name)), Recipe)


def test_the_help_of_each_function_lists_its_options() -> None:
    for function, kinds in (
        (qtool.train, [TrainConfig]), (qtool.quantize, [QuantizeConfig, QatConfig]), (qtool.export, [ExportConfig]),
        (qtool.benchmark, [BenchmarkConfig]), (qtool.predict_memory, [TrainConfig]),
        (qtool.sensitivity, [QuantizeConfig]),
    ):  # fmt: skip
        text = pydoc.plain(pydoc.render_doc(function))
        for kind in kinds:
            for name in kind.__annotations__:
                assert re.search(rf"^ {{8}}{name}=.*: ", text, re.MULTILINE), (function.__name__, name)


@pytest.mark.parametrize(
    ("kind", "values", "told"),
    [
        (QuantizeConfig, {"mode": "nope"}, "'mode': expected one of ptq, qat; got 'nope'"),
        (QuantizeConfig, {"weight_bits": "x"}, "'weight_bits': expected a whole number; got 'x'"),
        (TrainConfig, {"epochs": "2"}, "'epochs': expected a whole number; got '2'"),
        (QatConfig, {"optimizer": "nope"}, "'optimizer': expected one of adamw"),
        (Recipe, {"variants": "ptq"}, "'variants': expected a list"),
        (BenchmarkConfig, {"device": "cuda"}, "'device': expected auto or cpu beside provider 'cpu'.*; got 'cuda'"),
        (BenchmarkConfig, {"device": "cuda:1", "provider": "cuda"}, "'device': expected auto or cuda beside"),
        (BenchmarkConfig, {"compare": ""}, "'compare': expected a text; got ''; name what is meant, or leave it out"),
        (BenchmarkConfig, {"tolerance": 0.1}, "'tolerance': expected 'compare' beside it; got nothing to compare with"),
        (Recipe, {"train": QuantizeConfig()}, "'train': expected a TrainConfig; got a QuantizeConfig"),
    ],
)
def test_a_config_is_checked_when_it_is_built(kind: Any, values: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=f"argument {told}"):
        kind(**values)
    with pytest.raises(UsageError, match=f"argument {told}"):
        dataclasses.replace(kind(), **values)


def test_a_device_goes_with_a_provider_that_runs_there() -> None:
    for provider, device in (("cpu", "cpu"), ("openvino", "auto"), ("tensorrt", "cuda"), ("torch", "cuda:1")):
        assert BenchmarkConfig(provider=provider, device=device).device == device


def test_a_config_given_whole_is_of_its_kind_or_a_mapping() -> None:
    other: Any = TrainConfig()
    with pytest.raises(UsageError, match="'config': expected a QuantizeConfig; got a TrainConfig"):
        configured(QuantizeConfig, other, {})
    with pytest.raises(UsageError, match="'weight_bit': expected a known name"):
        configured(QuantizeConfig, {"weight_bit": 8}, {})


def test_a_config_that_is_built_directly_takes_what_a_recipe_takes() -> None:
    none: Any = "none"
    assert Recipe(variants=none).variants is None
    given: dict[str, Any] = {"batch_size": "auto", "learning_rate": 1, "lora_targets": ["q", "v"]}
    assert TrainConfig(**given) == make(TrainConfig, given)
    assert configured(QuantizeConfig, {"ranges": "minmax"}, {}) == make(QuantizeConfig, {"ranges": "minmax"})


@pytest.mark.parametrize(
    ("kind", "given", "plain"),
    [
        (TrainConfig, {"epochs": np.int64(2), "seed": torch.tensor(3)}, {"epochs": 2, "seed": 3}),
        (TrainConfig, {"learning_rate": np.float64(1e-3)}, {"learning_rate": 1e-3}),
        (TrainConfig, {"device": torch.device("cpu")}, {"device": "cpu"}),
        (TrainConfig, {"memory_budget": 2**30}, {"memory_budget": "1073741824"}),
        (TrainConfig, {"memory_budget": np.float32(8e9)}, {"memory_budget": "8000000000"}),
        (QuantizeConfig, {"mode": Mode.PTQ, "weights_only": np.True_}, {"mode": "ptq", "weights_only": True}),
        (QuantizeConfig, {"ranges_from": Path("a") / "ranges.json"}, {"ranges_from": str(Path("a", "ranges.json"))}),
        (BenchmarkConfig, {"batch_sizes": np.array([1, 8])}, {"batch_sizes": (1, 8)}),
        (BenchmarkConfig, {"batch_sizes": range(1, 3), "compare": Path("a")}, {"batch_sizes": (1, 2), "compare": "a"}),
    ],
)
@pytest.mark.parametrize("build", [make, lambda kind, given: kind(**given)])
def test_what_scripts_have_for_plain_values_is_taken_as_them(
    kind: Any, given: dict[str, Any], plain: dict[str, Any], build: Any
) -> None:
    """Compared as JSON, as it is recorded: there numpy's numbers, paths and devices have no place."""
    assert json.dumps(as_dict(build(kind, given))) == json.dumps(as_dict(kind(**plain)))


def test_names_that_the_shell_completes_are_those_built_in() -> None:
    names = {field.name: set(field.metadata["names"]) for field in dataclasses.fields(Recipe) if field.metadata}
    assert names["model"] == models.BUILT_INS.keys()
    assert names["task"] == tasks.BUILT_INS.keys()
    assert names["data"] == {kind for kind in data.KINDS if kind.islower() and ":" not in kind}
