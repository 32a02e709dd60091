"""Policy gradients: the advantage is detached, the gradient flows through the current log-prob alone.

Three policies have names: `behaviour` (the sampler's log-probs), `proximal`, `current`. Every ratio says which.
"""

from __future__ import annotations

import torch
from torch import Tensor

from opd.objective.corrections import LOG_LIMIT, segment_mean


def importance_sampling(current: Tensor, behaviour: Tensor, advantage: Tensor) -> Tensor:
    """(N,) losses `-(current / behaviour)(y) * A`: unclipped, exactly unbiased for tokens drawn from `behaviour`."""
    return -(current - behaviour.detach()).exp() * advantage.detach()


# Surrogates: (N,) losses. `old` is the denominator of the ratio, behaviour or proximal, detached.


def ppo(current: Tensor, old: Tensor, advantage: Tensor, low: float, high: float, dual: float | None = None) -> Tensor:
    """max(-r A, -clip(r, 1 - low, 1 + high) A). With `dual`, the loss of a negative advantage is at most dual * |A|.

    In OPD most advantages are negative, so the lower clip and the dual one are those that act.
    """
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
    mean = segment_mean((current - old.detach()).detach(), segment).clamp(-LOG_LIMIT, LOG_LIMIT)
    ratio = mean.exp()[segment] * (current - current.detach()).exp()
    return torch.maximum(-ratio * advantage.detach(), -ratio.clamp(1 - low, 1 + high) * advantage.detach())


def k2(current: Tensor, teacher: Tensor) -> Tensor:
    """(log current - log teacher)^2 / 2, differentiated directly: on samples of `current`, reverse KL's gradient (KDRL)."""
    return 0.5 * (current - teacher.detach()) ** 2


def cut_off(ratio: Tensor, advantage: Tensor, low: float, high: float, dual: float | None = None) -> Tensor:
    """(N,) bool: tokens whose gradient a clip cuts off, for ratios that are those of tokens (ppo) or sequences (gspo)."""
    found = ((ratio > 1 + high) & (advantage > 0)) | ((ratio < 1 - low) & (advantage < 0))
    return found if dual is None else found | ((ratio > dual) & (advantage < 0))


def _ratio(current: Tensor, old: Tensor) -> Tensor:
    return (current - old.detach()).clamp(-LOG_LIMIT, LOG_LIMIT).exp()
