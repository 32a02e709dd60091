"""Rewards for finished answers, and the workers that run them."""

from opd.rewards.reward import Reward, Rewards
from opd.rewards.rewarder import Rewarder, check_rewards, verify

__all__ = ["Reward", "Rewarder", "Rewards", "check_rewards", "verify"]
