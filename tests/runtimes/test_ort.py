from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
import onnx_files
import onnxruntime
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from qtool.errors import QtoolError
from qtool.runtimes import ProviderError, open_session, ort
from qtool.runtimes.base import arithmetic
from qtool.system.machine import is_x86


@pytest.fixture
def feeds() -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(3).normal(size=(2, 3, 8, 8)).astype(np.float32)}


def test_a_session_tells_its_inputs_and_computes_what_onnx_defines(files, feeds):
    session = open_session(files["fp32"])
    assert [str(i) for i in session.inputs] == ["float32[N, 3, 8, 8]"]
    assert [i.name for i in session.outputs] == ["y"]
    expected = ReferenceEvaluator(onnx.load(files["fp32"])).run(None, feeds)
    np.testing.assert_allclose(session.run(feeds)[0], expected[0], rtol=1e-4, atol=1e-5)


def test_optimisation_can_be_switched_off(files, feeds):
    ops = [k.op for k in open_session(files["int8"], optimize=False).kernels(feeds)]
    assert "Conv" in ops
    assert "QLinearConv" not in ops
    fused = [k.op for k in open_session(files["int8"]).kernels(feeds)]
    assert fused.count("QLinearConv") == 2


def test_threads_are_the_threads_asked_for(files):
    session = open_session(files["fp32"], threads=2)
    assert session._session.get_session_options().intra_op_num_threads == 2


def test_kernels_tell_the_arithmetic_and_not_the_file(files, feeds):
    ran = {name: arithmetic(open_session(path).kernels(feeds)) for name, path in files.items()}
    assert ran["fp32"] == {"float32": 3}
    assert ran["int8"] == {"int8": 3}
    assert sum(ran["fp16"].values()) == 3


def test_profiling_leaves_nothing_behind(files, feeds, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    open_session(files["fp32"]).kernels(feeds)
    assert list(tmp_path.iterdir()) == []


def test_prepared_steps_compute(files, feeds):
    session = open_session(files["fp32"])
    step = session.prepare(feeds)
    assert step() is None
    session.close()
    with pytest.raises(AttributeError):
        session.run(feeds)


def test_the_optimised_graph_holds_the_fused_kernels(files):
    ops = [node.op_type for node in ort.optimized_graph(files["int8"]).graph.node]
    assert ops.count("QLinearConv") == 2
    assert "Relu" not in ops


def test_the_optimised_graph_can_come_without_external_weights(files, tmp_path, monkeypatch):
    monkeypatch.setattr(ort, "_bytes_on_disk", lambda path: 2 << 30)
    graph = ort.optimized_graph(files["fp32"], weights=False).graph
    assert graph.node
    whole = ort.optimized_graph(files["fp32"]).graph
    assert [n.op_type for n in whole.node] == [n.op_type for n in graph.node]


@pytest.mark.parametrize("content", [b"", b"not a model at all", b"\x08\x09\x12\x00"])
def test_what_is_no_onnx_is_refused_in_one_line(tmp_path: Path, content: bytes):
    path = tmp_path / "bad.onnx"
    path.write_bytes(content)
    with pytest.raises(QtoolError) as caught:
        open_session(path)
    assert caught.value.exit_code == 1
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_truncated_file_is_refused(files, tmp_path):
    path = tmp_path / "half.onnx"
    data = files["fp32"].read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(QtoolError, match="complete"):
        open_session(path)


@pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")
def test_a_full_folder_for_temporary_files_is_not_taken_for_a_bad_file(files):
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    try:
        with pytest.raises(QtoolError, match=r"free space in the folder for temporary files"):
            ort.optimized_graph(files["fp32"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_of_a_newer_onnx_is_told_in_words(tmp_path):
    model = onnx_files.residual_net()
    model.ir_version = 99
    onnx.save(model, tmp_path / "new.onnx")
    with pytest.raises(QtoolError, match=r"; got Unsupported model IR version: 99, .* lower ir_version"):
        open_session(tmp_path / "new.onnx")


def test_custom_operators_are_named(tmp_path):
    nodes = [helper.make_node("Foo", ["x"], ["y"], domain="my.ops")]
    path = tmp_path / "custom.onnx"
    onnx.save(onnx_files.model(nodes, {"x": [1]}, {"y": [1]}, domains={"my.ops": 1}), path)
    with pytest.raises(QtoolError, match=r"my\.ops:Foo.*standard ONNX operators"):
        open_session(path)


def test_missing_external_data_is_named(tmp_path):
    path = tmp_path / "model.onnx"
    onnx.save(onnx_files.residual_net(), path, save_as_external_data=True, location="model.data", size_threshold=0)
    (tmp_path / "model.data").unlink()
    with pytest.raises(QtoolError, match="external data file beside the model"):
        open_session(path)


def test_inputs_that_are_no_tensors_are_refused(tmp_path):
    sequence = helper.make_value_info("s", helper.make_sequence_type_proto(helper.make_tensor_type_proto(1, [1])))
    output = helper.make_tensor_value_info("n", TensorProto.INT64, [])
    graph = helper.make_graph([helper.make_node("SequenceLength", ["s"], ["n"])], "g", [sequence], [output])
    path = tmp_path / "sequence.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    with pytest.raises(QtoolError, match="tensors"):
        open_session(path)


def test_a_failure_while_running_is_one_line(tmp_path):
    nodes = [helper.make_node("Reshape", ["x", "s"], ["y"])]
    path = tmp_path / "reshape.onnx"
    onnx.save(onnx_files.model(nodes, {"x": ["N"]}, {"y": [None]}, {"s": np.array([7, 5], np.int64)}), path)
    session = open_session(path)
    feeds = {"x": np.zeros(3, np.float32)}
    for compute in (lambda: session.run(feeds), session.prepare(feeds)):  # the latter is what is timed
        with pytest.raises(QtoolError, match=r"inputs fit together: 'x' float32\[N\]") as caught:
            compute()
        assert "\n" not in str(caught.value)


def test_a_precision_is_not_taken_for_a_file_that_has_its_own(files):
    with pytest.raises(QtoolError, match="torch"):
        open_session(files["fp32"], precision="fp16")


# What happens without a GPU: onnxruntime-gpu falls back to the CPU in silence, and that has to be an error.


def test_a_provider_that_this_build_lacks_says_how_to_install_it(files, monkeypatch):
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    with pytest.raises(ProviderError, match="pip install") as caught:
        open_session(files["fp32"], provider="cuda")
    assert "CUDAExecutionProvider" in caught.value.expected


class Fallen:
    """A session that came out on the CPU although another provider was asked for."""

    def __init__(self, *arguments: object, **options: object) -> None: ...

    def disable_fallback(self) -> None: ...

    def get_providers(self) -> list[str]:
        return ["CPUExecutionProvider"]


@pytest.mark.parametrize("provider", ["cuda", "tensorrt"])
def test_a_silent_fall_back_to_the_cpu_is_refused(files, monkeypatch, provider):
    every = ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: every)
    monkeypatch.setattr(onnxruntime, "InferenceSession", Fallen)
    monkeypatch.setattr(ort, "missing_library", lambda path: "libcublas.so.13")
    for act in (
        lambda: open_session(files["fp32"], provider=provider),
        lambda: ort.optimized_graph(files["fp32"], provider=provider),
    ):
        with pytest.raises(ProviderError, match=r"libcublas.so.13 cannot be loaded.*fell back to CPU"):
            act()


@pytest.mark.skipif(
    "CUDAExecutionProvider" not in onnxruntime.get_available_providers(), reason="onnxruntime without CUDA"
)
def test_the_real_library_gives_cuda_or_an_error_and_prints_nothing(files, capfd):
    caught: list[Exception] = []
    try:
        providers = open_session(files["fp32"], provider="cuda")._session.get_providers()
    except ProviderError as error:
        caught.append(error)
        providers = ["CUDAExecutionProvider"] if "CUDAExecutionProvider" in error.expected else []
    assert providers[0] == "CUDAExecutionProvider"
    assert not caught or capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["layer", ""])
@pytest.mark.parametrize(("level", "dtype"), [(0, "float32"), (4, "int8")])
def test_a_file_that_multiplies_stored_integers_says_itself_whether_it_rounds_them(level, dtype, name, tmp_path):
    node = onnx.helper.make_node(
        "MatMulNBits", ["x", "weight", "scale"], ["y"], name=name, domain="com.microsoft",
        K=32, N=8, bits=4, block_size=32, accuracy_level=level,
    )  # fmt: skip
    constants = {"weight": np.full((8, 1, 16), 0x9A, np.uint8), "scale": np.ones((8, 1), np.float32)}
    tensors = [onnx.numpy_helper.from_array(value, name) for name, value in constants.items()]
    x, y = (onnx.helper.make_tensor_value_info(n, 1, ["N", size]) for n, size in (("x", 32), ("y", 8)))
    opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("com.microsoft", 1)]
    model = onnx.helper.make_model(onnx.helper.make_graph([node], "g", [x], [y], tensors), opset_imports=opsets)
    model.ir_version = 10
    onnx.save(model, str(tmp_path / "m.onnx"))
    (kernel,) = open_session(tmp_path / "m.onnx").kernels({"x": np.ones((2, 32), np.float32)})
    assert (kernel.op, kernel.dtype) == ("MatMulNBits", dtype)


@pytest.mark.skipif(not is_x86(), reason="other CPUs have other kernels")
@pytest.mark.parametrize(
    ("bits", "block", "zero_points", "order"),
    [(4, 16, None, False), (4, 256, np.uint8, False), (4, 32, np.float32, False), (4, 32, None, True),
     (8, 32, np.uint8, False), (2, 32, None, False), (2, 128, None, False), (2, 16, None, False),
     (2, 256, None, False)],
)  # fmt: skip
def test_products_that_have_no_kernel_in_bytes_are_told_as_the_floats_that_they_are(
    bits, block, zero_points, order, tmp_path
):
    """What they compute tells: 8 bits of the input make errors of some 0.5 %, floats none."""
    generator, blocks = np.random.default_rng(0), 256 // block
    stored = generator.integers(0, 2**bits, (8, blocks, block // (8 // bits), 8 // bits))
    middle = np.full((8, blocks), 2 ** (bits - 1), zero_points or np.uint8)
    constants = {
        "w": sum(stored[..., place] << (bits * place) for place in range(8 // bits)).astype(np.uint8),
        "s": np.ones((8, blocks), np.float32), "z": middle, "order": np.arange(256, dtype=np.int32) // block,
    }  # fmt: skip
    inputs = ["x", "w", "s", "z" if zero_points else "", "order" if order else ""]
    node = onnx.helper.make_node(
        "MatMulNBits", inputs, ["y"], domain="com.microsoft", K=256, N=8, bits=bits, block_size=block, accuracy_level=4
    )
    tensors = [onnx.numpy_helper.from_array(value, name) for name, value in constants.items() if name in inputs]
    x, y = (onnx.helper.make_tensor_value_info(n, 1, ["N", size]) for n, size in (("x", 256), ("y", 8)))
    opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("com.microsoft", 1)]
    graph = onnx.helper.make_graph([node], "g", [x], [y], tensors)
    onnx.save(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10), str(tmp_path / "m.onnx"))
    feeds = {"x": generator.normal(size=(4, 256)).astype(np.float32)}
    session = open_session(tmp_path / "m.onnx")
    expected = feeds["x"] @ (stored.reshape(8, 256) - 2.0 ** (bits - 1)).T
    rounded = np.abs(session.run(feeds)[0] - expected).max() > 1e-4 * np.abs(expected).max()
    assert [kernel.dtype for kernel in session.kernels(feeds)] == ["int8" if rounded else "float32"]
