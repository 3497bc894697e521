"""What a trainer is given: the optimizer, the prepared policy, and the weights of the reference."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.core.errors import ConfigError, require
from flowrl.core.forward import WeightCopy
from flowrl.core.protocols import FlowPolicy, extras
from flowrl.core.sharded import is_sharded_network
from flowrl.policies import has_compiled_blocks
from flowrl.run.checkpoint import load_matching
from flowrl.run.config import OptimConfig
from flowrl.run.distributed import Distributed, shard
from flowrl.run.saved import find_weights
from flowrl.weights import Behaviour


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


def learning_rate_of(settings: OptimConfig, iterations: int) -> Callable[[int], float]:
    """The learning rate of the iteration that follows n iterations:

    r (1 + n) / (1 + W)             for n < W, the `warmup`
    r (F + (1 - F) s((n - W) / (N - W)))    from then on,

    in which r is `learning_rate`, F `final_learning_rate`, N `iterations`, and s(x) is 1
    (constant), 1 - x (linear) or (1 + cos(pi x)) / 2 (cosine): the schedules of
    `diffusers.optimization` without their first step, whose rate is 0. A rate depends on n alone,
    so a checkpoint contains nothing of a schedule.
    """
    start, final, warmup = settings.learning_rate, settings.final_share, settings.warmup
    if final == 1 and not warmup:
        return lambda done: start
    # here, as the import takes two seconds
    from diffusers.optimization import get_scheduler

    name = settings.lr_schedule
    unused = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    kind = "constant_with_warmup" if name == "constant" else name
    schedule = get_scheduler(kind, unused, None, warmup + 1, iterations + 1)
    share = schedule.lr_lambdas[0]

    def rate(done: int) -> float:
        if done < warmup:
            return start * share(done + 1)
        return start * (final + (1 - final) * share(done + 1))

    return rate


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
    if extra is not None and is_sharded_network(extra.velocity_network):
        return policy.trainable()
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


def reference_weights(
    reference: str | None, policy: FlowPolicy, distributed: Distributed
) -> Callable[[], AbstractContextManager[None]]:
    """A function whose contexts give the policy the weights of the reference: its base model, or
    the averaged weights of the run `reference` (`find_weights`). Raises `ConfigError` if these do
    not fit.
    """
    if not reference:
        return policy.reference
    teacher = Behaviour(WeightCopy(), policy, policy.trainable(), distributed)
    teacher.is_current = False
    tensors: dict[str, Tensor] = {}
    if distributed.is_main:
        saved = find_weights(reference, option="reference")
        require(saved.kind == "run", "reference", reference, "a run of the same policy")
        tensors = saved.tensors()
    load_matching(dict(zip(teacher.names, teacher.values, strict=True)), tensors, distributed)
    return teacher.weights
