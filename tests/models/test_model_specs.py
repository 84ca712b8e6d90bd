"""Models: the built-ins' shape, what may be loaded into them, and what is refused."""

from __future__ import annotations

import os
import sys
import types
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import nn

from qtool.artifacts import staging, write_result
from qtool.errors import QtoolError, UsageError
from qtool.models.nets import ResidualBlock
from qtool.models.specs import check_finite, load_model, load_weights, shortcut

IMAGE_NETS = ("resnet", "mobilenet")


def kinds(model: nn.Module) -> Counter[str]:
    return Counter(type(module).__name__ for module in model.modules())


@pytest.mark.parametrize("name", IMAGE_NETS)
@pytest.mark.parametrize(("size", "channels"), [(28, 1), (32, 3)])
def test_built_ins_take_small_images(name: str, size: int, channels: int) -> None:
    model = load_model(name, num_classes=7, in_channels=channels)
    assert model(torch.randn(2, channels, size, size)).shape == (2, 7)
    assert 100_000 < sum(p.numel() for p in model.parameters()) < 300_000
    assert kinds(model)["AdaptiveAvgPool2d"] == kinds(model)["Flatten"] == kinds(model)["Linear"] == 1
    assert kinds(model)["Conv2d"] == kinds(model)["BatchNorm2d"]


def test_resnet_adds_then_rectifies() -> None:
    block = load_model("resnet", num_classes=10).blocks[0].eval()
    x = torch.randn(2, 16, 7, 7)
    torch.testing.assert_close(block(x), torch.relu(block.body(x) + block.shortcut(x)))
    plain = ResidualBlock(16, 16, 1).eval()
    torch.testing.assert_close(plain(x), torch.relu(plain.body(x) + x))


def test_mobilenet_is_depthwise_with_linear_bottlenecks() -> None:
    model = load_model("mobilenet", num_classes=10).eval()
    depthwise = [m for m in model.modules() if isinstance(m, nn.Conv2d) and m.groups > 1]
    assert depthwise
    assert all(m.groups == m.in_channels == m.out_channels for m in depthwise)
    assert kinds(model)["ReLU6"]
    assert not kinds(model)["ReLU"]
    residual = [block for block in model.blocks if block.residual]
    assert residual
    x = torch.randn(2, residual[0].body[0].in_channels, 5, 5)
    torch.testing.assert_close(residual[0](x), x + residual[0].body(x))
    assert isinstance(residual[0].body[-1], nn.BatchNorm2d)


@pytest.mark.parametrize("name", IMAGE_NETS)
def test_every_module_is_called_once(name: str) -> None:
    model = load_model(name, num_classes=10)
    calls: Counter[str] = Counter()
    for path, module in model.named_modules():
        module.register_forward_hook(lambda *_, path=path: calls.update([path]))
    model(torch.randn(2, 1, 28, 28))
    assert set(calls.values()) == {1}


def test_the_seed_decides_and_the_global_state_stays() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first, again, other = (load_model("resnet", num_classes=10, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    weights = [model.classifier.weight for model in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize("in_use", [True, False])
def test_building_leaves_the_random_states_of_gpus_as_they_were(monkeypatch: pytest.MonkeyPatch, in_use: bool) -> None:
    states: dict[int, object] = {0: "first", 1: "second"} if in_use else {}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: in_use)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_rng_state", states.__getitem__)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: states.update({device: state}))
    monkeypatch.setattr(torch, "manual_seed", lambda seed: states.update(dict.fromkeys(states, seed)))
    load_model("resnet", num_classes=3, seed=3)
    assert states == ({0: "first", 1: "second"} if in_use else {})


def test_misspelt_and_incomplete_specs() -> None:
    with pytest.raises(UsageError, match="did you mean 'resnet'"):
        load_model("resnt", num_classes=10)
    with pytest.raises(QtoolError, match="a number of classes"):
        load_model("resnet", num_classes=None)
    with pytest.raises(UsageError, match="a model of torchvision, timm, transformers"):
        load_model("resnet", num_classes=10, weights="pretrained")


def test_factories(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(
        "import torch\ndef net():\n    return torch.nn.Linear(3, 2)\n"
        "def no():\n    return 3\ndef bad():\n    return 1 / 0\n"
    )
    assert load_model(f"{tmp_path / 'm.py'}:net", num_classes=None)(torch.zeros(1, 3)).shape == (1, 2)
    with pytest.raises(QtoolError, match=r"an nn\.Module; got int"):
        load_model(f"{tmp_path / 'm.py'}:no", num_classes=None)
    with pytest.raises(QtoolError, match=r"ZeroDivisionError.*m\.py:7"):
        load_model(f"{tmp_path / 'm.py'}:bad", num_classes=None)


# ---- weights


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.out.weight = self.embed.weight


@pytest.fixture
def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def fresh() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def assert_same(left: nn.Module, right: nn.Module) -> None:
    theirs = right.state_dict()
    assert all(torch.equal(value, theirs[key]) for key, value in left.state_dict().items())


@pytest.mark.parametrize("wrap", [dict, lambda s: {"state_dict": s, "epoch": 3}, lambda s: {"model": s}])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod."])
def test_pt_files_as_scripts_write_them(linear: nn.Module, tmp_path: Path, wrap, prefix: str) -> None:
    torch.save(wrap({prefix + key: value for key, value in linear.state_dict().items()}), tmp_path / "w.pt")
    model = fresh()
    load_weights(model, tmp_path / "w.pt")
    assert_same(model, linear)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_wrapper_around_the_model_that_was_saved_or_around_this_one_is_seen(
    linear: nn.Module, tmp_path: Path, suffix: str
) -> None:
    wrapped, file = nn.ModuleDict({"_orig_mod": nn.ModuleDict({"module": linear})}), tmp_path / f"w{suffix}"
    (torch.save if suffix == ".pt" else save_file)(wrapped.state_dict(), file)
    for model in (fresh(), nn.ModuleDict({"_orig_mod": nn.ModuleDict({"module": fresh()})})):
        load_weights(model, file)
        assert all(
            torch.equal(a, b) for a, b in zip(model.state_dict().values(), linear.state_dict().values(), strict=True)
        )


def test_safetensors_and_tied_weights(linear: nn.Module, tmp_path: Path) -> None:
    save_file(linear.state_dict(), tmp_path / "w.safetensors")
    model = fresh()
    load_weights(model, tmp_path / "w.safetensors")
    assert_same(model, linear)
    tied, other = Tied(), Tied()
    save_model(tied, str(tmp_path / "t.safetensors"))
    load_weights(other, tmp_path / "t.safetensors")
    assert_same(other, tied)


def test_a_run_directory_is_checked(linear: nn.Module, tmp_path: Path) -> None:
    with staging(tmp_path, "train") as folder:
        save_file(linear.state_dict(), folder / "model.safetensors")
        write_result(
            tmp_path, "train", config={}, inputs={}, metrics={}, outputs={"model": folder / "model.safetensors"}
        )
    model = fresh()
    load_weights(model, tmp_path)
    assert_same(model, linear)
    save_file(fresh().state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(QtoolError, match="sha256"):
        load_weights(model, tmp_path)
    with pytest.raises(QtoolError, match="a finished 'train' stage"):
        load_weights(model, tmp_path.parent)


class Crafted:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch '{self.mark}'",)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_with_code_is_refused_and_not_run(linear: nn.Module, tmp_path: Path, zipped: bool) -> None:
    mark, file = tmp_path / "ran", tmp_path / "evil.pt"
    torch.save({"0.weight": Crafted(mark)}, file, _use_new_zipfile_serialization=zipped)
    with pytest.raises(QtoolError, match="tensors and nothing else; got a pickle that asks for code") as caught:
        load_weights(linear, file)
    assert not mark.exists()
    assert "weights_only" not in str(caught.value)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_truncated_files(linear: nn.Module, tmp_path: Path, suffix: str, share: float) -> None:
    file = tmp_path / f"w{suffix}"
    (save_file if suffix == ".safetensors" else torch.save)(linear.state_dict(), file)
    file.write_bytes(file.read_bytes()[: int(share * file.stat().st_size)])
    before = {key: value.clone() for key, value in linear.state_dict().items()}
    with pytest.raises(QtoolError, match=r"w\.(pt|safetensors)'") as caught:
        load_weights(linear, file)
    assert "\n" not in str(caught.value)
    assert all(torch.equal(value, before[key]) for key, value in linear.state_dict().items())


def test_a_lazy_module_that_has_not_run_is_named(tmp_path: Path) -> None:
    lazy = nn.Sequential(nn.Flatten(), nn.LazyLinear(3), nn.LazyBatchNorm1d())
    with pytest.raises(UsageError, match=r"'1\.weight' without one; call the model on a batch first$"):
        check_finite(lazy)
    (tmp_path / "lazy.py").write_text("from torch import nn\n\ndef net(): return nn.LazyBatchNorm1d(affine=False)\n")
    with pytest.raises(
        UsageError, match=r"model '.*lazy\.py:net': expected parameters with shapes; got 'running_mean'"
    ):
        load_model(f"{tmp_path / 'lazy.py'}:net")
    lazy(torch.randn(4, 2, 2))
    check_finite(lazy)


def test_another_architecture_says_what_differs(linear: nn.Module, tmp_path: Path) -> None:
    other = nn.Sequential(nn.Linear(3, 5), nn.Identity(), nn.Linear(2, 2))
    save_file(other.state_dict(), tmp_path / "w.safetensors")
    with pytest.raises(QtoolError) as caught:
        load_weights(linear, tmp_path / "w.safetensors")
    text = str(caught.value)
    assert "missing: 1.weight, 1.bias, 1.running_mean and 2 more" in text
    assert "not in the model: 2.bias, 2.weight" in text or "not in the model: 2.weight, 2.bias" in text
    assert "0.weight (5, 3) where the model has (4, 3)" in text


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_named(linear: nn.Module, tmp_path: Path, value: float) -> None:
    state = {key: tensor.clone() for key, tensor in linear.state_dict().items()}
    state["1.running_var"][2] = value
    save_file(state, tmp_path / "w.safetensors")
    with pytest.raises(QtoolError, match=r"NaN or infinity in 1\.running_var"):
        load_weights(linear, tmp_path / "w.safetensors")
    check_finite(linear)  # unchanged
    linear.load_state_dict(state)
    with pytest.raises(QtoolError, match=r"1\.running_var"):
        check_finite(linear)


def test_files_that_are_no_weights(linear: nn.Module, tmp_path: Path) -> None:
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(QtoolError, match="a state dict"):
        load_weights(linear, tmp_path / "list.pt")
    torch.save({"a": 1}, tmp_path / "numbers.pt")
    with pytest.raises(QtoolError, match="a state dict: names to tensors; got keys a"):
        load_weights(linear, tmp_path / "numbers.pt")
    with pytest.raises(UsageError, match=r"ending in \.safetensors"):
        load_weights(linear, tmp_path / "w.onnx")
    with pytest.raises(UsageError, match=r"did you mean 'list\.pt'"):
        load_weights(linear, tmp_path / "lsit.pt")


# ---- other libraries, by stand-ins for those that are not installed


@pytest.mark.parametrize(
    ("spec", "extra"), [("torchvision:x", "vision"), ("timm:x", "vision"), ("transformers:x", "text")]
)
def test_a_missing_library_names_its_extra(spec: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library = spec.split(":")[0]
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.setitem(sys.modules, "torchvision.models", None)
    with pytest.raises(QtoolError, match=rf"pip install 'qtool\[{extra}\]'"):
        load_model(spec, num_classes=10)


@pytest.fixture
def torchvision(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """What of torchvision.models is used: names, and a constructor that takes classes or weights."""
    fake = types.ModuleType("torchvision.models")
    fake.list_models = lambda: ["smallnet", "segmenter", *(f"net{i}" for i in range(30))]

    def smallnet(weights: str | None = None, num_classes: int = 8) -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, num_classes))
        if weights:
            nn.init.constant_(model[0].weight, 0.5)
            nn.init.constant_(model[1].weight, 0.5)
        return model

    def segmenter(
        weights: str | None = None, num_classes: int = 8, weights_backbone: str | None = "DEFAULT"
    ) -> nn.Module:
        """A backbone, which comes pretrained unless that is declined, and with trained weights one more head."""
        model = smallnet(weights, num_classes)
        if weights:
            model.append(nn.Linear(4, num_classes))
        elif weights_backbone:
            raise OSError("it was to be fetched")
        return model

    fake.get_model_builder = lambda name: segmenter if name == "segmenter" else smallnet
    fake.get_model = lambda name, **options: fake.get_model_builder(name)(**options)
    monkeypatch.setitem(sys.modules, "torchvision", types.ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.models", fake)
    return fake


def test_torchvision_models(torchvision: types.ModuleType) -> None:
    assert load_model("torchvision:smallnet", num_classes=5)[1].out_features == 5
    tuned = load_model("torchvision:smallnet", num_classes=5, weights="pretrained")
    assert bool((tuned[0].weight == 0.5).all())
    assert not bool((tuned[1].weight == 0.5).any())
    assert bool((load_model("torchvision:smallnet", num_classes=None, weights="pretrained")[1].weight == 0.5).all())
    with pytest.raises(UsageError, match="did you mean 'smallnet'"):
        load_model("torchvision:smalnet", num_classes=5)
    with pytest.raises(QtoolError, match="images of 3 channels; got 1"):
        load_model("torchvision:smallnet", num_classes=5, in_channels=1)
    torchvision.get_model = lambda *_, **__: 1 / 0
    with pytest.raises(QtoolError, match="a model that builds; got ZeroDivisionError"):
        load_model("torchvision:smallnet", num_classes=5)


def test_a_torchvision_backbone_is_not_fetched(torchvision: types.ModuleType) -> None:
    assert len(load_model("torchvision:segmenter", num_classes=5)) == 2
    tuned = load_model("torchvision:segmenter", num_classes=5, weights="pretrained")
    assert len(tuned) == 2  # a head for training alone, which trained weights bring along, is left out
    assert bool((tuned[0].weight == 0.5).all())


def test_weights_in_float32_widen_a_model_that_was_made_in_16_bits(tmp_path: Path) -> None:
    """As a training in float32 leaves them; in 16 bits they would be others. A tied weight stays tied."""

    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4))
        model[1].weight = model[0].weight
        return model

    there, model = build(), build().bfloat16()
    torch.save(there.state_dict(), tmp_path / "w.pt")
    load_weights(model, tmp_path / "w.pt")
    assert all(torch.equal(value, there.state_dict()[key]) for key, value in model.state_dict().items())
    assert model[1].weight is model[0].weight
    torch.save(build().bfloat16().state_dict(), tmp_path / "narrow.pt")
    load_weights(model := build(), tmp_path / "narrow.pt")
    assert model[0].weight.dtype == torch.float32


def test_threads_that_want_no_shortcut_leave_it_as_the_first_one_met_it():
    first, second = shortcut(False), shortcut(False)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not torch.backends.mha.get_fastpath_enabled()
    second.__exit__(None, None, None)
    assert torch.backends.mha.get_fastpath_enabled()


def test_weights_that_may_not_be_read_are_not_to_be_saved_again(
    linear: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: Path) -> None:
        raise PermissionError(13, "Permission denied", str(file))

    (tmp_path / "w.safetensors").touch()
    monkeypatch.setattr("qtool.models.specs.load_file", refuse)
    with pytest.raises(QtoolError, match="got Permission denied; check the path and its permissions"):
        load_weights(linear, tmp_path / "w.safetensors")
