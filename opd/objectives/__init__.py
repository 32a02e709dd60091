"""The mathematics: divergences, policy gradients and aggregation, usable alone (torch only)."""

from opd.objectives.divergence import Divergence, divergence, token_logprobs
from opd.objectives.projection import Projection

__all__ = ["Divergence", "Projection", "divergence", "token_logprobs"]
