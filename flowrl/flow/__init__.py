"""Pure maths of flow matching: time grids, training times, the interpolant and its estimates,
Gaussians, a Gaussian mixture.
"""

from flowrl.core.types import expand
from flowrl.flow.gaussian import kl, log_prob, log_prob_without_constants, sample
from flowrl.flow.mixture import GaussianMixture
from flowrl.flow.path import (
    interpolate,
    noise_estimate,
    shifted_schedule,
    tweedie,
    uniform_schedule,
    velocity_target,
)
from flowrl.flow.times import (
    DrawnSteps,
    LateSteps,
    LogitNormalTimes,
    PermutedTimes,
    StratifiedTimes,
    UniformTimes,
)

__all__ = [
    "DrawnSteps",
    "GaussianMixture",
    "LateSteps",
    "LogitNormalTimes",
    "PermutedTimes",
    "StratifiedTimes",
    "UniformTimes",
    "expand",
    "interpolate",
    "kl",
    "log_prob",
    "log_prob_without_constants",
    "noise_estimate",
    "sample",
    "shifted_schedule",
    "tweedie",
    "uniform_schedule",
    "velocity_target",
]
