"""Several ranks on one machine, as torchrun would start them: forks of one process that has imported everything."""

from __future__ import annotations

import ctypes
import json
import math
import multiprocessing.process
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

import opd
import opd.loop.distributed  # slow to import: once, in the process that the others are forked from
from opd import cli
from tests.support.crash import FORKS

NUMBERS = ("loss", "reverse_kl", "grad_norm")


@dataclass(frozen=True)
class Job:
    """One run of all ranks. Without a recipe, the directory is resumed."""

    out: Path
    recipe: Any = None
    overrides: Sequence[str] = ()
    stop_after: int | None = None  # steps
    bug_after: int | None = None  # steps, on the first rank

    def carry_out(self) -> Any:
        def on_step(run: Any, metrics: dict[str, Any]) -> None:
            if metrics["step"] == self.stop_after:
                run.stop()
            if metrics["step"] == self.bug_after:
                raise KeyError("planted")

        if self.recipe is None:
            return opd.resume(self.out, on_step=on_step)
        return opd.run(self.recipe, overrides=self.overrides, out=self.out, on_step=on_step)


@dataclass(frozen=True)
class Group:
    ranks: list[multiprocessing.process.BaseProcess]
    log: Path
    store: dist.TCPStore  # by which the ranks find each other: the launcher's, so that it outlives them

    def codes(self, timeout: float = 1800) -> list[int | None]:
        """`timeout`: a hang, on any machine."""
        until, behind = time.monotonic() + timeout, 900.0
        while (left := [rank for rank in self.ranks if rank.exitcode is None]) and time.monotonic() < until:
            wait([rank.sentinel for rank in left], 1)
            if any(rank.exitcode for rank in self.ranks):  # one has failed: the others end soon, or never
                until, behind = min(until, time.monotonic() + behind), math.inf
        hanging = [rank for rank in self.ranks if rank.exitcode is None]
        for rank in hanging:
            rank.kill()
        assert not hanging, self.said()
        return [rank.exitcode for rank in self.ranks]

    def said(self) -> str:
        return self.log.read_text(encoding="utf-8")


def start(size: int, log: Path, *what: Job | str) -> Group:
    """Ranks that carry out jobs one after the other, or (of texts) call the command line with them."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    log.touch()
    ranks = [FORKS.Process(target=_rank, args=(rank, size, store.port, what, log)) for rank in range(size)]
    for rank in ranks:
        rank.start()
    return Group(ranks, log, store)


def together(size: int, log: Path, *jobs: Job) -> None:
    """All jobs on so many ranks; everything has to go well."""
    group = start(size, log, *jobs)
    assert group.codes() == [0] * size, group.said()


def _rank(rank: int, size: int, port: int, what: Sequence[Job | str], log: Path) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    with log.open("a", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if all(isinstance(item, str) for item in what):
        sys.argv = ["opd", *map(str, what)]
        cli.main()
        return
    for job in what:
        assert isinstance(job, Job)
        job.carry_out()


def numbers(run: Path) -> list[dict[str, float | None]]:
    """Of every step."""
    whole = (run / "metrics.jsonl").read_text(encoding="utf-8").split("\n")[:-1]  # the last may be on its way
    lines = [json.loads(line) for line in whole]
    return [{name: line.get(name) for name in ("step", "tokens", "reward", *NUMBERS)} for line in lines]


def differences(one: Path, other: Path, bound: float = 1e-5, steps: int | None = None) -> list[str]:
    """Where two runs differ: what was drawn has to be the same, numbers relative to their size, or to a tenth where they are smaller:
    the terms of a policy gradient are of size one and cancel.

    `steps`: how many are compared; None: all.
    """
    found = []
    left, right = numbers(one), numbers(other)
    if len(left) != len(right):
        return [f"{len(left)} steps, and {len(right)}"]
    for a, b in zip(left[:steps], right[:steps], strict=True):
        for name in a:
            x, y = a[name], b[name]
            near = x == y or (
                x is not None and y is not None and name in NUMBERS and abs(x - y) <= bound * max(abs(x), 0.1)
            )
            if not near:
                found.append(f"{other.name}, step {a['step']}: {name} {x} and {y}")
    return found


def give_back_what_is_freed() -> None:
    """From 128 KiB on. Else glibc keeps large tensors in its heap, whose holes count: how many there are differs by machine."""
    mallopt = ctypes.CDLL(None).mallopt
    for parameter in (-3, -1):  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
        mallopt(parameter, 1 << 17)
