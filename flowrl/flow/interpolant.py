"""The straight path between data and noise, and what a velocity says about its two ends.

x_t = (1-t) x_0 + t eps and v = dx/dt = eps - x_0 (Lipman et al. 2023, arXiv 2210.02747; Liu et al. 2023, arXiv
2209.03003). Every function takes the time as [sample] and returns [sample, *latent].
"""

from jaxtyping import Float
from torch import Tensor

from flowrl.flow.time import expand


def interpolate(
    clean: Float[Tensor, "sample *latent"], noise: Float[Tensor, "sample *latent"], time: Float[Tensor, " sample"]
) -> Float[Tensor, "sample *latent"]:
    """x_t = (1-t) x_0 + t eps."""
    t = expand(time, clean)
    return (1.0 - t) * clean + t * noise


def velocity_target(
    clean: Float[Tensor, "sample *latent"], noise: Float[Tensor, "sample *latent"]
) -> Float[Tensor, "sample *latent"]:
    """v = eps - x_0, the regression target of flow matching."""
    return noise - clean


def tweedie(
    latent: Float[Tensor, "sample *latent"], velocity: Float[Tensor, "sample *latent"], time: Float[Tensor, " sample"]
) -> Float[Tensor, "sample *latent"]:
    """The clean estimate x_t - t v, which is E[x_0 | x_t] for the exact velocity."""
    return latent - expand(time, latent) * velocity


def noise_estimate(
    latent: Float[Tensor, "sample *latent"], velocity: Float[Tensor, "sample *latent"], time: Float[Tensor, " sample"]
) -> Float[Tensor, "sample *latent"]:
    """The noise estimate x_t + (1-t) v, which is E[eps | x_t] for the exact velocity."""
    return latent + (1.0 - expand(time, latent)) * velocity
