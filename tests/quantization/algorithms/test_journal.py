"""The journal: what it is keyed by, and that what cannot be read is done again."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from hard_nets import images
from test_adaround import subject
from torch import nn

import qtool
from qtool.quantization.algorithms import reconstruct
from qtool.quantization.algorithms.journal import Journal, fingerprint


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Conv2d(3, 2, 3).eval()


def test_the_key_is_all_that_a_pass_depends_on() -> None:
    given = subject(net(), [images(8)])
    same = fingerprint(subject(net(), [images(8)]))
    assert fingerprint(given) == same
    other_data = dataclasses.replace(given, batches=[images(8, seed=5)])
    other_options = dataclasses.replace(given, config=dataclasses.replace(given.config, rounding_steps=7))
    changed = net()
    changed.weight.data[0, 0, 0, 0] += 0.5
    keys = {same, *map(fingerprint, (other_data, other_options, subject(changed, [images(8)])))}
    assert len(keys) == 4


def test_a_part_is_made_once_unless_its_file_is_broken_and_a_stale_journal_goes(tmp_path: Path) -> None:
    given = subject(net(), [images(8)], scratch=tmp_path)
    made = []

    def make() -> dict[str, torch.Tensor]:
        made.append(1)
        return {"bias": torch.tensor([0.1], dtype=torch.float64)}

    for _ in range(2):
        assert Journal(given, "x").once("part", make)["bias"].item() == 0.1
    assert len(made) == 1
    (file,) = tmp_path.rglob("*.safetensors")
    file.write_bytes(file.read_bytes()[:20])
    Journal(given, "x").once("part", make)
    assert len(made) == 2
    Journal(dataclasses.replace(given, batches=[images(8, seed=5)]), "x").once("part", make)
    assert len(made) == 3
    assert len(list(tmp_path.iterdir())) == 1


def test_a_stage_tells_its_progress_goes_on_and_leaves_nothing_of_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    def run(progress: object) -> None:
        qtool.quantize(
            net(), [images(8)], out=tmp_path / "run", algorithms=("adaround",), rounding_steps=3, progress=progress
        )

    with monkeypatch.context() as patch:
        patch.setattr(reconstruct._Learner, "learn", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(None)
    assert len(list((tmp_path / "run" / "checkpoints").rglob("*.safetensors"))) == 1
    run(told.append)
    assert "quantize: adaround conv2d (0 of 1)" in told
    assert not (tmp_path / "run" / "checkpoints").exists()


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt
