"""The policy of points: the mixture's exact velocity plus a small network that starts at zero."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from flowrl.core.types import Condition, Prompt, Schedule
from flowrl.flow import uniform_schedule
from flowrl.flow.mixture import GaussianMixture
from flowrl.policies.device import device_of


class MixturePolicy:
    """`FlowPolicy` with v(x, t, c) = v_exact(x, t) + net(x, t, c); net is 0 at the start, so the
    policy starts exact.

    Latents are [sample, dim, 1, 1]. The condition is the cosine and sine of the prompt's direction.
    The reference is v_exact alone.

    Args:
        mixture: the data, in any dimension.
        direction: turns a prompt's text into degrees.
        hidden: width of the network.
        seed: seed of the network.
        device: device of the network.
    """

    def __init__(
        self,
        mixture: GaussianMixture,
        direction: Callable[[str], float],
        hidden: int = 64,
        seed: int = 0,
        device: str | torch.device = "cpu",
    ) -> None:
        self.device = device = device_of(device)
        dim = mixture.means.shape[1]
        self.latent_shape = (dim, 1, 1)  # a point
        means, weights = mixture.means.to(device), mixture.weights.to(device)
        self.mixture = GaussianMixture(means, mixture.std, weights)
        self.direction = direction
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.net = nn.Sequential(
                nn.Linear(dim + 3 + 2, hidden),
                nn.SiLU(),
                nn.Linear(hidden, hidden),
                nn.SiLU(),
                nn.Linear(hidden, dim),
            )
        nn.init.zeros_(self.net[-1].weight)  # pyright: ignore[reportArgumentType]
        nn.init.zeros_(self.net[-1].bias)  # pyright: ignore[reportArgumentType]
        self.net.to(device)
        self._base_only = False

    @property
    def velocity_network(self) -> nn.Module:
        """The network whose output is added to the exact velocity."""
        return self.net

    @property
    def hidden_layer(self) -> nn.Module:
        """The last layer."""
        return self.net[-1]

    def schedule(self, steps: int) -> Schedule:
        """The even grid."""
        return uniform_schedule(steps).to(self.device)

    def encode(self, prompts: Sequence[Prompt]) -> Condition:
        """(cos, sin) of each prompt's direction."""
        texts = [prompt.text for prompt in prompts]  # many are the same
        angles = {text: math.radians(self.direction(text)) for text in {*texts}}
        known = {text: (math.cos(a), math.sin(a)) for text, a in angles.items()}
        rows = [known[text] for text in texts]
        return Condition({"direction": torch.tensor(rows, device=self.device)})

    def velocity(self, latent: Tensor, timestep: Tensor, condition: Condition) -> Tensor:
        """v_exact + net, float32."""
        x, t = latent.flatten(1).float(), timestep / 1000.0
        velocity = self.mixture.velocity(x, t)
        if not self._base_only:
            times = torch.stack([t, (4 * t).sin(), (4 * t).cos()], 1)
            features = torch.cat([x, times, condition.tensors["direction"]], 1)
            velocity = velocity + self.net(features)
        return velocity.view(latent.shape)

    def decode(self, latent: Tensor) -> Tensor:
        """The point itself."""
        return latent

    def trainable(self) -> Mapping[str, nn.Parameter]:
        """All parameters of the network."""
        return dict(self.net.named_parameters())

    @contextmanager
    def reference(self) -> Iterator[None]:
        """v_exact alone, no gradients."""
        self._base_only = True
        try:
            with torch.no_grad():
                yield
        finally:
            self._base_only = False

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """No gradients."""
        with torch.no_grad():
            yield
