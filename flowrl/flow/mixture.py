"""A Gaussian mixture as data: velocity, marginal and Tweedie estimate in closed form, the ground
truth of the 2-D world.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


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
        return GaussianMixture(
            radius * torch.stack([angle.cos(), angle.sin()], 1),
            std,
            torch.full((modes,), 1 / modes),
        )

    def variance(self, t: Tensor) -> Tensor:
        """c_t of every sample: [sample] -> [sample]."""
        return (1 - t).square() * self.std**2 + t.square()

    def log_marginal(
        self, x: Float[Tensor, "sample dim"], t: Float[Tensor, " sample"]
    ) -> Float[Tensor, " sample"]:
        """log p_t(x)."""
        return torch.logsumexp(self._log_joint(x, t), dim=1)

    def _log_joint(self, x: Tensor, t: Tensor) -> Tensor:
        variance = self.variance(t)[:, None]
        gap = x[:, None] - (1 - t)[:, None, None] * self.means
        dim = x.shape[1]
        return (
            self.weights.log()
            - gap.square().sum(-1) / (2 * variance)
            - 0.5 * dim * (2 * torch.pi * variance).log()
        )

    def clean_and_noise(
        self, x: Float[Tensor, "sample dim"], t: Float[Tensor, " sample"]
    ) -> tuple[Tensor, Tensor]:
        """E[x_0 | x_t = x] (the Tweedie estimate) and E[eps | x_t = x], both [sample, dim]."""
        posterior = torch.softmax(self._log_joint(x, t), dim=1)[..., None]
        gap = (x[:, None] - (1 - t)[:, None, None] * self.means) / self.variance(t)[:, None, None]
        clean = self.means + (1 - t)[:, None, None] * self.std**2 * gap
        noise = t[:, None, None] * gap
        return (posterior * clean).sum(1), (posterior * noise).sum(1)

    def velocity(
        self, x: Float[Tensor, "sample dim"], t: Float[Tensor, " sample"]
    ) -> Float[Tensor, "sample dim"]:
        """v = E[eps - x_0 | x_t = x], finite for every t in [0, 1]."""
        clean, noise = self.clean_and_noise(x, t)
        return noise - clean

    def sample(self, count: int, generator: torch.Generator) -> Float[Tensor, "sample dim"]:
        """Draws of x_0."""
        mode = torch.multinomial(self.weights, count, replacement=True, generator=generator)
        return self.means[mode] + self.std * torch.randn(
            count, self.means.shape[1], generator=generator
        )

    def expected_bump(self, target: Float[Tensor, " dim"], width: float) -> float:
        """E exp(-|x_0 - target|^2 / (2 width^2)) under the data, in closed form."""
        total, dim = self.std**2 + width**2, self.means.shape[1]
        bumps = (width**2 / total) ** (dim / 2) * torch.exp(
            -(self.means - target).square().sum(1) / (2 * total)
        )
        return float((self.weights * bumps).sum())
