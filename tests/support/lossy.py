"""A disk that loses what was not synced, and a model of what a store must still know after that. No torch.

`kill -9` leaves the page cache alone and so cannot show a missing fsync; this can.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from opd.store import RolloutStore
from opd.store.log import AppendFile, Files
from tests.support.stores import begin, token


class PowerCut(Exception):
    pass


@dataclass
class Node:
    """A file as the program sees it, and as the disk has it."""

    data: bytearray = field(default_factory=bytearray)
    synced: bytes = b""


class LossyFiles(Files):
    """Passes everything through to a directory, and knows what of it a power cut would leave.

    Power fails once `budget` bytes have been written (a rename, a sync or a removal counts as one).
    """

    def __init__(self, budget: int | None = None) -> None:
        self.budget, self.spent = budget, 0
        self.syncs_left: int | None = None  # another way to die: between a write and its sync
        self._names: dict[str, Node] = {}
        self._durable_names: dict[str, Node] = {}
        self._history: list[dict[str, Node]] = []  # the directory after each change since it was synced
        self._directory: Path | None = None
        self._parents: set[Path] = set()  # directories above that were synced

    def spend(self, cost: int) -> int:
        """How much of this the disk still takes; the power fails where it does not take all."""
        taken = cost if self.budget is None else max(0, min(cost, self.budget - self.spent))
        self.spent += taken
        return taken

    def node(self, path: Path) -> Node:
        self._directory = path.parent
        if path.name not in self._names:
            self._names[path.name] = Node()
            self._changed()
        return self._names[path.name]

    def append(self, path: Path) -> AppendFile:
        return LossyFile(path, self, self.node(path))

    def rename(self, source: Path, target: Path) -> None:
        self._operation()
        super().rename(source, target)
        self._names[target.name] = self._names.pop(source.name)
        self._changed()

    def remove(self, path: Path) -> None:
        self._operation()
        super().remove(path)
        if self._names.pop(path.name, None):
            self._changed()

    def sync_directory(self, directory: Path) -> None:
        self._operation()
        if directory == self._directory:
            self._durable_names, self._history = dict(self._names), []
        else:
            self._parents.add(directory)

    def _changed(self) -> None:
        self._history.append(dict(self._names))

    def _operation(self) -> None:
        if not self.spend(1):
            raise PowerCut

    def after_power_loss(self, target: Path, rng: random.Random, keep: float | None = None) -> None:
        """What the disk has: names up to some change, synced bytes, and any prefix of the others, torn or filled with zeros."""
        names = rng.choice([self._durable_names, *self._history]) if keep is None else self._names
        target.mkdir()
        if keep is None and (self._directory is None or self._directory.parent not in self._parents):
            return
        for name, node in names.items():
            rest = bytes(node.data[len(node.synced) :]) if node.data.startswith(node.synced) else b""
            kept = rest[: round(len(rest) * (rng.random() if keep is None else keep))]
            lost = len(rest) - len(kept)
            if keep is None and lost:
                kept += rng.choice([b"", bytes(lost), rng.randbytes(rng.randint(0, lost))])
            (target / name).write_bytes(node.synced + kept)


class LossyFile(AppendFile):
    def __init__(self, path: Path, files: LossyFiles, node: Node) -> None:
        super().__init__(path)
        self._files, self._node = files, node

    def write(self, data: bytes) -> None:
        taken = self._files.spend(len(data))
        self._node.data += data[:taken]
        super().write(data[:taken])
        if taken < len(data):
            raise PowerCut

    def sync(self) -> None:
        self._files._operation()
        if self._files.syncs_left is not None:
            self._files.syncs_left -= 1
            if self._files.syncs_left < 0:
                raise PowerCut
        self._node.synced = bytes(self._node.data)

    def truncate(self, size: int) -> None:
        super().truncate(size)
        del self._node.data[size:]


# A script of a store's life, and what must be known after each commit

Snapshot = dict[str, Any]


def snapshot(store: RolloutStore) -> Snapshot:
    """Everything a store knows, in plain values."""
    found: Snapshot = {}
    for entry in store.entries.values():
        (rollout,) = store.load([entry.id]) if entry.stop else store.partial([entry.id])
        signal = store.signals([entry.id], "teacher", "logprobs_at").get(entry.id)
        found[entry.id] = (
            rollout.prompt_ids.tolist(), rollout.response_ids.tolist(), rollout.logprob.tolist(), rollout.version.tolist(), entry.stop,
            entry.notes, signal.values.tolist() if signal else None,
            [(record.order, record.call, record.result) for record in store.environment(entry.id)],
        )  # fmt: skip
    return found


class Life:
    """Acts at random on a store; `acknowledged` is what the store said is durable, `attempted` what it was last asked to keep."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._model: dict[str, list[Any]] = {}
        self.acknowledged: Snapshot = {}
        self.attempted: Snapshot = {}

    def live(self, store: RolloutStore, acts: int) -> None:
        for _ in range(acts):
            self._act(store)
        self.commit(store)

    def commit(self, store: RolloutStore) -> None:
        self.attempted = {
            name: (*known[:5], dict(known[5]), known[6], list(known[7])) for name, known in self._model.items()
        }
        self.attempted = {
            name: (known[0], list(known[1]), list(known[2]), list(known[3]), *known[4:])
            for name, known in self.attempted.items()
        }
        store.commit(sync=True)
        self.acknowledged = self.attempted

    def _act(self, store: RolloutStore) -> None:
        rng, model = self._rng, self._model
        unfinished = [name for name, known in model.items() if known[4] is None]
        act = rng.choice(["begin", "token", "token", "token", "token", "finish", "note", "signal", "call", "commit"])
        if act == "commit":
            self.commit(store)
        elif act == "begin" or not unfinished:
            name, prompt = f"r{len(model)}", tuple(rng.randrange(99) for _ in range(rng.randint(1, 5)))
            begin(store, name, prompt)
            model[name] = [list(prompt), [], [], [], None, {}, None, []]
        else:
            name = rng.choice(unfinished)
            self._grow(store, act, name, model[name])

    def _grow(self, store: RolloutStore, act: str, name: str, known: list[Any]) -> None:
        rng = self._rng
        if act == "token":
            drawn = token(name, rng.randrange(1000))
            store.append(drawn)
            known[1].append(drawn.token)
            known[2].append(drawn.logprob)
            known[3].append(drawn.version)
        elif act == "finish":
            known[4] = rng.choice(["stop", "length", "env"])
            store.finish(name, known[4])
        elif act == "note":
            fact = {rng.choice(["reward", "why"]): rng.choice([0.5, 1.0, None])}
            store.note(name, **fact)
            known[5] |= fact
        elif act == "signal":
            known[6] = [rng.randrange(9) / 4 for _ in known[1]]
            values = np.array(known[6], dtype=np.float32)
            store.record_signal(name, "teacher", "logprobs_at", "t", 0, values, np.ones(len(values), dtype=bool))
        else:
            call = (len(known[7]), {"run": rng.randrange(9)}, {"out": rng.random()})
            store.record_environment(name, *call)
            known[7].append(call)
