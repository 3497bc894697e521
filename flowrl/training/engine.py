"""From the gradients of micro-batches to one step of the optimiser, in one process or several."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flowrl.training.distributed import Team
from flowrl.training.optimisers import LossScale


@dataclass
class Engine:
    """Every process holds all weights; the sum of the processes' gradients is what the optimiser steps along.

    `backward` may be called differently often in different processes, `norm` and `step` once per step in all of them.
    """

    parameters: Sequence[nn.Parameter]
    optimiser: torch.optim.Optimizer
    scale: LossScale
    team: Team
    padded: bool = False

    def zero_grad(self) -> None:
        """Before the first `backward` of a step."""
        self.optimiser.zero_grad()

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of `loss`."""
        self.scale.scaled(loss).backward()

    def norm(self, largest: float) -> Tensor:
        """Sum over the processes, undo the loss's scale, shorten to `largest`; returns the norm that was there."""
        self.team.sum_gradients(self.parameters)
        self.scale.unscale(self.parameters)
        return nn.utils.clip_grad_norm_(self.parameters, largest)

    def step(self) -> None:
        """Move the weights."""
        self.optimiser.step()
