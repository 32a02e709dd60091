"""Real processes, really killed: what the resume and crash tests share."""

from __future__ import annotations

import multiprocessing
import multiprocessing.process
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import opd
import opd.runner.pipeline  # slow to import: once, in the process that the others are forked from
from opd import cli
from opd.engines.alongside import LoggingProcess
from opd.records import Author, Rollout, TokenColumns
from opd.store import RolloutStore, iterate

RECIPE: dict[str, Any] = {
    "student": "tiny/generalist",
    "teachers": {"arithmetic": "tiny/arithmetic", "spelling": "tiny/spelling"},
    "prompts": [
        {"source": "task:addition", "domain": "arithmetic"},
        {"source": "task:reverse", "domain": "spelling"},
    ],
    "rollout": {"prompts": 12, "samples": 2, "max_new_tokens": 20},
    "sampler": {"slots": 5, "prefill_rows": 1, "prefill_chunk": 7},  # shapes whose prefill rounds unlike decoding
    "objective": [{"form": "direct"}, {"form": "policy_gradient", "coefficient": 0.5}],
    "train": {"steps": 6, "lr": 1e-3, "warmup": 2, "schedule": "cosine", "micro_tokens": 600},
    "eval": {"prompts": 6, "every": 3, "teachers": False},
    "checkpoint": {"every": 2, "keep": 2, "resume": "exact", "grace": 3600},  # however slow the machine
    "store": {"commit_ms": 5},
    "log": {"samples": 1, "samples_every": 2},
    "device": "cpu",
    "threads": 1,
}
SETTLED = (  # keys of a metrics line that no resume can repeat
    "time/sample", "time/probe", "time/reward", "time/score", "time/update", "rewards/given", "rewards/cached",
)  # fmt: skip


PATIENCE = 1800.0  # seconds: a hang, on any machine
FORKS = multiprocessing.get_context("forkserver")  # imports torch once; every run is a process of its own
FORKS.set_forkserver_preload(["tests.support.crash", "tests.support.ranks", "opd.serve.app"])


def start(
    log: Path, *arguments: str | Path, die: int | None = None, by: int = signal.SIGKILL
) -> multiprocessing.process.BaseProcess:
    """`opd ARGUMENTS` in a process that can be killed; what it prints goes to a file.

    `die`: it strikes itself, by this signal, with so many new tokens durable: a moment that no machine is too fast for.
    """
    begun, words = FORKS.Event(), [str(argument) for argument in arguments]
    process = FORKS.Process(target=_command, args=(str(log), words, die, by, begun))
    process.start()
    until = time.monotonic() + PATIENCE
    while not begun.wait(1) and process.is_alive() and time.monotonic() < until:
        pass
    return process


def _command(
    log: str, arguments: list[str], die: int | None = None, by: int = signal.SIGKILL, begun: Any = None
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the command listens, it ends as by any signal
    if begun is not None:
        begun.set()
    with open(log, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ["PRINTS_TO"] = log  # by which its own processes are found
    torch.set_num_threads(1)
    sys.argv = ["opd", *arguments]
    if die is not None:
        left, append_many = [die], RolloutStore.append_many

        def struck(store: RolloutStore, tokens: TokenColumns, author: Author | np.ndarray = Author.STUDENT) -> None:
            append_many(store, tokens, author)
            left[0] -= tokens.token.size * (author is not Author.DATA)
            if left[0] <= 0:
                store.commit(sync=True)
                os.kill(os.getpid(), by)

        hear = LoggingProcess.receive

        def told(process: LoggingProcess) -> int:
            """Of samplers in processes of their own, whose tokens are in their logs, or nearly."""
            count = hear(process)
            left[0] -= count
            if left[0] <= 0:
                left[0] = sys.maxsize
                os.kill(os.getpid(), by)
            return count

        RolloutStore.append_many = struck  # type: ignore[method-assign]
        LoggingProcess.receive = told  # type: ignore[method-assign]
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        cli.main()
    except KeyboardInterrupt:  # before `main` listens, or when it has ended
        sys.exit(130)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def ended(process: multiprocessing.process.BaseProcess, patience: float = PATIENCE) -> int:
    """The exit code; a negative one is the signal that ended it."""
    process.join(patience)
    if process.exitcode is None:
        process.kill()
        raise AssertionError(f"process {process.pid} hangs")
    return process.exitcode


def written(directory: Path) -> int:
    """Bytes in the rollout store: a clock that runs with the work and not with the machine."""
    total = 0
    for path in (directory / "rollouts").rglob("*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
    return total


def interrupt(
    process: multiprocessing.process.BaseProcess, directory: Path, total: int, draw: random.Random, number: int,
    share: float = 1.0,
) -> bool:  # fmt: skip
    """Send a signal at a random moment within a share of the work that is left; False when the process was done before.

    Mostly the store's growth is the clock; sometimes time is, which also strikes loading and steps that are done again.
    """
    already, began = written(directory), time.monotonic()
    goal, pause, patience = already + share * draw.random() * (total - already), draw.random() * 0.1 * share, 60.0
    if share == 1.0 and draw.random() < 0.3:
        patience = draw.random() * 3
    while process.is_alive() and written(directory) < goal and time.monotonic() < began + patience:
        time.sleep(0.002)
    time.sleep(pause)
    if not process.is_alive() or process.pid is None:
        return False
    try:
        os.kill(process.pid, number)
    except ProcessLookupError:  # done in this very moment
        return False
    return True


def killed(log: Path, directory: Path, total: int, draw: random.Random, *command: str | Path) -> None:
    """The command, killed at a random moment of its work. Where it was done before, it is taken back and killed earlier."""
    before, share = directory.with_name(f"{directory.name}.before"), 0.5
    shutil.rmtree(before, ignore_errors=True)
    if directory.exists():
        shutil.copytree(directory, before, symlinks=True)
    while True:
        process = start(log, *command)
        interrupt(process, directory, total, draw, signal.SIGKILL, share)
        code = ended(process)
        if code == -signal.SIGKILL:
            return
        assert code == 0, log.read_text()
        shutil.rmtree(directory)
        if before.exists():
            shutil.copytree(before, directory, symlinks=True)
        share /= 4


def settled(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key not in SETTLED} for line in lines]


COLUMNS = ("response_ids", "author", "logprob", "logprob_sampled", "logprob_stop", "version")


def durable(directory: Path) -> dict[str, Rollout]:
    """Everything in the store of a dead run, unfinished rollouts too. Reading it changes nothing."""
    store = opd.Run(directory).rollouts
    return {rollout.id: rollout for rollout in [*iterate(store), *store.partial(store.unfinished())]}


def kept(before: dict[str, Rollout], after: dict[str, Rollout]) -> None:
    """Tokens that were durable are there still, unaltered, and at most more of them behind."""
    for key, rollout in before.items():
        for name in ("prompt_ids", *COLUMNS):
            ours, theirs = getattr(after[key], name), getattr(rollout, name)
            same_length = rollout.stop is not None or name == "prompt_ids"
            assert len(ours) == len(theirs) if same_length else len(ours) >= len(theirs), (key, name)
            assert ours[: len(theirs)].tobytes() == theirs.tobytes(), (key, name)


def same_rollouts(run: opd.Run, reference: opd.Run) -> None:
    """No token lost, doubled or altered; every number bit for bit."""
    found, wanted = durable(run.directory), durable(reference.directory)
    assert found.keys() == wanted.keys()
    kept(wanted, found)
    for key, rollout in wanted.items():
        assert (found[key].stop, found[key].source) == (rollout.stop, rollout.source)
        assert run.rollouts.entries[key].notes == reference.rollouts.entries[key].notes


def same_run(run: opd.Run, reference: opd.Run) -> None:
    """The run ended as if nothing had happened: weights, optimiser, rollouts, metrics, evaluations."""
    assert run.summary["status"] == "done"
    for ours, theirs in zip(run.summary["stages"], reference.summary["stages"], strict=True):
        assert {**ours, "seconds": 0, "best": None} == {**theirs, "seconds": 0, "best": None}
        assert (ours["best"] or {}).get("step") == (theirs["best"] or {}).get("step")
    same_rollouts(run, reference)
    for ours, theirs in ((run.metrics, reference.metrics), (run.samples, reference.samples)):
        assert settled(ours) == settled(theirs)
    same_weights(run, reference)
    assert (run.directory / "checkpoints" / "latest").resolve() == run.model.resolve()


def same_weights(run: opd.Run, reference: opd.Run) -> None:
    assert run.model.name == reference.model.name
    for theirs in reference.checkpoints:
        ours = run.directory / theirs.relative_to(reference.directory)
        for file in (
            sorted(theirs.rglob("*.safetensors")) if ours.is_dir() else ()
        ):  # a rescue may have replaced older ones
            assert (ours / file.relative_to(theirs)).read_bytes() == file.read_bytes(), ours / file.name
