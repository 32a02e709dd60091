"""One step's facts: how long each phase took, and what went into `metrics.jsonl`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from opd.types import Author, Rollout

if TYPE_CHECKING:
    from opd.models.packing import Pack
    from opd.objective.micro import TokenStatistics


class Clock:
    """Seconds by phase."""

    def __init__(self, on_phase: Callable[[str], None] = lambda _: None) -> None:
        self.seconds: dict[str, float] = {}
        self._on_phase = on_phase

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self._on_phase(phase)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start


def step_metrics(
    stage: str, step: int, rollouts: Sequence[Rollout], statistics: Sequence[tuple[Pack, TokenStatistics]],
    rewards: Mapping[str, float | None], seconds: Mapping[str, float], extra: Mapping[str, float],
    updates: int = 1,
) -> dict[str, Any]:  # fmt: skip
    """The line for `metrics.jsonl`. `reverse_kl` is in nats per token, over the tokens the teacher scored."""
    lengths = np.array([rollout.response_ids.size for rollout in rollouts])
    sampled = [rollout for rollout in rollouts if (rollout.author != Author.DATA).any()]
    metrics: dict[str, Any] = {
        "step": step,
        "stage": stage,
        "loss": sum(value for _, found in statistics for value in found.loss.values()) / updates,
    }
    by_domain: dict[str, list[np.ndarray]] = {}
    for batch, found in statistics:
        for rollout, values in zip(
            batch.rollouts, np.split(found.reverse_kl, np.cumsum(batch.response_lengths)[:-1]), strict=True
        ):
            by_domain.setdefault(rollout.domain, []).append(values)
    joined = {domain: np.concatenate(parts) for domain, parts in sorted(by_domain.items())}
    metrics["reverse_kl"] = _mean(np.concatenate(list(joined.values())))
    metrics["entropy"] = _mean(np.concatenate([found.entropy for _, found in statistics]))
    if metrics["entropy"] is None and sampled:  # what the sampler saw of its own surprise
        metrics["entropy"] = _mean(
            np.concatenate([-rollout.logprob[rollout.author == Author.STUDENT] for rollout in sampled])
        )
    metrics["tokens"] = int(lengths.sum())
    metrics["response_length"] = float(lengths.mean())
    metrics["truncated"] = float(np.mean([rollout.stop == "length" for rollout in rollouts]))
    metrics["mismatch"] = _mean(np.concatenate([found.mismatch for _, found in statistics]))
    own = {rollout.id for rollout in rollouts if (rollout.author == Author.STUDENT).any()}
    given = [reward for name, reward in rewards.items() if reward is not None and name in own]
    metrics["reward"] = float(np.mean(given)) if given else None
    if rewards:
        metrics["unrewarded"] = sum(reward is None for reward in rewards.values()) / len(rewards)
    metrics |= {f"kl/{domain}": _mean(values) for domain, values in joined.items()}
    metrics |= _shares([found.counts for _, found in statistics])
    metrics |= dict(extra)
    metrics |= {f"time/{phase}": round(value, 4) for phase, value in seconds.items()}
    return metrics


def _shares(counts: Sequence[Mapping[str, tuple[int, int]]]) -> dict[str, float]:
    """Clipped and corrected shares of tokens, over all micro-batches."""
    names = dict.fromkeys(name for found in counts for name in found)
    totals = {name: [sum(found.get(name, (0, 0))[side] for found in counts) for side in (0, 1)] for name in names}
    return {name: changed / max(every, 1) for name, (changed, every) in totals.items()}


def _mean(values: np.ndarray) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else None
