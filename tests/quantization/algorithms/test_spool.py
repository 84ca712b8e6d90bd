"""The spool: the fastest place that has room, one transfer for a value, room again for what was dropped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fake_device import DEVICE, Fake, Hidden
from torch.fx import Graph

from qtool.quantization.algorithms import spool
from qtool.quantization.algorithms.spool import CPU, Store


def test_values_lie_on_the_device_then_on_the_host_then_in_files_and_come_to_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(spool, "memory_free", lambda device: 100 / spool.SHARE)
    node, values = Graph().placeholder("x"), [torch.arange(i, i + 25.0) for i in range(4)]
    with Fake():
        store = Store(budget=150, device=DEVICE)
        for index, value in enumerate(values[:3]):
            store.put(node, index, value.to(DEVICE))
        assert (store.used[DEVICE], store.used[CPU]) == (100, 100)
        assert len(list(tmp_path.rglob("*.pt"))) == 1
        for index, value in enumerate(values[:3]):
            found = store.get(node, index)
            assert isinstance(found, Hidden)
            assert torch.equal(found.value, value)
            assert store.get(node, index) is found  # not read, nor moved, again
        store.put(node, 0, 7)  # in place of the one on the device
        store.put(node, 3, values[3])
        assert store.get(node, 0) == 7
        assert (store.used[DEVICE], torch.equal(store.get(node, 3).value, values[3])) == (100, True)
        store.drop(node)
        assert not store.used.total()
        assert not list(tmp_path.rglob("*.pt"))
        store.close()
    assert not list(tmp_path.iterdir())
