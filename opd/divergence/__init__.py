"""Divergences between a student and a teacher from hidden states and heads: usable alone (torch only)."""

from opd.divergence.compute import Divergence, divergence, statistics, token_logprobs
from opd.divergence.mixture import Mixture
from opd.divergence.projection import Projection
from opd.divergence.rows import RowStatistics
from opd.divergence.sampled import divergence_advantage, teacher_log_ratio
from opd.types import TopK

__all__ = [
    "Divergence",
    "Mixture",
    "Projection",
    "RowStatistics",
    "TopK",
    "divergence",
    "divergence_advantage",
    "statistics",
    "teacher_log_ratio",
    "token_logprobs",
]
