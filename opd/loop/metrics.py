"""One step's facts: the time of each phase, and the line in `metrics.jsonl`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from opd.models.language_model import Pack
from opd.objective.micro import TokenStatistics
from opd.records import Author, Rollout

if TYPE_CHECKING:
    from opd.objective.batch import Batch, Written
    from opd.objective.micro import Trace
    from opd.recipe.stage import Log


BINS = 10  # number of confidence bins
FEWEST = 100  # the fewest tokens of which 1 % is meaningful
PAIRS = 65_536  # pairs of tokens that are counted; the share of distinct ones depends on this number


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


@dataclass
class StepReport:
    """What a step leaves for the reports."""

    metrics: dict[str, Any]
    written: Written
    traces: Mapping[str, Trace] = field(default_factory=dict)  # by rollout id


def step_metrics(
    stage: str, step: int, rollouts: Sequence[Rollout], statistics: Sequence[tuple[Pack, TokenStatistics]],
    rewards: Mapping[str, float | None], seconds: Mapping[str, float], extra: Mapping[str, float],
    updates: int = 1,
) -> dict[str, Any]:  # fmt: skip
    """The line for `metrics.jsonl`. `reverse_kl` is in nats per token, over the tokens the teacher scored.

    `entropy` is exact, over the tokens at which a term compared distributions. `entropy_sampled` is the mean of -log p of the
    student's sampled tokens, used when there is no exact value.
    """
    lengths = np.array([rollout.response_ids.size for rollout in rollouts])
    sampled = [rollout for rollout in rollouts if (rollout.author != Author.DATA).any()]
    metrics: dict[str, Any] = {
        "step": step,
        "stage": stage,
        "loss": sum(value for _, found in statistics for value in found.loss.values()) / updates
        if statistics
        else None,
    }
    by_domain: dict[str, list[np.ndarray]] = {}
    ids, by_id = list[np.ndarray](), list[np.ndarray]()
    for batch, found in statistics:
        for rollout, values in zip(
            batch.rollouts, np.split(found.reverse_kl, np.cumsum(batch.response_lengths)[:-1]), strict=True
        ):
            by_domain.setdefault(rollout.domain, []).append(values)
            ids.append(rollout.response_ids)
            by_id.append(values)
    joined = {domain: np.concatenate(parts) for domain, parts in sorted(by_domain.items())}
    divergences = _joined(list(joined.values()))
    metrics["reverse_kl"] = _mean(divergences)
    metrics["entropy"] = _mean(_joined([found.entropy for _, found in statistics]))
    if metrics["entropy"] is None and sampled:  # no term compared whole distributions: estimate it
        metrics["entropy_sampled"] = _mean(
            np.concatenate([-rollout.logprob[rollout.author == Author.STUDENT] for rollout in sampled])
        )
    metrics["tokens"] = int(lengths.sum())
    metrics["response_length"] = float(lengths.mean())
    metrics["truncated"] = float(np.mean([rollout.stop == "length" for rollout in rollouts]))
    metrics["mismatch"] = _mean(_joined([found.mismatch for _, found in statistics]))
    own = {rollout.id for rollout in rollouts if (rollout.author == Author.STUDENT).any()}
    given = [reward for name, reward in rewards.items() if reward is not None and name in own]
    metrics["reward"] = float(np.mean(given)) if given else None
    if rewards:
        metrics["unrewarded"] = sum(reward is None for reward in rewards.values()) / len(rewards)
    metrics |= {f"kl/{domain}": _mean(values) for domain, values in joined.items()}
    metrics |= calibration_error(rollouts, rewards)
    metrics |= spread_metrics(divergences, _joined([found.mismatch for _, found in statistics]), sampled)
    metrics |= dominance(_joined(ids), _joined(by_id))
    metrics |= _shares([found.counts for _, found in statistics])
    metrics |= dict(extra)
    metrics |= {f"time/{phase}": round(value, 4) for phase, value in seconds.items()}
    return metrics


def spread_metrics(divergences: np.ndarray, mismatch: np.ndarray, sampled: Sequence[Rollout]) -> dict[str, float]:
    """What a mean hides: a few tokens with most of the KL, ratios far from 1, and answers that are all alike."""
    found: dict[str, float] = {}
    sizes = np.abs(divergences[~np.isnan(divergences)])
    if sizes.size >= FEWEST and sizes.sum() > 0:
        few = -(-sizes.size // 100)
        found["kl_top"] = float(np.partition(sizes, sizes.size - few)[-few:].sum() / sizes.sum())
        found["kl_largest"] = float(sizes.max())
    known = mismatch[~np.isnan(mismatch)]
    if known.size:
        found["mismatch_outside"] = float(np.mean(known > np.log(2)))
    pairs = [ids[:-1] << 32 | ids[1:] for rollout in sampled if (ids := rollout.response_ids.astype(np.int64)).size > 1]
    if pairs:
        every = np.concatenate(pairs)[:PAIRS]
        found["distinct"] = np.unique(every).size / every.size
    return found


def dominance(ids: np.ndarray, divergences: np.ndarray) -> dict[str, float]:
    """The largest difference between a token's share of the KL and its share of the text."""
    known = ~np.isnan(divergences)
    sizes = np.abs(divergences[known])
    if sizes.size < FEWEST or not sizes.sum() > 0:
        return {}
    which = np.unique(ids[known], return_inverse=True)[1]
    held, seen = np.bincount(which, weights=sizes) / sizes.sum(), np.bincount(which) / sizes.size
    return {"kl_one": float((held - seen).max())}


def calibration_error(rollouts: Sequence[Rollout], rewards: Mapping[str, float | None]) -> dict[str, float]:
    """How far the student's confidence in its answers is from how often they are right, over tenths of confidence."""
    own = [rollout for rollout in rollouts if rollout.logprob.size and (rollout.author == Author.STUDENT).all()]
    sure = [rollout for rollout in own if not np.isnan(rollout.logprob).any()]  # drawn under another prompt: unknown
    known = [(rollout, reward) for rollout in sure if (reward := rewards.get(rollout.id)) is not None]
    if len(known) < BINS:
        return {}
    confidence = np.array([float(np.exp(rollout.logprob.mean())) for rollout, _ in known])
    right = np.array([reward >= 1 for _, reward in known], dtype=float)
    bins = np.minimum((confidence * BINS).astype(int), BINS - 1)
    gaps = [abs((confidence - right)[bins == number].sum()) for number in range(BINS)]
    return {"ece": float(sum(gaps) / len(known))}


def _shares(counts: Sequence[Mapping[str, tuple[int, int]]]) -> dict[str, float]:
    """Shares of clipped and corrected tokens, over all micro-batches."""
    names = dict.fromkeys(name for found in counts for name in found)
    totals = {name: [sum(found.get(name, (0, 0))[side] for found in counts) for side in (0, 1)] for name in names}
    return {name: changed / max(every, 1) for name, (changed, every) in totals.items()}


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Join arrays. A step that only scores has none."""
    return np.concatenate(parts) if parts else np.zeros(0)


def _mean(values: np.ndarray) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else None


# --- Which completions of a step are written down: `log.samples` ---


def sampled_ids(log: Log, batch: Batch, step: int) -> frozenset[str]:
    """A few per domain of the rollouts that a step trains on, the newest first. Empty in most steps."""
    if not log.samples or (step - 1) % log.samples_every:
        return frozenset()
    domains = {rollout.id: rollout.domain for rollout in batch.rollouts}
    newest = [(name, domains[name]) for name in reversed(batch.written.ids) if name in domains]
    return frozenset(few_per_domain(newest, log.samples))


def few_per_domain(items: Iterable[tuple[str, str]], count: int) -> list[str]:
    """The first ids of every domain, in order. `items`: (id, domain)."""
    seen: Counter[str] = Counter()
    kept = []
    for name, domain in items:
        if seen[domain] < count:
            seen[domain] += 1
            kept.append(name)
    return kept


def traces_of(statistics: Sequence[tuple[Pack, TokenStatistics]]) -> dict[str, Trace]:
    """Token-by-token traces of the rollouts that the batch asked for, as of the first update."""
    return {name: trace for _, found in reversed(statistics) for name, trace in found.traces.items()}


# --- The result of a step ---


@dataclass(repr=False)
class StepResult:
    """The result of a step: `result.loss`, and all metrics as `result.metrics`, with the names of metrics.jsonl."""

    measured: dict[str, float]  # values from gates and other parts of terms
    statistics: list[tuple[Pack, TokenStatistics]] = field(default_factory=list)  # of every micro-batch
    norms: list[float] = field(default_factory=list)  # gradient norm of each update
    rate: float = 0.0
    step: int = 0

    @cached_property
    def metrics(self) -> dict[str, Any]:
        rollouts = list({rollout.id: rollout for pack, _ in self.statistics for rollout in pack.rollouts}.values())
        if not rollouts:
            return dict(self.measured)
        extra = {"lr": self.rate, "grad_norm": max(self.norms), **self.measured}
        found = step_metrics("", self.step, rollouts, self.statistics, {}, {}, extra, updates=len(self.norms))
        return {name: value for name, value in found.items() if name != "stage" and value is not None}

    @property
    def loss(self) -> float:
        """The loss of the batch: the mean over updates, if there were several."""
        return float(self.metrics.get("loss", 0.0))

    def __repr__(self) -> str:
        shown = {name: self.metrics[name] for name in ("loss", "reverse_kl", "grad_norm", "lr") if name in self.metrics}
        return f"StepResult(step={self.step}, {', '.join(f'{name}={value:.4g}' for name, value in shown.items())})"
