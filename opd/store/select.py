"""Queries on the index: `run.rollouts.where(domain="math", reward=0)`.

Payload is touched only by `load` and `to_parquet`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from opd.errors import UserError
from opd.store.index import STOPS, Index
from opd.types import Rollout

if TYPE_CHECKING:
    from opd.store.rollouts import RolloutStore

CODED = ("domain", "source", "teacher")
NUMBERS = ("length", "prompt_length", "visit", "sample", "version_min", "version_max", "reward")
NAMED = ("id", "prompt_id", "group", "pair")
KNOWN = (*CODED, *NUMBERS, "stop", *NAMED)
BATCH = 256  # rollouts in memory at once


class Selection:
    """Finished rollouts that meet conditions, oldest first. It holds row numbers, nothing else.

    A condition is a value to equal (`reward=None`: none was given), or a function. Of numbers it gets the whole column
    and returns a mask (`length=lambda n: n > 100`); of texts it gets one after the other. A name that is no column is
    looked up in the notes.
    """

    def __init__(self, store: RolloutStore, rows: np.ndarray) -> None:
        self._store, self.rows = store, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        return f"<{len(self)} of {len(self._store)} rollouts>"

    def __iter__(self) -> Iterator[Rollout]:
        for start in range(0, len(self.rows), BATCH):
            yield from self._store.load_rows(self.rows[start : start + BATCH])

    @overload
    def __getitem__(self, place: int) -> Rollout: ...
    @overload
    def __getitem__(self, place: slice) -> Selection: ...
    def __getitem__(self, place: int | slice) -> Rollout | Selection:
        if isinstance(place, slice):
            return Selection(self._store, self.rows[place])
        return self._store.load_rows([self.rows[place]])[0]

    @property
    def ids(self) -> list[str]:
        return [_names(self._store.index, row)[0] for row in self.rows]

    def where(self, **conditions: Any) -> Selection:
        rows = self.rows
        for name, condition in conditions.items():
            rows = rows[_mask(self._store.index, rows, name, condition)]
        return Selection(self._store, rows)

    def column(self, name: str) -> np.ndarray:
        """One column of the index, for these rollouts; texts as objects."""
        index = self._store.index
        if name in NUMBERS:
            return index[name][self.rows]
        if name in CODED:
            return np.array(index.vocabularies[name].texts, dtype=object)[index[name][self.rows]]
        if name == "stop":
            return np.array(STOPS, dtype=object)[index["stop"][self.rows]]
        if name in NAMED:
            return np.array([_names(index, row)[NAMED.index(name)] for row in self.rows], dtype=object)
        raise UserError(f"unknown column {name!r}; known: {', '.join(KNOWN)}.")

    def load(self) -> list[Rollout]:
        return self._store.load_rows(self.rows)

    def to_parquet(self, path: str | Path) -> None:
        """One line per rollout: the index's columns, its notes as JSON, and the per-token arrays as lists."""
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ModuleNotFoundError:
            raise UserError("to_parquet needs pyarrow: pip install 'opd[data]'") from None
        arrays = [
            ("prompt_ids", pa.int32()),
            ("response_ids", pa.int32()),
            ("logprob", pa.float32()),
            ("logprob_sampled", pa.float32()),
            ("logprob_stop", pa.float32()),
            ("version", pa.int32()),
            ("author", pa.uint8()),
        ]
        texts = [*NAMED, *CODED, "stop", "notes"]
        numbers = [(name, pa.float64() if name == "reward" else pa.int64()) for name in NUMBERS]
        schema = pa.schema(
            [*((name, pa.string()) for name in texts), *numbers, *((name, pa.list_(kind)) for name, kind in arrays)]
        )
        with pq.ParquetWriter(str(path), schema) as writer:
            for start in range(0, len(self.rows), BATCH):
                part = Selection(self._store, self.rows[start : start + BATCH])
                rollouts = part.load()
                columns: dict[str, Any] = {name: part.column(name) for name in (*NAMED, *CODED, "stop", *NUMBERS)}
                columns["notes"] = [json.dumps(self._store.index.notes(int(row))) for row in part.rows]
                columns |= {name: [getattr(rollout, name) for rollout in rollouts] for name, _ in arrays}
                columns["reward"] = [None if np.isnan(reward) else reward for reward in columns["reward"]]
                writer.write_table(
                    pa.table({name: pa.array(columns[name], schema.field(name).type) for name in schema.names})
                )


def _mask(index: Index, rows: np.ndarray, name: str, condition: Any) -> np.ndarray:
    if name in NUMBERS:
        values = index[name][rows]
        if callable(condition):
            return np.asarray(condition(values), dtype=bool)
        return np.isnan(values.astype(np.float64)) if condition is None else values == condition
    test = condition if callable(condition) else lambda value: value == condition
    if name in CODED:
        return _true(test, index.vocabularies[name].texts)[index[name][rows]]
    if name == "stop":
        return _true(test, STOPS)[index["stop"][rows]]
    if name in NAMED:
        return _true(test, [_names(index, row)[NAMED.index(name)] for row in rows])
    notes = [index.notes(int(row)) for row in rows]
    if len(rows) and not any(name in facts for facts in notes):
        raise UserError(f"{name!r} is neither a column ({', '.join(KNOWN)}) nor a note of any of these rollouts.")
    return np.array([name in facts and bool(test(facts[name])) for facts in notes], dtype=bool)


def _true(test: Callable[[Any], Any], values: Any) -> np.ndarray:
    return np.array([bool(test(value)) for value in values], dtype=bool)


def _names(index: Index, row: int) -> list[str]:
    return json.loads(index.names[int(row)])


def iterate(store: RolloutStore, batch: int = 256) -> Iterator[Rollout]:
    """Every finished rollout of a run, oldest first."""
    rows = store.readable()
    for start in range(0, len(rows), batch):
        yield from store.load_rows(rows[start : start + batch])
