from types import SimpleNamespace

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from qtool.training import offload


def test_results_are_the_same_and_large_activations_travel(run_steps, same_state, net, monkeypatch):
    monkeypatch.setattr(offload, "SMALLEST", 1024)
    copied = []
    real = torch.empty_like

    def counted(tensor, **options):
        if options.get("device") == "cpu":
            copied.append(tensor)
        return real(tensor, **options)

    monkeypatch.setattr(torch, "empty_like", counted)
    plain = run_steps(net)
    assert not copied
    moved = run_steps(net, prepare=lambda made: offload.apply(made, None))
    assert moved.losses == plain.losses
    assert same_state(moved.model, plain.model)
    assert copied
    kept = {p.untyped_storage().data_ptr() for p in moved.model.parameters()}
    assert not any(t.untyped_storage().data_ptr() in kept for t in copied), "parameters stay on the device"
    assert min(t.nbytes for t in copied) >= 1024


def test_fake_activations_travel_and_fake_parameters_stay(monkeypatch):
    """As in a prediction, where no memory has an address; to a GPU's host memory, which is pinned."""
    copied = []
    real = torch.empty_like

    def counted(tensor, **options):
        copied.append((tuple(tensor.shape), options))
        return real(tensor, **options)

    with FakeTensorMode():
        net = nn.Linear(512, 768, device="meta")
        value = torch.empty(1024, 512, device="meta", requires_grad=True)
        monkeypatch.setattr(torch, "empty_like", counted)
        with offload._hooks(SimpleNamespace(model=net, device=torch.device("cuda"))):
            result = torch.relu(net(value))
        result.sum().backward()
        assert value.grad.device.type == net.weight.grad.device.type == "meta"
    to_host = {"device": "cpu", "pin_memory": True}
    assert [given for given in copied if given[1]] == [((1024, 512), to_host), ((1024, 768), to_host)]
