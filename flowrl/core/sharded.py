"""Tensors and networks whose weights are sharded over processes (PyTorch's DTensor and FSDP2)."""

from collections.abc import Mapping
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn


def is_sharded(tensor: Tensor) -> bool:
    """Whether each process has a part of `tensor`."""
    return hasattr(tensor, "full_tensor")


def is_sharded_network(network: nn.Module) -> bool:
    """Whether `shard` was applied to `network`. Between two calls its parameters may be
    gathered.
    """
    return hasattr(network, "unshard")  # a method of FSDP2's modules


def full(tensor: Tensor) -> Tensor:
    """The full tensor of a sharded one, in every process; all processes must call it. Other tensors
    are returned unchanged.
    """
    return cast(Any, tensor).full_tensor() if is_sharded(tensor) else tensor


def full_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Full tensors in main memory in the main process; an empty dictionary in all others.

    Sharded tensors are gathered one after the other, so a device has at most one of them; all
    processes must call it.
    """
    is_main = not dist.is_initialized() or dist.get_rank() == 0
    gathered = {}
    for name, tensor in tensors.items():
        complete = full(tensor.detach())
        if is_main:
            gathered[name] = complete.cpu()
    return gathered
