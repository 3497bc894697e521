"""Sampling trajectories and images, and scoring unfinished states: batched, with every network call counted."""

from flowrl.rollout.estimates import Walkers, continued
from flowrl.rollout.forward_batch import ForwardBatches
from flowrl.rollout.groups import Groups
from flowrl.rollout.loss_batch import LossBatches, minibatch_pairs
from flowrl.rollout.reward_table import RewardTables, reward_table, reward_tables, score, score_components
from flowrl.rollout.rollout import Rollout, attach_stds, group_tree, rollout
from flowrl.rollout.sampling import EVALUATION_SEED, ImageBatch, initial_noise, sample_images
from flowrl.rollout.solvers import SOLVERS, Usage, integrate, solve

__all__ = [
    "EVALUATION_SEED", "SOLVERS", "ForwardBatches", "Groups", "ImageBatch", "LossBatches", "RewardTables", "Rollout", "Usage",
    "Walkers", "attach_stds", "continued", "group_tree", "initial_noise", "integrate", "minibatch_pairs",
    "reward_table", "reward_tables", "rollout", "sample_images", "score", "score_components", "solve",
]  # fmt: skip
