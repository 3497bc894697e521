"""Peak memory of work on a device."""

import sys
from collections.abc import Callable

import torch


def peak_memory(device: torch.device) -> int:
    """Peak bytes: of PyTorch's tensors on a GPU since `reset_peak_memory`, of this process on the
    CPU since its start.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 2**10


def reset_peak_memory(device: torch.device) -> None:
    """Reset the peak; without effect on the CPU, whose peak cannot be reset."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_during(work: Callable[[], None], device: torch.device) -> int:
    """Reset the peak, run `work`, and return `peak_memory`.

    Args:
        work: the function to run.
        device: the device to measure; the peak of the CPU cannot be reset.

    Returns:
        Peak memory in bytes.
    """
    reset_peak_memory(device)
    work()
    return peak_memory(device)
