import threading

import torch
from torch import nn

from qtool.recipe import TrainConfig
from qtool.training.techniques import setup

CONFIG = TrainConfig(device="cpu")


class Viewing(nn.Module):
    """Code that depends on NCHW strides."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)

    def forward(self, x):
        return self.conv(x).view(len(x), -1)


def test_convolutions_and_images_are_laid_out_channels_last():
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten()).train()
    image = torch.randn(2, 2, 8, 8)
    expected = model.eval()(image)
    statistics = model[1].running_mean.clone()
    model.train()
    with setup(model, CONFIG, image) as made:
        assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
        assert made.place(image).is_contiguous(memory_format=torch.channels_last)
        assert model.training
        assert torch.equal(model[1].running_mean, statistics), "the trial must leave no trace"
        model.eval()
        torch.testing.assert_close(made.predict(image), expected)
    assert model[0].weight.is_contiguous()


def test_the_trial_makes_no_second_set_of_weights():
    seen = []

    class Watched(nn.Conv2d):
        def forward(self, x):
            seen.append(self.weight)
            return super().forward(x)

    model, image = nn.Sequential(Watched(2, 4, 3)), torch.randn(2, 2, 8, 8)
    with setup(model, CONFIG, image):
        assert len(seen) == 1
        assert seen[0] is model[0].weight


def test_a_model_whose_attributes_cannot_be_copied_is_laid_out_too():
    model, image = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten()), torch.randn(2, 2, 8, 8)
    model.library, model.lock, model[0].last = torch, threading.Lock(), model[0].weight * 2
    statistics = model[1].running_mean.clone()
    with setup(model, CONFIG, image) as made:
        assert made.memory_format == torch.channels_last
        assert torch.equal(model[1].running_mean, statistics), "the trial must leave no trace"


def test_a_model_that_cannot_take_it_keeps_its_order():
    model, image = Viewing(), torch.randn(2, 2, 8, 8)
    with setup(model, CONFIG, image) as made:
        assert made.memory_format == torch.contiguous_format
        assert model.conv.weight.is_contiguous()
        assert made.predict(image).shape == (2, 144)


def test_models_without_images_and_the_switch():
    for model, example, config in (
        (nn.Linear(3, 3), torch.randn(2, 3), CONFIG),
        (nn.Conv2d(2, 4, 3), torch.randn(2, 2, 8, 8), TrainConfig(device="cpu", channels_last=False)),
        (nn.Conv2d(2, 4, 3), None, CONFIG),
    ):
        with setup(model, config, example) as made:
            assert made.memory_format == torch.contiguous_format
