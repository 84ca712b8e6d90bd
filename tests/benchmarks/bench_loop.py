"""What the loop costs over the same steps written by hand; prints the ratio of the times.

    python tests/benchmarks/bench_loop.py [--steps 20] [--rounds 10] [--model resnet]

Both train the built-in residual net on the same batches of 64 images of 28×28, with the same fused AdamW,
clipping and channels-last layout, both reading the loss after each step. One process, rounds alternating,
every step timed from the end of the one before it in CPU seconds of this process; of all steps of each,
the tenth percentile is compared, since noise from neighbours only adds.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import nn

from qtool import allocator

allocator.tune()

from qtool.loop import fit  # noqa: E402
from qtool.models import load_model  # noqa: E402
from qtool.order import batch_plan  # noqa: E402
from qtool.recipe import TrainConfig  # noqa: E402
from qtool.step import learning_rate  # noqa: E402
from qtool.tasks import load_task  # noqa: E402
from qtool.training.techniques import setup  # noqa: E402


class Images:
    def __init__(self, count: int) -> None:
        self.images, self.targets = torch.randn(count, 1, 28, 28), torch.randint(0, 10, (count,))

    def __len__(self) -> int:
        return len(self.targets)

    def batch(self, positions: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images[positions], self.targets[positions]


def ours(model: nn.Module, data: Images, config: TrainConfig, tick: Callable[..., None]) -> None:
    with setup(model, config, data.images[:2]) as made:
        parts = SimpleNamespace(train=data, validation=None)
        fit(model, parts, load_task("classification"), config, setup=made, progress=tick)


def bare(model: nn.Module, data: Images, config: TrainConfig, tick: Callable[..., None]) -> None:
    model.to(memory_format=torch.channels_last).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), config.learning_rate, weight_decay=config.weight_decay, fused=True
    )
    plan = batch_plan(len(data), config.batch_size, 0, 0)
    for step, positions in enumerate(plan):
        images, targets = data.images[positions], data.targets[positions]
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step, len(plan))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images.contiguous(memory_format=torch.channels_last)), targets)
        loss.backward()
        loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        tick()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--model", default="resnet")
    options = parser.parse_args()
    config = TrainConfig(epochs=1, device="cpu")
    data = Images(options.steps * config.batch_size)
    steps: dict[str, list[float]] = {"bare": [], "qtool": []}
    for _ in range(options.rounds):
        for name, train in (("bare", bare), ("qtool", ours)):
            ticks: list[float] = []
            model = load_model(options.model, num_classes=10, in_channels=1, weights=None)
            train(model, data, config, lambda *at, ticks=ticks: ticks.append(time.process_time()))
            steps[name] += [after - before for before, after in itertools.pairwise(ticks)]
    best = {name: sorted(times)[len(times) // 10] for name, times in steps.items()}
    for name, seconds in best.items():
        print(f"{name:6} {seconds * 1e3:8.2f} CPU ms per step")
    print(f"ratio qtool / bare: {best['qtool'] / best['bare']:.4f}")


if __name__ == "__main__":
    main()
