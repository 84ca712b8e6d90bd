"""Data: every spec, the split that nobody trains on, and each way in which a set can be wrong."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import pickle
import re
import shutil
import struct
import sys
import types
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_device import DEVICE, Fake
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from qtool.data import samples
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
from qtool.errors import QtoolError, QtoolWarning, UsageError

FULL_SET = Path("/usr/share/datasets/fashion-mnist")  # of Debian's package, where it is installed


def images(count: int, shape: tuple[int, ...] = (6, 5), classes: int = 3, seed: int = 0) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    return {"images": draw.integers(0, 256, (count, *shape), dtype=np.uint8), "labels": np.arange(count) % classes}


@pytest.fixture
def npz(tmp_path: Path) -> Path:
    np.savez(tmp_path / "train.npz", **images(60))
    np.savez(tmp_path / "test.npz", **images(12, seed=1))
    return tmp_path


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


# ---- the embedded set


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


# ---- normalisation


def test_normalisation_is_measured_on_the_training_part_alone(tmp_path: Path) -> None:
    arrays = images(40, (6, 5, 3))
    arrays["images"][..., 2] = 7  # a channel that never varies
    np.savez(tmp_path / "train.npz", **arrays)
    np.savez(tmp_path / "validation.npz", **images(10, (6, 5, 3), seed=2))
    np.savez(tmp_path / "test.npz", **images(10, (6, 5, 3), seed=1))
    data = load_data(f"npz:{tmp_path}")
    pixels = arrays["images"].astype(np.float64) / 255
    expected = pixels.std((0, 1, 2))
    expected[2] = 1.0
    np.testing.assert_allclose(data.preprocessing.mean, pixels.mean((0, 1, 2)), rtol=1e-12)
    np.testing.assert_allclose(data.preprocessing.std, expected, rtol=1e-12)
    assert data.preprocessing.size == (6, 5)
    x = torch.stack([data.train[i][0] for i in range(len(data.train))])
    torch.testing.assert_close(x.mean((0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(x[:, :2].std((0, 2, 3), unbiased=False), torch.ones(2), atol=1e-5, rtol=0)


def test_normalisation_is_bit_for_bit_what_numpy_computes() -> None:
    draw = np.random.default_rng(0)
    pixels = np.arange(256, dtype=np.uint8).reshape(1, 1, 16, 16)
    for mean, std in draw.uniform(0.1, 0.6, (20, 2)):
        x = (pixels.astype(np.float32) * np.float32(1 / 255) - np.float32(mean)) / np.float32(std)
        assert torch.equal(Preprocessing((mean,), (std,)).apply(torch.from_numpy(pixels)), torch.from_numpy(x))


def test_preprocessing_survives_json() -> None:
    import json

    how = Preprocessing((0.1, 0.2), (0.3, 0.4), size=(8, 9), resize="shorter-side")
    assert Preprocessing.from_dict(json.loads(json.dumps(how.as_dict()))) == how


# ---- the validation part


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


# ---- drawing samples


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


class Read(Dataset[Any]):
    """Ten samples, of which it is counted how many were read; ``changed`` is what a transform adds to targets."""

    def __init__(self, first: int, changed: int = 0) -> None:
        self.targets, self.count = [first + row % 3 for row in range(10)], 0
        if changed:
            self.target_transform = lambda target: target + changed
        self.changed = changed

    def __len__(self) -> int:
        return 10

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        self.count += 1
        return torch.zeros(2), self.targets[row] + self.changed


def test_targets_of_joined_sets_are_those_of_their_parts_none_of_them_read() -> None:
    parts = [Read(0), Subset(Read(3), [0, 2])]
    assert targets_of(ConcatDataset(parts)).tolist() == [*parts[0].targets, 3, 5]
    assert parts[0].count == parts[1].dataset.count == 0
    odd = TensorDataset(torch.zeros(4, 2), torch.zeros(4, 2))
    assert targets_of(ConcatDataset([Read(0), odd])) is None


def test_of_a_part_no_more_samples_are_read_than_it_has() -> None:
    read = Read(0, changed=1)
    assert targets_of(Subset(read, [1, 5, 6])).tolist() == [2, 3, 1]
    assert read.count == 3


def test_targets_that_a_transform_changes_are_what_it_makes_of_them() -> None:
    changed = Read(0, changed=5)
    assert targets_of(changed).tolist() == [target + 5 for target in changed.targets]
    assert changed.count == 10


def test_slow_reading_of_targets_is_told_once_with_what_is_left_and_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow = Read(0, changed=1)
    clock = itertools.count(0, 2.0)
    monkeypatch.setattr(samples.time, "monotonic", lambda: next(clock))
    with pytest.warns(QtoolWarning) as told:
        targets_of(slow, "data 'x', train")
    assert len(told) == 1
    text = str(told[0].message)
    assert text.startswith("data 'x', train: ")
    assert "from 10 samples one by one, 14 more seconds" in text  # 6 for the first three
    assert "'targets'" in text


# ---- batches


class Lazy(Dataset[Any]):
    """A user's own dataset: neither targets nor tensors to look at, and a count of its reads."""

    def __init__(self, inputs: list[Any], targets: list[Any]) -> None:
        self.inputs, self.rows, self.reads = inputs, targets, 0

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        self.reads += 1
        return self.inputs[index], self.rows[index]


@settings(max_examples=30)
@given(st.integers(1, 20), st.integers(1, 25), st.randoms())
def test_fast_and_slow_paths_give_the_same_batches(count: int, size: int, random: Any) -> None:
    x, y = torch.arange(count * 3.0).view(count, 3), torch.arange(count)
    order = random.sample(range(count), count)
    whole = TensorDataset(torch.cat([x, x]), torch.cat([y, y]))
    sources = [TensorDataset(x, y), Subset(whole, list(range(count))), list(zip(x, y, strict=True))]
    for source in (*sources, Lazy(list(x), y.tolist())):
        got = list(batches(source, size, order=order))
        assert [len(a) for a, _ in got] == [min(size, count - s) for s in range(0, count, size)]
        assert torch.equal(torch.cat([a for a, _ in got]), x[order])
        assert torch.equal(torch.cat([b for _, b in got]), y[order])


class Changed(TensorDataset):
    def __getitem__(self, index: int) -> tuple[Any, ...]:
        x, y = super().__getitem__(index)
        return 10 * x, y + 1


class ChangedPart(Subset[Any]):
    def __getitem__(self, index: int) -> tuple[Any, ...]:  # type: ignore[override]
        x, y = super().__getitem__(index)
        return 10 * x, y + 1

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


def test_samples_are_what_a_class_made_from_a_set_of_tensors_makes_of_them() -> None:
    x, y = torch.arange(8.0).view(4, 2), torch.tensor([0, 1, 0, 1])
    changed = Changed(x, y)
    for source in (changed, Subset(changed, range(4)), ChangedPart(TensorDataset(x, y), range(4))):
        inputs, targets = next(batches(source, 4))
        assert torch.equal(inputs, 10 * x)
        assert torch.equal(targets, y + 1)
        assert targets_of(source).tolist() == [1, 2, 1, 2]
    one, other = (from_mapping({"train": s, "test": s}).identity for s in (changed, Changed(x + 1, y)))
    assert one != other


def test_the_default_order_is_as_stored(npz: Path) -> None:
    data = load_data(f"npz:{npz}")
    assert torch.equal(torch.cat([y for _, y in batches(data.test, 5)]), torch.arange(12) % 3)
    for index in (0, 11, -1):
        x, y = data.test[index]
        assert torch.equal(x, next(batches(data.test, 12))[0][index])
        assert y == index % 12 % 3
    with pytest.raises(IndexError):
        data.test[12]


def test_inputs_may_be_tuples_and_dicts() -> None:
    pairs = [((torch.full((2,), float(i)), np.float32(i)), i) for i in range(3)]
    (a, b), y = next(batches(pairs, 3))
    assert (a.shape, b.shape, y.tolist()) == ((3, 2), (3,), [0, 1, 2])
    named = [({"ids": torch.tensor([i, i]), "mask": torch.ones(2)}, {"start": i}) for i in range(3)]
    x, target = next(batches(named, 2))
    assert x["ids"].tolist() == [[0, 0], [1, 1]]
    assert target["start"].tolist() == [0, 1]


def test_samples_may_be_dicts_with_their_labels_inside() -> None:
    samples = [{"input_ids": [i, i + 1], "text": f"the {i}th", "label": i % 3} for i in range(30)]
    data = from_mapping({"train": samples, "test": samples})
    assert data.num_classes == 3
    (inputs, targets), *_ = batches(data.test, 4)
    assert {name: value.tolist() for name, value in inputs.items()} == {"input_ids": [[0, 1], [1, 2], [2, 3], [3, 4]]}
    assert targets.tolist() == [0, 1, 2, 0]


def test_examples_are_two(npz: Path) -> None:
    assert example_input(load_data(f"npz:{npz}")).shape == (2, 1, 6, 5)
    assert example_input([(torch.zeros(3), 0)]).shape == (1, 3)


# ---- a user's own data


def mapping(**changes: Any) -> dict[str, Any]:
    return {
        "train": TensorDataset(torch.randn(40, 3), torch.arange(40) % 4),
        "test": TensorDataset(torch.randn(8, 3), torch.arange(8) % 4),
    } | changes


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


def test_datasets_on_a_device_are_read_into_host_memory() -> None:
    x, y = torch.randn(20, 3), torch.arange(20) % 2
    plain = from_mapping({"train": TensorDataset(x, y), "test": TensorDataset(x, y)})
    with Fake():
        held = TensorDataset(x.to(DEVICE), y.to(DEVICE))
        for there in (held, Subset(held, range(20))):
            data = from_mapping({"train": there, "test": there})
            assert torch.equal(example_input(data), example_input(plain))
            assert data.num_classes == 2
            assert stratified_sample(there, 4, 0) == stratified_sample(TensorDataset(x, y), 4, 0)


def test_parts_of_a_split_hold_their_own_samples() -> None:
    x, y = torch.arange(40.0)[:, None], torch.arange(40) % 4
    for whole in (TensorDataset(x, y), list(zip(x, y, strict=True))):
        data = from_mapping({"train": whole, "test": whole})
        for part in (data.train, data.validation):
            inputs, targets = next(batches(part, 40))
            assert torch.equal(inputs, torch.stack([part[i][0] for i in range(len(part))]))
            assert torch.equal(targets, targets_of(part))
            assert torch.equal(targets, inputs[:, 0].long() % 4)
        seen = [float(value) for part in (data.train, data.validation) for value, _ in batches(part, 1)]
        assert sorted(seen) == list(range(40))


def test_classes_are_counted_given_or_unknown() -> None:
    assert from_mapping(mapping()).num_classes == 4
    assert from_mapping(mapping(num_classes=9)).num_classes == 9
    regression = TensorDataset(torch.randn(20, 3), torch.randn(20))
    data = from_mapping({"train": regression, "test": regression})
    assert data.num_classes is None
    assert len(data.validation) == 2


def test_targets_are_read_once_and_only_as_far_as_needed() -> None:
    lazy = Lazy([torch.zeros(2)] * 30, [i % 3 for i in range(30)])
    data = from_mapping({"train": lazy, "test": [(torch.zeros(2), 0)]})
    assert lazy.reads == 30
    stratified_sample(data.train, 9, 0)
    assert lazy.reads == 30
    dense = Lazy([torch.zeros(2)] * 30, [torch.zeros(4)] * 30)
    from_mapping({"train": dense, "test": dense})
    assert dense.reads == 2


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


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("tensors", [True, False])
def test_inputs_that_are_not_finite_are_named(value: float, tensors: bool) -> None:
    x, y = torch.zeros(6, 3), torch.arange(6) % 2
    x[4, 1] = value
    given = TensorDataset(x, y) if tensors else list(zip(x, y, strict=True))
    data = from_mapping({"train": given, "test": given})
    with pytest.raises(QtoolError, match=r"test\[4\]: expected finite inputs"):
        list(batches(data.test, 4))
    held = from_mapping({"train": given, "validation": given, "test": given}).train
    with pytest.raises(QtoolError, match=r"train\[4\]"):  # the position in the user's own dataset, in any order
        list(batches(held, 4, order=[5, 0, 1, 4]))


def test_large_but_finite_inputs_pass() -> None:
    dataset = TensorDataset(torch.full((4, 3), 3e38), torch.zeros(4, dtype=torch.int64))
    assert len(list(batches(dataset, 4))) == 1


@pytest.mark.parametrize(
    ("samples", "told"),
    [
        ([(torch.zeros(2), 0), (torch.zeros(3), 0)], r"\[1\]: expected shape \(2,\), as sample 0; got shape \(3,\)"),
        ([(np.zeros(2), 0)], "float32 inputs; got float64"),
        ([("text", 0)], "tensors, or tuples or dicts of them; got str"),
        ([({"x": "text"}, 0)], r"\[0\]\['x'\]: expected tensors, .*; got str; .* or leave it out"),
        ([{"x": 1.0, "labels": "cat"}], r"\[0\], target: expected tensors, .*; got str"),
        ([{"x": 1.0, "labels": 1}, {"x": 1.0}], r"\[1\], target: expected tensors, .*; got NoneType"),
        ([({"x": 1.0}, 0), ({"y": 1.0}, 0)], r"\[1\]: expected a dict of 'x', as sample 0; got a dict of 'y'"),
        ([((1.0, 2.0), 0), ((1.0,), 0)], r"\[1\]: expected 2 items, as sample 0; got 1 item"),
        ([({"x": 1.0}, 0), (1.0, 0)], r"\[1\]: expected a dict of 'x', as sample 0; got float"),
        ([{"ids": [1, 2], "label": 0}, {"ids": [1], "label": 0}], r"\['ids'\]: expected shape .* 'collate_fn' does"),
    ],
)
def test_samples_that_do_not_stack(samples: Any, told: str) -> None:
    with pytest.raises(QtoolError, match=told):
        list(batches(samples, 2))


def test_a_dataset_that_raises_is_named() -> None:
    with pytest.raises(QtoolError, match=r"test\[1\]: expected a sample; got IndexError"):
        from_mapping(mapping(test=Lazy([torch.zeros(3)] * 2, [0])))


# ---- files


def write_idx(path: Path, array: np.ndarray) -> None:
    raw = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)


@pytest.mark.parametrize(("test", "dash", "end"), [("t10k", "-", ".gz"), ("test", "-", ""), ("t10k", ".", "")])
def test_idx_files(npz: Path, test: str, dash: str, end: str) -> None:
    for part, prefix in (("train", "train"), ("test", test)):
        arrays = np.load(npz / f"{part}.npz")
        write_idx(npz / f"{prefix}-images{dash}idx3-ubyte{end}", arrays["images"])
        write_idx(npz / f"{prefix}-labels{dash}idx1-ubyte{end}", arrays["labels"])
    data, same = load_data(f"idx:{npz}"), load_data(f"npz:{npz}")
    assert data.identity == same.identity
    assert torch.equal(next(batches(data.test, 12))[0], next(batches(same.test, 12))[0])


def test_idx_files_that_are_wrong(npz: Path) -> None:
    with pytest.raises(UsageError, match=r"train-images-idx3-ubyte\.gz"):
        load_data(f"idx:{npz}")
    arrays = images(4)
    for prefix in ("train", "t10k"):
        write_idx(npz / f"{prefix}-images-idx3-ubyte", arrays["images"])
        write_idx(npz / f"{prefix}-labels-idx1-ubyte", arrays["labels"])
    file = npz / "train-images-idx3-ubyte"
    whole = file.read_bytes()
    for raw in (whole[:-1], whole[:3], b"", b"\0\0\x0d\x03" + whole[4:], b"PK" + whole[2:]):
        file.write_bytes(raw)
        with pytest.raises(QtoolError, match=r"train-images-idx3-ubyte': expected an IDX file"):
            load_data(f"idx:{npz}")
    file.unlink()
    (npz / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(whole)[:-9])
    with pytest.raises(QtoolError, match="an IDX file"):
        load_data(f"idx:{npz}")


def test_one_npz_file(tmp_path: Path) -> None:
    parts = {"train": images(30), "val": images(6, seed=1), "test": images(9, seed=2)}
    arrays = {f"{part}_{key}": value for part, found in parts.items() for key, value in found.items()}
    arrays["train_labels"] = arrays["train_labels"][:, None]  # N×1, as some collections have it
    np.savez(tmp_path / "all.npz", **arrays)
    data = load_data(f"npz:{tmp_path / 'all.npz'}")
    assert (len(data.train), len(data.validation), len(data.test)) == (30, 6, 9)


@pytest.mark.parametrize(
    ("arrays", "told"),
    [
        ({"images": np.zeros((4, 5, 5), np.float32), "labels": np.zeros(4, int)}, "images as uint8.*got float32 4×5×5"),
        ({"images": np.zeros((4, 5), np.uint8), "labels": np.zeros(4, int)}, "images as uint8"),
        ({"images": np.zeros((0, 5, 5), np.uint8), "labels": np.zeros(0, int)}, "none of them 0"),
        (
            {"images": np.zeros((6, 3, 5, 5), np.uint8), "labels": np.zeros(6, int)},
            r"C; got 6×3×5×5.*transpose\(0, 2, 3, 1\)",
        ),
        ({"images": np.zeros((4, 5, 5), np.uint8), "labels": np.zeros(3, int)}, "4 whole-number labels"),
        ({"images": np.zeros((4, 5, 5), np.uint8), "labels": np.zeros(4)}, "4 whole-number labels; got float64"),
        ({"images": np.zeros((4, 5, 5), np.uint8)}, "arrays images and labels; got images; add labels"),
        (
            {"images": np.zeros((4, 5, 5), np.uint8), "labels": np.array([0, 1, 2, 3])},
            r"test\[3\]: expected a label of 0",
        ),
        ({"images": np.zeros((4, 7, 5), np.uint8), "labels": np.zeros(4, int)}, r"\(1, 6, 5\) as in train"),
        ({"images": np.zeros((4, 6, 5, 3), np.uint8), "labels": np.zeros(4, int)}, r"got \(3, 6, 5\)"),
        ({"images": np.array([{}], object), "labels": np.zeros(1, int)}, "an npz file of plain arrays"),
    ],
)
def test_npz_files_that_are_wrong(npz: Path, arrays: dict[str, np.ndarray], told: str) -> None:
    np.savez(npz / "test.npz", **arrays)
    with pytest.raises(QtoolError, match=told):
        load_data(f"npz:{npz}")


def test_damaged_and_missing_npz_files(npz: Path) -> None:
    raw = (npz / "test.npz").read_bytes()
    for damaged in (raw[: len(raw) // 2], b"", b"no npz"):
        (npz / "test.npz").write_bytes(damaged)
        with pytest.raises(QtoolError, match=r"test\.npz': expected an npz file"):
            load_data(f"npz:{npz}")
    (npz / "test.npz").unlink()
    with pytest.raises(UsageError, match=r"test\.npz"):
        load_data(f"npz:{npz}")
    with pytest.raises(UsageError, match=r"no folder|nothing of that name"):
        load_data(f"npz:{npz / 'none'}")


def test_specs_that_name_nothing() -> None:
    with pytest.raises(UsageError, match="did you mean 'fashion-mnist'"):
        load_data("fashion-minst")
    with pytest.raises(UsageError, match="a data spec"):
        load_data("npz:")


# ---- encoded images


def test_without_pillow_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in ("train", "test"):
        (tmp_path / part / "a").mkdir(parents=True)
        (tmp_path / part / "a" / "1.png").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(QtoolError, match="pip install 'pillow'"):
        load_data(f"imagefolder:{tmp_path}")


def write_folder(
    path: Path, count: int = 4, size: tuple[int, int] = (6, 8), mode: str = "RGB"
) -> dict[str, np.ndarray]:
    image = pytest.importorskip("PIL.Image")
    draw, stored = np.random.default_rng(0), {}
    for part in ("train", "test"):
        for name in ("cat", "dog"):
            (path / part / name).mkdir(parents=True)
            for i in range(count):
                pixels = draw.integers(0, 256, (*size, 3) if mode == "RGB" else size, dtype=np.uint8)
                image.fromarray(pixels).save(path / part / name / f"{i}.png")
                stored[f"{part}/{name}/{i}"] = pixels
    return stored


def test_image_folders(tmp_path: Path) -> None:
    stored = write_folder(tmp_path, count=5)
    data = load_data(f"imagefolder:{tmp_path}")
    assert (data.labels, data.num_classes, len(data.train), len(data.validation)) == (("cat", "dog"), 2, 9, 1)
    assert data.preprocessing.size == (6, 8)
    x, y = next(batches(data.test, 10))
    assert y.tolist() == [0] * 5 + [1] * 5
    expected = np.stack([value for key, value in stored.items() if key.startswith("test")]).transpose(0, 3, 1, 2)
    assert torch.equal(x, data.preprocessing.apply(torch.from_numpy(expected.copy())))
    before = data.identity
    (tmp_path / "test" / "dog" / "4.png").rename(tmp_path / "test" / "dog" / "5.png")
    assert load_data(f"imagefolder:{tmp_path}").identity != before


def test_images_are_found_after_the_current_folder_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path / "images", count=5)
    monkeypatch.chdir(tmp_path)
    data = load_data("imagefolder:images")
    expected = next(batches(load_data(f"imagefolder:{tmp_path / 'images'}").test, 10))[0]
    monkeypatch.chdir(tmp_path / "images")
    assert torch.equal(next(batches(data.test, 10))[0], expected)


def test_image_folders_of_imagenets_layout(tmp_path: Path) -> None:
    write_folder(tmp_path, count=5)
    judged = next(batches(load_data(f"imagefolder:{tmp_path}").test, 10))[0]
    (tmp_path / "test").rename(tmp_path / "val")
    data = load_data(f"imagefolder:{tmp_path}")
    assert torch.equal(next(batches(data.test, 10))[0], judged)
    assert (len(data.train), len(data.validation), data.split != "") == (9, 1, True)
    shutil.copytree(tmp_path / "val", tmp_path / "test")
    both = load_data(f"imagefolder:{tmp_path}")
    assert (len(both.train), len(both.validation), both.split) == (10, 10, "")


def test_image_folders_are_brought_to_a_size(tmp_path: Path) -> None:
    write_folder(tmp_path, mode="L")
    image = pytest.importorskip("PIL.Image")
    image.fromarray(np.zeros((20, 9), np.uint8)).save(tmp_path / "test" / "cat" / "9.png")
    data = load_data(f"imagefolder:{tmp_path}:4")
    assert (data.preprocessing.size, data.preprocessing.resize) == ((4, 4), "shorter-side")
    assert next(batches(data.test, 9))[0].shape == (9, 1, 4, 4)
    with pytest.raises(QtoolError, match=r"9\.png': expected 8×6 pixels, as the first; got 9×20 pixels; append :SIZE"):
        list(batches(load_data(f"imagefolder:{tmp_path}").test, 9))


def test_image_folders_that_are_wrong(tmp_path: Path) -> None:
    write_folder(tmp_path, mode="L")
    image = pytest.importorskip("PIL.Image")
    extra = tmp_path / "test" / "cat" / "9.png"
    image.fromarray(np.zeros((6, 8, 3), np.uint8)).save(extra)
    with pytest.raises(QtoolError, match=r"9\.png': expected a grey image"):
        list(batches(load_data(f"imagefolder:{tmp_path}").test, 9))
    extra.write_bytes(b"no image")
    with pytest.raises(QtoolError, match=r"9\.png': expected an image that Pillow decodes"):
        list(batches(load_data(f"imagefolder:{tmp_path}").test, 9))
    extra.unlink()
    (tmp_path / "test" / "cats").mkdir()
    with pytest.raises(QtoolError, match="'cats'; did you mean 'cat'"):
        load_data(f"imagefolder:{tmp_path}")
    with pytest.raises(UsageError, match="a folder"):
        load_data(f"imagefolder:{tmp_path / 'train'}")
    with pytest.raises(UsageError, match="a size of at least 1"):
        load_data(f"imagefolder:{tmp_path}:0")


@pytest.mark.parametrize("mode", ["uint16", "int32", "float32"])
def test_images_that_would_be_cut_off_to_eight_bits_are_refused(tmp_path: Path, mode: str) -> None:
    write_folder(tmp_path)
    image = pytest.importorskip("PIL.Image")
    pixels = np.full((6, 8), 0.5 if mode == "float32" else 700, mode)
    image.fromarray(pixels).save(tmp_path / "train" / "cat" / "1.tiff")
    with pytest.raises(QtoolError, match=r"1\.tiff': expected 8 bits a channel; got Pillow's mode '[IF].*factory"):
        load_data(f"imagefolder:{tmp_path}")


def test_what_is_hidden_is_no_image(tmp_path: Path) -> None:
    write_folder(tmp_path)
    cats = tmp_path / "train" / "cat"
    (cats / "._0.png").write_bytes(b"of another system")
    (cats / ".ipynb_checkpoints").mkdir()
    shutil.copy(cats / "0.png", cats / ".ipynb_checkpoints" / "0-checkpoint.png")
    data = load_data(f"imagefolder:{tmp_path}")
    assert len(data.train) + len(data.validation) == 8


def test_image_folders_of_another_layout_are_told_which_is_asked_for(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "train" / "bird").mkdir()
    with pytest.raises(QtoolError, match=r"train/bird': expected image files .*; got none; add some, or remove"):
        load_data(f"imagefolder:{tmp_path}")
    (tmp_path / "train" / "bird" / "0.png").symlink_to("nowhere.png")
    with pytest.raises(QtoolError, match=r"bird/0\.png': expected a file that can be read; got No such file"):
        load_data(f"imagefolder:{tmp_path}")
    with pytest.raises(UsageError, match=r"folders 'train' and 'test' .*, in each a folder for each class; got "):
        load_data(f"imagefolder:{tmp_path / 'test'}")
    (tmp_path / "test").rename(tmp_path / "tests")
    with pytest.raises(UsageError, match=r"folders 'train' and 'test' .*; got tests, train; move"):
        load_data(f"imagefolder:{tmp_path}")


# ---- the hub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A stand-in for the datasets library that opens what the test puts in."""
    image = pytest.importorskip("PIL.Image")
    kinds = {kind: type(kind, (), {"names": ["no", "yes"]}) for kind in ("Image", "ClassLabel", "Value")}

    class Rows:
        more: tuple[None, ...] = ()  # labels beyond those that alternate
        varied = False

        def __init__(self, count: int, **columns: str) -> None:
            self.features = {name: kinds[kind]() for name, kind in columns.items()}
            self.count = count

        def __len__(self) -> int:
            return self.count

        def __getitem__(self, key: Any) -> Any:
            if key == "label":
                return [i % 2 for i in range(self.count)] + [*self.more]
            side = 4 if not self.varied else 4 + key % 2
            return {"image": image.fromarray(np.full((side, side), key, np.uint8)), "label": key % 2}

    sets: dict[str, Any] = {"Rows": Rows}

    def load_dataset(name: str, split: str | None = None) -> Any:
        return sets[name] if split is None else sets[name][split]

    fake = types.ModuleType("datasets")
    fake.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", fake)
    return sets


def test_hub_sets(hub: dict[str, Any]) -> None:
    rows = lambda count: hub["Rows"](count, image="Image", label="ClassLabel")  # noqa: E731
    hub["a/b"] = {"train": rows(20), "test": rows(6), "train[:10]": rows(10)}
    data = load_data("hf:a/b")
    assert (len(data.train), len(data.validation), len(data.test), data.labels) == (18, 2, 6, ("no", "yes"))
    assert len(load_data("hf:a/b:train[:10]").train) == 9
    hub["a/b"] = {"train": rows(20), "validation": rows(8)}  # the hub's validation is what is judged
    data = load_data("hf:a/b")
    assert (len(data.train), len(data.validation), len(data.test)) == (18, 2, 8)
    hub["a/b"] = {"train": rows(20)}
    with pytest.raises(QtoolError, match="a train and a test split; got train"):
        load_data("hf:a/b")
    text = hub["Rows"](4, text="Value", label="ClassLabel")
    hub["a/b"] = {"train": text, "test": text}
    with pytest.raises(QtoolError, match="one Image and one ClassLabel column; got text: Value"):
        load_data("hf:a/b")
    with pytest.raises(QtoolError, match="a set that opens; got KeyError"):
        load_data("hf:no/such")


def test_a_hub_set_is_not_trained_on_what_judges_it(hub: dict[str, Any]) -> None:
    rows = lambda count: hub["Rows"](count, image="Image", label="ClassLabel")  # noqa: E731
    splits = {"train": rows(20), "validation": rows(10)}
    both = {"train+validation": rows(30), "train[:9]+test": rows(15), "validation[:5]": rows(5)}
    hub["a/b"] = splits | both | {"test": rows(6)}
    data = load_data("hf:a/b:train+validation")
    assert (len(data.train), len(data.validation), len(data.test)) == (27, 3, 6)
    with pytest.raises(QtoolError, match=r"than of 'test', which is judged; got 'train\[:9\]\+test'; name others"):
        load_data("hf:a/b:train[:9]+test")
    hub["a/b"] = splits | both
    with pytest.raises(QtoolError, match=r"than of 'validation', which is judged; got 'validation\[:5\]'"):
        load_data("hf:a/b:validation[:5]")


def test_errors_in_a_hub_set_name_the_sample_and_what_helps(hub: dict[str, Any]) -> None:
    rows = lambda count: hub["Rows"](count, image="Image", label="ClassLabel")  # noqa: E731
    hub["a/b"] = {"train": rows(20), "test": rows(6)}
    hub["a/b"]["train"].more = (None, None)
    with pytest.raises(QtoolError, match=r"hf:a/b, train\[20\]: expected a label; got None, one of 2 such; leave"):
        load_data("hf:a/b")
    hub["a/b"] = {"train": rows(20), "test": rows(6)}
    hub["a/b"]["train"].varied = True
    with pytest.raises(QtoolError, match=r"train\[1\].* 4×4 pixels, as the first; got 5×5 pixels; use a factory"):
        load_data("hf:a/b")


def test_without_the_datasets_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(QtoolError, match=r"pip install 'qtool\[datasets\]'"):
        load_data("hf:mnist")
