"""From the gradients of micro-batches to one step of the optimiser, in one process or several."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flowrl.distributed import Team
from flowrl.errors import require
from flowrl.policies.devices import has_compiled_blocks
from flowrl.protocols import FlowPolicy, OneNetwork
from flowrl.sharding import divided_like, is_divided, shard, whole
from flowrl.training.optim import LossScale

KEPT = ("weight", "average", "optimiser.exp_avg", "optimiser.exp_avg_sq")
"""What a checkpoint holds of every parameter."""


@dataclass
class Engine:
    """The sum of the processes' gradients is what the optimiser steps along. Every process holds all weights, or, where the team
    is sharded, a part of them.

    `norm` and `step` are called once per step in all processes; `backward` equally often where `padded`.
    """

    parameters: Sequence[nn.Parameter]
    optimiser: torch.optim.Optimizer
    scale: LossScale
    team: Team

    @property
    def padded(self) -> bool:
        """Whether every process must make equally many network calls: where weights are divided, each call is made by all."""
        return self.team.sharded

    def zero_grad(self) -> None:
        """Before the first `backward` of a step."""
        self.optimiser.zero_grad()

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of `loss`."""
        factor = self.team.size if self.team.sharded else 1  # divided gradients are means over the processes
        self.scale.scaled(loss * factor if factor > 1 else loss).backward()

    def norm(self, largest: float) -> Tensor:
        """Sum over the processes, undo the loss's scale, shorten to `largest`; returns the norm that was there."""
        if not self.team.sharded:
            self.team.sum_gradients(self.parameters)
        self.scale.unscale(self.parameters)
        return whole(nn.utils.clip_grad_norm_(self.parameters, largest))

    def step(self) -> None:
        """Move the weights."""
        self.optimiser.step()


def prepared(policy: FlowPolicy, team: Team, compiled: bool) -> Mapping[str, nn.Parameter]:
    """Give all processes the main one's weights, divide and compile the network where that is wanted; the trainable parameters.

    A network whose blocks are compiled already (`policies.devices`) is left as it is: it would be compiled twice over.

    Raises `ConfigError` where the policy does not say which its network is (`protocols.OneNetwork`).
    """
    team.spread([parameter.data for parameter in policy.trainable().values()])
    for name, wanted in (("compile", compiled), ("sharded weights", team.sharded)):
        fits = not wanted or isinstance(policy, OneNetwork)
        require(fits, name, True, f"for a policy with a velocity_network, which {type(policy).__name__} has not")
    if isinstance(policy, OneNetwork):
        if team.sharded:
            shard(policy.velocity_network, team.size, policy.device, team.reshard)
        if compiled and not has_compiled_blocks(policy.velocity_network):
            policy.velocity_network.compile()
    return policy.trainable()


def exchanged(parameters: Sequence[nn.Parameter], values: Sequence[Tensor], by_copy: bool) -> list[Tensor]:
    """Give `parameters` other `values`, and return those they had; divided ones must keep their memory and are copied."""
    if not by_copy:
        kept = [parameter.data for parameter in parameters]
        for parameter, value in zip(parameters, values, strict=True):
            parameter.data = value
        return kept
    kept = [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)
    return kept


def divided(tensors: Mapping[str, Tensor], named: Mapping[str, nn.Parameter], wanted: bool) -> dict[str, Tensor]:
    """A checkpoint's tensors; where `wanted`, those of a parameter (value, average, moments) divided as the parameter is."""
    result = dict(tensors)
    if wanted:
        owners = {f"{kind}.{name}": parameter for name, parameter in named.items() for kind in KEPT}
        for key, parameter in owners.items():
            if key in result and result[key].shape == parameter.shape and is_divided(parameter):
                result[key] = divided_like(result[key], parameter)
    return result
