"""How much GPU memory a model of a published size needs, counted without weights, a GPU or a download.

The networks are built on PyTorch's "meta" device (shapes only), and a micro-batch of training, a call of sampling and a batch of
decoding run there while the storage of every tensor is counted as it comes and goes. What is missing is what only a device shows:
the libraries' own work space, and the allocator's unused reserve.
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

from flowrl.errors import require
from flowrl.policies.architectures import Architecture, architecture
from flowrl.policies.lora import LORA_TARGETS, Adapters

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
OPTIMISED = 4 * (1 + 1 + 2 + 1)
"""Bytes per trained weight: the float32 weight, its gradient, AdamW's two moments, the averaged weight."""
DECODER: dict[str, Any] = {
    "in_channels": 3, "out_channels": 3, "latent_channels": 16, "block_out_channels": (128, 256, 512, 512), "layers_per_block": 2,
    "down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4, "use_quant_conv": False,
    "use_post_quant_conv": False,
}  # fmt: skip
"""The image decoder of SD3, SD3.5 and FLUX.1."""


@dataclass(frozen=True)
class Memory:
    """Bytes. `weights`: frozen transformer and decoder. `trained`: LoRA (or all weights), gradient, AdamW's moments, average.

    `update`, `rollout` and `decode` are the most that a micro-batch of training (forward and backward), a call of sampling and a
    batch of decoding add while they run; `encoders` are the text encoders' weights, which visit the device for new prompts. These
    four do not add up: they come one after the other. `parameters` and `trained_parameters` are counts.
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
        """What is there all the time and the largest phase; without stored trajectories and the reward's network."""
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
    """Count for the architecture `name` (`policies.architectures`). Rows are what the network sees at once, guidance included.

    `full`: all weights are trained, and kept in float32, instead of a LoRA of `rank`; `reference`: a frozen copy of them is there
    too. A call then holds them in `dtype` besides (autocast's cache). Raises `ConfigError` for an unknown name.
    """
    require(dtype in BYTES, "dtype", dtype, f"one of {', '.join(BYTES)}")
    known = architecture(name)
    network = known.build()
    parameters = sum(p.numel() for p in network.parameters())
    nn.Module.to(network, getattr(torch, dtype))  # that of diffusers warns of layers to be kept in float32 where there are none
    if full:
        network.requires_grad_(True)
    else:
        network.requires_grad_(False)
        Adapters(network, rank, float(rank), LORA_TARGETS, seed=0)
    trained = sum(p.numel() for p in network.parameters() if p.requires_grad)
    for parameter in network.parameters():
        parameter.data = parameter.data.to(getattr(torch, dtype))  # as autocast computes
    if checkpointing:
        network.enable_gradient_checkpointing()
    decoder = import_module("diffusers").AutoencoderKL
    with torch.device("meta"):
        decoder = decoder(**DECODER)
        latent = torch.empty(decode_batch, 16, resolution // 8, resolution // 8)
    frozen = 0 if full and not reference else parameters * BYTES[dtype]
    cast = parameters * BYTES[dtype] if full and dtype != "float32" else 0
    network.train()
    with _flash():
        update = _largest(lambda: _step(network, _inputs(known, update_rows, resolution, dtype)), network)
        with torch.no_grad():
            rollout = _largest(lambda: network(**_inputs(known, rollout_rows, resolution, dtype)), network)
            decode = _largest(lambda: decoder.decode(latent), decoder)
    decoding = sum(p.numel() for p in decoder.parameters()) * 4
    gradients = sum(p.numel() for p in network.parameters() if p.requires_grad) * BYTES[dtype]
    return Memory(
        parameters, trained, frozen + decoding, trained * OPTIMISED, max(update - gradients, 0) + cast, rollout + cast, decode,
        encoder_parameters(known) * BYTES[dtype],
    )  # fmt: skip


def encoder_parameters(known: Architecture) -> int:
    """Parameters of the text encoders: T5 v1.1 XXL's and CLIP ViT-L/14's; for SD3.5 also OpenCLIP ViT-bigG/14's."""
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection, T5Config, T5EncoderModel

    layers: dict[str, Any] = {
        "projection_dim": 768,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
    }
    wide: dict[str, Any] = {
        "projection_dim": 1280,
        "hidden_size": 1280,
        "intermediate_size": 5120,
        "num_hidden_layers": 32,
        "num_attention_heads": 20,
    }
    t5 = T5Config(
        vocab_size=32128, d_model=4096, d_kv=64, d_ff=10240, num_layers=24, num_heads=64, feed_forward_proj="gated-gelu"
    )
    with torch.device("meta"):
        encoders: list[Any] = [T5EncoderModel(t5), CLIPTextModelWithProjection(CLIPTextConfig(**layers))]
        if known.transformer.startswith("SD3"):
            encoders.append(CLIPTextModelWithProjection(CLIPTextConfig(**wide)))
    return sum(p.numel() for encoder in encoders for p in encoder.parameters())


def _step(network: Any, inputs: Mapping[str, Any]) -> None:
    """Forward and backward of a loss."""
    network(**inputs)[0].float().square().mean().backward()


def _inputs(known: Architecture, rows: int, resolution: int, dtype: str) -> Mapping[str, Any]:
    """The arguments of the transformer for `rows` latents."""
    kind, side = getattr(torch, dtype), resolution // 8

    def shaped(*shape: int) -> Tensor:
        return torch.empty(shape, device="meta", dtype=kind)

    words = shaped(rows, known.text_tokens, known.text_width)
    common = {"encoder_hidden_states": words, "pooled_projections": shaped(rows, known.config["pooled_projection_dim"]),
              "timestep": shaped(rows), "return_dict": False}  # fmt: skip
    if known.transformer.startswith("SD3"):
        return {**common, "hidden_states": shaped(rows, known.image_channels, side, side)}
    tokens = (side // 2) ** 2
    guidance = shaped(rows) if known.config["guidance_embeds"] else None
    places = {"txt_ids": shaped(known.text_tokens, 3), "img_ids": shaped(tokens, 3)}
    return {**common, **places, "hidden_states": shaped(rows, tokens, 4 * known.image_channels), "guidance": guidance}


@contextmanager
def _flash() -> Iterator[None]:
    """Attention as GPUs compute it, without the matrix of weights; "meta" would take the plain formula. A function mode would not
    do: it is off while checkpointing computes activations again."""
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


class _Counter(TorchDispatchMode):
    """Bytes of the storages that operations made and that are still alive, and the largest sum so far."""

    def __init__(self, ours: Any) -> None:
        super().__init__()
        self.known = {t.untyped_storage()._cdata for t in [*ours.parameters(), *ours.buffers()]}
        self.alive: dict[int, Any] = {}
        self.now = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, then count what is new."""
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


def _largest(work: Callable[[], Any], ours: Any) -> int:
    with _Counter(ours) as counter:
        work()
    for parameter in ours.parameters():
        parameter.grad = None
    return counter.largest
