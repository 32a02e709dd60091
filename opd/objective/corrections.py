"""Train/inference mismatch: weights from the ratio rho = trainer / sampler of each sampled token, all detached.

A policy-gradient token is weighed by its own ratio, or by its sequence's. A direct loss at position t depends only on
the prefix, so it is weighed by the truncated ratio of the prefix; the token's own ratio would correct nothing.

Axis legend: N = tokens; `segment_N` is the number of each token's rollout, in order.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from opd.registry import Choice, Family

if TYPE_CHECKING:
    from torch import Tensor


Kind = Literal["icepop", "tis", "mis", "none"]
Level = Literal["token", "sequence", "geometric"]
LOG_LIMIT = 20.0  # a ratio above e^20 is numerical noise


class Correction(Choice):
    """Corrects for the gap between the trainer's log-probs and the sampler's (including stale weights)."""

    family = "correction"
    weighs_by: ClassVar[Literal["token", "prefix", "nothing"]] = "token"  # which ratio is the weight
    veto: float | None = Field(
        None, gt=0, lt=1, description="drop the whole rollout if one token's ratio is below this"
    )

    @abstractmethod
    def weight(self, log_ratio_N: Tensor, segment_N: Tensor) -> Tensor:
        """(N,) w(rho), detached."""
        raise NotImplementedError

    def altered(self, weight_N: Tensor) -> Tensor:
        """(N,) bool: tokens that are masked or truncated, for the metrics."""
        return weight_N == 0

    def apply(self, log_ratio_N: Tensor, segment_N: Tensor, *, included: bool = False) -> tuple[Tensor, Tensor]:
        """(weights, where they mask or truncate). Masked tokens stay in the denominator.

        `included`: the surrogate already multiplies by rho, so the remaining weight is w(rho) / rho.
        """
        weight = self.weight(log_ratio_N, segment_N)
        altered = self.altered(weight)
        if included and self.weighs_by == "token":
            weight = weight * (-log_ratio_N.detach().clamp(-LOG_LIMIT, LOG_LIMIT)).exp()
        if self.veto is not None:
            veto = veto_weight(log_ratio_N, segment_N, self.veto)
            weight, altered = weight * veto, altered | (veto == 0)
        return weight, altered


AnyCorrection = Annotated[Correction, Family("correction")]


class IcePop(Correction):
    """rho inside [low, high], 0 outside: the token is masked."""

    name = "icepop"
    low: float = Field(0.5, ge=0, description="icepop, mis: ratios below it are masked")
    high: float = Field(2.0, gt=0, description="icepop, mis: ratios above it are masked; tis, prefix: cut off here")

    @model_validator(mode="after")
    def _ordered(self) -> IcePop:
        if self.low > self.high:
            raise ValueError(f"`low` ({self.low:g}) must not be above `high` ({self.high:g})")
        return self

    def weight(self, log_ratio_N: Tensor, segment_N: Tensor) -> Tensor:
        return correction_weight("icepop", log_ratio_N, segment_N, low=self.low, high=self.high)


class MIS(IcePop):
    """IcePop's rule on the ratio of the token, of the sequence (product), or its geometric mean."""

    name = "mis"
    level: Level = Field("token", description="of tis and mis: which ratio is compared")

    def weight(self, log_ratio_N: Tensor, segment_N: Tensor) -> Tensor:
        return correction_weight("mis", log_ratio_N, segment_N, low=self.low, high=self.high, level=self.level)


class TIS(Correction):
    """min(rho, high): truncated importance sampling; biased, never 0."""

    name = "tis"
    level: Level = Field("token", description="of tis and mis: which ratio is compared")
    high: float = Field(2.0, gt=0, description="icepop, mis: ratios above it are masked; tis, prefix: cut off here")

    @model_validator(mode="after")
    def _no_mean(self) -> TIS:
        if self.level == "geometric":
            raise ValueError("level: geometric is for rejecting rollouts, not for weighting tokens: use kind: mis")
        return self

    def weight(self, log_ratio_N: Tensor, segment_N: Tensor) -> Tensor:
        return correction_weight("tis", log_ratio_N, segment_N, high=self.high, level=self.level)

    def altered(self, weight_N: Tensor) -> Tensor:
        return weight_N >= self.high


class Prefix(Correction):
    """min(product of rho over the tokens before this one, high): the off-policy correction of a direct loss."""

    name = "prefix"
    weighs_by = "prefix"
    high: float = Field(2.0, gt=0, description="icepop, mis: ratios above it are masked; tis, prefix: cut off here")

    def weight(self, log_ratio_N: Tensor, segment_N: Tensor) -> Tensor:
        return prefix_weight(log_ratio_N, segment_N, self.high)

    def altered(self, weight_N: Tensor) -> Tensor:
        return weight_N >= self.high


class VetoOnly(Correction):
    """No weight, only the veto."""

    name = "none"
    weighs_by = "nothing"

    @model_validator(mode="after")
    def _something(self) -> VetoOnly:
        if self.veto is None:
            raise ValueError(
                "kind none without a veto corrects nothing: set `veto`, or choose icepop, tis, mis or prefix"
            )
        return self

    def weight(self, log_ratio_N: Tensor, segment_N: Tensor) -> Tensor:
        return correction_weight("none", log_ratio_N, segment_N)


# --- The arithmetic of corrections ---


def correction_weight(
    kind: Kind,
    log_ratio_N: Tensor,
    segment_N: Tensor,
    *,
    low: float = 0.5,
    high: float = 2.0,
    level: Level = "token",
) -> Tensor:
    """(N,) weights w(rho) of the tokens' policy gradient.

    tis      min(rho, high): truncated importance sampling; biased, never 0
    icepop   rho inside [low, high], 0 outside: the token is masked
    mis      the same rule on the ratio of `level`: token, sequence (product), geometric (mean)
    """
    import torch

    log_ratio_N = log_ratio_N.detach()
    ratio_N = log_ratio_N.clamp(-LOG_LIMIT, LOG_LIMIT).exp()
    if kind == "none":
        return torch.ones_like(ratio_N)
    compared_N = ratio_N if level == "token" else _sequence_ratio(log_ratio_N, segment_N, mean=level == "geometric")
    if kind == "tis":
        return compared_N.clamp(max=high)
    inside_N = (compared_N >= low) & (compared_N <= high)
    return inside_N * (compared_N if level == "sequence" else ratio_N)


def prefix_weight(log_ratio_N: Tensor, segment_N: Tensor, high: float) -> Tensor:
    """(N,) min(product of rho over the tokens before this one, high): the off-policy correction of a direct loss."""
    before_N = _cumulative(log_ratio_N.detach(), segment_N) - log_ratio_N.detach()
    return before_N.clamp(-LOG_LIMIT, LOG_LIMIT).exp().clamp(max=high)


def veto_weight(log_ratio_N: Tensor, segment_N: Tensor, veto: float) -> Tensor:
    """(N,) 0 for every token of a rollout with any token's ratio below `veto`, else 1."""
    bad_N = (log_ratio_N.detach() < math.log(veto)).to(log_ratio_N.dtype)
    return (segment_sum(bad_N, segment_N) == 0).to(log_ratio_N.dtype)[segment_N]


def segment_sum(values_N: Tensor, segment_N: Tensor) -> Tensor:
    import torch

    count = int(segment_N[-1]) + 1 if segment_N.numel() else 0
    return torch.zeros(count, dtype=values_N.dtype, device=values_N.device).index_add(0, segment_N, values_N)


def segment_mean(values_N: Tensor, segment_N: Tensor) -> Tensor:
    import torch

    return segment_sum(values_N, segment_N) / segment_sum(torch.ones_like(values_N), segment_N).clamp(min=1)


def _sequence_ratio(log_ratio_N: Tensor, segment_N: Tensor, mean: bool) -> Tensor:
    per_segment = (segment_mean if mean else segment_sum)(log_ratio_N, segment_N)
    return per_segment.clamp(-LOG_LIMIT, LOG_LIMIT).exp()[segment_N]


def _cumulative(values_N: Tensor, segment_N: Tensor) -> Tensor:
    """Running sums that restart with every segment."""
    totals = segment_sum(values_N.double(), segment_N)
    before = totals.cumsum(0) - totals
    return (values_N.double().cumsum(0) - before[segment_N]).to(values_N.dtype)
