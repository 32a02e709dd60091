"""Grids of runs: `opd sweep`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from opd.common.errors import OpdError
from opd.runner.sweep import grid_of, name_of, planned_runs, split_values
from tests.support.helpers import save_tiny

SMALL = {
    "teachers": {"a": "tiny/arithmetic"},
    "student": "tiny/generalist",
    "prompts": [{"source": "task:addition", "domain": "a"}],
    "rollout": {"prompts": 2, "max_new_tokens": 4},
    "train": {"steps": 2},
    "eval": {"prompts": 2},
    "checkpoint": {"every": 1},
    "log": {"start_table": False},
    "device": "cpu",
}


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1e-4,3e-4", ["1e-4", "3e-4"]),
        ("[1,2],[3]", ["[1,2]", "[3]"]),
        ("{a: [1, 2], b: 3},x", ["{a: [1, 2], b: 3}", "x"]),
        ("'a,b','c'", ["'a,b'", "'c'"]),
        ('"a\\",b",c', ['"a\\",b"', "c"]),
        ("don't,won't", ["don't", "won't"]),
        ("[a, 'b]']", ["[a, 'b]']"]),
        ("", [""]),
        ("a,", ["a", ""]),
    ],
)
def test_commas_outside_brackets_and_quotes_separate(text: str, values: list[str]) -> None:
    assert split_values(text) == values


def test_grids() -> None:
    grid = grid_of(["train.lr=1e-4,3e-4", "device=cpu", "seed=0,1,2"])
    assert len(grid) == 6
    assert [name_of(one, ["train.lr", "seed"]) for one in grid[:4]] == [
        "train-lr-1e-4_seed-0", "train-lr-1e-4_seed-1", "train-lr-1e-4_seed-2", "train-lr-3e-4_seed-0"
    ]  # fmt: skip
    unlike = ["a/b", "a-b", "A-b", "x" * 80, "x" * 81, "[1,2]", "[1, 2]"]
    names = [name_of({"key": value}, ["key"]) for value in unlike]
    assert len({name.casefold() for name in names}) == len(unlike)
    for given, words in (
        ("seed", "expected KEY=VALUE"), ("=3", "expected KEY=VALUE"), ("seed=1,,2", "a value is empty"), ("seed=1,1", "given twice"),
        ("seed=" + ",".join(map(str, range(10_001))), "at most 10,000"),
    ):  # fmt: skip
        with pytest.raises(OpdError, match=words):
            grid_of([given])
    with pytest.raises(OpdError, match="seed is given twice"):
        grid_of(["seed=1", "seed=2"])


def recipe(directory: Path) -> str:
    path = directory / "small.yaml"
    path.write_text(yaml.safe_dump(SMALL), encoding="utf-8")
    return str(path)


def test_a_mistake_in_any_run_is_an_error_before_the_first(tmp_path: Path) -> None:
    with pytest.raises(OpdError, match="lr"):
        planned_runs(recipe(tmp_path), ["train.lr=1e-4,-1"], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    runs = planned_runs(recipe(tmp_path), ["train.lr=1e-4,1e-3", "seed=3"], tmp_path / "out")
    assert [run.directory.name for run in runs] == ["train-lr-1e-4", "train-lr-1e-3"]
    assert runs[0].overrides == ("train.lr=1e-4", "seed=3")


@pytest.mark.crash
def test_a_killed_sweep_resumes_and_a_failed_run_stops_no_other(tmp_path: Path) -> None:
    """Killed once its first run is finished. One of three runs cannot load its student, whose weights are damaged."""
    damaged = Path(save_tiny(tmp_path / "damaged"))
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    out = tmp_path / "out"
    command = [
        sys.executable,
        "-m",
        "opd",
        "sweep",
        recipe(tmp_path),
        f"student=tiny/generalist,{damaged},tiny/spelling",
        "--out",
        str(out),
    ]
    done = out / "student-tiny-generalist"
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 1000
    while not list(out.glob("student-*/summary.json")) and time.monotonic() < deadline:
        time.sleep(0.1)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    (done,) = [path.parent for path in out.glob("student-*/summary.json")]
    written = (done / "summary.json").stat().st_mtime_ns
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 1
    assert "3 runs" in again.stderr
    assert "1 of them finished" in again.stderr
    assert again.stderr.count("FAILED") == 2
    assert (done / "summary.json").stat().st_mtime_ns == written
    finished = [path for path in out.glob("*/summary.json") if json.loads(path.read_text())["status"] == "done"]
    assert len(finished) == 2
    assert "pass@1" in again.stdout
