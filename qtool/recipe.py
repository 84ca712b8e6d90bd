"""Recipes: what each stage is told, as typed data.

One frozen dataclass per stage. The same fields are the keys of a TOML recipe, the flags of the
command line (``grad_clip`` is ``--grad-clip``) and the keyword arguments of the Python functions, so
there is one place to add an option and one text that explains it. Nothing here imports torch. How a recipe is
written in a file is in ``recipe_files.py``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any, Self

from qtool.errors import UsageError
from qtool.options import Checked, argument, as_toml, option
from qtool.system.machine import quick_precision, require_device

PRECISIONS = ("32-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true")
OPTIMIZERS = (
    "adamw",
    "sgd",
    "adafactor",
    "adamw8bit",
    "paged-adamw",
    "paged-adamw8bit",
    "lion8bit",
    "torchao-adamw8bit",
)
KERNELS = ("fused", "foreach", "loop")
ROUNDINGS = ("nearest", "stochastic", "compensated")
SEED = 2**63 - 1
"""The largest: torch's generators take no more."""
THREADS = 4096
"""The most: no machine has more hardware threads, and a runtime dies of many more."""
AUTO = 0
"""The batch size that is found by itself."""
PLANNED = (
    "micro_batches", "precision", "rounding", "optimizer", "step_in_backward", "grad_clip", "activation_checkpointing",
)  # fmt: skip
"""What a memory budget may change."""
LORA_BASES = ("full", "nf4")
RANGES = ("minmax", "moving-average", "percentile", "entropy", "mse", "output", "network")
ENGINES = ("pt2e", "torch.ao")
STRATEGIES = ("ddp", "fsdp")
MODES = ("ptq", "qat")
STEP_SIZES = ("observed", "learned")
METHODS = ("auto", "ptq", "given")
SENSITIVITIES = ("auto", "exact", "second-order")
TARGETS = ("ort-cpu", "tensorrt", "openvino", "auto", "ort-cuda")
WEIGHT_RANGES = ("minmax", "mse")
ALGORITHMS = (
    "pixels", "smooth", "equalize", "pairs", "analytic-bias", "gptq-small", "gptq", "adaround", "brecq", "renorm",
    "bias", "steps",
)  # fmt: skip
DEFAULT_ALGORITHMS = ("pixels", "smooth", "equalize", "pairs", "analytic-bias", "gptq-small")
"""What post-training quantization does unless told otherwise: files stay as fast. Without samples it does less."""
EFFORTS = ("fast", "best")
PROVIDERS = ("cpu", "cuda", "tensorrt", "openvino", "torch", "torch-compile")
BASELINES = ("fp32", "fp16")
VARIANTS = (*BASELINES, "int8")


@dataclass(frozen=True)
class TrainConfig(Checked):
    """How a model is fine-tuned. Field names are recipe keys and flags."""

    epochs: int = option(4, "passes over the training data", low=0)
    max_steps: int | None = option(None, "stop after this many optimizer steps, whatever the epochs", low=1)
    batch_size: int = option(64, "samples per optimizer step; auto: the largest that fits", low=1, words={"auto": AUTO})
    micro_batches: int = option(1, "split each batch into this many micro-batches (gradient accumulation)", low=1)
    precision: str = option(
        "32-true", "number formats of compute and weights; auto: bf16-mixed, or 32-true where that is quicker here",
        choices=PRECISIONS, here={"auto": quick_precision},
    )  # fmt: skip
    optimizer: str = option("adamw", "update rule", choices=OPTIMIZERS)
    optimizer_kernels: str = option(
        "fused", "how AdamW and SGD run: one kernel in all, one an operation, or one a weight and operation",
        choices=KERNELS,
    )  # fmt: skip
    learning_rate: float = option(2e-3, "peak learning rate", low=0)
    weight_decay: float = option(0.01, "decoupled weight decay (AdamW) or L2 (SGD)", low=0)
    momentum: float = option(0.9, "momentum of SGD", low=0)
    schedule: str = option("cosine", "learning rate after the warm-up", choices=("cosine", "constant"))
    warmup: float = option(0.05, "fraction of the steps that warm up linearly", low=0, high=1)
    grad_clip: float | None = option(1.0, "clip the global norm of the (unscaled) gradients to this", low=0)
    label_smoothing: float = option(0.0, "label smoothing of the cross-entropy", low=0, high=1)
    early_stopping: int | None = option(None, "stop after this many epochs without a better validation metric", low=1)
    channels_last: bool = option(True, "images in NHWC order, which convolution kernels prefer")
    rounding: str = option("nearest", "how updates become bf16-true weights", choices=ROUNDINGS)
    step_in_backward: bool = option(False, "update each weight as soon as its gradient is there, and free the gradient")
    activation_checkpointing: bool = option(False, "recompute each block's activations in the backward pass")
    activation_offload: bool = option(False, "keep activations in host memory until the backward pass")
    lora: int | None = option(None, "train adapters of this rank instead of the weights (LoRA)", low=1)
    lora_alpha: float = option(16.0, "the adapters' correction is scaled by this over their rank", low=0)
    lora_dropout: float = option(0.0, "dropout before the adapters", low=0, high=1)
    lora_targets: tuple[str, ...] | None = option(
        None, "ends of the names of the layers to adapt; by default all linear"
    )
    lora_trained: tuple[str, ...] | None = option(
        None, "ends of the names of modules to train in full beside the adapters: a new head (peft's modules_to_save)"
    )
    lora_base: str = option("full", "format of the frozen weights below the adapters", choices=LORA_BASES)
    memory_budget: str | None = option(
        None, "take the fastest techniques predicted to fit into this, such as 8GiB", unit="bytes"
    )
    keep: tuple[str, ...] | None = option(
        None, "what a memory budget leaves as it is; what is given by name it leaves anyway", choices=PLANNED
    )
    compile: bool = option(False, "compile the model with torch.compile")
    checkpoint_every: int | None = option(None, "also checkpoint every N optimizer steps (each epoch always)", low=1)
    device: str = option("auto", "cpu, cuda, cuda:1 …; auto takes CUDA where there is one")
    devices: int = option(1, "processes to train on, each with a GPU of its own (or a share of the CPU)", low=1)
    strategy: str = option("ddp", "each device has a copy of the model (ddp) or a shard (fsdp)", choices=STRATEGIES)
    reshard: bool = option(True, "with fsdp: free each block's gathered weights between forward and backward pass")
    weight_offload: bool = option(
        False, "with fsdp, also on one device: weights, gradients and optimizer state in host memory"
    )
    create_on_device: bool = option(
        False, "read --weights straight to the device in the precision of training: never twice in memory"
    )
    seed: int = option(0, "seed of initialisation, data order and dropout", low=0, high=SEED)

    def knowing(self, given: Container[str]) -> Self:
        """The config once it knows which fields were ``given``: a budget leaves them alone, also at their defaults."""
        if self.memory_budget is None or "keep" in given:
            return self
        return dataclasses.replace(self, keep=tuple(name for name in PLANNED if name in given) or None)


@dataclass(frozen=True)
class QatConfig(TrainConfig):
    """How the fake-quantized model is fine-tuned: the training options with QAT's defaults."""

    epochs: int = option(1, "passes over the training data", low=0)
    learning_rate: float | None = option(  # type: ignore[assignment]  # it is a number once it is settled
        None, "peak learning rate; auto: by the bits, since rounded weights move by steps", low=0, words={"auto": None}
    )
    distill: bool = option(True, "train towards the float model's outputs instead of the labels")
    distill_features: tuple[str, ...] | None = option(
        None, "also train what leaves these modules (patterns) towards the float model's"
    )
    step_size: str = option(
        "observed", "ranges as they are calibrated, and observed further until they are frozen, or learned by "
        "gradients (LSQ, LSQ+)", choices=STEP_SIZES,
    )  # fmt: skip
    ema: float | None = option(
        None, "ship the exponential moving average of the weights, with this decay per step", low=0, high=1
    )
    freeze_bn: float = option(
        0.0, "fraction of the steps after which batch-norm statistics are frozen; 0: they stay the trained ones",
        low=0, high=1,
    )  # fmt: skip
    freeze_observers: float | None = option(
        None, "fraction of the steps after which the quantization ranges are frozen; auto: 0 of observed ranges, which "
        "stay the calibrated ones, and 0.7 of learned ones", low=0, high=1, words={"auto": None},
    )  # fmt: skip

    def settled(self, bits: int) -> QatConfig:
        """The config with numbers where they were left open: a learning rate, and when ranges are frozen.

        The rate is 1e-5 for 8 bits, twice as much for each bit less.
        """
        rate = 1e-5 * 2 ** (8 - bits) if self.learning_rate is None else self.learning_rate
        return dataclasses.replace(self, learning_rate=rate, freeze_observers=self.frozen_from)

    @property
    def frozen_from(self) -> float:
        """The fraction of the steps after which ranges are frozen."""
        if self.freeze_observers is not None:
            return self.freeze_observers
        return 0.7 if self.step_size == "learned" else 0.0


@dataclass(frozen=True)
class QuantizeConfig(Checked):
    """How a float model becomes a quantized one."""

    mode: str = option("ptq", "post-training quantization, or quantization-aware training", choices=MODES)
    engine: str = option("pt2e", "which library prepares and converts the graph", choices=ENGINES)
    target: str = option("ort-cpu", "the runtime whose fusions decide what is quantized", choices=TARGETS)
    weight_bits: int = option(
        8, "bits of a weight; 7 are exact and quick on any x86 CPU, as 8 are with the algorithm 'pairs'; 4 take half "
        "the bytes of 8", low=4, high=8,
    )  # fmt: skip
    edge_bits: int = option(
        8, "bits of the first and the last layer's weights where the others have 6 or fewer", low=4, high=8
    )
    activation_bits: int = option(
        8, "bits of an activation; fewer than 8, of layers' inputs alone, are for study: they cannot be exported",
        low=2, high=8,
    )  # fmt: skip
    group_size: int | None = option(
        None, "inputs of a linear layer that share a scale, 16 to 256 and a power of 2, where its weights alone are "
        "integers; by default all of an output share one", low=16, high=256,
    )  # fmt: skip
    weights_only: bool = option(
        False, "quantize weights alone: linear layers round what they read as it comes, convolutions run in float"
    )
    effort: str | None = option(
        None, "settings by name: fast reads extremes alone, best takes minutes; files run at the same speed either way",
        choices=EFFORTS,
    )  # fmt: skip
    ranges: str = option("network", "how activation ranges are read from the histogram", choices=RANGES)
    percentile: float = option(
        99.99, "share of the values that --ranges percentile keeps, in percent", low=50, high=100
    )
    weight_ranges: str = option("minmax", "how each channel's weight range is chosen", choices=WEIGHT_RANGES)
    algorithms: tuple[str, ...] | None = option(
        DEFAULT_ALGORITHMS, "what else is done for accuracy, ahead of QAT too, or none; none by default beside min-max",
        choices=ALGORITHMS,
    )  # fmt: skip
    rounding_steps: int = option(500, "training steps of each layer or block by adaround and brecq", low=1)
    device: str = option(
        "cpu",
        "where calibration and algorithms run, QAT too if named: "
        "cpu, cuda, cuda:1 …; auto takes CUDA where there is one",
    )
    dynamic_axes: tuple[int, ...] | None = option(
        None, "axes of the inputs, beside the batch, whose size is to stay open: 1 for sequences, 2,3 for images", low=1
    )
    calibration: str = option(
        "train:512", "train:N (N training samples, stratified by label), a set's name, or a recipe file"
    )
    calibration_batch_size: int = option(32, "samples per calibration batch", low=1)
    ranges_from: str | None = option(None, "repeat the ranges saved in this ranges.json instead of calibrating")
    overrides: dict[str, str] = option(
        {}, "module or unit pattern (with * and ?) to 'int8' or 'float', first match wins", choices=("int8", "float")
    )
    seed: int = option(0, "seed of the calibration sample", low=0, high=SEED)
    max_drop: float | None = option(
        None, "contract: at most this many points (hundredths) of the metric are lost, with 95 % confidence", low=0
    )
    metric: str | None = option(None, "the metric of --max-drop; by default the one that decides in the task")
    max_kl: float | None = option(
        None, "contract: at most this KL divergence from FP32, in nats; needs no labels", low=0
    )
    min_agreement: float | None = option(
        None, "contract: at least this share of answers as FP32's, in percent; needs no labels", low=50, high=100,
        unit="percent",
    )  # fmt: skip
    method: str = option(
        "auto", "what a contract may try: everything, nothing that trains, or these options only", choices=METHODS
    )
    sensitivity: str = option(
        "auto", "each unit's effect on the output: exact, unit by unit, or estimated from gradients; auto by the time",
        choices=SENSITIVITIES,
    )  # fmt: skip
    validation_samples: int | None = option(None, "validation samples a contract is judged on; all by default", low=1)
    time_budget: float | None = option(None, "seconds after which a contract's search begins nothing new", low=0)

    def __post_init__(self) -> None:
        """Spells out what ``effort`` stands for. Raises UsageError where one of these settings is another already."""
        super().__post_init__()
        for name, value in settings_of(self.effort, self.weight_bits).items():
            if getattr(self, name) not in (value, type(self).__dataclass_fields__[name].default):
                raise UsageError(
                    f"effort '{self.effort}'", f"{name} {as_toml(value)}, which it stands for",
                    as_toml(getattr(self, name)), "leave one of the two out",
                )  # fmt: skip
            object.__setattr__(self, name, value)

    def knowing(self, given: Container[str]) -> Self:
        """The config once it knows which fields were ``given``: min-max asked for by name is min-max alone."""
        if self.ranges != "minmax" or self.effort is not None or "algorithms" in given:
            return self
        return dataclasses.replace(self, algorithms=None)

    @property
    def least_bits(self) -> int:
        """Bits of the narrowest numbers that layers compute with."""
        return min(self.weight_bits, self.activation_bits)

    @property
    def has_contract(self) -> bool:
        """Whether an accuracy was promised."""
        return any(value is not None for value in (self.max_drop, self.max_kl, self.min_agreement))


def settings_of(effort: str | None, weight_bits: int) -> dict[str, Any]:
    """The fields that an effort stands for: what did best in its class on the networks that it was measured on.

    Each file computes with the same operators, so that none of them costs whoever runs it anything: those of 8 bits
    have ``pairs`` for the CPUs that are slower without.
    """
    if effort is None:
        return {}
    if effort == "fast":
        return {"ranges": "minmax", "algorithms": ("pairs",) if weight_bits == 8 else None}
    if weight_bits >= 7:
        return {"ranges": "network", "algorithms": ("pixels", "smooth", "equalize", "pairs", "gptq", "steps")}
    return {"ranges": "network", "weight_ranges": "mse", "algorithms": ("pixels", "smooth", "brecq")}


CONTRACT_FIELDS = (
    "max_drop", "metric", "max_kl", "min_agreement", "method", "validation_samples", "time_budget", "sensitivity",
)  # fmt: skip


@dataclass(frozen=True)
class ExportConfig(Checked):
    """How a quantized model becomes an ONNX file."""

    opset: int | None = option(None, "ONNX opset; by default the one that the target's runtime does best with", low=13)
    gates: bool = option(True, "prove parity, coverage and size before the file takes its name")
    baselines: tuple[str, ...] | None = option(
        BASELINES, "float files to write beside it, which the benchmark compares it with; or none", choices=BASELINES
    )
    parity_samples: int = option(256, "calibration samples on which end-to-end parity is judged, at most", low=1)
    reference_samples: int = option(8, "samples on which the integer reference must equal the runtime", low=0)
    tune: bool = option(False, "measure groups of units on this machine, and leave in float what is faster so")
    tune_threads: int = option(1, "threads within an operator while tuning", low=1, high=THREADS)
    tune_batch_size: int = option(1, "batch size to tune for", low=1)
    tune_seconds: float = option(20.0, "at most this long for each race of candidates", low=0)


@dataclass(frozen=True)
class BenchmarkConfig(Checked):
    """What is measured, and how long."""

    variants: tuple[str, ...] = option(VARIANTS, "which files are compared", choices=(*VARIANTS, "bf16"))
    provider: str = option("cpu", "what runs the files; an absent one is an error", choices=PROVIDERS)
    device: str = option("auto", "for torch: cpu, cuda, cuda:1 …; auto takes CUDA where there is one")
    batch_sizes: tuple[int, ...] | None = option(
        None, "batch sizes to time; by default 1, or the one that a file is fixed to", low=1
    )
    threads: int = option(1, "threads within an operator", low=1, high=THREADS)
    width: float = option(0.03, "time until each speed-up's 95 % interval is this narrow, relative to it", low=0)
    seconds: float = option(20.0, "but at most this long for each batch size", low=0)
    shapes: dict[str, str] = option({}, "input name to shape such as 1x3x224x224, where the file leaves sizes open")
    samples: int | None = option(None, "test samples on which accuracy is judged; all by default", low=1)
    seed: int = option(0, "seed of the order in which variants are timed", low=0, high=SEED)
    compare: str | None = option(None, "an earlier benchmark.json: fail (exit 3) where a figure became worse")
    allow_slower: bool = option(False, "an INT8 file slower than the reference is told, and fails nothing")
    tolerance: float = option(0.05, "how much slower than the one compared with is still as fast", low=0, high=1)

    def __post_init__(self) -> None:
        """Raises UsageError for a device that is none or not the provider's, and a tolerance where nothing reads it."""
        super().__post_init__()
        if self.compare is None and self.tolerance != BenchmarkConfig.tolerance:
            do = "add it, or leave it out"
            raise UsageError(argument("tolerance"), "'compare' beside it", "nothing to compare with", do)
        own = "cuda" if self.provider in ("cuda", "tensorrt") else "cpu"
        if self.device not in ("auto", own) and not self.provider.startswith("torch"):
            raise UsageError(
                argument("device"), f"auto or {own} beside provider '{self.provider}', which runs there",
                repr(self.device), "leave it out, or choose the provider that runs there (torch takes any device)",
            )  # fmt: skip
        require_device(argument("device"), self.device)


@dataclass(frozen=True)
class Recipe(Checked):
    """A whole run: what to take, and what each stage is told."""

    model: str = option("resnet", "model spec", names=("resnet", "mobilenet", "vit_l_16", "gpt2", "gpt2-mini"))
    data: str = option("fashion-mnist", "data spec", names=("fashion-mnist", "alice"))
    task: str = option(
        "classification", "task: classification, language-modelling, or path/file.py:factory",
        names=("classification", "language-modelling"),
    )  # fmt: skip
    weights: str | None = option(None, "start from these weights")
    variants: tuple[str, ...] | None = option(
        ("ptq", "qat"), "quantized variants to make; none to train alone", choices=MODES
    )
    train: TrainConfig = field(default_factory=TrainConfig)
    quantize: QuantizeConfig = field(default_factory=QuantizeConfig)
    qat: QatConfig = field(default_factory=QatConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    benchmark: BenchmarkConfig = field(default_factory=BenchmarkConfig)

    def __post_init__(self) -> None:
        """Raises UsageError for a variant that is named twice: each has one folder."""
        super().__post_init__()
        variants = self.variants or ()
        if twice := next((name for name in variants if variants.count(name) > 1), None):
            raise UsageError("recipe key 'variants'", "each variant once", f"'{twice}' again", "leave it out")


def as_dict(config: Any) -> dict[str, Any]:
    """A config dataclass as plain values, for a result's JSON."""
    return dataclasses.asdict(config)
