import shutil
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch.partitioners import min_cut_rematerialization_partition

from qtool.errors import QtoolError
from qtool.flags import explain
from qtool.recipe import TrainConfig
from qtool.runtimes.torch import TorchSession
from qtool.steps.passes import answer
from qtool.training import compiling
from qtool.training.techniques import setup

CONFIG = TrainConfig(device="cpu", compile=True)


@pytest.fixture
def compiled(monkeypatch):
    """What is compiled, in order; captured graphs are cut in two as they are told to be, and run as they are."""
    torch._dynamo.reset()  # a graph that broke for another model is not tried again
    functions, real = [], torch.compile

    def compile_(function, options):
        def cut(joint, inputs, **more):
            options["joint_custom_pre_pass"](joint.graph)
            return min_cut_rematerialization_partition(joint, inputs, **more)

        functions.append(function)
        return real(
            function, backend=aot_autograd(fw_compiler=boxed_nop, partition_fn=cut, keep_inference_input_mutations=True)
        )

    monkeypatch.setattr(torch, "compile", compile_)
    return functions


def test_the_model_is_compiled_in_place_and_set_free_again(monkeypatch):
    compiled = []
    monkeypatch.setattr(compiling, "require_compiler", lambda device: None)

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    model: nn.Module = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, options: real(function, backend=backend))
    names = list(model.state_dict())
    with setup(model, CONFIG) as made:
        assert made.predict(torch.randn(2, 3)).shape == (2, 3)
        assert len(compiled) == 1
        assert list(model.state_dict()) == names
    model(torch.randn(5, 3))
    assert len(compiled) == 1


def test_a_compiled_step_is_the_step(run_steps, net, compiled):
    """With checkpointing and autocast beside it, to rounding."""
    options = {"precision": "bf16-mixed", "activation_checkpointing": net == "transformer", "optimizer": "sgd"}
    plain, quick = run_steps(net, 3, **options), run_steps(net, 3, compile=True, **options)
    assert len(compiled) == 1
    assert plain.losses == pytest.approx(quick.losses, rel=0.02)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of dynamo, at gathered weights, which are no leaves
def test_of_a_sharded_model_each_block_is_compiled(run_steps, net, compiled):
    """Around checkpointing that is there already, which is there alone when the setup is closed."""
    options = {"activation_checkpointing": net == "transformer", "optimizer": "sgd"}
    plain = run_steps(net, 3, **options)
    sharded = run_steps(net, 3, **options, compile=True, strategy="fsdp")
    assert len(compiled) == 3
    assert sharded.losses == pytest.approx(plain.losses, rel=1e-4)
    sharded.setup.close()
    assert not any("forward" in vars(module) for module in sharded.model.modules())
    for a, b in zip(plain.model.parameters(), sharded.model.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of dynamo, at a block's input, which is no leaf
def test_updated_in_the_backward_pass_each_block_is_compiled(run_steps, net, compiled):
    """A block's gradients come with its own backward pass; batch-norm's statistics move once, checkpointed or not."""
    options = {"activation_checkpointing": True, "optimizer": "sgd", "step_in_backward": True, "grad_clip": None}
    plain, inside = run_steps(net, 3, **options), run_steps(net, 3, **options, compile=True)
    assert len(compiled) > 1
    assert inside.losses == pytest.approx(plain.losses, rel=1e-4)
    for a, b in zip(plain.model.state_dict().values(), inside.model.state_dict().values(), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


class Moving(nn.Module):
    """A block that moves a buffer after it has read it, in one graph or with a break in it."""

    def __init__(self, whole):
        super().__init__()
        self.whole, self.layer = whole, nn.Linear(16, 16)
        self.register_buffer("mean", torch.full((16,), 0.1))

    def forward(self, x):
        y = self.layer((x - self.mean.view(1, 16)).square())
        self.mean.lerp_(x.detach().mean(0), 0.5)
        if not self.whole:
            torch._dynamo.graph_break()
        return x + y.tanh()


class Normed(nn.Module):
    """A block with batch-norm and a break."""

    def __init__(self, whole):
        super().__init__()
        self.layer, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)

    def forward(self, x):
        y = self.norm(self.layer(x))
        torch._dynamo.graph_break()
        return x + y.tanh()


@pytest.mark.filterwarnings("ignore::UserWarning")  # of dynamo, at a block's input, which is no leaf
@pytest.mark.parametrize(
    ("kind", "whole", "options"),
    [
        (Moving, True, {}),
        (Moving, True, {"activation_checkpointing": True}),
        (Moving, False, {"activation_checkpointing": True, "step_in_backward": True}),
        (Normed, False, {"activation_checkpointing": True}),
    ],
)
def test_buffers_move_once_and_gradients_are_of_what_they_were(kind, whole, options, run_steps, compiled, monkeypatch):
    """Compiled, checkpointed or not, also where a graph breaks in a block."""
    build = lambda: nn.Sequential(*(kind(whole) for _ in range(2)), nn.Linear(16, 4))  # noqa: E731
    monkeypatch.setitem(run_steps.__globals__["NETS"], "moving", (build, (16,)))
    plain, quick = (run_steps("moving", optimizer="sgd", **more) for more in ({}, options | {"compile": True}))
    assert len(compiled) == 1 or not whole
    assert quick.losses == pytest.approx(plain.losses, rel=1e-5)
    for a, b in zip(plain.model.state_dict().values(), quick.model.state_dict().values(), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


@pytest.mark.slow
def test_the_compiler_itself_is_told_what_to_keep(run_steps, monkeypatch):
    monkeypatch.setitem(run_steps.__globals__["NETS"], "moving", (lambda: nn.Sequential(Moving(True)), (16,)))
    plain, quick = (run_steps("moving", optimizer="sgd", compile=compiled) for compiled in (False, True))
    assert quick.losses == pytest.approx(plain.losses, rel=1e-5)


def test_a_missing_compiler_is_named(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(QtoolError, match=r"C\+\+ compiler.*g\+\+"):
        setup(nn.Linear(3, 3), CONFIG)
    monkeypatch.setenv("CXX", "/opt/odd++")
    with pytest.raises(QtoolError, match="odd"):
        compiling.require_compiler("cpu")


@pytest.mark.parametrize("name", ["TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE"])
def test_what_makes_compiling_do_nothing_is_refused(name, monkeypatch):
    monkeypatch.setenv(name, "1")
    with pytest.raises(QtoolError, match=f"--compile: expected torch.compile to compile; got {name}=1"):
        compiling.require_compiler("cpu")
    with pytest.raises(QtoolError, match=f"'torch-compile': expected torch.compile to compile; got {name}=1"):
        TorchSession(nn.Linear(3, 3), (), provider="torch-compile")
    monkeypatch.setenv(name, "0")
    compiling.require_compiler("cpu")


def test_a_compiler_that_fails_is_told_as_that_and_not_as_the_model_s_fault():
    class InductorError(RuntimeError):
        pass

    def fails(x):
        raise InductorError("CppCompileError: C++ compile error")

    with pytest.raises(QtoolError, match=r"InductorError.*; the model is not at fault: .* or leave --compile out"):
        answer(fails, torch.zeros(2, 3))
    told = explain(InductorError("none"))
    assert (told.where, told.got) == ("torch.compile", "InductorError: none")


def test_triton_is_asked_for_on_a_gpu(monkeypatch):
    monkeypatch.setattr(compiling.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(QtoolError, match="Triton"):
        compiling.require_compiler("cuda")


@pytest.mark.slow
def test_the_compiler_s_own_warnings_are_no_errors_of_the_caller_s() -> None:
    load = "from qtool.system.devices import load_inductor; load_inductor()"
    code = f"import warnings; warnings.simplefilter('error'); {load}"
    subprocess.run([sys.executable, "-c", code], check=True)
