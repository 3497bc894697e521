"""Diffusers pipelines as policies: options, and the code common to all model families."""

import copy
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from flowrl.core.errors import CheckpointError, require
from flowrl.core.policy_options import PolicyOptions, Precision
from flowrl.core.processes import Processes
from flowrl.core.prompt import require_images
from flowrl.core.sharded import full_tensors, is_sharded_network
from flowrl.core.types import Condition, Prompt, Schedule
from flowrl.policies.device import device_of
from flowrl.policies.embeddings import MemoryStore, PromptEmbeddings, Store
from flowrl.policies.families import (
    Family,
    embeddings_of,
    linear_guidance,
    negatives,
    shape_of,
    size_of,
)
from flowrl.policies.lora import Adapters, fold, is_lora
from flowrl.policies.prompt_length import cut_prompts, quiet

_LOG = logging.getLogger(__name__)
EMBEDDED_TOGETHER = 8
"""Prompts per call of the text encoders: their activations take less memory than their weights."""
COMPILED_VERSIONS = 64
"""Compiled versions of a block: kinds of blocks x sampling and training x with and without adapters
x batch sizes.
"""

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in get_args(Precision)}
"""Precisions by their names in settings."""
COMPILER = "inductor"
"""The backend of torch.compile."""
RESIZABLE = ("rows", "gradient_checkpointing", "decode_batch", "compile")
"""Options that a policy can change (`PipelinePolicy.resize`)."""


def computing_in(dtype: torch.dtype, device: torch.device) -> AbstractContextManager[Any]:
    """Autocast to `dtype` within this context; nothing for float32."""
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype=dtype)


def schedule_of(scheduler: Any, device: torch.device) -> Schedule:
    """The grid that was set in a diffusers scheduler, float32."""
    return Schedule(scheduler.sigmas.float(), scheduler.timesteps.float()).to(device)


class PipelinePolicy:
    """`FlowPolicy` over the transformer of a diffusers pipeline.

    The transformer and the image decoder move to `options.device`. The text encoders move to the
    device only to embed new prompts; afterwards they are in main memory or, with `load_encoders`,
    deleted. The reference is the network with its adapter disabled, or a frozen copy. `adapters`
    are the transformer's LoRAs. `latent_shape` is [channel, height, width] (SD3), [token, channel]
    of 2 x 2 patches (FLUX, Qwen-Image) or [channel, frame, height, width] (Wan), `latent_size` the
    height and width of the latent image. A second transformer (Wan 2.2) is frozen: `velocity` has
    no gradient where it is used.

    Args:
        pipe: the pipeline. The policy trains its transformer or adds an adapter to it, so it has
            the current weights.
        family: the model family.
        options: sizes, device, dtype, guidance, adapter and memory settings.
        load_encoders: loads the text encoders of a `pipe` without them, by name.
        store: where the prompts' embeddings are kept; None: in main memory.
        start: the LoRA from which the trained one starts, as `Adapters.tensors` returns it; with
            full fine-tuning it is added to the weights. The reference does not have it.
        frozen: LoRAs that are active but not trained, by name, with their tensors under diffusers'
            names.
    """

    def __init__(
        self,
        pipe: Any,
        family: Family,
        options: PolicyOptions = PolicyOptions(),
        load_encoders: Callable[[], Mapping[str, nn.Module]] | None = None,
        store: Store | None = None,
        start: Mapping[str, Tensor] | None = None,
        frozen: Mapping[str, Mapping[str, Tensor]] | None = None,
    ) -> None:
        kind = type(pipe).__name__
        require(kind == family.pipeline, "pipeline", kind, family.pipeline)
        self.pipe, self.family, self.options = pipe, family, options
        self.device, self.dtype = device_of(options.device), DTYPES[options.dtype]
        self.transformer: Any = pipe.transformer
        self.velocity_network: nn.Module = pipe.transformer
        if family.hidden_layer:
            self.hidden_layer: nn.Module = getattr(pipe.transformer, family.hidden_layer)
        trained = torch.float32 if options.trained == "full" else self.dtype
        first = self.device if options.load_to == "device" else torch.device("cpu")
        _place(self.transformer, first, trained)
        self._second, self._boundary = family.second_transformer(pipe)
        self._warned = False
        if self._second is not None:
            fits = options.load_to == "device" or options.fixed
            allowed = "whole, not sharded, with two transformers"
            require(fits, "weights", "sharded (fsdp2, zero2)", allowed)
            _place(self._second, self.device, self.dtype)
        if name := options.attention_backend:
            for network in filter(None, (self.transformer, self._second)):
                set_attention_backend(network, name, self.device, self.dtype)
        _place(pipe.vae, self.device, DTYPES[options.decode_dtype])
        if options.decode_tiling:
            tiled = hasattr(pipe.vae, "enable_tiling")
            require(tiled, "decode_tiling", True, f"False with {type(pipe.vae).__name__}")
            pipe.vae.enable_tiling()
        self.sizes = options.training_sizes
        self.latent_shapes = [self._set_size(*size) for size in (*self.sizes, options.size)]
        # Qwen-Image's decoder has no such entry
        channels = getattr(getattr(pipe.vae, "config", None), "out_channels", 3)
        fits, allowed = channels in family.decoder_channels, "3, red, green and blue"
        require(fits, "channels of the image decoder", channels, allowed)
        self._scheduler = _euler_scheduler(pipe)
        self._load_encoders = load_encoders
        self._tokens = options.max_sequence_length or family.text_tokens
        self._counted = set[str]()
        store = MemoryStore() if store is None else store
        self.prompts = PromptEmbeddings(self._embed, self.device, self.dtype, store)
        self.guidance_scale = self._allowed(options.guidance_scale)
        negative = options.negative_prompt
        fits = not negative or "negative_prompt" in family.guidance_arguments(1.0, negative)
        require(fits, "negative_prompt", negative, f"empty with {kind}")
        for name, tensors in (frozen or {}).items():
            pipe.load_lora_weights(dict(tensors), adapter_name=name)
        self.adapters = Adapters(self.transformer, tuple(frozen or ()))
        self._active = self.reference_network = self.transformer
        self._prepare_training(options, first)
        if start is not None:
            self._start_from(start)

    def _prepare_training(self, options: PolicyOptions, device: torch.device) -> None:
        for fits, need in (
            (options.trained != "full", "unless tuning is lora"),
            (options.load_to == "device", "with sharded weights (fsdp2, zero2)"),
        ):
            fits = fits or options.quantize == "none"
            require(fits, "quantize", options.quantize, f"none {need}")
        fits = options.trained != "full" or not options.frozen
        require(fits, "frozen_adapters", options.frozen_adapters, "none unless tuning is lora")
        if options.trained == "lora":
            targets = options.lora_targets or self.family.lora_targets
            given = options.lora_rank, options.lora_alpha, targets, options.seed
            self.adapters.add(*given)
        elif options.trained == "full":
            if options.keep_reference:
                self.reference_network = copy.deepcopy(self.transformer)
                _place(self.reference_network, device, self.dtype)
            self.transformer.requires_grad_(True)
        self.resize()

    def _start_from(self, start: Mapping[str, Tensor]) -> None:
        source = f"adapter: {self.options.adapter or 'the LoRA'}"
        try:
            if self.options.trained != "lora":
                with torch.no_grad():
                    fold(self.transformer, start)
            elif missing := self.adapters.load(start):
                count = f"{len(missing)} trained layers, such as {missing[0]}"
                _LOG.warning("Warning: %s lacks %s: they start at 0", source, count)
        except CheckpointError as error:
            raise CheckpointError(f"{source} does not match {error}") from error

    def resize(self, **changes: Any) -> None:
        """Change the options `RESIZABLE`; results change by float rounding only."""
        others = sorted(changes.keys() - {*RESIZABLE})
        require(not others, "resize", others, f"some of {', '.join(RESIZABLE)}")
        self.options = options = replace(self.options, **changes)
        if options.gradient_checkpointing:
            self.transformer.enable_gradient_checkpointing()
        else:
            self.transformer.disable_gradient_checkpointing()
        for network in {self.transformer, self.reference_network, self._second} - {None}:
            if bool(options.compile) != has_compiled_blocks(network):
                compile_blocks(network, COMPILER if options.compile else "")

    def _set_size(self, height: int, width: int) -> tuple[int, ...]:
        self.latent_size = size_of(self.pipe, height, width)
        self.latent_shape = shape_of(self.pipe, self.family, height, width, self.options.num_frames)
        return self.latent_shape

    @contextmanager
    def at_size(self, height: int, width: int) -> Iterator[None]:
        """Within this context samples have another size, in pixels."""
        kept = self.latent_size, self.latent_shape
        self._set_size(height, width)
        try:
            yield
        finally:
            self.latent_size, self.latent_shape = kept

    def schedule(self, steps: int) -> Schedule:
        """The pipeline's own grid for this image size, float32."""
        self.family.set_timesteps(self._scheduler, steps, self.latent_shape, self.pipe)
        return schedule_of(self._scheduler, self.device)

    def encode(self, prompts: Sequence[Prompt]) -> Condition:
        """One number per prompt, which `velocity` looks up in the cache of embeddings."""
        negative = negatives(self.family, prompts, self.options.negative_prompt)
        known = self.prompts.numbers([*prompts, *negative])
        numbers = torch.tensor(known, device=self.device).split(len(prompts))
        return Condition(dict(zip(("prompt", "negative"), numbers, strict=True)), frozenset(known))

    def warm(
        self,
        prompts: Sequence[Prompt],
        processes: Processes = Processes(),
        report: Callable[[dict[str, Any]], None] = lambda state: None,
    ) -> None:
        """Embed all `prompts` and the negative prompt now, so that the text encoders move to the
        device only once; the `processes` divide them (`PromptEmbeddings.warm`). A warning is
        logged of those that are cut at the encoders' numbers of tokens.
        """
        needed = [*prompts, *negatives(self.family, prompts, self.options.negative_prompt)]
        texts = dict.fromkeys(prompt.text for prompt in needed)
        new = [text for text in texts if text and text not in self._counted]
        self._counted.update(new)
        if processes.is_main:
            for line in cut_prompts(self.pipe, self.family, new, self._tokens):
                _LOG.warning("Warning: %s", line)
        self.prompts.warm(needed, processes, report)

    def _embed(self, prompts: Sequence[Prompt]) -> Iterator[Mapping[str, Tensor]]:
        """Embed on the device, always the same number at a time, so that the rounding of an
        embedding does not depend on the other prompts.

        Raises `ConfigError` for prompts with another number of images than the family reads.
        """
        require_images(prompts, *self.family.images, self.family.pipeline)
        with self.text_encoders(), quiet():
            for first in range(0, len(prompts), EMBEDDED_TOGETHER):
                some = list(prompts[first : first + EMBEDDED_TOGETHER])
                filled = some + some[-1:] * (EMBEDDED_TOGETHER - len(some))
                given = self._tokens, self.device
                with torch.no_grad():
                    rows = embeddings_of(self.pipe, self.family, filled, *given)
                kind = f"encode of family {type(self.family).__name__}"
                fits = isinstance(rows, Sequence) and len(rows) == len(filled)
                require(fits, kind, type(rows).__name__, "a list with a mapping per text")
                yield from rows[: len(some)]

    @contextmanager
    def text_encoders(self) -> Iterator[None]:
        """Within this context the text encoders are on the device."""
        absent = [name for name in self.family.encoders if getattr(self.pipe, name, None) is None]
        loaded = self._load_encoders() if self._load_encoders and absent else {}
        for name in loaded.keys() & absent:
            setattr(self.pipe, name, loaded[name])
        given = {name: self.pipe.components.get(name) for name in self.family.encoders}
        encoders = {name: part for name, part in given.items() if part}  # SD3 may have no T5
        try:
            for encoder in encoders.values():
                encoder.eval().requires_grad_(False).to(self.device)
            yield
        finally:
            for name, encoder in encoders.items():
                if name in loaded.keys() & absent:
                    setattr(self.pipe, name, None)
                else:
                    encoder.to("cpu")

    def velocity(self, latent: Tensor, timestep: Tensor, condition: Condition) -> Tensor:
        """The network's estimate of v = eps - x_0, float32; with classifier-free guidance (two
        evaluations, in one call unless only that of the prompt has a gradient) if it is on.
        """
        prompt, keys = condition.tensors["prompt"], condition.keys
        if self.guidance_scale == 1:
            return self._call(latent, timestep, prompt, keys)
        negative = condition.tensors["negative"]
        if self.options.guidance_gradient == "both" or not torch.is_grad_enabled():
            numbers = torch.cat([negative, prompt])
            both = self._call(torch.cat([latent] * 2), timestep.repeat(2), numbers, keys)
            away, towards = both.chunk(2)
        else:
            with torch.no_grad():
                away = self._call(latent, timestep, negative, keys)
            towards = self._call(latent, timestep, prompt, keys)
        return getattr(self.family, "guide", linear_guidance)(away, towards, self.guidance_scale)

    def _call(
        self, latent: Tensor, timestep: Tensor, numbers: Tensor, keys: frozenset[int]
    ) -> Tensor:
        """Velocities in calls of `rows` rows. The first call is filled up at its front, so that the
        last rows are always the prompts'.
        """
        velocities, size = [], self.options.rows or len(latent)
        if missing := -len(latent) % size:
            filled = torch.arange(-missing, len(latent), device=latent.device).clamp(min=0)
            latent, timestep, numbers = latent[filled], timestep[filled], numbers[filled]
        parts = (rows.split(size) for rows in (latent, timestep, numbers))
        for x, t, prompts in zip(*parts, strict=True):
            rows = self.prompts.rows(prompts, keys)
            velocities.append(self._of_experts(x.to(self.dtype), t, rows))
        return torch.cat(velocities)[missing:] if len(velocities) > 1 or missing else velocities[0]

    def _of_experts(self, latent: Tensor, timestep: Tensor, rows: Mapping[str, Tensor]) -> Tensor:
        """Velocities of the transformer of each row's time, float32. With two of them the device is
        asked for the times.
        """

        def of(network: Any, some: Any) -> Tensor:
            given = {name: tensor[some] for name, tensor in rows.items()}
            with computing_in(self.dtype, self.device):
                made = self.family.velocity(
                    network, latent[some], timestep[some], given, self.latent_size
                )
                return made.float()

        low = (timestep < self._boundary).nonzero().flatten() if self._second is not None else ()
        if not len(low):
            return of(self._active, slice(None))
        with torch.no_grad():
            velocity = torch.zeros_like(latent, dtype=torch.float32)
            velocity[low] = of(self._second, low)
        high = (timestep >= self._boundary).nonzero().flatten()
        if len(high):
            velocity = velocity.index_copy(0, high, of(self._active, high))
        elif torch.is_grad_enabled() and (trained := [*self.trainable().values()]):
            velocity = velocity + 0 * trained[0].sum()  # open to a gradient, which is 0
        if torch.is_grad_enabled() and not self._warned:
            self._warned = True
            text = "Warning: steps with 1000 t below %g have no gradient, because their transformer"
            _LOG.warning(f"{text} is frozen; leave them out (window)", self._boundary)
        return velocity

    def _allowed(self, guidance: float) -> float:
        """`guidance`, unless the pipeline ignores it because it is distilled."""
        distilled = getattr(self.pipe.config, "is_distilled", False)
        allowed = "1 (off): the model is distilled without guidance"
        require(not distilled or guidance == 1, "guidance_scale", guidance, allowed)
        return guidance

    @contextmanager
    def guided(self, guidance: float) -> Iterator[None]:
        """Within this context the guidance scale is `guidance`, for example to evaluate with
        another scale than in training.
        """
        require(guidance >= 1, "guidance_scale", guidance, "1 (off) or more")
        kept, self.guidance_scale = self.guidance_scale, self._allowed(guidance)
        try:
            yield
        finally:
            self.guidance_scale = kept

    def decode(self, latent: Tensor) -> Tensor:
        """Images [sample, 3, height, width] or videos [sample, frame, 3, height, width] in [0, 1],
        `decode_batch` at a time; without a gradient at pixels that are limited to 0 or 1.
        """
        images, dtype = [], DTYPES[self.options.decode_dtype]
        with torch.set_grad_enabled(torch.is_grad_enabled() and latent.requires_grad):
            for part in latent.to(dtype).split(self.options.decode_batch or len(latent)):
                pixels = self.family.decode(self.pipe, part, self.latent_size).float()
                images.append((pixels / 2 + 0.5).clamp(0, 1).contiguous())
        return torch.cat(images)

    def trainable(self) -> Mapping[str, nn.Parameter]:
        """The adapter's matrices, or all weights of the transformer, by name; float32."""
        return {n: p for n, p in self.transformer.named_parameters() if p.requires_grad}

    @contextmanager
    def reference(self) -> Iterator[None]:
        """The base model, no gradients. Raises `ConfigError` for full fine-tuning without
        `keep_reference`.
        """
        lost = self.options.trained == "full" and not self.options.keep_reference
        require(not lost, "keep_reference", False, "True: this loss compares with the base model")
        self._active = self.reference_network
        try:
            with torch.no_grad(), self.adapters.disabled():
                yield
        finally:
            self._active = self.transformer

    def weights(self, tensors: Mapping[str, Tensor]) -> AbstractContextManager[None]:
        """A context in which a policy whose weights are fixed has other ones: a LoRA as
        `Adapters.tensors` returns it, or weights of the transformer by name.

        Raises `CheckpointError` at once if they belong to another model.
        """
        require(self.options.trained is None, "fixed", False, "True: trained weights stay")
        if is_lora(tensors):
            self.adapters.require_layers(tensors)
            return self._with_lora(tensors)
        named = self.transformer.state_dict().items()
        own = {name.replace(".base_layer.", "."): tensor.detach() for name, tensor in named}
        shapes = {name: tensor.shape for name, tensor in own.items()}
        other = sorted(name for name, tensor in tensors.items() if shapes.get(name) != tensor.shape)
        if other:
            text = f"{len(other)} of its {len(tensors)} tensors, such as {other[0]}, do not fit"
            raise CheckpointError(f"the model: {text}; it is another model's transformer")
        return self._with_values({name: own[name] for name in tensors}, tensors)

    @contextmanager
    def _with_lora(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        self.adapters.replace(tensors)
        try:
            yield
        finally:
            self.adapters.replace(None)

    @contextmanager
    def _with_values(
        self, own: Mapping[str, Tensor], values: Mapping[str, Tensor]
    ) -> Iterator[None]:
        kept = {name: tensor.to("cpu", copy=True) for name, tensor in own.items()}
        try:
            for name, tensor in own.items():
                tensor.copy_(values[name])
            yield
        finally:
            for name, tensor in own.items():
                tensor.copy_(kept[name])

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """No gradients. The adapter is merged into the weights of a float32 network, but not of a
        narrower or quantised one: rounding W + BA would make the sampling policy different from the
        trained policy.
        """
        exact = self.dtype == torch.float32 and self.options.quantize == "none"
        with torch.no_grad(), self.adapters.merged() if exact else nullcontext():
            yield

    def save(self, folder: Path) -> None:
        """Write the trained weights in diffusers' format: a LoRA for
        `pipe.load_lora_weights(folder)`, or the transformer for `from_pretrained(folder,
        subfolder="transformer")`; safetensors only. An older folder of this name is replaced when
        the new one is complete. With sharded weights all processes must call this; only the main
        one writes the full weights.
        """
        fits = self.options.trained is not None
        require(fits, "fixed", True, "False: there is nothing to save")
        new, old = folder.with_name(folder.name + ".new"), folder.with_name(folder.name + ".old")
        shutil.rmtree(new, ignore_errors=True)
        if self.options.trained == "lora":
            type(self.pipe).save_lora_weights(new, transformer_lora_layers=self.adapters.tensors())
        else:
            network = _full_network(self.transformer)
            if network is None:
                return
            network.save_pretrained(new / "transformer")
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            os.replace(folder, old)
        os.replace(new, folder)
        shutil.rmtree(old, ignore_errors=True)


def _full_network(network: Any) -> Any:
    """`network`; if its weights are sharded, a copy in the main process's main memory, and None in
    the other processes.
    """
    if not is_sharded_network(network):
        return network
    if not (tensors := full_tensors(network.state_dict())):
        return None
    network = type(network).from_config(network.config)
    network.load_state_dict(tensors)
    return network


def _place(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Freeze and move a module.

    As when diffusers loads a model in `dtype`, layers that its class keeps in float32 (Wan: norms,
    modulation, time embedding) and buffers that are not in its files (Wan: rotary frequencies) keep
    their precision. diffusers' `to` would cast these buffers. Weights on meta stay there.
    """
    kept = set(getattr(model, "_keep_in_fp32_modules", None) or ())
    model.eval().requires_grad_(False)
    if not next(model.parameters()).is_meta:
        nn.Module.to(model, device)
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(torch.float32 if kept & set(name.split(".")) else dtype)


def _euler_scheduler(pipe: Any) -> Any:
    """A new Euler scheduler for flow matching with the pipeline's settings.

    From another scheduler with flow sigmas (Wan's UniPC on the Hub) only the shift is used, because
    transitions need an Euler grid; the two grids differ. Raises `ConfigError` for any other
    scheduler.
    """
    euler: Any = import_module("diffusers").FlowMatchEulerDiscreteScheduler
    kind, config = type(pipe.scheduler), pipe.scheduler.config
    if issubclass(kind, euler):
        return euler.from_config(config)
    allowed = "FlowMatchEulerDiscreteScheduler, or one with flow sigmas and a flow_shift"
    fits = bool(config.get("use_flow_sigmas")) and "flow_shift" in config
    require(fits, "scheduler", kind.__name__, allowed)
    return euler(config["num_train_timesteps"], shift=config["flow_shift"])


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
    Raises `ConfigError` if `name` is unknown, or fails forward or backward on `device` in `dtype`.
    """
    from diffusers.models import attention_dispatch as diffusers

    layers = [module for module in network.modules() if hasattr(module, "set_processor")]
    dispatched = all(hasattr(layer.processor, "_attention_backend") for layer in layers)
    names = [backend.value for backend in diffusers.AttentionBackendName]
    known = names if dispatched else ["native", *PYTORCH_KERNELS]
    place = f"{type(network).__name__} on {device.type} in {dtype}"
    allowed = f"one of {', '.join(known)} that runs for {place}, or empty"
    require(name in known, "attention_backend", name, allowed)
    # batch, tokens, heads, channels
    shape = (1, 64, 2, network.config.attention_head_dim)
    query = torch.zeros(shape, dtype=dtype, device=device, requires_grad=True)
    try:
        backend = diffusers.AttentionBackendName(name)
        if dispatched:
            # diffusers makes it the backend of all networks; this resets it
            with diffusers.attention_backend(name):
                network.set_attention_backend(name)
        diffusers.dispatch_attention_fn(query, query, query, backend=backend).sum().backward()
    except Exception as error:
        require(False, "attention_backend", name, f"{allowed} ({error})")
    if not dispatched and name != "native":
        # inside the block, so that recomputation under checkpointing has the same kernel
        for layer in layers:
            layer.set_processor(sdpa_kernel(PYTORCH_KERNELS[name])(layer.processor))


def _blocks(network: Any) -> list[nn.Module]:
    """The entries of the module lists at the top of a transformer, its blocks, in order."""
    lists = [child for child in network.children() if isinstance(child, nn.ModuleList)]
    return list(chain(*lists))


def compile_blocks(network: Any, backend: str) -> None:
    """Compile in place every entry of the module lists at the top of `network`: a transformer's
    blocks.

    Args:
        network: the transformer.
        backend: name of a backend of torch.compile; empty: undo it.

    Raises:
        ConfigError: the backend is unknown.
    """
    if not backend:
        for block in _blocks(network):
            block._compiled_call_impl = None
        return
    backends = torch.compiler.list_backends(exclude_tags=())
    require(backend in backends, "compile", backend, f"one of {', '.join(backends)}, or empty")
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, COMPILED_VERSIONS)
    for block in _blocks(network):
        block.compile(backend=backend)


def has_compiled_blocks(network: nn.Module) -> bool:
    """Whether `compile_blocks` has compiled `network`."""
    return any(block._compiled_call_impl is not None for block in _blocks(network))
