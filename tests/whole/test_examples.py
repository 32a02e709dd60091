"""What the README shows is what the repository runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import opd

ROOT = Path(__file__).parents[2]


def test_the_loop_in_the_readme_is_the_example() -> None:
    example = (ROOT / "examples" / "loop.py").read_text(encoding="utf-8")
    code = example.split('"""', 2)[2].strip()
    assert code in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_loop_learns(capsys: pytest.CaptureFixture[str]) -> None:
    code = (ROOT / "examples" / "loop.py").read_text(encoding="utf-8").replace("range(30)", "range(16)")
    exec(compile(code, "loop.py", "exec"), {})
    values = [float(value) for value in re.findall(r"reverse KL ([\d.]+)", capsys.readouterr().out)]
    assert len(values) == 16
    assert sum(values[-4:]) < 0.8 * sum(values[:4])


@pytest.mark.slow
def test_the_page_about_python_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.S)
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "python.md", "exec"), names)
    assert len(blocks) == 5
    assert "saved" in capsys.readouterr().out
    assert len(list((tmp_path / "runs").iterdir())) == 3
    listed = set(re.findall(r"`(\w+)`", page.split("## Names")[1]))
    assert set(opd.__all__) - {"__version__"} <= listed


def test_relative_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_promise_has_the_tests_it_names() -> None:
    page = (ROOT / "docs" / "semantics.md").read_text(encoding="utf-8")
    tests = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    promises = re.findall(r"^(\d+)\. (.*)$", page, flags=re.MULTILINE)
    assert [int(number) for number, _ in promises] == list(range(1, 16))
    for number, promise in promises:
        named = re.findall(r"`(test_\w+)`", promise)
        assert named, f"promise {number} names no test"
        assert not [name for name in named if f"def {name}(" not in tests]
