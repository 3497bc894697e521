"""Pure maths of flow matching: time grids, the interpolant and its estimates, Gaussians, a Gaussian mixture in closed form."""

from flowrl.flow.gaussian import kl, kl_without_delta, log_prob, log_prob_without_constants, sample
from flowrl.flow.mixture import GaussianMixture
from flowrl.flow.path import (
    expand,
    interpolate,
    noise_estimate,
    shifted_schedule,
    tweedie,
    uniform_schedule,
    velocity_target,
)

__all__ = [
    "GaussianMixture", "expand", "interpolate", "kl", "kl_without_delta", "log_prob", "log_prob_without_constants",
    "noise_estimate", "sample", "shifted_schedule", "tweedie", "uniform_schedule", "velocity_target",
]  # fmt: skip
