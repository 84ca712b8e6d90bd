"""A file's metadata without its graph: equal to what onnx reads, in little memory, and nothing of what is no file."""

from __future__ import annotations

import random
import tracemalloc
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from qtool.runtimes.onnx_notes import EXACT_SUMS, SESSION, asks_for_exact_sums, metadata

WEIGHTS = 1 << 22
TOLD = {"": "empty", "qtool.labels": '["ä", "b"]', "long": "x" * 70_000, "none": ""}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    weight = numpy_helper.from_array(np.zeros(WEIGHTS, np.int8), "w")
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, [WEIGHTS])
    nodes = [helper.make_node("Cast", ["w"], ["y"], to=TensorProto.FLOAT)]
    graph = helper.make_graph(nodes, "g", [], [output], [weight])
    model = helper.make_model(graph, producer_name="somebody", doc_string="about")
    helper.set_model_props(model, TOLD)
    file = tmp_path_factory.mktemp("told") / "a.onnx"
    onnx.save(model, file)
    return file


def test_it_is_what_onnx_reads_and_the_weights_are_not(path: Path) -> None:
    tracemalloc.start()
    found = metadata(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == TOLD == {entry.key: entry.value for entry in onnx.load(path).metadata_props}
    assert peak < WEIGHTS / 4


def test_of_what_is_no_such_file_nothing_is_told(path: Path, tmp_path: Path) -> None:
    draw = random.Random(0)
    broken = [b"", b"no model", path.read_bytes()[:1000], *(draw.randbytes(200) for _ in range(300))]
    for content in broken:
        (tmp_path / "b.onnx").write_bytes(content)
        assert set(metadata(tmp_path / "b.onnx")) <= {""}


@pytest.mark.parametrize(
    ("told", "asks"),
    [
        (f'{{"{EXACT_SUMS}": "1"}}', True),
        (f'{{"{EXACT_SUMS}": "0"}}', False),
        ("{", False),
        ("", False),
        ("[1]", False),
    ],
)
def test_what_is_no_wish_is_none(told: str, asks: bool, path: Path, tmp_path: Path) -> None:
    model = onnx.load(path)
    helper.set_model_props(model, {SESSION: told})
    onnx.save(model, tmp_path / "c.onnx")
    assert asks_for_exact_sums(tmp_path / "c.onnx") is asks
