"""Divergences between a student and a teacher from hidden states and heads; usable as a library of its own.

Names are imported on first use, so that recipes can read `opd.divergences.kinds` without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opd.divergences.compute import Divergence, divergence, likeliest_ids, statistics, token_logprobs
    from opd.divergences.kinds import divergence_advantage, teacher_log_ratio
    from opd.divergences.projection import Mixture, Projection
    from opd.divergences.torch_backend import RowStatistics
    from opd.records import TopK

HOMES = {
    "Divergence": "opd.divergences.compute",
    "divergence": "opd.divergences.compute",
    "likeliest_ids": "opd.divergences.compute",
    "statistics": "opd.divergences.compute",
    "token_logprobs": "opd.divergences.compute",
    "Mixture": "opd.divergences.projection",
    "Projection": "opd.divergences.projection",
    "RowStatistics": "opd.divergences.torch_backend",
    "divergence_advantage": "opd.divergences.kinds",
    "teacher_log_ratio": "opd.divergences.kinds",
    "TopK": "opd.records",
}


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(HOMES[name]), name)
    return found


__all__ = [
    "Divergence",
    "Mixture",
    "Projection",
    "RowStatistics",
    "TopK",
    "divergence",
    "divergence_advantage",
    "likeliest_ids",
    "statistics",
    "teacher_log_ratio",
    "token_logprobs",
]
