"""From marks to one number: the pooled normalised score, and bootstrap intervals over seed, domain and prompt.

0 is the start, 1 the specialists: sum over domains of (student - start) over the same sum of (specialist - start).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Marks = Mapping[str, str]  # domain -> one character per prompt: 0 or 1
DRAWS = 2000


def share(text: str) -> float:
    return text.count("1") / len(text)


def pooled(student: Marks, start: Marks, specialists: Marks) -> float:
    """One score, over the domains of the specialists."""
    gained = sum(share(student[domain]) - share(start[domain]) for domain in specialists)
    room = sum(share(specialists[domain]) - share(start[domain]) for domain in specialists)
    return gained / room


def interval(
    runs: Sequence[Marks], start: Marks, specialists: Marks, *, against: Sequence[Marks] = (), seed: int = 0
) -> dict[str, Any]:
    """Pooled score over seeds with its 95 % interval. `against`: only the difference to another arm's, on the same draws; of
    seeds too, unless it has more or fewer of them.
    """
    domains, draws = list(specialists), np.random.default_rng(seed)
    ours, theirs = _table(runs, domains), _table(against, domains) if against else None
    low, high = _table([start], domains), _table([specialists], domains)
    values = []
    for _ in range(DRAWS):
        chosen = draws.integers(len(domains), size=len(domains))
        seeds = draws.integers(len(runs), size=len(runs))
        others = seeds if len(against) == len(runs) else draws.integers(max(len(against), 1), size=len(against))
        gained, lost, room = 0.0, 0.0, 0.0
        for number in chosen:
            n = low[number].shape[1]
            rows = draws.integers(n, size=n)
            zero = low[number][0, rows].mean()
            gained += ours[number][np.ix_(seeds, rows)].mean() - zero
            room += high[number][0, rows].mean() - zero
            if theirs is not None:
                lost += theirs[number][np.ix_(others, rows)].mean() - zero
        if room > 0:  # always, but for a handful of prompts
            values.append((gained - lost) / room)
    scores = [pooled(run, start, specialists) for run in runs]
    bounds = {"low": float(np.quantile(values, 0.025)), "high": float(np.quantile(values, 0.975))}
    if against:
        other = float(np.mean([pooled(run, start, specialists) for run in against]))
        return {"value": float(np.mean(scores)) - other, **bounds}
    return {
        "value": float(np.mean(scores)), **bounds, "by_seed": scores, "by_domain": {
            name: _normalised(table, low[number], high[number]) for number, (name, table) in enumerate(zip(domains, ours, strict=True))
        },
    }  # fmt: skip


def _table(runs: Sequence[Marks], domains: Sequence[str]) -> list[np.ndarray]:
    """Per domain: (seeds, prompts) of 0 and 1."""
    return [np.array([[int(mark) for mark in run[domain]] for run in runs], dtype=float) for domain in domains]


def _normalised(student: np.ndarray, low: np.ndarray, high: np.ndarray) -> float | None:
    room = float(high.mean() - low.mean())
    return None if room <= 0 else float((student.mean() - low.mean()) / room)


def flops(cost: Mapping[str, int], parameters: int, teacher: int) -> float:
    """2N(prefill + sampled) + 2 N_T scored + 6N trained. LoRA is counted like all weights: an upper bound."""
    return 2 * parameters * (cost["prefill"] + cost["sampled"]) + 2 * teacher * cost["scored"] + 6 * parameters * cost["trained"]  # fmt: skip
