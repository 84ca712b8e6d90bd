from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from qtool.runtimes import packages
from qtool.runtimes.base import ProviderError


@pytest.fixture
def installed(monkeypatch):
    def pretend(**versions):
        def version(name):
            if name.replace("-", "_") not in versions:
                raise importlib.metadata.PackageNotFoundError(name)
            return versions[name.replace("-", "_")]

        monkeypatch.setattr(importlib.metadata, "version", version)

    return pretend


def test_one_package_is_no_conflict(installed):
    installed(onnxruntime_gpu="1.31.1")
    assert packages.conflict() is None
    packages.refuse_conflict("cuda")


def test_two_packages_are_explained_with_the_cure(installed):
    installed(onnxruntime="1.30.0", onnxruntime_gpu="1.31.1")
    text = packages.conflict()
    assert "onnxruntime 1.30.0 and onnxruntime-gpu 1.31.1" in text
    assert "pip uninstall -y onnxruntime onnxruntime-gpu" in text


def test_two_packages_are_refused_where_it_matters_which_one_runs(installed):
    installed(onnxruntime="1.30.0", onnxruntime_gpu="1.31.1")
    packages.refuse_conflict("cpu")
    with pytest.raises(ProviderError, match="overwrite each other"):
        packages.refuse_conflict("tensorrt")


def test_a_library_that_cannot_be_loaded_is_named(tmp_path: Path):
    path = tmp_path / "libonnxruntime_providers_cuda.so"
    assert "libonnxruntime_providers_shared.so" in packages.missing_library(path)
