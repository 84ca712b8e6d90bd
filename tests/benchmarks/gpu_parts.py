"""The measurements of ``bench_gpu.py``: functions of options that return plain values, each run in a process alone.

GB are 10⁹ bytes. ``peak_gb`` is what tensors took (``torch.cuda.max_memory_allocated``), ``reserved_gb`` what the
allocator held for them (``max_memory_reserved``), which is what the published ladder tells.
"""

from __future__ import annotations

import contextlib
import fcntl
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import qtool
from qtool.memory import pace
from qtool.memory.pace import StepWork, Work, step_seconds
from qtool.recipe import TrainConfig, as_dict
from qtool.runtimes import ort
from qtool.runtimes import torch as compiler
from qtool.stages.ladder import configs, load_ladder
from qtool.stages.memory import predict_memory, trained
from qtool.system.devices import resolve_device

HERE = Path(__file__).resolve().parent
LADDER = HERE.parents[1] / "examples" / "memory_ladder_vit_l16.toml"
GB = 10**9
IMAGES = 1024
"""Images that the rounding of weights is learned on."""
ROUNDINGS: dict[str, tuple[str, ...]] = {"calibration": (), **{name: (name,) for name in ("gptq", "adaround", "brecq")}}
EPOCH = 45_000
"""Images in an epoch of the published ladder."""
NETWORKS = ("vit_b_16", "resnet50")
PROVIDERS = {"torch": "ort-cpu", "torch-compile": "ort-cpu", "cuda": "ort-cpu", "tensorrt": "tensorrt"}
"""What runs the INT8 files, and the placement they are made for."""
MODES = {"default": compiler.ON_A_GPU, "graphs": compiler.ON_A_GPU | {"triton.cudagraphs": True}}
"""What inductor is told when it compiles for the comparison of INT8 with FP16: as qtool does, and CUDA graphs too."""
LEAST: dict[str, Any] = {
    "precision": "bf16-true", "rounding": "stochastic", "optimizer": "adamw8bit", "step_in_backward": True,
    "grad_clip": None, "activation_checkpointing": True,
}  # fmt: skip
"""What the rung below the published ladder takes."""
TECHNIQUES: dict[str, dict[str, Any]] = {
    "compile": {"compile": True, "precision": "bf16-mixed"},
    "paged-adamw8bit": {"optimizer": "paged-adamw8bit"},
    "lion8bit": {"optimizer": "lion8bit"},
    "adafactor": {"optimizer": "adafactor"},
    "compensated": {"precision": "bf16-true", "rounding": "compensated"},
    "checkpointing": {"activation_checkpointing": True},
    "activation-offload": {"activation_offload": True},
    "weight-offload": {"strategy": "fsdp", "weight_offload": True},
    "fsdp-alone": {"strategy": "fsdp", "precision": "bf16-mixed"},
    "lora": {"lora": 8},
    "qlora": {"lora": 8, "lora_base": "nf4"},
    "16-true": {"precision": "16-true"},
    "least-compiled": {**LEAST, "batch_size": 30, "compile": True},
}
RUNGS: dict[str, dict[str, Any]] = {
    "32-true": {},
    "16-mixed": {"precision": "16-mixed"},
    "16-true": {"precision": "16-true"},
    "bf16-true": {"precision": "bf16-true"},
    "bf16-true, stochastic": {"precision": "bf16-true", "rounding": "stochastic"},
    "bf16-true, compensated": {"precision": "bf16-true", "rounding": "compensated"},
    "AdamW in the least memory": LEAST,
    "SGD": {"optimizer": "sgd", "learning_rate": 0.05},
}  # fmt: skip
"""What the accuracy of a training is compared over, on the embedded images."""


@dataclass(frozen=True)
class Options:
    """``data`` is a spec of real images or None; ``steps`` bounds a training (None: as the ladder says)."""

    out: Path
    device: str
    data: str | None
    steps: int | None
    quick: bool
    gpus: int

    @property
    def source(self) -> dict[str, str]:
        nets = HERE / "gpu_nets.py"
        if self.quick:
            return {"model": f"{nets}:small_vit", "data": f"{nets}:small_images"}
        return {"model": "vit_l_16", "data": self.data or f"{nets}:images"}

    @property
    def batch_size(self) -> int:
        return 8 if self.quick else 16


Part = Callable[[Options], dict[str, Any]]


def parts(options: Options) -> dict[str, Part]:
    """All measurements by name, in the order in which they are made: what is claimed first, should time run out."""
    count = len(load_ladder(LADDER).rungs)
    first = (count - 1, 1, 0)  # the rung below the ladder, and what it is compared with
    order = [*first, *(i for i in range(count) if i not in first)]
    found: dict[str, Part] = {f"ladder/{i}": partial(rung, number=i) for i in order}
    found |= {"update": update, "loop": loop}
    found |= {
        f"int8/{network}/{provider}": partial(int8, network=network, provider=provider)
        for provider in PROVIDERS for network in NETWORKS
    }  # fmt: skip
    found["compiled"] = compiled
    found |= {
        f"technique/{name}": partial(technique, changes=changes, alone=name == "least-compiled")
        for name, changes in TECHNIQUES.items()
    }
    found |= {f"group/{name}": partial(technique, changes=changes) for name, changes in _groups(options).items()}
    found |= {f"create/{how}": partial(create, on_device=how == "on-device") for how in ("host-first", "on-device")}
    found |= {f"rounding/{name}": partial(rounding, algorithms=names) for name, names in ROUNDINGS.items()}
    return found | {f"accuracy/{name}": partial(accuracy, changes=changes) for name, changes in RUNGS.items()}


@contextlib.contextmanager
def _device(options: Options, alone: bool, name: str = "device") -> Iterator[None]:
    """Waits for the device: ``alone`` where time is measured, else with what needs memory or the CPU."""
    with (options.out / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


def _groups(options: Options) -> dict[str, dict[str, Any]]:
    count = options.gpus if options.device == "cuda" else 2 * options.quick
    if count < 2:
        return {}
    shared = {"devices": count, "strategy": "fsdp", "precision": "16-mixed"}
    return {"fsdp": shared, "fsdp-offload": shared | {"weight_offload": True}, "ddp": shared | {"strategy": "ddp"}}


def rung(options: Options, number: int) -> dict[str, Any]:
    """One rung of the published ladder: prediction, peaks, time per image, and metrics where the images are real."""
    ladder = load_ladder(LADDER)
    config = replace(configs(ladder)[number], device=options.device)
    if options.quick:
        config = replace(config, batch_size=min(8, config.batch_size))
    found = _trained(options, replace(config, max_steps=options.steps), alone=True)
    return {"name": ladder.rungs[number].name, "published": ladder.rungs[number].published, **found}


def technique(options: Options, changes: dict[str, Any], *, alone: bool = False) -> dict[str, Any]:
    """The same of some techniques on their own, at batch 16; times of those that have the device ``alone``."""
    shared = {"batch_size": options.batch_size, "grad_clip": None, "learning_rate": 5e-5, "device": options.device}
    return _trained(options, TrainConfig(**shared | {"max_steps": options.steps or 20} | changes), alone=alone)


def _trained(options: Options, config: TrainConfig, *, alone: bool) -> dict[str, Any]:
    with _device(options, alone=False):
        known = predict_memory(**options.source, config=config, train=True)
    with _device(options, alone):
        measured = trained({**options.source, "task": "classification"}, config)
    times = {}
    if alone:  # beside others a time tells nothing
        per_image = {key: measured[key] / config.batch_size for key in ("seconds_alone", "seconds_per_step")}
        times = {
            "ms_per_image": per_image["seconds_alone"] * 1e3,
            "ms_per_image_with_data": per_image["seconds_per_step"] * 1e3,
            "epoch_minutes": per_image["seconds_per_step"] * EPOCH / 60,
            "estimated_ms_per_image": _estimated(config, known["predicted"]["work"]) / config.batch_size * 1e3,
        }
    return {
        "config": as_dict(config),
        "predicted_gb": known["predicted"]["peak_bytes"] / GB,
        "peak_gb": measured["peak_bytes"] / GB,
        "reserved_gb": measured["held_bytes"] / GB,
        "error": known["predicted"]["peak_bytes"] / measured["peak_bytes"] - 1,
        **times,
        "loss": measured["loss"],
        "metrics": measured["metrics"] if options.data else None,
        "at": {key: known["predicted"][key] for key in ("moment", "module", "parts")},
    }


def _estimated(config: TrainConfig, work: dict[str, Any]) -> float:
    """The seconds of a step that a budget's choice would go by."""
    known = StepWork(*(Work(**work[phase]) for phase in ("forward", "backward", "update")), passes=work["passes"])
    return step_seconds(config, config, known, pace.measure(resolve_device(config.device), [config.precision]))


def _write_weights(spec: dict[str, str], file: Path) -> None:
    from safetensors.torch import save_file

    from qtool.source import open_source

    made = open_source(spec["model"], spec["data"], seed=0).model
    assert made is not None
    save_file(made.state_dict(), file.with_suffix(".part"))
    file.with_suffix(".part").replace(file)


def create(options: Options, on_device: bool) -> dict[str, Any]:
    """What loading a model's weights as bfloat16 takes: on the host first and moved, or created where it will be."""
    import torch

    from qtool.memory.measure import allocations, highest_sum
    from qtool.models.materialise import Target
    from qtool.source import open_source

    device, file, spec = resolve_device(options.device), options.out / "weights.safetensors", options.source
    if not file.exists():  # in a process of its own, whose resident set is not this one's
        writer = get_context("spawn").Process(target=_write_weights, args=(spec, file))
        writer.start()
        writer.join()
    target = Target(device, torch.bfloat16) if on_device else None
    kept: list[Any] = []

    def load() -> None:
        model = open_source(spec["model"], spec["data"], weights=file, seed=0, target=target).model
        assert model is not None
        kept.append(model if on_device else model.to(device).to(torch.bfloat16))

    torch.empty(1, device=device)  # what CUDA takes of the host for itself is no part of it
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with _device(options, alone=False):
        host, _ = allocations(load)
    found = {
        "weights_gb": sum(p.nbytes for p in kept[0].parameters()) / GB,
        "host_peak_gb": highest_sum(host) / GB,
        "host_resident_growth_gb": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / GB,
    }
    if device.type == "cuda":
        found["device_peak_gb"] = torch.cuda.max_memory_allocated(device) / GB
        found["device_after_gb"] = torch.cuda.memory_allocated(device) / GB
    return found


def update(options: Options) -> dict[str, Any]:
    """The update alone of a ViT-L block's weights in the least memory, fused and in widened copies: the device's ms.

    ``refused`` says why it is not fused there: the two were compared, and differ, or something failed.
    """
    import torch
    from torch import nn

    from qtool.training import fused_updates, optimizers
    from qtool.training.rounding import WideUpdates

    device, width = resolve_device(options.device), 64 if options.quick else 1024
    matrices = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    shapes = [*matrices, *((rows,) for rows, _ in matrices), *[(width,)] * 4]
    make = optimizers.bitsandbytes("AdamW8bit")(TrainConfig(learning_rate=5e-5))
    ways = []
    for fused in (True, False):
        torch.manual_seed(0)
        weights = [nn.Parameter(torch.randn(shape).bfloat16().to(device)) for shape in shapes]
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        ways.append(WideUpdates(weights, make, "stochastic"))
        ways[-1].fused &= fused
    with _device(options, alone=True):
        rounds = [[_device_ms(way.step, device, 2 if options.quick else 20) for way in ways] for _ in range(5)]
    fused_ms, widened_ms = (statistics.median(seen) for seen in zip(*rounds, strict=True))
    return {
        "weights": sum(weight.numel() for weight in weights),
        "refused": None if ways[0].fused else fused_updates.refusal(device),
        "fused_ms": fused_ms, "widened_ms": widened_ms, "widened_over_fused": widened_ms / fused_ms,
    }  # fmt: skip


def _device_ms(step: Callable[[], Any], device: Any, times: int) -> float:
    """Milliseconds that the device takes for a step; a GPU is kept busy until the host has asked for all of them."""
    import torch

    step()
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(times):
            step()
        return 1e3 * (time.perf_counter() - start) / times
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(10**9)  # cycles, half a second
    begin.record()
    for _ in range(times):
        step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / times


def loop(options: Options) -> dict[str, Any]:
    """The step loop beside the same steps written by hand: time and peak memory."""
    import bench_loop

    with _device(options, alone=True):
        return bench_loop.compare("resnet", options.device, *((3, 1) if options.quick else (50, 10)))


def int8(options: Options, network: str, provider: str) -> dict[str, Any]:
    """FP32, FP16 and INT8 files of one network, measured on one provider; one that is not there costs no time."""
    quick, in_onnx = options.quick, not provider.startswith("torch")
    if in_onnx:
        _require(provider, options.out)
    run = _quantized(options, network, PROVIDERS[provider], export=in_onnx)
    with _device(options, alone=True):
        found: dict[str, Any] = qtool.benchmark(
            run, out=run / provider, provider=provider, trust=True, batch_sizes=(1,) if quick else (1, 32),
            allow_slower=True, seconds=0.05 if quick else 2.0, samples=8 if quick else 64, device=options.device,
        )  # fmt: skip
    return found


def _quantized(options: Options, network: str, target: str, *, export: bool = False) -> Path:
    """The run of one network's INT8 files, made once for all parts; nothing is timed while that has the CPU."""
    run, nets = options.out / f"int8-{network}-{target}", HERE / "gpu_nets.py"
    names = ("small_vit", "small_images") if options.quick else (network, "images")
    model, data = (f"{nets}:{name}" for name in names)
    with _device(options, alone=True, name=run.name), _device(options, alone=False):
        qtool.quantize(model, data, out=run, target=target, calibration="train:16", trust=True, resume=True)
        if export:
            qtool.export(run, parity_samples=16, reference_samples=1, trust=True, resume=True)
    return run


def compiled(options: Options) -> dict[str, Any]:
    """ViT-B/16 in FP16 and INT8, compiled by PyTorch as each of MODES has it: milliseconds of a batch, in turns."""
    import torch

    from qtool.evaluate import sqnr_db

    run = _quantized(options, "vit_b_16", "ort-cpu")
    size, batches = (32, (2,)) if options.quick else (224, (32, 128))
    found: dict[str, Any] = {}
    for batch in batches:
        feeds = {"x": np.random.default_rng(0).standard_normal((batch, 3, size, size), np.float32)}
        with _device(options, alone=True):  # also what inductor tries out
            steps, results = [], []
            for told in MODES.values():
                for file, precision in (("float.pt2", "fp16"), ("int8.pt2", None)):
                    with mock.patch.object(compiler, "ON_A_GPU", told):
                        session = compiler.open_file(
                            run / file, provider="torch-compile", device=options.device, precision=precision
                        )
                        results.append(torch.from_numpy(session.run(feeds)[0]))
                    steps.append(session.prepare(feeds))
            times = _in_turns(steps, 3 if options.quick else 100)
        found[str(batch)] = {
            mode: {
                "fp16_ms": times[i], "int8_ms": times[i + 1], "fp16_over_int8": times[i] / times[i + 1],
                "sqnr_db": sqnr_db(results[i], results[i + 1]),
            }
            for i, mode in zip(range(0, len(times), 2), MODES, strict=True)
        }  # fmt: skip
    return found


def _in_turns(steps: list[Callable[[], None]], rounds: int) -> list[float]:
    """The median time of each, in milliseconds."""
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(rounds):
        for step, seen in zip(steps, times, strict=True):
            start = time.perf_counter()
            step()
            seen.append(1e3 * (time.perf_counter() - start))
    return [statistics.median(seen) for seen in times]


def _require(provider: str, folder: Path) -> None:
    """Raises ProviderError where no session comes out on a provider: a package of ONNX Runtime names some in vain."""
    import onnx

    ort.require(provider)
    value = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in "xy"]
    graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["x"], ["y"])], "one", value[:1], value[1:])
    opset = [onnx.helper.make_opsetid("", 17)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opset, ir_version=8), folder / "one.onnx")
    ort.open_file(folder / "one.onnx", provider=provider).close()


def rounding(options: Options, algorithms: tuple[str, ...]) -> dict[str, Any]:
    """ResNet-50 to W4A8 on the device over 1,024 images: seconds, those of capture (on the CPU), memory."""
    import torch
    from gpu_nets import Noise, resnet50

    from qtool.data.specs import batches
    from qtool.models.specs import load_model
    from qtool.quantization.capturing.float_form import float_form
    from qtool.quantization.stage import quantize
    from qtool.recipe import QuantizeConfig

    device, count = resolve_device(options.device), 16 if options.quick else IMAGES
    model = load_model("resnet", num_classes=10, in_channels=3).eval() if options.quick else resnet50()
    images = [inputs for inputs, _ in batches(Noise(count, 32 if options.quick else 224), 32, order=range(count))]
    steps = {"rounding_steps": options.steps} if options.quick and options.steps else {}
    config = QuantizeConfig(weight_bits=4, weight_ranges="mse", ranges="mse", algorithms=algorithms, device=str(device),
                            **steps)  # fmt: skip
    start = time.monotonic()
    float_form(model, images[0][:2])
    captured = time.monotonic()
    with _device(options, alone=True):
        waited = time.monotonic() - captured
        made = quantize(model, config, example=images[0][:2], calibration=images)
    found = {
        "quantize_seconds": time.monotonic() - captured - waited, "capture_seconds": captured - start, "images": count,
        "rounding_steps": config.rounding_steps, "notes": list(made.plan.notes),
    }  # fmt: skip
    if device.type == "cuda":
        found["peak_gb"] = torch.cuda.max_memory_allocated(device) / GB
    return found


def accuracy(options: Options, changes: dict[str, Any]) -> dict[str, Any]:
    """Top-1 of the built-in residual net on the embedded images, over seeds."""
    seeds, short = (range(1), {"max_steps": 2}) if options.quick else (range(3), {})
    with _device(options, alone=False):
        runs = [
            qtool.train("resnet", "fashion-mnist", seed=seed, device=options.device, **short, **changes)
            for seed in seeds
        ]
    top1 = [run.metrics["top1"] for run in runs]
    return {"top1": top1, "mean": sum(top1) / len(top1), "losses": [run.history.losses[-1] for run in runs]}
