from __future__ import annotations

import zlib

import numpy as np
import onnx
import onnx_files
import pytest
from onnx import helper

from qtool.benchmarking.size import load_onnx, measure_size, model_files, stripped_bytes
from qtool.errors import QtoolError, UsageError
from qtool.units import MIB


def test_a_plain_file_is_as_large_as_the_disk_says(files):
    told = measure_size(files["fp32"])
    size = files["fp32"].stat().st_size
    assert (told["size_bytes"], told["num_files"]) == (size, 1)
    assert told["size_mib"] == size / MIB
    assert told["size_compressed_mib"] == pytest.approx(
        len(zlib.compress(files["fp32"].read_bytes(), 6)) / MIB, rel=0.01
    )


def test_what_an_exporter_leaves_behind_is_not_counted_as_the_model(tmp_path):
    plain = onnx_files.residual_net()
    bare = tmp_path / "bare.onnx"
    onnx.save(plain, bare)
    for node in plain.graph.node:
        node.doc_string = "in forward, line 7\n" * 50
        node.metadata_props.add(key="pkg.torch.onnx.stack_trace", value="a very long trace " * 100)
    plain.graph.value_info.append(helper.make_tensor_value_info("a", 1, ["N", 16, 8, 8]))
    plain.metadata_props.add(key="labels", value="kept")
    told = tmp_path / "told.onnx"
    onnx.save(plain, told)
    kept = 2 + 2 + len("labels") + 2 + len("kept")
    assert stripped_bytes(told) == bare.stat().st_size + kept
    assert measure_size(told)["size_stripped_mib"] * MIB < told.stat().st_size / 2


def test_metadata_inside_a_subgraph_is_stripped_too(tmp_path):
    inner = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["z"])], "inner", [], [helper.make_tensor_value_info("z", 1, [2])]
    )
    nodes = [helper.make_node("If", ["c"], ["y"], then_branch=inner, else_branch=inner)]
    model = onnx_files.model(nodes, {"x": [2]}, {"y": [2]}, {"c": np.array(True)})
    path = tmp_path / "if.onnx"
    onnx.save(model, path)
    before = stripped_bytes(path)
    model.graph.node[0].attribute[0].g.node[0].doc_string = "noise" * 100
    onnx.save(model, path)
    assert stripped_bytes(path) == before


def test_external_data_counts(tmp_path):
    path = tmp_path / "model.onnx"
    onnx.save(onnx_files.residual_net(), path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    files = model_files(path)
    assert [file.name for file in files] == ["model.onnx", "weights.bin"]
    told = measure_size(path)
    assert told["size_bytes"] == sum(file.stat().st_size for file in files)
    assert told["size_stripped_mib"] * MIB > (tmp_path / "weights.bin").stat().st_size


def test_external_data_that_is_gone_is_named(tmp_path):
    path = tmp_path / "model.onnx"
    onnx.save(onnx_files.residual_net(), path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    (tmp_path / "weights.bin").unlink()
    with pytest.raises(QtoolError, match=r"weights\.bin"):
        measure_size(path)


@pytest.mark.parametrize(
    ("name", "got"), [("w" * 300, "no such file"), ("folder", "a folder"), ("a/b", "no such file")]
)
def test_external_data_of_any_name_is_looked_for(name, got, tmp_path):
    path = tmp_path / "model.onnx"
    (tmp_path / "folder").mkdir()
    onnx.save(onnx_files.residual_net(), path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    model = onnx.load(path, load_external_data=False)
    model.graph.initializer[0].external_data[0].value = name
    onnx.save(model, path)
    with pytest.raises(QtoolError, match=rf"its external data '{name}'; got {got}; "):
        measure_size(path)


def test_external_data_whose_name_is_no_text_is_not_there(tmp_path):
    path = tmp_path / "model.onnx"
    onnx.save(onnx_files.residual_net(), path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    path.write_bytes(path.read_bytes().replace(b"weights.bin", b"weights.b\xff\xfe"))
    with pytest.raises(QtoolError, match="got no such file"):
        measure_size(path)


@pytest.mark.parametrize("content", [b"", b"garbage garbage garbage"])
def test_what_is_no_onnx_is_refused_in_one_line(tmp_path, content):
    path = tmp_path / "bad.onnx"
    path.write_bytes(content)
    with pytest.raises(QtoolError) as caught:
        load_onnx(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["absent.onnx", "absent.pt2"])
def test_a_missing_file_is_refused(tmp_path, name):
    with pytest.raises(UsageError, match="no such file"):
        measure_size(tmp_path / name)


def test_other_files_have_a_size_too(tmp_path):
    path = tmp_path / "model.pt2"
    path.write_bytes(bytes(1000))
    told = measure_size(path)
    assert told["size_bytes"] == 1000
    assert told["size_stripped_mib"] == told["size_mib"] > told["size_compressed_mib"]
