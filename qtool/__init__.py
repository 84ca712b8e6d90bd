"""qtool takes a PyTorch model from fine-tuning to an INT8 ONNX file that is proven to be that model.

The stages are plain functions over plain objects::

    import qtool

    trained = qtool.train(model, data, epochs=4)
    quantized = qtool.quantize(trained.model, data, out="out")  # outputs = quantized(inputs), as of the model
    files = qtool.export("out", samples=data).files  # {"int8": Path("/…/out/model.int8.onnx"), …}
    figures = qtool.benchmark("out", data)  # plain values: size, latency, accuracy
    quantized = qtool.load_quantized("out")  # at another time

``data`` may be batches (a DataLoader, a list) or ``{"train": …, "test": …}`` of datasets or DataLoaders. A batch, or
a sample of a dataset, is (input, target), an input alone, or a dict of the model's arguments with the target in it
under ``labels``; an input of several arguments is a tuple of them, or a dict by name.

Keyword arguments are the fields of the stage's dataclass in :mod:`qtool.recipe` (``help(qtool.recipe)``), the flags of
the command line by another spelling: ``qtool quantize --help`` tells what each does. A stage says nothing unless it is
asked to: ``progress=True`` has it tell on standard error where it is, and a function is given each line
(``progress=logging.info``), of a training one an epoch. ``import qtool`` imports none of the libraries it stands on:
each function brings its own when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qtool.version import __version__

if TYPE_CHECKING:
    from qtool.data.specs import Data, load_data
    from qtool.errors import ContractError, QtoolError, UsageError
    from qtool.form import QuantizedModel
    from qtool.models.specs import load_model
    from qtool.pipeline import benchmark, export, inspect, quantize, report, run, sensitivity, train
    from qtool.recipe import Recipe
    from qtool.stages.memory import predict_memory
    from qtool.stages.quantization import load_quantized

__all__ = [
    "ContractError",
    "Data",
    "QtoolError",
    "QuantizedModel",
    "Recipe",
    "UsageError",
    "__version__",
    "benchmark",
    "export",
    "inspect",
    "load_data",
    "load_model",
    "load_quantized",
    "predict_memory",
    "quantize",
    "report",
    "run",
    "sensitivity",
    "train",
]
_HOME = {
    "Data": "data.specs",
    "load_data": "data.specs",
    "load_model": "models.specs",
    "load_quantized": "stages.quantization",
    "predict_memory": "stages.memory",
    "QuantizedModel": "form",
    "Recipe": "recipe",
    "ContractError": "errors",
    "QtoolError": "errors",
    "UsageError": "errors",
}


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first asked for."""
    if name not in __all__:
        raise AttributeError(f"module 'qtool' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"qtool.{_HOME.get(name, 'pipeline')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
