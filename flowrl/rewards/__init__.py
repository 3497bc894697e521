"""Reward models that are not tied to a world."""

from flowrl.rewards.combine import WeightedSum
from flowrl.rewards.function import FunctionReward

__all__ = ["FunctionReward", "WeightedSum"]
