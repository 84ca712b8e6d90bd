"""Memory by arithmetic: the figures that everyone quotes, the states of real optimizers, and texts with units."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from qtool.errors import UsageError
from qtool.memory import arithmetic
from qtool.memory.arithmetic import estimate, estimate_from, num_gpus, parse_bytes, parse_count, per_parameter
from qtool.recipe import OPTIMIZERS, PRECISIONS, TrainConfig
from qtool.training.techniques import setup

CPU_OPTIMIZERS = [name for name in OPTIMIZERS if not name.startswith(("paged", "torchao"))]


def test_a_billion_parameters_are_4_gb_and_24_to_train() -> None:
    result = estimate_from("1e9", TrainConfig())
    assert result["weights_gb"] == {"32-bit": 4, "16-bit": 2, "8-bit": 1, "4-bit": 0.5}
    training = result["training"]
    parts = [training[f"{name}_gb"] for name in ("weights", "gradients", "states", "activations")]
    assert parts == [4, 4, 8, 8]
    assert training["total_gb"] == 24
    assert training["num_gpus"] == 1


def test_every_optimizer_and_precision_has_a_cell() -> None:
    table = estimate(7e9, TrainConfig(), 80e9)["table"]
    assert [(cell["optimizer"], cell["precision"]) for cell in table] == [
        (o, p) for o in OPTIMIZERS for p in PRECISIONS
    ]
    totals = {(cell["optimizer"], cell["precision"]): cell["total_gb"] for cell in table}
    assert totals["adamw", "32-true"] == 7 * 24
    assert totals["adamw", "bf16-true"] == 7 * 12
    assert totals["adamw", "16-mixed"] == 7 * 20
    assert totals["sgd", "32-true"] == 7 * 20
    assert totals["adafactor", "32-true"] == 7 * 16
    assert totals["lion8bit", "bf16-true"] == pytest.approx(7 * (2 + 2 + 1 + 4 / 256 + 4))
    found = estimate(1e9, TrainConfig(optimizer="sgd", momentum=0.0), 80e9)
    asked = next(c for c in found["table"] if (c["optimizer"], c["precision"]) == ("sgd", "32-true"))
    assert asked["total_gb"] == found["training"]["total_gb"] == 16


def test_sizes_go_from_1_to_500_billion() -> None:
    sizes = estimate(1e9, TrainConfig(), 80e9)["sizes"]
    assert (sizes[0]["num_params"], sizes[-1]["num_params"]) == (1e9, 500e9)
    assert sizes[-1]["total_gb"] == 12_000
    assert sizes[-1]["num_gpus"] == 167  # 12,000 GB over 72 GB of each


@given(total=st.floats(1, 1e15), gpu=st.floats(1e6, 1e12))
def test_that_many_gpus_hold_it_and_one_fewer_does_not(total: float, gpu: float) -> None:
    count = num_gpus(total, gpu)
    usable = gpu * (1 - arithmetic.RESERVE)
    assert count * usable >= total * (1 - 1e-9)
    assert count == 1 or (count - 1) * usable < total


@pytest.mark.parametrize("optimizer", CPU_OPTIMIZERS)
@pytest.mark.parametrize(("precision", "rounding"), [
    ("32-true", "nearest"), ("bf16-true", "nearest"), ("bf16-true", "stochastic"), ("bf16-true", "compensated"),
])  # fmt: skip
def test_weights_and_states_are_those_of_a_real_step(optimizer: str, precision: str, rounding: str) -> None:
    config = TrainConfig(optimizer=optimizer, precision=precision, rounding=rounding, device="cpu")
    torch.manual_seed(0)
    model = nn.Linear(256, 256, bias=False)
    with setup(model, config) as made:
        optimizer_ = made.make_optimizer(list(model.parameters()))
        model.weight.grad = torch.randn_like(model.weight)
        optimizer_.step()
        kept = _bytes(optimizer_) / model.weight.numel()
        weights = model.weight.element_size()
    each = per_parameter(config)
    compensation = 2 if rounding == "compensated" else 0
    assert weights + compensation == each.weights
    assert kept - compensation == pytest.approx(each.states, abs=0.05)  # rows, columns, step counts, code books


def _bytes(optimizer: Any) -> int:
    tensors = {}
    for part in (optimizer, getattr(optimizer, "inner", optimizer)):
        for state in part.state.values():
            tensors |= {id(v): v for k, v in state.items() if isinstance(v, torch.Tensor) and not k.startswith("qmap")}
    return sum(tensor.nbytes for tensor in tensors.values())


def test_flags_change_what_is_kept() -> None:
    plain = per_parameter(TrainConfig())
    assert per_parameter(TrainConfig(step_in_backward=True)) == replace(plain, gradients=0)
    assert per_parameter(TrainConfig(optimizer="sgd", momentum=0.0)) == replace(plain, states=0)


def test_the_table_of_moments_knows_every_optimizer() -> None:
    assert set(arithmetic._MOMENTS) == set(OPTIMIZERS)


@pytest.mark.parametrize(
    ("text", "value"), [("1e9", 1e9), ("7B", 7e9), ("350M", 350e6), ("1.5 b", 1.5e9), ("12", 12), ("1E+3", 1000)]
)
def test_counts(text: str, value: float) -> None:
    assert parse_count(text) == value


@pytest.mark.parametrize("text", ["", "B", "-1", "0", "1e400", "nan", "inf", "7X", "1e16"])
def test_bad_counts(text: str) -> None:
    with pytest.raises(UsageError, match="--params"):
        parse_count(text)


@pytest.mark.parametrize(
    ("text", "value"), [("80GiB", 80 * 2**30), ("24GB", 24e9), ("512mib", 512 * 2**20), ("1e9", 1e9), ("2 TB", 2e12)]
)
def test_amounts_of_memory(text: str, value: float) -> None:
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "GiB", "-3GB", "0", "80 gigs", "1e999GB"])
def test_bad_amounts_of_memory(text: str) -> None:
    with pytest.raises(UsageError, match="--gpu-memory"):
        parse_bytes(text)


@pytest.mark.parametrize(("options", "named"), [({"lora": 8}, "--lora"), ({"activation_checkpointing": True}, "--act")])
def test_what_the_arithmetic_does_not_know_is_refused(options: dict[str, object], named: str) -> None:
    with pytest.raises(UsageError, match=f"got {named}.*pass --model and --data"):
        estimate_from("1e9", TrainConfig(**options))  # type: ignore[arg-type]
    assert estimate_from("1e9", TrainConfig(step_in_backward=True, grad_clip=None))["training"]["gradients_gb"] == 0
