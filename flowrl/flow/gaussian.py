"""Diagonal Gaussians over the next node: sampling, log-density and divergence.

Every reduction is a *mean* over the latent elements (not a sum), as in the public Flow-GRPO code
(arXiv 2505.05470), so a policy ratio does not depend on the resolution. A step with std 0 is not a
decision: its log-density and divergence are exactly 0, with zero and finite gradients.
"""

import math

import torch
from torch import Tensor

from flowrl.core.checks import checked
from flowrl.core.types import Gaussian, Latents, PerSample, expand

_HALF_LOG_TWO_PI = 0.5 * math.log(2.0 * math.pi)


def sample(
    gaussian: Gaussian, generator: torch.Generator, first: int = 0, total: int | None = None
) -> Latents:
    """Draw mean + std * eps with eps from `generator`: float32 and detached; exactly the mean where
    std is 0.

    If `total` is given, noise is drawn for that many samples, and the rows from `first` on are
    used. A part of a batch then gets the same noise as in the whole batch, and the generator ends
    in the same state.

    Args:
        gaussian: the distribution of the next node, with mean [sample, *latent] and std [sample].
        generator: the source of the noise; its device determines where the noise is drawn.
        first: index of the first sample within the whole batch; used only with `total`.
        total: number of samples of the whole batch; None if `gaussian` is the whole batch.

    Returns:
        Latents [sample, *latent] on the device of the mean.
    """
    mean = gaussian.mean.detach().float()
    shape = (total or len(mean), *mean.shape[1:])
    noise = torch.randn(shape, generator=generator, device=generator.device)
    noise = noise[first : first + len(mean)]
    return mean + expand(gaussian.std.detach().float(), mean) * noise.to(mean.device)


@checked
def log_prob(gaussian: Gaussian, x: Latents) -> PerSample:
    """Log-density per element: mean over elements of -(x - mu)^2 / (2 std^2) - log std - log(2
    pi)/2, shape [sample].

    `x` is a constant (detached): the gradient reaches the mean only. 0 where std is 0. Source:
    Flow-GRPO (arXiv 2505.05470), public code.

    Args:
        gaussian: the distribution of the next node, with mean [sample, *latent] and std [sample].
        x: latents [sample, *latent].

    Returns:
        Mean log-density per latent element [sample], in nats.
    """
    std = _safe_std(gaussian)
    squared = _mean_squared_distance(gaussian, x.detach())
    density = -squared / (2.0 * std.square()) - std.log() - _HALF_LOG_TWO_PI
    return torch.where(gaussian.std > 0, density, 0.0)


@checked
def log_prob_without_constants(gaussian: Gaussian, x: Latents) -> PerSample:
    """Mean over elements of -(x - mu)^2, shape [sample]; 0 where std is 0.

    Not a log-density: relative to `log_prob` its gradient is scaled by 2 std^2, which differs per
    step. Kept for parity with the released code of Coefficients-Preserving Sampling (arXiv
    2509.05952).

    Args:
        gaussian: the distribution of the next node, with mean [sample, *latent] and std [sample].
        x: latents [sample, *latent]; a constant (detached).

    Returns:
        The negative mean squared distance [sample].
    """
    return -_mean_squared_distance(gaussian, x.detach())


def kl(p: Gaussian, q: Gaussian) -> PerSample:
    """KL(p || q) per element for equal stds: mean over elements of (mu_p - mu_q)^2 / (2 std_p^2),
    shape [sample].

    The gradient reaches both means. 0 where std is 0. Source: Flow-GRPO (arXiv 2505.05470).

    Args:
        p: the first distribution, with mean [sample, *latent] and std [sample]; its std enters the
            formula.
        q: the second distribution; only its mean is used.

    Returns:
        Mean divergence per latent element [sample], in nats.
    """
    return _mean_squared_distance(p, q.mean) / (2.0 * _safe_std(p).square())


def _safe_std(gaussian: Gaussian) -> Tensor:
    """The std with 1 in place of 0, to avoid a division by 0 and the logarithm of 0."""
    return torch.where(gaussian.std > 0, gaussian.std, 1.0).float()


def _mean_squared_distance(gaussian: Gaussian, x: Tensor) -> Tensor:
    """Mean over latent elements of (x - mu)^2, shape [sample]; 0 with zero gradient where std
    is 0.
    """
    difference = x.float() - gaussian.mean.float()
    # `where` before the square: a mean that is not a number has gradient 0, too
    squared = torch.where(expand(gaussian.std > 0, difference), difference, 0.0).square()
    return squared if squared.ndim == 1 else squared.flatten(1).mean(dim=1)
