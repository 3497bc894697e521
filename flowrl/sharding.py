"""Weights divided between processes (PyTorch's fully sharded data parallelism, version 2), and tensors put together again."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


def shard(network: nn.Module, processes: int, device: torch.device, reshard: bool = True) -> None:
    """Divide `network`'s weights between all processes, in place: each keeps a part of every tensor.

    A block (the modules that the network names in `_no_split_modules`, as diffusers' transformers do) is put together for as long
    as it computes; with `reshard` False its weights stay whole from the forward to the backward pass. Every process must from now
    on call the network equally often. Gradients of a backward pass are *means* over the processes.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (processes,))
    blocks = tuple(getattr(network, "_no_split_modules", None) or ())
    for module in list(network.modules()):
        if type(module).__name__ in blocks:
            fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(network, mesh=mesh)


def is_divided(tensor: Tensor) -> bool:
    """Whether it is a part of a tensor that several processes hold."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: Tensor) -> Tensor:
    """The whole of a divided tensor; all processes must ask for it. Any other tensor as it is."""
    divided: Any = tensor
    return divided.full_tensor() if is_divided(tensor) else tensor


def divided_like(tensor: Tensor, like: Tensor) -> Tensor:
    """`tensor`, whole in every process, divided as `like` is; as it is where `like` is not divided."""
    if not is_divided(like):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    pattern: Any = like
    return distribute_tensor(tensor.detach().to(pattern.device), pattern.device_mesh, pattern.placements)


def any_divided(tensors: Sequence[Tensor]) -> bool:
    """Whether one of them is."""
    return any(map(is_divided, tensors))
