import pytest
import torch
from torch import nn

from qtool.errors import QtoolError
from qtool.steps import checkpoint, trees


def test_a_full_disk_keeps_the_old_checkpoint(tmp_path, monkeypatch):
    first = checkpoint.commit(tmp_path, 5, {"a": 1})

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trees, "save_file", full)
    with pytest.raises(QtoolError, match=r"No space left.*make room"):
        checkpoint.commit(tmp_path, 6, {"a": 2})
    assert list(tmp_path.iterdir()) == [first]
    assert checkpoint.latest(tmp_path) == first


def test_commit_keeps_the_latest_alone(tmp_path):
    (tmp_path / "best.safetensors").touch()
    for step in (9, 10, 100):
        path = checkpoint.commit(tmp_path, step, {"step": step})
    assert checkpoint.latest(tmp_path) == path
    assert sorted(p.name for p in tmp_path.iterdir()) == ["best.safetensors", path.name]
    assert checkpoint.latest(tmp_path / "nowhere") is None


class Collecting(nn.Linear):
    """Keeps what it has seen: one buffer grows, one comes into being."""

    def __init__(self):
        super().__init__(4, 2)
        self.register_buffer("seen", torch.zeros(0, 4))
        self.register_buffer("last", None)

    def forward(self, x):
        self.seen, self.last = torch.cat([self.seen, x]), x.clone()
        return super().forward(x)


def test_buffers_that_have_grown_come_back(tmp_path):
    model, again, files = Collecting(), Collecting(), checkpoint.Files()
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (model, again)]
    model(torch.randn(3, 4))
    path = files.commit(tmp_path, 1, {}, model, optimizers[0])
    files.restore(files.read(path), again, optimizers[1])
    assert again.seen.equal(model.seen)
    assert again.last.equal(model.last)
    files.keep_best(tmp_path, model)
    model(torch.randn(3, 4))
    files.take_best(tmp_path, model)
    assert model.seen.equal(again.seen)
    kept = checkpoint.copied(model)
    model(torch.randn(3, 4))
    checkpoint.put_back(model, kept)
    assert model.seen.equal(again.seen)
    assert model.last.equal(again.last)


def test_a_buffer_that_a_pass_has_made_is_forgotten_with_it():
    model = nn.Module()
    model.register_buffer("mean", torch.zeros(2))
    model.register_buffer("seen", None)
    restore = checkpoint.restorer(model, model.buffers())
    model.seen = torch.ones(2)
    model.mean += 1
    restore()
    assert model.seen is None
    assert torch.equal(model.mean, torch.zeros(2))
