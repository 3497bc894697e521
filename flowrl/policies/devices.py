"""Devices by name, checked before anything is moved to them."""

from typing import Any

import torch
from torch import nn

from flowrl.errors import ConfigError, require


def device_of(name: str | torch.device) -> torch.device:
    """The device called `name`: cpu, cuda, or cuda:NUMBER. Raises `ConfigError` for another word, or a GPU that is not there."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device = {name!r} is not allowed: cpu, cuda or cuda:NUMBER") from error
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        here = f"cpu: PyTorch {torch.__version__} sees no GPU" if count == 0 else f"cuda:0 to cuda:{count - 1}, or cpu"
        require((device.index or 0) < count, "device", str(name), here)
    return device


PROGRAMS = 64
"""Versions of a block's program that are kept: kinds of blocks x sampling and training x with adapters and without x batch
sizes."""


def compile_blocks(network: Any, backend: str) -> None:
    """Compile in place every entry of the module lists at the top of `network` (a transformer's blocks; None: nothing to do).

    Embeddings, the outer norms, the transition's maths and the shape checks at the doors stay as they are. Raises `ConfigError`
    for an unknown backend.
    """
    known = torch.compiler.list_backends(exclude_tags=())
    if backend not in known:
        raise ConfigError(
            f"compile = {backend!r} is not allowed: a backend of torch.compile ({', '.join(known)}), or empty for off"
        )
    if network is None:
        return
    limit = torch._dynamo.config
    limit.recompile_limit = max(limit.recompile_limit, PROGRAMS)
    for block in _blocks(network):
        block.compile(backend=backend)


def has_compiled_blocks(network: nn.Module) -> bool:
    """Whether `compile_blocks` was here."""
    return any(block._compiled_call_impl is not None for block in _blocks(network))


def _blocks(network: Any) -> list[nn.Module]:
    return [block for child in network.children() if isinstance(child, nn.ModuleList) for block in child]
