"""The stds of a sampler over a whole schedule."""

import torch
from jaxtyping import Float
from torch import Tensor

from flowrl.protocols import Sampler
from flowrl.types import Schedule


def transition_stds(sampler: Sampler, schedule: Schedule) -> Float[Tensor, " step"]:
    """The transition's std at every step of `schedule`, shape [step], on the schedule's device; 0 = not a decision.

    Evaluates the sampler's own `transition` on zeros, so there is no second formula to keep in step. A kernel's std
    must not depend on the latent.
    """
    device = schedule.times.device
    zeros = torch.zeros(schedule.steps, 1, device=device)
    return sampler.transition(zeros, zeros, schedule, torch.arange(schedule.steps, device=device)).std
