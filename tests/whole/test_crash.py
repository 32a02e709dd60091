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


SHOP = '''
"""Orders that a crash must not repeat: each is written into a ledger, and the process dies before or after that."""

import os
import signal
from pathlib import Path

import opd
from opd.rollouts.environments import Environment, Episode, Step


@opd.register
class Shop(Environment):
    name = "shop"
    effects = "outside"
    ledger: str

    def open(self, prompt, key):
        return Order(Path(self.ledger), key)


class Order(Episode):
    def __init__(self, ledger, key):
        self.ledger, self.key = ledger, key

    def ordered(self, turn):
        return f"{self.key} {turn.number}" in self.ledger.read_text().splitlines()

    def result(self, turn):
        said = sum(map(ord, turn.text)) % 10
        return Step(messages=[{"role": "user", "content": f" {said} "}], reward=said / 10, done=turn.number == 2)

    def step(self, turn):
        number = len(self.ledger.read_text().splitlines())
        self.die(number, "before")
        with self.ledger.open("a") as file:
            file.write(f"{self.key} {turn.number}\\n")
            file.flush()
            os.fsync(file.fileno())
        self.die(number, "after")
        return self.result(turn)

    def die(self, number, when):
        wanted = self.ledger.with_suffix(".die")
        if wanted.exists() and wanted.read_text() == f"{when} {number}":
            wanted.unlink()
            os.kill(os.getpid(), signal.SIGKILL)

    def recover(self, turn):
        return self.result(turn) if self.ordered(turn) else self.step(turn)
'''


def test_kills_inside_calls_with_outside_effects(tmp_path: Path) -> None:
    """Every order is made exactly once, however often the run dies inside one, and the rollouts are those of a calm run."""
    (tmp_path / "shop.py").write_text(SHOP)
    draw = random.Random(os.environ.get("SEED", "0"))

    def recipe(name: str) -> dict[str, Any]:
        (tmp_path / f"{name}.ledger").write_text("")
        shop = {"kind": "shop", "turns": 4, "turn_tokens": 5, "workers": 1, "ledger": str(tmp_path / f"{name}.ledger")}
        rollout = {"prompts": 12, "samples": 2, "max_new_tokens": 64, "environment": shop}
        single = {"train": {"steps": 1, "lr": 1e-3}, "eval": {"prompts": 0}, "checkpoint": {"resume": "prefill"}}
        return RECIPE | single | {"rollout": rollout, "plugins": [str(tmp_path / "shop.py")]}

    reference = opd.run(recipe("calm"), out=tmp_path / "calm")
    orders = (tmp_path / "calm.ledger").read_text().splitlines()
    assert len(orders) == len(set(orders)) == 72
    directory, log, at = tmp_path / "run", tmp_path / "log.txt", 0
    command: tuple[str | Path, ...] = ("run", write(tmp_path / "shop.yaml", recipe("shop")), "--out", directory)
    for _ in range(max(2, COUNT // 8)):
        at = draw.randint(at, 71)
        (tmp_path / "shop.die").write_text(f"{draw.choice(['before', 'after'])} {at}")
        code = ended(start(log, *command))
        assert code in (-signal.SIGKILL, 0), log.read_text()
        command = ("resume", directory)
        if code == 0:
            break
    (tmp_path / "shop.die").unlink(missing_ok=True)
    if code != 0:
        assert ended(start(log, *command)) == 0, log.read_text()
    made = (tmp_path / "shop.ledger").read_text().splitlines()
    assert sorted(made) == sorted(orders)
    run = opd.Run(directory)
    for name in reference.rollouts.entries:
        (ours,), (theirs,) = (one.rollouts.load([name]) for one in (run, reference))
        assert ours.response_ids.tolist() == theirs.response_ids.tolist()
        assert ours.author.tolist() == theirs.author.tolist()
        assert (
            run.rollouts.entries[name].notes["turn_rewards"] == reference.rollouts.entries[name].notes["turn_rewards"]
        )
