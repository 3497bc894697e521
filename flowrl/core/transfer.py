"""Asynchronous copies between a GPU and main memory."""

import torch
from torch import Tensor


def to_main_memory(tensor: Tensor) -> Tensor:
    """`tensor` in main memory. From CUDA it is copied to pinned memory after the queued work: call
    `copies_done` before the host reads it.
    """
    if not tensor.is_cuda:
        return tensor.cpu()
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)


def copies_done(device: torch.device) -> None:
    """Wait for this thread's copies from `device`."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` on `device`. A transfer from main memory to CUDA uses pinned memory, which PyTorch
    keeps until the copy is done.
    """
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
