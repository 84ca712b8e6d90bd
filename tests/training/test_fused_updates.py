"""Whether updates are fused, by fakes; the kernel compiled, without a GPU; its numbers, by Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from qtool import training
from qtool.errors import QtoolWarning
from qtool.training import fused_updates

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
HERE = Path(__file__).parent
ADAMW = SimpleNamespace(optimizer_name="adam", is_paged=False)


def on(device: str) -> list[Any]:
    return [SimpleNamespace(device=torch.device(device))]


@pytest.fixture(autouse=True)
def anew() -> Any:
    fused_updates.refusal.cache_clear()
    yield
    fused_updates.refusal.cache_clear()


def test_updates_are_fused_where_both_ways_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(fused_updates, "_has_triton", lambda: True)
    monkeypatch.setattr(fused_updates, "disagreement", asked.append)
    for _ in range(2):
        assert fused_updates.usable(ADAMW, on("cuda:0"))
    assert asked == [torch.device("cuda:0")], "they are compared once"
    assert not fused_updates.usable(ADAMW, on("cpu"))
    assert not fused_updates.usable(SimpleNamespace(optimizer_name="lion", is_paged=False), on("cuda:0"))
    assert not fused_updates.usable(SimpleNamespace(optimizer_name="adam", is_paged=True), on("cuda:0"))
    assert not fused_updates.usable(torch.optim.SGD([torch.zeros(1, requires_grad=True)]), on("cuda:0"))


def raises(device: torch.device) -> str:
    torch.rand(3)
    raise RuntimeError("Failed to find C compiler.\nPlease specify it via CC")


@pytest.mark.parametrize(
    ("triton", "compare", "reason"),
    [
        (False, lambda device: None, "no module 'triton'"),
        (True, raises, "RuntimeError: Failed to find C compiler.;"),
        (True, lambda device: "weights differ from bitsandbytes'", "weights differ from bitsandbytes'"),
    ],
    ids=["no Triton", "no compiler", "other numbers"],
)
def test_where_they_are_not_it_is_said(
    triton: bool, compare: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_updates, "_has_triton", lambda: triton)
    monkeypatch.setattr(fused_updates, "disagreement", compare)
    before = torch.get_rng_state()
    with pytest.warns(QtoolWarning, match=f"the fused update of 8-bit states is not used: {reason}"):
        assert not fused_updates.usable(ADAMW, on("cuda:0"))
    assert torch.equal(torch.get_rng_state(), before), "a training draws what it would without"


@pytest.mark.parametrize("triton", [False, True])
def test_a_prediction_asks_for_triton_alone(triton: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_updates, "_has_triton", lambda: triton)
    with FakeTensorMode():
        parameter = torch.nn.Parameter(torch.empty(4096, device="cpu"))
    monkeypatch.setattr(type(parameter), "device", torch.device("cuda:0"))
    assert fused_updates.usable(ADAMW, [parameter]) == triton


def test_a_kernel_is_compiled_once_for_what_it_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for Triton's: a call by a grid compiles and gives what a later call, by three numbers, launches."""
    compiled: list[tuple[Any, ...]] = []
    launched: list[tuple[Any, ...]] = []

    class Made:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *arguments: launched.append((grid, *arguments))

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def call(*arguments: Any, num_warps: int, enable_fp_fusion: bool) -> Made:
                compiled.append((grid, *arguments))
                return Made()

            return call

    monkeypatch.setattr(fused_updates, "_made", {})
    monkeypatch.setitem(sys.modules, "qtool.training.fused_kernel", SimpleNamespace(adamw=Kernel()))
    monkeypatch.setattr(training, "fused_kernel", SimpleNamespace(adamw=Kernel()), raising=False)

    def update(count: int, *, at: int = 0, seed: int | None = 3, kept: bool = False, shift: int = 0) -> None:
        values = [torch.zeros(8192 + 32, dtype=torch.bfloat16)[at : at + count], torch.zeros(count).bfloat16()]
        codes = [torch.zeros(count + 32, dtype=torch.uint8)[shift : shift + count] for _ in range(2)]
        scales = [torch.zeros(32) for _ in range(2)]
        others = [torch.zeros(count).bfloat16()] if kept else []
        fused_updates.update(*values, codes, scales, others, seed, 0.9, 0.99, 1e-8, 1, 1e-3, 0.0)

    for count in (4096, 8192):
        update(count)
    assert [call[0] for call in compiled] == [(4,)]
    assert [call[0] for call in launched] == [(8, 1, 1)]
    assert len(launched[0]) == len(compiled[0]) == 1 + 23, "the grid and every argument of the kernel, constants too"
    assert launched[0][-3:] == (True, False, fused_updates.ROWS)
    update(4097)
    update(4096, at=1)
    update(4096, shift=1)
    update(4096, seed=None)
    update(4096, kept=True)
    assert len(compiled) == 6, "weights or codes that begin elsewhere, and other sizes, are another kernel's"
    update(4098, seed=9)
    assert len(compiled) == 6
    assert launched[-1][0] == (5, 1, 1)


def run(*words: str, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, *words], cwd=HERE, env=os.environ | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@needs_triton
@pytest.mark.slow
def test_the_kernel_computes_what_it_should() -> None:
    run("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "interpreted_updates.py", TRITON_INTERPRET="1")


COMPILE = """
import pathlib, re, subprocess, sys
import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from qtool.training import fused_kernel, fused_updates

stochastic, keeps, capability = (int(word) for word in sys.argv[2:])
names = fused_kernel.adamw.arg_names
types = dict.fromkeys(names, "fp32") | dict(num_values="i32", seed="i32")
types |= dict.fromkeys(("weight", "grad", "kept"), "*bf16") | dict.fromkeys(("codes1", "codes2", "cells"), "*u8")
types |= dict.fromkeys(("scales1", "scales2", "books", "midpoints"), "*fp32")
constants = {"STOCHASTIC": bool(stochastic), "KEEPS": bool(keeps), "ROWS": fused_updates.ROWS}
types |= dict.fromkeys(constants, "constexpr")
even = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names)
        if types[name][0] == "*" and "scales" not in name or name == "num_values"}
source = triton.compiler.ASTSource(fused_kernel.adamw, types, constants, even)
made = triton.compile(source, target=GPUTarget("cuda", capability, 32),
                      options={"num_warps": fused_updates.ROWS, "enable_fp_fusion": True})
assert made.metadata.shared <= 16 * fused_updates.ROWS, "layouts are converted through shared memory"
assert "v4.b32" in made.asm["ptx"], "weights are not read 16 bytes at a time"
file = pathlib.Path(sys.argv[1], "kernel.cubin")
file.write_bytes(made.asm["cubin"])
tool = pathlib.Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
usage = subprocess.run([tool, "-res-usage", file], capture_output=True, text=True, check=True).stdout
registers, stack = (int(re.search(rf"{name}:(\\d+)", usage)[1]) for name in ("REG", "STACK"))
print(registers, stack)
assert registers <= 64, "fewer than half of the warps that a multiprocessor can have"
assert stack == 0, "registers are spilled"
"""


@needs_triton
@pytest.mark.parametrize(
    "told", [(1, 0, 90), (0, 1, 90), (0, 0, 90), (1, 0, 80)], ids=["stochastic", "compensated", "nearest", "A100"]
)
def test_it_compiles_for_a_gpu_as_it_was_meant(told: tuple[int, ...], tmp_path: Path) -> None:
    run("-c", COMPILE, str(tmp_path), *map(str, told), TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
