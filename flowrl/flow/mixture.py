"""A Gaussian mixture as data: velocity, marginal and Tweedie estimate in closed form, the ground
truth of the 2-D world.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from flowrl.core.checks import checked
from flowrl.core.types import PerSample

Points = Float[Tensor, "sample dim"]


@checked
@dataclass(frozen=True)
class GaussianMixture:
    """Data x_0 ~ sum_k w_k N(m_k, s^2 I).

    Under x_t = (1-t) x_0 + t eps, mode k becomes N((1-t) m_k, c_t I) with c_t = (1-t)^2 s^2 + t^2.

    Args:
        means: the modes' means m_k [mode, dim].
        std: standard deviation s of every mode, above 0.
        weights: the modes' probabilities w_k [mode], which sum to 1.
    """

    means: Float[Tensor, "mode dim"]
    std: float
    weights: Float[Tensor, " mode"]

    @staticmethod
    def ring(modes: int = 8, radius: float = 2.0, std: float = 0.25) -> "GaussianMixture":
        """Equal modes on a circle in the plane."""
        angle = torch.arange(modes) * (2 * torch.pi / modes)
        means = radius * torch.stack([angle.cos(), angle.sin()], 1)
        return GaussianMixture(means, std, torch.full((modes,), 1 / modes))

    def _gap_and_variance(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """x - (1-t) m_k [sample, mode, dim] and c_t [sample, 1]."""
        keep = 1 - t
        variance = (keep.square() * self.std**2 + t.square())[:, None]
        return x[:, None] - keep[:, None, None] * self.means, variance

    def _log_joint(self, gap: Tensor, variance: Tensor) -> Tensor:
        """log (w_k p_t(x | k)) [sample, mode]."""
        normaliser = 0.5 * gap.shape[2] * (2 * torch.pi * variance).log()
        return self.weights.log() - gap.square().sum(-1) / (2 * variance) - normaliser

    @checked
    def log_marginal(self, x: Points, t: PerSample) -> PerSample:
        """log p_t(x)."""
        return torch.logsumexp(self._log_joint(*self._gap_and_variance(x, t)), dim=1)

    @checked
    def clean_and_noise(self, x: Points, t: PerSample) -> tuple[Tensor, Tensor]:
        """E[x_0 | x_t = x] (the Tweedie estimate) and E[eps | x_t = x], both [sample, dim]."""
        gap, variance = self._gap_and_variance(x, t)
        posterior = torch.softmax(self._log_joint(gap, variance), dim=1)[..., None]
        gap, time = gap / variance[..., None], t[:, None, None]
        clean = self.means + (1 - time) * self.std**2 * gap
        return (posterior * clean).sum(1), (posterior * (time * gap)).sum(1)

    @checked
    def velocity(self, x: Points, t: PerSample) -> Points:
        """v = E[eps - x_0 | x_t = x], finite for every t in [0, 1]."""
        clean, noise = self.clean_and_noise(x, t)
        return noise - clean

    def sample(self, count: int, generator: torch.Generator) -> Points:
        """Draws of x_0."""
        mode = torch.multinomial(self.weights, count, replacement=True, generator=generator)
        noise = torch.randn(count, self.means.shape[1], generator=generator)
        return self.means[mode] + self.std * noise

    @checked
    def expected_bump(self, target: Float[Tensor, " dim"], width: float) -> float:
        """E exp(-|x_0 - target|^2 / (2 width^2)) under the data, in closed form."""
        return float(self._bumps(target, width).sum())

    @checked
    def tilted(self, target: Float[Tensor, " dim"], width: float) -> "GaussianMixture":
        """The data times exp(-|x_0 - target|^2 / (2 width^2)), normalised."""
        bumps, total = self._bumps(target, width), self.std**2 + width**2
        means = (self.std**2 * target + width**2 * self.means) / total
        return GaussianMixture(means, self.std * width / math.sqrt(total), bumps / bumps.sum())

    def _bumps(self, target: Tensor, width: float) -> Tensor:
        """The expected bump of each mode, times its weight."""
        total, dim = self.std**2 + width**2, self.means.shape[1]
        distance = (self.means - target).square().sum(1)
        return self.weights * ((width**2 / total) ** (dim / 2) * torch.exp(-distance / (2 * total)))
