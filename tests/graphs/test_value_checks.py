"""Checks of values have no part in a graph; what else asks for values is refused."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from qtool.errors import QtoolError
from qtool.quantization.capturing.capture import capture


def asserted(x: Tensor) -> Tensor:
    assert x.min() > -100, "larger values"
    return x * 2


def denied(x: Tensor) -> Tensor:
    assert not torch.isnan(x).any()
    return x * 2


def raised(x: Tensor) -> Tensor:
    if x.isnan().any() or (x.max() > 100):
        raise ValueError("finite values below 100")
    return x * 2


def required(x: Tensor) -> Tensor:
    if not (x < 100).all():
        raise ValueError("values below 100")
    return x * 2


def of_parts(x: Tensor) -> Tensor:
    assert all(part.isfinite().all() for part in x.unbind(1))
    return x * 2


class Checking(nn.Module):
    def __init__(self, check: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.check = nn.Linear(4, 4), check

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.check(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("check", [asserted, denied, raised, required, of_parts])
def test_a_graph_has_no_checks(check: Callable[[Tensor], Tensor]) -> None:
    model, x = Checking(check).eval(), torch.randn(3, 4)
    graph = capture(model, x)
    torch.testing.assert_close(graph(x), model(x))
    assert graph(x * torch.nan).isnan().all()
    (note,) = (note for note in graph.meta["notes"] if "checks" in note)
    assert note.startswith("checks of values are left out: test_value_checks.py:")


def chosen(x: Tensor) -> Tensor:
    if x.sum() > 0:
        return x
    return -x


def nested(x: Tensor) -> Tensor:
    if x.sum() > 1e9:
        if x.isnan().any():
            raise ValueError("finite values")
        x = -x
    return x


def mixed(x: Tensor) -> Tensor:
    assert x.any() or not x.isnan().any()
    return x


@pytest.mark.parametrize("check", [chosen, nested, mixed])
def test_what_decides_anything_else_is_refused(check: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(QtoolError, match="control flow that depend on values"):
        capture(Checking(check).eval(), torch.randn(3, 4))


def test_a_check_in_a_package_whose_name_begins_as_torchs_does_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    file = f"{Path(torch.__file__).parent}vision/nets.py"
    source = "def check(x):\n    assert x.isfinite().all()\n    return x * 2\n"
    monkeypatch.setitem(linecache.cache, file, (len(source), None, source.splitlines(keepends=True), file))
    found: dict[str, Callable[[Tensor], Tensor]] = {}
    exec(compile(source, file, "exec"), found)
    graph = capture(Checking(found["check"]).eval(), torch.randn(3, 4))
    assert "checks of values are left out: nets.py:2" in graph.meta["notes"]


def test_a_number_of_the_models_own_is_still_checked() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("count", torch.tensor(3))

        def forward(self, x: Tensor) -> Tensor:
            assert x.isfinite().all()
            if self.count == 3:
                x = x * int(self.count)
            return self.layer(x)  # type: ignore[no-any-return]

    model, x = Counting().eval(), torch.randn(3, 4)
    torch.testing.assert_close(capture(model, x)(x), model(x))
    model.count += 1
    torch.testing.assert_close(capture(model, x)(x), model(x))
