"""Reward models that are not tied to a world."""

from flowrl.rewards.combine import WeightedSum
from flowrl.rewards.function import FunctionReward
from flowrl.rewards.noisy import NoisyReward

__all__ = ["FunctionReward", "NoisyReward", "WeightedSum"]
