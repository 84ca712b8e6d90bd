"""Sequences padded without torch's own operator, against it."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from qtool.memory.packed import pad


@given(
    st.lists(st.integers(1, 7), min_size=1, max_size=6), st.booleans(), st.integers(0, 3), st.floats(-2, 2, width=32)
)
def test_it_pads_as_torch_does(lengths: list[int], batch_first: bool, more: int, value: float) -> None:
    lengths.sort(reverse=True)
    torch.manual_seed(0)
    packed = pack_padded_sequence(torch.randn(len(lengths), lengths[0], 3), torch.tensor(lengths), batch_first=True)
    total = lengths[0] + more
    wanted, counted = pad_packed_sequence(packed, batch_first, value, total if more else None)
    found, told = pad(packed.data, packed.batch_sizes, batch_first, value, total if more else -1)
    assert torch.equal(found, wanted)
    assert found.stride() == wanted.stride()
    assert torch.equal(told, counted)
