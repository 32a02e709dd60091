"""Minutes of killing: `make test-crash`, with COUNT=n for more. Every run ends as the one that nobody interrupted."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import opd
from opd.common.errors import OpdError, StoreError
from tests.support.crash import RECIPE, durable, ended, interrupt, kept, same_run, same_weights, start, written

pytestmark = pytest.mark.crash
COUNT = int(os.environ.get("COUNT") or 40)  # interruptions
WORKERS = 2
STAGES: dict[str, Any] = {
    "stages": [
        {"name": "warm", "rollout": {"data_share": 0.5, "teacher_share": 0.3}, "objective": [{"form": "cross_entropy", "on": ["data", "teacher"]}, {"form": "direct"}]},
        {"name": "distil"},
    ],
    "train": {"steps": 4, "lr": 1e-3},
    "checkpoint": {"every": 3, "keep": 1, "resume": "exact"},
}  # fmt: skip
RECIPES = {"one": RECIPE, "two": RECIPE | STAGES}


def write(path: Path, recipe: dict[str, Any]) -> Path:
    path.write_text(json.dumps(recipe))
    return path


@pytest.mark.parametrize("share", range(WORKERS))
def test_kills_and_preemptions_at_random_moments(share: int, tmp_path: Path) -> None:
    name = list(RECIPES)[share % len(RECIPES)]
    draw = random.Random(os.environ.get("SEED", f"{share}"))
    reference = opd.run(RECIPES[name], out=tmp_path / "reference")
    recipe, total, left, trial = (
        write(tmp_path / "recipe.yaml", RECIPES[name]),
        written(reference.directory),
        COUNT // WORKERS,
        0,
    )
    while left > 0:
        trial += 1
        directory, log = tmp_path / f"run{trial}", tmp_path / f"log{trial}.txt"
        command: tuple[str | Path, ...] = ("run", recipe, "--out", directory)
        for _ in range(min(left, draw.randint(1, 6))):
            number = draw.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
            before = durable(directory) if (directory / "resolved.yaml").exists() else {}
            process = start(log, *command)
            sent = interrupt(process, directory, total, draw, number)
            code = ended(process)
            wanted = {signal.SIGKILL: -9, signal.SIGTERM: 75, signal.SIGINT: 130}[number]
            early = -number  # before the run listens, or after it has ended
            assert code in ((wanted, early, 0) if sent else (0,)), (code, log.read_text())
            assert "Traceback" not in log.read_text(), log.read_text()
            left -= 1
            if (directory / "run.json").exists():
                kept(before, durable(directory))
                command = ("resume", directory)
            else:  # struck before there was anything to resume
                shutil.rmtree(directory, ignore_errors=True)
        process = start(log, *command)
        assert ended(process) == 0, log.read_text()
        same_run(opd.Run(directory), reference)


# Damage


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[opd.Run, Path]:
    """The uninterrupted run, and the directory of one that was killed in its second stage, within a step."""
    root = tmp_path_factory.mktemp("damage")
    recipe = RECIPES["two"] | {
        # none is half written when it dies
        "checkpoint": {"every": 1, "keep": 2, "resume": "exact", "background": False},
        "train": {"steps": 3, "lr": 1e-3},
    }
    reference = opd.run(recipe, out=root / "reference")
    whole = sampled(reference.directory)
    process = start(root / "log.txt", "run", write(root / "recipe.yaml", recipe), "--out", root / "run",
                    die=whole // 4, by=signal.SIGTERM)  # fmt: skip
    assert ended(process) == 75, (root / "log.txt").read_text()
    left = whole - sampled(root / "run")
    process = start(root / "log.txt", "resume", root / "run", die=left - 60)
    assert ended(process) == -signal.SIGKILL, (root / "log.txt").read_text()
    assert {path.name for path in opd.Run(root / "run").checkpoints} >= {"step-000001", "step-000002"}
    return reference, root / "run"


def sampled(directory: Path) -> int:
    """Tokens that a sampler drew, of unfinished rollouts too."""
    return sum(item.response_ids.size for item in durable(directory).values() if item.source != "data")


def victims(directory: Path) -> list[Path]:
    """Every file that a resumed run may read."""
    found = [path for name in ("rollouts", "checkpoints") for path in sorted((directory / name).rglob("*"))]
    files = [path.relative_to(directory) for path in found if path.is_file() and "latest" not in path.parts]
    return [*files, Path("resolved.yaml"), Path("run.json")]


def follow_advice(directory: Path, reference: opd.Run) -> None:
    """Behind a repair a run may still have checkpoints that saw more of the log; what was lost is drawn again, alike."""
    for newest in reversed(opd.Run(directory).checkpoints):
        refusal = ""
        try:
            same_weights(opd.resume(directory), reference)
        except StoreError as error:
            refusal = str(error)
        if not refusal:
            return
        assert f"delete {newest}" in refusal
        shutil.rmtree(newest)
    raise AssertionError("no checkpoint is left")


@pytest.mark.parametrize("share", range(WORKERS))
@pytest.mark.parametrize("how", ["cut", "flipped"])
def test_every_damaged_file_is_repaired_or_named(
    killed: tuple[opd.Run, Path], tmp_path: Path, how: str, share: int
) -> None:
    reference, dead = killed
    draw = random.Random(f"{how}{share}")
    outcomes = {}
    cases = [file for file in victims(dead) for _ in range(4 if file.suffix == ".log" else 1)]
    for number, file in list(enumerate(cases))[share::WORKERS]:
        directory = tmp_path / f"run{number}"
        shutil.copytree(dead, directory, symlinks=True)
        path = directory / file
        data = bytearray(path.read_bytes())
        if how == "cut":
            del data[draw.randrange(len(data)) :]
        else:
            at = draw.randrange(len(data))
            data[at] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
        said = (directory / "log.txt").stat().st_size
        outcomes[file], refusal = "repaired", ""
        try:
            same_run(opd.resume(directory), reference)
        except OpdError as error:
            outcomes[file], refusal = "refused", str(error)
            if file.suffix == ".log" and ended(start(tmp_path / "repair.txt", "store", "repair", directory)) == 0:
                follow_advice(directory, reference)
                outcomes[file] = "refused, then repaired"
        words = refusal or (directory / "log.txt").read_text()[said:]
        assert path.name in words or (not refusal and "checkpoints" not in file.parts), (file, words)
        shutil.rmtree(directory)
    print(how, {kind: sum(found == kind for found in outcomes.values()) for kind in set(outcomes.values())})
    assert outcomes


# A full disk


def test_a_disk_that_fills_up(tmp_path: Path) -> None:
    """Small file systems of random sizes: the log, a checkpoint or a line of metrics is what no longer fits."""
    probe = "mount -t tmpfs -o size=64k tmpfs /mnt"
    if (
        shutil.which("unshare") is None
        or subprocess.run(["unshare", "-Urm", "sh", "-c", probe], check=False).returncode
    ):
        pytest.skip("no user and mount namespaces here (unshare -Urm), so no small file system can be made")
    reference, mount, draw = opd.run(RECIPE, out=tmp_path / "reference"), tmp_path / "mount", random.Random(0)
    mount.mkdir()
    whole = sum(path.stat().st_size for path in reference.directory.rglob("*") if path.is_file()) // 1024
    log = written(reference.directory) // 1024
    sizes = [draw.randint(64, log), *(draw.randint(log, whole) for _ in range(3))]
    command = [
        sys.executable,
        "-m",
        "tests.support.crash_disk",
        tmp_path / "recipe.yaml",
        reference.directory,
        mount,
        *sizes,
    ]
    write(tmp_path / "recipe.yaml", RECIPE)
    done = subprocess.run(["unshare", "-Urm", *map(str, command)], capture_output=True, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("resumed to the same end") == len(sizes)


# Environments


SHOPS = """
# Orders. The process dies in the one with the number that a file has, before or after it is made.

import itertools
import os
import signal
import time
from pathlib import Path

import opd
from opd.rollouts.environments import Environment, Episode, Step

NUMBERS = itertools.count(1)


class Shop(Environment):
    directory: str

    def open(self, prompt, key):
        return Order(Path(self.directory), key, self.effects)


@opd.register
class Window(Shop):
    name, effects = "window", "none"


@opd.register
class Basket(Shop):
    name, effects = "basket", "own"


@opd.register
class Till(Shop):
    name, effects = "till", "outside"


class Order(Episode):
    def __init__(self, directory, key, effects):
        self.directory, self.key, self.effects, self.basket = directory, key, effects, 0

    def step(self, turn):
        wanted, number = self.directory / "die", next(NUMBERS)
        when = wanted.read_text() if wanted.exists() else ""
        if when == f"before {number}":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.002)
        if self.effects == "outside":
            with (self.directory / "orders").open("a") as file:
                file.write(f"{self.key} {turn.number}\\n")
                file.flush()
                os.fsync(file.fileno())
        if when == f"after {number}":
            os.kill(os.getpid(), signal.SIGKILL)
        return self.result(turn)

    def result(self, turn):
        said = sum(map(ord, turn.text)) % 10
        self.basket += said * (self.effects == "own")
        said = (said + self.basket) % 10
        return Step(messages=[{"role": "user", "content": f" {said} "}], reward=said / 10, done=turn.number == 2)

    def recover(self, turn):
        if self.key % 2:
            return None  # nobody knows
        return self.result(turn) if f"{self.key} {turn.number}" in (self.directory / "orders").read_text().split("\\n") else self.step(turn)
"""


@pytest.mark.parametrize("kind", ["window", "basket", "till"])
def test_kills_inside_calls(kind: str, tmp_path: Path) -> None:
    """Runs die inside calls of environments, and between tokens. Without effects outside the run, they end as if nothing had happened. With them,
    no order is made twice, and episodes in which nobody knows are counted.
    """
    (tmp_path / "shops.py").write_text(SHOPS)
    outside, draw = kind == "till", random.Random(f"{os.environ.get('SEED', '0')}{kind}")

    def recipe(directory: Path) -> dict[str, Any]:
        directory.mkdir()
        (directory / "orders").write_text("")
        shop = {"kind": kind, "turns": 4, "turn_tokens": 5, "workers": 4, "directory": str(directory)}
        return RECIPE | {
            "rollout": {"prompts": 6, "samples": 2, "max_new_tokens": 64, "environment": shop},
            "train": {"steps": 3, "lr": 1e-3}, "eval": {"prompts": 0}, "plugins": [str(tmp_path / "shops.py")],
            "checkpoint": {"every": 1, "keep": 2, "resume": "prefill" if outside else "exact", "grace": 3600},
        }  # fmt: skip

    reference = opd.run(recipe(tmp_path / "calm"), out=tmp_path / "reference")
    kills, trial, lost = 0, 0, 0
    while kills < max(1, COUNT * 10 // 24 // 3):
        trial += 1
        shop, directory, log = tmp_path / f"shop{trial}", tmp_path / f"run{trial}", tmp_path / f"log{trial}.txt"
        command: tuple[str | Path, ...] = ("run", write(tmp_path / "shop.yaml", recipe(shop)), "--out", directory)
        code: int | None = None
        while code != 0:
            (shop / "die").write_text(f"{draw.choice(['before', 'after'])} {draw.randint(1, 60)}")
            before = durable(directory) if (directory / "run.json").exists() else {}
            code = ended(start(log, *command, die=draw.randint(1, 400) if draw.random() < 0.3 else None))
            assert code in (-signal.SIGKILL, 0), log.read_text()
            kills += code != 0
            kept(before, durable(directory))
            command = ("resume", directory)
        run = opd.Run(directory)
        if not outside:
            same_run(run, reference)
            continue
        orders = (shop / "orders").read_text().split()
        made = list(zip(orders[::2], orders[1::2], strict=True))
        assert len(made) == len(set(made))
        notes = [entry.notes for entry in run.rollouts.entries.values()]
        ours = [noted for noted in notes if "lost" in noted]
        assert all("interrupted" in noted["feedback"] and noted["reward"] is None for noted in ours)
        assert sum(line["env/lost"] for line in run.metrics) == len(ours)
        assert len(made) >= sum(len(noted["turn_rewards"]) for noted in notes) - len(ours)
        lost += len(ours)
    print(f"{kind}: {kills} kills in {trial} runs, {lost} episodes lost")
