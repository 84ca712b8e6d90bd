"""What a caller gives as a model, and how what is none is refused."""

from __future__ import annotations

import copy
import inspect
import warnings

import pytest
import torch
from torch import nn

import qtool
from qtool.errors import UsageError, kind_of
from qtool.models.given import HasModel
from qtool.quantization import torchao_api
from qtool.source import open_source


@pytest.mark.parametrize("thing", [7, torch.zeros(2), {"a": 1}])
def test_what_is_no_model_is_refused_by_its_type(thing: object) -> None:
    with pytest.raises(UsageError, match=f"expected an nn.Module.* got {kind_of(thing)}"):
        open_source(thing, None)  # type: ignore[arg-type]


def test_no_model_is_refused_where_one_is_needed(small_data: str) -> None:
    stages = (qtool.train, qtool.quantize, qtool.sensitivity, qtool.predict_memory)
    for stage in stages:
        with pytest.raises(UsageError, match=r"argument 'model': .* got None"):
            stage(None, small_data)  # type: ignore[arg-type]


def test_what_holds_a_model_need_not_let_it_be_set() -> None:
    """A checker refuses a frozen class, as the result of a training is, where the protocol has a plain attribute."""
    assert isinstance(inspect.getattr_static(HasModel, "model"), property)


def test_a_class_and_parameters_without_shapes_are_no_model_yet() -> None:
    with pytest.raises(UsageError, match="got the class Identity; pass the float model"):
        open_source(torch.nn.Identity, None)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"parameters with shapes; got '0\.weight' without one; call the model"):
        open_source(torch.nn.Sequential(torch.nn.LazyLinear(3)), None)


def test_what_cannot_be_captured_again_is_told_from_a_module() -> None:
    net, x = torch.nn.Linear(2, 3), torch.randn(2, 2)
    exported = torch.export.export(net, (x,)).module()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of each kind that torch has for it
        scripts = [torch.jit.script(net), torch.jit.trace(net, x)]
    for script in scripts:
        with pytest.raises(UsageError, match="got TorchScript, whose Python code is gone; pass the module it was made"):
            open_source(script, None)
    with pytest.raises(UsageError, match="got an exported program's graph; pass the module that it was exported from"):
        open_source(exported, None)
    with pytest.raises(UsageError, match=r"weights with values; got 'weight' on the meta device; load the weights"):
        open_source(net.to("meta"), None)


class Unquantized(torchao_api.Quantizer):
    """Leaves all in float: what torchao makes of a graph is no model to train for all that."""

    def annotate(self, model: torch.fx.GraphModule) -> torch.fx.GraphModule:
        return model

    def validate(self, model: torch.fx.GraphModule) -> None:
        pass


def test_quantized_models_of_other_tools_are_refused_by_each_stage_that_begins_with_a_float_one(
    small_data: str,
) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_
    from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e

    x, net = torch.ones(2, 1, 4, 4), nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3))
    weights = nn.Sequential(nn.Linear(32, 32))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torch.ao is deprecated
        prepared = prepare_pt2e(torch.export.export(net.eval(), (x,)).module(), Unquantized())
        graph = torchao_api.convert_pt2e(copy.deepcopy(prepared))
        dynamic = torch.ao.quantization.quantize_dynamic(net, {nn.Linear})
        net.qconfig = torch.ao.quantization.default_qconfig  # type: ignore[assignment]
        converted = torch.ao.quantization.convert(torch.ao.quantization.prepare(net))
        quantize_(weights, Int8WeightOnlyConfig())
    fixed = "an exported program's graph; pass the module that it was exported from"
    told = {
        converted: "'0' is a Conv2d; pass the float model, or this one to qtool.export",
        dynamic: "'2' is a Linear; pass the float model, or this one to qtool.export",
        prepared: fixed,
        graph: fixed,
        weights: r"torchao quantized: '0\.weight' is an? \w+; pass the float model",
        nn.Linear: "the class Linear; pass the float model",
    }
    for stage in (qtool.train, qtool.quantize, qtool.sensitivity, qtool.predict_memory):
        for model, got in told.items():
            with pytest.raises(UsageError, match=rf"argument 'model': .*{got}"):
                stage(model, small_data)  # type: ignore[operator]
