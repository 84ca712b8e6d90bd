"""Common steps of sums and concatenations, against all ways of joining them and against what was really rounded."""

from __future__ import annotations

import itertools
import math
from typing import Any

import onnx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from onnx import numpy_helper
from torch import Tensor, nn

from qtool.evaluate import sqnr_db
from qtool.exporting.stage import export
from qtool.quantization import common_steps, stage
from qtool.quantization.common_steps import Joint, join_steps
from qtool.quantization.stage import convert, quantize
from qtool.recipe import ExportConfig, QuantizeConfig

PLAIN = QuantizeConfig(algorithms=None)


def noise(steps: dict[str, float], weights: dict[str, float], joints: list[Joint]) -> float:
    """What tensors with these steps add to the outputs, by the module's formula but for the 12."""
    total = 0.0
    by_result = {joint.result: joint for joint in joints}
    for name, step in steps.items():
        rounded = 1.0
        if name in by_result:
            same = [steps[operand] == step for operand in by_result[name].operands]
            shares = by_result[name].shares
            rounded = (
                sum(s for s, is_same in zip(shares, same, strict=True) if not is_same) if shares else not all(same)
            )
        total += weights[name] * rounded * step**2
    return total


def path(blocks: int) -> list[Joint]:
    """A residual path: each sum reads the one before it and a branch."""
    return [Joint(f"sum{i + 1}", (f"sum{i}" if i else "branch0", f"branch{i + 1}")) for i in range(blocks)]


def joined(
    steps: dict[str, float], weights: dict[str, float], joints: list[Joint], **most: float
) -> dict[str, frozenset[str]]:
    return join_steps(steps, weights, dict.fromkeys(steps, math.inf) | most, joints)


def common(steps: dict[str, float], groups: dict[str, frozenset[str]]) -> dict[str, float]:
    return {name: max(steps[n] for n in groups.get(name, {name})) for name in steps}


def named(joints: list[Joint]) -> list[str]:
    return list(dict.fromkeys(name for joint in joints for name in (joint.result, *joint.operands)))


@given(st.integers(1, 5), st.data())
def test_joined_steps_never_round_more_and_are_near_the_best_of_all_ways_to_join_them(blocks: int, data: Any) -> None:
    joints = path(blocks)
    draw = st.floats(0.01, 10)
    steps, weights = ({name: data.draw(draw) for name in named(joints)} for _ in range(2))
    groups = joined(steps, weights, joints)
    found = noise(common(steps, groups), weights, joints)
    assert all(groups[name] is group for group in groups.values() for name in group)
    ways = []
    for count in range(blocks + 1):
        for chosen in itertools.combinations(joints, count):
            tied: dict[str, frozenset[str]] = {}
            for joint in chosen:
                whole = frozenset().union(*(tied.get(n, {n}) for n in (joint.result, *joint.operands)))
                tied.update(dict.fromkeys(whole, whole))
            ways.append(noise(common(steps, tied), weights, joints))
    assert min(ways) * (1 - 1e-9) <= found <= ways[0] * (1 + 1e-9)
    assert found <= 2 * min(ways)


def test_a_path_of_equal_steps_is_rounded_once_a_branch() -> None:
    joints = path(3)
    steps, weights = (dict.fromkeys(named(joints), 1.0) for _ in range(2))
    groups = joined(steps, weights, joints)
    assert set(groups) == set(steps)
    assert noise(steps, weights, joints) == 4
    steps["sum3"] = 10.0  # a step of which 4 branches would cost more than one more rounding
    groups = joined(steps, weights, joints)
    assert set(groups) == {"sum1", "sum2", "branch0", "branch1", "branch2"}


def test_parts_of_a_concatenation_join_one_by_one_and_what_may_not_change_joins_nothing() -> None:
    joint = Joint("cat", ("small", "large"), (0.25, 0.75))
    steps = {"cat": 1.0, "small": 0.5, "large": 1.0}
    weights = {"cat": 1.0, "small": 10.0, "large": 0.75}
    assert set(joined(steps, weights, [joint])) == {"cat", "large"}
    assert not joined({"cat": 1.0, "small": 1.0}, weights, [Joint("cat", ("small", "fixed"))])


def test_a_tensor_with_a_side_of_a_few_steps_joins_no_coarser_ones() -> None:
    steps = {"sum1": 1.0, "branch0": 0.5, "branch1": 1.0}
    weights = dict.fromkeys(steps, 1.0)
    assert set(joined(steps, weights, path(1), branch0=1.0)) == set(steps)
    assert not joined(steps, weights, path(1), branch0=0.9)


class Block(nn.Module):
    def __init__(self, width: int, shortcut: nn.Module, activation: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 1))
        self.body[2].weight.data *= 4  # a branch as large as the path
        self.shortcut, self.activation = shortcut, activation

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.shortcut(x) + self.body(x))  # type: ignore[no-any-return]


class Path(nn.Module):
    """Blocks whose shortcut is a convolution, and one without; a concatenation of what each of them gives."""

    def __init__(self, width: int = 8, activation: type[nn.Module] = nn.Identity) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        shortcuts = (*(nn.Conv2d(width, width, 1) for _ in range(3)), nn.Identity())
        self.blocks = nn.ModuleList(Block(width, shortcut, activation()) for shortcut in shortcuts)
        self.last = nn.Conv2d(4 * width, 5, 1)
        for weight in (layer.weight for layer in self.modules() if isinstance(layer, nn.Conv2d)):
            step = weight.detach().abs().amax((1, 2, 3), keepdim=True) / 127
            weight.data = (weight / step).round() * step  # so that nothing but activations is rounded

    def forward(self, x: Tensor) -> Tensor:
        found = [self.stem(x)]
        for block in self.blocks:
            found.append(block(found[-1]))
        return self.last(torch.cat(found[1:], 1)).mean((2, 3))  # type: ignore[no-any-return]


def images(count: int = 64, seed: int = 0) -> Tensor:
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def scales(file: Any, name: str) -> list[Any]:
    """The scale and the zero point that each operator of a kind reads and gives, by the dequantizers around it."""
    model = onnx.load(file)
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    makers = {output: node for node in model.graph.node for output in node.output}
    found = []
    for node in (node for node in model.graph.node if node.op_type == name):
        readers = [n for n in model.graph.node if n.op_type == "QuantizeLinear" and n.input[0] == node.output[0]]
        pairs = [*(makers[value] for value in node.input), *readers]
        found.append([tuple(float(stored[value]) for value in pair.input[1:3]) for pair in pairs])
    return found


def test_sums_in_the_file_read_and_give_one_scale_and_round_nothing(tmp_path: Any) -> None:
    made = quantize(Path().eval(), PLAIN, example=images(2), calibration=[images()])
    assert any(note.startswith("ranges: 3 of 5 sums and concatenations") for note in made.plan.notes)
    export(made, tmp_path, ExportConfig(baselines=None), samples=[images(8)])
    sums = scales(tmp_path / "model.int8.onnx", "Add")
    assert [len({scale for scale, _ in pairs}) for pairs in sums] == [1, 1, 3, 1]
    assert len({zero_point for pairs in sums for _, zero_point in pairs}) > 1
    (*parts, whole) = scales(tmp_path / "model.int8.onnx", "Concat")[0]
    assert whole in parts  # bytes of these are copied


class Joined(nn.Module):
    """Joins what a ReLU lets by with the input, which goes below 0."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Conv2d(3, 8, 1), nn.Conv2d(11, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.cat((self.first(x).relu(), x), 1)).mean((2, 3))  # type: ignore[no-any-return]


def test_what_a_relu_lets_by_keeps_0_for_its_least_integer() -> None:
    made = convert(Joined().eval(), PLAIN, example=images(2), calibration=[images()])
    assert made.ranges["first"]["low"] == 0
    steps = [(made.ranges[name]["high"] - made.ranges[name]["low"]) / 255 for name in ("first", "x", "cat")]
    assert steps[0] == steps[1] == steps[2]


def test_what_a_leaky_relu_leaves_below_0_keeps_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for least in (common_steps.LEAST, 0.001):
        monkeypatch.setattr(common_steps, "LEAST", least)
        made = convert(Path(activation=nn.LeakyReLU).eval(), PLAIN, example=images(2), calibration=[images()])
        found.append(min(entry["low"] for name, entry in made.ranges.items() if name.endswith(".activation")))
    assert found[0] > -0.1  # a hundredth of what comes in
    assert found[1] < found[0]


@pytest.mark.parametrize("activation", [nn.Identity, nn.SiLU])
def test_outputs_come_nearer(monkeypatch: pytest.MonkeyPatch, activation: type[nn.Module]) -> None:
    model, test = Path(activation=activation).eval(), images(512, seed=1)
    found = []
    for share in (stage.share_steps, lambda *_: None):
        monkeypatch.setattr(stage, "share_steps", share)
        made = quantize(model, PLAIN, example=images(2), calibration=[images()])
        with torch.no_grad():
            found.append(sqnr_db(model(test), made(test)))
    assert found[0] > found[1] + 0.1


def test_ranges_hold_what_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {"example": images(2), "calibration": [images()]}
    made = convert(Path().eval(), PLAIN, **parts)
    monkeypatch.setattr(stage, "share_steps", lambda *_: None)
    alone = convert(Path().eval(), PLAIN, **parts)
    for name, entry in alone.ranges.items():
        step = (made.ranges[name]["high"] - made.ranges[name]["low"]) / 255
        assert made.ranges[name]["low"] <= entry["low"] + step
        assert made.ranges[name]["high"] >= entry["high"] - step
    assert made.ranges != alone.ranges


class Clamped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.clamp(min=-1.0)


@pytest.mark.parametrize(("activation", "end"), [(nn.ReLU6, "high"), (nn.Hardtanh, "high"), (Clamped, "low")])
def test_what_an_operator_limits_keeps_its_range(activation: type[nn.Module], end: str) -> None:
    made = convert(Path(activation=activation).eval(), PLAIN, example=images(2), calibration=[6 * images()])
    ends = {entry[end] for name, entry in made.ranges.items() if name.endswith(".add")}
    limit = {nn.ReLU6: 6.0, nn.Hardtanh: 1.0, Clamped: 1.0}[activation]
    assert all(abs(value) <= limit * (1 + 1e-6) for value in ends)
    assert not any("round nothing" in note for note in made.notes)


@pytest.mark.parametrize("ranges", ["minmax", "mse", "output"])
def test_other_ranges_are_each_tensors_own(ranges: str) -> None:
    config = QuantizeConfig(ranges=ranges, algorithms=None)
    made = convert(Path().eval(), config, example=images(2), calibration=[images()])
    assert not any("round nothing" in note for note in made.notes)
    steps = [entry["high"] - entry["low"] for name, entry in made.ranges.items() if "add" in name]
    assert len(set(steps)) == len(steps)


def test_symmetric_ranges_have_a_common_step_too() -> None:
    config = QuantizeConfig(algorithms=None, target="tensorrt")
    made = convert(Path().eval(), config, example=images(2), calibration=[images()])
    assert any("round nothing" in note for note in made.notes)
    (step,) = {made.ranges[name]["high"] for name in ("blocks.0.add", "blocks.0.shortcut", "blocks.0.body.2")}
    assert made.ranges["blocks.0.add"]["low"] == -step
