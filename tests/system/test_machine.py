"""What is known of a machine's arithmetic from its CPU's features."""

from __future__ import annotations

import pytest

from qtool.system import machine


@pytest.mark.parametrize(
    ("features", "arch", "exact"),
    [
        (["avx2"], "x86_64", False), (["avx2"], "AMD64", False), (["avx2", "avx512f"], "x86_64", False),
        (["avx2", "avx_vnni"], "x86_64", True), (["avx2", "avx512f", "avx512_vnni"], "AMD64", True),
        ([], "arm64", True),
    ],
)  # fmt: skip
def test_x86_without_vnni_adds_products_of_bytes_in_16_bits(
    features: list[str], arch: str, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "cpu_info", lambda: {"features": features})
    monkeypatch.setattr(machine.platform, "machine", lambda: arch)
    assert machine.sums_in_32_bits() is exact
