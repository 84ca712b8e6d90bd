"""The command line without a process of its own, for tests that are not about the process."""

from __future__ import annotations

import warnings

from click.testing import CliRunner, Result

from qtool.cli import main


def in_process(*words: str) -> Result:
    """What ``qtool WORDS`` does; warnings are told as a program tells them, and fail no test."""
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        return CliRunner().invoke(main, list(words))
