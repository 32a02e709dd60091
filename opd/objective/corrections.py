"""Train/inference mismatch: weights from the ratio rho = trainer / sampler of each sampled token, all detached.

A policy-gradient token is weighed by its own ratio, or by its sequence's. A direct loss at position t depends on the
prefix alone, so there it is the ratio of the prefix, truncated; a token's own ratio would correct nothing.

Axis legend: N = tokens; `segment_N` numbers the rollout each belongs to, in order.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

CorrectionKind = Literal["icepop", "tis", "mis", "none"]
Level = Literal["token", "sequence", "geometric"]
LOG_LIMIT = 20.0  # beyond e^20 a ratio is numerical debris


def correction_weight(
    kind: CorrectionKind, log_ratio_N: Tensor, segment_N: Tensor, *, low: float = 0.5, high: float = 2.0,
    level: Level = "token",
) -> Tensor:  # fmt: skip
    """(N,) the weight w(rho) a token's policy gradient gets.

    tis      min(rho, high): truncated importance sampling; biased, and never 0
    icepop   rho inside [low, high], 0 outside: the token is masked
    mis      the same rule, rejecting by the ratio of `level`: token, sequence (product), geometric (mean)
    """
    log_ratio_N = log_ratio_N.detach()
    ratio_N = log_ratio_N.clamp(-LOG_LIMIT, LOG_LIMIT).exp()
    if kind == "none":
        return torch.ones_like(ratio_N)
    judged_N = ratio_N if level == "token" else _sequence_ratio(log_ratio_N, segment_N, mean=level == "geometric")
    if kind == "tis":
        return judged_N.clamp(max=high)
    inside_N = (judged_N >= low) & (judged_N <= high)
    return inside_N * (judged_N if level == "sequence" else ratio_N)


def prefix_weight(log_ratio_N: Tensor, segment_N: Tensor, high: float) -> Tensor:
    """(N,) min(product of rho over the tokens before this one, high): the off-policy correction of a direct loss."""
    before_N = _cumulative(log_ratio_N.detach(), segment_N) - log_ratio_N.detach()
    return before_N.clamp(-LOG_LIMIT, LOG_LIMIT).exp().clamp(max=high)


def veto_weight(log_ratio_N: Tensor, segment_N: Tensor, veto: float) -> Tensor:
    """(N,) 0 for every token of a rollout in which one token's ratio is below `veto`, else 1."""
    bad_N = (log_ratio_N.detach() < math.log(veto)).to(log_ratio_N.dtype)
    return (segment_sum(bad_N, segment_N) == 0).to(log_ratio_N.dtype)[segment_N]


def segment_sum(values_N: Tensor, segment_N: Tensor) -> Tensor:
    count = int(segment_N[-1]) + 1 if segment_N.numel() else 0
    return torch.zeros(count, dtype=values_N.dtype, device=values_N.device).index_add(0, segment_N, values_N)


def segment_mean(values_N: Tensor, segment_N: Tensor) -> Tensor:
    return segment_sum(values_N, segment_N) / segment_sum(torch.ones_like(values_N), segment_N).clamp(min=1)


def _sequence_ratio(log_ratio_N: Tensor, segment_N: Tensor, mean: bool) -> Tensor:
    per_segment = (segment_mean if mean else segment_sum)(log_ratio_N, segment_N)
    return per_segment.clamp(-LOG_LIMIT, LOG_LIMIT).exp()[segment_N]


def _cumulative(values_N: Tensor, segment_N: Tensor) -> Tensor:
    """Running sums that start anew with every segment."""
    totals = segment_sum(values_N.double(), segment_N)
    before = totals.cumsum(0) - totals
    return (values_N.double().cumsum(0) - before[segment_N]).to(values_N.dtype)
