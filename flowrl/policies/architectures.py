"""Published model sizes: their networks on shapes alone, and the GPU memory that they need.

Nothing is downloaded and no GPU is used. Networks are built on PyTorch's "meta" device (shapes only). A micro-batch of training,
a call of sampling and a batch of decoding run there while the storage of every tensor is counted as it comes and goes. The counts
leave out what only a device shows: the libraries' work space, and the allocator's unused reserve.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from flowrl.errors import ConfigError, require
from flowrl.policies.lora import LORA_TARGETS, Adapters

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
OPTIMIZER_BYTES = 4 * (1 + 1 + 2 + 1)
"""Bytes per trained weight: the float32 weight, its gradient, AdamW's two moments, the averaged weight."""
DECODER: dict[str, Any] = {
    "in_channels": 3, "out_channels": 3, "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4, "block_out_channels": (128, 256, 512, 512), "layers_per_block": 2,
    "latent_channels": 16, "norm_num_groups": 32, "sample_size": 1024, "use_quant_conv": False, "use_post_quant_conv": False,
}  # fmt: skip
"""The image decoder of SD3, SD3.5 and FLUX.1, an `AutoencoderKL`."""
FLUX_ENCODERS = 4_762_310_656 + 123_650_304
"""Parameters of T5 v1.1 XXL's encoder and of CLIP ViT-L/14's text encoder."""
SD3_ENCODERS = FLUX_ENCODERS + 694_659_840
"""The same, and OpenCLIP ViT-bigG/14's text encoder."""


@dataclass(frozen=True)
class Architecture:
    """A transformer: its class in diffusers and its configuration; the length of a prompt's embedding in `text_tokens`, and the
    parameters of all its text encoders."""

    transformer: str
    config: dict[str, Any]
    text_tokens: int
    encoder_parameters: int

    @property
    def text_width(self) -> int:
        """The width of a prompt's embedding."""
        return self.config["joint_attention_dim"]

    def build(self, device: str = "meta") -> Any:
        """The transformer with random weights on `device`; on "meta" it has shapes only and takes no memory."""
        with torch.device(device):
            return getattr(import_module("diffusers"), self.transformer)(**self.config)


_SD35: dict[str, Any] = {
    "sample_size": 128, "patch_size": 2, "in_channels": 16, "out_channels": 16, "attention_head_dim": 64,
    "joint_attention_dim": 4096, "pooled_projection_dim": 2048, "qk_norm": "rms_norm",
}  # fmt: skip
_SD35_MEDIUM = {
    **_SD35, "num_layers": 24, "num_attention_heads": 24, "caption_projection_dim": 1536, "pos_embed_max_size": 384,
    "dual_attention_layers": tuple(range(13)),
}  # fmt: skip
_SD35_LARGE = {
    **_SD35, "num_layers": 38, "num_attention_heads": 38, "caption_projection_dim": 2432, "pos_embed_max_size": 192,
}  # fmt: skip
_FLUX: dict[str, Any] = {
    "patch_size": 1, "in_channels": 64, "num_layers": 19, "num_single_layers": 38, "attention_head_dim": 128,
    "num_attention_heads": 24, "joint_attention_dim": 4096, "pooled_projection_dim": 768, "axes_dims_rope": (16, 56, 56),
}  # fmt: skip
ARCHITECTURES: dict[str, Architecture] = {
    "sd3.5-medium": Architecture("SD3Transformer2DModel", _SD35_MEDIUM, 333, SD3_ENCODERS),
    "sd3.5-large": Architecture("SD3Transformer2DModel", _SD35_LARGE, 333, SD3_ENCODERS),
    "flux.1-dev": Architecture("FluxTransformer2DModel", {**_FLUX, "guidance_embeds": True}, 512, FLUX_ENCODERS),
    "flux.1-schnell": Architecture("FluxTransformer2DModel", {**_FLUX, "guidance_embeds": False}, 512, FLUX_ENCODERS),
}
"""The published architectures by name."""


def architecture(name: str) -> Architecture:
    """An architecture by name. Raises `ConfigError` for an unknown one."""
    if name not in ARCHITECTURES:
        raise ConfigError(f"unknown architecture {name!r}; allowed: {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name]


@dataclass(frozen=True)
class Memory:
    """Bytes. `weights`: frozen transformer and decoder. `trained`: LoRA (or all weights), gradient, AdamW's moments, average.

    `update`, `rollout` and `decode` are the peaks that a micro-batch of training (forward and backward), a call of sampling and a
    batch of decoding add; `encoders` are the text encoders' weights, which are on the device only for new prompts. These four do
    not add up, because they follow each other. `parameters` and `trained_parameters` are counts.
    """

    parameters: int
    trained_parameters: int
    weights: int
    trained: int
    update: int
    rollout: int
    decode: int
    encoders: int

    @property
    def peak(self) -> int:
        """Permanent memory and the largest phase, without stored trajectories and the reward's network."""
        return self.weights + self.trained + max(self.update, self.rollout, self.decode, self.encoders)


def count_memory(
    name: str,
    resolution: int = 512,
    update_rows: int = 8,
    rollout_rows: int = 16,
    rank: int = 32,
    dtype: str = "bfloat16",
    checkpointing: bool = True,
    full: bool = False,
    decode_batch: int = 8,
    reference: bool = False,
) -> Memory:
    """The memory of the architecture `name`. Rows are latents per network call (doubled by guidance); `full`: all weights are
    trained and stored in float32, and in `dtype` during a call (autocast's cache), instead of a LoRA of `rank`; `reference`: a
    frozen copy of them is kept. Raises `ConfigError` for an unknown name."""
    require(dtype in DTYPE_BYTES, "dtype", dtype, f"one of {', '.join(DTYPE_BYTES)}")
    known = architecture(name)
    network, precision, size = known.build(), getattr(torch, dtype), DTYPE_BYTES[dtype]
    parameters = sum(p.numel() for p in network.parameters())
    nn.Module.to(network, precision)  # diffusers' own `to` warns of layers to keep in float32 even if there are none
    network.requires_grad_(full)
    if not full:
        Adapters(network, rank, float(rank), LORA_TARGETS, seed=0)
    trained = sum(p.numel() for p in network.parameters() if p.requires_grad)
    for parameter in network.parameters():
        parameter.data = parameter.data.to(precision)  # as autocast computes
    if checkpointing:
        network.enable_gradient_checkpointing()
    with torch.device("meta"):
        decoder = import_module("diffusers").AutoencoderKL(**DECODER)
        latent = torch.empty(decode_batch, DECODER["latent_channels"], resolution // 8, resolution // 8)
    network.train()
    with _flash_attention():
        update = _peak(lambda: _step(network, _inputs(known, update_rows, resolution, precision)), network)
        with torch.no_grad():
            rollout = _peak(lambda: network(**_inputs(known, rollout_rows, resolution, precision)), network)
            decode = _peak(lambda: decoder.decode(latent), decoder)
    frozen = 0 if full and not reference else parameters * size
    cast = parameters * size if full and dtype != "float32" else 0
    return Memory(
        parameters=parameters,
        trained_parameters=trained,
        weights=frozen + sum(p.numel() for p in decoder.parameters()) * 4,
        trained=trained * OPTIMIZER_BYTES,
        update=max(update - trained * size, 0) + cast,  # without the gradients, which `trained` includes
        rollout=rollout + cast,
        decode=decode,
        encoders=known.encoder_parameters * size,
    )


def _step(network: Any, inputs: Mapping[str, Any]) -> None:
    """Forward and backward pass of a loss; the inputs live as long as it takes."""
    network(**inputs)[0].float().square().mean().backward()


def _inputs(known: Architecture, rows: int, resolution: int, precision: torch.dtype) -> Mapping[str, Any]:
    """The arguments of the transformer for `rows` latents."""
    channels, side, config = DECODER["latent_channels"], resolution // 8, known.config

    def shaped(*shape: int) -> Tensor:
        return torch.empty(shape, device="meta", dtype=precision)

    common = {
        "encoder_hidden_states": shaped(rows, known.text_tokens, known.text_width),
        "pooled_projections": shaped(rows, config["pooled_projection_dim"]),
        "timestep": shaped(rows),
        "return_dict": False,
    }
    if known.transformer.startswith("SD3"):
        return {**common, "hidden_states": shaped(rows, channels, side, side)}
    tokens = (side // 2) ** 2
    guidance = shaped(rows) if config["guidance_embeds"] else None
    positions = {"txt_ids": shaped(known.text_tokens, 3), "img_ids": shaped(tokens, 3)}
    return {**common, **positions, "hidden_states": shaped(rows, tokens, 4 * channels), "guidance": guidance}


@contextmanager
def _flash_attention() -> Iterator[None]:
    """Attention as GPUs compute it, without the matrix of weights, which the plain formula on "meta" would store. A function mode
    would not do: it is off while checkpointing computes activations again."""
    plain = F.scaled_dot_product_attention

    def attention(query: Tensor, key: Tensor, value: Tensor, *more: Any, **options: Any) -> Tensor:
        if query.dtype == torch.float32 or more or options.get("attn_mask") is not None:
            return plain(query, key, value, *more, **options)
        return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value)[0]

    F.scaled_dot_product_attention = attention  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        F.scaled_dot_product_attention = plain  # pyright: ignore[reportAttributeAccessIssue]


class _StorageCounter(TorchDispatchMode):
    """Bytes of the storages that operations made and that are still alive, and the largest sum so far."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.known = {t.untyped_storage()._cdata for t in [*network.parameters(), *network.buffers()]}
        self.alive: dict[int, Any] = {}
        self.now = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, then count new storages."""
        found = func(*args, **(kwargs or {}))
        for tensor in tree_iter(found):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        return found

    def _add(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.known or key in self.alive:
            return
        self.alive[key] = weakref.finalize(storage, self._drop, key, size)
        self.now += size
        self.largest = max(self.largest, self.now)

    def _drop(self, key: int, size: int) -> None:
        self.alive.pop(key, None)
        self.now -= size


def _peak(work: Callable[[], Any], network: Any) -> int:
    with _StorageCounter(network) as counter:
        work()
    for parameter in network.parameters():
        parameter.grad = None
    return counter.largest
