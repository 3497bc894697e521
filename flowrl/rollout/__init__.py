"""Sampling trajectories and scoring unfinished states, batched, with every network call counted."""

from flowrl.rollout.rollout import Groups, Rollout, attach_stds, integrate, rollout
from flowrl.rollout.table import reward_table, score
from flowrl.rollout.usage import Usage

__all__ = ["Groups", "Rollout", "Usage", "attach_stds", "integrate", "reward_table", "rollout", "score"]
