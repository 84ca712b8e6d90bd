"""Any ONNX file can be looked into, and measured by its name; what is no such file is said in one line."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import onnx_files
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper

from qtool.cli import main
from qtool.errors import QtoolError
from qtool.inspection import describe


def written(folder: Path, node: onnx.NodeProto, *inputs: onnx.ValueInfoProto) -> Path:
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("my.ops", 1)]
    model = helper.make_model(helper.make_graph([node], "g", list(inputs), [output]), opset_imports=opsets)
    onnx.save(model, folder / "m.onnx")
    return folder / "m.onnx"


def test_shapes_that_are_not_known_and_operators_of_others_are_told(tmp_path: Path) -> None:
    node = helper.make_node("Foo", ["x", "s", "z"], ["y"], domain="my.ops")
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, None])
    s = helper.make_tensor_sequence_value_info("s", TensorProto.FLOAT, None)
    z = helper.make_tensor_value_info("z", TensorProto.FLOAT, None)
    found = describe(written(tmp_path, node, x, s, z))
    assert found["inputs"] == {"x": ["n", 3, None], "s": "sequence", "z": "unknown shape"}
    assert found["custom_operators"] == ["my.ops:Foo"]


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


def test_files_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        onnx.save(onnx_files.residual_net(), tmp_path / name / "model.int8.onnx")
    words = ["benchmark", *(str(tmp_path / name / "model.int8.onnx") for name in ("one", "two"))]
    result = CliRunner().invoke(main, [*words, "--seconds", "0", "--json", "--quiet"])
    assert set(json.loads(result.stdout)["metrics"]["variants"]) == {"one/model.int8", "two/model.int8"}
