"""Rewards for finished answers, and the workers they run in."""

from opd.rewards.check import check_rewards
from opd.rewards.reward import Reward
from opd.rewards.rewarder import Rewarder, verify
from opd.rewards.settings import Rewards

__all__ = ["Reward", "Rewarder", "Rewards", "check_rewards", "verify"]
