"""The rollout store of a run by filter and page, for `opd view`: masks over the index's columns, payload only of what is shown."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from opd.config.runs import read_resolved
from opd.config.stage import MERGED
from opd.errors import OpdError, RunDirectoryError, UserError
from opd.models.load import tokenizer_file
from opd.store import RolloutStore
from opd.store.index import STOPS
from opd.types import Rollout, Signal

PREVIEW = 48  # tokens of a prompt and an answer in the list
SHOWN = 4096  # tokens of one rollout
MOST = 200  # rows of a page
REST = 10.0  # the store is looked at again after this many times as long as looking took
SORTS: dict[str, tuple[str, bool]] = {  # column, largest first
    "newest": ("", True),
    "oldest": ("", False),
    "longest": ("length", True),
    "shortest": ("length", False),
    "best": ("reward", True),
    "worst": ("reward", False),
}
CODED = ("domain", "teacher", "source")


class RolloutBrowser:
    """A store that may be growing. Questions are answered from the newest look at it; looking again happens beside them."""

    def __init__(self, directory: Path) -> None:
        self._root = directory
        self._lock = threading.Lock()
        self._size, self._next = -1, 0.0
        self._store: RolloutStore | None = None
        self._decode: Callable[[list[int]], str] | None = None
        self._searched = False  # for a tokenizer, since the store has grown
        self.look()

    def look(self) -> None:
        """Open the store again if it has grown; not so often that it would slow down who is writing it."""
        folder = self._root / "rollouts"
        size = sum(path.stat().st_size for path in folder.glob("*") if path.is_file()) if folder.is_dir() else 0
        if not size or size == self._size or time.monotonic() < self._next:
            return
        start = time.monotonic()
        store = RolloutStore(folder, read_only=True)
        with self._lock:
            self._store, self._size, self._searched = store, size, False
        self._next = time.monotonic() + REST * (time.monotonic() - start)

    def page(self, asked: Mapping[str, str]) -> dict[str, Any]:
        """`asked`: domain, teacher, source, stop, reward (right, wrong, none), length_from, version_from, sort, offset, limit."""
        with self._lock:
            store = self._store
        if store is None:
            return {"total": 0, "all": 0, "values": {name: [] for name in (*CODED, "stop")}, "rows": []}
        index = store.index
        finished = store.readable()
        rows = finished[_mask(index, finished, asked)]
        order = asked.get("sort", "newest")
        if order not in SORTS:
            raise UserError(f"sort {order!r}: expected one of {', '.join(SORTS)}.")
        offset, limit = _whole(asked, "offset", 0), min(_whole(asked, "limit", 50), MOST)
        chosen = _sorted(index, rows, *SORTS[order])[offset : offset + limit]
        values = {name: _present(index, finished, name) for name in CODED}
        values["stop"] = [
            str(name) for code, name in enumerate(STOPS) if code and (index["stop"][finished] == code).any()
        ]
        return {
            "total": len(rows),
            "all": len(finished),
            "values": values,
            "rows": [self._row(store, int(row)) for row in chosen],
        }

    def _row(self, store: RolloutStore, row: int) -> dict[str, Any]:
        index, (rollout,) = store.index, store.load_rows([row])
        reward = float(index["reward"][row])
        return {
            "row": row,
            "id": rollout.id,
            "domain": rollout.domain,
            "source": rollout.source,
            "teacher": index.text("teacher", row),
            "reward": None if np.isnan(reward) else reward,
            "length": int(rollout.response_ids.size),
            "stop": rollout.stop,
            "version": int(index["version_max"][row]),
            "prompt": self.text(rollout.prompt_ids[-PREVIEW:]),
            "response": self.text(rollout.response_ids[:PREVIEW]),
        }

    def one(self, row: int) -> dict[str, Any]:
        """A rollout with its tokens, and what its teacher said of them where the store has it."""
        with self._lock:
            store = self._store
        if store is None or row not in store.readable():
            raise UserError(f"row {row}: there is no such rollout.")
        (rollout,) = store.load_rows([row])
        said = store.signals([rollout.id], "teacher", "logprobs_at").get(rollout.id)
        return {**self._row(store, row), "prompt": self.text(rollout.prompt_ids), "tokens": self._tokens(rollout, said)}

    def _tokens(self, rollout: Rollout, said: Signal | None) -> dict[str, Any]:
        ids = rollout.response_ids[:SHOWN].tolist()
        student = rollout.logprob[:SHOWN].astype(float)
        teacher = np.full(len(ids), np.nan)
        if said is not None:
            teacher = np.where(said.mask, np.asarray(said.values, dtype=float), np.nan)[:SHOWN]
        return {
            "id": rollout.id,
            "ids": ids,
            "author": rollout.author[:SHOWN].tolist(),
            "texts": {str(index): self.text([index]) for index in set(ids)},
            "teacher": said.teacher if said is not None else "",
            "student": student.tolist(),
            "teacher_logprob": teacher.tolist(),
            "ratio": (student - teacher).tolist(),
            "left_out": max(rollout.response_ids.size - SHOWN, 0),
        }

    # Text, without torch or transformers

    def text(self, ids: Any) -> str:
        decode = self._decoder()
        numbers = [int(index) for index in ids]
        return " ".join(map(str, numbers)) if decode is None else decode(numbers)

    def _decoder(self) -> Callable[[list[int]], str] | None:
        """None: neither the run nor the student it began from has a tokenizer to read, so ids are shown until one is saved."""
        if self._decode is None and not self._searched:
            self._searched, path = True, self._tokenizer()
            if path is not None:
                from tokenizers import Tokenizer

                found = Tokenizer.from_file(str(path))
                self._decode = lambda ids: str(found.decode(ids, skip_special_tokens=False))
        return self._decode

    def _tokenizer(self) -> Path | None:
        """The student's, with a checkpoint or with the model it began from."""
        saved = sorted((self._root / "checkpoints").glob("*/step-*/tokenizer.json"))
        if saved:
            return saved[-1]
        student = read_resolved(self._root)["stages"][0].get("student")
        if not isinstance(student, dict) or "model" not in student:
            raise RunDirectoryError(f"{self._root / 'resolved.yaml'} was altered: it does not name the student.")
        model = str(student["model"])
        if model.startswith(MERGED):  # made when the stage began
            model = str(self._root / "merged" / model.removeprefix(MERGED))
        return tokenizer_file(model, student.get("revision"))


def _mask(index: Any, rows: np.ndarray, asked: Mapping[str, str]) -> np.ndarray:
    mask = np.ones(rows.size, dtype=bool)
    for name in CODED:
        if asked.get(name):
            code = index.vocabularies[name].find(asked[name])
            mask &= index[name][rows] == (-1 if code is None else code)
    if asked.get("stop"):
        mask &= index["stop"][rows] == (STOPS.index(asked["stop"]) if asked["stop"] in STOPS else len(STOPS))
    reward = index["reward"][rows]
    known = ~np.isnan(reward)
    full = known & (np.nan_to_num(reward) >= 1 - 1e-9)
    kinds = {"right": full, "wrong": known & ~full, "none": ~known}
    if asked.get("reward"):
        if asked["reward"] not in kinds:
            raise UserError(f"reward {asked['reward']!r}: expected one of {', '.join(kinds)}.")
        mask &= kinds[asked["reward"]]
    mask &= index["length"][rows] >= _whole(asked, "length_from", 0)
    return mask & (index["version_max"][rows] >= _whole(asked, "version_from", -1))


def _sorted(index: Any, rows: np.ndarray, column: str, largest: bool) -> np.ndarray:
    if not column:
        return rows[::-1] if largest else rows
    values = np.nan_to_num(index[column][rows].astype(float), nan=-np.inf if largest else np.inf)
    return rows[np.argsort(-values if largest else values, kind="stable")]


def _present(index: Any, rows: np.ndarray, name: str) -> list[str]:
    used = np.bincount(index[name][rows], minlength=1)
    return [
        text for code, text in enumerate(index.vocabularies[name].texts) if text and code < used.size and used[code]
    ]


def _whole(asked: Mapping[str, str], name: str, usual: int) -> int:
    try:
        return int(asked.get(name) or usual)
    except ValueError:
        raise UserError(f"{name} {asked[name]!r}: expected a whole number.") from None


def growing(rollouts: RolloutBrowser, every: float, ended: threading.Event) -> None:
    """Looks at the store again and again, until told to end. A store that is just being written may be caught half-way."""
    while not ended.wait(every):
        try:
            rollouts.look()
        except (OpdError, OSError):
            continue  # next time it is whole
