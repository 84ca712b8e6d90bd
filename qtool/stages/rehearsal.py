"""What quantize and export refuse of any weights, found before a training that would be for nothing.

Two samples go the way of all, through the model as it comes: for each variant it is captured and its units are placed,
its float form is translated to ONNX, and a batch of validation samples tells whether a contract can be judged. Nothing
is calibrated and no figure is looked at, since those of a model that is not trained say nothing of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from qtool.recipe import Recipe
from qtool.source import open_source
from qtool.stages import contract
from qtool.stages.common import anywhere, calibration_of, example_of, in_turn
from qtool.stages.exporting import require_use


@in_turn
def rehearse(recipe: Recipe, tell: Callable[[str], None]) -> None:
    """Raises what quantize or export would raise of this model and data, whatever a training makes of the model."""
    from qtool.exporting.stage import rehearse as rehearse_export
    from qtool.quantization.capturing.float_form import FloatForms
    from qtool.quantization.stage import rehearse as rehearse_quantize

    require_use(recipe.export)
    tell("run: trying, before the training, whether the model can be captured, quantized and written to ONNX")
    train, config = recipe.train, anywhere(recipe.quantize)
    source = open_source(
        recipe.model, recipe.data, recipe.task, recipe.weights, seed=train.seed, label_smoothing=train.label_smoothing
    )
    assert source.model is not None
    inputs, _ = calibration_of(config, source)
    example = example_of(source, inputs)
    forms = FloatForms(source.model)
    plans = [
        rehearse_quantize(
            source.model, dataclasses.replace(config, mode=mode), recipe.qat, example=example, forms=forms
        )
        for mode in recipe.variants or ()
    ]
    graph = forms(config, example)
    rehearse_export(graph, example, plans[0], recipe.export)
    if config.has_contract:
        contract.rehearse(graph, config, source, inputs)
