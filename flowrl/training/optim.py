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
    """Send the main process's weights to all processes; shard the network if `distributed` requires
    it, and compile it if `compiled`. Returns the trained parameters by name.

    A network whose blocks are compiled already (`policies.compile_blocks`) is not compiled again.
    Raises `ConfigError` if sharding or compilation is required and the policy has no
    `velocity_network`, or if there is no C++ compiler for the CPU.
    """
    distributed.broadcast([parameter.data for parameter in policy.trainable().values()])
    extra = extras(policy, "velocity_network")
    for name, wanted in (("compile", compiled), ("sharded weights", distributed.sharded)):
        allowed = f"for a policy with a velocity_network, which {type(policy).__name__} lacks"
        require(not wanted or extra is not None, name, True, allowed)
    if compiled and policy.device.type == "cpu":
        _require_compiler()
    if extra is not None and distributed.sharded:
        dtype = getattr(policy, "dtype", torch.float32)  # in which the network computes
        shard(extra.velocity_network, distributed, policy.device, dtype)
    if extra is not None and compiled and not has_compiled_blocks(extra.velocity_network):
        extra.velocity_network.compile()
    return policy.trainable()


def _require_compiler() -> None:
    cpp_builder: Any = import_module("torch._inductor.cpp_builder")
    try:
        cpp_builder.get_cpp_compiler()
    except RuntimeError as error:
        raise ConfigError(
            "compile = True is not allowed on the CPU without a C++ compiler: install g++, or name"
            " one in CXX"
        ) from error


class LossScaler:
    """`torch.amp.GradScaler`, which scales the loss so that small gradients survive float16 (arXiv
    1710.03740).

    A step whose gradients are not finite is skipped, counted in `skipped`, and halves the scale;
    2,000 finite steps in a row double it. All processes decide alike: replicated gradients are
    summed before, and PyTorch reduces the flag of sharded ones.

    Args:
        init_scale: initial scale; 0: the loss is not scaled and every step is taken.
        device: the device of the loss.
    """

    def __init__(self, init_scale: float, device: torch.device) -> None:
        self.scaler = torch.amp.GradScaler(
            device.type, init_scale=init_scale or 1.0, enabled=init_scale > 0
        )
        # initialised by the first loss, which a process may not have
        self.scaler.scale(torch.zeros((), device=device))
        self.skipped = 0

    @property
    def enabled(self) -> bool:
        """Whether the loss is scaled."""
        return self.scaler.is_enabled()

    @property
    def value(self) -> float:
        """The scale; 1 if the loss is not scaled."""
        return self.scaler.get_scale()

    def scale(self, loss: Tensor) -> Tensor:
        """The scaled loss, to be differentiated."""
        return self.scaler.scale(loss)

    def clip(self, optimizer: torch.optim.Optimizer, largest: float) -> float:
        """Undo the scale of the gradients and clip them to the norm `largest`; returns their norm
        before.
        """
        self.scaler.unscale_(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        return float(full(nn.utils.clip_grad_norm_(parameters, largest)))

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Take the optimizer's step unless a gradient is not finite; returns whether it was taken.
        Without scaling it always is.

        Raises `TrainingError` if gradients are not finite at scale 1: float16's range is then not
        the reason.
        """
        before = self.value
        self.scaler.step(optimizer)
        self.scaler.update()
        if self.value >= before:
            return True
        if before <= 1:
            raise TrainingError(
                "the gradient is not finite at loss scale 1: lower learning_rate, or use bfloat16"
            )
        self.skipped += 1
        return False

    def state_dict(self) -> dict[str, float]:
        """Plain values for a checkpoint; none without scaling."""
        return {**self.scaler.state_dict(), "skipped": self.skipped} if self.enabled else {}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from `state_dict()`; the state of a run without scaling has no effect."""
        if self.enabled and state:
            self.scaler.load_state_dict(dict(state))
            self.skipped = int(state["skipped"])


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
