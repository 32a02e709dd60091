"""Which prompts a step gets: shares kept exactly, every prompt of a finite source seen once per pass, resumable by a
few integers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from opd.data.source import Source
from opd.errors import DataError
from opd.types import Prompt

PATIENCE = 10_000  # prompts of a source without end that may be refused in a row


@dataclass(frozen=True)
class Visit:
    """A prompt and which pass over it this is."""

    prompt: Prompt
    visit: int
    source: int  # index into the recipe's list of sources


class PromptStream:
    """Draws from several sources by share. Finite sources are reshuffled each pass, by (seed, source, pass).

    A row that cannot be used has its visit like any other and is left out: what comes after it is what would have come
    anyway.

    >>> stream = PromptStream(sources, shares=[3, 1], seed=0)   # doctest: +SKIP
    >>> [visit.source for visit in stream.take(4)]              # doctest: +SKIP
    [0, 0, 1, 0]
    """

    def __init__(self, sources: list[Source], shares: list[float], seed: int) -> None:
        self._sources, self._seed = sources, seed
        self._shares = np.asarray(shares, dtype=np.float64) / sum(shares)
        self._taken = np.zeros(len(sources), dtype=np.int64)
        self._orders: dict[int, tuple[int, np.ndarray]] = {}
        self._unusable: Sequence[np.ndarray | None] = [None] * len(sources)
        self._fits: Callable[[Visit], bool] | None = None
        self.skipped = 0  # visits to prompts that cannot be used

    def leave_out(self, unusable: Sequence[np.ndarray | None], fits: Callable[[Visit], bool] | None) -> None:
        """Which rows of each finite source to skip, and what to ask of prompts where they could not all be looked
        at.
        """
        self._unusable, self._fits = unusable, fits

    def take(self, count: int) -> list[Visit]:
        return [self._usable() for _ in range(count)]

    def _usable(self) -> Visit:
        skipped = 0
        while (visit := self._next()) is None:
            self.skipped, skipped = self.skipped + 1, skipped + 1
            if skipped > PATIENCE + sum(source.size or 0 for source in self._sources):
                raise DataError(
                    "prompts: thousands in a row cannot be used. Raise rollout.max_prompt_tokens, or lower "
                    "rollout.max_new_tokens."
                )
        return visit

    def _next(self) -> Visit | None:
        """The next visit by share and order; None when it goes to a prompt that cannot be used."""
        owed = self._shares * (self._taken.sum() + 1) - self._taken
        source = int(np.argmax(owed))
        position = int(self._taken[source])
        self._taken[source] += 1
        size, unusable = self._sources[source].size, self._unusable[source]
        if size is None:
            visit, index = 0, position
        else:
            visit, offset = divmod(position, size)
            index = int(self._order(source, visit, size)[offset])
        if unusable is not None and unusable[index]:
            return None
        found = Visit(self._sources[source].train(index), visit, source)
        return found if self._fits is None or self._fits(found) else None

    def _order(self, source: int, visit: int, size: int) -> np.ndarray:
        cached = self._orders.get(source)
        if cached is None or cached[0] != visit:
            cached = (visit, np.random.default_rng([self._seed, source, visit]).permutation(size))
            self._orders[source] = cached
        return cached[1]

    def state(self) -> dict[str, Any]:
        return {"taken": self._taken.tolist(), "skipped": self.skipped}

    def restore(self, state: dict[str, Any]) -> None:
        self._taken = np.asarray(state["taken"], dtype=np.int64)
        self.skipped = state.get("skipped", 0)  # runs of before rows could be skipped
