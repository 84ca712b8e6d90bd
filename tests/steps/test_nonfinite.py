import torch
from torch import nn

from qtool.steps.nonfinite import BETWEEN, INPUTS, LOSS, first_bad_layer, first_bad_parameter


class Log(nn.Module):
    def forward(self, x):
        return torch.log(x)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.ReLU(), Log(), nn.Linear(3, 2))


def test_the_first_layer_in_order_of_execution_is_named():
    net = model()
    assert first_bad_layer(net, lambda: net(-torch.ones(1, 3) * 100)) == "layer '2'"


def test_a_damaged_parameter_is_the_cause():
    net = model()
    net[3].bias.data[0] = float("inf")
    assert first_bad_parameter(net) == "3.bias"
    assert first_bad_layer(net, lambda: net(torch.zeros(1, 3))) == "parameter '3.bias'"


def test_running_statistics_are_a_symptom_of_the_step_that_spoiled_them():
    net = nn.Sequential(Log(), nn.BatchNorm1d(3))
    x = torch.zeros(2, 3)
    net(x)
    assert first_bad_parameter(net) is None
    assert first_bad_parameter(net, buffers=True) == "1.running_mean"
    assert first_bad_layer(net, lambda: net(x)) == "layer '0'"


def test_inputs_the_model_itself_and_the_loss_are_told_apart():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x, scale=1.0):
            return self.layer(x) / scale

    net, x = Own(), torch.ones(2, 3)
    assert first_bad_layer(net, lambda: net(x * float("nan"))) == INPUTS
    assert first_bad_layer(net, lambda: net(x, scale=x * float("nan"))) == INPUTS
    assert first_bad_layer(net, lambda: net(x, scale=0.0)) == BETWEEN
    assert first_bad_layer(net, lambda: [(net(x).sum() / 0.0, 2)]) == LOSS


def test_nothing_is_named_where_all_is_finite_and_no_hook_stays():
    net = nn.Sequential(nn.Linear(3, 3))
    assert first_bad_parameter(net) is None
    assert first_bad_layer(net, lambda: net(torch.zeros(1, 3))) is None
    assert not net[0]._forward_hooks
    assert not net._forward_pre_hooks


def test_nodes_of_a_captured_graph_are_named_by_their_module():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.odd = nn.Linear(3, 3), Log()

        def forward(self, x):
            return self.odd(-self.first(x).abs()) + 1

    graph = torch.export.export(Outer(), (torch.randn(2, 3),)).module()
    assert first_bad_layer(graph, lambda: graph(torch.randn(2, 3))) == "layer 'odd'"
    assert "forward" not in vars(graph)
    assert graph(torch.randn(2, 3)).shape == (2, 3)


def test_what_stands_between_layers_of_a_captured_graph_is_named_by_the_layer_that_it_belongs_to():
    class Quantizer(nn.Module):
        def __init__(self):
            super().__init__()
            self.learner = nn.Linear(1, 1)

        def calculate_qparams(self):
            return None

        def forward(self, x):
            return torch.log(-x.abs()) * self.learner.weight

    def quantized(source):
        graph = torch.export.export(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), (torch.randn(2, 3),)).module()
        graph.add_submodule("post_process_7", Quantizer())
        node = next(node for node in graph.graph.nodes if source in node.name)
        with graph.graph.inserting_after(node):
            made = graph.graph.call_module("post_process_7", (node,))
        node.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)
        graph.recompile()
        return graph

    x = torch.randn(2, 3)
    for source, where in {"weight": "layer '0'", "relu": "layer '1'", "input": "input 'input'"}.items():
        graph = quantized(source)
        assert first_bad_layer(graph, lambda graph=graph: graph(x)).removeprefix("what quantizes ") == where
        graph.post_process_7.learner.weight.data.fill_(float("nan"))
        assert first_bad_layer(graph, lambda graph=graph: graph(x)) == f"the quantization steps of {where}"
