"""Gates: which tokens count, and how much. Factors per token, formed over the whole batch before it is cut up.

Each function returns one (T,) array per rollout: 0 closes a token, other numbers weigh it. All inputs are numpy;
entries that are not to be considered are NaN.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

Arrays = list[np.ndarray]


def top_share(values: Sequence[np.ndarray], masks: Sequence[np.ndarray], share: float) -> Arrays:
    """1 for the `share` of the batch's counted tokens with the largest values (ties by order), 0 for the rest.

    >>> [gate.tolist() for gate in top_share([np.array([3.0, 1.0]), np.array([2.0, 0.0])], [np.ones(2, bool)] * 2, 0.5)]
    [[1.0, 0.0], [1.0, 0.0]]
    """
    flat, counted = np.concatenate(values), np.concatenate(masks)
    rows = np.flatnonzero(counted)
    kept = rows[np.argsort(-flat[rows], kind="stable")[: round(share * rows.size)]]
    gate = np.zeros(flat.size)
    gate[kept] = 1.0
    return np.split(gate, np.cumsum([value.size for value in values])[:-1])


def soft_or(entropies: Sequence[np.ndarray], divergences: Sequence[np.ndarray], masks: Sequence[np.ndarray]) -> Arrays:
    """h + d - h d, both scaled to [0, 1] over the batch's counted tokens: unsure, or in disagreement, or both."""
    h, d = _scaled(entropies, masks), _scaled(divergences, masks)
    return [unsure + far - unsure * far for unsure, far in zip(h, d, strict=True)]


def _scaled(values: Sequence[np.ndarray], masks: Sequence[np.ndarray]) -> Arrays:
    counted = np.concatenate([value[mask] for value, mask in zip(values, masks, strict=True)])
    if not counted.size:
        return [np.zeros_like(value) for value in values]
    low, high = counted.min(), counted.max()
    return [(value - low) / max(high - low, 1e-12) for value in values]


def random_share(names: Sequence[str], lengths: Sequence[int], share: float, seed: int) -> Arrays:
    """Every token open with probability `share`, keyed by (seed, rollout): the same on every machine and after a restart."""
    return [
        (_uniforms(f"{seed}/{name}", length) < share).astype(np.float64)
        for name, length in zip(names, lengths, strict=True)
    ]


def speculative(
    names: Sequence[str], students: Sequence[np.ndarray], teachers: Sequence[np.ndarray], rejected: float, seed: int
) -> Arrays:
    """Accept the sampled token with probability min(1, T/S), as speculative decoding would; rejected ones weigh `rejected`."""
    found = []
    for name, student, teacher in zip(names, students, teachers, strict=True):
        accept = _uniforms(f"{seed}/{name}", student.size) < np.exp(np.minimum(teacher - student, 0.0))
        found.append(np.where(accept, 1.0, rejected))
    return found


def _uniforms(key: str, count: int) -> np.ndarray:
    entropy = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=16).digest(), "big")
    return np.random.Generator(np.random.Philox(entropy)).random(count)


def pass_rates(scores: Sequence[float | None], groups: Sequence[str], threshold: float) -> np.ndarray:
    """(B,) share of each rollout's group that passed, among those that could be judged; NaN where none could.

    >>> pass_rates([1.0, 0.0, None, 0.0], ["a", "a", "a", "b"], 0.5).tolist()
    [0.5, 0.5, 0.5, 0.0]
    """
    passed = np.array([np.nan if score is None else float(score >= threshold) for score in scores])
    found = np.full(passed.size, np.nan)
    for number in np.unique(groups):
        members = np.asarray(groups) == number
        known = passed[members & ~np.isnan(passed)]
        if known.size:
            found[members] = known.mean()
    return found


def perplexity_weights(
    mean_logprobs: np.ndarray, groups: Sequence[str], open_ones: np.ndarray, power: float
) -> np.ndarray:
    """(B,) perplexity^power among the open rollouts of each group, scaled to mean 1; 0 elsewhere.

    Perplexity is exp(-mean log-prob). A power of 1/tau favours rollouts the model finds unlikely, -1/tau those it is
    sure of. A group of one weighs 1.

    >>> perplexity_weights(np.log([0.5, 0.25]), ["a", "a"], np.ones(2, bool), 1.0).round(3).tolist()
    [0.667, 1.333]
    """
    found = np.zeros(mean_logprobs.size)
    for name in np.unique(groups):
        members = np.flatnonzero((np.asarray(groups) == name) & open_ones)
        if members.size:
            logits = -power * mean_logprobs[members]
            weights = np.exp(logits - logits.max())
            found[members] = weights / weights.mean()
    return found


def turn_weights(gap_T: np.ndarray, turns: Sequence[tuple[int, int]], delta: float, eps: float) -> np.ndarray:
    """SOD: every token of turn k weighs min((d_1 + eps) / (d_k + eps), 1 + delta), d = mean |log student - log teacher|.

    >>> turn_weights(np.array([0.1, 0.1, 0.4, 0.05]), [(0, 2), (2, 3), (3, 4)], 0.2, 1e-9).round(3).tolist()
    [1.0, 1.0, 0.25, 1.2]
    """
    found = np.ones(gap_T.size)
    means = [gap_T[start:end].mean() for start, end in turns]
    for (start, end), mean in zip(turns, means, strict=True):
        found[start:end] = min((means[0] + eps) / (mean + eps), 1 + delta)
    return found


def runs(mask_T: np.ndarray) -> list[tuple[int, int]]:
    """Stretches of True: the turns of a response that does not list them.

    >>> runs(np.array([1, 1, 0, 1], dtype=bool))
    [(0, 2), (3, 4)]
    """
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask_T, [False]]).astype(int)))
    return [(int(start), int(end)) for start, end in zip(edges[::2], edges[1::2], strict=True)]
