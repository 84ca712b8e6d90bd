from __future__ import annotations

import json
import os

import numpy as np
import onnx
import onnx_files
import pytest
from onnx import helper

from qtool.benchmarking import stage
from qtool.benchmarking.process import Worker
from qtool.benchmarking.stage import benchmark
from qtool.errors import QtoolError, UsageError
from qtool.recipe import BenchmarkConfig
from qtool.runtimes import ProviderError
from qtool.system.json_files import write_json
from qtool.units import many

QUICK = BenchmarkConfig(seconds=0.0, batch_sizes=(4, 1))


@pytest.fixture(scope="module")
def result(files, batches):
    return benchmark(files, QUICK, batches=batches)


def test_every_variant_is_measured_in_every_way(result):
    assert not any("samples per second" in note for note in result["notes"])
    for entry in result["variants"].values():
        assert [timed["batch_size"] for timed in entry["latency"]] == [1, 4]
        assert entry["size_mib"] > 0
        assert entry["load_ms"] > 0
        assert entry["peak_memory_mib"] > 0
        assert entry["accuracy"]["num_samples"] == 40
        for timed in entry["latency"]:
            assert timed["num_rounds"] >= 6
            assert timed["first_run_ms"] > 0


def test_what_ran_is_told_and_half_precision_is_not_taken_for_granted(result):
    assert result["reference"] == "fp32"
    assert result["variants"]["int8"]["arithmetic"] == {"int8": 3}
    half = result["variants"]["fp16"]["arithmetic"]
    assert any("storage only" in note for note in result["notes"]) is ("float16" not in half)


def test_openvino_s_own_form_is_measured_beside_an_onnx_file(files, tmp_path):
    openvino = pytest.importorskip("openvino")
    openvino.save_model(openvino.Core().read_model(files["fp32"]), tmp_path / "own.xml", compress_to_fp16=False)
    config = BenchmarkConfig(seconds=0.0, provider="openvino", shapes={"x": "1x3x8x8"})
    told = benchmark({"onnx": files["fp32"], "own": tmp_path / "own.xml"}, config)["variants"]["own"]
    both = [tmp_path / "own.xml", tmp_path / "own.bin"]
    assert (told["num_files"], told["size_bytes"]) == (2, sum(path.stat().st_size for path in both))
    assert told["arithmetic"] == {"float32": 3}


def test_openvino_tells_what_it_would_compute_floats_in_and_measures_that_as_bf16(files, monkeypatch):
    openvino = pytest.importorskip("openvino")
    monkeypatch.setattr(stage.openvino, "own_precision", lambda: "bfloat16")
    able = "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    given = {"fp32": files["fp32"]} | ({"bf16": files["fp32"]} if able else {})
    config = BenchmarkConfig(seconds=0.0, provider="openvino", shapes={"x": "1x3x8x8"})
    found = benchmark(given, config, precisions={name: name for name in given if name == "bf16"})
    assert found["variants"]["fp32"]["arithmetic"] == {"float32": 3}
    assert not able or found["variants"]["bf16"]["arithmetic"] == {"bfloat16": 3}
    told = "fp32: computed in float32, as asked of OpenVINO; left to itself it takes bfloat16 on this CPU"
    assert found["notes"][0] == told, "beside files --variants is refused"
    assert stage._own_precision(found["variants"], "openvino", "openvino") == told + ", which --variants bf16 measures"
    monkeypatch.setattr(stage.openvino, "own_precision", lambda: "float32")
    assert stage._own_precision(found["variants"], "openvino", None) is None


def test_a_name_says_nothing_of_the_precision_that_a_file_is_computed_in(files):
    pytest.importorskip("openvino")
    config = BenchmarkConfig(seconds=0.0, provider="openvino", shapes={"x": "1x3x8x8"})
    found = benchmark({"fp32": files["int8"], "bf16": files["fp32"]}, config)
    assert found["variants"]["bf16"]["arithmetic"] == {"float32": 3}


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no affinity on this system")
def test_more_threads_than_cores_are_told(monkeypatch):
    cores = len(os.sched_getaffinity(0))
    monkeypatch.setattr(stage, "usable_cores", lambda: cores)
    there = many(cores, "hardware thread")
    told = stage._crowded(BenchmarkConfig(threads=4096))
    assert told == f"4,096 threads with no whole core each, of {there} here: they wait for one another"
    assert stage._crowded(BenchmarkConfig()) is None
    assert stage._crowded(BenchmarkConfig(threads=4096, provider="torch")) is None
    monkeypatch.setattr(stage, "usable_cores", lambda: cores - 1)
    allowed = many(cores - 1, "core")
    assert stage._crowded(BenchmarkConfig(threads=cores)) == (
        f"{many(cores, 'thread')}, and the time of {allowed} in this control group"
    )


def test_beside_a_gpu_the_memory_that_was_measured_is_told_as_the_host_s():
    assert "the host's" in stage._host_memory({"fp32": {"device": "cuda:1"}})
    assert stage._host_memory({"fp32": {"device": "cpu"}, "other": {}}) is None


def test_of_a_file_without_a_batch_no_samples_per_second_are_told(tmp_path):
    path = tmp_path / "image.onnx"
    nodes = [helper.make_node("ReduceMean", ["x"], ["y"], axes=[0, 1], keepdims=0)]
    onnx.save(onnx_files.model(nodes, inputs={"x": [3, 8, 8]}, outputs={"y": [8]}), path)
    found = benchmark({"image": path}, BenchmarkConfig(seconds=0.0, batch_sizes=(3,)))
    assert found["variants"]["image"]["latency"][0]["throughput_per_s"] is None
    assert "samples per second are not told at batch size 3: no output has a part for each" in found["notes"][0]


def test_all_files_are_timed_on_one_batch_of_a_loader_that_shuffles(files, batches, monkeypatch):
    fed, feed = [], Worker.feed
    monkeypatch.setattr(Worker, "feed", lambda self, feeds: (fed.append(feeds), feed(self, feeds))[1])
    draw = np.random.default_rng(0)

    def shuffled(size):
        for x, y in batches(size):
            rows = draw.permutation(len(x))
            yield x[rows], y[rows]

    benchmark(files, BenchmarkConfig(seconds=0.0, batch_sizes=(32,)), batches=shuffled)
    assert len(fed) == 3
    assert all(np.array_equal(feeds["x"], fed[0]["x"]) for feeds in fed)


def test_sizes_are_ratios_to_the_reference(result):
    sizes = {name: entry["size_ratio"] for name, entry in result["variants"].items()}
    assert sizes["fp32"] == 1.0
    assert sizes["int8"] < sizes["fp16"] < 1.0


def test_the_result_is_plain_values(result, tmp_path):
    write_json(tmp_path / "benchmark.json", result)
    read = json.loads((tmp_path / "benchmark.json").read_text())
    assert read["variants"]["int8"]["latency"] == result["variants"]["int8"]["latency"]


def test_of_several_outputs_the_first_is_judged_and_that_is_said(files, batches, result, tmp_path):
    model = onnx.load(files["fp32"])
    inner = helper.make_tensor_value_info(model.graph.node[0].output[0], onnx.TensorProto.FLOAT, None)
    model.graph.output.append(inner)
    onnx.save(model, tmp_path / "two.onnx")
    told = benchmark({"two": tmp_path / "two.onnx"}, BenchmarkConfig(seconds=0.0), batches=batches)
    assert told["notes"] == ["top-1, agreement, KL and SQNR are those of the first of 2 outputs"]
    assert not any("outputs" in note for note in result["notes"])

    def measured(size):
        return ((images, labels.astype("float32")) for images, labels in batches(size))

    told = benchmark({"two": tmp_path / "two.onnx"}, BenchmarkConfig(seconds=0.0), batches=measured)
    assert told["notes"][0] == "SQNR is that of the first of 2 outputs"


def test_outputs_that_are_text_are_timed_and_not_compared(tmp_path):
    texts = helper.make_tensor_value_info("t", onnx.TensorProto.STRING, ["N", 4])
    model = onnx_files.model([helper.make_node("Cast", ["x"], ["t"], to=8)], {"x": ["N", 4]}, {})
    model.graph.output.append(texts)
    onnx.save(model, tmp_path / "text.onnx")
    model.graph.node.append(helper.make_node("Relu", ["x"], ["y"]))
    model.graph.output.append(helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["N", 4]))
    onnx.save(model, tmp_path / "both.onnx")
    data = [(np.ones((2, 4), np.float32), None)]
    found = benchmark({"both": tmp_path / "both.onnx"}, BenchmarkConfig(seconds=0.0), batches=lambda _: data)
    assert found["notes"] == ["no tensors of numbers, and so computed and timed, not compared: 't' (tensor(string))"]
    assert found["variants"]["both"]["accuracy"]["num_samples"] == 2
    with pytest.raises(QtoolError, match=r"of 'text': expected a tensor of numbers, .* leave the data out"):
        benchmark({"text": tmp_path / "text.onnx"}, BenchmarkConfig(seconds=0.0), batches=lambda _: data)


def test_a_file_that_random_values_do_not_suit_is_measured_on_values_that_do(tmp_path):
    model = onnx_files.model([helper.make_node("Expand", ["x", "shape"], ["y"])], {"x": [1, 3]}, {"y": [None, 3]})
    model.graph.input.append(helper.make_tensor_value_info("shape", onnx.TensorProto.INT64, [2]))
    onnx.save(model, tmp_path / "expand.onnx")
    files, quick = {"expand": tmp_path / "expand.onnx"}, BenchmarkConfig(seconds=0.0)
    with pytest.raises(QtoolError, match=r"Expand node.*; values were random: .* data=\[\{NAME: array, …\}\]\)"):
        benchmark(files, quick)
    values = {"x": np.ones((1, 3), np.float32), "shape": np.array([5, 3])}
    found = benchmark(files, quick, batches=lambda _: [(values, None)])
    assert found["variants"]["expand"]["latency"]


def test_without_data_inputs_are_random_and_that_is_said(files):
    told = benchmark({"only": files["fp32"]}, BenchmarkConfig(seconds=0.0))
    assert told["reference"] == "only"
    assert "accuracy" not in told["variants"]["only"]
    assert any("random" in note for note in told["notes"])


def test_a_small_test_set_fills_a_large_batch(files, batches):
    config = BenchmarkConfig(seconds=0.0, batch_sizes=(64,), samples=8)
    told = benchmark({"fp32": files["fp32"]}, config, batches=batches)
    assert told["variants"]["fp32"]["latency"][0]["batch_size"] == 64
    assert told["variants"]["fp32"]["accuracy"]["num_samples"] == 8


def test_a_half_that_overflows_is_told_and_the_others_are_judged(files, batches, monkeypatch):
    judged = stage.predict

    def overflowing(*arguments, **more):
        outputs, targets = judged(*arguments, **more)
        outputs[name][0] = float("inf")
        return outputs, targets

    monkeypatch.setattr(stage, "predict", overflowing)
    name = "fp16"
    found = benchmark(files, QUICK, batches=batches)
    assert ["accuracy" in entry for entry in found["variants"].values()] == [True, False, True]
    assert "fp16: outputs overflow 16 bits to NaN or infinity, and were not judged" in found["notes"]
    name = "int8"
    with pytest.raises(QtoolError, match="'int8': expected finite outputs"):
        benchmark(files, QUICK, batches=batches)


def test_a_half_that_is_far_from_the_reference_is_told(files, batches, monkeypatch):
    judged = stage.predict

    def wrong(*arguments, **more):
        outputs, targets = judged(*arguments, **more)
        return outputs | {name: -outputs[name] for name in ("fp16", "int8")}, targets

    monkeypatch.setattr(stage, "predict", wrong)
    told = [note for note in benchmark(files, QUICK, batches=batches)["notes"] if "far from" in note]
    assert len(told) == 1
    assert told[0].startswith("fp16: its outputs are far from those of fp32 (-6.0 dB,")


def test_an_input_may_be_called_like_an_argument_and_a_state_is_no_batch(tmp_path):
    shapes = {"h": (2, "N", 8), "file": ("N", 8)}
    nodes = [
        helper.make_node("ReduceSum", ["h"], ["s"], keepdims=0),
        helper.make_node("Add", ["s", "file"], ["y"]),
    ]
    infos = [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, shape) for n, shape in shapes.items()]
    graph = helper.make_graph(nodes, "g", infos, [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ("N", 8))])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path = tmp_path / "state.onnx"
    onnx.save(model, path)
    data = [({"h": np.ones((2, 16, 8), np.float32), "file": np.ones((16, 8), np.float32)}, None)]
    found = benchmark({"state": path}, BenchmarkConfig(seconds=0.0, batch_sizes=(2,)), batches=lambda _: data)
    assert found["variants"]["state"]["accuracy"]["num_samples"] == 16
    benchmark({"state": path}, BenchmarkConfig(seconds=0.0, batch_sizes=(3,)))


def test_progress_is_told(files):
    said = []
    benchmark({"fp32": files["fp32"]}, BenchmarkConfig(seconds=0.0), progress=said.append)
    assert said == ["size of fp32", "loading fp32", "timing at batch size 1"]


def test_a_foreign_file_with_open_sizes_is_measured_once_they_are_given(tmp_path):
    nodes = [helper.make_node("MatMul", ["t", "w"], ["y"])]
    weights = {"w": np.ones((8, 2), np.float32)}
    path = tmp_path / "open.onnx"
    onnx.save(onnx_files.model(nodes, {"t": [None, "length", 8]}, {"y": [None, None, 2]}, weights), path)
    with pytest.raises(QtoolError, match="sizes known"):
        benchmark({"open": path}, BenchmarkConfig(seconds=0.0))
    told = benchmark({"open": path}, BenchmarkConfig(seconds=0.0, shapes={"t": "1x5x8"}))
    assert told["variants"]["open"]["arithmetic"] == {"float32": 1}


def test_shapes_beside_data_are_refused_since_the_samples_have_theirs(files, batches):
    with pytest.raises(UsageError, match="expected none beside data, whose samples have theirs; got x; leave them out"):
        benchmark(files, BenchmarkConfig(shapes={"x": "1x3x16x16"}), batches=batches)


def test_a_fixed_batch_is_not_timed_at_another(tmp_path):
    path = onnx_files.save_float(tmp_path / "fixed.onnx", batch=8)
    with pytest.raises(UsageError, match="--batch-sizes 8"):
        benchmark({"fixed": path}, BenchmarkConfig(seconds=0.0, batch_sizes=(1,)))


def test_a_fixed_batch_is_timed_as_it_is_unless_another_is_asked_for(tmp_path):
    paths = {"free": onnx_files.save_float(tmp_path / "free.onnx")}
    paths["fixed"] = onnx_files.save_float(tmp_path / "fixed.onnx", batch=8)
    found = benchmark(paths, BenchmarkConfig(seconds=0.0))["variants"]
    assert [[timed["batch_size"] for timed in found[name]["latency"]] for name in paths] == [[8], [8]]


@pytest.mark.parametrize(
    ("files_given", "reference", "words"),
    [({}, None, "at least one file"), ({"a": 1}, "b", "name one of the variants")],
)
def test_nothing_to_measure_is_a_usage_error(files, files_given, reference, words):
    given = dict.fromkeys(files_given, files["fp32"])
    with pytest.raises(UsageError, match=words):
        benchmark(given, QUICK, reference=reference)


def test_empty_data_is_an_error(files):
    with pytest.raises(QtoolError, match="at least one batch"):
        benchmark(files, QUICK, batches=lambda size: iter(()))


def test_an_absent_provider_is_an_error_and_not_the_cpu(files, monkeypatch):
    with pytest.raises(ProviderError, match="tensorrt"):
        benchmark({"fp32": files["fp32"]}, BenchmarkConfig(provider="tensorrt", seconds=0.0))


def test_a_result_can_be_compared_with_an_earlier_one(files, result, tmp_path):
    earlier = tmp_path / "old.json"
    write_json(earlier, {"metrics": result})
    config = BenchmarkConfig(seconds=0.0, compare=str(earlier), tolerance=0.9)
    told = benchmark({"fp32": files["fp32"]}, config)["comparison"]
    assert told["with"] == str(earlier)
    assert "int8 was measured then and not now" in told["notes"]


def test_what_to_compare_with_is_read_before_anything_is_measured(files, tmp_path):
    said = []
    config = BenchmarkConfig(seconds=0.0, compare=str(tmp_path / "absent.json"))
    with pytest.raises(QtoolError, match=r"benchmark\.json"):
        benchmark({"fp32": files["fp32"]}, config, progress=said.append)
    there = {"variants": {}, "reference": "fp32", "model": "other", "cpu": {"name": "A"}, "noise": {"noisy": False}}
    write_json(tmp_path / "absent.json", there)
    with pytest.raises(QtoolError, match="the model 'this'; got those of 'other'"):
        benchmark({"fp32": files["fp32"]}, config, subject={"model": "this"}, progress=said.append)
    with pytest.raises(QtoolError, match="expected a variant of fp32; got none; compare like"):
        benchmark({"fp32": files["fp32"]}, config, progress=said.append)
    assert said == []
