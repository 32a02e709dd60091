"""Large pages: asked for by `import opd`, before torch allocates; a setting of the user's stays."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from opd.pages import LARGE, large_pages

THERE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
MEASURE = """
import opd, torch
kept = torch.ones(1 << 26)
with open("/proc/self/smaps_rollup", encoding="ascii") as file:
    print(next(line.split()[1] for line in file if line.startswith("AnonHugePages:")))
"""


def test_a_setting_of_the_user_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LARGE, "0")
    large_pages()
    assert os.environ[LARGE] == "0"
    monkeypatch.delenv(LARGE)
    large_pages()
    assert os.environ[LARGE] == "1"


@pytest.mark.skipif(
    not THERE.exists() or "[madvise]" not in THERE.read_text(encoding="ascii") or os.sysconf("SC_PAGESIZE") != 4096,
    reason="Linux does not give them to those who ask, or they are much larger here",
)
def test_large_tensors_lie_in_large_pages() -> None:
    def kilobytes(setting: str | None) -> int:
        environment = {name: value for name, value in os.environ.items() if name != LARGE}
        environment |= {} if setting is None else {LARGE: setting}
        found = subprocess.run([sys.executable, "-c", MEASURE], env=environment, capture_output=True, check=True)
        return int(found.stdout)

    without = kilobytes("0")
    assert kilobytes(None) > without + 1024  # some of its 256 MiB: how many the machine has left is not ours to say
