"""The old name of `opd.divergence.projection`."""

from opd.divergence.projection import MergeGroups, Projection, log_probs

__all__ = ["MergeGroups", "Projection", "log_probs"]
