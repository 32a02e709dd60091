"""docs/coverage.md says of nothing that it works unless a recipe or a test shows it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from opd.recipe import shipped_recipes

ROOT = Path(__file__).parents[2]
STATES = ("works", "partly", "not yet")


def rows() -> list[list[str]]:
    lines = (ROOT / "docs" / "coverage.md").read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return [row for row in cells if row[0] != "what"]


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_what_is_said_to_work_is_shown(row: list[str]) -> None:
    _, state, shown, test, missing = row
    assert state in STATES
    recipes = re.findall(r"`((?:methods|labs)/[\w-]+)`", shown)
    assert set(recipes) <= set(shipped_recipes())
    if test:
        file, _, function = test.strip("`").partition("::")
        text = (ROOT / "tests" / file).read_text(encoding="utf-8")
        assert f"\ndef {function}(" in text if function else "\ndef test_" in text
    if state == "works":
        assert recipes or test, "a recipe that is run, or a test"
    elif state == "partly":
        assert shown or missing
        assert missing
    else:
        assert missing
        assert not test


def test_commands_are_those_of_the_command_line() -> None:
    named = {command for row in rows() for command in re.findall(r"`opd ([a-z]+)", row[2])}
    source = (ROOT / "opd" / "cli.py").read_text(encoding="utf-8")
    for command in named:
        assert f'"{command}"' in source or f"def {command}(" in source, command


def test_every_lab_and_every_method_has_a_row() -> None:
    text = (ROOT / "docs" / "coverage.md").read_text(encoding="utf-8")
    assert [name for name in shipped_recipes() if "/" in name and f"`{name}`" not in text] == []
