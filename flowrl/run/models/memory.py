"""Architectures of published models and of a model's folder, and the GPU memory that they need,
counted without a GPU.

The network is built on PyTorch's "meta" device (shapes only). A micro-batch of training, a call of
sampling and a batch of decoding run there, while the storage of every tensor is counted at
allocation and release, and operations and FLOPs as they are dispatched. This takes ten seconds, so
the counts of the presets are stored (data/counts.json, made by ``python benchmarks/flops.py``).
The counts do not include what exists only on a real device: the libraries' work space, and the
allocator's unused reserve. `benchmarks/full_size.py` compares them with real runs.
"""

import hashlib
import json
import math
import re
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import astuple, dataclass, field, replace
from functools import cache, cached_property, partial
from importlib import import_module, resources
from importlib.metadata import version
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from flowrl.core.errors import ConfigError
from flowrl.core.policy_options import PolicyOptions
from flowrl.policies.families import Family, shape_of, size_of
from flowrl.policies.lora import Adapters
from flowrl.policies.pipeline import DTYPES
from flowrl.run.io import cache_folder, write_json
from flowrl.run.models.hub import family_of
from flowrl.run.reading import read_json

REFERENCE_TOKENS = 64 * 64
"""Tokens of a reference image of about one megapixel."""
TEXT_WIDTHS = ("joint_attention_dim", "text_dim", "cap_feat_dim", "caption_channels")
"""Names of the width of a prompt's embedding in a transformer's settings."""


@dataclass(frozen=True)
class Architecture:
    """A transformer, the lengths of its prompts, and its image decoder.

    Settings that are left out have the defaults of diffusers' classes, which are the published ones
    of FLUX.1, Z-Image, Qwen-Image, Wan (14B) and SANA (1.6B).

    Args:
        family: the model family.
        transformer: class of the transformer in diffusers.
        config: settings of the transformer.
        encoder_parameters: number of parameters of all text encoders.
        text_width: width of a prompt's embedding.
        clip_tokens: length of a prompt for CLIP; 0 if its tokens are not part of the embedding.
        decoder_class: class of the image decoder in diffusers.
        decoder: settings of the image decoder.
        second: whether there is a second, frozen transformer of this kind.
    """

    family: Family
    transformer: str
    config: Mapping[str, Any]
    encoder_parameters: int
    text_width: int
    clip_tokens: int = 0
    decoder_class: str = "AutoencoderKL"
    decoder: Mapping[str, Any] = field(default_factory=dict)
    second: bool = False

    @property
    def text_tokens(self) -> int:
        """The length of a prompt's embedding, by default."""
        return self.clip_tokens + self.family.text_tokens

    @cached_property
    def pipeline(self) -> Any:
        """The pipeline on "meta", without text encoders."""
        diffusers = import_module("diffusers")
        kind = getattr(diffusers, self.family.pipeline)
        own = {
            "transformer": self.build(),
            "vae": self.build_decoder(),
            "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(),
        }
        given = signature(kind.__init__).parameters.values()
        needed = [one.name for one in given if one.default is one.empty and one.name != "self"]
        return kind(**dict.fromkeys(needed) | own)

    def latent_shape(self, options: PolicyOptions) -> tuple[int, ...]:
        """The shape of one latent."""
        size = (*options.size, options.num_frames)
        return shape_of(self.pipeline, self.family, *size)

    def inputs(self, rows: int, options: PolicyOptions, dtype: torch.dtype) -> tuple[Any, ...]:
        """The arguments of `Family.velocity` after the transformer for `rows` latents, on "meta".

        The mask of padded prompts, one byte per token, is left out. Prompts have the least number
        of reference images that the family needs, or one if it can have none.
        """

        def shaped(*shape: int) -> Tensor:
            return torch.empty(rows, *shape, device="meta", dtype=dtype)

        tokens = self.clip_tokens + (options.max_sequence_length or self.family.text_tokens)
        embeddings = {
            "words": shaped(tokens, self.text_width),
            "pooled": shaped(self.pipeline.transformer.config.get("pooled_projection_dim", 0)),
            "mask": None,
        }
        least, most = self.family.images
        if images := least or min(1, most):
            side = math.isqrt(REFERENCE_TOKENS)
            channels = self.pipeline.transformer.config.in_channels
            embeddings["reference"] = shaped(images * REFERENCE_TOKENS, channels)
            embeddings["sizes"] = torch.full((rows, images, 2), side)
        image = size_of(self.pipeline, *options.size)
        return shaped(*self.latent_shape(options)), shaped(), embeddings, image

    def embedding(self, options: PolicyOptions) -> int:
        """Bytes of a prompt's embedding at full length."""
        tokens = self.clip_tokens + (options.max_sequence_length or self.family.text_tokens)
        numbers = tokens * self.text_width + self.config.get("pooled_projection_dim", 0)
        if self.family.images[1]:
            numbers += REFERENCE_TOKENS * self.pipeline.transformer.config.in_channels
        return numbers * DTYPES[options.dtype].itemsize

    def gathered(self, reshard: bool) -> tuple[int, int]:
        """Weights that a process gathers at a time if they are sharded, and those of the largest
        block: with `reshard` those outside of blocks and of two blocks, because the next block is
        gathered while one computes; otherwise all of them.
        """
        network = self.build()
        inside = [
            _numbers(module.parameters())
            for module in network.modules()
            if type(module).__name__ in network._no_split_modules
        ]
        every = _numbers(network.parameters())
        return every - reshard * (sum(inside) - 2 * max(inside)), max(inside)

    def build(self, device: str = "meta") -> Any:
        """The transformer with random weights on `device`; on "meta" it takes no memory."""
        with torch.device(device):
            return getattr(import_module("diffusers"), self.transformer)(**self.config)

    def build_decoder(self, device: str = "meta") -> Any:
        """The image decoder, in the same way."""
        with torch.device(device):
            return getattr(import_module("diffusers"), self.decoder_class)(**self.decoder)

    @staticmethod
    def of_folder(folder: Path) -> "Architecture":
        """The architecture of the pipeline in `folder`, from its JSON files; its text encoders are
        those of the published model of this pipeline.

        Raises `OSError`, `KeyError` or `ValueError` if files are missing or have another form.
        """
        transformer, decoder = (
            read_json(folder / part / "config.json") for part in ("transformer", "vae")
        )
        published = {known.family.pipeline: known for known in ARCHITECTURES.values()}
        return replace(
            published[read_json(folder / "model_index.json")["_class_name"]],
            config={name: value for name, value in transformer.items() if name[0] != "_"},
            decoder={name: value for name, value in decoder.items() if name[0] != "_"},
            text_width=transformer[next(filter(transformer.get, TEXT_WIDTHS), TEXT_WIDTHS[0])],
            second=(folder / "transformer_2").is_dir(),
        )


ARCHITECTURES = {
    name: Architecture(family_of(row.pop("pipeline")), **row)
    for name, row in json.loads(
        (resources.files("flowrl") / "data" / "architectures.json").read_text()
    ).items()
}
"""The published architectures by name, from data/architectures.json. Text encoders: T5 v1.1 XXL and
CLIP ViT-L/14 (FLUX.1), also OpenCLIP ViT-bigG/14 (SD3.5), Qwen3-4B (FLUX.2 [klein] 4B, Z-Image) or
8B (klein 9B), Qwen2.5-VL-7B with the vision tower that the pipeline loads too (Qwen-Image), UMT5
XXL (Wan), Gemma 2 2B (SANA, whose decoder is that of diffusers' script convert_dcae_to_diffusers).
"""


def architecture_of(model: str) -> Architecture | None:
    """The architecture of the pipeline in the folder `model`, or of a model whose name contains a
    published one's.
    """
    with suppress(OSError, KeyError, ValueError):
        return Architecture.of_folder(Path(model))
    for name, known in ARCHITECTURES.items():
        # as in stable-diffusion-3.5-medium; Qwen-Image-2.1 is another network than Qwen-Image
        if re.search(re.escape(name.removeprefix("sd")) + r"(?!-2\.)", model.lower()):
            return known
    return None


QUANTIZED = {"int8": 1.0, "nf4": 0.5}
"""Bytes of a quantised weight, without the scales."""
OPTIMIZER_BYTES = 4 * (1 + 1 + 2 + 1)
"""Bytes per trained weight: the float32 weight, its gradient, AdamW's two moments, the averaged
weight.
"""


@dataclass(frozen=True)
class Memory:
    """Memory in bytes, except for the number of parameters.

    `update`, `rollout` and `decode` occur one after the other, so their memory does not add up, and
    the text encoders are freed before the transformer is loaded (`models.load.embed_prompts`).

    Args:
        trained_parameters: number of trained parameters.
        weights: frozen transformer and decoder.
        trained: LoRA (or all weights), gradient, AdamW's moments, average.
        trajectories: stored nodes and velocities.
        update: peak added by a micro-batch of training (forward and backward).
        rollout: peak added by a call of sampling.
        decode: peak added by decoding all images that are scored together.
        encoders: weights of the text encoders, which are on the device only for new prompts, and
            before the transformer, unless adapters are frozen: then with all that is permanent.
        forward_flops: FLOPs of a forward pass per row, of matrix products, convolutions and
            attention; a multiplication and an addition count as two.
        gradient_flops: FLOPs of a forward pass with its backward pass per row.
        decode_flops: FLOPs of decoding an image.
        forward_operations: operations that a network call without gradients dispatches.
        gradient_operations: operations of a call with its backward pass.
        gathered: gathered weights, and the gradients of a block, if weights are sharded.
    """

    trained_parameters: int
    weights: int
    trained: int
    trajectories: int
    update: int
    rollout: int
    decode: int
    encoders: int
    forward_flops: float = 0.0
    gradient_flops: float = 0.0
    decode_flops: float = 0.0
    forward_operations: int = 0
    gradient_operations: int = 0
    gathered: int = 0

    @property
    def peak(self) -> int:
        """Permanent memory and the largest phase, or the text encoders; without the reward's
        network.
        """
        permanent = self.weights + self.trained + self.gathered + self.trajectories
        return max(permanent + max(self.update, self.rollout, self.decode), self.encoders)


def count_memory(
    known: Architecture,
    options: PolicyOptions,
    update_rows: int = 8,
    rollout_rows: int = 16,
    images: int = 0,
    stored: int = 0,
    shards: int = 1,
    reshard: bool = True,
) -> Memory:
    """The GPU memory that training a model needs, by part.

    During a network call autocast stores the trained weights in `dtype` too.

    Args:
        known: the architecture.
        options: options of the policy.
        update_rows: latents per network call of the update; guidance doubles them.
        rollout_rows: latents per network call of the rollout; guidance doubles them.
        images: number of images that are scored together.
        stored: number of stored latents and velocities, in float32.
        shards: number of processes over which the transformer's weights, gradients and moments
            are sharded; 1: replicated.
        reshard: whether a block frees its gathered weights after its forward pass (fsdp2, not
            zero2).

    Returns:
        The memory of each part in bytes.
    """
    full = options.trained == "full"
    dtype, decoding = DTYPES[options.dtype], DTYPES[options.decode_dtype]
    counts = counts_of(known, options)
    # full tuning stores float32 weights (in `trained`) and buffers; its reference is in `dtype`
    held = (not full or options.keep_reference) + known.second
    narrower = dtype.itemsize - QUANTIZED.get(options.quantize, dtype.itemsize)
    copies = 0 if dtype == torch.float32 else counts.trained * dtype.itemsize
    gathered = 0
    if shards > 1:
        every, block = known.gathered(reshard)
        networks = 1 if reshard or not full else 1 + options.keep_reference
        gathered = networks * every * dtype.itemsize + full * block * (dtype.itemsize + 4)
        copies = 0  # the gathered weights
    scored = 4 * 3 * math.prod(options.size) * options.num_frames * images
    update, rollout = counts.update.bytes(update_rows), counts.rollout.bytes(rollout_rows)
    decode = counts.decode.bytes(min(options.decode_batch or 2**30, images or 2**30))
    weights = (
        held * counts.frozen * dtype.itemsize // shards
        - round(held * counts.linear * narrower)
        + 4 * counts.buffers * full
        + counts.decoder * decoding.itemsize
    )
    trained = counts.trained * OPTIMIZER_BYTES // shards
    return Memory(
        trained_parameters=counts.trained,
        weights=weights,
        trained=trained,
        trajectories=4 * stored * counts.latent,
        # without the gradients, which `trained` includes
        update=max(update - counts.trained * dtype.itemsize, 0) + copies,
        rollout=rollout + copies,
        # the images so far; at the end they are joined, which copies them
        decode=max(decode + scored, 2 * scored),
        encoders=known.encoder_parameters * dtype.itemsize
        + (weights + trained) * bool(options.frozen),
        forward_flops=counts.rollout.flops,
        gradient_flops=counts.update.flops,
        decode_flops=counts.decode.flops,
        forward_operations=round(counts.rollout.operations),
        gradient_operations=round(counts.update.operations),
        gathered=gathered,
    )


@dataclass(frozen=True)
class Calls:
    """Calls of one kind: peak bytes are `least` + rows x `each`; FLOPs per row; operations."""

    least: float
    each: float
    flops: float
    operations: float

    def bytes(self, rows: int) -> int:
        """Peak bytes of a call with `rows` rows."""
        return round(self.least + rows * self.each)


@dataclass(frozen=True)
class Counts:
    """Numbers of elements of a latent, trained parameters, frozen ones and buffers, those in linear
    layers, buffers, and those of the decoder; and the three kinds of calls.
    """

    latent: int
    trained: int
    frozen: int
    linear: int
    buffers: int
    decoder: int
    update: Calls
    rollout: Calls
    decode: Calls


ROWS = 2, 3
"""Rows of the calls that are run; peaks are linear in the rows."""


def counts_key(known: Architecture, options: PolicyOptions) -> str:
    """A digest of what the counts depend on."""
    size = *options.size, options.num_frames, options.max_sequence_length or 0
    bytes_each = DTYPES[options.dtype].itemsize, DTYPES[options.decode_dtype].itemsize
    trained = options.trained, options.decode_tiling, options.lora_rank, *options.lora_targets
    form = known.transformer, *sorted(known.config.items()), *sorted(known.decoder.items())
    form += (known.family.pipeline,) * bool(known.family.images[1])
    given = repr((form, size, bytes_each, trained, options.gradient_checkpointing))
    return hashlib.sha256(given.encode()).hexdigest()[:16]


@cache
def preset_counts() -> dict[str, list[Any]]:
    """The fields of the presets' counts by `counts_key`."""
    return json.loads((resources.files("flowrl") / "data" / "counts.json").read_text())


def counts_of(known: Architecture, options: PolicyOptions) -> Counts:
    """The counts of a preset, those that an earlier process stored in the user's cache folder, or
    new ones.
    """
    key = counts_key(known, options)
    path = cache_folder() / "counts" / f"{key}-{torch.__version__}-{version('diffusers')}.json"
    row = preset_counts().get(key)
    if row is None:
        with suppress(OSError, ConfigError):
            row = read_json(path, list[Any])
    with suppress(TypeError):  # of a damaged file
        if row is not None:
            return Counts(*row[:6], *(Calls(*calls) for calls in row[6:]))
    counts = count(known, options)
    with suppress(OSError):
        write_json(path, list(astuple(counts)))
    return counts


def count(known: Architecture, options: PolicyOptions) -> Counts:
    """The counts on "meta"."""
    family, full = known.family, options.trained == "full"
    dtype, decoding = DTYPES[options.dtype], DTYPES[options.decode_dtype]
    # diffusers' `to` warns of layers to keep in float32 even if there are none
    decoder = nn.Module.to(known.build_decoder(), decoding)
    if options.decode_tiling:
        cast(Any, decoder).enable_tiling()
    network = nn.Module.to(known.build(), dtype).requires_grad_(full)
    buffers = _numbers(network.buffers())
    frozen = _numbers(network.parameters()) + buffers
    linear = _numbers(m.weight for m in network.modules() if isinstance(m, nn.Linear))
    if not full:
        targets = options.lora_targets or family.lora_targets
        Adapters(network).add(options.lora_rank, options.lora_alpha, targets, seed=0)
    nn.Module.to(network, dtype)  # as autocast computes with a LoRA
    if options.gradient_checkpointing:
        cast(Any, network).enable_gradient_checkpointing()
    network.train()

    def call(rows: int) -> None:
        inputs = known.inputs(rows, options, dtype)  # held until the end of the backward pass
        velocity = family.velocity(network, *inputs)
        if velocity.requires_grad:
            velocity.float().square().mean().backward()

    trained = _numbers(p for p in network.parameters() if p.requires_grad)
    call(1)  # creates what later calls reuse
    update = _calls(call, network)
    latent, *_, size = known.inputs(1, options, decoding)
    pipe = SimpleNamespace(vae=decoder)
    with torch.no_grad():
        rollout = _calls(call, network)
        decode = _calls(
            lambda rows: family.decode(pipe, latent.expand(rows, *latent.shape[1:]), size), decoder
        )
    numbers = math.prod(latent.shape[1:])
    decoders = _numbers(decoder.parameters())
    return Counts(numbers, trained, frozen, linear, buffers, decoders, update, rollout, decode)


def _calls(call: Callable[[int], Any], network: Any) -> Calls:
    first, second = (_counted(partial(call, rows), network) for rows in ROWS)
    each = (second.largest - first.largest) / (ROWS[1] - ROWS[0])
    least = first.largest - ROWS[0] * each
    return Calls(least, each, first.flops / ROWS[0], first.operations)


def _numbers(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


class StorageCounter(TorchDispatchMode):
    """Bytes of the live tensors (`now`) and the largest sum so far (`largest`); FLOPs, and
    dispatched operations other than views.

    Every storage that an operation returns within this context, or that is given to `add`, counts
    once, until it is freed.

    Args:
        kind: type of the device whose memory is counted.
        network: its storages do not count; None: all count.
    """

    def __init__(self, kind: str, network: Any = None) -> None:
        super().__init__()
        given = [] if network is None else [*network.parameters(), *network.buffers()]
        self.kind, self.known = kind, {t.untyped_storage()._cdata for t in given}
        self.now = self.largest = self.flops = self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, then count new storages."""
        result = func(*args, **(kwargs or {}))
        self.operations += not func.is_view
        if formula := flop_registry.get(func.overloadpacket):
            self.flops += formula(*args, **(kwargs or {}), out_val=result)
        for tensor in (result,) if isinstance(result, Tensor) else tree_iter(result):
            if isinstance(tensor, Tensor):
                self.add(tensor)
        return result

    def add(self, tensor: Tensor) -> None:
        """Count the storage of `tensor` unless it counts already."""
        if tensor.device.type != self.kind or tensor.layout != torch.strided:
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self.known:
            self.known.add(key)
            weakref.finalize(storage, self._drop, key, size)
            self.now += size
            self.largest = max(self.largest, self.now)

    def _drop(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def _counted(work: Callable[[], Any], network: Any) -> StorageCounter:
    """What `work` holds on "meta" beside `network`, and computes there.

    Attention is computed as GPUs do, without the matrix of weights, which the plain formula on
    "meta" would store. A function mode does not work: it is off while checkpointing recomputes
    activations.
    """
    plain: Any = F.scaled_dot_product_attention

    def attention(query: Tensor, key: Tensor, value: Tensor, *more: Any, **options: Any) -> Tensor:
        if query.dtype == torch.float32 or more or options.get("attn_mask") is not None:
            return plain(query, key, value, *more, **options)
        return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value)[0]

    counter = StorageCounter("meta", network)
    F.scaled_dot_product_attention = attention
    try:
        with counter:
            work()
    finally:
        F.scaled_dot_product_attention = plain
    network.zero_grad()
    return counter
