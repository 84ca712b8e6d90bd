"""What is known to go wrong where the sizes of the images are open; the rest is tested with the targets."""

from __future__ import annotations

from qtool.runtimes.onednn import Geometry, errs


def test_images_of_any_size_are_not_taken_for_single_columns() -> None:
    assert not errs(Geometry((64, 32, 3, 3), (2, 2), (1, 1), 1, (None, None)))
    assert errs(Geometry((64, 32, 3, 3), (2, 2), (1, 1), 1, (None, 1)))
    assert not errs(Geometry((64, 32, 3, 3), (2, 2), (1, 1), 1, (1, 1)))


def test_windows_of_one_column_may_be_as_wide_as_is_wrong() -> None:
    assert errs(Geometry((8, 16, 3, 1), (1, 1), (1, 1), 1, (None, None)))
    assert not errs(Geometry((8, 18, 3, 1), (1, 1), (1, 1), 1, (None, None)))
