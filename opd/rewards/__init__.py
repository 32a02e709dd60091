"""Verdicts on finished answers: rewards, the workers they run in, and a sandbox for code the model wrote."""

from opd.rewards.judge import Judge, verify

__all__ = ["Judge", "verify"]
