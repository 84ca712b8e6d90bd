"""Weights alone, and activations of few bits: what is rounded and what is not, against rounding by hand."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from qtool.errors import QtoolError, UsageError
from qtool.exporting.stage import export
from qtool.form import QuantizedModel
from qtool.quantization.quantizers.qparams import affine_qparams
from qtool.quantization.stage import quantize
from qtool.recipe import ExportConfig, QuantizeConfig
from qtool.stages.benchmarking import _gains_size_alone

X = torch.randn(16, 2, 8, 8, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Two convolutions that read the same sum's operand, a sum in between, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(2, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)
        self.third, self.last = nn.Conv2d(6, 6, 1), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        x = torch.relu(self.second(x) + torch.relu(self.third(x)))
        return self.last(x.mean((2, 3)))


def made(**options: object) -> QuantizedModel:
    config = QuantizeConfig(**{"ranges": "minmax", "algorithms": None} | options)  # type: ignore[arg-type]
    return quantize(Net().eval(), config, example=X, calibration=[X])


def rounded_weights(bits: int) -> Net:
    """The network with weights rounded per output channel: the first's and the last's to 8 bits, others to ``bits``."""
    model = Net().eval()
    for name in ("first", "second", "third", "last"):
        weight = getattr(model, name).weight.data
        rows = weight.flatten(1)
        farthest, shape = rows.gather(1, rows.abs().argmax(1, keepdim=True)), (-1, *[1] * (weight.dim() - 1))
        if bits == 8 or name in ("first", "last"):
            scale, ends = (farthest.abs() / 127).reshape(shape), (-127, 127)
        else:
            scale, ends = (farthest / -8).reshape(shape), (-8, 7)
        weight.copy_((weight / scale).round().clamp(*ends) * scale)
    return model


@pytest.mark.parametrize("bits", [8, 4])
def test_weights_alone_are_integers(bits: int, tmp_path: Path) -> None:
    quantized = made(weights_only=True, weight_bits=bits)
    torch.testing.assert_close(quantized(X), rounded_weights(bits)(X), rtol=0, atol=1e-6)
    layers = [unit for unit in quantized.plan.units if unit.weight_bits]
    assert not quantized.plan.integer_units
    assert [(unit.name, unit.weight_bits) for unit in layers] == [
        ("first", 8), ("second", bits), ("third", bits), ("last", 8),
    ]  # fmt: skip
    assert all("it runs in float: what they gain is size" in unit.reason for unit in layers[:3])
    assert "multiplied by inputs that the runtime rounds" in layers[3].reason
    assert [unit.block for unit in layers] == [None, None, None, 32]
    exported = export(quantized, tmp_path, ExportConfig(baselines=None), samples=[X])
    assert {gate["passed"] for gate in exported.gates} == {True}
    coverage = next(gate["found"] for gate in exported.gates if gate["name"] == "coverage")
    assert coverage.endswith("1 of 1 multiply stored integers; 3 run in float from integer weights, as planned")
    model = onnx.load(str(exported.files["int8"]))
    kinds = {t.data_type for t in model.graph.initializer if sum(size > 1 for size in t.dims) > 1}
    assert kinds == {onnx.TensorProto.INT8} | ({onnx.TensorProto.INT4} if bits == 4 else set())
    assert not any(node.op_type == "QuantizeLinear" for node in model.graph.node)
    assert "session.qdq_matmulnbits_accuracy_level=1" in quantized.plan.notes[-1]
    kernels, answers = zip(*(opened(exported.files["int8"], tmp_path, folded) for folded in (False, True)), strict=True)
    assert not any({"DequantizeLinear", "Cast", "Mul"} & ran for ran in kernels)  # constants as the file is opened
    assert np.allclose(*answers, atol=0.01)
    assert "MatMulNBits" in kernels[0]
    assert not _gains_size_alone({"plan": quantized.plan.as_dict()})
    config = QuantizeConfig(weights_only=True, weight_bits=bits, overrides={"last": "float"})
    images = quantize(Net().eval(), config, example=X)
    assert _gains_size_alone({"plan": images.plan.as_dict()})
    assert not any("session." in note for note in images.plan.notes)
    assert not _gains_size_alone({"plan": made().plan.as_dict()})


def opened(path: Path, folder: Path, folded: bool, feeds: Any = None) -> tuple[set[str], Any]:
    """The kernels that run a file, and its outputs, weights dequantized when it is opened or in every run."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    options.log_severity_level = 3
    options.add_session_config_entry("session.disable_quant_qdq", str(int(folded)))
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    (output,) = session.run(None, feeds or {"x": X.numpy()})
    return {node.op_type for node in onnx.load(options.optimized_model_filepath).graph.node}, output


@torch.no_grad()
def test_four_bit_activations_are_rounded_where_layers_read_them(tmp_path: Path) -> None:
    """The sum and what leaves a layer stay in float; the first and the last layer read 8 bits."""
    plain = Net().eval()
    quantized = made(activation_bits=4, weight_bits=4)
    reference = rounded_weights(4)

    def rounds(name: str, most: int) -> None:
        def rounded(_: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
            scale, zero = affine_qparams(float(seen[name].min()), float(seen[name].max()), 0, most)
            return (torch.fake_quantize_per_tensor_affine(args[0], scale, zero, 0, most),)

        getattr(reference, name).register_forward_pre_hook(rounded)

    seen: dict[str, Tensor] = {}
    for name, most in (("first", 255), ("second", 15), ("third", 15), ("last", 255)):
        getattr(plain, name).register_forward_pre_hook(lambda _, args, name=name: seen.update({name: args[0]}))
        rounds(name, most)
    plain(X)
    wanted = reference(X)
    noise = (wanted - plain(X)).square().mean()
    assert (wanted - quantized(X)).square().mean() < 1e-6 * noise
    assert quantized.plan.simulated
    with pytest.raises(QtoolError, match=r"export: expected activations of 8 bits; got fewer.*simulated only"):
        export(quantized, tmp_path, ExportConfig(baselines=None))
    folder = tmp_path / "saved"
    folder.mkdir()
    quantized.save(folder)
    torch.testing.assert_close(QuantizedModel.load(folder, quantized.plan)(X), quantized(X))


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"weights_only": True, "activation_bits": 4}, "--activation-bits: expected 8 with --weights-only"),
        ({"weights_only": True, "engine": "torch.ao"}, "--weights-only: expected --engine pt2e"),
        ({"activation_bits": 4, "engine": "torch.ao"}, "--activation-bits: expected --engine pt2e"),
    ],
)
def test_what_excludes_each_other_is_refused(options: dict[str, object], part: str) -> None:
    with pytest.raises(UsageError, match=part):
        made(**options)


@pytest.mark.parametrize(
    "options", [{"weights_only": True}, {"weight_bits": 4, "activation_bits": 4}], ids=["weights", "w4a4"]
)
def test_training_starts_from_the_same_integers(options: dict[str, Any]) -> None:
    """Without a step of training what is trained through is what post-training quantization makes."""
    config = QuantizeConfig(mode="qat", ranges="minmax", algorithms=None, **options)
    trained = quantize(Net().eval(), config, example=X, calibration=[X], qat=lambda *_: None)
    torch.testing.assert_close(trained(X), made(**options)(X), rtol=0, atol=1e-5)
    assert trained.plan.simulated is ("activation_bits" in options)


@pytest.mark.parametrize("make", [Net, None], ids=["convolutions", "linear layers"])
def test_four_bits_between_integers_run_in_the_kernels_of_eight(make: type[nn.Module] | None, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = make() if make else nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)), nn.Linear(32, 4))
    x = X if make else torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
    quantized = quantize(model.eval(), QuantizeConfig(weight_bits=4, algorithms=None), example=x, calibration=[x])
    layers = [unit for unit in quantized.plan.units if unit.weight_bits]
    assert [unit.weight_bits for unit in layers] == [8, 4, 4, 8]
    assert all(unit.integer for unit in layers)
    result = export(quantized, tmp_path, ExportConfig(baselines=None), samples=[x])
    assert all(gate["passed"] is not False for gate in result.gates)
    assert "not covered" not in next(gate["found"] for gate in result.gates if gate["name"] == "integer reference")
    kinds = Counter(t.data_type for t in onnx.load(str(result.files["int8"])).graph.initializer if len(t.dims) > 1)
    assert kinds[onnx.TensorProto.INT4] == 2
    kernels, _ = opened(result.files["int8"], tmp_path, False, {"input": x.numpy()} if make is None else None)
    assert {"Conv", "Gemm", "MatMul", "Cast", "MatMulNBits"}.isdisjoint(kernels)
