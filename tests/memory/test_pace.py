"""Paces: work is counted as torch counts it, rates are a machine's, and estimates order what was measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from nets import FeedForward
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from qtool.memory import predict
from qtool.memory.pace import CASTS, Rates, StepWork, Work, measure, step_seconds
from qtool.memory.plan import plans
from qtool.models.vit import VisionTransformer
from qtool.recipe import TrainConfig
from qtool.steps.loop import task_loss
from qtool.tasks import load_task
from qtool.training.techniques import setup

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
LOSS = task_loss(load_task("classification"))
PLAIN = TrainConfig(device="cpu", batch_size=64, grad_clip=None)
H100 = Rates(28e-6, {torch.float32: 46e12, torch.bfloat16: 500e12, torch.float16: 500e12}, 2.5e12, gpu=True)
"""What the rungs of the measured ladder tell of that machine, and its data sheet of its memory."""
MEASURED = Path(__file__).parents[1] / "benchmarks" / "gpu_h100.json"


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 32), FeedForward(32))


def batch(size: int, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, *shape), torch.zeros(size, dtype=torch.int64)


def work_of(build: Callable[[], nn.Module], given: Any, config: TrainConfig) -> StepWork:
    return predict.predict(build, given, config, prepare=setup, loss=LOSS).work


@pytest.mark.parametrize("micro", [1, 4])
def test_floating_point_operations_are_those_that_torch_counts(micro: int) -> None:
    given = batch(64, 3, 8, 8)
    work = work_of(net, given, replace(PLAIN, micro_batches=micro))
    part = [t[: 64 // micro] for t in given]
    forward, both, model = FlopCounterMode(display=False), FlopCounterMode(display=False), net()
    with both:
        with forward:
            value = nn.functional.cross_entropy(model(part[0]), part[1])
        value.backward()
    assert work.passes == min(micro, 3)  # of alike micro-batches between the first and the last, one is run
    assert work.forward.flops == work.passes * forward.get_total_flops()
    assert work.backward.flops == work.passes * (both.get_total_flops() - forward.get_total_flops())
    assert work.update.flops == 0
    states = sum(4 * 4 * p.numel() for p in model.parameters())  # weights, gradients and two moments
    assert states <= work.update.num_bytes < 2 * states


def test_of_a_grouped_convolution_each_gradient_takes_what_its_result_does() -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 3, groups=8), nn.ConvTranspose2d(8, 4, 2, groups=4), nn.Flatten())
    work = work_of(lambda: model, batch(64, 8, 6, 6), PLAIN)
    first, second = 2 * 64 * 8 * 4 * 4 * 9, 2 * 64 * 8 * 4 * 4 * 4
    assert work.forward.flops == first + second
    assert work.backward.flops == first + 2 * second  # of the images no gradient is asked for


def test_attention_is_counted_on_a_cpu_too() -> None:
    model = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    length, width = 24, 16
    given = torch.randn(8, length, width), torch.zeros(8, dtype=torch.int64)
    work = predict.predict(
        lambda: model, given, replace(PLAIN, batch_size=8), prepare=setup,
        loss=lambda net, value, target: (net(value).square().sum(), 8.0),
    ).work  # fmt: skip
    products = 2 * 8 * length * width * (4 * width + 2 * 32)
    scores = 2 * 2 * 8 * length * length * width
    assert work.forward.flops == products + scores
    assert work.backward.flops == 2 * products - 2 * 8 * length * width * 3 * width + 5 * scores // 2


def test_of_shapes_that_no_formula_knows_bytes_are_counted() -> None:
    work, query, key = Work(), torch.ones(2, 4, 16, 8), torch.ones(2, 3, 16, 8)
    work.count(torch.ops.aten._scaled_dot_product_flash_attention.default, (query, key, key), {}, (query,))
    assert work == Work(launches=1, num_bytes=2 * query.nbytes + 2 * key.nbytes)


def test_views_are_no_work_and_other_operators_are_their_bytes() -> None:
    work, x = Work(), torch.ones(4, 6)
    work.count(torch.ops.aten.view.default, (x, [24]), {}, x.view(24))
    assert work == Work()
    work.count(torch.ops.aten.add.Tensor, (x, x), None, x + x)
    work.count(torch.ops.aten.mm.default, (x, x.T), None, x @ x.T)
    assert work == Work(launches=2, flops=2 * 4 * 4 * 6, num_bytes=3 * x.nbytes)


def test_rates_are_measured_and_no_random_number_is_drawn() -> None:
    before = torch.get_rng_state()
    rates = measure(torch.device("cpu"), ["bf16-mixed"])
    assert torch.equal(torch.get_rng_state(), before)
    assert rates.flops.keys() == {torch.float32, torch.bfloat16}
    assert rates.flops[torch.bfloat16] <= rates.flops[torch.float32]
    assert 1e-7 < rates.launch < 1e-2
    assert min(rates.bandwidth, *rates.flops.values()) > 1e7
    assert not rates.gpu


def test_a_gpu_works_while_the_host_launches_and_a_cpu_does_not() -> None:
    work = Work(launches=100, flops=2e9, num_bytes=1e6)
    rates = Rates(1e-5, {torch.float32: 1e12}, 1e9, gpu=True)
    assert rates.seconds(work, torch.float32) == pytest.approx(3e-3)
    assert rates.seconds(replace(work, launches=400), torch.float32) == pytest.approx(4e-3)
    assert replace(rates, gpu=False).seconds(work, torch.float32) == pytest.approx(4e-3)


def test_a_step_on_a_cpu_is_its_passes_and_its_update() -> None:
    one = {torch.float32: 1.0, torch.bfloat16: 1.0}
    rates, work = Rates(1.0, one, 1.0, gpu=False), StepWork(Work(10, 100, 0), Work(20, 200, 0), Work(5, 0, 7), passes=1)
    for changes, expected in (
        ({}, 30 + 300 + 12),
        ({"micro_batches": 4}, 4 * 30 + 300 + 12),
        ({"activation_checkpointing": True}, 40 + 400 + 12),
        ({"precision": "bf16-mixed"}, CASTS * 30 + 300 + 12),
    ):
        assert step_seconds(replace(PLAIN, **changes), PLAIN, work, rates) == pytest.approx(expected), changes
    begun, thrice = replace(PLAIN, micro_batches=8), replace(work, passes=3)  # three micro-batches stand for all
    assert step_seconds(begun, begun, thrice, rates) == pytest.approx(8 / 3 * 330 + 12)
    more = replace(begun, micro_batches=32)
    assert step_seconds(more, begun, thrice, rates) == pytest.approx(32 / 3 * (30 + 75) + 12)


@pytest.fixture(scope="module")
def vit() -> StepWork:
    """Of a ViT-L/16's first step, without its update, which makes the states: of 24 blocks, which are all alike."""

    def of(layers: int) -> StepWork:
        shape: dict[str, int] = {"image": 224, "patch": 16, "width": 1024, "heads": 16, "hidden": 4096}
        return work_of(lambda: VisionTransformer(10, layers=layers, **shape), batch(64, 3, 224, 224), PLAIN)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(predict, "STEPS", 1)
        one, two = of(1), of(2)
    parts = ((one.forward, two.forward), (one.backward, two.backward))
    return StepWork(*(23 * second + -22 * first for first, second in parts), passes=1)


def test_the_ladder_that_was_measured_is_estimated(vit: StepWork) -> None:
    """Within a factor of 1.5: what a choice hangs on, passes that wait for the host, is a factor of 3."""
    parts = json.loads(MEASURED.read_text(encoding="utf-8"))["parts"]
    took = {}
    for name, share, changes in (
        ("ladder/0", 1, {}),
        ("ladder/1", 1, {"precision": "16-mixed"}),
        ("ladder/3", 4, {"precision": "bf16-true"}),
        ("ladder/4", 4, {"precision": "bf16-true", "micro_batches": 4}),
    ):
        base = replace(PLAIN, batch_size=64 // share, precision="bf16-true" if share > 1 else "32-true")
        less = 2 * share if share > 1 else 1  # bytes are half as many in bfloat16
        both = (vit.forward, vit.backward)
        work = StepWork(*(Work(one.launches, one.flops / share, one.num_bytes / less) for one in both), passes=1)
        assert parts[name]["config"]["batch_size"] == base.batch_size
        seconds = step_seconds(replace(base, **changes), base, work, H100)  # type: ignore[arg-type]
        took[name] = seconds / base.batch_size * 1e3
        assert took[name] == pytest.approx(parts[name]["ms_per_image"], rel=0.5), name
    assert took["ladder/4"] > 2.5 * took["ladder/3"]
    assert took["ladder/0"] > 5 * took["ladder/1"]


def test_where_passes_wait_for_the_host_checkpointing_comes_before_small_ones(vit: StepWork) -> None:
    pinned = ["optimizer", "step_in_backward", "grad_clip"]

    def order(rates: Rates) -> list[str]:
        made = plans(PLAIN, pinned, lambda _: True, lambda config: step_seconds(config, PLAIN, vit, rates))
        return [" ".join(f"{key}={value}" for key, value in changes.items()) for _, _, changes, _ in made]

    found = order(H100)
    assert found[0] == "precision=bf16-mixed"
    assert found.index("precision=bf16-mixed activation_checkpointing=True") < found.index(
        "micro_batches=16 precision=bf16-mixed"
    )
    cpu = order(Rates(28e-6, dict.fromkeys(H100.flops, 1e11), 1e10, gpu=False))
    assert cpu[0] == ""
    assert cpu.index("micro_batches=16") < cpu.index("activation_checkpointing=True")
