from __future__ import annotations

import sys

import numpy as np
import onnx
import onnx_files
import onnxruntime
import pytest

from qtool.runtimes import open_session, ort
from qtool.runtimes.binding import bind


class Binding:
    def __init__(self, calls):
        self.calls = calls

    def bind_ortvalue_input(self, name, value):
        self.calls.append(("input", name, value))

    def bind_output(self, name, device, device_id):
        self.calls.append(("allocate", name, device, device_id))

    def bind_ortvalue_output(self, name, value):
        self.calls.append(("output", name, value))

    def get_outputs(self):
        return ["y on device"]

    def synchronize_inputs(self):
        self.calls.append(("synchronize inputs",))

    def synchronize_outputs(self):
        self.calls.append(("synchronize outputs",))


class Gpu:
    """A session that writes down what is asked of it."""

    def __init__(self):
        self.calls = []

    def io_binding(self):
        return Binding(self.calls)

    def run_with_iobinding(self, binding, option):
        self.calls.append(("run", option))


def prepare(gpu, **options):
    moved = []
    value = np.zeros((2, 3), np.float32)[:, ::-1]
    step = bind(
        gpu, {"x": value}, ["y"], device_id=1, to_device=lambda *a: moved.append(a) or "x on device",
        run_options=lambda recording: f"recording {recording}", **options,
    )  # fmt: skip
    return step, moved


def test_inputs_are_copied_once_outputs_kept_and_every_step_waits_for_its_result():
    gpu = Gpu()
    step, moved = prepare(gpu)
    assert gpu.calls == [
        ("input", "x", "x on device"), ("allocate", "y", "cuda", 1), ("synchronize inputs",),
        ("run", None), ("synchronize outputs",),
        ("input", "x", "x on device"), ("output", "y", "y on device"), ("synchronize inputs",),
    ]  # fmt: skip
    assert moved[0][1:] == ("cuda", 1)
    assert moved[0][0].flags.c_contiguous
    gpu.calls.clear()
    step()
    step()
    assert gpu.calls == [("run", None), ("synchronize outputs",)] * 2
    assert len(moved) == 1


def test_each_set_of_shapes_has_a_recording_of_its_own_and_the_first_run_none():
    gpu = Gpu()
    steps = [prepare(gpu, record=True)[0] for _ in range(2)]
    assert [call for call in gpu.calls if call[0] == "run"] == [("run", "recording -1")] * 2
    gpu.calls.clear()
    for step in (*steps, steps[0]):
        step()
    first, second, again = (call[1] for call in gpu.calls if call[0] == "run")
    assert first == again != second
    assert "-1" not in first + second


@pytest.mark.parametrize("name", ["fp32", "int8"])
def test_a_real_session_runs_bound_to_the_cpu(files, name):
    session = onnxruntime.InferenceSession(files[name], providers=["CPUExecutionProvider"])
    bind(session, {"x": np.zeros((1, 3, 8, 8), np.float32)}, ["y"], device="cpu")()


# Sessions for CUDA, on a stand-in for ONNX Runtime's: the CPU's own session, that says it is CUDA's.


@pytest.fixture
def cuda(monkeypatch):
    """Makes sessions on the CPU pass for CUDA's; gives the provider options of each that was made."""
    real, made = onnxruntime.InferenceSession, []
    name = "CUDAExecutionProvider"

    class Posing:
        refuses_graphs = False
        options: tuple[object, ...] = ()

        def __init__(self, path, options, providers):
            made.append(dict(p if isinstance(p, tuple) else (p, {}) for p in providers))
            if self.refuses_graphs and any(o.get("enable_cuda_graph") == "1" for o in made[-1].values()):
                raise RuntimeError("This session cannot use the graph capture feature: control flow nodes")
            self.session = real(path, options, providers=["CPUExecutionProvider"])
            self.falls_back = True

        def disable_fallback(self):
            self.falls_back = False

        def get_providers(self):
            return [next(iter(made[-1])), "CPUExecutionProvider"]

        def run(self, outputs, feeds, option=None):
            Posing.options += (option,)
            return self.session.run(outputs, feeds)

        def __getattr__(self, attribute):
            return getattr(self.session, attribute)

    every = ["TensorrtExecutionProvider", name, "CPUExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: every)
    monkeypatch.setattr(onnxruntime, "InferenceSession", Posing)
    monkeypatch.setattr(onnxruntime, "preload_dlls", lambda: None, raising=False)
    return Posing, made


FEEDS = {"x": np.ones((2, 3, 8, 8), np.float32)}


def test_a_cuda_session_records_graphs_in_true_float32_and_runs_arrays_without(files, cuda):
    posing, made = cuda
    session = open_session(files["fp32"], provider="cuda")
    assert session.cuda_graph
    assert session.device == "cuda"
    assert made == [{"CUDAExecutionProvider": {"use_tf32": "0", "enable_cuda_graph": "1"}, "CPUExecutionProvider": {}}]
    np.testing.assert_allclose(session.run(FEEDS)[0], open_session(files["fp32"]).run(FEEDS)[0], rtol=1e-4, atol=1e-6)
    assert posing.options[0].get_run_config_entry("gpu_graph_id") == "-1"
    assert posing.options[1] is None


def test_a_model_that_cannot_be_recorded_runs_without(files, cuda):
    posing, made = cuda
    posing.refuses_graphs = True
    session = open_session(files["fp32"], provider="cuda")
    assert not session.cuda_graph
    assert [m["CUDAExecutionProvider"]["enable_cuda_graph"] for m in made] == ["1", "0"]
    assert session.run(FEEDS)[0].shape == (2, 10)


@pytest.mark.parametrize(
    ("name", "half", "integer"), [("fp32", "False", "False"), ("fp16", "True", "False"), ("int8", "True", "True")]
)
def test_tensorrt_lowers_precision_only_where_the_file_does(files, name, half, integer):
    providers = dict(ort._provider_list(files[name], "tensorrt", record=False)[:2])
    assert providers["TensorrtExecutionProvider"] == {"trt_fp16_enable": half, "trt_int8_enable": integer}
    assert providers["CUDAExecutionProvider"]["enable_cuda_graph"] == "0"


def test_tensorrt_records_no_graph_since_it_would_replay_it_for_other_inputs(files, cuda):
    posing, made = cuda
    session = open_session(files["fp32"], provider="tensorrt")
    assert not session.cuda_graph
    asked = {key: value for given in made[0].values() for key, value in given.items() if "graph" in key}
    assert asked == {"enable_cuda_graph": "0"}
    session.run(FEEDS)
    assert posing.options == (None,)


def quantized_layer(path, bias):
    """A convolution of integers, its bias in float or in int32."""
    node, weights = onnx.helper.make_node, {"s": np.float32(0.1), "zx": np.uint8(128), "zw": np.int8(0)}
    weights |= {"w": np.ones((4, 3, 1, 1), np.int8), "b": np.ones(4, bias), "sb": np.float32(0.01), "zb": np.int32(0)}
    stored = bias is np.int32
    nodes = [
        node("QuantizeLinear", ["x", "s", "zx"], ["q"]), node("DequantizeLinear", ["q", "s", "zx"], ["d"]),
        node("DequantizeLinear", ["w", "s", "zw"], ["dw"]),
        *([node("DequantizeLinear", ["b", "sb", "zb"], ["db"])] if stored else []),
        node("Conv", ["d", "dw", "db" if stored else "b"], ["c"]),
        node("QuantizeLinear", ["c", "s", "zx"], ["qc"]), node("DequantizeLinear", ["qc", "s", "zx"], ["y"]),
    ]  # fmt: skip
    made = onnx_files.model(nodes, inputs={"x": [1, 3, 4, 4]}, outputs={"y": [1, 4, 4, 4]}, weights=weights)
    onnx.save(made, path)
    return path


@pytest.mark.parametrize(("provider", "bias"), [("cuda", np.int32), ("cuda", np.float32), ("tensorrt", np.float32)])
def test_biases_are_in_float_where_a_gpu_s_provider_reads_them(cuda, tmp_path, provider, bias):
    """It dequantizes no int32, and the CPU would do it for each layer."""
    graph = ort.optimized_graph(quantized_layer(tmp_path / "layer.onnx", bias), provider=provider).graph
    wide = {tensor.name for tensor in graph.initializer if tensor.data_type == onnx.TensorProto.INT32}
    assert not [node.op_type for node in graph.node if wide & {*node.input}]
    assert {"QuantizeLinear", "DequantizeLinear"} <= {node.op_type for node in graph.node}
    on_cpu = ort.optimized_graph(tmp_path / "layer.onnx").graph
    assert "QLinearConv" in {node.op_type for node in on_cpu.node}


@pytest.mark.parametrize("provider", ["cuda", "tensorrt"])
def test_a_run_that_fails_is_not_made_again_on_another_provider(files, cuda, provider):
    assert not open_session(files["fp32"], provider=provider)._session.falls_back


def test_tensorrt_is_imported_before_a_session_which_finds_its_libraries_so(files, cuda, monkeypatch, tmp_path):
    (tmp_path / "tensorrt.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "tensorrt", raising=False)
    open_session(files["fp32"], provider="cuda")
    assert "tensorrt" not in sys.modules
    open_session(files["fp32"], provider="tensorrt")
    assert sys.modules.pop("tensorrt").__file__ == str(tmp_path / "tensorrt.py")


def test_prepared_steps_are_bound_to_the_device(files, cuda, monkeypatch):
    from qtool.runtimes import binding

    asked = {}
    monkeypatch.setattr(
        binding, "bind", lambda session, feeds, outputs, **options: asked.update(options, outputs=outputs)
    )
    open_session(files["fp32"], provider="cuda").prepare(FEEDS)
    assert asked == {"record": True, "outputs": ["y"]}
