"""Surrogates: how the advantage meets the ratio of the policy being trained to the one that sampled.

The advantage is detached; the gradient flows through the current log-prob alone. Three policies have names:
`behaviour` (the sampler's log-probs), `proximal` (the trainer's at the start of this batch's updates), `current`.
Every ratio says which.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from opd.objective.corrections import LOG_LIMIT, segment_mean
from opd.settings import Choice, Family

if TYPE_CHECKING:
    from torch import Tensor


class Surrogate(Choice):
    family = "surrogate"
    multiplies_by_ratio: ClassVar[bool] = True  # by the token's own ratio itself, so a correction can go on from there
    whole_rollouts: ClassVar[bool] = False  # goes by the ratio of all of a rollout's tokens, gated or not
    against: Literal["behaviour", "proximal"] = Field(
        "behaviour", description="denominator of the ratio; proximal: the trainer at the start of this batch's updates"
    )

    def losses(self, current: Tensor, old: Tensor, advantage: Tensor, segment: Tensor) -> tuple[Tensor, Tensor | None]:
        """(N,) losses, and where a clip acts (None: it never clips). `old` is the ratio's denominator, detached."""
        raise NotImplementedError


AnySurrogate = Annotated[Surrogate, Family("surrogate", default="importance_sampling")]


class ImportanceSampling(Surrogate):
    """Unclipped, exactly unbiased for tokens drawn from `behaviour`."""

    name = "importance_sampling"
    by_default = True

    def losses(self, current: Tensor, old: Tensor, advantage: Tensor, segment: Tensor) -> tuple[Tensor, Tensor | None]:
        return importance_sampling(current, old, advantage), None


class ClippedSurrogate(Surrogate):
    low: float = Field(0.2, ge=0, le=1, description="ratios below 1 - low are clipped (ppo, cispo, gspo)")
    high: float = Field(0.2, ge=0, description="ratios above 1 + high are clipped")


class PPO(ClippedSurrogate):
    name = "ppo"
    dual: float | None = Field(
        None, gt=1, description="dual clip of ppo: the loss of a negative advantage is at most this times |A|"
    )

    def losses(self, current: Tensor, old: Tensor, advantage: Tensor, segment: Tensor) -> tuple[Tensor, Tensor | None]:
        clipped = cut_off(_log_ratio(current, old).exp(), advantage, self.low, self.high, self.dual)
        return ppo(current, old, advantage, self.low, self.high, self.dual), clipped


class CISPO(ClippedSurrogate):
    name = "cispo"
    multiplies_by_ratio = False

    def losses(self, current: Tensor, old: Tensor, advantage: Tensor, segment: Tensor) -> tuple[Tensor, Tensor | None]:
        ratio = _log_ratio(current, old).exp()
        clipped = (ratio - 1 > self.high) | (1 - ratio > self.low)
        return cispo(current, old, advantage, self.low, self.high), clipped


class GSPO(ClippedSurrogate):
    name = "gspo"
    multiplies_by_ratio = False
    whole_rollouts = True

    def losses(self, current: Tensor, old: Tensor, advantage: Tensor, segment: Tensor) -> tuple[Tensor, Tensor | None]:
        ratio = segment_mean(_log_ratio(current, old), segment).exp()[segment]
        clipped = cut_off(ratio, advantage, self.low, self.high)
        return gspo(current, old, advantage, segment, self.low, self.high), clipped


def _log_ratio(current: Tensor, old: Tensor) -> Tensor:
    return (current - old).detach().clamp(-LOG_LIMIT, LOG_LIMIT)


# The arithmetic: (N,) losses


def importance_sampling(current: Tensor, behaviour: Tensor, advantage: Tensor) -> Tensor:
    """(N,) losses `-(current / behaviour)(y) * A`: unclipped, exactly unbiased for tokens drawn from `behaviour`."""
    return -(current - behaviour.detach()).exp() * advantage.detach()


def ppo(current: Tensor, old: Tensor, advantage: Tensor, low: float, high: float, dual: float | None = None) -> Tensor:
    """max(-r A, -clip(r, 1 - low, 1 + high) A). With `dual`, the loss of a negative advantage is at most dual * |A|.

    In OPD most advantages are negative, so the lower clip and the dual one are those that act.
    """
    import torch

    ratio, advantage = _ratio(current, old), advantage.detach()
    losses = torch.maximum(-ratio * advantage, -ratio.clamp(1 - low, 1 + high) * advantage)
    if dual is None:
        return losses
    return torch.where(advantage < 0, torch.minimum(losses, -dual * advantage), losses)


def cispo(current: Tensor, old: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    """-sg(clip(r)) A log current: the weight is clipped, the gradient never vanishes."""
    return -_ratio(current, old).detach().clamp(1 - low, 1 + high) * advantage.detach() * current


def gspo(current: Tensor, old: Tensor, advantage: Tensor, segment: Tensor, low: float, high: float) -> Tensor:
    """PPO's clip on the ratio of the whole sequence, exp(mean of log r), which every token of it shares.

    Written straight-through, so that each token's gradient is that of its own log-prob under the sequence's ratio.
    """
    import torch

    mean = segment_mean((current - old.detach()).detach(), segment).clamp(-LOG_LIMIT, LOG_LIMIT)
    ratio = mean.exp()[segment] * (current - current.detach()).exp()
    return torch.maximum(-ratio * advantage.detach(), -ratio.clamp(1 - low, 1 + high) * advantage.detach())


def cut_off(ratio: Tensor, advantage: Tensor, low: float, high: float, dual: float | None = None) -> Tensor:
    """(N,) bool: tokens whose gradient a clip cuts off, for ratios of tokens (ppo) or of sequences (gspo)."""
    outside = ((ratio > 1 + high) & (advantage > 0)) | ((ratio < 1 - low) & (advantage < 0))
    return outside if dual is None else outside | ((ratio > dual) & (advantage < 0))


def _ratio(current: Tensor, old: Tensor) -> Tensor:
    return (current - old.detach()).clamp(-LOG_LIMIT, LOG_LIMIT).exp()
