"""`opd sweep`: a grid of runs on this machine, one by one or several at a time. Called again, it resumes.

    opd sweep quickstart train.lr=1e-4,3e-4 seed=0,1,2 --jobs 2

Each run is a process of its own, `opd run RECIPE … --out DIR/NAME --resume`. One that was interrupted is resumed, a finished one is
kept, and one that fails is reported and does not stop the others. Runs end with the sweep, however that ends.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from opd.common.errors import Preempted, UserError
from opd.common.files import SEALS, json_object
from opd.common.text import plain
from opd.recipe import load_recipe
from opd.recipe.paths import check_output

OPEN, CLOSE, QUOTES = "([{", ")]}", "'\""
MOST = 10_000  # runs of a sweep
WAIT = 0.2  # seconds between looks at the running processes
STARTER = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # this process ends with the sweep
    if os.getppid() != int(sys.argv[1]):
        sys.exit(1)
os.execv(sys.executable, [sys.executable, "-m", "opd", *sys.argv[2:]])
"""


@dataclass(frozen=True)
class GridRun:
    directory: Path
    overrides: tuple[str, ...]

    @property
    def log(self) -> Path:
        return self.directory.with_name(f"{self.directory.name}.log")

    @property
    def finished(self) -> bool:
        summary = self.directory / "summary.json"
        return summary.is_file() and json_object(summary).get("status") == "done"

    def last_words(self) -> str:
        """The error that ended it."""
        lines = [line for line in self.log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("opd: ")] or lines[-1:]
        return plain(errors[-1].removeprefix("opd: "), 300) if errors else "it printed nothing"


def split_values(text: str) -> list[str]:
    """The values of `KEY=V1,V2`: commas inside brackets and quotes do not separate.

    >>> split_values("1e-4,[1,2],{a: 1, b: 2},'x,y'")
    ['1e-4', '[1,2]', '{a: 1, b: 2}', "'x,y'"]
    """
    values, depth, quote, before = [""], 0, "", ""
    for letter in text:
        if quote:
            quote = "" if letter == quote and before != "\\" else quote
        elif letter in QUOTES and (not before or before in OPEN + ",: "):  # not an apostrophe
            quote = letter
        elif letter in OPEN:
            depth += 1
        elif letter in CLOSE:
            depth -= 1
        elif letter == "," and depth <= 0:
            values.append("")
            before = ""
            continue
        values[-1] += letter
        before = letter
    return values


def grid_of(overrides: Iterable[str]) -> list[dict[str, str]]:
    """Every combination of values, by key; the last key varies fastest."""
    axes: dict[str, list[str]] = {}
    for override in overrides:
        key, sign, text = override.partition("=")
        if not sign or not key:
            raise UserError(f"{override!r}: expected KEY=VALUE or KEY=VALUE,VALUE, for example train.lr=1e-4,3e-4.")
        if key in axes:
            raise UserError(f"{override!r}: {key} is given twice. Separate its values by commas.")
        values = split_values(text)
        if len(values) > 1 and not all(value.strip() for value in values):
            raise UserError(f"{override!r}: a value is empty. Write '' for an empty text.")
        if len(set(values)) < len(values):
            raise UserError(f"{override!r}: a value is given twice.")
        axes[key] = values
    count = 1
    for values in axes.values():
        count *= len(values)
    if count > MOST:
        raise UserError(f"these are {count:,} runs; a sweep has at most {MOST:,}.")
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def name_of(chosen: Mapping[str, str], varied: Sequence[str]) -> str:
    """The directory of a run: the values that vary. It depends on these alone, so that a larger grid keeps the runs of a smaller one."""
    parts, exact = [], True
    for key in varied:
        short = re.sub(r"[^\w.+-]+", "-", chosen[key])[:30].strip("-.")
        exact &= short == chosen[key] and short == short.casefold()
        parts.append(f"{re.sub(r'[^0-9A-Za-z_-]+', '-', key)}-{short}")
    name = "_".join(parts) or "run"
    if exact and len(name) <= 100:
        return name
    values = "\n".join(f"{key}={chosen[key]}" for key in varied)
    return f"{name[:90]}-{hashlib.sha256(values.encode()).hexdigest()[:8]}"


def planned_runs(recipe: str, overrides: Sequence[str], out: Path | None) -> list[GridRun]:
    """The runs of the sweep, each checked: a mistake in any of them is an error before the first one starts."""
    from opd.runner.run import require_same_recipe

    grid = grid_of(overrides)
    varied = [key for key in grid[0] if len({chosen[key] for chosen in grid}) > 1]
    loaded = [load_recipe(recipe, [f"{key}={value}" for key, value in chosen.items()]) for chosen in grid]
    root = check_output(Path("runs") / f"{loaded[0].name}-sweep" if out is None else out)
    runs = []
    for chosen, one in zip(grid, loaded, strict=True):
        run = GridRun(root / name_of(chosen, varied), tuple(f"{key}={value}" for key, value in chosen.items()))
        if (run.directory / SEALS).exists():
            require_same_recipe(run.directory, one)
        runs.append(run)
    return runs


def sweep(
    recipe: str, overrides: Sequence[str], out: Path | None, jobs: int, say: Callable[[str], None]
) -> dict[Path, str]:
    """Carry out the grid. Returns its run directories, each with the error that ended it, or an empty text."""
    runs = planned_runs(recipe, overrides, out)
    waiting = [run for run in runs if not run.finished]
    found = {run.directory: "" for run in runs}
    say(f"{len(runs)} runs in {runs[0].directory.parent}, {len(runs) - len(waiting)} of them finished")
    running: dict[GridRun, subprocess.Popen[bytes]] = {}
    with _stopping(running):
        while waiting or running:
            while waiting and len(running) < jobs:
                run = waiting.pop(0)
                say(f"{'resumes' if (run.directory / SEALS).exists() else 'starts'}: {run.directory.name}")
                running[run] = _start(recipe, run)
            for run, process in list(running.items()):
                if process.poll() is None:
                    continue
                del running[run]
                found[run.directory] = "" if process.returncode == 0 else run.last_words()
                words = f"FAILED: {found[run.directory]} (see {run.log})" if process.returncode else "finished"
                say(f"{words}: {run.directory.name}; {len(waiting) + len(running)} left")
            time.sleep(WAIT)
    return found


def _start(recipe: str, run: GridRun) -> subprocess.Popen[bytes]:
    arguments = ["run", recipe, *run.overrides, "--out", str(run.directory), "--resume"]
    run.log.parent.mkdir(parents=True, exist_ok=True)
    with run.log.open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-c", STARTER, str(os.getpid()), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            process_group=0,  # Ctrl-C reaches the sweep alone, which then stops its runs
        )


@contextmanager
def _stopping(running: Mapping[Any, subprocess.Popen[bytes]]) -> Iterator[None]:
    """On Ctrl-C and SIGTERM, let the runs save a checkpoint and wait for them."""

    def preempted(number: int, frame: FrameType | None) -> None:
        raise Preempted("the sweep was terminated; call it again to resume")

    before = signal.signal(signal.SIGTERM, preempted)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()
