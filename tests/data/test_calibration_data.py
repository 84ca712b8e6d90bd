"""Calibration data: drawn the same way each time, from where it was asked for, and never from the test set."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from qtool.data.calibration_data import FOLDERS, Inputs, draw, read
from qtool.data.specs import from_mapping, load_data, targets_of
from qtool.errors import QtoolError, UsageError


def test_a_draw_is_stratified_and_repeats(small_data: str) -> None:
    data = load_data(small_data)
    inputs, record = draw("train:30", data, 0, 8)
    assert isinstance(inputs, Inputs)
    labels = targets_of(data.train)
    assert labels is not None
    assert Counter(labels[inputs.indices].tolist()) == {0: 10, 1: 10, 2: 10}
    assert draw("train:30", data, 0, 8)[1] == record
    assert draw("train:30", data, 1, 8)[1]["indices_sha256"] != record["indices_sha256"]
    assert record["num_samples"] == record["num_asked"] == 30


def test_batches_can_be_gone_through_again_and_hold_all_samples(small_data: str) -> None:
    inputs, _ = draw("train:30", load_data(small_data), 0, 8)
    sizes = [len(batch) for batch in inputs]
    assert sizes == [len(batch) for batch in inputs] == [8, 8, 8, 6]
    assert len(inputs) == 4  # type: ignore[arg-type]


class Augmented(Dataset[Any]):
    """Noise, drawn whenever it is read."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        return torch.randn(3), index % 2


def test_a_set_that_augments_gives_the_same_inputs_in_every_pass_by_the_seed() -> None:
    data = from_mapping({"train": Augmented(), "test": Augmented()})
    inputs, again, other = (torch.cat(list(draw("train:12", data, seed, 5)[0])) for seed in (0, 0, 1))
    (kept, _), _ = draw("train:12", data, 0, 5), torch.rand(3)
    assert all(torch.equal(torch.cat(list(kept)), inputs) for _ in range(2))
    assert torch.equal(inputs, again)
    assert not torch.isin(inputs, other).any()


def test_a_small_set_is_taken_whole_and_the_record_says_so(small_data: str) -> None:
    _, record = draw("train:5000", load_data(small_data), 0, 8)
    assert (record["num_samples"], record["num_asked"]) == (216, 5000)


def test_a_recipe_of_ones_own(tmp_path: Path, small_data: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(f'data = "{small_data}"\npart = "validation"\nsamples = 6\nseed = 3\n')
    inputs, record = draw(str(path), None, 0, 4)
    assert [len(batch) for batch in inputs] == [4, 2]
    assert (record["part"], record["seed"], record["spec"]) == ("validation", 3, str(path))


@pytest.mark.parametrize("name", sorted(p.stem for folder in FOLDERS for p in folder.glob("*.toml")))
def test_every_recipe_that_comes_with_the_package_draws(name: str) -> None:
    inputs, record = draw(name, None, 0, 32)
    assert sum(len(batch) for batch in inputs) == record["num_samples"] > 0


@pytest.mark.parametrize(
    ("spec", "part"),
    [
        ("train:0", "N of at least 1"),
        ("train:-5", "N of at least 1"),
        ("train:many", "'many'"),
        ("trian:512", "did you mean 'train:512'?"),
        ("64", "write train:64"),
        ("fashon-mnist", "did you mean 'fashion-mnist'?"),
        ("missing.toml", "a readable TOML file"),
    ],
)
def test_a_spec_that_means_nothing_is_refused(spec: str, part: str) -> None:
    with pytest.raises(UsageError) as caught:
        read(spec)
    assert part in str(caught.value)


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ('part = "test"', "did you mean 'train'|one of train"),
        ("sample = 3", "'sample'"),
        ("samples = 0", "at least 1"),
        (f"seed = {2**63}", "'seed': expected at most"),
    ],
)
def test_a_recipe_that_is_wrong_names_file_and_key(tmp_path: Path, content: str, part: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(content)
    with pytest.raises(UsageError, match=part) as caught:
        read(str(path))
    assert "mine.toml" in str(caught.value)


def test_without_data_a_draw_asks_for_it() -> None:
    with pytest.raises(UsageError, match="--data"):
        draw("train:5", None, 0, 8)


def test_an_empty_part_is_refused(small_data: str) -> None:
    import dataclasses

    data = load_data(small_data)
    empty = dataclasses.replace(data, train=torch.utils.data.TensorDataset(torch.zeros(0, 1)))
    with pytest.raises(QtoolError, match="at least one sample"):
        draw("train:5", empty, 0, 8)
