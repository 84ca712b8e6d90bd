"""Folders of image files, the sets of the ``datasets`` library, and each way in which they can be wrong."""

from __future__ import annotations

import shutil
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from image_sets import write_folder

from qtool.data.specs import (
    batches,
    load_data,
)
from qtool.errors import QtoolError, UsageError


def test_without_pillow_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in ("train", "test"):
        (tmp_path / part / "a").mkdir(parents=True)
        (tmp_path / part / "a" / "1.png").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(QtoolError, match="pip install 'pillow'"):
        load_data(f"imagefolder:{tmp_path}")


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
