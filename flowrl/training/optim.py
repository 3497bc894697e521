"""From gradients to one step of the optimizer: preparing the policy, scaling the loss, clipping,
and averaging the weights.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from flowrl.core.errors import ConfigError, TrainingError, require
from flowrl.core.protocols import FlowPolicy, extras
from flowrl.distributed import Distributed, free_gathered_weights, full, is_sharded, shard
from flowrl.policies import has_compiled_blocks
from flowrl.training.config import OptimConfig


def make_optimizer(
    settings: OptimConfig, parameters: Sequence[nn.Parameter]
) -> torch.optim.Optimizer:
    """AdamW (arXiv 1711.05101); "adamw-8bit" stores both moments in 8 bits (arXiv 2110.02861).

    On CUDA "adamw" updates all parameters in one fused kernel. "adamw-8bit" quantises only tensors
    of 4,096 elements or more. Raises `ConfigError` without the package bitsandbytes, which it
    needs.
    """
    numbers: dict[str, Any] = {
        "lr": settings.learning_rate,
        "betas": settings.betas,
        "weight_decay": settings.weight_decay,
    }
    if settings.optimizer == "adamw":
        # None: PyTorch's choice, which is a loop on the CPU
        fused = all(parameter.is_cuda for parameter in parameters) or None
        return torch.optim.AdamW(parameters, fused=fused, **numbers)
    try:
        bitsandbytes: Any = import_module("bitsandbytes")
    except ImportError as error:
        raise ConfigError(
            "optimizer = 'adamw-8bit' needs the package bitsandbytes: pip install bitsandbytes, or"
            " adamw"
        ) from error
    return bitsandbytes.optim.AdamW8bit(parameters, **numbers)


def prepare_policy(
    policy: FlowPolicy, distributed: Distributed, compiled: bool
) -> Mapping[str, nn.Parameter]:
    """Send the main process's weights to all processes; shard the networks if `distributed`
    requires it, and compile the policy's if `compiled`. Returns the trained parameters by name.

    A network whose blocks are compiled already (`policies.compile_blocks`) is not compiled again.
    Raises `ConfigError` if sharding or compilation is required and the policy has no
    `velocity_network`.
    """
    extra = extras(policy, "velocity_network")
    for name, wanted in (("compile", compiled), ("sharded weights", distributed.sharded)):
        allowed = f"for a policy with a velocity_network, which {type(policy).__name__} lacks"
        require(not wanted or extra is not None, name, True, allowed)
    if extra is not None and distributed.sharded:
        dtype = getattr(policy, "dtype", torch.float32)  # in which the network computes
        trained = extra.velocity_network
        for network in dict.fromkeys([trained, getattr(policy, "reference_network", trained)]):
            shard(network, distributed, policy.device, dtype)
    else:
        distributed.broadcast([parameter.data for parameter in policy.trainable().values()])
    if extra is not None and compiled and not has_compiled_blocks(extra.velocity_network):
        extra.velocity_network.compile()
    return policy.trainable()


class LossScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler`, which scales the loss so that small gradients survive float16 (arXiv
    1710.03740), with a clip and a count of skipped steps.

    A step whose gradients are not finite is skipped, counted in `skipped`, and halves the scale;
    2,000 finite steps in a row double it. All processes decide alike: replicated gradients are
    summed before, and PyTorch reduces the flag of sharded ones.

    Args:
        init_scale: initial scale; 0: the loss is not scaled and every step is taken.
        device: the device of the loss.
    """

    def __init__(self, init_scale: float, device: torch.device) -> None:
        super().__init__(device.type, init_scale=init_scale or 1.0, enabled=init_scale > 0)
        # initialised by the first loss, which a process may not have
        self.scale(torch.zeros((), device=device))
        self.skipped = 0

    def clip(self, optimizer: torch.optim.Optimizer, largest: float) -> float:
        """Undo the scale of the gradients and clip them to the norm `largest`; returns their norm
        before.
        """
        self.unscale_(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        return float(full(nn.utils.clip_grad_norm_(parameters, largest)))

    def take(self, optimizer: torch.optim.Optimizer) -> bool:
        """Take the optimizer's step unless scaled gradients are not finite; returns whether it was
        taken.

        Raises `TrainingError` if gradients are not finite at scale 1: float16's range is then not
        the reason.
        """
        before = self.get_scale()
        self.step(optimizer)
        self.update()
        if self.get_scale() >= before:
            return True
        if before <= 1:
            raise TrainingError(
                "the gradient is not finite at loss scale 1: lower learning_rate, or use bfloat16"
            )
        self.skipped += 1
        return False

    def state_dict(self) -> dict[str, Any]:
        """Plain values for a checkpoint; none without scaling."""
        return super().state_dict() | ({"skipped": self.skipped} if self.is_enabled() else {})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from `state_dict()`; the state of a run without scaling has no effect."""
        if self.is_enabled() and state_dict:
            super().load_state_dict(state_dict)
            self.skipped = state_dict["skipped"]


def update_average(
    average: Sequence[Tensor], parameters: Sequence[nn.Parameter], decay: float
) -> None:
    """The exponential moving average of the weights, in place: average <- decay average + (1 -
    decay) weight.

    On CUDA one kernel updates many tensors.

    Args:
        average: the averages.
        parameters: the weights, in the same order.
        decay: the decay per step, in [0, 1].
    """
    get_ema_multi_avg_fn(decay)(tuple(average), tuple(parameters), 0)


@contextmanager
def weights_replaced(
    policy: FlowPolicy, parameters: Sequence[nn.Parameter], values: Sequence[Tensor]
) -> Iterator[None]:
    """A context in which the policy's `parameters` have other `values`, in the same order. Sharded
    parameters keep their memory; the values are copied.
    """
    sharded = any(map(is_sharded, parameters))

    @torch.no_grad()
    def put(tensors: Sequence[Tensor]) -> None:
        for parameter, tensor in zip(parameters, tensors, strict=True):
            if sharded:
                parameter.copy_(tensor)
            else:
                parameter.data = tensor
        extra = extras(policy, "velocity_network")
        if sharded and extra is not None:
            free_gathered_weights(extra.velocity_network)

    kept = [parameter.detach().clone() if sharded else parameter.data for parameter in parameters]
    put(values)
    try:
        yield
    finally:
        put(kept)
