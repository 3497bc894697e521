"""torch.compile of a transformer, block by block: few programs, since blocks of a kind share one, and no long first call."""

from typing import Any

import torch
from torch import nn

from flowrl.errors import ConfigError

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
