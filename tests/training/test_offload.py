import torch

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
