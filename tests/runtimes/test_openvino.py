from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import numpy as np
import onnx
import onnx_files
import pytest
from onnx import helper

from qtool.errors import QtoolError
from qtool.runtimes import ProviderError, open_session
from qtool.runtimes import openvino as runtime
from qtool.runtimes.base import arithmetic, is_compute
from qtool.system.machine import cpu_info

present = pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="openvino is not installed")
FEEDS = {"x": np.random.default_rng(3).normal(size=(2, 3, 8, 8)).astype(np.float32)}


def test_absent_it_says_how_to_install_it(files, monkeypatch):
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(ProviderError, match=r"pip install 'qtool\[openvino\]'"):
        open_session(files["fp32"], provider="openvino")


@present
def test_it_computes_what_onnx_runtime_does(files):
    ours, theirs = (open_session(files["fp32"], provider=p) for p in ("openvino", "cpu"))
    assert [str(i) for i in ours.inputs] == ["float32[?, 3, 8, 8]"]
    np.testing.assert_allclose(ours.run(FEEDS)[0], theirs.run(FEEDS)[0], rtol=1e-4, atol=1e-5)
    ours.prepare(FEEDS)()
    ours.close()


SIGNALLED = """
import signal, sys
from qtool.runtimes import open_session
signal.signal(signal.SIGTERM, lambda *_: print("heeded"))
sessions = [open_session(sys.argv[1], provider="openvino") for _ in range(2)]
for session in sessions:
    session.close()
signal.raise_signal(signal.SIGTERM)
"""


@present
def test_signals_are_heeded_after_its_sessions_are_closed(files):
    """On a CPU with AMX they ended the process where each session had a core of its own."""
    done = subprocess.run([sys.executable, "-c", SIGNALLED, str(files["fp32"])], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "heeded\n")


FORKED = """
import os, signal, sys
from qtool.runtimes import ProviderError, open_session
open_session(sys.argv[1], provider="openvino").close()
if os.fork():
    sys.exit(os.wait()[1])
signal.alarm(20)
try:
    open_session(sys.argv[1], provider="openvino")
except ProviderError as error:
    print(error, flush=True)
os._exit(0)
"""


@present
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
def test_a_fork_of_a_process_that_has_used_it_is_refused(files):
    """There a file that is opened after another one was closed waits for ever."""
    command = [sys.executable, "-c", FORKED, str(files["fp32"])]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.endswith("start it by multiprocessing's 'spawn' or 'forkserver'\n")


@present
def test_it_tells_the_arithmetic(files):
    assert set(arithmetic(open_session(files["fp32"], provider="openvino").kernels(FEEDS))) == {"float32"}
    assert set(arithmetic(open_session(files["int8"], provider="openvino").kernels(FEEDS))) == {"int8"}


@present
@pytest.mark.parametrize("vnni", [True, False])
@pytest.mark.parametrize(("width", "bits", "rounds"), [(64, 8, True), (64, 4, True), (16, 8, False)])
def test_what_unpacks_weights_is_told_by_what_it_computes_in(tmp_path, monkeypatch, width, bits, rounds, vnni):
    """By the results on a CPU with VNNI: 64 inputs come rounded to 8 bits, of 4-bit weights too, and 16 do not."""
    integers = np.random.default_rng(0).integers(-7, 8, (width, 8))
    weight = helper.make_tensor("w", getattr(onnx.TensorProto, f"INT{bits}"), integers.shape, integers.flatten())
    scale = onnx.numpy_helper.from_array(np.full(8, 0.02, np.float32), "s")
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "s"], ["d"], axis=1),
        helper.make_node("MatMul", ["x", "d"], ["y"]),
    ]
    ports = [helper.make_tensor_value_info(*port) for port in (("x", 1, [None, width]), ("y", 1, [None, 8]))]
    graph = helper.make_graph(nodes, "g", ports[:1], ports[1:], [weight, scale])
    path = tmp_path / "packed.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)]), path)
    session = open_session(path, provider="openvino")
    x = np.random.default_rng(1).standard_normal((4, width)).astype(np.float32)
    if vnni and set(runtime.VNNI) & set(cpu_info()["features"]):
        exact = x @ (integers * np.float32(0.02))
        assert (np.abs(session.run({"x": x})[0] - exact).max() > 1e-3) == rounds
    monkeypatch.setattr(runtime, "cpu_info", lambda: {"features": ["avx512_vnni"] if vnni else []})
    (layer,) = (kernel for kernel in session.kernels({"x": x}) if is_compute(kernel.op))
    assert (layer.dtype, layer.stored) == ("int8" if rounds and vnni else "float32", f"int{bits}")


@present
def test_weights_of_2_bits_are_no_arithmetic_in_them(tmp_path, monkeypatch):
    weights = {"w": np.full((32, 2, 8), 0b10011100, np.uint8), "s": np.ones(64, np.float32)}
    product = helper.make_node(
        "MatMulNBits", ["x", "w", "s"], ["y"], domain="com.microsoft", K=64, N=32, block_size=32, bits=2
    )
    path = tmp_path / "packed.onnx"
    onnx.save(
        onnx_files.model([product], {"x": ["N", 64]}, {"y": ["N", 32]}, weights, domains={"com.microsoft": 1}), path
    )
    monkeypatch.setattr(runtime, "cpu_info", lambda: {"features": []})
    kernels = open_session(path, provider="openvino").kernels({"x": np.ones((4, 64), np.float32)})
    assert [(kernel.dtype, kernel.stored) for kernel in kernels if is_compute(kernel.op)] == [("float32", "int2")]


@present
@pytest.mark.parametrize(
    ("file", "asked", "ability", "expected"),
    [
        ("fp32", None, None, "float32"),
        ("fp16", None, "FP16", "float16"),
        ("fp32", "bf16", "BF16", "bfloat16"),
        ("int8", "bf16", "BF16", "int8"),
    ],
)
def test_floats_are_computed_in_what_the_file_or_the_caller_says(files, file, asked, ability, expected):
    import openvino

    able = ability is None or ability in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    if asked and not able:
        with pytest.raises(ProviderError, match="a CPU that OpenVINO computes bf16 on"):
            open_session(files[file], provider="openvino", precision=asked)
        return
    session = open_session(files[file], provider="openvino", precision=asked)
    assert set(arithmetic(session.kernels(FEEDS))) == {expected if able else "float32"}
    assert session.stored == ("bfloat16" if asked else None)


@present
def test_a_precision_that_it_does_not_know_or_the_cpu_does_not_have_is_refused(files, monkeypatch):
    with pytest.raises(QtoolError, match="expected precision fp16 or bf16; got 'int4'"):
        open_session(files["fp32"], provider="openvino", precision="int4")
    monkeypatch.setattr(runtime, "_computes", lambda core, precision: False)
    with pytest.raises(ProviderError, match="one without such instructions; leave bf16 out"):
        open_session(files["fp32"], provider="openvino", precision="bf16")


@present
def test_it_times_what_is_executed_by_the_nodes_names(files):
    session = open_session(files["fp32"], provider="openvino")
    untimed, timed = session.kernels(FEEDS), session.kernels(FEEDS, 3)
    assert {kernel.seconds for kernel in untimed} == {None}
    assert [kernel.name for kernel in timed] == [kernel.name for kernel in untimed]
    products = [kernel for kernel in timed if is_compute(kernel.op)]
    assert products
    assert all(kernel.seconds > 0 for kernel in products)


@present
def test_a_corrupt_file_is_one_line(tmp_path):
    path = tmp_path / "bad.onnx"
    path.write_bytes(b"nonsense" * 9)
    with pytest.raises(QtoolError) as caught:
        open_session(path, provider="openvino")
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith("check that the file is complete and is ONNX")


@present
@pytest.mark.parametrize(
    ("node", "shapes", "told"),
    [
        (("Det", ["x"]), {"x": ["N", 4, 4]}, "No conversion rule found for operations: Det"),
        (("Add", ["x", "z"]), {"x": [2, 4], "z": [3, 4]}, r"'<Node\(Add\): y>': Argument shapes are inconsistent"),
        (("Reshape", ["x", "i"]), {"x": [2, 4], "i": [None]}, "doesn't support Reshape operation with dynamic rank"),
    ],
)
def test_what_it_refuses_is_told_by_its_operator_and_not_as_the_files_fault(tmp_path, node, shapes, told):
    kinds = {"i": onnx.TensorProto.INT64}
    ends = [
        onnx.helper.make_tensor_value_info(name, kinds.get(name, onnx.TensorProto.FLOAT), shape)
        for name, shape in {**shapes, "y": None}.items()
    ]
    graph = onnx.helper.make_graph([onnx.helper.make_node(*node, ["y"])], "g", ends[:-1], ends[-1:])
    opset = [onnx.helper.make_opsetid("", 17)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opset, ir_version=9), tmp_path / "refused.onnx")
    with pytest.raises(QtoolError, match=told) as caught:
        open_session(tmp_path / "refused.onnx", provider="openvino")
    assert "\n" not in str(caught.value)
    assert "file is complete" not in caught.value.do
    assert "--target ort-cpu" in caught.value.do


@present
def test_an_input_has_the_files_name_whatever_converts_it(tmp_path):
    cast = onnx.helper.make_node("Cast", ["image"], ["graph_input_cast_0"], to=onnx.TensorProto.FLOAT16)
    double = onnx.helper.make_node("Add", ["graph_input_cast_0", "graph_input_cast_0"], ["sum"])
    back = onnx.helper.make_node("Cast", ["sum"], ["output"], to=onnx.TensorProto.FLOAT)
    ends = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", 2]) for name in ("image", "output")]
    graph = onnx.helper.make_graph([cast, double, back], "g", ends[:1], ends[1:])
    opset = [onnx.helper.make_opsetid("", 21)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opset, ir_version=10), tmp_path / "half.onnx")
    session = open_session(tmp_path / "half.onnx", provider="openvino")
    assert [info.name for info in session.inputs] == ["image"]
    np.testing.assert_array_equal(session.run({"image": np.ones((1, 2), np.float32)})[0], [[2, 2]])


@present
def test_it_has_no_switch_for_optimisation(files):
    with pytest.raises(QtoolError, match="optimize"):
        open_session(files["fp32"], provider="openvino", optimize=False)
