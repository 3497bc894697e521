"""Choice of the kernel that computes the attention of a diffusers transformer."""

import warnings
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from flowrl.errors import ConfigError

PYTORCH_KERNELS = {
    "_native_cudnn": SDPBackend.CUDNN_ATTENTION,
    "_native_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "_native_flash": SDPBackend.FLASH_ATTENTION,
    "_native_math": SDPBackend.MATH,
}
"""diffusers' names of the kernels of PyTorch's `scaled_dot_product_attention`; "native" means that PyTorch chooses."""


class OneKernel:
    """A diffusers attention `processor` that restricts PyTorch's attention to `kernel`.

    The restriction applies inside the block, so that recomputation under gradient checkpointing uses the same kernel.
    """

    def __init__(self, processor: Any, kernel: SDPBackend) -> None:
        self.processor, self.kernel = processor, kernel

    def __call__(self, attn: Any, hidden_states: Any, encoder_hidden_states: Any = None, attention_mask: Any = None) -> Any:
        """The result of the processor."""
        with sdpa_kernel(self.kernel):
            return self.processor(attn, hidden_states, encoder_hidden_states, attention_mask)


def set_attention_backend(network: Any, name: str, device: torch.device, dtype: torch.dtype) -> None:
    """Compute the attention of `network` by diffusers' backend `name` (`diffusers.models.attention_dispatch`).

    Transformers whose attention calls PyTorch's function directly (SD3) support only its kernels. Raises `ConfigError` with the
    names that work, forward and backward, on `device` in `dtype`, if `name` is not one of them.
    """
    from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend

    layers = [module for module in network.modules() if hasattr(module, "set_processor")]
    dispatched = all(hasattr(layer.processor, "_attention_backend") for layer in layers)
    known = [backend.value for backend in AttentionBackendName] if dispatched else ["native", *PYTORCH_KERNELS]
    problem = "unknown" if name not in known else ""
    if not problem and dispatched:
        try:
            with attention_backend(name):  # diffusers makes the network's backend that of all networks; this resets it
                network.set_attention_backend(name)
        except Exception as error:
            problem = str(error)
    problem = problem or _problem(name, network, device, dtype)
    if problem:
        usable = [one for one in known if not one.endswith("hub") and not _problem(one, network, device, dtype)]
        raise ConfigError(
            f"attention_backend = {name!r} is not allowed; allowed: one of {', '.join(usable)} for {type(network).__name__} on "
            f"{device.type} in {str(dtype).removeprefix('torch.')}, or empty for diffusers' default ({problem.splitlines()[0]})"
        )
    if not dispatched and name != "native":
        for layer in layers:
            layer.set_processor(OneKernel(layer.processor, PYTORCH_KERNELS[name]))


def _problem(name: str, network: Any, device: torch.device, dtype: torch.dtype) -> str:
    """Why the backend `name` cannot compute attention and its gradient here; empty if it can."""
    from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn

    shape = (1, 64, 2, network.config.attention_head_dim)  # batch, tokens, heads, channels
    query, key, value = (torch.zeros(shape, dtype=dtype, device=device, requires_grad=True) for _ in range(3))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch warns about every kernel that it cannot use
            dispatch_attention_fn(query, key, value, backend=AttentionBackendName(name)).sum().backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
