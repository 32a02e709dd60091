"""The mathematics: divergences, policy gradients and aggregation, usable alone (torch only)."""

from opd.objectives.aggregation import token_weights
from opd.objectives.divergences import Divergence, divergence, statistics, token_logprobs
from opd.objectives.mixture import Mixture
from opd.objectives.policy_gradient import divergence_advantage, importance_sampling, teacher_log_ratio
from opd.objectives.projection import Projection
from opd.objectives.rows import RowStatistics
from opd.types import TopK

__all__ = [
    "Divergence",
    "Mixture",
    "Projection",
    "RowStatistics",
    "TopK",
    "divergence",
    "divergence_advantage",
    "importance_sampling",
    "statistics",
    "teacher_log_ratio",
    "token_logprobs",
    "token_weights",
]
