"""Inputs and outputs that stay on the device while a session is timed (IO binding), replayed as a CUDA graph.

``session.run`` copies host arrays in and results out on every call, which on a GPU can take longer
than the model. Here inputs are copied once, outputs are allocated once, and a call returns after
``synchronize_outputs``, so that the time is that of the finished computation.

A CUDA graph records the kernel launches of one run and replays them in one call. It needs the same
addresses every time, hence the fixed outputs, and one recording per set of shapes, which ONNX Runtime
tells apart by the run option ``gpu_graph_id``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from qtool.runtimes.base import Array

_RECORDINGS = itertools.count(1)


def bind(
    session: Any,
    feeds: Mapping[str, Array],
    outputs: Sequence[str],
    *,
    device: str = "cuda",
    device_id: int = 0,
    record: bool = False,
    to_device: Callable[[Array, str, int], Any] | None = None,
    run_options: Callable[[str], Any] | None = None,
) -> Callable[[], None]:
    """A call that runs ``session`` once on device-resident ``feeds`` and returns when the result is there.

    With ``record`` the session must have been made for CUDA graphs; the first call records.
    """
    move, options = to_device or _ort_value, run_options or graph_options
    values = {name: move(np.asarray(value, order="C"), device, device_id) for name, value in feeds.items()}
    fixed = _outputs_of_one_run(session, values, outputs, device, device_id, options("-1") if record else None)
    binding = _binding(session, values)
    for name, value in zip(outputs, fixed, strict=True):
        binding.bind_ortvalue_output(name, value)
    binding.synchronize_inputs()
    option = options(str(next(_RECORDINGS))) if record else None

    def step() -> None:
        session.run_with_iobinding(binding, option)
        binding.synchronize_outputs()

    return step


def _binding(session: Any, values: Mapping[str, Any]) -> Any:
    binding = session.io_binding()
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    return binding


def _outputs_of_one_run(
    session: Any, values: Mapping[str, Any], outputs: Sequence[str], device: str, device_id: int, option: Any
) -> list[Any]:
    """The outputs that the runtime allocates on the device for these inputs; they are kept and written to again."""
    binding = _binding(session, values)
    for name in outputs:
        binding.bind_output(name, device, device_id=device_id)
    binding.synchronize_inputs()
    session.run_with_iobinding(binding, option)
    binding.synchronize_outputs()
    return list(binding.get_outputs())


def graph_options(recording: str) -> Any:
    """Run options that name a CUDA graph recording; ``-1`` runs without one."""
    import onnxruntime as ort

    options = ort.RunOptions()
    options.add_run_config_entry("gpu_graph_id", recording)
    return options


def _ort_value(value: Array, device: str, device_id: int) -> Any:
    import onnxruntime as ort

    return ort.OrtValue.ortvalue_from_numpy(value, device, device_id)
