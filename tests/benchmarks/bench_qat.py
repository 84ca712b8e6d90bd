"""What a step of quantization-aware training costs: time and kept activations over those of the float model's step.

    python tests/benchmarks/bench_qat.py [--model tests/nets.py:small_resnet]... [--batch-size 64] [--size 32]

A step is a forward pass, a cross-entropy, a backward pass and SGD on random images. The float model's, qtool's with
observed and with learned ranges, and that of torchao's pt2e with its quantizer for x86 take turns in one process,
with one thread; printed is the ratio of the least times. *Kept* are the bytes that autograd keeps from the
forward pass, each piece of memory once. torchao's own quantizer leaves more in float: it has fewer values to round.
"""

from __future__ import annotations

import argparse
import copy
import time
import warnings
from collections.abc import Callable
from typing import Any

from qtool.system import allocator

allocator.tune()

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from qtool.models.specs import load_model  # noqa: E402
from qtool.quantization.stage import quantize  # noqa: E402
from qtool.recipe import QatConfig, QuantizeConfig  # noqa: E402

MODELS = ("tests/nets.py:small_resnet", "tests/nets.py:small_mobilenet", "tests/nets.py:mobilenet_v2")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--size", type=int, default=32, help="pixels")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    x = torch.randn(options.batch_size, 3, options.size, options.size, generator=torch.Generator().manual_seed(0))
    for name in options.model or MODELS:
        torch.manual_seed(0)
        model = load_model(name, num_classes=10, in_channels=3)
        forms = {
            "float": model.train(),
            "qtool": ours(model, x, "observed"),
            "qtool, learned": ours(model, x, "learned"),
        }
        forms["torchao"] = torchaos(model, x)
        show(name, measure(forms, x, options.rounds))


class Prepared(Exception):
    """Ends a quantization where training would begin."""


def ours(model: nn.Module, x: Tensor, step_size: Any) -> nn.Module:
    """qtool's model as it is trained."""

    def stop(graph: Any, hooks: Any, _: Any) -> None:
        hooks.mode(graph, True)
        raise Prepared(graph)

    try:
        quantize(
            copy.deepcopy(model).eval(), QuantizeConfig(mode="qat"), example=x[:4], calibration=[x],
            tuning=QatConfig(distill=False, step_size=step_size, device="cpu"), qat=stop,
        )  # fmt: skip
    except Prepared as prepared:
        found: nn.Module = prepared.args[0]
        return found
    raise AssertionError("nothing was trained")


def torchaos(model: nn.Module, x: Tensor) -> nn.Module:
    """torchao's, by its own quantizer for x86."""
    from torchao.quantization.pt2e import move_exported_model_to_train
    from torchao.quantization.pt2e.quantize_pt2e import prepare_qat_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = torch.export.export(copy.deepcopy(model).train(), (x,)).module()
        quantizer = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config(is_qat=True))
        prepared: nn.Module = prepare_qat_pt2e(graph, quantizer)
        return move_exported_model_to_train(prepared)  # type: ignore[no-any-return]


def measure(forms: dict[str, nn.Module], x: Tensor, rounds: int) -> dict[str, tuple[float, int]]:
    """Least seconds of a step, and bytes kept."""
    target = torch.arange(len(x)) % 10
    steps = {name: stepper(form, x, target) for name, form in forms.items()}
    best = dict.fromkeys(forms, float("inf"))
    for round_ in range(rounds + 2):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if round_ >= 2:
                best[name] = min(best[name], time.perf_counter() - start)
    return {name: (best[name], kept(form, x)) for name, form in forms.items()}


def stepper(model: nn.Module, x: Tensor, target: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), target).backward()
        optimizer.step()

    return step


def kept(model: nn.Module, x: Tensor) -> int:
    """The bytes that autograd keeps from a forward pass, parameters apart."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found: dict[int, int] = {}

    def pack(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        output = model(x)
    del output
    return sum(found.values())


def show(name: str, figures: dict[str, tuple[float, int]]) -> None:
    seconds, size = figures["float"]
    print(f"\n{name}: a float step takes {1e3 * seconds:.1f} ms and keeps {size / 2**20:.1f} MiB")
    for form, (time_, kept_) in figures.items():
        if form != "float":
            print(f"  {form:16}{time_ / seconds:6.2f}x the time{kept_ / size:6.2f}x the kept activations")


if __name__ == "__main__":
    main()
