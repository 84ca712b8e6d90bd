from __future__ import annotations

import json

import pytest

from qtool.errors import QtoolError
from qtool.runtimes.base import ProviderError
from qtool.runtimes.profile import check_placement, read_profile

CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"


def event(name, op, inputs, outputs, provider=CUDA):
    arguments = {"op_name": op, "provider": provider, "input_type_shape": inputs, "output_type_shape": outputs}
    return {"cat": "Node", "name": f"{name}_kernel_time", "args": arguments}


@pytest.fixture
def profile(tmp_path):
    def write(*events, **options):
        path = tmp_path / "profile.json"
        path.write_text(json.dumps([{"cat": "Session", "name": "model_run", "args": {}}, *events]))
        return read_profile(path, **options)

    return write


def test_a_kernel_has_the_format_of_its_activation(profile):
    image, weights = [1, 16, 8, 8], [16]
    kernels = profile(
        event("a", "QLinearConv", [{"uint8": image}, {"float": []}, {"uint8": []}], [{"uint8": image}]),
        event("b", "Conv", [{"float16": image}, {"float16": weights}], [{"float16": image}]),
        event("d", "DynamicQuantizeMatMul", [{"float": [1, 16]}, {"int8": [8]}], [{"float": [1, 16]}]),
    )
    assert [k.dtype for k in kernels] == ["int8", "float16", "int8"]
    assert [k.name for k in kernels] == ["a", "b", "d"]
    assert kernels[0].num_elements == 1024


def test_a_product_by_stored_integers_rounds_what_it_reads_on_the_cpu_unless_its_file_says_otherwise(profile):
    shapes = [{"float": [1, 16]}, {"uint8": [8]}], [{"float": [1, 16]}]
    events = [event(name, "MatMulNBits", *shapes, provider) for name, provider in (("a", CPU), ("b", CPU), ("c", CUDA))]
    kernels = profile(*events, in_float=lambda: {"b"}.__contains__)
    assert [kernel.dtype for kernel in kernels] == ["int8", "float32", "float32"]
    assert [kernel.dtype for kernel in profile(*events)] == ["int8", "int8", "float32"]


def test_a_product_by_stored_integers_computes_halves_as_the_cpu_can(profile, monkeypatch):
    shapes = [{"float16": [1, 16]}, {"uint8": [8]}], [{"float16": [1, 16]}]
    events = [event("a", "MatMulNBits", *shapes, CPU), event("b", "MatMulNBits", *shapes, CUDA)]
    for machine, dtype in (("x86_64", "float32"), ("aarch64", "float16")):
        monkeypatch.setattr("platform.machine", lambda name=machine: name)
        assert [kernel.dtype for kernel in profile(*events, in_float=lambda: lambda _: True)] == [dtype, "float16"]


def test_repeated_runs_give_each_kernel_its_median_time(tmp_path):
    path = tmp_path / "profile.json"
    image = [{"float": [1, 3, 8, 8]}]
    events = [event(name, "Relu", image, image) | {"dur": took} for took in (9, 1, 2) for name in ("a", "b")]
    events[1]["dur"] = 5
    path.write_text(json.dumps(events))
    assert [(k.name, k.seconds) for k in read_profile(path, runs=3)] == [("a", 2e-6), ("b", 2e-6)]


def test_events_that_are_not_kernels_are_left_out(profile):
    other = {"cat": "Node", "name": "a_fence_before", "args": {}}
    assert profile(other) == ()


def test_shape_nodes_beside_the_gpu_are_listed(profile):
    kernels = profile(
        event("conv", "Conv", [{"float": [1, 3, 8, 8]}], [{"float": [1, 16, 8, 8]}]),
        event("shape", "Shape", [{"float": [1, 16, 8, 8]}], [{"int64": [4]}], CPU),
        event("gather", "Gather", [{"int64": [4]}, {"int64": []}], [{"int64": []}], CPU),
        event("scale", "Div", [{"float": [4]}, {"float": [4]}], [{"float": [4]}], CPU),
    )
    assert check_placement("'m.onnx'", kernels, CUDA) == ["shape", "gather", "scale"]


@pytest.mark.parametrize(
    "node",
    [
        event("add", "Add", [{"float": [1, 64]}, {"float": [1, 64]}], [{"float": [1, 64]}], CPU),
        event("qconv", "QLinearConv", [{"uint8": [1, 3, 8, 8]}], [{"uint8": [1, 3, 8, 8]}], CPU),
        event("norm", "Relu", [{"float": [4096]}], [{"float": [4096]}], CPU),
        event("trt", "Conv", [{"float": [1, 3, 8, 8]}], [{"float": [1, 3, 8, 8]}], "TensorrtExecutionProvider"),
    ],
)
def test_a_compute_node_elsewhere_is_an_error_that_names_it(profile, node):
    with pytest.raises(
        ProviderError, match=rf"1 elsewhere: {node['name'].split('_')[0]} \({node['args']['op_name']} on "
    ):
        check_placement("'m.onnx'", profile(node), CUDA)


def test_many_nodes_elsewhere_are_counted(profile):
    nodes = [event(f"n{i}", "Relu", [{"float": [1, 64]}], [{"float": [1, 64]}], CPU) for i in range(5)]
    with pytest.raises(ProviderError, match=r"5 elsewhere: .* and 2 more"):
        check_placement("'m.onnx'", profile(*nodes), CUDA)


def test_a_broken_profile_is_told(tmp_path):
    (tmp_path / "p.json").write_text("[{")
    with pytest.raises(QtoolError, match="profile"):
        read_profile(tmp_path / "p.json")
