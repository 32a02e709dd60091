"""Which completions of a step are written down, so that one can read what the numbers mean: `log.samples`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from opd.config import Log
from opd.types import Rollout


def sampled_ids(log: Log, step: int, newest: Sequence[str], rollouts: Iterable[Rollout]) -> list[str]:
    """Of the rollouts that a step trains on, a few per domain, the newest first; none in most steps."""
    if not log.samples or (step - 1) % log.samples_every:
        return []
    domains = {rollout.id: rollout.domain for rollout in rollouts}
    return few_per_domain([(name, domains[name]) for name in reversed(newest) if name in domains], log.samples)


def few_per_domain(items: Iterable[tuple[str, str]], count: int) -> list[str]:
    """The first ids of every domain, in their order. `items`: (id, domain)."""
    seen: Counter[str] = Counter()
    kept = []
    for name, domain in items:
        if seen[domain] < count:
            seen[domain] += 1
            kept.append(name)
    return kept
