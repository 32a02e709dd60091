"""Large pages: asked for by `import opd`, before torch allocates; a setting of the user's stays."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from opd.common.cpu_env import LARGE, large_pages

MEASURE = """
with open("/proc/self/smaps_rollup", encoding="ascii") as file:
    print(next(line.split()[1] for line in file if line.startswith("AnonHugePages:")))
"""
TENSOR = "import opd, torch; kept = torch.ones(1 << 26)" + MEASURE
ASKED = (
    "import mmap; kept = mmap.mmap(-1, 1 << 28, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS); kept.madvise(mmap.MADV_HUGEPAGE); kept.write(bytes(1 << 28))"
    + MEASURE
)


def test_a_setting_of_the_user_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LARGE, "0")
    large_pages()
    assert os.environ[LARGE] == "0"
    monkeypatch.delenv(LARGE)
    large_pages()
    assert os.environ[LARGE] == "1"


def kilobytes(program: str, setting: str | None = None) -> int:
    environment = {name: value for name, value in os.environ.items() if name != LARGE}
    environment |= {} if setting is None else {LARGE: setting}
    found = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=False)
    return int(found.stdout or 0)


def test_large_tensors_lie_in_large_pages() -> None:
    if not kilobytes(ASKED):
        pytest.skip("nobody gets large pages here")
    if kilobytes(TENSOR, "0"):
        pytest.skip("everybody gets large pages here")
    assert kilobytes(TENSOR) > 0
