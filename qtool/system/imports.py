"""Packages that are imported where they are needed: optional ones, and those that take long.

One that is installed need not import: a shared library that it loads may be missing (OSError, ImportError), it may be
built for another numpy or torch (RuntimeError, ValueError, AttributeError). To install it again as it is does not help
there, so the two are told apart.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from qtool.errors import QtoolError, one_line


def imported(module: str, where: str, install: str, kind: type[QtoolError] = QtoolError) -> ModuleType:
    """The module of that name, imported.

    Raises ``kind`` at ``where`` when it cannot be: with what ``pip install`` is to be given where its package is
    missing, else with what its import raised.

    >>> imported("json", "option '--out'", "json").__name__
    'json'
    """
    package = module.partition(".")[0]
    try:
        importlib.import_module(package)
        return importlib.import_module(module)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == package:
            got, do = one_line(error), f"run: pip install '{install}'"
        else:
            got = f"{type(error).__name__} as it is imported: {one_line(error)[:300]}"
            do = f"it is installed, and does not work: have python -c 'import {package}' pass first"
        raise kind(where, f"the package '{package}'", got, do) from error
