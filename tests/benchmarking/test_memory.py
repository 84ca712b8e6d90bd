from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from qtool.benchmarking import memory

linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc")
MEASURE = """
from qtool.benchmarking.memory import peak_bytes, reset_peak, resident_bytes
held = bytearray(150 << 20); del held
reset_peak(); base = resident_bytes()
block = bytearray(b"x") * (64 << 20); del block
print(peak_bytes() - base)
"""


@linux
def test_the_peak_is_that_of_the_process_since_the_reset():
    """Against an allocation of known size; neither the larger one before it nor the parent's memory shows."""
    ballast = bytearray(b"y") * (200 << 20)
    done = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True)
    assert len(ballast)
    assert 62 << 20 <= int(done.stdout) <= 80 << 20


@linux
def test_resident_memory_is_psutils():
    psutil = pytest.importorskip("psutil")
    assert memory.resident_bytes() == pytest.approx(psutil.Process().memory_info().rss, rel=0.05)


def test_without_proc_the_systems_own_peak_is_used(monkeypatch, tmp_path):
    pytest.importorskip("resource")
    monkeypatch.setattr(memory, "_STATUS", tmp_path / "absent")
    assert memory.peak_bytes() > 1 << 20
    assert memory.resident_bytes() > 1 << 20
