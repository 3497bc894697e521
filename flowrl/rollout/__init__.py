"""Sampling trajectories and scoring unfinished states, batched, with every network call counted."""

from flowrl.rollout.rollout import Groups, Rollout, attach_stds, integrate, rollout
from flowrl.rollout.solvers import SOLVERS, require_solver, solve
from flowrl.rollout.table import RewardTables, reward_table, reward_tables, score, score_components
from flowrl.rollout.usage import Usage

__all__ = [
    "SOLVERS",
    "Groups",
    "RewardTables",
    "Rollout",
    "Usage",
    "attach_stds",
    "integrate",
    "require_solver",
    "reward_table",
    "reward_tables",
    "rollout",
    "score",
    "score_components",
    "solve",
]
