"""Verdicts on finished answers: rewards, and the workers they run in."""

from opd.rewards.check import check_rewards
from opd.rewards.judge import Judge, verify

__all__ = ["Judge", "check_rewards", "verify"]
