"""A sampler for schedules of different lengths."""

from dataclasses import dataclass

from flowrl.core.protocols import Sampler
from flowrl.samplers import Windowed


@dataclass(frozen=True)
class AllButLast:
    """`sampler` on every step but the last, which is an ODE step."""

    sampler: Sampler

    def transition(self, latent, velocity, schedule, step):
        """The Gaussian over node `step + 1`."""
        return Windowed(self.sampler, range(schedule.steps - 1)).transition(
            latent, velocity, schedule, step
        )
