"""Labels of tokens: those of the next one, as transformers' causal models have them, or of their own place."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qtool.data import labels
from qtool.data.given import pairs_of
from qtool.errors import QtoolWarning
from qtool.source import open_source
from qtool.tasks import LanguageModelling

Items = list[dict[str, Tensor]]


def answers(count: int = 40) -> Items:
    """A prompt, one labelled token, and padding."""
    tokens = torch.randint(4, 20, (count, 8), generator=torch.Generator().manual_seed(0))
    tokens[:, 6:] = 0
    found = torch.full_like(tokens, -100)
    found[:, 5] = tokens[:, 5]
    return [{"input_ids": x, "labels": y} for x, y in zip(tokens, found, strict=True)]


def every_other() -> Items:
    items = answers()
    for item in items:
        item["labels"] = torch.where(torch.arange(8) % 2 == 0, item["input_ids"], -100)
    return items


def stacked(items: Items) -> dict[str, Tensor]:
    return {name: torch.stack([item[name] for item in items]) for name in items[0]}


def model(name: str) -> nn.Module:
    library = pytest.importorskip("transformers")
    sizes = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    config = library.LlamaConfig if name.startswith("Llama") else library.BertConfig
    more = {"num_labels": 20} if name.endswith("TokenClassification") else {}
    made: nn.Module = getattr(library, name)(config(num_hidden_layers=1, **sizes, **more))
    return made.eval()


@pytest.mark.parametrize("items", [answers(), every_other()], ids=["answers", "every other"])
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "BertForMaskedLM", "BertForTokenClassification"])
@pytest.mark.filterwarnings("error::qtool.errors.QtoolWarning")
def test_labels_are_compared_as_the_models_own_loss_compares_them(name: str, items: Items) -> None:
    net = nn.Sequential(model(name))  # in a wrapper
    with torch.no_grad():
        expected = net[0](**stacked(items)).loss.item()
        source = open_source(net, {"train": items, "test": items}, "language-modelling")
        batches: Any = [stacked(items)]
        for inputs, target in (
            source.data.test.batch(range(len(items))),
            *pairs_of(open_source(net, batches, "language-modelling").data),
        ):
            loss, weight = LanguageModelling().loss(net[0](**inputs), target)
            assert (loss / weight).item() == pytest.approx(expected, rel=1e-5)


def test_masked_tokens_of_an_unknown_model_stand_where_they_are_in_every_sample() -> None:
    items = [item | {"labels": item["labels"] + (i % 2) * (item["labels"] > 0)} for i, item in enumerate(answers())]
    items[4]["labels"] = items[4]["input_ids"].clone()  # none of its tokens was hidden
    with warnings.catch_warnings(action="error", category=QtoolWarning):
        data = open_source(None, {"train": items, "test": items}).data
    for part, at in ((data.test, 4), (data.test, 0)):
        assert torch.equal(part[at][1], items[at]["labels"])


def test_few_labels_that_repeat_their_input_are_told() -> None:
    with pytest.warns(QtoolWarning, match=r"few places .* of their own place; give \(input, target\)"):
        ((_, target),) = pairs_of([stacked(answers(3))])
    assert torch.equal(target, stacked(answers(3))["labels"])
    verdict = labels.judged([(item["input_ids"], item["labels"]) for item in answers()])
    assert verdict == labels.Verdict(moved=True)


def test_next_tokens_are_not_moved_on_again() -> None:
    tokens = torch.arange(12).reshape(2, 6)
    following = tokens.roll(-1, -1)
    following[:, -1] = -100
    assert labels.moved_on(tokens, following, True) is following
