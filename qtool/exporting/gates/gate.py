"""Gates: what a file has to prove before it takes its name.

Each gate returns a ``Gate``: what was asked, what was found, and whether that passed. ``passed`` is None when
a gate could not be run here; it says why, and such a gate is reported, never counted as passed.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from qtool.errors import ContractError


@dataclass(frozen=True)
class Gate:
    """The outcome of one gate. ``expected`` and ``found`` are sentences; ``details`` holds the numbers."""

    name: str
    passed: bool | None
    expected: str
    found: str
    do: str = ""
    details: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The gate as plain values for JSON."""
        return dataclasses.asdict(self)

    def require(self) -> None:
        """Raises ContractError when the gate failed."""
        if self.passed is False:
            error = ContractError(f"gate '{self.name}'", self.expected, self.found, self.do or "see the gate's details")
            error.details = self.details
            raise error
