"""Capture: the model's function with a free batch, its weights untouched, failures in the user's own words."""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib.util
import operator
import sys
import textwrap
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import conv_nets
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from torch import Tensor, nn
from torch._higher_order_ops import scan, while_loop

from qtool.errors import QtoolError
from qtool.graphs.edits import copied, owner, set_training
from qtool.graphs.operators import aten
from qtool.quantization.capturing.capture import capture
from qtool.quantization.rewrites.functional import mutations
from qtool.quantization.stage import quantize
from qtool.recipe import QuantizeConfig


@settings(
    max_examples=8, derandomize=True, database=None, suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)  # fmt: skip
@given(conv_nets.nets())
def test_any_net_is_captured_as_the_function_it_is_and_left_as_it_was(net: conv_nets.Net) -> None:
    model, inputs = conv_nets.build(net), conv_nets.example(net, 1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    graph = capture(model, inputs)
    others = conv_nets.example(net, 5, seed=3)
    with torch.no_grad():
        torch.testing.assert_close(graph(*others), model(*others), rtol=1e-5, atol=1e-5)
    for value in graph.parameters():
        value.data.zero_()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not model.training


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5))
        self.head = nn.Linear(4, 2)
        self.unused = nn.ModuleDict({"deep": nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))})
        self.only_relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.head(self.body(x).mean((2, 3)))
        return y + self.unused["deep"](y) if self.training else y


X = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(0))


def test_training_and_evaluation_forms() -> None:
    model = Net()
    model.body.eval()
    modes = [module.training for module in model.modules()]
    flags = {
        train: [n.args[5] for n in capture(model, X, train=train).graph.nodes if n.target is aten.batch_norm.default]
        for train in (False, True)
    }
    assert flags == {False: [False], True: [True]}
    assert [module.training for module in model.modules()] == modes


def test_operators_know_the_module_they_come_from() -> None:
    owners = {str(n.target): owner(n) for n in capture(Net().eval(), X).graph.nodes if n.op == "call_function"}
    assert owners["aten.conv2d.default"] == "body.0"
    assert owners["aten.linear.default"] == "head"
    assert owners["aten.mean.dim"] == ""


def test_a_module_that_the_graph_leaves_out_is_named_once() -> None:
    for train in (False, True):
        graph = copied(capture(Net(), X, train=train))
        assert graph.meta["notes"] == ("module 'unused' is no part of the captured graph",)


def test_what_a_model_does_in_training_alone_is_no_part_of_either_form() -> None:
    class Path(Net):
        def forward(self, x: Tensor) -> Any:
            y = nn.functional.rrelu(self.head(self.body(x).mean((2, 3))), training=self.training)
            return (y * torch.empty(len(x), 1).bernoulli_(0.5), y) if self.training else y.softmax(1)

    model = Path()
    graph = capture(model, X, train=True)
    assert model.training
    set_training(graph, batch_norm=False, dropout=False)
    with torch.no_grad():
        torch.testing.assert_close(graph(X), model.eval()(X))
    set_training(graph, batch_norm=True, dropout=False)
    assert not torch.allclose(graph(X), model(X), atol=1e-3)


@pytest.mark.parametrize(
    ("extra", "told"),
    [(lambda x: 3, "got 3;"), (lambda x: "three", "got 'three';"), (lambda x: x.shape[0], "got a size, s")],
)
def test_outputs_that_are_no_tensors_are_refused(extra: Any, told: str) -> None:
    class More(Net):
        def forward(self, x: Tensor) -> Any:
            return {"first": super().forward(x), "none": None, "more": extra(x)}

    with pytest.raises(QtoolError, match=f"outputs that are tensors, or None; {told}"):
        capture(More().eval(), X)


@pytest.mark.parametrize(
    ("kind", "do"), [(torch.bfloat16, r"return \.float\(\) of it"), (torch.complex64, "torch.view_as_real of it")]
)
def test_outputs_in_a_type_that_no_runtime_gives_are_refused_before_the_work(kind: torch.dtype, do: str) -> None:
    class More(Net):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            return {"first": y, "more": y.to(kind)}

    told = str(kind).removeprefix("torch.")
    with pytest.raises(QtoolError, match=f"outputs of a type that runtimes hand out; got {told}; .*{do}"):
        capture(More().eval(), X)


@pytest.mark.parametrize("call", [nn.functional.conv2d, nn.functional.conv_transpose2d])
def test_groups_that_count_the_samples_are_refused_before_the_work(call: Any) -> None:
    class Modulated(nn.Module):
        """Each sample's channels in a kernel of its own."""

        def forward(self, x: Tensor) -> Tensor:
            kernels = x.mean((2, 3)).view(-1, 1, 1, 1) * torch.ones(1, x.shape[1], 3, 3)
            y = call(x.flatten(0, 1)[None], kernels, groups=x.shape[0])
            return y.view(x.shape[0], x.shape[1], *y.shape[2:])

    told = r"module '0': expected convolutions whose groups are a number; got 'conv.*; at \S+test_capture\.py:\d+, have"
    with pytest.raises(QtoolError, match=told):
        capture(nn.Sequential(Modulated()), X)


class Calling(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def _within(x: Tensor) -> Tensor:
    return torch.cond(x.mean() > 0, torch.sin, torch.cos, (x,))


@pytest.mark.parametrize(
    ("call", "got"),
    [
        (lambda x: while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 2), (torch.tensor(0), x))[1], "while_loop"),
        (lambda x: scan(lambda h, y: (h + y, h * y), torch.zeros_like(x[:, 0]), x, dim=1)[1], "scan"),
        (lambda x: torch.cond(x.sum() > 0, _within, torch.cos, (x,)), "torch.cond within torch.cond"),
    ],
)
def test_control_flow_that_no_file_holds_is_refused_before_the_work(call: Any, got: str) -> None:
    """torchao ended in an assertion of its own."""
    with pytest.raises(QtoolError, match=rf"expected control flow of torch\.cond alone, .*got {got}; .*write it as"):
        capture(Calling(call), torch.randn(4, 6))


def test_a_generator_of_the_model_s_own_is_refused() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator = torch.Generator()

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.randn(1, generator=self.generator)

    with pytest.raises(QtoolError, match=r"own generator; got a torch\.Generator of its own"):
        capture(Noisy(), X)


def test_a_refused_model_still_takes_tensors_as_buffers() -> None:
    class Choosing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            return x + 1 if x.sum() > 0 else x

    model, hooks = Choosing(), nn.modules.module._global_buffer_registration_hooks
    before = [*hooks]
    with pytest.raises(QtoolError, match="without sizes or Python control flow"):
        capture(model, X)
    model.seen = torch.ones(1)
    assert [*hooks] == before


def test_a_process_without_standard_error_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    assert torch.equal(capture(nn.ReLU(), X)(X), X.relu())


def test_every_dropout_is_switched() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Dropout2d(0.5), nn.AlphaDropout(0.5), nn.FeatureAlphaDropout(0.5))
    graph = capture(model, X, train=True)
    set_training(graph, batch_norm=False, dropout=True)
    assert not torch.equal(graph(X), X)
    set_training(graph, batch_norm=False, dropout=False)
    assert torch.equal(graph(X), X)


def test_a_tied_weight_counts_under_all_its_names() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.second(x)

    assert capture(Tied(), torch.ones(2, 3)).meta["notes"] == ()


def test_a_condition_on_the_batch_is_noted() -> None:
    class Even(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.shape[0] % 2 else x + 1

    (note,) = capture(Even(), torch.ones(4, 3)).meta["notes"]
    assert note.startswith("captured for batches with")
    assert "% 2" in note

    class Two(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x + y

    assert capture(Two(), (torch.ones(4, 3), torch.ones(4, 3))).meta["notes"] == ()


def test_a_cumulative_average_is_captured_with_a_momentum_and_kept_in_the_model() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3, momentum=None))
    (norm,) = (n for n in capture(model, X, train=True).graph.nodes if n.target is aten.batch_norm.default)
    assert norm.args[6] == 0.1
    assert model[0].momentum is None


# What cannot be captured.

SOURCE = textwrap.dedent("""
    import torch
    from torch import nn

    class Base(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

    class Branches(Base):
        def forward(self, x):
            y = self.conv(x)
            if y.sum() > 0:  # LINE
                return y
            return y + 1

    class Boxes(Base):
        def forward(self, x):
            y = self.conv(x)
            y = y[y > 0]
            return y if y.numel() == 0 else y * 2  # LINE

    class Raises(Base):
        def forward(self, x):
            raise RuntimeError("not today")  # LINE

    class Channels(Base):
        def forward(self, x):
            return self.conv(x)  # LINE

    class FixedBatch(Base):
        def forward(self, x):
            return self.conv(x).reshape(4, -1)
""")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    path = tmp_path_factory.mktemp("user") / "user_net.py"
    path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("user_net", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def line_of(name: str) -> int:
    lines = SOURCE.splitlines()
    start = lines.index(f"class {name}(Base):")
    return next(i for i, line in enumerate(lines[start:], start + 1) if "# LINE" in line)


@pytest.mark.parametrize(
    ("name", "x", "said"),
    [
        ("Branches", X, "a graph that torch.export can capture"),
        ("Boxes", X, "of a detector a module of its backbone and heads"),
        ("Raises", X, "inputs float32 of shape [4, 3, 6, 6]: RuntimeError: not today"),
        ("Channels", X[:, :2], "inputs float32 of shape [4, 2, 6, 6]: RuntimeError: Given groups=1"),
        ("Channels", X[:, :, :2, :2], "inputs float32 of shape [4, 3, 2, 2]: RuntimeError"),
    ],
)
def test_the_error_is_one_line_with_the_users_own(
    written: ModuleType, name: str, x: Tensor, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(QtoolError) as caught:
        capture(getattr(written, name)(), x)
    text = str(caught.value)
    assert text.startswith(f"model '{name}': expected ")
    assert said in text
    assert f"user_net.py:{line_of(name)}, " in text
    assert "\n" not in text
    out, err = capfd.readouterr()
    assert out == ""
    assert "conv2d" not in err


def test_torch_logs_nothing_of_an_image_that_is_too_small(caplog: pytest.LogCaptureFixture) -> None:
    """A linear layer behind a flattened image takes one size, which torch's fake tensors log with a traceback."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 16, 5))
    with caplog.at_level("ERROR"), pytest.raises(QtoolError, match="mat1 and mat2 shapes cannot be multiplied"):
        capture(model, X[:, :, 1:])
    assert not [record for record in caplog.records if "fake_tensor" in record.name]


def test_a_state_that_counts_samples_by_another_axis_is_told_as_that() -> None:
    state = torch.zeros(2, 3, 5)
    with pytest.raises(QtoolError, match=r"by their first dimension; got .*\[2, 3, 5\]; .*state\.transpose\(0, 1\)"):
        capture(nn.GRU(4, 5, 2, batch_first=True), (torch.randn(3, 2, 4), state))


def test_a_fixed_batch_size_is_refused(written: ModuleType, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(QtoolError, match=r"dynamic batch; got code that takes the batch size for a constant"):
        capture(written.FixedBatch(), X)
    capfd.readouterr()


class Wrapper(nn.Module):
    """Hands on what it is given, as wrappers of language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 5)

    def forward(self, first: Tensor, **others: Tensor) -> Tensor:
        return self.inner(first) + others["mask"][:, None]


def test_what_a_model_takes_under_no_name_of_its_own_is_open_as_well() -> None:
    torch.manual_seed(0)
    net, given = Wrapper().eval(), {"first": torch.randn(4, 3), "mask": torch.randn(4)}
    graph = capture(net, given)
    assert "forward" not in vars(net)
    assert [node.target for node in graph.graph.nodes if node.op == "placeholder"] == ["first", "mask"]
    for size in (1, 3):
        few = {name: value[:size] for name, value in given.items()}
        torch.testing.assert_close(graph(**few), net(**few))


class Windows(nn.Module):
    """How Swin puts windows together: the batch is what is left of a division, made a whole number."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 5), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        windows = self.inner(x.unflatten(1, (4, 2)).flatten(0, 1))
        count = int(windows.shape[0] / (8 / 2))
        return windows.view(count, 4, 2, -1).flatten(1, 2) + len(x)


@pytest.mark.parametrize("train", [False, True])
def test_sizes_that_python_makes_numbers_of_stay_open(train: bool, capfd: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    net, x = Windows().eval(), torch.randn(6, 8, 3)
    graph = capture(net, x, train=train)
    for batch in (x, x[:1], x[:3]):
        torch.testing.assert_close(graph(batch), net(batch))
    assert [owner(node) for node in graph.graph.nodes if node.target is aten.linear.default] == ["inner.0"]
    assert not any(node.target in (operator.truediv, torch.sym_float) for node in graph.graph.nodes)
    assert capfd.readouterr() == ("", "")


class Outer(nn.Module):
    """Takes whatever it is given, to a model whose constants torch has to read code to find."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Windows()

    def forward(self, **given: Tensor) -> Tensor:
        return self.inner(**given) * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])


@pytest.mark.parametrize("own", [False, True], ids=["a class's", "a function of its own"])
def test_what_a_wrapper_of_any_arguments_multiplies_by_is_a_constant_of_the_graph(own: bool) -> None:
    if own and torch.__version__ < "2.12":
        pytest.skip("torch 2.11 takes the batch size for a constant there, which is told")
    net, x = Outer().eval(), torch.randn(6, 8, 3)
    if own:
        net.forward = functools.partial(net.forward)  # type: ignore[method-assign]
    graph = capture(net, {"x": x})
    torch.testing.assert_close(graph(x=x[:3]), net(x=x[:3]))
    assert [owner(node) for node in graph.graph.nodes if node.target is aten.linear.default] == ["inner.inner.0"]
    assert type(net) is Outer
    assert ("forward" in vars(net)) is own


@pytest.mark.parametrize("train", [False, True])
def test_a_failed_capture_leaves_the_model_as_it_was(written: ModuleType, train: bool) -> None:
    model = nn.Sequential(nn.BatchNorm2d(3, momentum=None), written.Raises()).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(QtoolError):
        capture(model, X, train=train)
    assert model.training
    assert model[0].momentum is None
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("dtype", "where"),
    [(torch.float16, r"parameter 'body\.0\.weight'"), (torch.float64, "parameter"), (None, "example")],
)
def test_other_floats_are_refused_by_name(dtype: torch.dtype | None, where: str) -> None:
    model: Any = Net() if dtype is None else Net().to(dtype)
    x = X.double() if dtype is None else X
    with pytest.raises(QtoolError, match=where + r".*expected float32; got float(16|64); convert"):
        capture(model.eval(), x)


def test_a_parameter_that_is_never_read_may_be_of_any_type() -> None:
    model = Net().eval()
    model.spare = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    graph, x = capture(model, X), torch.randn(5, *X.shape[1:])
    torch.testing.assert_close(graph(x), model(x))


def test_positional_arguments_of_any_number_have_a_dynamic_batch_too() -> None:
    class Passed(nn.Linear):
        def forward(self, first: Tensor, *more: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(first + sum(more))

    model, x = Passed(4, 4), torch.randn(3, 4)
    captured = capture(model, (x, x, x))
    torch.testing.assert_close(captured(*[torch.ones(5, 4)] * 3), model(*[torch.ones(5, 4)] * 3))


def test_a_batch_norm_that_is_used_twice_can_be_trained() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.conv(self.norm(self.conv(x)).relu()))

    model, x = Twice(), torch.randn(4, 3, 5, 5)
    graph = capture(model, x, train=True)
    assert mutations(graph) == []
    set_training(graph, batch_norm=True, dropout=False)
    torch.testing.assert_close(graph(x), copy.deepcopy(model).train()(x))


@dataclasses.dataclass(frozen=True)
class Masked:
    x: Tensor
    mask: Tensor


class Pair(NamedTuple):
    x: Tensor
    mask: Tensor


@dataclasses.dataclass
class Answer:
    hidden: Pair
    logits: Tensor
    loss: Tensor | None = None


class Opaque:
    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class Answering(nn.Module):
    """A model that answers with classes of its own."""

    def __init__(self, kind: Any = Answer) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(4, 2), kind

    def forward(self, given: Masked | Pair, scale: Tensor) -> Any:
        logits = self.layer(given.x) * given.mask * scale
        return Answer(Pair(given.x + 1, given.mask), logits) if self.kind is Answer else self.kind(logits)


@pytest.mark.parametrize("kind", [Masked, Pair])
def test_dataclasses_and_named_tuples_go_in_and_come_out(kind: Any) -> None:
    model = Answering()
    graph = capture(model, (kind(torch.randn(3, 4), torch.ones(3, 1)), torch.ones(3, 1)))
    x, mask, scale = torch.randn(5, 4), torch.rand(5, 1), torch.rand(5, 1)
    with torch.no_grad():
        found, wanted = graph(kind(x, mask), scale), model(kind(x, mask), scale)
    assert (type(found), type(found.hidden), found.loss) == (Answer, Pair, None)
    torch.testing.assert_close((found.logits, found.hidden), (wanted.logits, wanted.hidden))


def test_an_output_of_an_unknown_class_is_told_apart_from_control_flow() -> None:
    with pytest.raises(QtoolError, match="return a tuple, a dict or a dataclass"):
        capture(Answering(Opaque), (Pair(torch.randn(3, 4), torch.ones(3, 1)), torch.ones(3, 1)))


def test_an_input_of_an_unknown_class_is_to_be_made_in_forward() -> None:
    class Reading(nn.Module):
        def forward(self, x: Tensor, more: Opaque) -> Tensor:
            return x + more.logits

    with pytest.raises(QtoolError, match="got one of class Opaque; wrap it in a module that takes the tensors"):
        capture(Reading(), (torch.randn(3, 4), Opaque(torch.randn(3, 4))))


def test_a_size_in_a_set_is_no_output_of_an_unknown_class() -> None:
    class Lengths(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return x * len({x.shape[0], *mask.sum(1).tolist()})

    with pytest.raises(QtoolError, match="rewrite that part without Python control flow that depends on values"):
        capture(Lengths(), (torch.randn(3, 4), torch.ones(3, 4, dtype=torch.int64)))


class Cache:
    """What transformers keeps keys and values in."""


class Remembering(nn.Module):
    """A transformers model: its output holds a cache unless its configuration says not to."""

    def __init__(self) -> None:
        super().__init__()
        self.config, self.linear = SimpleNamespace(use_cache=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"logits": self.linear(x)} | ({"past_key_values": Cache()} if self.config.use_cache else {})


def test_a_model_that_remembers_for_generating_is_captured_without() -> None:
    model, x = Remembering(), torch.randn(3, 4)
    with torch.no_grad():
        assert torch.equal(capture(model, x)(x)["logits"], model.linear(x))
    assert model.config.use_cache is True, "generating afterwards remembers again"


class Experts(nn.Module):
    """A transformers mixture: by default its experts work on groups of sorted tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.config, self.linear = SimpleNamespace(_experts_implementation="grouped_mm"), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        if self.config._experts_implementation == "grouped_mm":
            return self.linear(x[x[:, 0].argsort()])  # type: ignore[no-any-return]
        return self.linear(x)  # type: ignore[no-any-return]


def test_experts_are_captured_in_the_form_that_a_file_can_have() -> None:
    model = Experts()
    graph = capture(model, torch.randn(3, 4))
    assert not [node for node in graph.graph.nodes if "argsort" in str(node.target)]
    assert model.config._experts_implementation == "grouped_mm"


def test_arrays_are_no_tensors() -> None:
    with pytest.raises(QtoolError, match=r"got inputs without a tensor: .*; give batches of tensors"):
        capture(nn.Linear(4, 2), np.zeros((3, 4), np.float32))


class Times(nn.Module):
    """A layer times a number that the caller gives."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor, factor: float) -> Tensor:
        return self.layer(x) * factor


def test_a_number_among_the_inputs_is_a_constant_of_the_graph_and_told() -> None:
    torch.manual_seed(0)
    net, x = Times().eval(), torch.randn(8, 4)
    form = quantize(net, QuantizeConfig(), example=(x, 3.0), calibration=[(x, 3.0)])
    assert "input 'factor' is fixed to 3.0" in form.plan.notes
    with torch.no_grad():
        assert float((form((x, 3.0)) - net(x, 3.0)).abs().max()) < 0.05


class Decoder(nn.Module):
    """torch's own transformer under a mask, of which it asks in Python whether it is a causal one."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x, mask=self.mask)  # type: ignore[no-any-return]


@pytest.mark.parametrize("mask", [nn.Transformer.generate_square_subsequent_mask(5), torch.eye(5).bool().roll(1, 0)])
@pytest.mark.parametrize("train", [False, True])
def test_a_mask_is_applied_whatever_it_is(mask: Tensor, train: bool) -> None:
    torch.manual_seed(0)
    model, x = Decoder(mask).eval(), torch.randn(4, 5, 8)
    graph = capture(model, x, train=train)
    if train:
        set_training(graph, batch_norm=False, dropout=False)
    torch.testing.assert_close(graph(x[:3]), model(x[:3]), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(model(x), model.layers(x), atol=1e-2)


def test_a_sample_in_place_of_a_batch_is_told_in_one_line_and_nothing_else(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(QtoolError, match=r"or give batches, if float32 of shape \[8\] is one sample"):
        capture(nn.Sequential(nn.Linear(8, 4), nn.ReLU()), torch.randn(8))
    assert capfd.readouterr() == ("", "")


class Caching(nn.Module):
    """Keeps what it computed of a parameter for the next call, in a dict, as LeViT does."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.kept = nn.Parameter(torch.arange(4.0)), dict[str, Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.kept.setdefault(str(x.device), self.bias.flip(0))


def test_what_a_model_keeps_for_the_next_call_is_nothing_to_warn_of() -> None:
    x = torch.randn(3, 4)
    torch.testing.assert_close(capture(Caching().eval(), x)(x), Caching()(x))
