"""Counters: what a rollout costs."""

from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.protocols import FlowPolicy
from flowrl.types import Condition


@dataclass
class Usage:
    """Counts of one iteration: network evaluations (`nfe`, one per latent), sequential network `calls` (a call that is split to
    respect `max_batch` still counts once) and scored images (`reward_calls`)."""

    nfe: int = 0
    calls: int = 0
    reward_calls: int = 0

    def velocity(self, policy: FlowPolicy, latent: Tensor, timestep: Tensor, condition: Condition, max_batch: int) -> Tensor:
        """`policy.velocity` in chunks of at most `max_batch`, counted."""
        self.nfe += len(latent)
        self.calls += 1
        if len(latent) <= max_batch:
            return policy.velocity(latent, timestep, condition)
        pieces = torch.arange(len(latent), device=latent.device).split(max_batch)
        parts = zip(latent.split(max_batch), timestep.split(max_batch), pieces, strict=True)
        return torch.cat([policy.velocity(part, told, condition.take(index)) for part, told, index in parts])
