"""Sampling trajectories and images, and scoring unfinished states: batched, with every network call
counted.
"""

from flowrl.rollout.batches import Objective, Rows, TransitionObjective, minibatch_rows
from flowrl.rollout.forward import ForwardObjective
from flowrl.rollout.groups import Groups
from flowrl.rollout.probing import ProbeRun, log_probs
from flowrl.rollout.rollout import group_tree, rollout
from flowrl.rollout.sampling import EVALUATION_SEED, ImageBatch, initial_noise, sample_images
from flowrl.rollout.solvers import SOLVERS, solve
from flowrl.rollout.values import (
    predicted,
    score,
    score_rollout,
    transition_weights,
    usable,
)
from flowrl.rollout.walk import Rollout, Usage, Walk

__all__ = [
    "EVALUATION_SEED",
    "SOLVERS",
    "ForwardObjective",
    "Groups",
    "ImageBatch",
    "Objective",
    "ProbeRun",
    "Rollout",
    "Rows",
    "TransitionObjective",
    "Usage",
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
