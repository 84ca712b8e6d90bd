"""A recurrent network with random weights, and sentences of random words for it, to measure on."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WORDS, LENGTH = 4000, 64


class Classifier(nn.Module):
    """Sentences of words to four classes: a table, two LSTM layers of both directions, and a linear layer."""

    def __init__(self, width: int = 128, hidden: int = 256) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, width)
        self.rnn = nn.LSTM(width, hidden, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * hidden, 4)

    def forward(self, words: Tensor) -> Tensor:
        states, _ = self.rnn(self.table(words))
        logits: Tensor = self.head(states.mean(1))
        return logits


def lstm_classifier() -> Classifier:
    """The network, the same each time."""
    torch.manual_seed(0)
    return Classifier().eval()


def sentences() -> dict[str, list[tuple[Tensor, int]]]:
    """Training and test sentences, 64 each."""
    draw = torch.Generator().manual_seed(0)
    words = torch.randint(0, WORDS, (128, LENGTH), generator=draw)
    classes = torch.randint(0, 4, (128,), generator=draw).tolist()
    pairs = list(zip(words, classes, strict=True))
    return {"train": pairs[:64], "test": pairs[64:]}
