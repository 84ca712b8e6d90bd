from __future__ import annotations

import logging
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fake_device import DEVICE, Fake
from qdq_files import needs_vnni
from torch import nn

from qtool.errors import QtoolError
from qtool.runtimes import ProviderError, open_session
from qtool.runtimes.base import TensorInfo, arithmetic
from qtool.runtimes.torch import TorchSession, _exact_float32, _kernel, outermost
from qtool.system.devices import load_inductor

FEEDS = {"x": np.random.default_rng(0).normal(size=(4, 3, 8, 8)).astype(np.float32)}
INPUTS = (TensorInfo("x", "float32", ("N", 3, 8, 8)),)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5)).eval()


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    path = tmp_path_factory.mktemp("torch") / "float.pt2"
    exported = torch.export.export(net(), (torch.zeros(2, 3, 8, 8),), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    torch.export.save(exported, path)
    return path


def test_a_module_is_a_session():
    session = TorchSession(net(), INPUTS, device="cpu")
    with torch.no_grad():
        np.testing.assert_array_equal(session.run(FEEDS)[0], net()(torch.from_numpy(FEEDS["x"])).numpy())
    session.prepare(FEEDS)()
    assert (session.provider, session.device, session.stored) == ("torch", "cpu", "float32")


def test_a_captured_graph_is_a_session(program):
    session = open_session(program, provider="torch", device="cpu")
    assert [(info.dtype, info.shape[1:]) for info in session.outputs] == [("float32", (5,))]
    assert session.outputs[0].shape[0] == session.inputs[0].shape[0]
    assert session.inputs[0].dtype == "float32"
    assert session.inputs[0].shape[1:] == (3, 8, 8)
    assert not isinstance(session.inputs[0].shape[0], int)
    feeds = {session.inputs[0].name: FEEDS["x"]}
    np.testing.assert_allclose(session.run(feeds)[0], TorchSession(net(), INPUTS).run(FEEDS)[0], rtol=1e-5, atol=1e-6)
    with pytest.raises(QtoolError, match="got float32"):
        session.run({session.inputs[0].name: FEEDS["x"][:, :2]})


@pytest.mark.parametrize(("precision", "dtype"), [(None, "float32"), ("bf16", "bfloat16"), ("fp16", "float16")])
def test_the_arithmetic_is_the_profilers_and_not_the_name(precision, dtype):
    session = TorchSession(net(), INPUTS, device="cpu", precision=precision)
    assert arithmetic(session.kernels(FEEDS)) == {dtype: 2}
    assert session.stored == dtype


def test_half_precision_keeps_inputs_and_outputs_in_float32():
    whole, half = (TorchSession(net(), INPUTS, device="cpu", precision=p).run(FEEDS)[0] for p in (None, "bf16"))
    assert half.dtype == np.float32
    np.testing.assert_allclose(half, whole, atol=0.03)
    assert (half != whole).any()


class Words(nn.Module):
    """A graph that makes floats itself: of whole numbers, and zeros that a layer reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 6), nn.Linear(6, 4)

    def forward(self, ids):
        return self.second(self.first(ids.float()).relu()) + self.second(torch.zeros(ids.shape[0], 6))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_what_a_graph_makes_in_float32_is_made_in_half_precision(tmp_path, precision):
    torch.manual_seed(0)
    ids, path = torch.randint(0, 3, (4, 5)), tmp_path / "float.pt2"
    net = Words().eval()
    torch.export.save(torch.export.export(net, (ids,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},)), path)
    session = open_session(path, provider="torch", device="cpu", precision=precision)
    with torch.no_grad():
        np.testing.assert_allclose(session.run({"ids": ids.numpy()})[0], net(ids).numpy(), atol=0.03)


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_what_a_graph_makes_is_made_where_it_runs(precision):
    graph = torch.export.export(Words().eval(), (torch.randint(0, 3, (4, 5)),)).module(check_guards=False)
    inputs, feeds = (TensorInfo("ids", "int64", (4, 5)),), {"ids": np.ones((4, 5), np.int64)}
    expected = TorchSession(graph, inputs, device="cpu", precision=precision).run(feeds)[0]
    with Fake():
        found = TorchSession(graph, inputs, device=str(DEVICE), precision=precision).run(feeds)[0]
    np.testing.assert_array_equal(found, expected)


def test_threads_are_set_for_the_run_and_given_back():
    seen = []

    class Counting(nn.Module):
        def forward(self, x):
            seen.append(torch.get_num_threads())
            return x

    before = torch.get_num_threads()
    TorchSession(Counting(), INPUTS, device="cpu", threads=before + 1).run(FEEDS)
    assert seen == [before + 1]
    assert torch.get_num_threads() == before


class Quantized(nn.Module):
    """A convolution between a quantize and a dequantize, as the quantized form has it."""

    def __init__(self) -> None:
        super().__init__()
        import torchao.quantization.pt2e  # noqa: F401  (registers the operators)

        self.register_buffer("weight", torch.arange(-96, 120, dtype=torch.int8).reshape(8, 3, 3, 3))
        self.register_buffer("scale", torch.full((8,), 0.01))
        self.register_buffer("zero", torch.zeros(8, dtype=torch.int64))

    def forward(self, x):
        ops = torch.ops.quantized_decomposed
        q = ops.quantize_per_tensor(x, 0.05, 128, 0, 255, torch.uint8)
        w = ops.dequantize_per_channel(self.weight, self.scale, self.zero, 0, -127, 127, torch.int8)
        y = nn.functional.conv2d(ops.dequantize_per_tensor(q, 0.05, 128, 0, 255, torch.uint8), w)
        return ops.dequantize_per_tensor(
            ops.quantize_per_tensor(y, 0.2, 128, 0, 255, torch.uint8), 0.2, 128, 0, 255, torch.uint8
        )


def captured(model: nn.Module) -> nn.Module:
    return torch.export.export(model, (torch.zeros(4, 3, 8, 8),)).module(check_guards=False)


def test_a_quantized_graph_run_as_it_is_is_called_float():
    session = TorchSession(captured(Quantized()), INPUTS, device="cpu")
    assert session.stored == "int8"
    assert arithmetic(session.kernels(FEEDS)) == {"float32": 1}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_asked_for_is_never_the_cpu(program):
    with pytest.raises(ProviderError, match="CUDA device"):
        open_session(program, provider="torch", device="cuda")
    assert open_session(program, provider="torch").device == "cpu"


def test_a_gpu_that_is_not_there_is_told(program, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ProviderError, match="expected the CUDA device 'cuda:2'; got 2 visible"):
        open_session(program, provider="torch", device="cuda:2")


@pytest.mark.parametrize(
    ("options", "words"), [({"precision": "int3"}, "fp16 or bf16"), ({"optimize": False}, "optimize off")]
)
def test_what_it_cannot_do_it_refuses(program, options, words):
    with pytest.raises(QtoolError, match=words):
        open_session(program, provider="torch", **options)


def test_an_onnx_file_is_not_for_torch(files):
    with pytest.raises(QtoolError, match=r"a \.pt2 file"):
        open_session(files["fp32"], provider="torch")


def test_a_damaged_file_is_one_line(program, tmp_path):
    path = tmp_path / "half.pt2"
    path.write_bytes(program.read_bytes()[:2000])
    with pytest.raises(QtoolError) as caught:
        open_session(path, provider="torch")
    assert "\n" not in str(caught.value)


def test_a_failure_inside_is_one_line():
    session = TorchSession(nn.Linear(3, 2), INPUTS, device="cpu")
    with pytest.raises(QtoolError) as caught:
        session.run(FEEDS)
    assert "\n" not in str(caught.value)


def test_only_the_outermost_events_are_counted():
    def event(start, duration, thread=1):
        return SimpleNamespace(
            start_ns=lambda: start, duration_ns=lambda: duration, start_thread_id=lambda: thread, id=(start, thread)
        )

    events = [event(12, 5), event(10, 20), event(30, 5), event(15, 2, thread=2), event(10, 3)]
    assert [e.id for e in outermost(events)] == [(10, 1), (15, 2), (30, 1)]


@pytest.mark.parametrize(
    ("name", "dtypes", "dtype"),
    [
        ("aten::_int_mm", ["signed char", "signed char"], "int8"),
        ("triton_tem_fused__int_mm_mul_1", ["c10::Half", "signed char"], "int8"),
        ("triton_tem_fused_addmm_gelu_2", ["c10::Half"], "float16"),
        ("aten::addmm", ["float"], "float32"),
    ],
)
def test_a_product_has_the_format_that_it_multiplies(name, dtypes, dtype):
    event = SimpleNamespace(name=lambda: name, dtypes=lambda: dtypes)
    assert arithmetic([_kernel(event, "cuda:0")]) == {dtype: 1}


@pytest.mark.parametrize(("device", "cores"), [("cpu", 2), ("cuda:0", 2), ("cuda:0", 1)])
def test_on_a_gpu_products_are_compiled_with_what_follows_them(device, cores, monkeypatch, capfd):
    load_inductor()
    import torch._inductor.config as inductor
    from torch._inductor.async_compile import AsyncCompile

    told = ("freezing", "max_autotune_gemm", "epilogue_fusion_first", "loop_ordering_after_fusion")
    seen, waited = [], []
    monkeypatch.setattr("torch._inductor.async_compile.get_compile_threads", lambda: cores)
    monkeypatch.setattr(AsyncCompile, "wait_pool_ready", lambda: waited.append(cores))
    monkeypatch.setattr("qtool.runtimes.torch._compiled", lambda module: lambda *a: seen.append(read()) or module(*a))

    def read():
        logging.getLogger("torch._inductor.select_algorithm").error("out of resource: triton_mm")
        sys.stderr.write("Autotune Choices Stats:")
        return tuple(getattr(inductor, name) for name in told)

    before = read()
    capfd.readouterr()
    session = TorchSession(net(), INPUTS, provider="torch-compile", device="cpu")
    on_it, session.device = session._on_device(FEEDS), device
    session._compute(on_it)
    assert capfd.readouterr() == ("", "")
    tuned = device == "cuda:0" and cores > 1
    assert seen == [(True, True, True, False) if tuned else (True, *before[1:])]
    assert (read(), waited) == (before, [cores] * tuned)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None and shutil.which("g++") is None, reason="no C++ compiler")
def test_compiled_it_computes_the_same():
    session = TorchSession(
        nn.Sequential(nn.Flatten(), nn.Linear(192, 4)), INPUTS, provider="torch-compile", device="cpu"
    )
    eager = TorchSession(session._module, INPUTS, device="cpu")
    np.testing.assert_allclose(session.run(FEEDS)[0], eager.run(FEEDS)[0], rtol=1e-4, atol=1e-5)
    assert arithmetic(session.kernels(FEEDS)) == {"float32": 1}


@needs_vnni
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None and shutil.which("g++") is None, reason="no C++ compiler")
@pytest.mark.skipif("AVX" not in torch.backends.cpu.get_cpu_capability(), reason="no x86 with integer kernels")
def test_compiled_a_quantized_graph_runs_in_integers():
    graph = captured(Quantized())
    session = TorchSession(graph, INPUTS, provider="torch-compile", device="cpu")
    simulated = TorchSession(graph, INPUTS, device="cpu").run(FEEDS)[0]
    compiled = session.run(FEEDS)[0]
    assert np.abs(compiled - simulated).max() <= 0.2 + 1e-5
    assert arithmetic(session.kernels(FEEDS)) == {"int8": 1}
    session.prepare(FEEDS)()


@pytest.mark.parametrize("newer", [None, "ieee", "tf32"])
def test_convolutions_on_a_gpu_are_those_of_float32_however_the_caller_has_set_their_precision(newer):
    cudnn = torch.backends.cudnn
    before = cudnn.conv.fp32_precision
    try:
        if newer:
            cudnn.conv.fp32_precision = newer
        found = cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision, cudnn.benchmark
        with _exact_float32("cuda:0"):
            assert (cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision, cudnn.benchmark) == ("ieee", "ieee", True)
        assert (cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision, cudnn.benchmark) == found
        with _exact_float32("cpu"):
            assert (cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision, cudnn.benchmark) == found
    finally:
        cudnn.conv.fp32_precision = before
