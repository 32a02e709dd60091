"""`make fuzz COUNT=n`: n mutated recipes and n * 60 / 500 real runs. No traceback, no hang, exit code 0 or 2.

A failure names its number; `FUZZ_ONLY=number` replays it alone. Everything follows from SEED and the number.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import signal
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from opd import cli
from opd.common.errors import UserError
from opd.recipe import load_recipe
from tests.support.crash import ended, start
from tests.support.fuzz_recipes import combined, mutated, paired, shipped

pytestmark = pytest.mark.fuzz

SEED = 20_261_115
COUNT = int(os.environ.get("COUNT") or 500)
FROM = int(os.environ.get("FROM") or 0)  # the first number, where a long edition is run in slices
RUNS = max(1, COUNT * 60 // 500)
PROCESSES = 12
PARTS = 16  # as many processes can share the work
in_parts = pytest.mark.parametrize("part", range(PARTS))
PATIENCE = 120  # seconds of one recipe


class Hang(BaseException):
    """The alarm went off."""


def numbers(count: int, part: int = 0) -> list[int]:
    """Those of one part."""
    only = os.environ.get("FUZZ_ONLY")
    if only and int(only) % PARTS != part:
        pytest.skip("another part has this number")
    return [int(only)] if only else list(range(FROM + (part - FROM) % PARTS, count, PARTS))


@contextlib.contextmanager
def alarm() -> Iterator[None]:
    """Rings after PATIENCE seconds of work, which a busy machine does not shorten, or six times as long of waiting."""

    def ring(*_: Any) -> None:
        raise Hang(f"no answer in {PATIENCE} seconds of work")

    before = [signal.signal(name, ring) for name in (signal.SIGPROF, signal.SIGALRM)]
    signal.setitimer(signal.ITIMER_PROF, PATIENCE)
    signal.alarm(6 * PATIENCE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
        for name, handler in zip((signal.SIGPROF, signal.SIGALRM), before, strict=True):
            signal.signal(name, handler)


def call(*arguments: str) -> tuple[int | None, str]:
    """Exit code and what was printed; None instead of a code: a traceback or a hang, which is then in the text."""
    out, err = io.StringIO(), io.StringIO()
    before, sys.argv = sys.argv, ["opd", *arguments]
    code: int | None
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), alarm():
            cli.main()
        code = 0
    except SystemExit as leaving:
        code = int(leaving.code or 0)
    except (Exception, Hang):
        code = None
        err.write(traceback.format_exc())
    finally:
        sys.argv = before
    return code, out.getvalue() + err.getvalue()


def in_child(*arguments: str) -> tuple[int | None, str]:
    """The same in a forked process, which starts with everything imported and leaves nothing behind."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        torch.set_num_threads(1)  # makes torch's pool anew before several threads of a loader do so at once
        found = call(*arguments)
        with os.fdopen(writing, "w") as pipe:
            json.dump([found[0], found[1][-6000:]], pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return tuple(json.loads(text)) if text else (None, "the process died")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@in_parts
def test_mutated_recipes_are_read_or_rejected(place: Path, part: int) -> None:
    import opd.runner.plan  # noqa: F401 — once, before the children are forked

    recipes, failures, codes = shipped(), [], Counter[Any]()
    for number in numbers(COUNT, part):
        path = place / "recipe.yaml"
        path.write_bytes(mutated(random.Random(f"{SEED}/{number}"), recipes))
        code, text = in_child("run", str(path), "--dry-run")
        codes[code] += 1
        if code not in (0, 2) or "Traceback" in text or len(text) > 20_000:
            failures.append(f"number {number}: exit code {code}\n{text[-3000:]}")
    print(f"seed {SEED}: {dict(codes)}")
    assert not failures, f"{len(failures)} of {COUNT}\n" + "\n\n".join(failures[:5])
    assert not any((place / name).exists() for name in ("runs", "opd"))


def test_some_of_them_in_real_processes(place: Path) -> None:
    """Forks of one that has imported everything, and every fourth an interpreter of its own."""
    recipes, log = shipped(), place / "said.txt"
    for number in range(PROCESSES):
        path = place / "recipe.yaml"
        path.write_bytes(mutated(random.Random(f"{SEED}/process/{number}"), recipes))
        arguments = ["run", str(path), "--dry-run"]
        if number % 4:
            log.unlink(missing_ok=True)
            code = ended(start(log, *arguments), 6 * PATIENCE)
            said = log.read_text(encoding="utf-8", errors="replace")
        else:
            command = [sys.executable, "-m", "opd.cli", *arguments]
            found = subprocess.run(
                command, check=False, capture_output=True, text=True, timeout=6 * PATIENCE, errors="replace"
            )
            code, said = found.returncode, found.stderr
        assert code in (0, 2), f"number {number}\n{said[-3000:]}"
        assert "Traceback" not in said, f"number {number}\n{said[-3000:]}"


def refused_when_read(path: Path) -> bool:
    try:
        load_recipe(path)
    except UserError:
        return True
    return False


@in_parts
def test_a_run_does_what_its_dry_run_says(place: Path, part: int) -> None:
    """Random valid combinations: a run ends with exit code 0, or with the refusal that its dry run made."""
    import opd.runner.pipeline
    import opd.runner.plan  # noqa: F401

    rows = place / "rows.jsonl"
    rows.write_text(
        "".join(
            json.dumps({"prompt": f"add {n}+{n}=", "answer": str(2 * n), "completion": str(2 * n)}) + "\n"
            for n in range(40)
        )
    )
    failures, codes, done = [], Counter[Any](), 0
    only, wanted = numbers(1_000_000, part), -(-RUNS // PARTS)
    for number in only:
        raw = combined(random.Random(f"{SEED}/run/{number}"), rows)
        path = place / f"recipe{number}.yaml"
        path.write_text(yaml.safe_dump(raw))
        if refused_when_read(path) and number % 20 and len(only) > 1:
            codes["refused when read"] += 1  # by `load_recipe`, which both call first
            continue
        planned, plan = in_child("run", str(path), "--dry-run")
        ran, text = in_child("run", str(path), "--out", str(place / f"run{number}"))
        codes[planned, ran] += 1
        done += planned == 0
        if planned not in (0, 2) or ran != planned or "Traceback" in text:
            how = f"number {number}: dry run {planned}, run {ran}"
            failures.append(f"{how}\n{yaml.safe_dump(raw)}\n{plan[-600:]}\n{text[-3000:]}")
        if done == wanted:
            break
    print(f"seed {SEED}: (dry run, run) {dict(codes)} of {number + 1}")
    assert not failures, f"{len(failures)} of {number + 1}\n" + "\n\n".join(failures[:5])


@in_parts
def test_two_mechanisms_take_a_step_together_or_are_refused(place: Path, part: int) -> None:
    """Either the recipe is rejected with a message when it is read or before the first step, or a step is taken."""
    import opd.runner.pipeline  # noqa: F401

    failures, codes, done = [], Counter[Any](), 0
    only, wanted = numbers(1_000_000, part), -(-RUNS // PARTS)
    for number in only:
        names, raw = paired(random.Random(f"{SEED}/pair/{number}"))
        path = place / f"pair{number}.yaml"
        path.write_text(yaml.safe_dump(raw))
        if refused_when_read(path):
            codes["refused when read"] += 1
            continue
        code, text = in_child("run", str(path), "--out", str(place / f"run{number}"))
        codes[code] += 1
        done += code == 0
        if code not in (0, 2) or "Traceback" in text:
            failures.append(f"number {number}: {names}: exit code {code}\n{yaml.safe_dump(raw)}\n{text[-3000:]}")
        if done >= wanted:
            break
    print(f"seed {SEED}: {dict(codes)} of {number + 1}")
    assert not failures, f"{len(failures)} of {number + 1}\n" + "\n\n".join(failures[:5])
