"""``export --tune`` on a run directory: measured once, remembered with the file, told in every report."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import qtool
from qtool.artifacts import read_result
from qtool.errors import UsageError
from qtool.reporting.gather import gather
from qtool.reporting.sections import coverage
from qtool.reporting.terminal import export_lines
from qtool.stages import tuning

GIVEN = torch.rand(32, 1, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("target", "runtime"), [("ort-cpu", "onnxruntime"), ("openvino", "openvino")])
def test_tuning_is_measured_once(
    tmp_path: Path, small_net: str, small_data: str, monkeypatch: pytest.MonkeyPatch, target: str, runtime: str
) -> None:
    pytest.importorskip(runtime)
    from qtool.exporting import groups
    from qtool.exporting import tuning as decides

    qtool.quantize(small_net, small_data, out=tmp_path, calibration="train:64", target=target)
    # whatever this machine finds of so small a net, one group is raced for real, and one is found faster
    wanted = groups.Group("first", ("first.0",), 1e-3)
    monkeypatch.setattr(decides, "candidates", lambda *_: [wanted])
    monkeypatch.setattr(decides, "LEAST_GAIN", 0.0)
    monkeypatch.setattr(decides.Measured, "faster", property(lambda self: True))
    with pytest.raises(UsageError, match="'tune_batch_size': expected 'tune' beside it; got no tuning"):
        qtool.export(tmp_path, tune_batch_size=8)
    result = qtool.export(tmp_path, tune=True, tune_seconds=0.1, gates=False)
    account = result.tuning
    assert account is not None
    assert account["groups"][0]["in_float"]
    assert account["groups"][0]["speedup"] > 0
    assert not account["cached"]
    assert account["key"]["threads"] == 1
    assert account["key"]["runtime"].split(" ")[0] == runtime

    monkeypatch.setattr(tuning, "race_of", None)
    again = qtool.export(tmp_path, tune=True, tune_seconds=0.1, gates=False)
    assert again.tuning == account | {"cached": True}
    committed = read_result(tmp_path, "export")
    assert [unit["name"] for unit in committed["plan"]["units"] if not unit["integer"]] == ["first.0"]
    assert any("x as fast" in str(line) for line in export_lines(committed))
    assert "Tuning: 1 of 1 groups run in float" in str(next(coverage(gather(tmp_path))))


def test_a_group_with_moves_in_it_is_measured_once(
    tmp_path: Path, small_net: str, small_data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qtool.exporting import groups
    from qtool.exporting import tuning as decides

    def last(found: list[groups.Block], *_: object) -> list[groups.Group]:
        """From a flattening, which is no unit of the plan, to the last layer."""
        at = next(at for at, block in enumerate(found) if "move" in block.kinds)
        return [groups.Group("last", tuple(name for block in found[at:] for name in block.units), 1e-3)]

    qtool.quantize(small_net, small_data, out=tmp_path, calibration="train:64", ranges="minmax", algorithms=None)
    monkeypatch.setattr(decides, "candidates", last)
    raced = {"int8": {"speedup": 1.0, "speedup_ci95": None}, "0": {"speedup": 1.2, "speedup_ci95": [1.1, 1.3]}}
    monkeypatch.setattr(tuning, "race_of", lambda *_: lambda files: raced)
    first = qtool.export(tmp_path, tune=True, gates=False).tuning
    assert first is not None
    assert first["groups"][0]["in_float"]
    assert qtool.export(tmp_path, tune=True, gates=False).tuning == first | {"cached": True}
    longer = qtool.export(tmp_path, tune=True, tune_seconds=60.0, gates=False).tuning
    assert longer is not None
    assert not longer["cached"]


@pytest.fixture(scope="module")
def untuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("untuned")
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 3))
    qtool.quantize(model, [GIVEN], out=out, ranges="minmax", algorithms=None)
    return out


@pytest.mark.parametrize(
    "damage",
    [
        lambda tuning: tuning.pop("key"),
        lambda tuning: tuning.pop("groups"),
        lambda tuning: tuning.update(groups="abc"),
        lambda tuning: tuning.update(groups=[{"name": "first", "units": ["first.0"]}]),
        lambda tuning: tuning.update(groups=[tuning["example"] | {"units": ["nothing.of.the.name"]}]),
    ],
)
def test_a_damaged_account_is_measured_anew(
    untuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[dict[str, Any]], object]
) -> None:
    from qtool.exporting import tuning as decides

    run = tmp_path / "run"
    shutil.copytree(untuned, run)
    monkeypatch.setattr(decides, "candidates", lambda *_: [])
    options: dict[str, Any] = {"tune": True, "gates": False, "samples": [GIVEN]}
    account = qtool.export(run, **options).tuning
    assert account is not None
    path = run / "export.json"
    result = json.loads(path.read_text())
    result["metrics"]["tuning"]["example"] = dict.fromkeys(
        ("name", "units", "in_float", "reason", "speedup", "speedup_ci95"), True
    )
    path.write_text(json.dumps(result))
    assert (qtool.export(run, **options).tuning or {})["cached"]
    damage(result["metrics"]["tuning"])
    path.write_text(json.dumps(result))
    assert qtool.export(run, **options).tuning == account
