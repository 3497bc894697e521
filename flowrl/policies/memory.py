"""The GPU memory that a model needs, counted without a GPU.

The network is built on PyTorch's "meta" device (shapes only). A micro-batch of training, a call of sampling and a batch of
decoding run there, while the storage of every tensor is counted at allocation and release. The counts do not include what exists
only on a real device: the libraries' work space, and the allocator's unused reserve. `benchmarks/full_size.py` compares them with
real runs.
"""

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from flowrl.errors import require
from flowrl.policies.architectures import ARCHITECTURES, Architecture, Size, architecture_of
from flowrl.policies.family import DTYPES
from flowrl.policies.lora import Adapters

OPTIMIZER_BYTES = 4 * (1 + 1 + 2 + 1)
"""Bytes per trained weight: the float32 weight, its gradient, AdamW's two moments, the averaged weight."""


@dataclass(frozen=True)
class Memory:
    """Memory in bytes, except for the two numbers of parameters.

    `update`, `rollout`, `decode` and `encoders` occur one after the other, so their memory does not add up.

    Args:
        parameters: number of parameters.
        trained_parameters: number of trained parameters.
        weights: frozen transformer and decoder.
        trained: LoRA (or all weights), gradient, AdamW's moments, average.
        update: peak added by a micro-batch of training (forward and backward).
        rollout: peak added by a call of sampling.
        decode: peak added by decoding all images that are scored together.
        encoders: weights of the text encoders, which are on the device only for new prompts.
        trajectories: stored nodes and velocities.
    """

    parameters: int
    trained_parameters: int
    weights: int
    trained: int
    update: int
    rollout: int
    decode: int
    encoders: int
    trajectories: int = 0

    @property
    def always(self) -> int:
        """Memory that is occupied in every phase."""
        return self.weights + self.trained + self.trajectories

    @property
    def peak(self) -> int:
        """Permanent memory and the largest phase, without the reward's network."""
        return self.always + max(self.update, self.rollout, self.decode, self.encoders)


def count_memory(
    model: str | Architecture,
    resolution: int | Size = 512,
    update_rows: int = 8,
    rollout_rows: int = 16,
    rank: int = 32,
    dtype: str = "bfloat16",
    checkpointing: bool = True,
    full: bool = False,
    decode_batch: int = 8,
    reference: bool = False,
    images: int = 0,
    decode_dtype: str = "float32",
    targets: Sequence[str] = (),
) -> Memory:
    """The GPU memory that training a model needs, by part.

    During a network call autocast stores the trained weights in `dtype` too.

    Args:
        model: an architecture, or the name of a published model.
        resolution: size of the images in pixels, or side of a square image.
        update_rows: latents per network call of the update; guidance doubles them.
        rollout_rows: latents per network call of the rollout; guidance doubles them.
        rank: rank of the LoRA.
        dtype: type of the network's computations.
        checkpointing: whether gradient checkpointing is on.
        full: train all weights, stored in float32, instead of a LoRA.
        decode_batch: images per call of the image decoder.
        reference: keep a frozen copy of the trained weights.
        images: number of images that are scored together.
        decode_dtype: type of the decoder's computations.
        targets: layers with a LoRA; empty for the model's default.

    Returns:
        The memory of each part in bytes.

    Raises:
        ConfigError: the model or a dtype is unknown.
    """
    for name, value in (("dtype", dtype), ("decode_dtype", decode_dtype)):
        require(value in DTYPES, name, value, f"one of {', '.join(DTYPES)}")
    known = architecture_of(model) if isinstance(model, str) else model
    require(known is not None, "model", model, f"one of {', '.join(ARCHITECTURES)}, or a folder")
    assert known is not None
    size = resolution if isinstance(resolution, Size) else Size(resolution, resolution)
    decoder, latents = known.build_decoder(), min(decode_batch, images or decode_batch)
    nn.Module.to(decoder, DTYPES[decode_dtype])
    latent, _, _, image = known.inputs(latents, size, DTYPES[decode_dtype])
    with torch.no_grad():
        decode = _peak(lambda: known.family.decode(SimpleNamespace(vae=decoder), latent, image), decoder)
    network, precision = known.build(), DTYPES[dtype]
    parameters = sum(p.numel() for p in network.parameters())
    nn.Module.to(network, precision)  # diffusers' `to` warns of layers to keep in float32 even if there are none
    network.requires_grad_(full)
    if not full:
        Adapters(network, rank, float(rank), targets or known.family.lora_targets, seed=0)
    trained = sum(p.numel() for p in network.parameters() if p.requires_grad)
    for parameter in network.parameters():
        parameter.data = parameter.data.to(precision)  # as autocast computes
    if checkpointing:
        network.enable_gradient_checkpointing()
    network.train()

    def call(rows: int) -> Tensor:
        inputs.append(known.inputs(rows, size, precision))  # kept until the end
        return known.family.velocity(network, *inputs[-1])

    inputs: list[Any] = []
    update = _peak(lambda: call(update_rows).float().square().mean().backward(), network)
    inputs.clear()
    with torch.no_grad():
        rollout = _peak(lambda: call(rollout_rows), network)
    scored = 4 * 3 * size.height * size.width * size.frames * images
    cast = trained * precision.itemsize if dtype != "float32" else 0
    buffers = sum(b.numel() for b in network.buffers())
    frozen = (0 if full and not reference else parameters + buffers) * precision.itemsize + (buffers * 4 if full else 0)
    return Memory(
        parameters=parameters,
        trained_parameters=trained,
        weights=frozen + sum(p.numel() * p.itemsize for p in decoder.parameters()),
        trained=trained * OPTIMIZER_BYTES,
        update=max(update - trained * precision.itemsize, 0) + cast,  # without the gradients, which `trained` includes
        rollout=rollout + cast,
        decode=max(decode + scored, 2 * scored),  # the images so far; at the end they are joined, which copies them
        encoders=known.encoder_parameters * precision.itemsize,
    )


@contextmanager
def _flash_attention() -> Iterator[None]:
    """Attention as GPUs compute it, without the matrix of weights, which the plain formula on "meta" would store.

    A function mode does not work: it is off while checkpointing recomputes activations.
    """
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


class StorageCounter(TorchDispatchMode):
    """Bytes of the live tensors (`now`) and the largest sum so far (`largest`).

    Every storage that an operation returns within this context counts once, until it is freed; `add_all` counts existing
    storages.

    Args:
        kind: type of the device whose memory is counted.
        network: its storages do not count; None: all count.
    """

    def __init__(self, kind: str, network: Any = None) -> None:
        super().__init__()
        given = [] if network is None else [*network.parameters(), *network.buffers()]
        self.kind, self.known = kind, {t.untyped_storage()._cdata for t in given}
        self.alive: dict[int, Any] = {}
        self.now = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, then count new storages."""
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor):
                self.add(tensor)
        return result

    def add_all(self) -> None:
        """Count all tensors that Python's garbage collector tracks."""
        for item in gc.get_objects():
            if issubclass(type(item), Tensor):
                self.add(item)

    def add(self, tensor: Tensor) -> None:
        """Count the storage of `tensor` unless it counts already."""
        if tensor.device.type != self.kind or tensor.layout != torch.strided:
            return
        storage = tensor.untyped_storage()
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
    with _flash_attention(), StorageCounter("meta", network) as counter:
        work()
    for parameter in network.parameters():
        parameter.grad = None
    return counter.largest
