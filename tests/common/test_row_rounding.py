"""Rows of a product: which mode MKL is told, and where. Whether it keeps a row's bits the sampler tries: tests/engines/test_builtin.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from opd.common.cpu_env import MODE, round_alike

CPU = "processor\t: 0\nvendor_id\t: {}\n"


@pytest.mark.parametrize(
    ("vendor", "given", "expected"),
    [
        ("GenuineIntel", None, "AUTO,STRICT"),
        ("GenuineIntel", "COMPATIBLE", "COMPATIBLE"),
        ("AuthenticAMD", None, None),
        (None, None, None),
    ],
)
def test_only_intel_processors_are_set_to_round_consistently(
    vendor: str | None, given: str | None, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MODE, given or "")
    if given is None:
        monkeypatch.delenv(MODE)
    file = tmp_path / "cpuinfo"
    if vendor is not None:
        file.write_text(CPU.format(vendor), encoding="utf-8")
    round_alike(file)
    assert os.environ.get(MODE) == expected
