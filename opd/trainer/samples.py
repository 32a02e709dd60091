"""Which completions of a step are written down, so that one can read what the numbers mean: `log.samples`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from opd.types import Rollout

if TYPE_CHECKING:
    from opd.models.packing import Pack
    from opd.objective.micro import TokenStatistics
    from opd.objective.trace import Trace
    from opd.runner.stage import StageRun


def sampled_ids(run: StageRun, step: int, rollouts: Iterable[Rollout]) -> frozenset[str]:
    """Of the rollouts that a step trains on, a few per domain, the newest first; none in most steps."""
    log, newest = run.spec.log, run.trajectories.newest
    if not log.samples or (step - 1) % log.samples_every:
        return frozenset()
    domains = {rollout.id: rollout.domain for rollout in rollouts}
    return frozenset(
        few_per_domain([(name, domains[name]) for name in reversed(newest) if name in domains], log.samples)
    )


def few_per_domain(items: Iterable[tuple[str, str]], count: int) -> list[str]:
    """The first ids of every domain, in their order. `items`: (id, domain)."""
    seen: Counter[str] = Counter()
    kept = []
    for name, domain in items:
        if seen[domain] < count:
            seen[domain] += 1
            kept.append(name)
    return kept


def traces_of(statistics: Sequence[tuple[Pack, TokenStatistics]]) -> dict[str, Trace]:
    """Rollouts token by token, where the batch asked for it; as the first update saw them."""
    return {name: trace for _, found in reversed(statistics) for name, trace in found.traces.items()}
