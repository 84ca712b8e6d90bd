"""The set that most tests of image sets open."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from image_sets import images


@pytest.fixture
def npz(tmp_path: Path) -> Path:
    np.savez(tmp_path / "train.npz", **images(60))
    np.savez(tmp_path / "test.npz", **images(12, seed=1))
    return tmp_path
