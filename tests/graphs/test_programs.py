"""Programs put together from captured graphs are those that torch's own tracer makes of them."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qtool.graphs.programs import _put_together, as_graph, open_graph, program_of, save_graph, to_program
from qtool.graphs.shapes import input_values, symbols_of
from qtool.nested import call
from qtool.quantization.capturing.capture import capture


class Parts(nn.Module):
    """Parameters, a buffer that is saved and one that is not, a constant; outputs by name, one of them None."""

    steps: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.linear = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 5)
        self.register_buffer("steps", torch.arange(5.0))
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)

    def forward(self, x: Tensor, more: tuple[Tensor, float] | None = None, flag: bool = True) -> dict[str, Any]:
        y = self.linear(self.norm(self.conv(x)).mean((2, 3)) * self.scale) + self.steps + torch.ones(5)
        if more is not None:
            y = y + more[0] * more[1]
        return {"logits": y if flag else -y, "rest": (y.argmax(1), None), "x": x}


class Tokens(nn.Module):
    """A sequence of any length, its positions counted; a shape that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.word, self.place, self.linear = nn.Embedding(7, 6), nn.Embedding(20, 6), nn.Linear(6, 6)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.word(tokens) + self.place(torch.arange(tokens.shape[1]))
        x = x.reshape(x.shape[0], x.shape[1], 2, 3).transpose(1, 2)
        x = torch.softmax(x @ x.transpose(2, 3), -1) @ x
        return self.linear(x.transpose(1, 2).flatten(2))


X = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(0))
EXAMPLES: dict[str, tuple[type[nn.Module], Any, tuple[int, ...]]] = {
    "tensor": (Parts, X, ()),
    "one sample": (Parts, X[:1], ()),
    "nested": (Parts, (X, (torch.ones(4, 5), 3.0)), ()),
    "by name": (Parts, {"flag": False, "x": X}, ()),
    "open axes": (Parts, X, (2, 3)),
    "tokens": (Tokens, torch.arange(20).reshape(4, 5) % 7, ()),
    "tokens of any length": (Tokens, torch.arange(20).reshape(4, 5) % 7, (1,)),
}


def told(program: torch.export.ExportedProgram) -> dict[str, Any]:
    """What is known of a program, the names of its nodes aside, and stored tensors that none of them reads.

    A tracer asks for a size where it is first needed, which may be elsewhere.
    """
    read = {node.name for node in program.graph.nodes if node.users}
    specs = [spec for spec in program.graph_signature.input_specs if spec.target is None or spec.arg.name in read]
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    operators = [(str(node.target), str(node.meta["val"])) for node in calls if "sym_size" not in str(node.target)]
    return {
        "operators": operators,
        "inputs": {(spec.kind, spec.target, spec.persistent) for spec in specs},
        "values": [getattr(spec.arg, "value", None) for spec in program.graph_signature.output_specs],
        "sizes": sorted(map(str, program.range_constraints.values())),
        "state": {spec.target for spec in specs} & {*program.state_dict},
        "constants": {spec.target for spec in specs} & {*program.constants},
        "structure": program.call_spec,
        "example": torch.utils._pytree.tree_structure(program.example_inputs),
    }


def spelled(told: dict[str, Any], symbols: list[str]) -> dict[str, Any]:
    """The same with open sizes called by their order: each trace has symbols of its own."""
    text = str(told["operators"])
    for i, symbol in enumerate(symbols):
        text = text.replace(symbol, f"size{i}")
    return {**told, "operators": text}


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_program_put_together_is_the_one_that_is_traced(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    kind, example, axes = EXAMPLES[name]
    graph = capture(kind().eval(), example, axes=axes)
    made, traced = _put_together(graph, example), to_program(graph, example)
    assert made is not None
    found, expected = (
        spelled(told(program), [str(s) for value in input_values(program.graph).values() for s in _free(value)])
        for program in (made, traced)
    )
    assert found == expected
    save_graph(graph, example, tmp_path / "graph.pt2")
    loaded, kept = open_graph(tmp_path / "graph.pt2")
    for inputs in (example, kept):
        results = [call(model, inputs) for model in (loaded, graph, as_graph(traced))]
        flat = [torch.utils._pytree.tree_leaves(result) for result in results]
        for leaves in zip(*flat, strict=True):
            assert leaves[0] is None or (torch.equal(leaves[0], leaves[1]) and torch.equal(leaves[0], leaves[2]))
        assert torch.utils._pytree.tree_structure(results[0]) == torch.utils._pytree.tree_structure(results[1])


def _free(value: Tensor) -> list[Any]:
    return [symbol for size in value.shape for symbol in symbols_of(size)]


def test_a_captured_graph_is_stored_and_read_without_tracing_it_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    graph = capture(Parts().eval(), X)

    def traced(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("traced again")

    monkeypatch.setattr(torch.export, "export", traced)
    save_graph(graph, X, tmp_path / "graph.pt2")
    loaded, _ = open_graph(tmp_path / "graph.pt2")
    loaded.register_buffer("steps", torch.zeros(5))
    changed = as_graph(program_of(loaded, X))
    torch.testing.assert_close(changed(X[:3])["logits"] + torch.arange(5.0), graph(X[:3])["logits"])


def test_a_graph_that_asks_for_a_size_is_left_to_the_tracer_and_its_sizes_stay_open() -> None:
    graph = capture(nn.Conv2d(3, 4, 3).eval(), X)
    (conv,) = (node for node in graph.graph.nodes if node.target is torch.ops.aten.conv2d.default)
    with graph.graph.inserting_after(conv):
        view = graph.graph.call_function(torch.ops.aten.view.default, (conv, [4, 4, 4, 4]))
    conv.replace_all_uses_with(view, lambda user: user is not view)
    graph.recompile()
    assert _put_together(graph, X) is None
    (value,) = input_values(graph.graph).values()
    assert symbols_of(value.shape[0])
    with pytest.raises(torch._dynamo.exc.UserError, match="specialized it to be a constant"):
        program_of(graph, X)


def test_what_is_left_to_the_tracer_is_left_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    """Torch logs whatever error leaves an operator; this one asks how its input lies in memory."""
    graph = capture(nn.AvgPool2d(2, ceil_mode=True), X, axes=(2, 3))
    (pool,) = (node for node in graph.graph.nodes if node.target is torch.ops.aten.avg_pool2d.default)
    with graph.graph.inserting_after(pool):
        copy = graph.graph.call_function(torch.ops.aten.empty_like.default, (pool,))
    pool.replace_all_uses_with(copy, lambda user: user is not copy)
    graph.recompile()
    assert _put_together(graph, X) is None
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


class Counted(nn.Module):
    """Asks a tensor for its length, as detectors do for the size of the batch."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.inner, self.fails = nn.Linear(3, 5), fails

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise ValueError("no")
        return self.inner(x).view(len(x), len(self.inner.bias), -1) + len([x])


@pytest.mark.parametrize("fails", [False, True])
def test_a_tensors_length_is_open_in_the_first_trace(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net, x, export, asked = Counted(fails), torch.randn(4, 3), torch.export.export, []

    def traced(*args: Any, **kwargs: Any) -> Any:
        asked.append(kwargs.get("strict", False))
        return export(*args, **kwargs)

    monkeypatch.setattr(torch.export, "export", traced)
    with pytest.raises(ValueError, match="no") if fails else contextlib.nullcontext():
        graph = as_graph(to_program(net, x))
        for batch in (x, x[:1], x[:3]):
            torch.testing.assert_close(graph(batch), net(batch))
    assert asked == [False]
    assert "len" not in globals()


class Divided(nn.Module):
    """Takes the batch for what is left of a quotient, as Swin's authors do, and asks for no other size."""

    def forward(self, x: Tensor) -> Tensor:
        windows = x.unflatten(1, (4, 2)).flatten(0, 1).relu()
        return windows.view(int(windows.shape[0] / (8 / 2)), 4, 2, -1).flatten(1, 2)


def test_a_quotient_made_whole_is_no_constant() -> None:
    x = torch.randn(6, 8, 3)
    graph = as_graph(to_program(Divided(), x))
    for batch in (x, x[:1], x[:3]):
        torch.testing.assert_close(graph(batch), Divided()(batch))


class Large(nn.Module):
    """Asks whether a batch is a large one, as upsampling in diffusion models does, for a copy in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = x.relu()
        return self.layer(y.contiguous() if y.shape[0] >= 16 else y)


@pytest.mark.parametrize("captured", [8, 32])
def test_a_graph_takes_pieces_of_the_batches_that_it_was_captured_for(captured: int, tmp_path: Path) -> None:
    model, x = Large().eval(), torch.randn(32, 6, generator=torch.Generator().manual_seed(0))
    graph = capture(model, x[:captured])
    assert graph.meta["notes"][0].startswith("captured for batches with")
    save_graph(graph, x[:captured], tmp_path / "graph.pt2")
    for made in (graph, open_graph(tmp_path / "graph.pt2")[0]):
        for few in (1, 4, 32):
            torch.testing.assert_close(made(x[:few]), model(x[:few]))


class Steps(nn.Module):
    """Writes a buffer anew in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        return x * self.count


def test_after_a_trace_that_failed_modules_compile_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 leaves a hook on every module's buffers there; here any torch does."""

    def failing(*args: Any, **kwargs: Any) -> None:
        nn.modules.module.register_module_buffer_registration_hook(lambda module, name, buffer: 1 / 0)
        raise ValueError("a size that is not known")

    monkeypatch.setattr(torch.export, "export", failing)
    with pytest.raises(ValueError, match="not known"):
        to_program(nn.Linear(3, 2), torch.randn(2, 3))
    compiled = torch.compile(Steps(), backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(2)), torch.ones(2))
