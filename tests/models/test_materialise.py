import math
import sys

import pytest
import torch
import warm
from safetensors.torch import save_file, save_model
from torch import nn

import qtool
from qtool.errors import QtoolError, UsageError
from qtool.models.materialise import Target, create, fill
from qtool.models.specs import load_model, load_weights

CPU = torch.device("cpu")


class Net(nn.Module):
    """A tied weight, a batch-norm, a buffer that no file holds, and a tensor that is no buffer."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(6, 5, bias=False)
        self.last.weight = self.first.weight
        self.register_buffer("positions", torch.arange(5.0), persistent=False)
        self.plain = torch.ones(5)

    def forward(self, x):
        return self.norm(self.first(x) + self.last(x)) + self.positions + self.plain


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(1)
    net = Net()
    net.norm.running_mean.fill_(0.25)
    save_model(net, str(tmp_path / "net.safetensors"))
    return net.eval(), tmp_path / "net.safetensors"


def test_it_is_the_model_that_was_saved(saved):
    net, file = saved
    made = create(Net, file, Target(CPU)).eval()
    assert made.last.weight is made.first.weight
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in made.state_dict().items())
    x = torch.randn(4, 6)
    assert torch.equal(made(x), net(x))
    made(x).sum().backward()


def test_in_16_bits_batch_norm_stays_in_32(saved):
    net, file = saved
    made = create(Net, file, Target(CPU, torch.bfloat16))
    assert torch.equal(made.first.weight, net.first.weight.bfloat16())
    assert made.norm.weight.dtype == torch.float32
    assert made.last.weight is made.first.weight


def test_later_it_has_no_memory_until_it_is_filled(saved):
    net, file = saved
    made = create(Net, file, Target(CPU, later=True))
    assert all(parameter.is_meta for parameter in made.parameters())
    fill(made)
    assert torch.equal(made.first.weight, net.first.weight)
    fill(made)


class Derived(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("halves", self.weight.detach() / 2, persistent=False)


class Looking(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.size = self.weight.sum().item()


@pytest.mark.parametrize(("kind", "text"), [(Derived, "'halves', computed from one"), (Looking, "RuntimeError")])
def test_what_is_computed_from_weights_is_refused_by_name(kind, text, tmp_path):
    save_file({"weight": torch.ones(3)}, tmp_path / "x.safetensors")
    with pytest.raises(QtoolError, match=text):
        create(kind, tmp_path / "x.safetensors", Target(CPU))
    assert not nn.Linear(2, 2).weight.is_meta


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_weights_of_8_bits_become_as_wide_as_the_model(tmp_path, dtype):
    weights, file = {"weight": torch.randn(3, 4).to(dtype), "bias": torch.randn(3)}, tmp_path / "x.safetensors"
    save_file(weights, file)
    for model in (nn.Linear(4, 3), create(lambda: nn.Linear(4, 3), file, Target(CPU))):
        load_weights(model, file)
        assert torch.equal(model.weight, weights["weight"].float())
    save_file({"weight": torch.full((3, 4), math.nan).to(dtype), "bias": torch.randn(3)}, file)
    for load in (
        lambda: load_weights(nn.Linear(4, 3), file),
        lambda: create(lambda: nn.Linear(4, 3), file, Target(CPU)),
    ):
        with pytest.raises(QtoolError, match="NaN or infinity in weight"):
            load()


def test_types_that_no_weights_are_read_from_are_told(tmp_path):
    save_file({"weight": torch.ones(1, 4, dtype=torch.complex64), "bias": torch.ones(1)}, tmp_path / "x.safetensors")
    with pytest.raises(QtoolError, match=r"tensors of F64, .*; got 'weight' of C64; convert the file"):
        create(lambda: nn.Linear(4, 1), tmp_path / "x.safetensors", Target(CPU))


def test_foreign_and_damaged_files_are_refused(saved, tmp_path):
    _, file = saved
    other = tmp_path / "other.safetensors"
    save_file({"weight": torch.ones(4), "more": torch.ones(1)}, other)
    with pytest.raises(QtoolError, match=r"missing: bias; not in the model: more; other shapes: weight"):
        create(lambda: nn.Linear(4, 1), other, Target(CPU))
    save_file({"weight": torch.full((1, 4), float("nan")), "bias": torch.ones(1)}, other)
    with pytest.raises(QtoolError, match="NaN or infinity in weight"):
        create(lambda: nn.Linear(4, 1), other, Target(CPU))
    for content in (file.read_bytes()[:-8], b"", b"\xff" * 20):
        other.write_bytes(content)
        with pytest.raises(QtoolError, match=r"a whole \.safetensors file"):
            create(Net, other, Target(CPU))


@pytest.mark.parametrize("weights", [None, "pretrained", "x.pt"])
def test_only_safetensors_can_be_read_so(weights):
    with pytest.raises(UsageError, match="--create-on-device"):
        load_model("resnet", num_classes=10, weights=weights, target=Target(CPU))


PEAK = """
import ctypes, sys
from pathlib import Path
import torch
from torch import nn
from qtool.models.materialise import Target, create
from qtool.models.specs import load_weights

# else glibc, having seen large blocks freed, keeps some of them or not, as their order has it
assert ctypes.CDLL(None).mallopt(-3, 131072)  # M_MMAP_THRESHOLD

def build():
    return nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(12)))

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

dtype = {"none": None, "bfloat16": torch.bfloat16}[sys.argv[2]]
create(lambda: nn.Linear(4, 4), Path(sys.argv[1]).with_name("small.safetensors"), Target(torch.device("cpu")))
before = resident()
if sys.argv[3] == "usual":
    model = build()
    load_weights(model, sys.argv[1])
else:
    model = create(build, Path(sys.argv[1]), Target(torch.device("cpu"), dtype))
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
peak = int(status["VmHWM"].split()[0]) * 1024 - before
print(peak / sum(p.nbytes for p in model.parameters()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the resident set from /proc")
def test_the_peak_is_the_weights_once(tmp_path):
    big = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(12)))
    save_file(big.state_dict(), tmp_path / "big.safetensors")
    save_file(nn.Linear(4, 4).state_dict(), tmp_path / "small.safetensors")
    weights = sum(p.nbytes for p in big.parameters())
    for dtype, way, low, high in (
        ("none", "here", 0.9, 1.2),
        ("bfloat16", "here", 0.9, 1.2),
        ("none", "usual", 1.8, 3),
    ):
        process = warm.Started(tmp_path / "said", warm.script, PEAK, str(tmp_path / "big.safetensors"), dtype, way)
        assert process.end() == 0, process.said()
        assert low < float(process.said()) < high, (dtype, way, weights)


@pytest.mark.filterwarnings("ignore:--strategy fsdp.*gathered whole")
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_training_that_begins_so_is_the_same(small_net, small_data, tmp_path, precision, strategy):
    begin = load_model(small_net, num_classes=3, seed=5)
    save_model(begin, str(tmp_path / "begin.safetensors"))
    options = {"weights": tmp_path / "begin.safetensors", "device": "cpu", "max_steps": 3, "precision": precision}
    options["channels_last"] = False
    usual = qtool.train(small_net, small_data, strategy=strategy, **options)
    here = qtool.train(small_net, small_data, strategy=strategy, create_on_device=True, **options)
    assert here.history.losses == usual.history.losses
    for name, value in usual.model.state_dict().items():
        assert torch.equal(here.model.state_dict()[name].float(), value.float())


def test_a_model_that_is_there_already_cannot_be_created(small_data):
    with pytest.raises(UsageError, match="a model that is there already"):
        qtool.train(nn.Linear(2, 2), small_data, device="cpu", create_on_device=True)
