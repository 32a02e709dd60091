"""An epoch over stored rollouts: shuffled and packed to a token budget, from the index alone.

Ten million rows are a few seconds of numpy: no object per rollout, no payload.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from opd.errors import UserError
from opd.store.index import Index


@dataclass(frozen=True, eq=False)
class EpochPlan:
    """Batches of index rows: batch b is `rows[starts[b] : starts[b + 1]]`."""

    rows: np.ndarray
    starts: np.ndarray
    tokens: np.ndarray  # of each batch, prompts included

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, batch: int) -> np.ndarray:
        return self.rows[self.starts[batch] : self.starts[batch + 1]]


def plan_epoch(index: Index, token_budget: int, seed: int, rows: np.ndarray | None = None) -> EpochPlan:
    """Every finished rollout once, in random order, in batches of at most `token_budget` tokens.

    Rollouts of one unit (pair, or group) stay together; a unit above the budget gets a batch of its own. `rows` limits the
    epoch, for example to `store.where(domain="math").rows`.
    """
    if token_budget < 1:
        raise UserError(f"token_budget {token_budget}: must be at least 1.")
    finished = np.flatnonzero(index["stop"]) if rows is None else np.asarray(rows)
    if not len(finished):
        return EpochPlan(finished, np.zeros(1, dtype=np.int64), np.zeros(0, dtype=np.int64))
    unit = index["unit"][finished]
    order = np.argsort(unit, kind="stable")
    by_unit, unit = finished[order], unit[order]
    del order
    first = np.flatnonzero(np.concatenate([[True], unit[1:] != unit[:-1]]))
    del unit
    lengths = (index["length"][by_unit] + index["prompt_length"][by_unit]).astype(np.int64)
    sizes, counts = np.add.reduceat(lengths, first), np.diff(np.append(first, len(by_unit)))
    del lengths
    shuffled = np.random.default_rng(seed).permutation(len(first))
    first, sizes, counts = first[shuffled], sizes[shuffled], counts[shuffled]
    del shuffled
    cuts = _cuts(sizes, token_budget)
    ends = np.cumsum(counts)
    planned = by_unit[np.arange(len(by_unit)) + np.repeat(first - (ends - counts), counts)]
    starts = np.append(ends - counts, len(by_unit))[cuts]
    return EpochPlan(planned, starts, np.add.reduceat(sizes, cuts[:-1]))


def _cuts(sizes: np.ndarray, budget: int) -> np.ndarray:
    """Where batches begin, greedily in order, and the end."""
    ends = np.cumsum(sizes)
    cuts, start, filled = [0], 0, 0
    while True:
        stop = int(np.searchsorted(ends, filled + budget, side="right"))
        start = max(stop, start + 1)
        cuts.append(min(start, len(sizes)))
        if start >= len(sizes):
            return np.array(cuts)
        filled = int(ends[start - 1])
