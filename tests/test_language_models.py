"""Language models through the stages: token weights, perplexity, resume, transformers from a config."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import qtool
from qtool.data.specs import batches, load_data
from qtool.errors import QtoolError, UsageError
from qtool.evaluate import sqnr_db
from qtool.models.gpt import GPT
from qtool.runtimes import open_session
from qtool.source import anchored

OPTIONS = {
    "task": "language-modelling", "batch_size": 6, "device": "cpu", "learning_rate": 3e-3, "max_steps": 4, "epochs": 9,
}  # fmt: skip


@pytest.fixture
def text(tmp_path: Path) -> str:
    """Six documents of a few words: windows of 24 count 19 to 24 tokens each."""
    for i in range(6):
        (tmp_path / f"{i}.txt").write_text(f"document {i} says: " + "and so on, " * (5 + i))
    return f"text:{tmp_path}:24"


def small() -> GPT:
    torch.manual_seed(0)
    return GPT(256, layers=2, width=16, heads=2, context=32)


def test_micro_batches_weigh_tokens(text: str) -> None:
    whole, parts = small(), small()
    first = qtool.train(whole, text, **OPTIONS)
    second = qtool.train(parts, text, **OPTIONS, micro_batches=4)
    assert first.history.losses == pytest.approx(second.history.losses, rel=1e-5)
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)  # Adam divides tiny gradients by their size


def test_perplexity_is_that_of_all_counted_tokens(text: str) -> None:
    result = qtool.train(small(), text, **OPTIONS)
    test = load_data(text).test
    nats, count = 0.0, 0
    for tokens, targets in batches(test, 1):
        found = torch.log_softmax(result.model(tokens), -1)
        for place, target in enumerate(targets[0].tolist()):
            if target >= 0:
                nats, count = nats - found[0, place, target].item(), count + 1
    assert result.metrics["num_samples"] == count
    assert result.metrics["perplexity"] == pytest.approx(math.exp(nats / count), rel=1e-4)


@pytest.mark.slow
def test_with_merged_adapters_it_is_quantized_and_passes_its_gates(text: str, tmp_path: Path) -> None:
    net, run = tmp_path / "net.py", tmp_path / "run"
    net.write_text(
        "from qtool.models.gpt import GPT\ndef small():\n    return GPT(256, layers=2, width=16, heads=2, context=32)\n"
    )
    qtool.train(f"{net}:small", text, out=run, lora=2, **OPTIONS)
    quantized = qtool.quantize(run, out=run, calibration="train:4", calibration_batch_size=2, trust=True)
    exported = qtool.export(run, parity_samples=2, reference_samples=1, trust=True)
    assert not any(gate["passed"] is False for gate in exported.gates)
    assert len(quantized.plan.integer_units) > 4
    figures = qtool.benchmark(run, seconds=0.1, width=1.0, allow_slower=True, trust=True)
    for name, file in exported.files.items():
        session, nats, count = open_session(file), 0.0, 0
        for tokens, targets in batches(load_data(text).test, 2):
            logits = torch.from_numpy(session.run({session.inputs[0].name: tokens.numpy()})[0])
            nats += float(F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"))
            count += int((targets != -100).sum())
        told = figures["variants"][name]["accuracy"]
        assert told["metrics"]["perplexity"] == pytest.approx(math.exp(nats / count), rel=1e-4)
        assert told["metrics_reference"] == figures["variants"]["fp32"]["accuracy"]["metrics"]


def test_the_wrong_task_names_the_right_one(text: str) -> None:
    with pytest.raises(QtoolError, match="--task language-modelling"):
        qtool.train(small(), text, **(OPTIONS | {"task": "classification"}))


def test_specs_mean_the_same_from_any_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").touch()
    assert anchored("text:a.txt:64:tok.json") == f"text:{tmp_path / 'a.txt'}:64:{tmp_path / 'tok.json'}"
    assert anchored("transformers:config.json") == f"transformers:{tmp_path / 'config.json'}"
    assert anchored("transformers:gpt2") == "transformers:gpt2"


@pytest.mark.filterwarnings("ignore")
def test_transformers_models_come_from_a_config(text: str, tmp_path: Path) -> None:
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"transformers does not import: {error}")
    config = GPT2Config(vocab_size=256, n_positions=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).bfloat16().save_pretrained(tmp_path / "model")
    stored = qtool.load_model(f"transformers:{tmp_path / 'model'}", num_classes=256, weights="pretrained")
    assert {parameter.dtype for parameter in stored.parameters()} == {torch.float32}
    for spec in (tmp_path / "model", tmp_path / "model" / "config.json"):
        model = qtool.load_model(f"transformers:{spec}", num_classes=256)
        assert model(torch.zeros(2, 24, dtype=torch.int64)).shape == (2, 24, 256)
    run = qtool.train(f"transformers:{tmp_path / 'model'}", text, out=tmp_path / "run", **OPTIONS)
    again = qtool.train(f"transformers:{tmp_path / 'model'}", text, out=tmp_path / "run", **OPTIONS)
    assert again.metrics == run.metrics
    for name, given, times in (("model", None, 1), ("model", "pretrained", 0), ("model/config.json", None, 0)):
        told: list[Any] = []
        spec = f"transformers:{tmp_path / name}"
        qtool.train(spec, text, weights=given, progress=told.append, **OPTIONS | {"epochs": 0})
        assert sum("random weights; --weights pretrained" in str(line) for line in told) == times
    weights = tmp_path / "model" / "model.safetensors"
    named = qtool.load_model(f"transformers:{tmp_path / 'model'}", num_classes=256, weights=weights)
    assert all(torch.equal(value, stored.state_dict()[name]) for name, value in named.state_dict().items())
    with pytest.raises(QtoolError, match="a vocabulary of at least the data's 300 tokens; got 256"):
        qtool.load_model(f"transformers:{tmp_path / 'model'}", num_classes=300)
    found = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(found | {"architectures": None}))
    with pytest.raises(QtoolError, match="that transformers has; got none recorded"):
        qtool.load_model(f"transformers:{tmp_path / 'model'}", num_classes=256)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("config", "proposed"),
    [
        ({"model_type": "bert"}, r'\["BertLMHeadModel"\] or \["BertForSequenceClassification"\]'),
        (
            {"model_type": "vit", "architectures": ["NoSuchNet"]},
            r'got NoSuchNet; .* \["ViTForImageClassification"\] or \["ViTModel"\]',
        ),
        ({"model_type": "clip_text_model"}, r'\["CLIPTextModel"\]'),
        ({"model_type": "funnel"}, r'\["FunnelForSequenceClassification"\] or \["FunnelModel"\]'),
    ],
)
def test_a_config_without_a_known_class_is_told_one_of_its_own(
    config: dict[str, Any], proposed: str, tmp_path: Path
) -> None:
    try:
        from transformers import BertModel  # noqa: F401
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"transformers does not import: {error}")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(QtoolError, match=f"'architectures' in its config.json that transformers has; .*{proposed}$"):
        qtool.load_model(f"transformers:{tmp_path}", num_classes=10)


def _no_connection(*_: Any, **__: Any) -> None:
    raise OSError("no connection")


@pytest.mark.filterwarnings("ignore")
def test_a_transformers_folder_is_told_from_other_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=16, n_positions=8, n_embd=4, n_layer=1, n_head=1)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "m")
    spec, stored = f"transformers:{tmp_path / 'm'}", f"{tmp_path / 'm'}"
    for wrong in (f"{spec}2", f"{spec}/conf.json", "transformers:runs/a/m", "transformers:~/m"):
        with pytest.raises(UsageError, match=r"a folder, a config\.json or a name .*; got a path to nothing"):
            qtool.load_model(wrong)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", _no_connection)
    with pytest.raises(QtoolError, match="got OSError: no connection; check the name, which is no folder here"):
        qtool.load_model("transformers:models/typo")
    monkeypatch.undo()
    with pytest.raises(UsageError, match=rf"--weights pretrained: .*a configuration alone; .* {spec}$"):
        qtool.load_model(f"{spec}/config.json", weights="pretrained")
    with pytest.raises(UsageError, match=rf"a model's folder, .*--weights pretrained with --model {spec}, or"):
        qtool.load_model(spec, weights=stored)
    expected = qtool.load_model(spec, weights="pretrained").state_dict()
    found = qtool.load_model(spec, weights=f"{stored}/model.safetensors", seed=1).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


@pytest.mark.filterwarnings("ignore")
def test_a_transformers_encoder_without_a_head_gives_its_states(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    transformers.BertModel(config).save_pretrained(tmp_path)
    model = qtool.load_model(f"transformers:{tmp_path}", weights="pretrained").eval()
    x = torch.arange(24).reshape(2, 12)
    expected = transformers.AutoModel.from_pretrained(tmp_path).eval()(x)
    assert torch.equal(model(x).last_hidden_state, expected.last_hidden_state)
    found = qtool.quantize(model, [x], effort="fast")(x)
    assert sqnr_db(expected.last_hidden_state, found.last_hidden_state) > 25
    assert sqnr_db(expected.pooler_output, found.pooler_output) > 25


@pytest.mark.filterwarnings("ignore")
def test_adapters_of_a_transformers_model_are_read_by_peft(text: str, tmp_path: Path) -> None:
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    config = transformers.GPT2Config(vocab_size=256, n_positions=32, n_embd=16, n_layer=1, n_head=2)
    base = tmp_path / "model"
    transformers.GPT2LMHeadModel(config).save_pretrained(base)
    options: dict[str, Any] = OPTIONS | {"weights": "pretrained", "lora": 2, "learning_rate": 0.05}
    trained = qtool.train(f"transformers:{base}", text, out=tmp_path / "run", **options).model.eval()
    x = torch.arange(24)[None]
    plain = transformers.AutoModelForCausalLM.from_pretrained(base).eval()
    with torch.no_grad():
        before = plain(x).logits
        adapted = peft.PeftModel.from_pretrained(plain, tmp_path / "run").eval()(x).logits
        assert torch.allclose(adapted, trained(x), atol=1e-5)
    assert not torch.allclose(adapted, before, atol=1e-3)
