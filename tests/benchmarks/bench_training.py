"""How far quantized models are from FP32 before and after quantization-aware training, in simulated bits too.

    python tests/benchmarks/bench_training.py --model resnet --data fashion-mnist --weights RUN/model.safetensors
        [--setting "mode=qat weight_bits=4 activation_bits=4 step_size=learned epochs=2"]... [--train 10000]

Each setting is options of ``qtool.quantize`` as ``key=value``, quantize's and QAT's alike. Judged is the quantized
graph in PyTorch, which stands for the file where there is one: SQNR at the logits, KL divergence, agreement, and the
drop of top-1 with its 95 % interval, on the same test samples. ``--train`` takes the first so many training samples.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from qtool.system import allocator

allocator.tune()

import torch  # noqa: E402
from torch.utils.data import Subset  # noqa: E402

import qtool  # noqa: E402
from qtool.data.specs import batches, load_data  # noqa: E402
from qtool.evaluate import compare  # noqa: E402
from qtool.models.specs import load_model  # noqa: E402
from qtool.nested import call  # noqa: E402
from qtool.recipe_files import override  # noqa: E402

LOW = "weight_bits=4 activation_bits=4 ranges=mse weight_ranges=mse"
SETTINGS = ("mode=ptq", "mode=qat", f"{LOW} mode=ptq", f"{LOW} mode=qat step_size=learned epochs=2")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet")
    parser.add_argument("--data", default="fashion-mnist")
    parser.add_argument("--weights")
    parser.add_argument("--setting", action="append", metavar="OPTIONS")
    parser.add_argument("--train", type=int, help="training samples; all by default")
    parser.add_argument("--samples", type=int, help="test samples; all by default")
    options = parser.parse_args()
    torch.set_num_threads(1)
    data: Any = load_data(options.data)
    shape = data.train[0][0].shape
    model = load_model(options.model, num_classes=data.num_classes, in_channels=shape[0], weights=options.weights)
    test = Subset(data.test, range(min(len(data.test), options.samples or len(data.test))))
    train = Subset(data.train, range(min(len(data.train), options.train or len(data.train))))
    wanted = answers(model.eval(), test)
    targets = torch.cat([target for _, target in batches(test, 200)])
    for text in options.setting or SETTINGS:
        table: dict[str, Any] = {}
        for part in text.split():
            override(table, part)
        start = time.process_time()
        quantized = qtool.quantize(model, {"train": train, "test": test}, **table)
        seconds = time.process_time() - start
        show(text, compare(wanted, answers(quantized, test), targets), seconds)


def answers(model: Any, test: Any) -> torch.Tensor:
    """The outputs for every test sample."""
    with torch.no_grad():
        return torch.cat([call(model, inputs) for inputs, _ in batches(test, 200)])


def show(text: str, row: dict[str, Any], seconds: float) -> None:
    low, high = (100 * end for end in row["top1_drop_ci95"])
    print(
        f"{text}\n  SQNR {row['sqnr_db']:.2f} dB, KL {row['kl']:.5f}, agreement {100 * row['agreement']:.2f} %, drop "
        f"{100 * row['top1_drop']:.2f} points ({low:.2f} to {high:.2f}) of {row['num_samples']} samples, "
        f"{seconds:.0f} CPU s",
        flush=True,
    )


if __name__ == "__main__":
    main()
