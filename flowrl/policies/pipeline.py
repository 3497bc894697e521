"""Diffusers pipelines as policies: the code common to all model families (`sd3`, `flux`,
`qwen_image`, `wan`).
"""

import copy
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from flowrl.core.errors import ConfigError, require
from flowrl.core.types import Condition, Prompt, Schedule
from flowrl.distributed import full_tensors, is_sharded_network
from flowrl.policies.attention import set_attention_backend
from flowrl.policies.family import (
    DTYPES,
    Family,
    ModelOptions,
    device_of,
    latent_shape,
    latent_size,
    linear_guidance,
)
from flowrl.policies.lora import Adapters, load_frozen_adapters
from flowrl.policies.prompt_cache import PromptCache

COMPILED_VERSIONS = 64
"""Compiled versions of a block: kinds of blocks x sampling and training x with and without adapters
x batch sizes.
"""


class PipelinePolicy:
    """`FlowPolicy` over the transformer of a diffusers pipeline.

    The transformer and the image decoder move to `options.device`. The text encoders stay in main
    memory and move to the device only to embed new prompts. The reference is the network with its
    adapter disabled, or a frozen copy. `adapters` (None unless a LoRA is trained) adds further
    adapters and selects which are trained and active. `latent_shape` is [channel, height, width]
    (SD3), [token, channel] of 2 x 2 patches (FLUX, Qwen-Image) or [channel, frame, height, width]
    (Wan), `latent_size` the height and width of the latent image, an eighth of the image's for the
    built-in families.

    Args:
        pipe: the pipeline. The policy trains its transformer or adds an adapter to it, so it has
            the current weights.
        family: the model family.
        options: sizes, device, dtype, guidance, adapter and memory settings.
    """

    def __init__(self, pipe: Any, family: Family, options: ModelOptions = ModelOptions()) -> None:
        require(
            type(pipe).__name__ == family.pipeline, "pipeline", type(pipe).__name__, family.pipeline
        )
        _require_rgb(pipe)
        self.pipe, self.family, self.options = pipe, family, options
        self.device = device_of(options.device)
        self.dtype = DTYPES[options.dtype]
        self.transformer: Any = pipe.transformer
        self.velocity_network: nn.Module = pipe.transformer
        _place(
            self.transformer, self.device, torch.float32 if options.tuning == "full" else self.dtype
        )
        if options.attention_backend:
            set_attention_backend(
                self.transformer, options.attention_backend, self.device, self.dtype
            )
        _place(pipe.vae, self.device, DTYPES[options.decode_dtype])
        self.latent_shape = latent_shape(
            pipe, family, options.height, options.width, options.num_frames
        )
        self.latent_size = latent_size(pipe, options.height, options.width)
        self._scheduler = _own_scheduler(pipe)
        self.prompts = PromptCache(self._embed, self.device, options.prompt_cache, self.dtype)
        self.guidance_scale = options.guidance_scale
        self.adapters: Adapters | None = None
        self._copy: Any = None
        self._released = False
        self._active = self.transformer
        self._prepare_training()

    def _prepare_training(self) -> None:
        options = self.options
        fits = options.tuning == "lora" or not options.frozen_adapters
        require(
            fits,
            "frozen_adapters",
            options.frozen_adapters,
            "left out unless tuning is lora: make them part of the weights",
        )
        if options.tuning == "lora":
            targets = options.lora_targets or self.family.lora_targets
            frozen = load_frozen_adapters(self.pipe, options.frozen_adapters)
            self.adapters = Adapters(
                self.transformer,
                options.lora_rank,
                options.lora_alpha,
                targets,
                options.seed,
                options.adapter_name,
                frozen,
            )
            if options.adapter:
                self.adapters.load(Path(options.adapter), type(self.pipe))
        elif options.tuning == "full":
            if options.keep_reference:
                self._copy = copy.deepcopy(self.transformer)
                _place(self._copy, self.device, self.dtype)
            self.transformer.requires_grad_(True)
        self.checkpoint_gradients(options.gradient_checkpointing)
        if options.compile:
            for network in filter(None, (self.transformer, self._copy)):
                compile_blocks(network, options.compile)

    def checkpoint_gradients(self, on: bool) -> None:
        """Set whether the backward pass recomputes activations; the gradient is the same."""
        network = self.transformer
        (network.enable_gradient_checkpointing if on else network.disable_gradient_checkpointing)()

    def schedule(self, steps: int) -> Schedule:
        """The pipeline's own grid for this image size, float32."""
        require(steps >= 1, "steps", steps, "1 or more")
        self.family.set_timesteps(self._scheduler, steps, self.latent_shape, self.pipe)
        return Schedule(self._scheduler.sigmas.float(), self._scheduler.timesteps.float()).to(
            self.device
        )

    def encode(self, prompts: Sequence[Prompt]) -> Condition:
        """One number per prompt, which `velocity` looks up in the cache of embeddings."""
        known = self.prompts.numbers(
            [*(prompt.text for prompt in prompts), self.options.negative_prompt]
        )
        numbers = torch.tensor(known, device=self.device)
        return Condition(
            {"prompt": numbers[:-1], "negative": numbers[-1:].expand(len(prompts))},
            frozenset(known),
        )

    def warm(self, prompts: Sequence[Prompt]) -> None:
        """Embed all `prompts` and the negative prompt now, so that the text encoders move to the
        device only once.
        """
        self.prompts.warm([self.options.negative_prompt, *(prompt.text for prompt in prompts)])

    def release_encoders(self) -> None:
        """Remove the text encoders from memory (T5: 9.5 GB in bfloat16). New prompts then raise
        `ConfigError`, so call `warm` first.
        """
        for name in self.family.encoders:
            setattr(self.pipe, name, None)
        self._released = True

    def _embed(self, texts: Sequence[str]) -> Iterator[Mapping[str, Tensor]]:
        """Embed on the device one by one, then send the encoders back to main memory."""
        if self._released:
            raise ConfigError(
                f"the prompt {texts[0]!r} is new, but the text encoders were released; call warm"
                " with it before release_encoders"
            )
        encoders = [
            encoder
            for name in self.family.encoders
            if (encoder := getattr(self.pipe, name)) is not None
        ]
        tokens = self.options.max_sequence_length or self.family.text_tokens
        for encoder in encoders:
            encoder.eval().requires_grad_(False).to(self.device)
        try:
            for text in texts:
                with torch.no_grad():
                    row = self.family.encode(self.pipe, text, tokens, self.device)
                yield row
        finally:
            for encoder in encoders:
                encoder.to("cpu")

    def velocity(self, latent: Tensor, timestep: Tensor, condition: Condition) -> Tensor:
        """The network's estimate of v = eps - x_0, float32; with classifier-free guidance (two
        evaluations) if it is on.
        """
        prompt, keys = condition.tensors["prompt"], condition.keys
        if self.guidance_scale == 1:
            return self._call(latent, timestep, prompt, keys)
        negative = condition.tensors["negative"]
        if self.options.guidance_gradient == "both":
            both = self._call(
                torch.cat([latent] * 2), timestep.repeat(2), torch.cat([negative, prompt]), keys
            )
            away, towards = both.chunk(2)
        else:
            with torch.no_grad():
                away = self._call(latent, timestep, negative, keys)
            towards = self._call(latent, timestep, prompt, keys)
        return getattr(self.family, "guide", linear_guidance)(away, towards, self.guidance_scale)

    def _call(
        self, latent: Tensor, timestep: Tensor, numbers: Tensor, keys: frozenset[int]
    ) -> Tensor:
        rows = self.prompts.rows(numbers, keys)
        narrow = self.dtype != torch.float32
        with torch.autocast(self.device.type, dtype=self.dtype) if narrow else nullcontext():
            return self.family.velocity(
                self._active, latent.to(self.dtype), timestep, rows, self.latent_size
            ).float()

    @contextmanager
    def guided(self, guidance: float) -> Iterator[None]:
        """Within this context the guidance scale is `guidance`, for example to evaluate with
        another scale than in training.
        """
        require(guidance >= 1, "guidance_scale", guidance, "1 (off) or more")
        kept, self.guidance_scale = self.guidance_scale, guidance
        try:
            yield
        finally:
            self.guidance_scale = kept

    def decode(self, latent: Tensor) -> Tensor:
        """Images [sample, 3, height, width] or videos [sample, frame, 3, height, width] in [0, 1],
        `decode_batch` at a time.
        """
        images, dtype = [], DTYPES[self.options.decode_dtype]
        with torch.no_grad():
            for part in latent.to(dtype).split(self.options.decode_batch):
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
        if self.options.tuning == "full" and self._copy is None:
            raise ConfigError(
                "keep_reference = False is not allowed: this loss compares with the base model; set"
                " it to True"
            )
        kept = self._active
        self._active = self.transformer if self._copy is None else self._copy
        try:
            with (
                torch.no_grad(),
                nullcontext() if self.adapters is None else self.adapters.disabled(),
            ):
                yield
        finally:
            self._active = kept

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """No gradients. The adapter is merged into the weights of a float32 network, but not of a
        narrower one: rounding W + BA would make the sampling policy different from the trained
        policy.
        """
        merge = self.adapters is not None and self.dtype == torch.float32
        with torch.no_grad(), cast(Adapters, self.adapters).merged() if merge else nullcontext():
            yield

    def save(self, folder: Path) -> None:
        """Write the trained weights in diffusers' format: a LoRA for
        `pipe.load_lora_weights(folder)`, or the transformer for `from_pretrained(folder,
        subfolder="transformer")`; safetensors only. An older folder of this name is replaced when
        the new one is complete. With sharded weights all processes must call this; only the main
        one writes the full weights.
        """
        require(
            self.options.tuning != "nothing",
            "tuning",
            self.options.tuning,
            "lora or full: there is nothing to save",
        )
        new, old = folder.with_name(folder.name + ".new"), folder.with_name(folder.name + ".old")
        shutil.rmtree(new, ignore_errors=True)
        if self.adapters is not None:
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
    if tensors := full_tensors(network.state_dict()):
        network = type(network).from_config(network.config)
        network.load_state_dict(tensors)
    return network if tensors else None


def _require_rgb(pipe: Any) -> None:
    """Raise `ConfigError` unless the image decoder makes three channels, the red, green and blue
    that rewards see.
    """
    config = getattr(pipe.vae, "config", None)
    # Wan 2.2 decodes patches
    found = getattr(config, "out_channels", 3) // (getattr(config, "patch_size", None) or 1) ** 2
    require(
        found == 3, "model: channels of the image decoder (vae)", found, "3, red, green and blue"
    )


def _place(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Freeze and move a module.

    As when diffusers loads a model in `dtype`, layers that its class keeps in float32 (Wan: norms,
    modulation, time embedding) and buffers that are not in its files (Wan: rotary frequencies) keep
    their precision. diffusers' `to` would cast these buffers.
    """
    kept = set(getattr(model, "_keep_in_fp32_modules", None) or ())
    nn.Module.to(model.eval().requires_grad_(False), device)
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(torch.float32 if kept & set(name.split(".")) else dtype)


def _own_scheduler(pipe: Any) -> Any:
    """A new Euler scheduler for flow matching with the pipeline's settings.

    From another scheduler with flow sigmas (Wan's UniPC on the Hub) only the shift is used, because
    transitions need an Euler grid; the two grids differ. Raises `ConfigError` for any other
    scheduler.
    """
    from diffusers.schedulers.scheduling_flow_match_euler_discrete import (
        FlowMatchEulerDiscreteScheduler,
    )

    kind, config = type(pipe.scheduler), pipe.scheduler.config
    if issubclass(kind, FlowMatchEulerDiscreteScheduler):
        return FlowMatchEulerDiscreteScheduler.from_config(config)
    allowed = "FlowMatchEulerDiscreteScheduler, or one with flow sigmas and a flow_shift"
    require(
        bool(config.get("use_flow_sigmas")) and "flow_shift" in config,
        "scheduler",
        kind.__name__,
        allowed,
    )
    return FlowMatchEulerDiscreteScheduler(
        config["num_train_timesteps"], shift=config["flow_shift"]
    )


def _blocks(network: Any) -> list[nn.Module]:
    """The entries of the module lists at the top of a transformer, its blocks, in order."""
    return [
        block for child in network.children() if isinstance(child, nn.ModuleList) for block in child
    ]


def compile_blocks(network: Any, backend: str) -> None:
    """Compile in place every entry of the module lists at the top of `network`: a transformer's
    blocks.

    Args:
        network: the transformer.
        backend: name of a backend of torch.compile.

    Raises:
        ConfigError: the backend is unknown.
    """
    allowed = torch.compiler.list_backends(exclude_tags=())
    require(
        backend in allowed,
        "compile",
        backend,
        f"a backend of torch.compile ({', '.join(allowed)}), or empty for off",
    )
    torch._dynamo.config.recompile_limit = max(
        torch._dynamo.config.recompile_limit, COMPILED_VERSIONS
    )
    for block in _blocks(network):
        block.compile(backend=backend)


def has_compiled_blocks(network: nn.Module) -> bool:
    """Whether `compile_blocks` has compiled `network`."""
    return any(block._compiled_call_impl is not None for block in _blocks(network))
