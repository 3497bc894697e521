"""Choice of the kernel that computes the attention of a diffusers transformer."""

import warnings
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from flowrl.core.errors import ConfigError

PYTORCH_KERNELS = {
    "_native_cudnn": SDPBackend.CUDNN_ATTENTION,
    "_native_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "_native_flash": SDPBackend.FLASH_ATTENTION,
    "_native_math": SDPBackend.MATH,
}
"""diffusers' names of the kernels of PyTorch's `scaled_dot_product_attention`; "native" means that
PyTorch chooses.
"""


def set_attention_backend(
    network: Any, name: str, device: torch.device, dtype: torch.dtype
) -> None:
    """Compute the attention of `network` by diffusers' backend `name`
    (`diffusers.models.attention_dispatch`).

    Transformers whose attention calls PyTorch's function directly (SD3) support only its kernels.
    Raises `ConfigError` with the names that work, forward and backward, on `device` in `dtype`, if
    `name` is not one of them.
    """
    from diffusers.models.attention_dispatch import (
        AttentionBackendName,
        attention_backend,
        dispatch_attention_fn,
    )

    layers = [module for module in network.modules() if hasattr(module, "set_processor")]
    dispatched = all(hasattr(layer.processor, "_attention_backend") for layer in layers)
    known = (
        [backend.value for backend in AttentionBackendName]
        if dispatched
        else ["native", *PYTORCH_KERNELS]
    )

    def problem(backend: str) -> str:
        """Why `backend` cannot compute attention and its gradient here; empty if it can."""
        shape = (1, 64, 2, network.config.attention_head_dim)  # batch, tokens, heads, channels
        query, key, value = (
            torch.zeros(shape, dtype=dtype, device=device, requires_grad=True) for _ in range(3)
        )
        try:
            if backend not in known:
                return "unknown"
            if dispatched and backend == name:  # downloads a kernel of the Hub
                # diffusers makes it the backend of all networks; this resets it
                with attention_backend(name):
                    network.set_attention_backend(name)
            with warnings.catch_warnings():
                # PyTorch warns about every kernel that it cannot use
                warnings.simplefilter("ignore")
                dispatch_attention_fn(
                    query, key, value, backend=AttentionBackendName(backend)
                ).sum().backward()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    if reason := problem(name):
        usable = [
            backend for backend in known if not backend.endswith("hub") and not problem(backend)
        ]
        raise ConfigError(
            f"attention_backend = {name!r} is not allowed; allowed: one of {', '.join(usable)} for"
            f" {type(network).__name__} on {device.type} in {str(dtype).removeprefix('torch.')}, or"
            f" empty for diffusers' default ({reason.splitlines()[0]})"
        )
    if not dispatched and name != "native":
        # inside the block, so that recomputation under checkpointing has the same kernel
        for layer in layers:
            layer.set_processor(sdpa_kernel(PYTORCH_KERNELS[name])(layer.processor))
