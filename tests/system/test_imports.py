"""Packages that are missing, and packages that are there and do not import, each told as what it is."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from qtool.benchmarking.worker import Server
from qtool.data.folders import read_imagefolder
from qtool.data.text import read_text
from qtool.errors import QtoolError, UsageError
from qtool.models.libraries import timm_model, transformers_model
from qtool.recipe import TrainConfig
from qtool.reporting.tracking import require_mlflow
from qtool.runtimes import open_session
from qtool.system.imports import imported
from qtool.training.lora import _peft
from qtool.training.nf4 import quantized
from qtool.training.optimizers import OPTIMIZERS


def test_what_imports_is_given_and_what_is_missing_is_told_with_its_cure() -> None:
    assert imported("json", "a", "b") is json
    with pytest.raises(UsageError, match=r"--x: expected the package 'nowhere'; got .*; run: pip install 'qtool\[x\]'"):
        imported("nowhere.inside", "--x", "qtool[x]", UsageError)


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Puts a package before others that raises as it is imported."""

    def make(name: str, error: str) -> None:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise {error}('libfoo.so.2: cannot open shared object file')\n")
        monkeypatch.syspath_prepend(tmp_path)
        for found in [loaded for loaded in sys.modules if loaded.partition(".")[0] == name]:
            monkeypatch.delitem(sys.modules, found)

    return make


@pytest.mark.parametrize("error", ["ImportError", "OSError", "RuntimeError", "ValueError", "AttributeError"])
def test_a_package_that_does_not_import_is_not_told_to_be_missing(broken: Any, error: str) -> None:
    broken("half_there", error)
    with pytest.raises(QtoolError) as told:
        imported("half_there.inside", "a", "half-there")
    assert told.value.got.startswith(f"{error} as it is imported: libfoo.so.2")
    assert told.value.do.startswith("it is installed, and does not work")


def use_pillow(folder: Path) -> None:
    for part in ("train", "test"):
        (folder / part / "a").mkdir(parents=True)
        (folder / part / "a" / "0.png").touch()
    read_imagefolder(str(folder))


def use_tokenizers(folder: Path) -> None:
    for name in ("a.txt", "a.json"):
        (folder / name).touch()
    read_text(f"{folder}/a.txt:8:{folder}/a.json")


def use_openvino(folder: Path) -> None:
    (folder / "a.onnx").touch()
    Server().start("openvino", None)  # which leaves it to the opening to tell
    open_session(folder / "a.onnx", provider="openvino")


@pytest.mark.parametrize(
    ("package", "use"),
    [
        ("PIL", use_pillow), ("tokenizers", use_tokenizers), ("openvino", use_openvino),
        ("bitsandbytes", lambda _: OPTIMIZERS["adamw8bit"](TrainConfig())([])),
        ("bitsandbytes", lambda _: quantized(torch.nn.Linear(64, 64))),
        ("peft", lambda _: _peft()), ("mlflow", lambda _: require_mlflow()),
        ("timm", lambda _: timm_model("resnet18", None, None, False)),
        ("transformers", lambda _: transformers_model("gpt2", None, None, False)),
    ],
)  # fmt: skip
def test_whoever_needs_it_tells_so(broken: Any, tmp_path: Path, package: str, use: Callable[[Path], None]) -> None:
    broken(package, "OSError")
    with pytest.raises(QtoolError, match=f"expected the package '{package}'; got OSError as it is imported: libfoo"):
        use(tmp_path)
