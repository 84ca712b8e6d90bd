from __future__ import annotations

import numpy as np
import onnx
import onnx_files
import pytest
from onnx import helper

from qtool.benchmarking.claims import (
    check_claim,
    is_integer,
    require_not_slower,
    slower_causes,
    slower_sentence,
    stored_format,
)
from qtool.benchmarking.stage import _notes
from qtool.errors import ContractError
from qtool.recipe import BenchmarkConfig


def test_the_stored_format_is_that_of_most_weights(files):
    assert {name: stored_format(path) for name, path in files.items()} == {
        "fp32": "float32", "fp16": "float16", "int8": "int8"
    }  # fmt: skip


def test_weights_in_constant_nodes_count_too(tmp_path):
    value = onnx.numpy_helper.from_array(np.zeros((4, 4), np.float16))
    path = tmp_path / "c.onnx"
    onnx.save(
        onnx_files.model([helper.make_node("Constant", [], ["y"], value=value)], {}, {"y": [4, 4]}, dtype=10), path
    )
    assert stored_format(path) == "float16"


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("INT16", "int16"),
        ("UINT2", "int2"),
        ("FLOAT8E5M2", "float8"),
        ("FLOAT4E2M1", "float4"),
        ("BFLOAT16", "bfloat16"),
    ],
)
@pytest.mark.parametrize("within", [True, False])
def test_every_format_of_weights_is_known_within_functions_too(kind, told, within, tmp_path):
    weights = helper.make_tensor("w", onnx.TensorProto.DataType.Value(kind), [4, 4], [1.0 if "F" in kind else 1] * 16)
    scales = onnx.numpy_helper.from_array(np.ones(4, np.float32))
    nodes = [helper.make_node("Constant", [], [name], value=v) for name, v in (("w", weights), ("s", scales))]
    calls = [helper.make_node("F", [], ["w"], domain="own")] if within else nodes
    model = onnx_files.model(calls, {}, {"w": [4, 4]}, domains={"own": 1})
    if within:
        model.functions.append(helper.make_function("own", "F", [], ["w"], nodes, [helper.make_opsetid("", 17)]))
    onnx.save(model, tmp_path / "f.onnx")
    assert stored_format(tmp_path / "f.onnx") == told


@pytest.mark.parametrize(
    ("op", "bits", "told"),
    [
        ("MatMulNBits", 4, "int4"),
        ("MatMulNBits", 2, "int2"),
        ("MatMulNBits", 8, "int8"),
        ("MatMulBnb4", None, "float4"),
    ],
)
def test_weights_packed_into_bytes_are_told_by_their_own_bits(op, bits, told, tmp_path):
    options = {} if bits is None else {"bits": bits}
    node = helper.make_node(op, ["x", "w", "s"], ["y"], domain="com.microsoft", K=64, N=64, block_size=32, **options)
    weights = {"w": np.zeros((64, 2, 16), np.uint8), "s": np.ones(3000, np.float32)}  # fewer bytes than scales
    onnx.save(onnx_files.model([node], {"x": [1, 64]}, {"y": [1, 64]}, weights), tmp_path / "p.onnx")
    assert stored_format(tmp_path / "p.onnx") == (told if bits != 8 else "float32")


def test_no_weights_no_format(tmp_path):
    path = tmp_path / "r.onnx"
    onnx.save(onnx_files.model([helper.make_node("Relu", ["x"], ["y"])], {"x": [4]}, {"y": [4]}), path)
    assert stored_format(path) is None
    assert stored_format(tmp_path / "m.pt2") is None


@pytest.mark.parametrize(
    ("stored", "ran", "words"),
    [
        ("float16", {"float32": 5}, "float16 is storage only on cpu; all 5"),
        ("int8", {"float32": 5}, "not INT8 arithmetic on cpu"),
        ("int8", {"int8": 4, "float32": 1}, "4 of 5 multiplying operations ran in int8, 1 in float32"),
        ("int8", {"int8": 5}, None),
        ("float16", {"float16": 5}, None),
        ("float32", {"float32": 5}, None),
        ("float32", {"bfloat16": 5}, None),
        ("int8", {}, None),
        (None, {"float32": 1}, None),
    ],
)
def test_a_claim_is_held_against_what_ran(stored, ran, words):
    told = check_claim("m", stored, ran, "cpu")
    assert (words in told) if words else told is None


@pytest.mark.parametrize(("interval", "slower"), [([0.8, 0.95], True), ([0.95, 1.1], True), ([1.1, 1.2], False)])
def test_not_faster_beyond_doubt_is_said(interval, slower):
    entry = {"speedup": sum(interval) / 2, "speedup_ci95": interval, "batch_size": 4}
    told = slower_sentence("int8", "fp32", entry, ["one cause", "another"])
    assert (told is not None) is slower
    if told:
        bounds = f"95 % CI {interval[0]:.2f} to {interval[1]:.2f}"
        assert told.endswith(f"at batch size 4 ({entry['speedup']:.2f}x, {bounds}): one cause; another")


CAUSES = [
    ({"int8": 1, "float32": 2}, 0, ["avx512_vnni"], 5.0, ["2 of 3 multiplying operations run in float"]),
    ({"int8": 8}, 9, ["avx512_vnni"], 5.0, ["9 kernels only convert"]),
    ({"int8": 8}, 2, ["avx2"], 5.0, ["no VNNI, without which"]),
    ({"int8": 8}, 2, ["avx512_vnni"], 0.01, ["takes 0.01 ms"]),
    ({"int8": 8}, 2, ["avx512_vnni"], 5.0, []),
]


def latencies(took, slower=1.1):
    """The latency of a reference and of a variant."""
    return {"latency_p50_ms": took}, {"latency_p50_ms": took * slower}


@pytest.mark.parametrize(("ran", "conversions", "features", "took", "words"), CAUSES)
def test_causes_are_named_from_what_ran(ran, conversions, features, took, words):
    variant = {"arithmetic": ran, "num_conversions": conversions}
    told = slower_causes(variant, latencies(took), {"provider": "cpu", "features": features})
    assert len(told) == len(words)
    assert all(word in text for word, text in zip(words, told, strict=True))


def test_calls_of_kernels_are_no_cause_of_ten_times_as_long():
    where = {"provider": "cpu", "features": ["avx512_vnni"]}
    assert not slower_causes({"arithmetic": {"int8": 8}}, latencies(0.1, slower=10), where)


@pytest.mark.parametrize(("provider", "features", "told"), [
    ("cpu", ["avx2"], True), ("cpu", ["avx2", "avx_vnni"], False), ("openvino", ["avx2"], False),
])  # fmt: skip
def test_where_sums_are_exact_in_slower_kernels_only_it_is_told_what_to_do(provider, features, told):
    variant = {"arithmetic": {"int8": 8}, "exact_sums": True}
    where = {"provider": provider, "features": features}
    (cause,) = slower_causes(variant, latencies(5.0), where) or [""]
    assert ("no VNNI" in cause and "where an output layer shares an embedding table" in cause) is told


TARGETS = [("openvino", "cpu", True), ("openvino", "openvino", False), ("ort-cpu", "cpu", False), (None, "cpu", False)]
TARGETS += [("ort-cpu", "openvino", True), ("ort-cpu", "torch", False)]


@pytest.mark.parametrize(("target", "provider", "elsewhere"), TARGETS)
def test_a_file_for_another_runtime_is_sent_there(target, provider, elsewhere):
    where = {"provider": provider, "features": ["avx512_vnni"], "target": target}
    told = slower_causes({"arithmetic": {"int8": 8}}, latencies(5.0), where)
    made_for = str(target).removeprefix("ort-")
    assert told == [f"it was quantized for {made_for}, where --provider {made_for} measures it"] * elsewhere


@pytest.mark.parametrize(("interval", "fails"), [([0.8, 0.95], True), ([0.95, 1.1], False), ([1.1, 1.2], False)])
def test_slower_beyond_doubt_fails_unless_allowed(interval, fails):
    timed = {"speedup": 0.9, "speedup_ci95": interval, "batch_size": 1}
    note = "int8 is not faster than fp32 at batch size 1 (0.90x): why"
    variants = {"fp32": {"latency": [], "stored": "float32"}, "int8": {"latency": [timed]}}
    result = {"reference": "fp32", "variants": variants, "notes": [note, "another"]}
    require_not_slower(result, allow=True)
    if not fails:
        require_not_slower(result, allow=False)
        return
    with pytest.raises(ContractError, match=r"got int8 is not faster.*: why; leave what is slow in float") as error:
        require_not_slower(result, allow=False)
    assert error.value.exit_code == 3


def test_a_float_file_is_not_int8_by_its_name_and_nothing_is_slower_than_itself():
    timed = {"speedup": 0.9, "speedup_ci95": [0.8, 0.95], "batch_size": 1}
    plain = {"latency": [timed], "stored": "float32", "arithmetic": {"float32": 3}}
    half = plain | {"arithmetic": {"float32": 1, "int8": 2}}  # most of its weights were left in float
    unknown = {"latency": [timed], "stored": None}
    for reference, entry, wanted in ((plain, plain, False), (plain, half, True), (plain, unknown, True)):
        assert is_integer("int8_b", entry, reference) is wanted
    assert not is_integer("int8", half, half)


@pytest.mark.parametrize(("other", "fails"), [("float32", True), ("int8", False)])
def test_a_file_of_any_name_is_int8_by_what_it_holds(other, fails):
    timed = {"speedup": 0.9, "speedup_ci95": [0.8, 0.95], "batch_size": 1}
    variants = {"a": {"latency": [], "stored": other}, "b": {"latency": [timed], "stored": "int8"}}
    result = {"reference": "a", "variants": variants, "notes": [slower_sentence("b", "a", timed, ["why"])]}
    if not fails:
        require_not_slower(result, allow=False)
        return
    with pytest.raises(ContractError, match="got b is not faster than a") as caught:
        require_not_slower(result, allow=False)
    assert caught.value.details is result  # the figures of files are in no run directory


def test_a_simulation_is_no_claim_of_speed():
    """PyTorch as it is computes the quantize and dequantize operators in float, which a compiler turns to integers."""
    timed = {"speedup": 0.4, "speedup_ci95": [0.3, 0.5], "batch_size": 1, "latency_p50_ms": 1.0}
    plain = {"latency": [timed], "elsewhere": [], "stored": "float32", "arithmetic": {"float32": 3}}
    variants = {"fp32": plain, "int8": plain | {"stored": "int8"}}
    notes = {p: _notes(variants, BenchmarkConfig(provider=p), "fp32", "ort-cpu") for p in ("torch", "torch-compile")}
    assert notes["torch"] == [
        "int8: simulated in float on torch, which tells nothing of its speed; --provider torch-compile does"
    ]
    require_not_slower({"reference": "fp32", "variants": variants, "notes": notes["torch"]}, allow=False)
    assert any(note.startswith("int8 is not faster") for note in notes["torch-compile"])
