"""Every integer kernel against ONNX Runtime's own, output by output, on graphs of one operator."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx import TensorProto
from qdq_files import Array, Builder, needs_x86, run

from qtool.exporting.reference.float_operators import EXACT, MOVERS, conv_transpose, evaluate
from qtool.exporting.reference.integer_arithmetic import Affine, Quantized
from qtool.exporting.reference.integer_kernels import KERNELS, padding, repeats_along_rows
from qtool.graphs.polynomials import logistic

pytestmark = needs_x86
Meaning = tuple[float, int]


@dataclass
class Case:
    """One operator on integers: what feeds it, what it is, and what its output means."""

    op: str
    inputs: list[tuple[Array, Meaning]]
    attributes: dict[str, Any] = field(default_factory=dict)
    output: Meaning | None = None
    weights: list[tuple[Array, Array, int | None]] = field(default_factory=list)

    def by_runtime(self, folder: Path) -> tuple[Array, list[str]]:
        builder, names, feeds = Builder(), [], {}
        for i, (values, (scale, zero_point)) in enumerate(self.inputs):
            kind = TensorProto.INT8 if values.dtype == np.int8 else TensorProto.UINT8
            name = builder.input(f"x{i}", list(values.shape), kind)
            feeds[name] = values
            names.append(builder.dequantize(name, scale, zero_point, values.dtype))
        for values, scales, axis in self.weights:
            zeros = [builder.constant(np.zeros(scales.shape, np.int8))] if values.dtype == np.int8 else []
            names.append(
                builder.op(
                    "DequantizeLinear",
                    builder.constant(values),
                    builder.constant(scales),
                    *zeros,
                    **({} if axis is None else {"axis": axis}),
                )
            )
        result = builder.op(self.op, *names, **self.attributes)
        if self.output is not None:
            result = builder.quantize(result, *self.output, self.inputs[0][0].dtype)
        outputs, operators = run(builder.model(result), feeds, folder)
        return outputs[0], operators

    def by_kernel(self) -> Array:
        inputs = [Quantized(torch.from_numpy(v), Affine.of(*m, torch.from_numpy(v).dtype)) for v, m in self.inputs]
        for values, scales, axis in self.weights:
            tensor = torch.from_numpy(values)
            zeros = torch.zeros(scales.shape, dtype=torch.int32)
            inputs.append(Quantized(tensor, Affine(torch.from_numpy(scales), zeros, tensor.dtype, axis)))
        output = None if self.output is None else Affine.of(*self.output, inputs[0].values.dtype)
        result = KERNELS[self.op](inputs, self.attributes, output)
        return (result.values if isinstance(result, Quantized) else result).numpy()


def check(case: Case, fused: str, folder: Path) -> int:
    """The kernel's outputs are the runtime's, and the runtime did use its integer operator. Returns how many."""
    expected, operators = case.by_runtime(folder)
    assert fused in operators
    got = case.by_kernel()
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    assert np.array_equal(got, expected), f"{(got != expected).sum()} of {got.size} differ for {case.attributes}"
    return got.size


class Draw:
    """Random integers, scales and zero points; extreme zero points come up often."""

    def __init__(self, name: str) -> None:
        self.random = np.random.default_rng(zlib.crc32(name.encode()))

    def __call__(self, *choices: Any) -> Any:
        return choices[self.random.integers(len(choices))]

    def bytes(self, *shape: int) -> Array:
        return self.random.integers(0, 256, shape, dtype=np.uint8)

    def weights(self, *shape: int) -> Array:
        return self.random.integers(-127, 128, shape, dtype=np.int8)

    def meaning(self, low: float = 1e-3, high: float = 0.1) -> Meaning:
        zero_point = int(self(0, 255, 128, self.random.integers(256)))
        return float(np.float32(np.exp(self.random.uniform(np.log(low), np.log(high))))), zero_point

    def fraction_of(self, scale: float) -> Meaning:
        """A scale p/q of another with q even: many results fall half way between two steps, where one bit decides."""
        whole = self(2, 4, 6, 10, 14, 20, 30, 50)
        return float(np.float32(scale * int(self.random.integers(1, whole + 1)) / whole)), self.meaning()[1]

    def near(self, scale: float) -> Meaning:
        return float(np.float32(scale * self.random.uniform(0.5, 1.5))), self.meaning()[1]


@pytest.mark.parametrize("trial", range(12))
def test_convolution(trial: int, tmp_path: Path) -> None:
    draw = Draw(f"conv{trial}")
    groups, channels, outputs = draw((1, 8, 24), (2, 16, 8), (16, 16, 16), (1, 64, 64), (8, 8, 16), (1, 3, 32))
    kernel = [draw(1, 3, 5), draw(1, 3)]
    x, w = draw.bytes(2, channels, 17, 14), draw.weights(outputs, channels // groups, *kernel)
    meaning = draw.meaning()
    scales = draw.random.uniform(0.001, 0.02, outputs).astype(np.float32)
    spread = np.sqrt(w[0].size) * 5000
    bias = (draw.random.normal(size=outputs) * spread).astype(np.int32)
    weights: list[tuple[Array, Array, int | None]] = [(w, scales, 0)]
    if draw(True, True, False):
        weights.append((bias, np.float32(meaning[0]) * scales, 0))
    attributes = {
        "strides": [draw(1, 2), draw(1, 2)],
        "pads": [int(n) for n in draw.random.integers(0, 3, 4)],
        "dilations": [draw(1, 1, 2), 1],
        "group": groups,
    }
    output = draw.near(meaning[0] * scales.mean() * spread * 0.015)
    check(Case("Conv", [(x, meaning)], attributes, output, weights), "QLinearConv", tmp_path)


@pytest.mark.parametrize(
    ("shape", "kernel", "attributes"),
    [
        ((2, 8, 40), (5,), {"pads": [1, 2], "strides": [2]}),
        ((2, 4, 6, 7, 8), (3, 3, 3), {"pads": [1] * 6}),
        ((2, 8, 11, 12), (4, 3), {"auto_pad": "SAME_LOWER", "strides": [2, 1]}),
        ((2, 8, 11, 12), (4, 3), {"auto_pad": "SAME_UPPER", "strides": [3, 2]}),
        ((2, 8, 11, 12), (3, 3), {"auto_pad": "VALID"}),
        ((1, 640, 5, 5), (3, 3), {"pads": [1] * 4}),
    ],
)
def test_convolution_of_other_shapes(
    shape: tuple[int, ...], kernel: tuple[int, ...], attributes: dict[str, Any], tmp_path: Path
) -> None:
    draw = Draw(str((shape, attributes)))
    w = draw.weights(6, shape[1], *kernel)
    if shape[1] == 640:
        w = np.abs(w)  # sums beyond 2^24
    output = (0.02 * 0.01 * np.sqrt(w[0].size) * 100, 7)
    case = Case("Conv", [(draw.bytes(*shape), (0.02, 3))], attributes, output, [(w, np.full(6, 0.01, np.float32), 0)])
    check(case, "QLinearConv", tmp_path)


@pytest.mark.parametrize("trial", range(12))
def test_matrix_products(trial: int, tmp_path: Path) -> None:
    draw = Draw(f"gemm{trial}")
    m, k, n = (int(v) for v in draw.random.integers(1, 700, 3))
    meaning, transposed = draw.meaning(), draw(0, 1)
    scales = draw.random.uniform(0.001, 0.02, n).astype(np.float32)
    w = draw.weights(k, n)
    output = draw(None, draw.near(meaning[0] * scales.mean() * np.sqrt(k) * 80))
    bias = draw.random.integers(-100000, 100000, n).astype(np.int32)
    weights: list[tuple[Array, Array, int | None]] = [(w.T.copy() if transposed else w, scales, 1 - transposed)]
    if draw(True, False):
        weights.append((bias, np.float32(meaning[0]) * scales, 0))
    attributes = {"transB": transposed, "alpha": 1.0 if len(weights) > 1 else draw(1.0, 0.7)}
    check(Case("Gemm", [(draw.bytes(m, k), meaning)], attributes, output, weights), "QGemm", tmp_path)
    stacked = Case("MatMul", [(draw.bytes(3, m // 8 + 1, k), meaning)], {}, output, [(w, scales, 1)])
    check(stacked, "QLinearMatMul" if output else "MatMulIntegerToFloat", tmp_path)
    both = [(draw.bytes(3, m // 8 + 1, k), meaning), (draw.bytes(3, k, n), draw.meaning())]
    output = draw.near(meaning[0] * both[1][1][0] * np.sqrt(k) * 80)
    check(Case("MatMul", both, {}, output), "QLinearMatMul", tmp_path)


@pytest.mark.parametrize("op", ["Add", "Mul"])
@pytest.mark.parametrize("shape", ["same", "column", "first", "channel", "scalar"])
def test_sums_and_products_of_all_pairs(op: str, shape: str, tmp_path: Path) -> None:
    draw, count = Draw(op + shape), 0
    rows, columns = np.mgrid[0:256, 0:256].astype(np.uint8)
    for trial in range(10):
        step = draw.meaning()[0]
        first, second = draw.fraction_of(step), draw.fraction_of(step)
        if trial == 0:
            first, second = draw.near(step / 2), draw.near(step / 2)
        step = step if op == "Add" else first[0] * second[0] * draw(50, 64, 100, 170.3)
        a, b = {
            "same": (rows, columns),
            "column": (rows, columns[:1].T.copy()),
            "first": (columns[:1].T.copy(), rows),
            "channel": (draw.bytes(2, 6, 9, 9), draw.bytes(1, 6, 1, 1)),
            "scalar": (draw.bytes(1), columns),
        }[shape]
        case = Case(op, [(a, first), (b, second)], {}, (float(np.float32(step)), draw.meaning()[1]))
        count += check(case, f"QLinear{op}", tmp_path)
    assert count >= 5000


@pytest.mark.parametrize("op", ["Sigmoid", "LeakyRelu"])
def test_tables(op: str, tmp_path: Path) -> None:
    draw = Draw(op)
    for _ in range(25):
        output = (1 / 256, 0) if op == "Sigmoid" and draw(True, False) else draw.meaning(1e-3, 1e-2)
        attributes = {"alpha": float(np.float32(draw.random.uniform(0.01, 0.3)))} if op == "LeakyRelu" else {}
        x = np.arange(256, dtype=np.uint8)
        check(Case(op, [(x, draw.meaning(1e-3, 0.3))], attributes, output), f"QLinear{op}", tmp_path)


@pytest.mark.parametrize("trial", range(8))
def test_pooling(trial: int, tmp_path: Path) -> None:
    draw = Draw(f"pool{trial}")
    x, meaning = draw.bytes(2, 24, int(draw.random.integers(8, 30)), 13), draw.meaning()
    attributes = {
        "kernel_shape": [draw(2, 3), draw(2, 3, 5)],
        "strides": [draw(1, 2, 3), draw(1, 2)],
        "pads": [int(n) for n in draw.random.integers(0, 2, 4)],
        "ceil_mode": draw(0, 0, 1),
    }
    meaning, output = draw.fraction_of(meaning[0]), meaning
    check(Case("MaxPool", [(x, meaning)], attributes, meaning), "MaxPool", tmp_path)
    average = {**attributes, "count_include_pad": draw(0, 1)}
    check(Case("AveragePool", [(x, meaning)], average, output), "QLinearAveragePool", tmp_path)
    check(Case("GlobalAveragePool", [(x, meaning)], {}, output), "QLinearGlobalAveragePool", tmp_path)
    whole = {"kernel_shape": list(x.shape[2:])}
    check(Case("AveragePool", [(x, meaning)], whole, output), "QLinearAveragePool", tmp_path)


@pytest.mark.parametrize("trial", range(6))
def test_global_average_of_many_channels(trial: int, tmp_path: Path) -> None:
    draw = Draw(f"mean{trial}")
    for size in (1, 3, 5, 6, 7, 49):
        output = draw.meaning()
        sums = np.arange(255 * size + 1)
        x = (sums[:, None] // size + (np.arange(size) < (sums % size)[:, None])).astype(np.uint8)
        case = Case("GlobalAveragePool", [(x[None, :, :, None], draw.fraction_of(output[0]))], {}, output)
        check(case, "QLinearGlobalAveragePool", tmp_path)


@pytest.mark.parametrize("trial", range(8))
def test_concatenation_and_softmax(trial: int, tmp_path: Path) -> None:
    draw = Draw(f"concat{trial}")
    first, second = draw.meaning(), draw.meaning()
    parts = [(draw.bytes(2, 5, 9, 7), first), (draw.bytes(2, 3, 9, 7), second)]
    check(Case("Concat", parts, {"axis": 1}, draw(first, draw.meaning())), "QLinearConcat", tmp_path)
    x, output = draw.bytes(400, draw(2, 3, 5, 8, 33, 150)), draw((1 / 256, 0), draw.meaning(4e-3, 1e-2))
    check(Case("Softmax", [(x, draw.meaning(1e-3, 0.3))], {"axis": -1}, output), "QLinearSoftmax", tmp_path)


def test_signed_activations(tmp_path: Path) -> None:
    draw = Draw("signed")
    a, b = draw.weights(2, 8, 9, 9), draw.weights(2, 8, 9, 9)
    check(Case("Add", [(a, (0.02, 3)), (b, (0.03, -5))], {}, (0.05, -7)), "QLinearAdd", tmp_path)
    check(Case("Mul", [(a, (0.02, 3)), (b, (0.03, -5))], {}, (0.03, -7)), "QLinearMul", tmp_path)
    check(Case("GlobalAveragePool", [(a, (0.02, 3))], {}, (0.004, -7)), "QLinearGlobalAveragePool", tmp_path)
    check(Case("Sigmoid", [(a, (0.02, 3))], {}, (1 / 256, -128)), "QLinearSigmoid", tmp_path)


def test_which_operand_repeats() -> None:
    assert not repeats_along_rows((2, 8, 4, 4), (2, 8, 4, 4))
    assert not repeats_along_rows((2, 8, 4, 4), (8, 1, 1))
    assert repeats_along_rows((8, 1, 1), (2, 8, 4, 4))
    assert not repeats_along_rows((4, 1), (1, 1))
    assert repeats_along_rows((1, 1), (4, 1))


def test_padding_by_hand() -> None:
    assert padding({"auto_pad": "SAME_UPPER"}, [5], [4], [2], [1]) == [1, 2]
    assert padding({"auto_pad": "SAME_LOWER"}, [5], [4], [2], [1]) == [2, 1]
    assert padding({"auto_pad": "VALID", "pads": [3, 3]}, [5], [4], [2], [1]) == [0, 0]
    assert padding({}, [5], [4], [2], [1]) == [0, 0]


@pytest.mark.parametrize("op", sorted(set(EXACT) - {"Add", "Sub", "Mul", "Div"}))
def test_float_operators_are_the_runtimes_bit_for_bit(op: str, tmp_path: Path) -> None:
    builder = Builder()
    x = np.random.default_rng(0).normal(size=(50, 1003)).astype(np.float32) * 4
    attributes = {"HardSigmoid": {"alpha": 1 / 6}, "LeakyRelu": {"alpha": 0.03}}.get(op, {})
    model = builder.model(builder.op(op, builder.input("x", [50, 1003]), **attributes))
    expected = run(model, {"x": x}, tmp_path)[0][0]
    assert np.array_equal(EXACT[op](attributes, torch.from_numpy(x)).numpy(), expected)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("rank", [1, 2])
def test_transposed_convolution_is_the_runtimes(rank: int, groups: int, tmp_path: Path) -> None:
    rng, builder = np.random.default_rng(0), Builder()
    x = rng.normal(size=(2, 4, *[5] * rank)).astype(np.float32)
    weight = rng.normal(size=(4, 6 // groups, *[3] * rank)).astype(np.float32)
    attributes = {
        "strides": [2] * rank, "pads": [1, 0][:rank] + [2, 1][:rank], "output_padding": [1] * rank, "group": groups,
    }  # fmt: skip
    y = builder.op("ConvTranspose", builder.input("x", list(x.shape)), builder.constant(weight), **attributes)
    expected = run(builder.model(y), {"x": x}, tmp_path)[0][0]
    got = conv_transpose(attributes, torch.from_numpy(x), torch.from_numpy(weight))
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options", [{}, {"ceil_mode": 1}, {"count_include_pad": 1}, {"ceil_mode": 1, "count_include_pad": 1}], ids=str
)
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_averages_of_windows_are_the_runtimes(rank: int, options: dict[str, int], tmp_path: Path) -> None:
    builder, x = Builder(), np.random.default_rng(0).normal(size=(2, 3, *[8] * rank)).astype(np.float32)
    attributes: dict[str, Any] = {"kernel_shape": [3] * rank, "strides": [2] * rank, "pads": [1] * 2 * rank, **options}
    model = builder.model(builder.op("AveragePool", builder.input("x", list(x.shape)), **attributes))
    expected = run(model, {"x": x}, tmp_path)
    (got,) = evaluate("AveragePool", attributes, [torch.from_numpy(x)], outputs=1, opsets={"": 21})
    np.testing.assert_allclose(got.numpy(), expected[0][0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("aligned", [0, 1])
@pytest.mark.parametrize("beyond", ["zeros", "border", "reflection"])
@pytest.mark.parametrize(("mode", "rank"), [("linear", 2), ("nearest", 2), ("cubic", 2), ("linear", 3)])
def test_values_between_pixels_are_the_runtimes(
    mode: str, rank: int, beyond: str, aligned: int, tmp_path: Path
) -> None:
    rng, builder = np.random.default_rng(0), Builder()
    x, grid = rng.normal(size=(2, 3, *[6] * rank)), rng.uniform(-1.3, 1.3, (2, *[4] * rank, rank))
    x, grid = x.astype(np.float32), grid.astype(np.float32)
    attributes: dict[str, Any] = {"mode": mode, "padding_mode": beyond, "align_corners": aligned}
    names = [builder.input(name, list(value.shape)) for name, value in (("x", x), ("grid", grid))]
    model = builder.model(builder.op("GridSample", *names, **attributes))
    expected = run(model, {"x": x, "grid": grid}, tmp_path)[0][0]
    (got,) = evaluate("GridSample", attributes, [*map(torch.from_numpy, (x, grid))], outputs=1, opsets={"": 21})
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_elements_are_gathered_as_the_runtime_does(axis: int, tmp_path: Path) -> None:
    rng, builder = np.random.default_rng(0), Builder()
    x, indices = rng.normal(size=(4, 30)).astype(np.float32), rng.integers(-4, 4, (2, 24))
    taken = builder.op("GatherElements", builder.input("x", [4, 30]), builder.constant(indices), axis=axis)
    expected = run(builder.model(taken), {"x": x}, tmp_path)[0][0]
    found = MOVERS["GatherElements"]({"axis": axis}, torch.from_numpy(x), torch.from_numpy(indices))
    assert np.array_equal(found.numpy(), expected)


def test_a_tensor_among_the_attributes_is_read() -> None:
    given: dict[str, Any] = {"value": np.asarray([2.5], np.float32)}
    (made,) = evaluate("ConstantOfShape", given, [torch.tensor([2, 3])], outputs=1, opsets={"": 21})
    torch.testing.assert_close(made, torch.full((2, 3), 2.5))


@pytest.mark.parametrize("axes", [None, [3, 2]])
def test_a_padding_may_cut_off(tmp_path: Path, axes: list[int] | None) -> None:
    builder = Builder()
    x = np.random.default_rng(0).normal(size=(2, 3, 5, 6)).astype(np.float32)
    amounts = np.array([0, 0, -1, 2, 0, 0, 1, -3] if axes is None else [-2, 0, 1, -1])
    rest = [builder.constant(np.float32(0.5))] + ([] if axes is None else [builder.constant(np.array(axes))])
    padded = builder.op("Pad", builder.input("x", list(x.shape)), builder.constant(amounts), *rest)
    expected = run(builder.model(padded), {"x": x}, tmp_path)[0][0]
    given = [torch.from_numpy(np.asarray(value)) for value in (x, amounts, np.float32(0.5), *([axes] if axes else []))]
    (found,) = evaluate("Pad", {}, given, outputs=1, opsets={"": 21})
    assert np.array_equal(found.numpy(), expected)


def test_logistic_is_a_sigmoid() -> None:
    x = torch.linspace(-30, 30, 4001)
    assert torch.allclose(logistic(x), torch.sigmoid(x), atol=3e-7)
