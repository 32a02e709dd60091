"""Divergences between a student and a teacher from hidden states and heads: usable alone.

Names are imported when they are first used: the recipe reads `opd.divergence.kinds` without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opd.divergence.compute import Divergence, divergence, statistics, token_logprobs
    from opd.divergence.mixture import Mixture
    from opd.divergence.projection import Projection
    from opd.divergence.rows import RowStatistics
    from opd.divergence.sampled import divergence_advantage, teacher_log_ratio
    from opd.types import TopK

HOMES = {
    "Divergence": "opd.divergence.compute",
    "divergence": "opd.divergence.compute",
    "statistics": "opd.divergence.compute",
    "token_logprobs": "opd.divergence.compute",
    "Mixture": "opd.divergence.mixture",
    "Projection": "opd.divergence.projection",
    "RowStatistics": "opd.divergence.rows",
    "divergence_advantage": "opd.divergence.sampled",
    "teacher_log_ratio": "opd.divergence.sampled",
    "TopK": "opd.types",
}


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(HOMES[name]), name)


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
