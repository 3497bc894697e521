"""Sampling trajectories and images, and scoring unfinished states: batched, with every network call
counted.
"""

from flowrl.rollout.batches import ForwardBatches, LossBatches, minibatch_rows
from flowrl.rollout.groups import Groups
from flowrl.rollout.rollout import ProbeRun, Rollout, Walk, group_tree, log_probs, rollout
from flowrl.rollout.sampling import EVALUATION_SEED, ImageBatch, initial_noise, sample_images
from flowrl.rollout.solvers import SOLVERS, Usage, solve
from flowrl.rollout.values import (
    Values,
    predicted,
    score,
    score_rollout,
    transition_weights,
    usable,
)

__all__ = [
    "EVALUATION_SEED",
    "SOLVERS",
    "ForwardBatches",
    "Groups",
    "ImageBatch",
    "LossBatches",
    "ProbeRun",
    "Rollout",
    "Usage",
    "Values",
    "Walk",
    "group_tree",
    "initial_noise",
    "log_probs",
    "minibatch_rows",
    "predicted",
    "rollout",
    "sample_images",
    "score",
    "score_rollout",
    "solve",
    "transition_weights",
    "usable",
]
