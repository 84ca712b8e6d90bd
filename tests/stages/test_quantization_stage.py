"""The quantize stage's options: those of one config, and those that two share."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import qtool
from qtool.artifacts import read_result
from qtool.errors import QtoolError, UsageError
from qtool.lineage import outdated
from qtool.recipe import QatConfig
from qtool.runtimes.ort import OrtSession
from qtool.stages.quantize_options import quantize_configs
from qtool.tasks import Classification


def test_a_device_that_is_named_is_that_of_training_too() -> None:
    config, tuning = quantize_configs(None, None, {"mode": "qat", "device": "cuda:1", "seed": 3})
    assert (config.device, config.seed) == ("cuda:1", 3)
    assert tuning is not None
    assert (tuning.device, tuning.seed) == ("cuda:1", 3)
    config, tuning = quantize_configs(None, QatConfig(device="cpu", seed=5), {"mode": "qat", "device": "cuda"})
    assert tuning is not None
    assert (tuning.device, tuning.seed) == ("cpu", 5)
    config, tuning = quantize_configs(None, None, {"mode": "qat"})
    assert tuning is not None
    assert (config.device, tuning.device) == ("cpu", "auto")


def test_options_of_training_that_exclude_each_other_are_refused_before_anything_is_calibrated() -> None:
    told: list[str] = []
    images = TensorDataset(torch.randn(8, 1, 4, 4), torch.zeros(8).long())
    with pytest.raises(UsageError, match="--step-in-backward: expected whole batches"):
        qtool.quantize(
            nn.Sequential(nn.Flatten(), nn.Linear(16, 2)), {"train": images, "test": images}, mode="qat",
            micro_batches=2, step_in_backward=True, progress=told.append,
        )  # fmt: skip
    assert not told


def test_a_killed_training_is_not_gone_on_from_with_other_quantizers(tmp_path: Path) -> None:
    class Killed(Classification):
        steps = 0

        def loss(self, output: Any, target: Any) -> Any:
            Killed.steps += 1
            if Killed.steps == 4:
                raise KeyboardInterrupt
            return super().loss(output, target)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    train, test = (TensorDataset(torch.randn(16, 6), torch.arange(16) % 2) for _ in range(2))
    again = partial(
        qtool.quantize, model, {"train": train, "test": test}, out=tmp_path, mode="qat", weight_bits=4, ranges="minmax",
        distill=False, batch_size=4, checkpoint_every=1, task=Killed(),
    )  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        again()
    others: list[dict[str, Any]] = [{"edge_bits": 4}, {"overrides": {"0": "float"}}, {"calibration": "train:4"}]
    for other in others:
        with pytest.raises(QtoolError, match=rf"a checkpoint of this recipe; got .*quantize\.{next(iter(other))}"):
            again(**other)
    again()


def test_no_micro_batch_leaves_live_batch_norm_a_single_sample() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    train, test = (TensorDataset(torch.randn(9, 6), torch.arange(9) % 2) for _ in range(2))
    made = qtool.quantize(
        model, {"train": train, "validation": test, "test": test}, mode="qat", ranges="minmax", freeze_bn=1.0,
        batch_size=4, micro_batches=2,
    )  # fmt: skip
    assert made(torch.randn(3, 6)).isfinite().all()


@pytest.mark.parametrize("distill", [True, False])
def test_a_batch_of_one_sample_for_live_batch_norm_is_told_as_such(distill: bool) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    batches = [(torch.randn(count, 6), torch.arange(count) % 2) for count in (4, 1)]
    with pytest.raises(QtoolError, match=r"more than 1 value per channel .*give batches, that leave"):
        qtool.quantize(model, batches, mode="qat", ranges="minmax", freeze_bn=1.0, distill=distill)
    assert qtool.quantize(model, batches, mode="qat", ranges="minmax", distill=distill)  # frozen, it takes it


def test_a_loader_that_shuffles_is_read_in_one_order_by_every_pass() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 5))
    images = torch.randn(64, 1, 8, 8)
    loader = DataLoader(TensorDataset(images), 8, shuffle=True)
    torch.manual_seed(1)
    kept = list(loader)
    torch.manual_seed(1)
    found, expected = (qtool.quantize(model.eval(), data, algorithms=["gptq"]) for data in (loader, kept))
    with torch.no_grad():
        assert torch.equal(found(images), expected(images))


class Tagger(nn.Module):
    """Sums embeddings, and takes labels as transformers' models do: another output with them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(20, 8), nn.Linear(8, 3)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.linear(self.embedding(input_ids).sum(1))
        return {"logits": logits} if labels is None else {"loss": nn.functional.cross_entropy(logits, labels)}


def test_items_that_hold_their_labels_train_and_quantize_as_pairs_do() -> None:
    items: list[Any] = [{"input_ids": [i % 20, i * 7 % 20], "labels": i % 3, "text": "…"} for i in range(40)]
    pairs: list[Any] = [({"input_ids": torch.tensor(item["input_ids"])}, item["labels"]) for item in items]
    states, outputs = [], []
    for given in (items, pairs):
        torch.manual_seed(0)
        data = {"train": given, "test": given}
        trained = qtool.train(Tagger(), data, epochs=1, batch_size=8, device="cpu")
        assert trained.metrics["top1"] >= 0
        states.append(trained.model.state_dict())
        needed = qtool.predict_memory(trained.model, data, device="cpu")["predicted"]["peak_bytes"]
        quantized = qtool.quantize(trained.model, data, effort="fast")
        outputs.append((needed, quantized({"input_ids": torch.arange(6).view(3, 2)})["logits"]))
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert outputs[0][0] == outputs[1][0]
    assert torch.equal(outputs[0][1], outputs[1][1])


def test_batches_that_hold_their_labels_are_quantized_without() -> None:
    ids = torch.arange(24).view(12, 2) % 20
    quantized = qtool.quantize(Tagger(), [{"input_ids": ids, "labels": torch.arange(12) % 3}], effort="fast")
    assert list(quantized({"input_ids": ids})) == ["logits"]


def test_what_was_quantized_is_opened_again(tmp_path: Path) -> None:
    x = torch.randn(8, 4)
    quantized = qtool.quantize(nn.Sequential(nn.Linear(4, 3)).eval(), [x], out=tmp_path / "run", effort="fast")
    again = qtool.load_quantized(str(tmp_path / "run"))
    assert torch.equal(again(x), quantized(x))
    assert again.plan == quantized.plan
    with pytest.raises(UsageError, match=r"a folder that a stage has written; got no such folder; did you mean 'run'"):
        qtool.load_quantized(tmp_path / "rum")
    with pytest.raises(
        UsageError, match=r"'artifact': expected the path .*; got a QuantizedModel; .* its \.plan tells"
    ):
        qtool.inspect(again)  # type: ignore[arg-type]


def test_a_model_that_chooses_between_two_branches_is_opened_again_and_exported(tmp_path: Path) -> None:
    class Choosing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Any:
            return self.c(torch.cond(x.sum() > 0, lambda x: self.a(x).relu(), lambda x: self.b(x).sin(), (x,)))

    torch.manual_seed(0)
    model, batches = Choosing().eval(), [torch.randn(8, 8) for _ in range(8)]
    assert {bool(x.sum() > 0) for x in batches} == {True, False}
    qtool.quantize(model, batches, out=str(tmp_path))
    quantized = qtool.load_quantized(tmp_path)
    files = qtool.export(tmp_path, samples=batches, baselines=None).files
    results = {stage: read_result(tmp_path, stage) for stage in ("quantize", "export")}
    assert outdated(results, tmp_path) == []
    session = OrtSession(files["int8"])
    for x in batches:
        (given,) = session.run({"x": x.numpy()})
        np.testing.assert_allclose(given, quantized(x).detach().numpy(), atol=1e-5)


def test_a_plan_that_was_edited_is_told_as_such(tmp_path: Path) -> None:
    qtool.quantize(nn.Linear(4, 4), [torch.randn(8, 4)], out=tmp_path)
    result = json.loads((tmp_path / "quantize.json").read_text())
    result["plan"]["units"] = [{"name": "a"}]
    (tmp_path / "quantize.json").write_text(json.dumps(result))
    with pytest.raises(QtoolError, match="expected results as the stages wrote them; got KeyError: 'modules'"):
        qtool.load_quantized(tmp_path)


def test_a_file_that_is_no_onnx_is_told_as_that_and_taken_for_no_run_directory(tmp_path: Path) -> None:
    (tmp_path / "int8.pt2").write_bytes(b"PK")
    with pytest.raises(QtoolError, match=r"int8\.pt2': expected an ONNX file that ONNX Runtime .* can load"):
        qtool.benchmark(tmp_path / "int8.pt2", seconds=0)


def test_what_export_returned_stands_for_its_run_directory(tmp_path: Path) -> None:
    batches = [torch.randn(8, 4)]
    quantized = qtool.quantize(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), batches, out=tmp_path)
    exported = qtool.export(tmp_path, samples=batches, gates=False, baselines=None)
    assert torch.equal(qtool.load_quantized(exported)(batches[0]), quantized(batches[0]))


@pytest.mark.parametrize(
    ("item", "told"),
    [
        ({"image": torch.zeros(1, 4, 4), "label": 0}, "call the items of a dict what the model calls its arguments"),
        ({"x": torch.zeros(1, 4, 4), "labels": 0}, r"missing .* 'labels'; .* and stay in \(\{…\},\)"),
    ],
)
def test_a_dict_that_a_model_does_not_take_is_told_by_each_stage(item: Any, told: str) -> None:
    class Conditioned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, 2, 4)

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return self.conv(x).flatten(1) + labels

    model, data = Conditioned(), {"train": [item] * 4, "test": [item] * 4}
    for stage in (qtool.train, qtool.quantize, qtool.predict_memory):
        with pytest.raises(QtoolError, match=told):
            stage(model, data)


def test_a_dict_that_is_one_argument_of_the_model_is_told_how_to_be_nested() -> None:
    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 2)

        def forward(self, given: dict[str, Tensor], scale: float = 1.0) -> Tensor:
            return self.linear(given["image"] + given["depth"]) * scale

    flat: dict[str, Any] = {"image": torch.ones(4), "depth": torch.zeros(4)}
    model, told = Joined(), r"give \{'given': \{…\}\} if 'given' is to be the whole dict; else call the items"
    for stage in (qtool.train, qtool.quantize, qtool.predict_memory):
        with pytest.raises(QtoolError, match=told):
            stage(model, {"train": [(flat, 1)] * 4, "test": [(flat, 1)] * 4})
    nested = [({"given": flat}, 1)] * 4
    assert qtool.quantize(model, {"train": nested, "test": nested}, effort="fast").plan.units


def test_training_with_rounding_takes_batches_as_training_does() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)).eval()
    batches = [(torch.randn(8, 1, 8, 8), torch.arange(8) % 3) for _ in range(4)]
    options: dict[str, Any] = {"mode": "qat", "learning_rate": 0.01, "epochs": 2, "device": "cpu"}
    trained, again = (qtool.quantize(model, data, **options) for data in (batches, iter(batches)))
    plain = qtool.quantize(model, batches, effort="fast")
    x = batches[0][0]
    assert torch.equal(trained(x), again(x))
    assert not torch.equal(trained(x), plain(x))
    with pytest.raises(QtoolError, match=r"expected targets; got inputs alone; .* or mode 'ptq'"):
        qtool.quantize(model, [x], mode="qat")


def test_threads_that_quantize_and_export_at_once_take_turns(tmp_path: Path) -> None:
    def made(seed: int) -> bool:
        model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)).eval()
        images = torch.randn(16, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
        quantized = qtool.quantize(model, [images])
        exported = qtool.export(quantized, tmp_path / str(seed), samples=[images], baselines=None)
        return all(gate["passed"] for gate in exported.gates)

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(made, range(3)))


def test_a_first_batch_without_samples_is_passed_over() -> None:
    x = torch.randn(4, 3)
    made = qtool.quantize(nn.Sequential(nn.Linear(3, 2)), [x[:0], x], effort="fast")
    assert made(x[:3]).shape == (3, 2)
    with pytest.raises(QtoolError, match="calibration: expected at least one batch"):
        qtool.quantize(nn.Sequential(nn.Linear(3, 2)), [x[:0]], effort="fast")


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ({"edge_bits": 4}, "'edge_bits': expected weight_bits of 6 or fewer beside it; got 8"),
        ({"edge_bits": 4, "weight_bits": 6}, "'edge_bits': expected at least the 6 of weight_bits; got 4"),
        ({"edge_bits": 4, "weight_bits": 4}, None),
        ({"ranges": "percentile", "weights_only": True}, "'ranges': expected activations .* got weights_only"),
        ({"percentile": 60.0, "weights_only": True}, "'percentile': expected activations"),
        ({"rounding_steps": 9}, "'rounding_steps': expected adaround or brecq among .*; got pixels, smooth, "),
        ({"rounding_steps": 9, "algorithms": ("brecq",)}, None),
        ({"rounding_steps": 9, "max_kl": 1.0, "method": "ptq"}, None),
        ({"effort": "best", "weights_only": True}, None),
        ({"effort": "fast", "weights_only": True}, None),
    ],
)
def test_what_would_change_no_number_is_refused(options: dict[str, Any], refused: str | None) -> None:
    if refused is None:
        assert quantize_configs(None, None, options)[1] is None
    else:
        with pytest.raises(UsageError, match=refused):
            quantize_configs(None, None, options)
