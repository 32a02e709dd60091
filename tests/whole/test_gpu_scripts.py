"""The scripts of `benchmarks/gpu` run through with a stand-in for Python, and every command they give is one that its benchmark takes."""

from __future__ import annotations

import argparse
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PARTS = sorted(path.stem for path in (ROOT / "benchmarks" / "gpu").glob("*.sh") if path.stem != "common")
PHASES = {"evidence": ["prepare", "main", "long", "further", "rest", "more", "strong", "headline"]}
STAND_IN = """#!/bin/sh
printf '%s\\t' "$@" >>"$GIVEN"; echo >>"$GIVEN"; exit "$CODE"
"""


def commands(part: str, directory: Path, code: int = 0) -> list[list[str]]:
    """What the part gives to Python, each of which ends with `code`."""
    stand_in, given = directory / "python", directory / "given"
    stand_in.write_text(STAND_IN, encoding="utf-8")
    stand_in.chmod(0o755)
    told = {
        "PYTHON": str(stand_in),
        "GIVEN": str(given),
        "CODE": str(code),
        "WORK": str(directory / "work"),
        "MPS": "0",
    }
    script = ROOT / "benchmarks" / "gpu" / f"{part}.sh"
    command = ["bash", str(script), str(directory / "out"), *PHASES.get(part, [])]
    subprocess.run(command, env=os.environ | told, check=False, capture_output=True, cwd=directory)
    return [line.rstrip("\t").split("\t") for line in given.read_text(encoding="utf-8").splitlines()]


class Read(Exception):
    """A benchmark has read its arguments."""


def read(parser: argparse.ArgumentParser, *args: Any, usual: Any = argparse.ArgumentParser.parse_args) -> None:
    usual(parser, *args)
    raise Read


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if the folder were that of the script, for as long as a test lasts."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", read)
    yield
    for name in set(sys.modules) - before:
        if str(ROOT / "benchmarks") in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_every_command_is_one_that_its_benchmark_takes(
    tmp_path: Path, benchmarks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for part in PARTS:
        (tmp_path / part).mkdir()
        found += commands(part, tmp_path / part)
    scripts = [command[index:] for command in found for index, word in enumerate(command) if word.endswith(".py")]
    given = [command for command in scripts if command[0].startswith("benchmarks/")]
    assert len({command[0] for command in given}) > 8
    files = {word for command in found for word in command if word.startswith("tests/")}
    assert files
    assert not [name for name in files if not (ROOT / name).is_file()]
    for command in given:
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(Read):  # else argparse says on stderr what it did not take
            runpy.run_path(str(ROOT / command[0]), run_name="__main__")


def test_the_steps_that_trl_has_finished_count_when_it_is_stopped(
    tmp_path: Path, benchmarks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import step_gpu
    import step_trl

    def stopped(command: list[str], steps: list[dict[str, Any]], **settings: Any) -> None:
        for number in range(len(steps)):
            first = {"tokens": [([1], [2])], "loss": 0.5} | ({"norm": 2.0} if number else {})  # told behind the step
            out = Path(command[command.index("--out") + 1])
            step_trl.write(out, {"samples": steps[: number + 1], **step_trl.checked(first)})
        raise subprocess.TimeoutExpired(command, settings["timeout"])

    monkeypatch.setattr(step_gpu, "save_model", lambda *given: "")
    told = argparse.Namespace(models=tmp_path, device="cpu", steps=4, trl="generate", trl_batch=None, trl_limit=9.0)
    steps = [{"seconds": {"sample": seconds, "total": seconds}, "peak_gib": 1.0} for seconds in (5.0, 1.0, 3.0)]
    for count in range(4):
        monkeypatch.setattr(step_gpu.subprocess, "run", partial(stopped, steps=steps[:count]))
        found = step_gpu.peer_results("tiny", told)
        assert found["samples"] == steps[:count]
        assert found["stopped_at"] == 9
        assert ("seconds" in found) == ("check" in found) == (count > 1)
    assert found["seconds"] == {"sample": 2.0, "total": 2.0}
    assert found["check"]["trl"] == {"loss": 0.5, "grad_norm": 2.0}
    apart = step_gpu.compared(found["check"]["trl"], {"loss": 0.505, "grad_norm": 1.0})["apart"]
    assert apart == pytest.approx({"loss": 0.01, "grad_norm": 0.5})


@pytest.mark.parametrize("part", PARTS)
def test_a_command_that_fails_does_not_end_its_part(part: str, tmp_path: Path) -> None:
    (tmp_path / "well").mkdir()
    (tmp_path / "ill").mkdir()
    assert len(commands(part, tmp_path / "ill", code=1)) >= len(commands(part, tmp_path / "well"))


def test_each_part_is_in_the_table() -> None:
    page = (ROOT / "benchmarks" / "gpu" / "README.md").read_text(encoding="utf-8")
    assert not [part for part in PARTS if f"`{part}.sh`" not in page]


@pytest.mark.parametrize("part", PARTS)
def test_a_part_ends_when_it_says(part: str) -> None:
    text = (ROOT / "benchmarks" / "gpu" / f"{part}.sh").read_text(encoding="utf-8")
    limits = [int(found) for found in re.findall(r'^[^#]*?\btry "?(?:\$\{LIMIT:-)?(\d+)', text, re.MULTILINE)]
    assert limits
    most = re.search(r"(\d+) at most", text)
    assert most is None or sum(limits) == int(most[1])


def test_steps_that_compute_something_else_are_rejected(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One per cent apart is rounding, two are not; and that nothing was compared is said."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    step = runpy.run_path(str(ROOT / "benchmarks" / "step_gpu.py"))
    compared, required = step["compared"], step["require_agreement"]
    one, near, far = ({"loss": loss, "grad_norm": 2.0} for loss in (1.0, 1.005, 1.02))
    required({"alone": {"trl": {}}, "near": {"trl": {"check": compared(one, near)}}})
    assert not capsys.readouterr().out
    required({"stopped": {"trl": {"samples": []}}})
    assert "stopped: TRL was stopped" in capsys.readouterr().out
    for other in (far, {"loss": 1.0, "grad_norm": float("nan")}):
        with pytest.raises(SystemExit, match="far: on the same tokens"):
            required({"far": {"trl": {"check": compared(one, other)}}})
