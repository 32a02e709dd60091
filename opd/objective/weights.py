"""The one place that masks and divides.

Each token of the whole batch gets a weight, before the batch is cut into micro-batches; a term's loss is then a plain
weighted sum, and no way of cutting, padding or packing can change it. The denominators are global sums, so several
processes only have to all-reduce them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

import numpy as np

Aggregate = Literal["token_mean", "sequence_mean", "prompt_mean", "constant"]


def token_weights(
    masks: Sequence[np.ndarray], groups: Sequence[str], aggregate: Aggregate, denominator: float = 1.0
) -> list[np.ndarray]:
    """Weight of every token of every rollout. `masks` (T,) per rollout: bool, or the part of one that a token counts for; `groups`
    names each rollout's prompt.

    token_mean      every token counts alike
    sequence_mean   every rollout counts alike, tokens alike within it
    prompt_mean     every prompt counts alike, tokens alike within its rollouts
    constant        the sum over tokens, divided by a constant

    Where several tokens are one event (`CrossedTerm`), they count for parts of 1, and these are means over events.

    >>> [w.tolist() for w in token_weights([np.ones(1, bool), np.ones(3, bool)], ["a", "b"], "token_mean")]
    [[0.25], [0.25, 0.25, 0.25]]
    """
    counts = np.array([mask.sum() for mask in masks], dtype=np.float64)
    if aggregate == "token_mean":
        per_token = np.full(len(masks), 1.0 / (counts.sum() or 1.0))
    elif aggregate == "sequence_mean":
        per_token = 1.0 / np.where(counts > 0, counts, 1.0) / max((counts > 0).sum(), 1)
    elif aggregate == "prompt_mean":
        names, member = np.unique(np.asarray(groups), return_inverse=True)
        totals = np.bincount(member, weights=counts, minlength=len(names))
        per_token = 1.0 / np.where(totals > 0, totals, 1.0)[member] / max((totals > 0).sum(), 1)
    else:
        per_token = np.full(len(masks), 1.0 / denominator)
    return [(mask * weight).astype(np.float32) for mask, weight in zip(masks, per_token, strict=True)]


def pair_weights(
    groups: Sequence[str], aggregate: Literal["pair_mean", "prompt_mean", "constant"], denominator: float = 1.0
) -> list[float]:
    """Weight of every pair of answers; `groups` names each pair's prompt.

    pair_mean       every pair counts alike
    prompt_mean     every prompt counts alike, pairs alike within it
    constant        the sum over pairs, divided by a constant

    >>> pair_weights(["a", "b", "b"], "prompt_mean")
    [0.5, 0.25, 0.25]
    """
    if aggregate == "constant":
        return [1.0 / denominator] * len(groups)
    if aggregate == "pair_mean":
        return [1.0 / len(groups) for _ in groups]
    counts = Counter(groups)
    return [1.0 / len(counts) / counts[group] for group in groups]
