"""Data: what a spec names, the split that nobody trains on, and how samples are drawn."""

from __future__ import annotations

import hashlib
import pickle
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from image_sets import images, mapping, write_folder
from torch.utils.data import TensorDataset

from qtool.data.specs import (
    EMBEDDED,
    Preprocessing,
    batches,
    example_input,
    from_mapping,
    load_data,
    stratified_sample,
    targets_of,
)
from qtool.errors import QtoolError, UsageError

FULL_SET = Path("/usr/share/datasets/fashion-mnist")  # of Debian's package, where it is installed


def labels_of(dataset: Any) -> list[int]:
    return [int(target) for _, target in (dataset[i] for i in range(len(dataset)))]


@pytest.mark.parametrize("spec", ["fashion-mnist", "alice", "npz", "imagefolder"])
def test_opened_data_are_the_same_in_another_process(spec: str, npz: Path, tmp_path: Path) -> None:
    """That of a pool, of a DataLoader's workers where they are spawned, of ``train(…, devices=2)``."""
    if spec == "imagefolder":
        write_folder(tmp_path / "images")
    places = {"npz": f"npz:{npz}", "imagefolder": f"imagefolder:{tmp_path / 'images'}"}
    data = load_data(places.get(spec, spec))
    sent = pickle.loads(pickle.dumps(data))
    for part in ("train", "validation", "test"):
        for x, y in zip(next(batches(getattr(data, part), 4)), next(batches(getattr(sent, part), 4)), strict=True):
            assert torch.equal(x, y)


def test_the_embedded_set() -> None:
    data = load_data("fashion-mnist")
    assert [len(part) for part in (data.train, data.validation, data.test)] == [5400, 600, 1000]
    assert data.num_classes == 10
    assert data.labels[0] == "T-shirt/top"
    assert data.labels[9] == "Ankle boot"
    for part, each in ((data.train, 540), (data.validation, 60), (data.test, 100)):
        assert set(Counter(targets_of(part).tolist()).values()) == {each}
    x, y = next(batches(data.train, 64))
    assert (x.shape, x.dtype, y.dtype) == ((64, 1, 28, 28), torch.float32, torch.int64)
    assert sum(p.stat().st_size for p in (EMBEDDED / "fashion_mnist").iterdir()) < 4 * 2**20


def test_the_embedded_files_are_the_ones_that_were_drawn() -> None:
    found = {}
    for part in ("train", "test"):
        with np.load(EMBEDDED / "fashion_mnist" / f"{part}.npz") as arrays:
            parts = (arrays["images"].tobytes(), arrays["labels"].tobytes(), arrays["indices"].tobytes())
            found[part] = hashlib.sha256(b"".join(parts)).hexdigest()
    readme = (EMBEDDED / "fashion_mnist" / "README.md").read_text()
    assert all(digest in readme for digest in found.values()), found


@pytest.mark.skipif(not FULL_SET.exists(), reason="the full set is not installed")
def test_the_script_in_the_readme_draws_the_embedded_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readme = (EMBEDDED / "fashion_mnist" / "README.md").read_text()
    for name, digest in re.findall(r"\| `(\S+\.gz)` \| `(\w+)` \|", readme):
        assert hashlib.sha256((FULL_SET / name).read_bytes()).hexdigest() == digest
    monkeypatch.chdir(tmp_path)
    exec(re.search(r"```python\n(.*?)```", readme, re.S)[1], {})
    for part in ("train", "test"):
        with np.load(f"{part}.npz") as drawn, np.load(EMBEDDED / "fashion_mnist" / f"{part}.npz") as kept:
            assert all(np.array_equal(drawn[key], kept[key]) for key in ("images", "labels", "indices"))


def test_a_tenth_is_held_out_and_every_sample_is_in_one_part(npz: Path) -> None:
    data = load_data(f"npz:{npz}")
    stored = np.load(npz / "train.npz")["images"].astype(np.float32)
    held = torch.cat([x for x, _ in batches(data.validation, 64)])
    kept = torch.cat([x for x, _ in batches(data.train, 64)])
    assert (len(kept), len(held)) == (54, 6)
    assert Counter(labels_of(data.validation)) == {0: 2, 1: 2, 2: 2}
    both = np.sort(torch.cat([kept, held]).numpy().reshape(60, -1).sum(1))
    whole = data.preprocessing.apply(torch.from_numpy(stored[:, None]))
    np.testing.assert_allclose(both, np.sort(whole.numpy().reshape(60, -1).sum(1)), rtol=1e-6)


def test_the_seed_moves_the_split_and_nothing_else_does(npz: Path) -> None:
    first, again, other = (load_data(f"npz:{npz}", seed=seed) for seed in (0, 0, 1))
    held = [next(batches(data.validation, 6))[0] for data in (first, again, other)]
    assert torch.equal(held[0], held[1])
    assert not torch.equal(held[0], held[2])
    assert first.identity == again.identity == other.identity


def test_without_a_test_part_the_validation_part_is_judged_and_another_held_out(npz: Path) -> None:
    whole = load_data(f"npz:{npz}")
    assert whole.split == ""
    for name in ("val", "validation"):
        (npz / "test.npz").rename(npz / f"{name}.npz")
        data = load_data(f"npz:{npz}")
        assert data.split.startswith("no test part: the validation part is judged")
        assert labels_of(data.validation) == labels_of(whole.validation)
        assert torch.equal(next(batches(data.test, 12))[0], next(batches(whole.test, 12))[0])
        assert data.identity == whole.identity
        (npz / f"{name}.npz").rename(npz / "test.npz")
    rows = [(torch.full((2,), float(i)), i % 2) for i in range(20)]
    data = from_mapping({"train": rows, "validation": rows[:3]})
    assert (len(data.train), len(data.validation), len(data.test)) == (18, 2, 3)
    assert data.split


def test_a_given_validation_part_is_taken(npz: Path) -> None:
    np.savez(npz / "validation.npz", **images(9, seed=3))
    data = load_data(f"npz:{npz}")
    assert (len(data.train), len(data.validation)) == (60, 9)


def test_identity_names_the_content(npz: Path) -> None:
    before = load_data(f"npz:{npz}").identity
    arrays = images(60)
    arrays["images"][59, 0, 0] ^= 1
    np.savez(npz / "train.npz", **arrays)
    assert load_data(f"npz:{npz}").identity != before


@settings(max_examples=60)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.data())
def test_stratified_samples_keep_the_shares(labels: list[int], data: Any) -> None:
    count = data.draw(st.integers(1, len(labels)))
    dataset = TensorDataset(torch.zeros(len(labels), 1), torch.tensor(labels))
    chosen = stratified_sample(dataset, count, seed=1)
    assert chosen == sorted(set(chosen)) == stratified_sample(dataset, count, seed=1)
    assert len(chosen) == count
    drawn = Counter(labels[i] for i in chosen)
    for label, there in Counter(labels).items():
        assert abs(drawn[label] * len(labels) - there * count) < len(labels)  # less than one sample from its share


def test_samples_differ_by_seed_and_refuse_what_is_not_there() -> None:
    dataset = TensorDataset(torch.zeros(50, 1), torch.arange(50) % 5)
    assert stratified_sample(dataset, 10, 1) != stratified_sample(dataset, 10, 2)
    for count in (0, 51):
        with pytest.raises(QtoolError, match="1 to 50 samples"):
            stratified_sample(dataset, count, 0)


def test_samples_without_class_labels_are_drawn_plainly() -> None:
    dataset = TensorDataset(torch.zeros(50, 1), torch.randn(50, 2))
    assert targets_of(dataset) is None
    assert len(set(stratified_sample(dataset, 20, 0))) == 20


def test_the_default_order_is_as_stored(npz: Path) -> None:
    data = load_data(f"npz:{npz}")
    assert torch.equal(torch.cat([y for _, y in batches(data.test, 5)]), torch.arange(12) % 3)
    for index in (0, 11, -1):
        x, y = data.test[index]
        assert torch.equal(x, next(batches(data.test, 12))[0][index])
        assert y == index % 12 % 3
    with pytest.raises(IndexError):
        data.test[12]


def test_examples_are_two(npz: Path) -> None:
    assert example_input(load_data(f"npz:{npz}")).shape == (2, 1, 6, 5)
    assert example_input([(torch.zeros(3), 0)]).shape == (1, 3)


def test_a_factory(tmp_path: Path) -> None:
    (tmp_path / "d.py").write_text(
        "import torch\nfrom torch.utils.data import TensorDataset\n"
        "def make():\n    t = TensorDataset(torch.arange(40.).view(20, 2), torch.arange(20) % 2)\n"
        "    return {'train': t, 'test': t, 'labels': ['no', 'yes']}\n"
        "def bad():\n    raise OSError('no disk')\n"
    )
    data = load_data(f"{tmp_path / 'd.py'}:make")
    assert (len(data.train), len(data.validation), len(data.test)) == (18, 2, 20)
    assert (data.num_classes, data.labels, data.preprocessing) == (2, ("no", "yes"), None)
    assert sorted(labels_of(data.validation)) == [0, 1]
    before = data.identity
    with (tmp_path / "d.py").open("a") as file:
        file.write("# changed\n")
    assert load_data(f"{tmp_path / 'd.py'}:make").identity != before
    with pytest.raises(QtoolError, match=r"OSError: no disk \(.*d\.py:7\)"):
        load_data(f"{tmp_path / 'd.py'}:bad")


def test_mapping_identity_names_what_is_in_memory() -> None:
    given = mapping()
    before = from_mapping(given).identity
    assert from_mapping(given).identity == before
    given["test"].tensors[0][7, 2] += 1
    assert from_mapping(given).identity != before
    rows = [(torch.zeros(2), 0), (torch.ones(2), 1)]
    before = from_mapping({"train": rows, "test": rows}).identity
    assert from_mapping({"train": rows, "test": rows[::-1]}).identity != before


def test_classes_are_counted_given_or_unknown() -> None:
    assert from_mapping(mapping()).num_classes == 4
    assert from_mapping(mapping(num_classes=9)).num_classes == 9
    regression = TensorDataset(torch.randn(20, 3), torch.randn(20))
    data = from_mapping({"train": regression, "test": regression})
    assert data.num_classes is None
    assert len(data.validation) == 2


def test_a_target_that_tasks_do_not_count_is_no_class() -> None:
    rows = [(torch.zeros(3), label) for label in (0, -100, 3)]
    assert from_mapping({"train": rows, "test": rows}).num_classes == 4


def test_preprocessing_may_be_given() -> None:
    how = Preprocessing((0.5,), (0.25,), size=(4, 4))
    assert from_mapping(mapping(preprocessing=how)).preprocessing == how
    assert from_mapping(mapping(preprocessing=how.as_dict())).preprocessing == how


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ([1, 2], "a mapping with 'train' and 'test'; got list"),
        ({"train": [(torch.zeros(1), 0)]}, "no 'test'"),
        (mapping(tset=[]), "'tset'; did you mean 'test'"),
        (mapping(test=[]), "test: expected at least one sample"),
        (mapping(test=iter([])), "a map-style dataset"),
        (mapping(test=[(torch.zeros(3), 0, 1)]), r"test\[0\]: expected a pair"),
        (mapping(test=[(torch.zeros(3), 0), (torch.zeros(3), 4)]), r"test\[1\]: expected a label of 0 to 3; got 4"),
        (mapping(test=[(torch.zeros(3), -1)]), r"test\[0\]: expected a label of 0 to 3; got -1"),
        (
            mapping(test=[(torch.zeros(3), -100)]),
            r"test: expected samples with a label; got -100, which is not counted",
        ),
        (
            mapping(train=[(torch.zeros(3), 10**12), (torch.zeros(3), 0)]),
            r"train\[0\]: .* class, below 1,000,000; got 10+;",
        ),
        (mapping(labels=["a", "b"]), r"train\[2\]: expected a label of 0 to 1; got 2"),
        ({"train": [(torch.zeros(3), 0)], "test": [(torch.zeros(3), 0)]}, "at least 2 samples; got 1"),
    ],
)
def test_mappings_that_are_wrong(given: Any, told: str) -> None:
    with pytest.raises(QtoolError, match=told):
        from_mapping(given)


def test_specs_that_name_nothing() -> None:
    with pytest.raises(UsageError, match="did you mean 'fashion-mnist'"):
        load_data("fashion-minst")
    with pytest.raises(UsageError, match="a data spec"):
        load_data("npz:")
