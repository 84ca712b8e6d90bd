import pytest
import torch
from torch import nn

from qtool.errors import UsageError
from qtool.recipe import TrainConfig
from qtool.steps.setup import STAGED, Setup, no_scaler, plain


def made(**options):
    return plain(nn.Linear(6, 4), TrainConfig(device="cpu", **options))


def test_inputs_are_cast_and_laid_out_and_targets_are_not():
    setup = Setup(nn.Linear(6, 4), TrainConfig(), torch.device("cpu"), lambda p: None, no_scaler(torch.device("cpu")))
    setup.input_dtype, setup.memory_format = torch.bfloat16, torch.channels_last
    image, number = setup.place((torch.randn(2, 3, 4, 4), torch.tensor([1, 2])))
    assert image.dtype == torch.bfloat16
    assert image.is_contiguous(memory_format=torch.channels_last)
    assert number.dtype == torch.int64
    target = {"price": torch.tensor([1001.0, 70_000.0]), "map": torch.randn(2, 3, 4, 4)}
    assert all(setup.move(target)[name] is value for name, value in target.items())


def test_closing_undoes_in_reverse_and_once():
    done = []
    with made() as setup:
        setup.on_close += [lambda: done.append(1), lambda: done.append(2)]
    setup.close()
    assert done == [2, 1]


@pytest.mark.parametrize("options", [{"precision": "16-mixed"}, {"optimizer": "adamw8bit"}])
def test_a_plain_step_refuses_what_needs_a_technique(options):
    with pytest.raises(UsageError, match="without techniques"):
        made(**options)


class OnTheHost:
    """A tensor of the host that writes down how it gets to a GPU."""

    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self, nbytes=2**20, pinned=False) -> None:
        self.way, self.nbytes, self.pinned = [], nbytes, pinned

    def numel(self):
        return self.nbytes // 4

    def element_size(self):
        return 4

    def is_pinned(self):
        return self.pinned

    def is_floating_point(self):
        return True

    def dim(self):
        return 2

    def pin_memory(self):
        self.way.append("pinned")
        return self

    def to(self, *where, **how):
        self.way.append((*where, *how.items()))
        return self


@pytest.mark.parametrize(
    ("value", "first"),
    [(OnTheHost(), ["pinned"]), (OnTheHost(nbytes=STAGED), []), (OnTheHost(nbytes=STAGED, pinned=True), ["pinned"])],
    ids=["large", "small", "pinned already"],
)
def test_inputs_reach_a_gpu_without_waiting_and_are_cast_there(value, first):
    setup = made()
    setup.device, setup.input_dtype = torch.device("cuda", 0), torch.bfloat16
    setup._place(value)
    layout = ("memory_format", torch.preserve_format)
    assert value.way == [*first, (setup.device, ("non_blocking", True)), (torch.bfloat16, layout)]
