"""Policy gradients: the advantage is detached, the gradient flows through the current log-prob alone.

Three policies have names: `behaviour` (the sampler's log-probs), `proximal`, `current`. Every ratio says which.
"""

from __future__ import annotations

from torch import Tensor


def teacher_log_ratio(teacher: Tensor, behaviour: Tensor) -> Tensor:
    """Advantage of reverse KL on the sampled token: log T(y) - log behaviour(y). Zero where student and teacher agree."""
    return (teacher - behaviour).detach()


def importance_sampling(current: Tensor, behaviour: Tensor, advantage: Tensor) -> Tensor:
    """(N,) losses `-(current / behaviour)(y) * A`: unclipped, exactly unbiased for tokens drawn from `behaviour`."""
    return -(current - behaviour.detach()).exp() * advantage.detach()
