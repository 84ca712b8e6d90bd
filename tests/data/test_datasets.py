"""Image sets: what is measured on them, and the npz and idx files that they lie in."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from image_sets import images

from qtool.data.specs import (
    Preprocessing,
    batches,
    load_data,
)
from qtool.errors import QtoolError, UsageError


def write_idx(path: Path, array: np.ndarray) -> None:
    raw = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)


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
