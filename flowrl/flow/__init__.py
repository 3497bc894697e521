"""Pure maths of flow matching: time grids, the interpolant and its estimates, diagonal Gaussians."""

from flowrl.flow.gaussian import kl, kl_without_delta, log_prob, log_prob_without_constants, sample
from flowrl.flow.interpolant import interpolate, noise_estimate, tweedie, velocity_target
from flowrl.flow.time import expand, shifted_schedule, uniform_schedule

__all__ = [
    "expand",
    "interpolate",
    "kl",
    "kl_without_delta",
    "log_prob",
    "log_prob_without_constants",
    "noise_estimate",
    "sample",
    "shifted_schedule",
    "tweedie",
    "uniform_schedule",
    "velocity_target",
]
