"""Adapters: what is trained, what is merged, what is stored, what is refused; and the same above 4-bit weights."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import technique_nets
import torch
from safetensors.torch import load_file, save_model
from technique_nets import Encoder, headed, small_gpt
from torch import nn

import qtool
from qtool.data.specs import load_data
from qtool.errors import QtoolError, QtoolWarning, UsageError
from qtool.memory.measure import measure
from qtool.memory.predict import predict
from qtool.models.gpt import GPT
from qtool.models.materialise import Target, create
from qtool.models.specs import shortcut
from qtool.recipe import TrainConfig
from qtool.steps.loop import fit, task_loss
from qtool.steps.order import Batches
from qtool.tasks import load_task
from qtool.training import nf4, stage
from qtool.training.lora_layers import untrained_head
from qtool.training.techniques import setup

OPTIONS = {
    "task": "language-modelling", "batch_size": 8, "device": "cpu", "learning_rate": 1e-2, "max_steps": 6, "lora": 4,
    "epochs": 9, "checkpoint_every": 2,
}  # fmt: skip
TEXT = f"text:{Path(__file__).parents[2] / 'LICENSE'}:32"  # some kilobytes
FILTERS = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def peft() -> Any:
    """peft, where it imports (a torchvision that does not fit torch stops it)."""
    try:
        import peft
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"peft does not import: {error}")
    return peft


def tokens() -> torch.Tensor:
    return torch.randint(0, 256, (3, 32))


@FILTERS
def test_the_model_has_no_notes_of_its_adapters_when_they_are_merged(peft: Any) -> None:
    """peft joins the configuration of the adapters that are put to it next to those that it finds noted."""
    model = small_gpt()
    setup(model, TrainConfig(device="cpu", lora=4)).close()
    assert set(vars(model)) == set(vars(small_gpt()))
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["c_attn"]), adapter_name="own")
    assert list(adapted.peft_config) == ["own"]
    kept = vars(model)["peft_config"] = {"own": "as it was"}
    for name, layer in [(n, m) for n, m in model.named_modules() if hasattr(m, "base_layer")]:
        model.set_submodule(name, layer.base_layer)
    setup(model, TrainConfig(device="cpu", lora=4)).close()
    assert vars(model)["peft_config"] is kept
    assert kept == {"own": "as it was"}


@FILTERS
@pytest.mark.parametrize("base", ["full", "nf4"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_adapters_learn_and_are_merged(peft: Any, base: str, precision: str) -> None:
    model, before = small_gpt(), small_gpt()
    x = tokens()
    made = setup(model, TrainConfig(device="cpu", lora=4, lora_base=base, precision=precision))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert all("lora_" in name for name in trained)
    assert len(trained) == 2 * 2 * 4  # two matrices for each of four layers of two blocks
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.1)
    adapted = made.predict(x)
    made.close()
    assert list(model.state_dict()) == list(before.state_dict())
    assert all(p.requires_grad and p.dtype == torch.float32 for p in model.parameters())
    torch.testing.assert_close(model(x), adapted, rtol=0.02, atol=1e-4 if precision == "32-true" else 0.1)
    assert (adapted - before(x)).abs().mean() > 0.1
    assert torch.equal(model.transformer["wte"].weight, before.transformer["wte"].weight) == (precision != "bf16-true")


@FILTERS
@pytest.mark.parametrize("base", ["full", "nf4"])
def test_what_is_judged_in_training_is_the_model_that_comes_out(peft: Any, base: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(48, 5, 16, generator=generator), torch.randint(0, 4, (48,), generator=generator)
    part, model = torch.utils.data.TensorDataset(x, y), Encoder()
    options = {"lora": 4, "lora_base": base, "epochs": 2, "batch_size": 8, "learning_rate": 0.05, "device": "cpu"}
    trained = qtool.train(model, {"train": part, "test": part}, **options)
    with torch.no_grad():
        loss = nn.functional.cross_entropy(trained.model.eval()(x), y)
    assert trained.metrics["loss"] == pytest.approx(float(loss), rel=1e-4)
    assert torch.backends.mha.get_fastpath_enabled()


@FILTERS
def test_training_stores_the_adapters_alone_as_peft_reads_them(peft: Any, tmp_path: Path) -> None:
    result = qtool.train(small_gpt(), TEXT, out=tmp_path, **OPTIONS)
    assert result.history.losses[-1] < result.history.losses[0]
    stored = load_file(tmp_path / "adapter_model.safetensors")
    assert len(stored) == 16
    assert sum(t.numel() for t in stored.values()) == sum(
        4 * (m.in_features + m.out_features)
        for n, m in small_gpt().named_modules()
        if type(m) is nn.Linear and "h." in n
    )
    taken = qtool.train(small_gpt(), TEXT, out=tmp_path, **OPTIONS).adapter  # a training that is done already
    assert taken is not None
    assert result.adapter is not None
    assert taken.config == result.adapter.config
    assert all(torch.equal(taken.tensors[name], value) for name, value in result.adapter.tensors.items())
    again = peft.PeftModel.from_pretrained(small_gpt(), str(tmp_path)).eval()
    x = tokens()
    torch.testing.assert_close(again(x), result.model(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(load_file(tmp_path / "model.safetensors")["transformer.h.0.mlp.c_fc.weight"],
                               result.model.state_dict()["transformer.h.0.mlp.c_fc.weight"])  # fmt: skip


@FILTERS
def test_shards_of_adapters_are_stored_and_merged_as_whole_ones(peft: Any, tmp_path: Path) -> None:
    whole, sharded = (
        qtool.train(small_gpt(), TEXT, out=tmp_path / strategy, strategy=strategy, **OPTIONS)
        for strategy in ("ddp", "fsdp")
    )
    assert sharded.history.losses == pytest.approx(whole.history.losses, rel=1e-4)
    stored = [load_file(tmp_path / strategy / "adapter_model.safetensors") for strategy in ("ddp", "fsdp")]
    assert stored[0].keys() == stored[1].keys()
    for a, b in ((stored[0], stored[1]), (whole.model.state_dict(), sharded.model.state_dict())):
        assert all(torch.allclose(a[name], b[name], atol=1e-4) for name in a)
    assert all(p.requires_grad for p in sharded.model.parameters())


@FILTERS
@pytest.mark.parametrize("base", ["full", "nf4"])
def test_a_resumed_run_is_the_undisturbed_one(peft: Any, tmp_path: Path, base: str) -> None:
    options = OPTIONS | {"lora_base": base, "lora_dropout": 0.1}
    whole = qtool.train(small_gpt(), TEXT, **options)

    def stop(at: Any) -> None:
        if at.step == 5:
            raise KeyboardInterrupt

    config = TrainConfig(**{k: v for k, v in options.items() if k != "task"})
    parts = {"data": load_data(TEXT), "config": config, "task": load_task("language-modelling"), "out": tmp_path}
    with pytest.raises(KeyboardInterrupt):
        stage.train(small_gpt(), progress=stop, **parts)
    (stored,) = (tmp_path / "checkpoints").glob("step-*")
    assert not any("base_layer.weight" in name for name in load_file(stored))
    resumed = stage.train(small_gpt(), **parts)
    assert resumed.history.losses == whole.history.losses
    for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)


@FILTERS
@pytest.mark.parametrize("base", ["full", "nf4"])
def test_made_on_the_device_and_sharded_it_is_the_same_training(peft: Any, tmp_path: Path, base: str) -> None:
    save_model(small_gpt(), str(tmp_path / "w.safetensors"))
    options = OPTIONS | {"lora_base": base, "precision": "bf16-true", "max_steps": 3, "checkpoint_every": None}
    kept = []
    for more in ({}, {"create_on_device": True}, {"create_on_device": True, "strategy": "fsdp"}):
        torch.rand(3)  # adapters begin as the seed says, and not where the caller's generator is
        kept.append(
            qtool.train(
                f"{technique_nets.__file__}:small_gpt", TEXT, weights=tmp_path / "w.safetensors", **options, **more
            )
        )
    for other in kept[1:]:
        assert other.history.losses == pytest.approx(kept[0].history.losses, rel=1e-3)
        for (name, a), b in zip(kept[0].model.state_dict().items(), other.model.state_dict().values(), strict=True):
            assert b.dtype == torch.bfloat16, name
            assert torch.allclose(a, b.float(), atol=2e-2), name


@FILTERS
def test_made_on_the_device_the_frozen_weights_are_never_there_in_more_than_4_bits(peft: Any, tmp_path: Path) -> None:
    def build() -> GPT:
        return GPT(256, layers=6, width=256, heads=2, context=8)

    save_model(build(), str(tmp_path / "w.safetensors"))
    batch = torch.randint(0, 256, (2, 8)), torch.randint(0, 256, (2, 8))
    config = TrainConfig(device="cpu", batch_size=2, lora=4, lora_base="nf4", create_on_device=True)
    measured = measure(
        lambda: create(build, tmp_path / "w.safetensors", Target(torch.device("cpu"), later=True)),
        batch, config, prepare=setup, loss=task_loss(load_task("language-modelling")),
    )  # fmt: skip
    assert measured.peak_bytes < 0.5 * sum(p.nbytes for p in build().parameters())


def test_a_wrong_target_stops_the_run_before_training(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="did you mean 'c_proj'"):
        qtool.train(small_gpt(), TEXT, out=tmp_path / "run", **OPTIONS, lora_targets=["c_prj"])
    assert not (tmp_path / "run").exists()
    with pytest.raises(UsageError, match="pass for example --lora 8"):
        qtool.train(small_gpt(), TEXT, **(OPTIONS | {"lora": None, "lora_base": "nf4"}))


@FILTERS
def test_layers_that_peft_refuses_are_told_and_the_model_stays_as_it_was(
    peft: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knows models that read a layer's weights past it, such as Mamba."""

    def refuse(*_: Any) -> None:
        raise ValueError("Module 'out_proj' is incompatible with Mamba-based models")

    monkeypatch.setattr(peft, "inject_adapter_in_model", refuse)
    model = small_gpt()
    with pytest.raises(UsageError, match=r"--lora: .*'out_proj' is incompatible.*--lora-targets"):
        setup(model, TrainConfig(device="cpu", lora=2))
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("bias", [True, False])
def test_nf4_multiplies_with_what_it_restores(bias: bool) -> None:
    """The reference finds the nearest of NF4's 16 levels, and for scales of those of e4m3, one by one."""
    layer = nn.Linear(64, 300, bias=bias)
    levels = torch.tensor(
        [-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0, 0.0795803, 0.1609302,
         0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0]
    )  # fmt: skip
    blocks = layer.weight.detach().reshape(-1, 64)
    scale = blocks.abs().amax(1, keepdim=True)
    eights = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    eights = eights[eights.isfinite()]
    assert len(eights) == 254
    mean, coarse = scale.mean(), torch.empty_like(scale)
    for part in (slice(0, 256), slice(256, 300)):
        step = (scale[part] - mean).abs().max() / 448
        coarse[part] = eights[((scale[part] - mean) / step - eights).abs().argmin(1)][:, None] * step + mean
    assert 0 < (coarse / scale - 1).abs().max() < 0.02
    expected = (levels[(blocks[..., None] / scale[..., None] - levels).abs().argmin(-1)] * coarse).reshape(300, 64)
    original = copy.deepcopy(layer)
    small = nf4.quantized(layer)
    assert sum(part.nbytes for part in (small.packed, *small.scales)) == 300 * 64 // 2 + 300 + 2 * 4 + 4
    x = torch.randn(5, 64, requires_grad=True)
    y = small(x)
    reference = nn.functional.linear(x, expected, original.bias)
    torch.testing.assert_close(y, reference, rtol=1e-4, atol=1e-4)
    gradient = torch.randn_like(y)
    found, wanted = (torch.autograd.grad(v, x, gradient)[0] for v in (y, reference))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    restored = small.restored()
    torch.testing.assert_close(restored.weight, expected, rtol=1e-4, atol=1e-5)
    assert restored is layer


@FILTERS
@pytest.mark.parametrize(
    "options", [{"lora_base": "nf4"}, {"strategy": "fsdp"}, {"strategy": "fsdp", "lora_base": "nf4"}]
)
def test_the_memory_of_adapters_is_predicted(peft: Any, options: dict[str, Any]) -> None:
    batch = torch.randint(0, 256, (8, 32)), torch.randint(0, 256, (8, 32))
    config = TrainConfig(device="cpu", batch_size=8, lora=4, **options)
    parts = {"prepare": setup, "loss": task_loss(load_task("language-modelling"))}
    predicted = predict(lambda: small_gpt(64), batch, config, **parts)
    measured = measure(lambda: small_gpt(64), batch, config, **parts)
    assert predicted.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.01)


@FILTERS
@pytest.mark.parametrize("base", ["full", "nf4"])
def test_convolutions_that_are_named_are_adapted(base: str, peft: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
    before, batch = model[0].weight.detach().clone(), (torch.randn(6, 2, 5, 5), torch.arange(6) % 3)
    done = qtool.train(model, [batch] * 3, device="cpu", epochs=2, lora=2, lora_targets=("0",), lora_base=base)
    assert done.adapter is not None
    a, b = (done.adapter.tensors[f"base_model.model.0.lora_{part}.weight"] for part in "AB")
    delta = 16.0 / 2 * torch.einsum("or,rikl->oikl", b[:, :, 0, 0], a)
    assert delta.abs().max() > 1e-4
    torch.testing.assert_close(model[0].weight.detach(), before + delta)


@pytest.mark.parametrize("size", [0.1, 0.001])
def test_a_merge_into_16_bits_rounds_once_and_tells_what_that_takes(peft: Any, size: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 3)).bfloat16()
    made = setup(model, TrainConfig(device="cpu", precision="bf16-true", lora=4, lora_targets=("0",)))
    a, b = model[0].lora_A["default"].weight, nn.init.normal_(model[0].lora_B["default"].weight, std=size)
    exact = model[0].base_layer.weight.float() + 4.0 * b.detach().float() @ a.detach().float()
    with pytest.warns(QtoolWarning, match="--lora: .* off by") if size < 0.01 else nullcontext():
        made.close()
    assert torch.equal(model[0].weight, exact.bfloat16())


CONVOLUTIONS = [
    nn.Conv1d(2, 8, 3, dilation=2, padding="same"),
    nn.Conv2d(2, 8, 3, dilation=2, padding=2),
    nn.Conv2d(2, 8, 3, padding=1, padding_mode="reflect"),
    nn.Conv2d(2, 8, 3, dilation=2, padding="same", padding_mode="circular"),
    nn.Conv3d(2, 8, (1, 3, 2), stride=2),
]


@FILTERS
@pytest.mark.parametrize("layer", CONVOLUTIONS, ids=str)
def test_an_adapter_reads_what_its_convolution_reads(layer: nn.Module, peft: Any) -> None:
    """Merged, it computes what it did unmerged."""
    torch.manual_seed(0)
    model = nn.Sequential(copy.deepcopy(layer), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3))
    sides = layer.weight.dim() - 2  # type: ignore[operator, union-attr]
    batch = torch.randn(6, 2, *(7,) * sides), torch.arange(6) % 3
    model(batch[0])
    config = TrainConfig(device="cpu", epochs=1, lora=2, lora_targets=("0",), warmup=0.0)
    data = SimpleNamespace(train=Batches([batch] * 5), validation=None)
    with setup(model, config) as made:
        fit(model, data, load_task("classification"), config, setup=made)
        adapted = made.predict(batch[0])
    torch.testing.assert_close(model(batch[0]), adapted)


@FILTERS
def test_adapters_of_images_that_lie_channels_last_are_stored(peft: Any, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(2, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, 3))
    images = [(torch.randn(2, 5, 5), i % 3) for i in range(6)]
    data = {"train": images, "test": images}
    done = qtool.train(model, data, out=tmp_path, device="cpu", epochs=1, lora=2, lora_targets=("0",))
    stored = load_file(tmp_path / "adapter_model.safetensors")
    assert done.adapter is not None
    assert stored.keys() == done.adapter.tensors.keys()
    assert all(torch.equal(stored[name], value) for name, value in done.adapter.tensors.items())


@FILTERS
def test_adapters_that_a_model_has_are_weights_of_its_own(peft: Any, tmp_path: Path) -> None:
    model = peft.get_peft_model(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)), peft.LoraConfig(
        r=2, target_modules=["0"], use_dora=True), adapter_name="mine")  # fmt: skip
    with pytest.raises(UsageError, match=r"--lora: expected a model without adapters; got one .* 'base_model.model.0'"):
        setup(model, TrainConfig(device="cpu", lora=2, lora_targets=("1",)))
    before = model.base_model.model[0].lora_B["mine"].weight.clone()
    done = qtool.train(model, [(torch.randn(4, 4), torch.arange(4) % 3)], out=tmp_path, device="cpu", epochs=1)
    assert not torch.equal(model.base_model.model[0].lora_B["mine"].weight, before)
    assert done.adapter is None
    assert not list(tmp_path.glob("adapter*"))


@FILTERS
def test_layers_whose_names_end_as_an_adapted_one_stay_as_they_are(peft: Any) -> None:
    """peft takes each whose name ends so: here one that shares its weights, which a merge would change twice."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4), nn.Linear(4, 3))
    model[2].weight = model[1][0].weight
    before = copy.deepcopy(model)
    done = qtool.train(
        model, [(torch.randn(6, 4), torch.arange(6) % 3)] * 3, device="cpu", epochs=1, lora=2, lora_targets=("0",)
    )
    assert not torch.equal(model[0].weight, before[0].weight)
    assert torch.equal(model[2].weight, before[2].weight)
    assert done.adapter is not None
    assert {name.rsplit(".", 2)[0] for name in done.adapter.tensors} == {"base_model.model.0"}
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=done.adapter.config["target_modules"]), before)
    assert [name for name, module in before.named_modules() if hasattr(module, "lora_A")] == ["0"]


def images() -> list[tuple[torch.Tensor, int]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(5, 16, generator=generator), i % 4) for i in range(24)]


HEADED: dict[str, Any] = {
    "lora": 2, "lora_trained": ["head"], "epochs": 2, "batch_size": 8, "learning_rate": 0.01, "device": "cpu",
}  # fmt: skip


@FILTERS
@pytest.mark.parametrize("options", [{}, {"lora_base": "nf4"}, {"strategy": "fsdp", "precision": "bf16-mixed"}])
def test_a_new_head_is_trained_in_full_and_stored_as_peft_reads_it(
    peft: Any, tmp_path: Path, options: dict[str, Any]
) -> None:
    model, before = headed(), headed()
    for parameter in (*model.head.parameters(), model.layers[0].norm1.weight):
        parameter.requires_grad_(False)
    done = qtool.train(model, {"train": images(), "test": images()}, out=tmp_path, **HEADED, **options)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert not any(name.startswith("head.") or name == "layers.0.norm1.weight" for name in trained)
    assert len(trained) == len(list(model.parameters())) - 7
    assert not torch.equal(model.head.out.weight, before.head.out.weight)
    assert not torch.equal(model.head.out.bias, before.head.out.bias)
    assert torch.equal(model.layers[0].norm1.weight, before.layers[0].norm1.weight)
    stored = load_file(tmp_path / "adapter_model.safetensors")
    assert {name for name in stored if "lora_" not in name} == {f"base_model.model.head.{key}" for key in
                                                               before.head.state_dict()}  # fmt: skip
    assert done.adapter is not None
    assert done.adapter.config["modules_to_save"] == ["base_model.model.head"]  # peft's 'head' is 'overhead' too
    if not options:
        again, x = peft.PeftModel.from_pretrained(before, str(tmp_path)).eval(), torch.randn(3, 5, 16)
        with torch.no_grad(), shortcut(False):
            torch.testing.assert_close(again(x), model(x), rtol=1e-4, atol=1e-5)
    for name, value in model.head.state_dict().items():
        assert torch.equal(value, stored[f"base_model.model.head.{name}"]), name


@FILTERS
def test_a_resumed_run_goes_on_with_the_head_that_it_trains(peft: Any, tmp_path: Path) -> None:
    def stop(at: Any) -> None:
        if at.step == 4:
            raise KeyboardInterrupt

    config, task = TrainConfig(**HEADED | {"lora_trained": ("head",)}), load_task("classification")
    data = SimpleNamespace(train=images(), validation=None, test=None)
    whole = stage.train(headed(), data, config, task=task)
    with pytest.raises(KeyboardInterrupt):
        stage.train(headed(), data, config, task=task, out=tmp_path, progress=stop)
    resumed = stage.train(headed(), data, config, task=task, out=tmp_path)
    assert len(whole.history.losses) == 6
    for (name, a), b in zip(whole.model.state_dict().items(), resumed.model.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


@FILTERS
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_a_head_of_a_model_in_16_bits_is_trained_in_those_of_the_precision(peft: Any, precision: str) -> None:
    model = headed().bfloat16()
    before, batch = model.head.out.weight.detach().clone(), (torch.randn(8, 5, 16).bfloat16(), torch.arange(8) % 4)
    config = TrainConfig(device="cpu", precision=precision, lora=2, lora_trained=("head",), epochs=1, warmup=0.0)
    data = SimpleNamespace(train=Batches([batch] * 2), validation=None)
    with setup(model, config) as made:
        assert model.head.out.weight.dtype == (torch.bfloat16 if precision == "bf16-true" else torch.float32)
        fit(model, data, load_task("classification"), config, setup=made)
    assert model.eval()(batch[0]).dtype == model.head.out.weight.dtype == torch.bfloat16
    assert not torch.equal(model.head.out.weight, before)
    assert vars(model.head).keys() == vars(headed().head).keys()


@FILTERS
@pytest.mark.parametrize("options", [{}, {"lora_base": "nf4", "strategy": "fsdp"}])
def test_the_memory_of_what_is_trained_in_full_is_predicted(peft: Any, options: dict[str, Any]) -> None:
    def build() -> nn.Module:
        model = headed()
        model.head.linear1, model.head.out = nn.Linear(16, 512), nn.Linear(512, 4)
        model.head.norm = nn.BatchNorm1d(512)
        return model

    batch = torch.randn(8, 5, 16), torch.arange(8) % 4
    config = TrainConfig(device="cpu", batch_size=8, lora=4, lora_trained=("head",), **options)
    parts = {"prepare": setup, "loss": task_loss(load_task("classification"))}
    predicted, measured = predict(build, batch, config, **parts), measure(build, batch, config, **parts)
    assert predicted.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.01)


def test_a_head_that_stays_as_it_came_is_told(peft: Any) -> None:
    told: list[str] = []
    data = {"train": images(), "test": images()}
    qtool.train(headed(), data, **HEADED | {"lora_trained": None, "epochs": 0}, progress=told.append)
    assert told == ["train: 'head' stays as it came, at random if it is new; --lora-trained head trains it"]
    for options in ({}, {"lora_trained": ["head.out"]}, {"lora_trained": None, "lora_targets": ["out"]}):
        qtool.train(headed(), data, **HEADED | {"epochs": 0} | options, progress=told.append)
    assert len(told) == 1
    assert untrained_head(small_gpt(), TrainConfig(lora=2)) is None
    plain = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    assert untrained_head(plain, TrainConfig(lora=2)) == "2"


class PastItsLayer(nn.Module):
    """A block that multiplies by the weight of one of its layers itself."""

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.called = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.called(nn.functional.linear(x, self.proj.weight, self.proj.bias))  # type: ignore[no-any-return]


@FILTERS
def test_adapters_that_learn_nothing_are_told_and_refused_where_all_are(peft: Any) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(16, 4), torch.randint(0, 3, (16,))
    part = torch.utils.data.TensorDataset(x, y)
    options = {"lora": 2, "lora_trained": ["2"], "epochs": 1, "batch_size": 8, "device": "cpu"}

    def train(**more: Any) -> None:
        model = nn.Sequential(PastItsLayer(), PastItsLayer(), nn.Linear(4, 3))
        qtool.train(model, {"train": part, "test": part}, **options | more)

    with pytest.warns(QtoolWarning, match=r"^--lora: no gradient for 0.proj, 1.proj in the first 2 steps: a"):
        train()
    with pytest.raises(QtoolError, match=r"got no gradient for 0.proj, 1.proj in .* or leave --lora out"):
        train(lora_targets=["proj"])
    with pytest.raises(QtoolError, match=r"^model: .*name other layers with --lora-targets"):
        train(lora_targets=["proj"], lora_trained=None)
