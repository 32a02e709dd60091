"""The mathematics: divergences, policy gradients and aggregation, usable alone (torch only)."""

from opd.objectives.aggregation import token_weights
from opd.objectives.divergences import Divergence, divergence, token_logprobs
from opd.objectives.policy_gradient import divergence_advantage, importance_sampling, teacher_log_ratio
from opd.objectives.projection import Projection

__all__ = [
    "Divergence",
    "Projection",
    "divergence",
    "divergence_advantage",
    "importance_sampling",
    "teacher_log_ratio",
    "token_logprobs",
    "token_weights",
]
