"""The old name of `opd.divergence`."""

from opd.divergence import (
    Divergence,
    Mixture,
    Projection,
    RowStatistics,
    TopK,
    divergence,
    divergence_advantage,
    statistics,
    teacher_log_ratio,
    token_logprobs,
)
from opd.objective.surrogates import importance_sampling
from opd.objective.weights import token_weights

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
