"""Fails on host synchronisation: operations for which the host waits until the device has finished
all work under way.

On a GPU PyTorch's own check is used. On the CPU nothing has to wait, so a dispatch mode looks for
the operations that would.
"""

import sys
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

SIZE_DEPENDS_ON_VALUES = (
    "nonzero",
    "masked_select",
    "_unique",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "bincount",
)
READS_A_VALUE = ("_local_scalar_dense", "is_nonzero", "equal", "allclose")
FACTORIES = (
    torch.arange,
    torch.empty,
    torch.eye,
    torch.full,
    torch.linspace,
    torch.ones,
    torch.rand,
    torch.randn,
    torch.zeros,
)
LIBRARIES = ("torch", "diffusers", "transformers", "peft", "einops")
COPIES_TO_THE_HOST = ("cpu", "numpy", "tolist", "__array__")


class HostSyncError(AssertionError):
    """The host would wait for the device here."""


class _OnDevice(TorchFunctionMode):
    """Refuses tensors that a line of flowrl, or of a test, makes without saying on which device."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        module = sys._getframe(1).f_globals["__name__"].partition(".")[0]
        if func in FACTORIES and "device" not in (kwargs or {}) and module not in LIBRARIES:
            raise HostSyncError(f"{func.__name__} without a device makes a tensor on the host")
        return func(*args, **(kwargs or {}))


class HostSyncs(TorchDispatchMode):
    """Counts the operations within it for which the host would wait, or refuses them; `Tensor.cpu`
    and `numpy` are no operations.
    """

    def __init__(self, refused=False):
        super().__init__()
        self.refused, self.count = refused, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        reason = _waits(func, args, kwargs or {})
        if reason and self.refused:
            raise HostSyncError(f"{func}: {reason}")
        self.count += bool(reason)
        return func(*args, **(kwargs or {}))


def _waits(func, args, kwargs):
    """Why the host would wait for this operation; empty if it would not."""
    name = func.__name__.partition(".")[0]
    if name in READS_A_VALUE or name in SIZE_DEPENDS_ON_VALUES:
        return "the host reads a value or a size that depends on values"
    if name in ("index", "index_put", "index_put_") and any(
        i is not None and i.dtype == torch.bool for i in args[1]
    ):
        return "a boolean mask becomes indices, whose number the host needs"
    if name == "repeat_interleave" and kwargs.get("output_size") is None:
        return "the host needs the sum of the repeats"
    if name == "lift_fresh":
        return "a number or a list is copied to the device and waited for"
    return ""


@contextmanager
def no_host_sync(device):
    """Within this context an operation on `device` that the host must wait for raises: a
    `HostSyncError` on the CPU, PyTorch's `RuntimeError` on a GPU.
    """
    if torch.device(device).type == "cuda":
        kept = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(kept)
        return

    def refused(name):
        def method(*_, **__):
            raise HostSyncError(f"Tensor.{name}: the host reads the values")

        return method

    to = Tensor.to

    def to_device(tensor, *given, **named):
        if "cpu" in (*(word for word in given if isinstance(word, str)), named.get("device")):
            raise HostSyncError("Tensor.to('cpu'): the values are copied to the host")
        return to(tensor, *given, **named)

    with HostSyncs(refused=True), _OnDevice(), ExitStack() as patches:
        patches.enter_context(patch.object(Tensor, "to", to_device))
        for name in COPIES_TO_THE_HOST:
            patches.enter_context(patch.object(Tensor, name, refused(name)))
        yield
