"""What the loop costs over the same steps written by hand; prints the ratios of the times and of the peaks of memory.

    python tests/benchmarks/bench_loop.py [--steps 20] [--rounds 10] [--model resnet] [--device cpu]

Both train the built-in residual net on the same batches of 64 images of 28×28, with the same fused AdamW,
clipping and channels-last layout, both reading the loss after each step. One process, rounds alternating,
every step timed from the end of the one before it, in CPU seconds of this process or, on a GPU, by the clock; of all
steps of each, the tenth percentile is compared, since noise from neighbours only adds. Memory is what torch's
allocator has out at the most, in a run of its own.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import nn

from qtool.system import allocator

allocator.tune()

from qtool.memory.measure import allocations, highest_sum  # noqa: E402
from qtool.models.specs import load_model  # noqa: E402
from qtool.recipe import TrainConfig  # noqa: E402
from qtool.steps.loop import fit  # noqa: E402
from qtool.steps.order import batch_plan  # noqa: E402
from qtool.steps.step import learning_rate  # noqa: E402
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
    device = torch.device(config.device)
    model.to(device).to(memory_format=torch.channels_last).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), config.learning_rate, weight_decay=config.weight_decay, fused=True
    )
    plan = batch_plan(len(data), config.batch_size, 0, 0)
    for step, positions in enumerate(plan):
        images, targets = data.images[positions], data.targets[positions].to(device)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step, len(plan))
        optimizer.zero_grad()
        placed = images.to(device, memory_format=torch.channels_last)
        loss = nn.functional.cross_entropy(model(placed), targets)
        loss.backward()
        loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        tick()


def compare(name: str, device: str, steps: int, rounds: int) -> dict[str, float]:
    """Milliseconds of a step and peak memory of both, and the ratios of qtool's to the bare loop's."""
    config = TrainConfig(epochs=1, device=device)
    data = Images(steps * config.batch_size)
    clock = time.process_time if device == "cpu" else time.perf_counter
    seconds: dict[str, list[float]] = {"bare": [], "qtool": []}
    found: dict[str, float] = {}
    for _ in range(rounds):
        for which, train in (("bare", bare), ("qtool", ours)):
            ticks: list[float] = []
            model = load_model(name, num_classes=10, in_channels=1, weights=None)
            train(model, data, config, lambda *at, ticks=ticks: ticks.append(clock()))
            seconds[which] += [after - before for before, after in itertools.pairwise(ticks)]
    for which, train in (("bare", bare), ("qtool", ours)):
        found[f"{which}_ms"] = sorted(seconds[which])[len(seconds[which]) // 10] * 1e3
        found[f"{which}_peak_mib"] = peak(train, name, data, config) / 2**20
    ratios = {f"{what}_ratio": found[f"qtool_{what}"] / found[f"bare_{what}"] for what in ("ms", "peak_mib")}
    return found | ratios


def peak(train: Callable[..., None], name: str, data: Images, config: TrainConfig) -> int:
    """Bytes that torch's allocator has out at most, model included."""

    def run() -> None:
        train(load_model(name, num_classes=10, in_channels=1, weights=None), data, config, lambda *at: None)

    if config.device == "cpu":
        return highest_sum(allocations(run)[0])
    torch.cuda.reset_peak_memory_stats()
    run()
    return torch.cuda.max_memory_allocated()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--model", default="resnet")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    options = parser.parse_args()
    found = compare(options.model, options.device, options.steps, options.rounds)
    for name in ("bare", "qtool"):
        print(f"{name:6} {found[f'{name}_ms']:8.2f} ms per step, peak {found[f'{name}_peak_mib']:8.2f} MiB")
    print(f"ratio qtool / bare: {found['ms_ratio']:.4f} of the time, {found['peak_mib_ratio']:.4f} of the memory")


if __name__ == "__main__":
    main()
