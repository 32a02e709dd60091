"""Verdicts on finished answers."""

from opd.rewards.verify import verify

__all__ = ["verify"]
