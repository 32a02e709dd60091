"""Tokens per second that one writer takes into the rollout store, synced, and read back.

    OMP_NUM_THREADS=1 python benchmarks/store_writer.py

`one by one`: `append`, as the sampler's events come. `steps`: `append_many` with one token of each of the slots, as a decode step of many
sequences gives them. `chunks`: `append_many` with a piece of one rollout, as a server streams it. Rollouts end at random lengths of
the given mean, and others take their place. Wall time from the first token until all is durable, rollouts begun and finished included.
`sampler's log`: steps into a log as a sampler process writes it (`sampler.processes`), with the begins and links of the store that they count
in, all in one process. Writes benchmarks/results/store-writer-cpu.json.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from runs import save

from opd.records import SampledToken, StopReason, TokenColumns
from opd.store import RolloutStore
from opd.store.rollouts import SamplerLog, folder_of

NAME = "store-writer-cpu.json"
PROMPT = np.arange(200)


class Slots:
    """Rollouts side by side; every `step` gives one token of each, and says which are over."""

    def __init__(self, store: RolloutStore, slots: int, mean: int, seed: int = 0) -> None:
        self._store, self._random, self._mean = store, np.random.default_rng(seed), mean
        self._count = 0
        self._made: dict[int, tuple[np.ndarray, ...]] = {}
        self.ids = [self._begin() for _ in range(slots)]
        self.left = self._random.geometric(1 / mean, slots)

    def _begin(self) -> str:
        name = f"main/task:writer/{self._count}/0/0"
        self._count += 1
        self._store.begin(
            id=name, prompt_id=name, visit=0, sample=0, domain="d", source="student", prompt_ids=PROMPT, group=name
        )
        return name

    def columns(self, size: int) -> tuple[np.ndarray, ...]:
        """The same again and again: making them is not what is measured."""
        if size not in self._made:
            self._made[size] = self._columns(size)
        return self._made[size]

    def _columns(self, size: int) -> tuple[np.ndarray, ...]:
        return (
            self._random.integers(0, 150_000, size),
            *(-self._random.random((3, size))),
            np.zeros(size, dtype=np.int32),
        )

    def ended(self, places: np.ndarray, by: int = 1) -> None:
        self.left[places] -= by
        for place in places[self.left[places] <= 0].tolist():
            self._store.finish(self.ids[place], "stop")
            self.ids[place], self.left[place] = self._begin(), self._random.geometric(1 / self._mean)


def one_by_one(store: RolloutStore, slots: Slots, total: int, width: int) -> int:
    every, taken = np.arange(width), 0
    while taken < total:
        rows = zip(slots.ids, *(column.tolist() for column in slots.columns(width)), strict=True)
        for row in rows:
            store.append(SampledToken(*row))
        slots.ended(every)
        taken += width
    return taken


def steps(store: RolloutStore, slots: Slots, total: int, width: int) -> int:
    every, taken = np.arange(width), 0
    while taken < total:
        store.append_many(TokenColumns(slots.ids, *slots.columns(width)))
        slots.ended(every)
        taken += width
    return taken


def chunks(store: RolloutStore, slots: Slots, total: int, width: int, size: int = 32) -> int:
    every, taken = np.arange(width), 0
    while taken < total:
        for name in slots.ids:
            store.append_many(TokenColumns(name, *slots.columns(size)))
        slots.ended(every, by=size)
        taken += size * width
    return taken


class Sampled(RolloutStore):
    """Begins and links here, tokens in the log of a sampler."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        number = self.open_sampler_log()
        self._into = SamplerLog(folder_of(directory, number), number, self.sampler_log_id(number), commit_ms=50)
        self._numbers: dict[str, int] = {}
        self._over: list[int] = []

    def begin(self, *, id: str, prompt_ids: np.ndarray, **names: Any) -> None:
        super().begin(id=id, prompt_ids=prompt_ids, **names)
        self._numbers[id] = number = len(self) - 1
        self._into.begin(number, self.names(id), prompt_ids)

    def append_many(self, tokens: TokenColumns, author: Any = 0) -> None:
        ids, *columns = tokens
        self._into.append(list(map(self._numbers.__getitem__, ids)), [*columns, author])

    def finish(self, id: str, stop: StopReason) -> None:
        self._into.finish(self._numbers[id], stop)
        self._over.append(self._numbers[id])

    def commit(self, sync: bool = False) -> None:
        self._into.commit(sync)
        for number, facts in self._into.links(self._over):
            self.link(number, facts)
        super().commit(sync)

    def close(self) -> None:
        self._into.close()
        self.settle(self._into.number)
        super().close()


WAYS = {"one by one": one_by_one, "steps": steps, "chunks": chunks, "sampler's log": steps}


def measure(way: str, args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=args.directory) as name:
        store = (Sampled if way == "sampler's log" else RolloutStore)(Path(name) / "log")
        slots = Slots(store, args.slots, args.mean)
        began, busy = time.perf_counter(), time.process_time()
        taken = WAYS[way](store, slots, args.tokens // (8 if way == "one by one" else 1), args.slots)
        store.commit(sync=True)
        seconds, busy = time.perf_counter() - began, time.process_time() - busy
        store.close()
        again = RolloutStore(Path(name) / "log", read_only=True)
        kept = sum(entry.length for entry in again.entries.values())
    assert kept == taken, (kept, taken)
    return {
        "way": way,
        "tokens": taken,
        "tokens_per_s": round(taken / seconds),
        "cpu_us_per_token": round(busy / taken * 1e6, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8_000_000)
    parser.add_argument("--slots", type=int, default=512)
    parser.add_argument("--mean", type=int, default=500, help="tokens of a rollout")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--directory", type=Path, help="on the disk to be measured; default: the temporary one")
    args = parser.parse_args()
    rows = []
    for way in WAYS:
        found = [measure(way, args) for _ in range(args.repeats)]
        rows.append(sorted(found, key=lambda row: row["tokens_per_s"])[len(found) // 2])
        print(json.dumps(rows[-1]), flush=True)
    save(NAME, {"slots": args.slots, "mean": args.mean, "repeats": args.repeats, "rows": rows})


if __name__ == "__main__":
    main()
