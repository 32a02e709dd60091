"""Which prompts a step gets: shares kept exactly, every prompt of a finite source seen once per pass, resumable by a few integers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from opd.data.sources import Source
from opd.types import Prompt


@dataclass(frozen=True)
class Visit:
    """A prompt and which pass over it this is."""

    prompt: Prompt
    visit: int
    source: int  # index into the recipe's list of sources


class PromptStream:
    """Draws from several sources by share. Finite sources are reshuffled each pass, by (seed, source, pass).

    >>> stream = PromptStream(sources, shares=[3, 1], seed=0)   # doctest: +SKIP
    >>> [visit.source for visit in stream.take(4)]              # doctest: +SKIP
    [0, 0, 1, 0]
    """

    def __init__(self, sources: list[Source], shares: list[float], seed: int) -> None:
        self._sources, self._seed = sources, seed
        self._shares = np.asarray(shares, dtype=np.float64) / sum(shares)
        self._taken = np.zeros(len(sources), dtype=np.int64)
        self._orders: dict[int, tuple[int, np.ndarray]] = {}

    def take(self, count: int) -> list[Visit]:
        return [self._next() for _ in range(count)]

    def _next(self) -> Visit:
        owed = self._shares * (self._taken.sum() + 1) - self._taken
        source = int(np.argmax(owed))
        position = int(self._taken[source])
        self._taken[source] += 1
        size = self._sources[source].size
        if size is None:
            return Visit(self._sources[source].train(position), 0, source)
        visit, offset = divmod(position, size)
        return Visit(self._sources[source].train(int(self._order(source, visit, size)[offset])), visit, source)

    def _order(self, source: int, visit: int, size: int) -> np.ndarray:
        cached = self._orders.get(source)
        if cached is None or cached[0] != visit:
            cached = (visit, np.random.default_rng([self._seed, source, visit]).permutation(size))
            self._orders[source] = cached
        return cached[1]

    def state(self) -> dict[str, Any]:
        return {"taken": self._taken.tolist()}

    def restore(self, state: dict[str, Any]) -> None:
        self._taken = np.asarray(state["taken"], dtype=np.int64)
