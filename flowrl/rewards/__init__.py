"""Reward models that are not tied to a world."""

from flowrl.rewards.function import FunctionReward

__all__ = ["FunctionReward"]
