"""The README's commands work as they are written, on smaller data; its links and its layout are true."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
import torch
from command_line import in_process
from torch import nn

from qtool.cli import main

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SHORTER = {
    "train": ["--max-steps", "5"],
    "quantize": ["--calibration", "train:32"],
    "export": ["--parity-samples", "32", "--reference-samples", "1"],
    "benchmark": ["--seconds", "0.05", "--allow-slower"],
    "run": [word for change in ("train.max_steps=5", 'variants=["ptq"]', "quantize.calibration=train:32",
                                "export.parity_samples=32", "export.reference_samples=1", "benchmark.seconds=0.05",
                                "benchmark.allow_slower=true")
            for word in ("--set", change)],
}  # fmt: skip


FENCED = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def blocks(language: str) -> list[str]:
    """The fenced blocks of a language."""
    return [text for name, text in FENCED if name == language]


COMMANDS = [line for block in blocks("sh") for line in block.splitlines() if line]


def test_two_commands_set_everything_up() -> None:
    install, tests = (line for line in COMMANDS if line.startswith("pip "))
    assert install.startswith("pip install . && qtool run fashion-mnist")
    assert tests.endswith("&& python -m pytest -n logical")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert all(name in extras for name in re.findall(r"\[(\w+)\]", tests))
    found = subprocess.run(
        ["grep", "-m", "1", "-E", r"^pip install .*\[test\].*&& python -m pytest", "README.md"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert found.stdout.strip() == tests
    assert found.args[4] in (ROOT / ".ci" / "run").read_text()


NET = """
from torch import nn

def build():
    layers = nn.Conv2d(1, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(8, 10))
"""


@pytest.mark.slow
def test_every_qtool_command_works_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe with a small net of one's own, the stages alone with the one that they name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET)
    own = {"run": ["--set", "model=net.py:build"]}
    lines = [part.strip() for line in COMMANDS for part in line.split("&&") if part.strip().startswith("qtool ")]
    assert {shlex.split(line)[1] for line in lines} >= {"run", "train", "quantize", "export", "benchmark"}
    for line in lines:
        _, command, *words = shlex.split(line)
        done = in_process(command, *words, *SHORTER[command], *own.get(command, []), "--json")
        assert done.exit_code == 0, f"{line}\n{done.stderr}"
        assert isinstance(json.loads(done.stdout), dict)


def test_the_python_snippet_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    batches = [(torch.randn(16, 1, 8, 8), torch.arange(16) % 3) for _ in range(2)]
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 3))
    (snippet,) = blocks("python")
    names = {"model": model, "batches": batches}
    exec(
        snippet.replace(
            "benchmark(exported, batches)", "benchmark(exported, batches, seconds=0.05, allow_slower=True)"
        ),
        names,
    )
    assert names["figures"]["variants"]["int8"]["accuracy"]["num_samples"] == 32  # type: ignore[index]
    assert names["needed"] > 4 * sum(p.numel() for p in model.parameters())  # type: ignore[operator]


def test_every_command_is_described() -> None:
    assert all(f"`qtool {name}" in README for name in main.commands)


PAGES = ["README.md", *sorted(str(page.relative_to(ROOT)) for page in ROOT.glob("qtool/*/README.md")),
         "tests/benchmarks/README.md"]  # fmt: skip


def headings(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    lines = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    names = re.findall(r"^#+ (.*)$", lines, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", name.lower()).replace(" ", "-") for name in names}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    """To files that exist, images too, and of pages to headings that they have."""
    text = (ROOT / page).read_text(encoding="utf-8")
    targets = [*re.findall(r"\]\(([^)]+)\)", text), *re.findall(r'<img src="([^"]+)"', text)]
    assert targets
    for target in targets:
        if not target.startswith("http"):
            file, _, anchor = target.partition("#")
            found = (ROOT / page).parent / file if file else ROOT / page
            assert found.exists(), target
            assert not anchor or anchor in headings(found), target


def test_the_readme_leads_to_every_detail_page() -> None:
    assert {"training", "quantization", "exporting", "benchmarking"} <= {Path(page).parent.name for page in PAGES}
    for page in PAGES[1:]:
        assert f"]({page}" in README, page


def test_the_files_that_the_layout_names_exist() -> None:
    (layout,) = [text for text in blocks("") if "cli.py" in text]
    for name in re.findall(r"(\w+(?:\.py|/))", layout):
        if name != "qtool/":
            assert (ROOT / "qtool" / name).exists() or (ROOT / name).exists(), name
