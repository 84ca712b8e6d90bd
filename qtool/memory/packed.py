"""Padding packed sequences (``nn.utils.rnn.pad_packed_sequence``) again where tensors have no values.

torch's own writes lengths into memory that fake tensors lack. This one takes the same tensors in the same order: the
whole padded output, then for each run of time steps that as many sequences reach a copy into its part. How many reach
each step is not fake: ``qtool.memory.trial`` found it with real values.
"""

from __future__ import annotations

from itertools import groupby

import torch
from torch import Tensor


def pad(data: Tensor, batch_sizes: Tensor, batch_first: bool, value: float, num_steps: int) -> tuple[Tensor, Tensor]:
    """The sequences in ``data`` (N × …) as ``num_steps`` × B × …, or B × ``num_steps`` × …, and their B lengths.

    ``batch_sizes``: how many sequences reach each time step (int64, falling); their number is the least ``num_steps``.
    """
    sizes = batch_sizes.tolist()
    output = data.new_full((max(num_steps, len(sizes)), sizes[0], *data.shape[1:]), value)
    row = step = 0
    for size, equal in groupby(sizes):
        steps = sum(1 for _ in equal)
        part = data[row : row + size * steps].view(steps, size, *data.shape[1:])
        output[step : step + steps, :size].copy_(part)
        row, step = row + size * steps, step + steps
    lengths = torch.tensor([sum(size > place for size in sizes) for place in range(sizes[0])])
    return output.transpose(0, 1) if batch_first else output, lengths
