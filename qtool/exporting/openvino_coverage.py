"""The coverage gate in OpenVINO: its compiled model is asked in which precision each product runs.

OpenVINO renames what it fuses, so units are counted and not looked up: at least as many convolutions and matrix
products have to run in 8 bits as the plan calls integer.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path

from qtool.exporting.gates import Gate
from qtool.form import Plan
from qtool.runtimes import open_session
from qtool.runtimes.base import Array, arithmetic


def coverage(plan: Plan, path: Path, feeds: Mapping[str, Array]) -> Gate:
    """Compares the plan with OpenVINO's compiled model of the file; not run where OpenVINO is not installed."""
    weighted = sum(unit.weight_bits is not None for unit in plan.integer_units)
    expected = f"{weighted} convolutions and matrix products, integer in the plan, in 8 bits in OpenVINO's model"
    if importlib.util.find_spec("openvino") is None:
        return Gate("coverage", None, expected, "not run: openvino is not installed (pip install 'qtool[openvino]')")
    session = open_session(path, provider="openvino")
    ran = arithmetic(session.kernels(feeds))
    session.close()
    found = f"{ran.get('int8', 0)} of {sum(ran.values())} products run in 8 bits"
    return Gate(
        "coverage", ran.get("int8", 0) >= weighted, expected, found, "leave those units in float with an override",
        {"arithmetic": ran},
    )  # fmt: skip
