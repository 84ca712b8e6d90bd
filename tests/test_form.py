"""The quantized form: plans as plain data, graphs that survive storage to the bit, inputs checked by name."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qtool.errors import QtoolError, UsageError
from qtool.form import Plan, QuantizedModel, Unit, check_inputs, quantize_nodes
from qtool.graphs.programs import arguments, as_graph, program_of, save_graph, to_program
from qtool.graphs.pt2_files import load_program
from qtool.nested import call
from qtool.quantization.stage import quantize
from qtool.recipe import QuantizeConfig


class Net(nn.Module):
    """A convolution and a linear layer; a second input is added."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(3, 4, 3), nn.Linear(4, 5)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y = self.linear(torch.relu(self.conv(x)).mean((2, 3)))
        return y if bias is None else y + bias


X, BIAS = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(1)), torch.ones(6, 5)
INPUTS: dict[str, Any] = {"tensor": X, "tuple": (X, BIAS), "dict": {"bias": BIAS, "x": X}}


@pytest.fixture(scope="module", params=INPUTS)
def made(request: pytest.FixtureRequest) -> tuple[Any, QuantizedModel]:
    torch.manual_seed(0)
    inputs = INPUTS[request.param]
    return inputs, quantize(Net().eval(), QuantizeConfig(), example=inputs, calibration=[inputs])


def test_it_is_shown_in_one_line(made: tuple[Any, QuantizedModel]) -> None:
    total = 3 if isinstance(made[0], Tensor) else 4  # with the sum, whose second input is the model's own
    assert repr(made[1]) == f"QuantizedModel(target='ort-cpu', 3 of {total} units integer: see .plan)"


def test_it_is_called_as_the_model_is() -> None:
    torch.manual_seed(0)
    quantized = quantize(Net().eval(), QuantizeConfig(effort="fast"), example=(X, BIAS), calibration=[(X, BIAS)])
    expected = quantized((X, BIAS))
    for found in (quantized(X, BIAS), quantized(x=X, bias=BIAS), quantized({"bias": BIAS, "x": X})):
        assert torch.equal(found, expected)
    assert torch.equal(quantized(X.numpy(), BIAS.numpy()), expected)
    with pytest.raises(QtoolError, match=r"expected 2 input tensors \(x, bias\); got x, bias, labels; pass what"):
        quantized(x=X, bias=BIAS, labels=BIAS)
    with pytest.raises(
        QtoolError, match=r"the model's arguments \(x, bias\); got TypeError: .* unexpected .*'y'; call the items"
    ):
        quantized(y=X, bias=BIAS)
    with pytest.raises(UsageError, match="all by position or all by name; got some of both"):
        quantized(X, bias=BIAS)


def test_it_is_pickled_and_copied(made: tuple[Any, QuantizedModel]) -> None:
    inputs, quantized = made
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # also what torch says of its own trees where they are copied
        others = (pickle.loads(pickle.dumps(quantized)), copy.deepcopy(quantized))
    for other in others:
        assert torch.equal(other(inputs), quantized(inputs))
        assert (other.plan, other.ranges) == (quantized.plan, quantized.ranges)
        assert other.graph is not quantized.graph


def test_plan_goes_through_plain_data() -> None:
    units = (Unit("a.b", "conv", ("a.b", "a.c"), weight_bits=8), Unit("d", "softmax", integer=False, reason="none"))
    plan = Plan("ort-cpu", units, ("a note",))
    assert Plan.from_dict(plan.as_dict()) == plan
    assert plan.integer_units == units[:1]
    assert plan.float_units == units[1:]


def test_what_was_saved_computes_the_same_to_the_bit(made: tuple[Any, QuantizedModel], tmp_path: Path) -> None:
    inputs, quantized = made
    files = quantized.save(tmp_path)
    assert {name: path.name for name, path in files.items()} == {"int8": "int8.pt2", "float": "float.pt2"}
    loaded = QuantizedModel.load(tmp_path, quantized.plan)
    assert torch.equal(loaded(inputs), quantized(inputs))
    assert torch.equal(call(loaded.float_graph, inputs), call(quantized.float_graph, inputs))
    assert type(loaded.example) is type(inputs)
    assert torch.equal(loaded(loaded.example), quantized(inputs))
    units = [[node.meta["custom"]["unit"] for node in quantize_nodes(model.graph)] for model in (quantized, loaded)]
    assert units[0] == units[1]


def test_a_graph_that_was_stored_or_loaded_brings_its_program_until_it_is_changed(
    made: tuple[Any, QuantizedModel], tmp_path: Path
) -> None:
    quantized = made[1]
    quantized.save(tmp_path)
    assert program_of(quantized.graph, quantized.example) is program_of(quantized.graph, quantized.example)
    graph = QuantizedModel.load(tmp_path, quantized.plan).graph
    program = program_of(graph, quantized.example)
    assert program_of(graph, quantized.example) is program
    name, constant = next(iter(graph.named_buffers()))
    graph.register_buffer(name, constant.clone())
    assert program_of(graph, quantized.example) is not program
    graph.register_buffer(name, constant)
    assert program_of(graph, quantized.example) is program
    quantizer = quantize_nodes(graph)[0]
    quantizer.args = (quantizer.args[0], 2 * quantizer.args[1], *quantizer.args[2:])  # type: ignore[operator]
    graph.recompile()
    changed = program_of(graph, quantized.example)
    assert changed is not program
    assert torch.equal(as_graph(changed)(*arguments(made[0])[0], **arguments(made[0])[1]), call(graph, made[0]))


def test_a_stored_graph_is_small_and_holds_no_path_of_this_machine(
    made: tuple[Any, QuantizedModel], tmp_path: Path
) -> None:
    quantized = made[1]
    for path in quantized.save(tmp_path).values():
        data = path.read_bytes()
        assert str(Path(__file__).parent).encode() not in data
        assert len(data) < 60_000


def test_a_model_without_a_float_reference_is_saved_without_one(
    made: tuple[Any, QuantizedModel], tmp_path: Path
) -> None:
    quantized = made[1]
    alone = QuantizedModel(quantized.graph, quantized.plan, quantized.example)
    assert set(alone.save(tmp_path)) == {"int8"}
    assert QuantizedModel.load(tmp_path, quantized.plan).float_graph is None


def test_a_view_of_a_large_tensor_does_not_bring_its_storage(tmp_path: Path) -> None:
    graph = as_graph(to_program(Net().eval(), X))
    save_graph(graph, torch.randn(2000, 3, 8, 8)[:2], tmp_path / "view.pt2")
    assert (tmp_path / "view.pt2").stat().st_size < 60_000


@pytest.mark.parametrize(
    ("shape", "kind", "axes"),
    [
        ((4, 9), torch.int64, "1"), ((4, 9, 3), torch.float32, "1"), ((4, 3, 8, 9), torch.float32, "3"),
        ((4, 9), torch.float32, None), ((4, 1, 8, 8), torch.float32, None), ((4, 9), torch.int32, None),
    ],
)  # fmt: skip
def test_sizes_that_might_be_left_open_are_told(shape: tuple[int, ...], kind: torch.dtype, axes: str | None) -> None:
    like = {2: torch.zeros(2, 5, dtype=kind), 3: torch.zeros(2, 5, 3), 4: torch.zeros(2, 3, 8, 8)}[len(shape)]
    like = like.long() if kind == torch.int32 else like
    with pytest.raises(QtoolError) as caught:
        check_inputs(as_graph(to_program(nn.Flatten(), like)), torch.zeros(shape, dtype=kind), "data")
    assert str(caught.value).partition("--dynamic-axes ")[2] == (axes or "")


def test_outputs_come_without_gradients(made: tuple[Any, QuantizedModel]) -> None:
    inputs, quantized = made
    assert not quantized(inputs).requires_grad


@pytest.mark.parametrize("size", [1, 2, 5])
def test_the_batch_is_free_after_capture_from_one_sample(size: int) -> None:
    graph = as_graph(to_program(Net().eval(), X[:1]))
    assert graph(X[:size]).shape == (size, 5)


def test_an_argument_that_is_no_tensor_is_captured_as_it_is() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor, scale: float, pair: tuple[Tensor, int]) -> Tensor:
            return x * scale + pair[0] * pair[1]

    program = to_program(Scaled(), (torch.ones(2, 3), 2.0, (torch.ones(2, 3), 3)))
    assert torch.equal(as_graph(program)(torch.ones(4, 3), 2.0, (torch.ones(4, 3), 3)), torch.full((4, 3), 5.0))


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [(X, ((X,), {})), ([X, BIAS], ((X, BIAS), {})), ({"x": X}, ((), {"x": X}))],
)
def test_inputs_become_arguments(inputs: Any, expected: Any) -> None:
    assert arguments(inputs) == expected


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (X[:, :2], r"batch 3, 'x': expected float32 of N × 3 × 8 × 8; got float32 of 6 × 2 × 8 × 8"),
        (X[..., :7], r"'x': expected .*; got float32 of 6 × 3 × 8 × 7; use data of the size that"),
        (X[0], r"'x': expected .*; got float32 of 3 × 8 × 8"),
        (X.double(), r"'x': expected float32 of .*; got float64 of .*; use data of the type that"),
        ((X, BIAS), r"batch 3: expected 1 input tensors \(x\); got 2"),
    ],
)
def test_inputs_of_another_kind_are_told_apart_by_name(inputs: Any, message: str) -> None:
    graph = as_graph(to_program(Net().eval(), X))
    with pytest.raises(QtoolError, match=message):
        check_inputs(graph, inputs, "batch 3")


def test_inputs_given_by_name_may_come_in_any_order(made: tuple[Any, QuantizedModel]) -> None:
    inputs, quantized = made
    if isinstance(inputs, dict):
        backwards = dict(reversed(inputs.items()))
        assert torch.equal(quantized(backwards), quantized(inputs))
        with pytest.raises(QtoolError, match=r"inputs, 'x': expected float32 of N × 3 × 8 × 8"):
            quantized({**inputs, "x": X[:, :, :4]})
    elif isinstance(inputs, Tensor):
        with pytest.raises(QtoolError, match=r"inputs, 'x'"):
            quantized(X[:, :1])


def test_a_loaded_program_keeps_module_paths(made: tuple[Any, QuantizedModel], tmp_path: Path) -> None:
    quantized = made[1]
    program = load_program(quantized.save(tmp_path)["float"])
    paths = {
        list(n.meta["nn_module_stack"].values())[-1][0] for n in program.graph.nodes if "nn_module_stack" in n.meta
    }
    assert {"conv", "linear"} <= paths
