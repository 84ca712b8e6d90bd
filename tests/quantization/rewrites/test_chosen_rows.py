"""What the data chooses of a stored tensor is rows of a table of bytes: graph and file against the model itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

from qtool.exporting.stage import export
from qtool.graphs.edits import parameter
from qtool.graphs.operators import aten
from qtool.quantization.capturing.float_form import float_form
from qtool.quantization.stage import quantize
from qtool.recipe import ExportConfig, QuantizeConfig
from qtool.runtimes import open_session

EXPERTS, INPUTS, OUTPUTS = 6, 48, 64
LOOKUP, INDEX = aten.embedding.default, aten.index.Tensor


class Experts(nn.Module):
    """Two experts for each row, whose weights stand on the left of what they multiply or, turned, on the right."""

    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.turned, self.gate, self.head = turned, nn.Linear(INPUTS, EXPERTS), nn.Linear(OUTPUTS, 5)
        sizes = (INPUTS, OUTPUTS) if turned else (OUTPUTS, INPUTS)
        self.weight = nn.Parameter(torch.randn(EXPERTS, *sizes) * torch.logspace(-1, 1, sizes[0])[:, None])

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.gate(x).topk(2).indices.reshape(-1)
        weight, rows = self.weight[chosen], x.repeat_interleave(2, 0)
        if self.turned:
            made = torch.bmm(rows.unsqueeze(1), weight).squeeze(1)
        else:
            made = torch.bmm(weight, rows.unsqueeze(-1)).squeeze(-1)
        return self.head(made.reshape(-1, 2, OUTPUTS).mean(1))


def inputs() -> Tensor:
    return torch.randn(24, INPUTS, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("turned", [False, True])
def test_weights_of_experts_are_bytes_with_a_scale_for_each_row(tmp_path: Path, turned: bool) -> None:
    torch.manual_seed(0)
    net, x = Experts(turned).eval(), inputs()
    config = QuantizeConfig(algorithms=("gptq",))  # with other roundings it is another expert's turn now and then
    form = quantize(net, config, example=x, calibration=[x])
    (lookup,) = form.graph.graph.find_nodes(op="call_function", target=aten.embedding.default)
    integers, scales = (parameter(form.graph, node) for node in lookup.args[0].args[:2])
    rows = net.weight.detach().flatten(0, 1)
    np.testing.assert_allclose(scales.numpy(), np.abs(rows.numpy()).max(1) / 127, rtol=1e-6)
    assert float(((integers * scales[:, None] - rows) / scales[:, None]).abs().max()) <= 0.5 + 1e-4

    exported = export(form, tmp_path, ExportConfig(baselines=None), samples=[x])
    assert {gate["passed"] for gate in exported.gates} <= {True, None}
    model = onnx.load(str(exported.files["int8"]))
    types = {tensor.data_type for tensor in model.graph.initializer if np.prod(tensor.dims) == rows.numel()}
    assert types == {onnx.TensorProto.INT8}
    (product,) = (node for node in model.graph.node if node.op_type == "MatMul")
    makers = {node.output[0]: node.op_type for node in model.graph.node}
    assert makers[product.input[1 if turned else 0]] == "Cast"  # what is smaller is scaled in their place
    (found,) = open_session(exported.files["int8"]).run({"x": x.numpy()})
    np.testing.assert_allclose(found, form(x).detach().numpy(), atol=0.01 * np.abs(found).max())
    with torch.no_grad():
        np.testing.assert_allclose(found, net(x).numpy(), atol=0.05 * np.abs(found).max())


class Others(nn.Module):
    """A table of matrices of matrices, one of vectors, one by indices that may count from the end, one read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.deep, self.flat = nn.Parameter(torch.randn(4, 2, 3, 5)), nn.Parameter(torch.randn(4, 5))
        self.free, self.shared = nn.Parameter(torch.randn(4, 3, 5)), nn.Parameter(torch.randn(4, 3, 5))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        best, order = x.argmax(-1), x.max(-1, keepdim=True).indices
        return self.deep[order], self.flat[best], self.free[best - 4], self.shared[best] * self.shared.sum()


def test_only_what_was_chosen_from_the_beginning_is_written_so() -> None:
    net, x = Others().eval(), torch.randn(6, 4)
    graph = float_form(net, x)
    for found, wanted in zip(graph(x), net(x), strict=True):
        torch.testing.assert_close(found, wanted)
    read = {target: graph.graph.find_nodes(op="call_function", target=target) for target in (LOOKUP, INDEX)}
    assert {str(node.args[0].target) for node in read[LOOKUP]} == {"deep", "flat"}
    assert {str(node.args[0].target) for node in read[INDEX]} == {"free", "shared"}
