"""Any ONNX file can be looked into, and measured by its name; what is no such file is said in one line."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import onnx_files
import pytest
import torch
from click.testing import CliRunner
from onnx import TensorProto, helper
from safetensors.torch import save_file

import qtool
from qtool.cli import main
from qtool.errors import QtoolError, UsageError
from qtool.inspection import describe


def written(folder: Path, node: onnx.NodeProto, *inputs: onnx.ValueInfoProto) -> Path:
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("my.ops", 1)]
    graph = helper.make_graph([node], "g", list(inputs), [output])
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    onnx.save(model, folder / "m.onnx")
    return folder / "m.onnx"


def test_shapes_that_are_not_known_and_operators_of_others_are_told(tmp_path: Path) -> None:
    node = helper.make_node("Foo", ["x", "s", "z"], ["y"], domain="my.ops")
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, None, -1])
    s = helper.make_tensor_sequence_value_info("s", TensorProto.FLOAT, None)
    z = helper.make_tensor_value_info("z", TensorProto.FLOAT, None)
    found = describe(written(tmp_path, node, x, s, z))
    assert found["inputs"] == {"x": ["n", 3, None, None], "s": "sequence", "z": "unknown shape"}
    assert found["custom_operators"] == ["my.ops:Foo"]


def test_branches_and_functions_of_the_file_are_looked_into(tmp_path: Path) -> None:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n"])
    call = helper.make_node("Twice", ["x"], ["y"], domain="here")
    model = onnx.load(written(tmp_path, call, x))
    y = helper.make_tensor_value_info("t", TensorProto.FLOAT, None)
    branch = helper.make_graph([helper.make_node("Foo", ["a"], ["t"], domain="my.ops")], "branch", [], [y])
    choose = helper.make_node("If", ["c"], ["b"], then_branch=branch, else_branch=branch)
    body = [helper.make_node("IsNaN", ["a"], ["c"]), choose]
    model.functions.append(helper.make_function("here", "Twice", ["a"], ["b"], body, model.opset_import))
    onnx.save(model, tmp_path / "m.onnx")
    found = describe(tmp_path / "m.onnx")
    assert found["custom_operators"] == ["my.ops:Foo"]  # "Twice" is the file's own
    assert found["operators"] == {"Foo": 2, "Twice": 1, "IsNaN": 1, "If": 1}


def test_inputs_are_those_that_have_to_be_given(tmp_path: Path) -> None:
    model = onnx_files.residual_net()
    model.graph.input.extend(
        helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in model.graph.initializer
    )
    onnx.save(model, tmp_path / "old.onnx")
    assert list(describe(tmp_path / "old.onnx")["inputs"]) == ["x"]


@pytest.mark.parametrize("name", [b"the_input", b"the_size", b"Softplus"])
def test_names_that_are_no_text_are_told(name: bytes, tmp_path: Path) -> None:
    node = helper.make_node("Softplus", ["the_input"], ["y"])
    path = written(tmp_path, node, helper.make_tensor_value_info("the_input", TensorProto.FLOAT, ["the_size"]))
    broken = name[:-1] + b"\xff"
    path.write_bytes(path.read_bytes().replace(name, broken))
    with pytest.raises(QtoolError, match=r"expected names in UTF-8; got b'.*\\xff'; make or download it again"):
        describe(path)


def test_a_graph_that_computes_nothing_is_one(tmp_path: Path) -> None:
    onnx.save(onnx_files.model([], {"x": [1, 2]}, {"x": [1, 2]}), tmp_path / "m.onnx")
    assert describe(tmp_path / "m.onnx")["operators"] == {}


def test_external_data_count_for_the_size_and_have_to_be_there(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(onnx_files.residual_net(), path, save_as_external_data=True, location="m.data", size_threshold=0)
    found = describe(path)
    assert found["size_mib"] * 2**20 == path.stat().st_size + (tmp_path / "m.data").stat().st_size
    (tmp_path / "m.data").unlink()
    with pytest.raises(QtoolError, match=r"expected its external data 'm\.data'; got no such file"):
        describe(path)


@pytest.mark.parametrize("content", [b"", b"\x99" * 50], ids=["empty", "garbage"])
def test_what_is_no_model_is_an_error(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(content)
    with pytest.raises(QtoolError, match=r"m\.onnx'.*make or download it again"):
        describe(tmp_path / "m.onnx")


def test_foreign_files_are_measured_side_by_side(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 1)):
        onnx.save(onnx_files.residual_net(seed=seed), tmp_path / f"{name}.onnx")
    words = ["benchmark", *(str(tmp_path / f"{name}.onnx") for name in "ab"), "--seconds", "0", "--json", "--quiet"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0
    assert set(json.loads(result.stdout)["metrics"]["variants"]) == {"a", "b"}


def test_weights_without_an_order_or_of_a_format_that_torch_only_stores_have_no_range(tmp_path: Path) -> None:
    bytes_of_two = torch.zeros(2, 3, dtype=torch.uint8)
    weights = {
        "complex": torch.tensor([1 + 2j, -3j]), "fp4": bytes_of_two.view(torch.float4_e2m1fn_x2),
        "fp8": torch.tensor([-2.0, 448.0]).to(torch.float8_e4m3fn), "none": torch.empty(0, 3),
    }  # fmt: skip
    save_file(weights, tmp_path / "w.safetensors")
    found = describe(tmp_path / "w.safetensors")["tensors"]
    assert {name: (entry.get("min"), entry.get("max")) for name, entry in found.items()} == {
        "complex": (None, None), "fp4": (None, None), "fp8": (-2.0, 448.0), "none": (None, None),
    }  # fmt: skip
    assert found["fp4"]["dtype"] == "float4_e2m1fn_x2"


def test_a_link_to_nothing_is_not_what_was_meant(tmp_path: Path) -> None:
    (tmp_path / "a.json").symlink_to("gone.json")
    with pytest.raises(UsageError, match="check the path"):
        describe(tmp_path / "a.json")


@pytest.mark.parametrize(("shape", "given"), [(None, ["--shapes", "x=1x4"]), ([], [])], ids=["unknown", "scalar"])
def test_inputs_without_sizes_are_scalars_or_take_the_shape_that_is_given(
    shape: list[int] | None, given: list[str], tmp_path: Path
) -> None:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
    path = written(tmp_path, helper.make_node("Softmax" if given else "Relu", ["x"], ["y"]), x)
    result = CliRunner().invoke(main, ["benchmark", str(path), "--seconds", "0", "--json", "--quiet", *given])
    assert result.exit_code == 0, result.output
    refused = CliRunner().invoke(main, ["benchmark", str(path), "--seconds", "0", "--quiet"])
    assert given == [] or "got float32 of unknown shape; give it as x=1x" in refused.output


def test_files_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        onnx.save(onnx_files.residual_net(), tmp_path / name / "model.int8.onnx")
    words = ["benchmark", *(str(tmp_path / name / "model.int8.onnx") for name in ("one", "two"))]
    result = CliRunner().invoke(main, [*words, "--seconds", "0", "--json", "--quiet"])
    assert set(json.loads(result.stdout)["metrics"]["variants"]) == {"one/model.int8", "two/model.int8"}


@pytest.mark.parametrize("damaged", [b"", b'{"0": {"low"', b"\xfe{}", b"[]", b'{"0": 3}'])
def test_ranges_that_cannot_be_read_are_noted(damaged: bytes, small_net: str, small_data: str, tmp_path: Path) -> None:
    qtool.quantize(small_net, small_data, out=tmp_path, effort="fast")
    (tmp_path / "ranges.json").write_bytes(damaged)
    found = qtool.inspect(tmp_path)
    assert found["units"][0]["low"] is None
    assert any("ranges.json' cannot be read" in note for note in found["notes"])
