"""Model families, the differences between diffusers' pipelines: Stable Diffusion 3 and 3.5, FLUX.1,
FLUX.1 Kontext, FLUX.2 [klein], Z-Image, Qwen-Image, Qwen-Image 2.1 and Qwen-Image-Edit, Wan 2.1
and 2.2, and SANA; docs/model-families.md explains how to add another.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from inspect import signature
from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import Ge
from einops import rearrange
from torch import Tensor

from flowrl.core.errors import require
from flowrl.core.options import checked_options
from flowrl.core.prompt import Prompt, ReferenceImage
from flowrl.core.sharded import is_sharded_network
from flowrl.policies.lora import LORA_TARGETS

Shape = tuple[int, ...]
Embeddings = Mapping[str, Tensor]


class Family:
    """The differences between model families: the names of a pipeline's components, and five
    functions (six with an own guidance).

    A package adds a family by an entry point in the group `flowrl.families`, whose name is that of
    the pipeline's class, as in ``DemoPipeline = "my_package:Demo"``; `flowrl.testing.check_policy`
    and `policy_contract` test it, best with a small pipeline that reacts to its prompts. Without a
    package, pass it to `load_policy` or `PipelinePolicy`.

    The pipeline has `transformer` (a diffusers model with `add_adapter`), `vae`, `scheduler` (a
    flow-matching one), the text encoders, `vae_scale_factor` (videos: `vae_scale_factor_spatial`),
    and `save_lora_weights`.

    A family of videos has `video_shape(pipe, height, width, frames)` in place of `latent_shape`. A
    family that reads reference images has `encode_edits(pipe, prompts, tokens, device)` in place of
    `encode`, whose prompts have texts and images.
    A family with another guidance than `linear_guidance` has `guide(away, towards, scale)`: the
    guided velocity from that of the negative prompt and that of the prompt, float32
    [sample, *latent].
    """

    pipeline: str
    """The name of the pipeline's class, in diffusers or in this family's module; `pipe` below is a
    pipeline of that class.
    """
    encoders: tuple[str, ...] = ("text_encoder",)
    """The attributes of its text encoders."""
    text_tokens: int = 512
    """The default length of its prompts: tokens of its T5 encoder, or of its only encoder."""
    reserved_tokens: int = 0
    """How many of them are not the prompt's, beside those of its tokenizer and chat template."""
    lora_targets: tuple[str, ...] = LORA_TARGETS
    """Ends of the names of the layers that get a LoRA by default."""
    hidden_layer: str = ""
    """The transformer's layer whose input a critic reads; empty if that was never tried."""
    decoder_channels: tuple[int, ...] = (3,)
    """The numbers of channels of an image decoder whose images `decode` makes red, green, blue."""
    images: tuple[int, int] = (0, 0)
    """The least and the largest number of reference images of a prompt."""
    cuts_prompts: bool = True
    """Whether the pipeline cuts a prompt with more tokens than the set number."""
    thinking: bool | None = None
    """Whether the chat template into which the pipeline puts a prompt has thinking enabled; None
    without a template.
    """

    def latent_shape(self, pipe: Any, height: int, width: int) -> Shape:
        """Shape of one latent. Raises `ConfigError` for a size that the pipeline does not
        support.
        """
        raise NotImplementedError(f"{type(self).__name__} has no latent_shape")

    def set_timesteps(self, scheduler: Any, steps: int, latent_shape: Shape, pipe: Any) -> None:
        """Set the pipeline's own grid of `steps` steps, with its resolution-dependent shift, in
        `scheduler`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no set_timesteps")

    def encode(
        self, pipe: Any, texts: Sequence[str], tokens: int, device: torch.device
    ) -> Sequence[Embeddings]:
        """The embeddings of each prompt, without a prompt axis and independent of the others but
        for rounding.

        The names of the tensors are the family's own. If prompts differ in shape, they are padded
        with zeros at the end to the longest in use; a mask of ones among the tensors marks the
        entries that are not padding. A transformer without a mask needs rows of a fixed length, as
        in `Wan`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no encode")

    def velocity(
        self,
        transformer: Any,
        latent: Tensor,
        timestep: Tensor,
        rows: Embeddings,
        size: tuple[int, int],
    ) -> Tensor:
        """v at `latent` [sample, *latent] in the network's precision; `timestep` = 1000 t [sample],
        `size` = height, width of the latent image, `rows` the embeddings [sample, ...].
        """
        raise NotImplementedError(f"{type(self).__name__} has no velocity")

    def decode(self, pipe: Any, latent: Tensor, size: tuple[int, int]) -> Tensor:
        """Pixels [sample, 3, height, width] (videos: [sample, frame, 3, height, width]) in about
        [-1, 1] from latents [sample, *latent] in the decoder's precision.
        """
        raise NotImplementedError(f"{type(self).__name__} has no decode")

    def second_transformer(self, pipe: Any) -> tuple[Any, float]:
        """A frozen transformer, and the 1000 t below which it replaces the trained one; None and 0
        without.
        """
        return None, 0.0

    def guidance_arguments(self, scale: float, negative: Any) -> dict[str, Any]:
        """The arguments of the pipeline's call for guidance with `scale` (1: off) away from the
        `negative` prompt, or prompts.
        """
        return {"guidance_scale": scale, "negative_prompt": negative}

    def size_arguments(self, height: int, width: int) -> dict[str, int]:
        """The arguments of the pipeline's call for samples of this size in pixels."""
        return {"height": height, "width": width}

    def from_loop(self, latent: Tensor, latent_shape: Shape) -> Tensor:
        """Latents [sample, *latent] from those in the loop of the pipeline's `__call__`."""
        return latent


def linear_guidance(away: Tensor, towards: Tensor, scale: float) -> Tensor:
    """Classifier-free guidance, v_neg + s (v_prompt - v_neg) (arXiv 2207.12598).

    Args:
        away: velocity v_neg for the negative prompt [sample, *latent].
        towards: velocity v_prompt for the prompt [sample, *latent].
        scale: guidance scale s; 1 gives v_prompt.

    Returns:
        The guided velocity [sample, *latent].
    """
    return away + scale * (towards - away)


def embeddings_of(
    pipe: Any, family: Family, prompts: Sequence[Prompt], tokens: int, device: torch.device
) -> Sequence[Embeddings]:
    """The embeddings of `prompts`, with their images if the family reads them (`Family.encode`)."""
    if family.images[1]:
        return family.encode_edits(pipe, prompts, tokens, device)  # pyright: ignore
    return family.encode(pipe, [prompt.text for prompt in prompts], tokens, device)


def negatives(family: Family, prompts: Sequence[Prompt], text: str) -> list[Prompt]:
    """The negative prompt `text` of every prompt, with the same images if the family reads them."""
    return [Prompt(text, images=prompt.images if family.images[1] else ()) for prompt in prompts]


def in_groups(
    keys: Sequence[Hashable], call: Callable[[Any, Any], Tensor], transformer: Any
) -> Tensor:
    """Rows that must not share a network call, in calls of those that may.

    Args:
        keys: a key per row; rows with equal keys may share a call.
        call: from the indices of some rows, and their key, to their results.
        transformer: the network; if its weights are sharded, every row has its own call, because
            processes must make the same number of calls.

    Returns:
        The results of all rows, in order.
    """
    alone, groups = is_sharded_network(transformer), dict[Any, list[int]]()
    for row, key in enumerate(keys):
        groups.setdefault((key, alone * row), []).append(row)
    if len(groups) == 1:
        return call(slice(None), keys[0])
    results = torch.cat([call(some, key) for (key, _), some in groups.items()])
    order = torch.tensor([row for some in groups.values() for row in some])
    return results[order.argsort().to(results.device)]


def resolution_shift(scheduler: Any, tokens: int, largest: float) -> float:
    """mu, linear in the number of image tokens between the sizes in the scheduler's config (arXiv
    2403.03206, 5.3.2).

    The grid is then sigma = e^mu / (e^mu + 1 / sigma' - 1).

    Args:
        scheduler: diffusers' scheduler, whose config has sizes and shifts; without dynamic
            shifting it ignores mu.
        tokens: number of image tokens.
        largest: default for a missing `max_shift` in the config, as in the pipelines.

    Returns:
        mu, dimensionless.
    """
    config = scheduler.config
    low, high = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    least, most = config.get("base_shift", 0.5), config.get("max_shift", largest)
    return least + (most - least) * (tokens - low) / (high - low)


def packed_shape(pipe: Any, height: int, width: int) -> tuple[int, int]:
    """Shape of a latent whose tokens are its 2 x 2 patches.

    Args:
        pipe: the diffusers pipeline.
        height: height of the image in pixels.
        width: width of the image in pixels.

    Returns:
        (tokens, channels).

    Raises:
        ConfigError: the image is not divisible into patches.
    """
    unit = 2 * pipe.vae_scale_factor
    require_multiples(height, width, unit)
    return (height // unit) * (width // unit), pipe.transformer.config.in_channels


def unpacked(latent: Tensor, size: tuple[int, int]) -> Tensor:
    """Tokens of 2 x 2 patches, rearranged as latent images.

    Args:
        latent: tokens [sample, token, 4 x channel].
        size: (height, width) of the latent image.

    Returns:
        Latents [sample, channel, height, width].
    """
    return rearrange(latent, "s (h w) (k p q) -> s k (h p) (w q)", h=size[0] // 2, p=2, q=2)


def packed(latent: Tensor) -> Tensor:
    """Latent images [sample, channel, height, width] as tokens [sample, token, 4 x channel]; the
    inverse of `unpacked`.
    """
    return rearrange(latent, "s k (h p) (w q) -> s (h w) (k p q)", p=2, q=2)


def reference_rows(latents: Sequence[Tensor], like: Tensor, channels: int) -> dict[str, Tensor]:
    """The latents of a prompt's reference images as rows of an embedding.

    Args:
        latents: a latent image [channel, height, width] per reference.
        like: a tensor of the device.
        channels: channels of a token.

    Returns:
        "reference", the tokens of all images one after the other [token, 4 x channel], and "sizes",
        their heights and widths in tokens [image, 2].
    """
    tokens = [like.new_zeros(0, channels), *(packed(latent[None])[0] for latent in latents)]
    sizes = [[side // 2 for side in latent.shape[1:]] for latent in latents]
    shapes = torch.tensor(sizes, dtype=torch.int64, device=like.device).view(-1, 2)
    return {"reference": torch.cat(tokens), "sizes": shapes}


def with_references(
    transformer: Any,
    latent: Tensor,
    timestep: Tensor,
    rows: Embeddings,
    predict: Callable[[Tensor, Tensor, Embeddings, list[tuple[int, int]]], Tensor],
) -> Tensor:
    """v of a transformer that reads the tokens of reference images behind those of the image; one
    call for each number and sizes of references, which are read from the device.

    Args:
        transformer: the transformer.
        latent: tokens [sample, token, channel].
        timestep: 1000 t [sample].
        rows: embeddings of the prompts, with `reference_rows`.
        predict: from tokens of image and references, times, embeddings, and the sizes of the
            references, to the network's output for all tokens.

    Returns:
        The output for the image [sample, token, channel].
    """
    keys = [tuple((h, w) for h, w in one if h) for one in rows["sizes"].tolist()]

    def call(some: Any, sizes: Sequence[tuple[int, int]]) -> Tensor:
        given: dict[str, Any] = {n: None if row is None else row[some] for n, row in rows.items()}
        count = sum(height * width for height, width in sizes)
        tokens = [latent[some], given["reference"][:, :count].to(latent.dtype)]
        made = predict(torch.cat(tokens, 1), timestep[some], given, [*sizes])
        return made[:, : latent.shape[1]]

    return in_groups(keys, call, transformer)


def decode_scaled(vae: Any, latent: Tensor) -> Tensor:
    """Pixels from latents of an `AutoencoderKL`: z / scale + shift, decoded.

    Args:
        vae: the autoencoder; its config has scale and shift.
        latent: latents z [sample, channel, height, width].

    Returns:
        Pixels in about [-1, 1], [sample, channel, height, width].
    """
    shifted = latent / vae.config.scaling_factor + (vae.config.shift_factor or 0.0)
    return vae.decode(shifted, return_dict=False)[0]


def _decode_standardised(vae: Any, latent: Tensor) -> Tensor:
    """Pixels of a video autoencoder: z std + mean per channel, decoded; [sample, channel, frame,
    height, width].
    """
    std, mean = (
        latent.new_tensor(values).view(-1, 1, 1, 1)
        for values in (vae.config.latents_std, vae.config.latents_mean)
    )
    return vae.decode(latent * std + mean, return_dict=False)[0]


def _require_uncut(family: Family, tokens: int) -> None:
    """Raise `ConfigError` if a number of tokens was set."""
    allowed = f"not set: {family.pipeline} does not cut prompts"
    require(tokens == family.text_tokens, "max_sequence_length", tokens, allowed)


def require_multiples(height: int, width: int, unit: int, largest: int = 2**30) -> None:
    """Raise `ConfigError` unless height and width are multiples of `unit`, at most `largest`."""
    for name, side in (("height", height), ("width", width)):
        settings = "settings resolution, width, sizes, eval_resolution"
        allowed = f"a multiple of {unit}, at most {largest} ({settings})"
        require(side % unit == 0 and side <= largest, name, side, allowed)


class SD3(Family):
    """`Family` of diffusers' `StableDiffusion3Pipeline` (SD3-Medium, SD3.5-Medium,
    SD3.5-Large; arXiv 2403.03206).

    Latents are [sample, channel, height / 8, width / 8]. Prompts go through two CLIP encoders and
    T5, which may be absent. The grid has the scheduler's fixed shift (3 for SD3.5), or is shifted
    by resolution if the scheduler's config requires it.
    """

    pipeline = "StableDiffusion3Pipeline"
    encoders = ("text_encoder", "text_encoder_2", "text_encoder_3")
    text_tokens = 256
    hidden_layer = "proj_out"

    def latent_shape(self, pipe, height, width):
        """(channels, height / 8, width / 8); sizes are multiples of 8 x patch size."""
        factor, config = pipe.vae_scale_factor, pipe.transformer.config
        unit = factor * config.patch_size
        require_multiples(height, width, unit, config.pos_embed_max_size * unit)
        return config.in_channels, height // factor, width // factor

    def set_timesteps(self, scheduler, steps, latent_shape, pipe):
        """The scheduler's grid, shifted by the number of patches."""
        _, height, width = latent_shape
        patch = pipe.transformer.config.patch_size
        tokens = (height // patch) * (width // patch)
        scheduler.set_timesteps(steps, mu=resolution_shift(scheduler, tokens, 1.16))

    def encode(self, pipe, texts, tokens, device):
        """Concatenated CLIP and T5 tokens [token, dim], and the pooled CLIP embeddings [dim]."""
        words, _, pooled, _ = pipe.encode_prompt(
            list(texts),
            None,
            None,
            device=device,
            do_classifier_free_guidance=False,
            max_sequence_length=tokens,
        )
        return [{"words": w, "pooled": p} for w, p in zip(words, pooled, strict=True)]

    def velocity(self, transformer, latent, timestep, rows, size):
        """`SD3Transformer2DModel` with 1000 t."""
        return transformer(
            hidden_states=latent,
            encoder_hidden_states=rows["words"],
            pooled_projections=rows["pooled"],
            timestep=timestep,
            return_dict=False,
        )[0]

    def decode(self, pipe, latent, size):
        """Scaled and shifted as in the pipeline."""
        return decode_scaled(pipe.vae, latent)


@checked_options
@dataclass(frozen=True)
class Flux(Family):
    """`Family` of diffusers' `FluxPipeline`.

    Latents are packed: [sample, token, 4 x channel]; a token is a 2 x 2 patch of the latent image.

    Args:
        distilled_guidance: guidance input of a guidance-distilled model (FLUX.1-dev), 0 or more, at
            no cost; separate from classifier-free guidance (`PolicyOptions.guidance_scale`, the
            pipeline's `true_cfg_scale`).

    Raises:
        ConfigError: `distilled_guidance` is negative.
    """

    distilled_guidance: Annotated[float, Ge(0)] = 3.5

    pipeline = "FluxPipeline"
    encoders = ("text_encoder", "text_encoder_2")
    hidden_layer = "proj_out"

    def latent_shape(self, pipe, height, width):
        """(height / 16 x width / 16, channels)."""
        return packed_shape(pipe, height, width)

    def set_timesteps(self, scheduler, steps, latent_shape, pipe):
        """The even grid 1, ..., 1/T, shifted by the number of image tokens."""
        _set_even_grid(scheduler, steps, resolution_shift(scheduler, latent_shape[0], 1.15))

    def encode(self, pipe, texts, tokens, device):
        """T5 tokens [token, dim], and the pooled CLIP embedding [dim]."""
        given = dict(device=device, max_sequence_length=tokens)
        words, pooled, _ = pipe.encode_prompt(list(texts), **given)
        return [{"words": w, "pooled": p} for w, p in zip(words, pooled, strict=True)]

    def velocity(self, transformer, latent, timestep, rows, size):
        """`FluxTransformer2DModel` with t (it multiplies by 1000), positions, and the distilled
        guidance if it has that input.
        """
        return self._predict(transformer, latent, timestep, rows, _positions(size, latent.device))

    def _predict(
        self,
        transformer: Any,
        latent: Tensor,
        timestep: Tensor,
        rows: Embeddings,
        positions: Tensor,
    ) -> Tensor:
        words = rows["words"]
        guidance = latent.new_full((len(latent),), self.distilled_guidance, dtype=torch.float32)
        return transformer(
            hidden_states=latent,
            encoder_hidden_states=words,
            pooled_projections=rows["pooled"],
            timestep=timestep / 1000,
            guidance=guidance if transformer.config.guidance_embeds else None,
            txt_ids=words.new_zeros(words.shape[1], 3),
            img_ids=positions.to(words.dtype),
            return_dict=False,
        )[0]

    def decode(self, pipe, latent, size):
        """The unpacked latent image, scaled and shifted as in the pipeline."""
        return decode_scaled(pipe.vae, unpacked(latent, size))

    def guidance_arguments(self, scale, negative):
        """The distilled guidance is another argument."""
        true = {"true_cfg_scale": scale, "negative_prompt": negative}
        return {"guidance_scale": self.distilled_guidance, **true}


def _set_even_grid(scheduler: Any, steps: int, mu: float) -> None:
    flow_sigmas = scheduler.config.get("use_flow_sigmas")
    sigmas = None if flow_sigmas else np.linspace(1.0, 1 / steps, steps)
    terminal = scheduler.config.shift_terminal
    # diffusers would divide by 0 to stretch a single step
    scheduler.register_to_config(shift_terminal=terminal if steps > 1 else None)
    scheduler.set_timesteps(steps, sigmas=sigmas, mu=mu)
    scheduler.register_to_config(shift_terminal=terminal)


@checked_options
@dataclass(frozen=True)
class FluxKontext(Flux):
    """`Family` of diffusers' `FluxKontextPipeline` (FLUX.1 Kontext, arXiv 2506.15742): edits of a
    reference image, or text to image without one.

    The tokens of the reference image, scaled by the pipeline to one of its 17 sizes of about one
    megapixel, follow those of the image, with 1 as the first number of their positions.

    Args:
        distilled_guidance: as for `Flux`; 2.5 in the example of its model card.
    """

    distilled_guidance: Annotated[float, Ge(0)] = 2.5

    pipeline = "FluxKontextPipeline"
    images = (0, 1)

    def encode_edits(
        self, pipe: Any, prompts: Sequence[Prompt], tokens: int, device: torch.device
    ) -> Sequence[Embeddings]:
        """The embeddings of the texts, and the latent of the image, without noise."""
        rows, channels = [], pipe.transformer.config.in_channels
        latents = {image.sha256: self._latent(pipe, image) for p in prompts for image in p.images}
        for prompt, row in zip(
            prompts, self.encode(pipe, [p.text for p in prompts], tokens, device), strict=True
        ):
            own = [latents[image.sha256] for image in prompt.images]
            rows.append({**row, **reference_rows(own, row["words"], channels)})
        return rows

    def _latent(self, pipe: Any, image: ReferenceImage) -> Tensor:
        picture = image.pillow()
        preferred = import_module(type(pipe).__module__).PREFERRED_KONTEXT_RESOLUTIONS
        ratio, unit = picture.width / picture.height, 2 * pipe.vae_scale_factor
        _, width, height = min((abs(ratio - w / h), w, h) for w, h in preferred)
        size = height // unit * unit, width // unit * unit
        pixels = pipe.image_processor.preprocess(pipe.image_processor.resize(picture, *size), *size)
        return pipe._encode_vae_image(pixels.to(pipe.vae.device, pipe.vae.dtype), None)[0]

    def velocity(self, transformer, latent, timestep, rows, size):
        """As FLUX.1, with the tokens of the references."""

        def predict(tokens, times, given, sizes):
            places = [_positions(size, tokens.device)]
            for height, width in sizes:
                own = _positions((2 * height, 2 * width), tokens.device).clone()
                own[:, 0] = 1
                places.append(own)
            return self._predict(transformer, tokens, times, given, torch.cat(places))

        return with_references(transformer, latent, timestep, rows, predict)

    def size_arguments(self, height, width):
        """Without its area the pipeline scales a sample to one megapixel."""
        return {"height": height, "width": width, "max_area": height * width}


@cache
def _positions(size: tuple[int, int], device: torch.device) -> Tensor:
    """(0, row, column) of every 2 x 2 patch, [token, 3]."""
    axes = [torch.arange(count, device=device) for count in (1, size[0] // 2, size[1] // 2)]
    return torch.cartesian_prod(*axes).float()


class Flux2Klein(Family):
    """`Family` of diffusers' `Flux2KleinPipeline`: FLUX.2 [klein], the base models and those that
    are distilled to 4 steps without guidance.

    Latents are [sample, 4 x channel, height / 16, width / 16]: an entry is a 2 x 2 patch of a
    latent image with 32 channels. A prompt is three hidden layers of Qwen3 side by side, padded to
    the full length; the transformer attends to the padding, so the number of tokens matters. The
    time shift depends on the number of steps, so the grid of an evaluation with more steps is not a
    refinement of that of training. The single blocks compute queries, keys, values and the first
    feed-forward layer in one product, which has one LoRA.
    """

    pipeline = "Flux2KleinPipeline"
    lora_targets = (*LORA_TARGETS, "attn.to_qkv_mlp_proj")
    thinking = False

    def latent_shape(self, pipe, height, width):
        """(4 x channels, height / 16, width / 16)."""
        unit = 2 * pipe.vae_scale_factor
        require_multiples(height, width, unit)
        return pipe.transformer.config.in_channels, height // unit, width // unit

    def set_timesteps(self, scheduler, steps, latent_shape, pipe):
        """The even grid 1, ..., 1/T, shifted by the number of patches and of steps."""
        _, height, width = latent_shape
        shift = import_module(type(pipe).__module__).compute_empirical_mu
        mu = shift(height * width, steps)
        _set_even_grid(scheduler, steps, mu)

    def encode(self, pipe, texts, tokens, device):
        """The prompt's tokens in the chat template [tokens, 3 x dim], padded."""
        words, _ = pipe.encode_prompt(list(texts), device=device, max_sequence_length=tokens)
        return [{"words": w} for w in words]

    def velocity(self, transformer, latent, timestep, rows, size):
        """`Flux2Transformer2DModel` with t (it multiplies by 1000) and the positions (image, row,
        column, token).
        """
        words = rows["words"]
        # float32: bfloat16 does not have every number above 256
        places = torch.zeros(words.shape[1], 4, device=words.device)
        places[:, 3] = torch.arange(words.shape[1], device=words.device)
        predicted = transformer(
            hidden_states=rearrange(latent, "s k h w -> s (h w) k"),
            encoder_hidden_states=words,
            timestep=timestep / 1000,
            guidance=None,
            txt_ids=places,
            img_ids=torch.nn.functional.pad(_positions(size, latent.device), (0, 1)),
            return_dict=False,
        )[0]
        return self.from_loop(predicted, latent.shape)

    def decode(self, pipe, latent, size):
        """Unstandardised by the running statistics of the decoder's batch norm, whose channels are
        those of a patch, and unpacked.
        """
        norm, eps = pipe.vae.bn, pipe.vae.config.batch_norm_eps
        std, mean = (norm.running_var + eps).sqrt().to(latent), norm.running_mean.to(latent)
        patches = latent * std.view(-1, 1, 1) + mean.view(-1, 1, 1)
        image = rearrange(patches, "s (k p q) h w -> s k (h p) (w q)", p=2, q=2)
        return pipe.vae.decode(image, return_dict=False)[0]

    def guidance_arguments(self, scale, negative):
        """The negative prompt is always empty."""
        return {"guidance_scale": scale}

    def from_loop(self, latent, latent_shape):
        """The loop has the patches in a row."""
        return rearrange(latent, "s (h w) k -> s k h w", w=latent_shape[-1])


class ZImage(Family):
    """`Family` of diffusers' `ZImagePipeline`: Z-Image and Z-Image-Turbo (arXiv 2511.22699).

    Latents are [sample, channel, height / 8, width / 8]. A prompt is the last but one hidden layer
    of a Qwen3 encoder without padding; the transformer reads a list of prompts of different length
    and pads each to a multiple of 32 tokens of its own. Its time runs from 0 at noise to 1 at the
    image, and it predicts -v. The pipeline's guidance scale is ours minus 1; its Turbo example
    has 0, no guidance.
    """

    pipeline = "ZImagePipeline"
    lora_targets = tuple(f"attention.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0"))
    thinking = True

    def latent_shape(self, pipe, height, width):
        """(channels, height / 8, width / 8); sizes are multiples of 16."""
        factor = pipe.vae_scale_factor
        require_multiples(height, width, 2 * factor)
        return pipe.transformer.in_channels, height // factor, width // factor

    def set_timesteps(self, scheduler, steps, latent_shape, pipe):
        """The even grid 1, ..., 1/T, shifted by the number of 2 x 2 patches."""
        _, height, width = latent_shape
        tokens = (height // 2) * (width // 2)
        _set_even_grid(scheduler, steps, resolution_shift(scheduler, tokens, 1.15))

    def encode(self, pipe, texts, tokens, device):
        """The prompt's tokens in the chat template [token, dim], at most `tokens` of them, and a
        mask of ones.
        """
        given = dict(do_classifier_free_guidance=False, max_sequence_length=tokens)
        rows, _ = pipe.encode_prompt(list(texts), device=device, **given)
        return [{"words": words, "mask": words.new_ones(len(words)).bool()} for words in rows]

    def velocity(self, transformer, latent, timestep, rows, size):
        """Minus `ZImageTransformer2DModel` at 1 - t; the lengths of the prompts are read from the
        device.
        """
        words, mask = [*rows["words"]], rows["mask"]
        if mask is not None:
            words = [row[:n] for row, n in zip(words, mask.sum(1).tolist(), strict=True)]
        images = [*latent.unsqueeze(2)]
        predicted = transformer(images, 1 - timestep / 1000, words, return_dict=False)[0]
        return -torch.stack([*predicted]).squeeze(2)

    def decode(self, pipe, latent, size):
        """Scaled and shifted as in the pipeline."""
        return decode_scaled(pipe.vae, latent)

    def guidance_arguments(self, scale, negative):
        """v_prompt + s (v_prompt - v_neg), off at s = 0."""
        return {"guidance_scale": scale - 1, "negative_prompt": negative}


class QwenImage(Family):
    """`Family` of diffusers' `QwenImagePipeline` (arXiv 2508.02324).

    Latents are packed like FLUX's: [sample, token, 4 x channel]. A prompt is the last hidden layer
    of Qwen2.5-VL without the tokens of the pipeline's template; prompts of different length are
    padded, with a mask. Guidance is classifier-free with the norm of the prompt's velocity
    (`guide`). The last block's text queries and outputs do not reach the image: their LoRA has no
    gradient. The last time before 0 is the scheduler's `shift_terminal` (.02 for Qwen-Image), and
    the noise of the last step is small: leave it out of the trained steps (window `:-1`).
    """

    pipeline = "QwenImagePipeline"

    def latent_shape(self, pipe, height, width):
        """(height / 16 x width / 16, channels).

        Raises `ConfigError` for a guidance-distilled transformer, too: diffusers' class has a
        setting for it but cannot compute it.
        """
        distilled = pipe.transformer.config.guidance_embeds
        require(not distilled, "guidance_embeds of the transformer", distilled, "false")
        return packed_shape(pipe, height, width)

    def set_timesteps(self, scheduler, steps, latent_shape, pipe):
        """The even grid 1, ..., 1/T, shifted by the number of image tokens and stretched to end at
        `shift_terminal`, as far as the scheduler's config requires it.
        """
        _set_even_grid(scheduler, steps, resolution_shift(scheduler, latent_shape[0], 1.15))

    def encode(self, pipe, texts, tokens, device):
        """The prompt's tokens [token, dim], at most `tokens` of them, and a mask of ones; padding
        adds zeros to both. One prompt at a time, because the encoder pads to the longest.
        """
        given, rows = dict(device=device, max_sequence_length=tokens), {}
        for text in dict.fromkeys(texts):
            (words,), mask = pipe.encode_prompt([text], **given)
            kept = words.new_ones(len(words)).bool() if mask is None else mask[0].bool()
            rows[text] = {"words": words[kept], "mask": kept[kept]}
        return [rows[text] for text in texts]

    def velocity(self, transformer, latent, timestep, rows, size):
        """`QwenImageTransformer2DModel` with t (it multiplies by 1000) and the mask of the prompts'
        tokens.
        """
        return self._predict(transformer, latent, timestep, rows, [(size[0] // 2, size[1] // 2)])

    def _predict(
        self,
        transformer: Any,
        latent: Tensor,
        timestep: Tensor,
        rows: Embeddings,
        sizes: Sequence[tuple[int, int]],
    ) -> Tensor:
        return transformer(
            hidden_states=latent,
            encoder_hidden_states=rows["words"],
            encoder_hidden_states_mask=rows["mask"],
            timestep=timestep / 1000,
            img_shapes=[[(1, *one) for one in sizes]] * len(latent),
            return_dict=False,
        )[0]

    def guide(self, away: Tensor, towards: Tensor, scale: float) -> Tensor:
        """c |v_prompt| / |c| with c = v_neg + s (v_prompt - v_neg); norms over the channels of a
        token. Gradients flow through the norms.
        """
        combined = linear_guidance(away, towards, scale)
        return combined * (towards.norm(dim=-1, keepdim=True) / combined.norm(dim=-1, keepdim=True))

    def decode(self, pipe, latent, size):
        """The decoder's first frame of a video of one frame."""
        return _decode_standardised(pipe.vae, unpacked(latent, size).unsqueeze(2))[:, :, 0]

    def guidance_arguments(self, scale, negative):
        """Classifier-free guidance has the name that it has in `FluxPipeline`."""
        return {"true_cfg_scale": scale, "negative_prompt": negative}


class QwenImageEdit(QwenImage):
    """`Family` of diffusers' `QwenImageEditPipeline` (Qwen-Image-Edit, arXiv 2508.02324): edits of
    a reference image.

    Qwen2.5-VL reads the image with the prompt, and the tokens of its latent follow those of the
    image. The pipeline scales it to about one megapixel for both, whatever the size of the result,
    and does not cut prompts. The negative prompt has the same image.
    """

    pipeline = "QwenImageEditPipeline"
    images = (1, 1)
    cuts_prompts = False
    text_tokens = 1400
    """About as many as a picture of one megapixel and a short prompt have."""

    def encode_edits(
        self, pipe: Any, prompts: Sequence[Prompt], tokens: int, device: torch.device
    ) -> Sequence[Embeddings]:
        """The tokens of prompt and images [token, dim], a mask of ones, and the latents of the
        images, without noise.

        Raises `ConfigError` if a number of tokens was set.
        """
        _require_uncut(self, tokens)
        rows, channels = dict[str, Embeddings](), pipe.transformer.config.in_channels
        for prompt in prompts:
            if prompt.key in rows:
                continue
            read, sizes = self._read(pipe, [image.pillow() for image in prompt.images])
            (words,), _ = pipe.encode_prompt([prompt.text], image=read, device=device)
            latents = [self._latent(pipe, image, *size) for image, size in sizes]
            mask = words.new_ones(len(words)).bool()
            own = reference_rows(latents, words, channels)
            rows[prompt.key] = {"words": words, "mask": mask, **own}
        return [rows[prompt.key] for prompt in prompts]

    def _read(self, pipe: Any, images: Sequence[Any]) -> tuple[Any, list[tuple[Any, Any]]]:
        """The pictures that the text encoder reads, and those for the decoder's encoder with their
        heights and widths.
        """
        (image,) = images
        scaled = import_module(type(pipe).__module__).calculate_dimensions
        width, height, _ = scaled(1024 * 1024, image.width / image.height)
        resized = pipe.image_processor.resize(image, height, width)
        return resized, [(resized, (height, width))]

    def _latent(self, pipe: Any, image: Any, height: int, width: int) -> Tensor:
        pixels = pipe.image_processor.preprocess(image, height, width).unsqueeze(2)
        return pipe._encode_vae_image(pixels.to(pipe.vae.device, pipe.vae.dtype), None)[0, :, 0]

    def velocity(self, transformer, latent, timestep, rows, size):
        """As Qwen-Image, with the tokens of the references; if the transformer has `zero_cond_t`
        (2511), it gives them the time 0.
        """

        def predict(tokens, times, given, sizes):
            both = [(size[0] // 2, size[1] // 2), *sizes]
            return self._predict(transformer, tokens, times, given, both)

        return with_references(transformer, latent, timestep, rows, predict)


class QwenImageEditPlus(QwenImageEdit):
    """`Family` of diffusers' `QwenImageEditPlusPipeline` (Qwen-Image-Edit 2509 and 2511): edits of
    one to three reference images.

    Qwen2.5-VL reads them at about 384 x 384 pixels, "Picture 1", "Picture 2" and so on in the
    prompt; their latents are of about one megapixel each.
    """

    pipeline = "QwenImageEditPlusPipeline"
    images = (1, 3)
    text_tokens = 300

    def _read(self, pipe, images):
        own = import_module(type(pipe).__module__)
        read, sizes = [], []
        for image in images:
            ratio = image.width / image.height
            width, height = own.calculate_dimensions(own.CONDITION_IMAGE_SIZE, ratio)
            read.append(pipe.image_processor.resize(image, height, width))
            width, height = own.calculate_dimensions(own.VAE_IMAGE_SIZE, ratio)
            sizes.append((image, (height, width)))
        return read, sizes


class QwenImage21(Family):
    """`Family` of diffusers' `QwenImage21Pipeline` (Qwen-Image 2.1), text to image.

    Latents are [sample, token, channel], a token per 16 x 16 pixels. Text and image are one causal
    sequence, and the number of tokens before the image is the image's position: a row gets its own
    position, as if it were alone, so that a call has one forward pass per length of a prompt. The
    pipeline puts a batch behind its longest prompt instead. It does not cut prompts. The decoder
    has an opacity, and pictures are put on white.
    """

    pipeline = "QwenImage21Pipeline"
    cuts_prompts = False
    lora_targets = LORA_TARGETS[:4]
    decoder_channels = (3, 4)

    def latent_shape(self, pipe, height, width):
        """(height / 16 x width / 16, channels); sizes are multiples of 32."""
        factor = pipe.vae_scale_factor
        require_multiples(height, width, 2 * factor)
        return (height // factor) * (width // factor), pipe.transformer.config.in_channels

    def set_timesteps(self, scheduler, steps, latent_shape, pipe):
        """The even grid 1, ..., 1/T, or the pipeline's `sample_sigmas` if they have T steps,
        shifted by the number of image tokens.
        """
        mu, own = resolution_shift(scheduler, latent_shape[0], 1.15), pipe.config.sample_sigmas
        if own and len(own) == steps:
            scheduler.set_timesteps(sigmas=own, mu=mu)
        else:
            _set_even_grid(scheduler, steps, mu)

    def encode(self, pipe, texts, tokens, device):
        """The prompt's tokens [token, dim] and a mask of ones; padding adds zeros to both.

        Raises `ConfigError` if a number of tokens was set.
        """
        _require_uncut(self, tokens)
        rows = {}
        for text in dict.fromkeys(texts):
            (words,), _, _ = pipe.encode_prompt([text], device=device)
            rows[text] = {"words": words, "mask": words.new_ones(len(words)).bool()}
        return [rows[text] for text in texts]

    def velocity(self, transformer, latent, timestep, rows, size):
        """`QwenImage21Transformer2DModel` with t, once per length of a prompt (once per row if its
        weights are sharded: processes must make the same number of calls); the lengths are read
        from the device.
        """
        tokens = latent.shape[1]

        def call(some: Any, length: int) -> Tensor:
            image = latent[some]
            slots = latent.new_zeros(len(image), length + tokens // 4, dtype=torch.bool)
            slots[:, length:] = True  # a slot has 2 x 2 tokens of the image
            predicted = transformer(
                hidden_states=image,
                encoder_hidden_states=rows["words"][some][:, :length],
                timestep=timestep[some] / 1000,
                img_shapes=[[(1, *size)]] * len(image),
                img_mask=slots,
                return_dict=False,
            )[0]
            return predicted[:, -tokens:]

        return in_groups(rows["mask"].sum(1).tolist(), call, transformer)

    def decode(self, pipe, latent, size):
        """The decoder's first frame, its colours c with opacity a as a c + (1 - a)."""
        image = rearrange(latent, "s (f h w) k -> s k f h w", f=1, h=size[0])
        pixels = _decode_standardised(pipe.vae, image)[:, :, 0]
        opacity = pixels[:, 3:] / 2 + 0.5 if pixels.shape[1] > 3 else 1.0
        return opacity * pixels[:, :3] + (1 - opacity)

    def guidance_arguments(self, scale, negative):
        """Classifier-free guidance has the name that it has in `FluxPipeline`."""
        return {"true_cfg_scale": scale, "negative_prompt": negative}


class Wan(Family):
    """`Family` of diffusers' `WanPipeline`: text to video with Wan 2.1 (arXiv 2503.20314) and 2.2.

    Latents are [sample, channel, frame, height, width]: one latent frame for the first frame of the
    video, then one for every four frames. A prompt is UMT5's last hidden layer with zeros after its
    tokens, up to the full length. The transformer has no mask and attends to these zeros, so the
    number of tokens matters. The default is the 512 of the pipeline's call; `encode_prompt` alone
    has 226. The grid has the scheduler's fixed shift: 3 for 480p, 5 for 720p.

    Wan 2.2 A14B has two transformers. `transformer`, for 1000 t of at least 1000 `boundary_ratio`,
    is trained; `transformer_2`, for less noise, is frozen and a part of the rollout. Wan 2.2 5B has
    a time per token, all the same for text to video, so it gets one.
    """

    pipeline = "WanPipeline"
    decoder_channels = (3, 12)  # of pixels, or of 2 x 2 patches
    lora_targets = tuple(
        f"{layer}.{name}"
        for layer in ("attn1", "attn2")
        for name in ("to_q", "to_k", "to_v", "to_out.0")
    )

    def video_shape(self, pipe: Any, height: int, width: int, frames: int) -> Shape:
        """(channels, (frames - 1) / 4 + 1, height / 8, width / 8); sizes are multiples of 16 (of
        Wan 2.2 5B: height / 16, width / 16, multiples of 32).

        Raises `ConfigError` for one of two transformers, too.
        """
        two, ratio = pipe.transformer_2 is not None, pipe.config["boundary_ratio"]
        allowed = "given exactly if there is a transformer_2"
        require(two == (ratio is not None), "boundary_ratio of the model", ratio, allowed)
        side, factor = pipe.vae_scale_factor_spatial, pipe.vae_scale_factor_temporal
        config = pipe.transformer.config
        require_multiples(height, width, side * config.patch_size[1])
        fits = (frames - 1) % factor == 0
        require(fits, "num_frames", frames, f"1 more than a multiple of {factor}")
        return config.in_channels, (frames - 1) // factor + 1, height // side, width // side

    def set_timesteps(self, scheduler, steps, latent_shape, pipe):
        """The scheduler's grid."""
        scheduler.set_timesteps(steps)

    def encode(self, pipe, texts, tokens, device):
        """The prompt's embeddings [tokens, dim], padded with zeros."""
        given = dict(max_sequence_length=tokens, device=device)
        words, _ = pipe.encode_prompt(list(texts), do_classifier_free_guidance=False, **given)
        return [{"words": w} for w in words]

    def velocity(self, transformer, latent, timestep, rows, size):
        """`WanTransformer3DModel` with 1000 t."""
        return transformer(latent, timestep, rows["words"], return_dict=False)[0]

    def second_transformer(self, pipe):
        """`transformer_2`, for less noise."""
        steps = pipe.scheduler.config.num_train_timesteps
        return pipe.transformer_2, (pipe.config["boundary_ratio"] or 0.0) * steps

    def decode(self, pipe, latent, size):
        """Frame by frame: [sample, frame, 3, height, width]."""
        return _decode_standardised(pipe.vae, latent).transpose(1, 2)


class Sana(Family):
    """`Family` of diffusers' `SanaPipeline`: SANA and SANA-1.5 with linear attention (arXiv
    2410.10629).

    Latents are [sample, channel, height / 32, width / 32]. A prompt is Gemma 2's last hidden layer
    of the prompt behind the pipeline's instruction, at a fixed length, with a mask. The negative
    prompt is the empty one, which has no instruction. The pipeline's `use_resolution_binning` is
    off. The grid has the scheduler's fixed shift.
    """

    pipeline = "SanaPipeline"
    text_tokens = 300
    reserved_tokens = 1
    lora_targets = Wan.lora_targets

    def latent_shape(self, pipe, height, width):
        """(channels, height / 32, width / 32); sizes are multiples of 32 x patch size."""
        factor, config = pipe.vae_scale_factor, pipe.transformer.config
        require_multiples(height, width, factor * config.patch_size)
        return config.in_channels, height // factor, width // factor

    def set_timesteps(self, scheduler, steps, latent_shape, pipe):
        """The scheduler's grid."""
        scheduler.set_timesteps(steps)

    def encode(self, pipe, texts, tokens, device):
        """The first and the last tokens [tokens, dim], which are the prompt's, and their mask."""
        instruction = signature(pipe.__call__).parameters["complex_human_instruction"].default
        rows = {}
        for text in dict.fromkeys(texts):
            (words,), (mask,), *_ = pipe.encode_prompt(
                [text],
                do_classifier_free_guidance=False,
                device=device,
                max_sequence_length=tokens,
                complex_human_instruction=instruction if text else None,
            )
            rows[text] = {"words": words, "mask": mask.bool()}
        return [rows[text] for text in texts]

    def velocity(self, transformer, latent, timestep, rows, size):
        """`SanaTransformer2DModel` with 1000 t times its `timestep_scale`, and the mask."""
        return transformer(
            latent,
            encoder_hidden_states=rows["words"],
            encoder_attention_mask=rows["mask"],
            timestep=timestep * transformer.config.timestep_scale,
            return_dict=False,
        )[0]

    def decode(self, pipe, latent, size):
        """Scaled as in the pipeline."""
        return pipe.vae.decode(latent / pipe.vae.config.scaling_factor, return_dict=False)[0]

    def guidance_arguments(self, scale, negative):
        """The negative prompt is always empty."""
        return {"guidance_scale": scale}


FAMILIES: dict[str, type[Family]] = {
    kind.pipeline: kind
    for kind in (
        *(SD3, Flux, FluxKontext, Flux2Klein, ZImage, QwenImage, QwenImage21),
        *(QwenImageEdit, QwenImageEditPlus, Wan, Sana),
    )
}
"""Built-in families by the class of their pipeline; a package adds one by an entry point of that
name in `flowrl.families`.
"""


def text_to_image(pipeline: str) -> str:
    """The pipeline that has the transformer and the latents of a `pipeline` of edits; others are
    their own.
    """
    kinds = FAMILIES[pipeline].__mro__ if pipeline in FAMILIES else ()
    own = [kind.pipeline for kind in kinds if issubclass(kind, Family) and kind is not Family]
    return own[-1] if own else pipeline


def shape_of(pipe: Any, family: Family, height: int, width: int, frames: int) -> Shape:
    """The shape of the latent of an image or video."""
    if hasattr(family, "video_shape"):
        return family.video_shape(pipe, height, width, frames)  # pyright: ignore
    require(frames == 1, "num_frames", frames, f"1: a {family.pipeline} makes images")
    return family.latent_shape(pipe, height, width)


def size_of(pipe: Any, height: int, width: int) -> tuple[int, int]:
    """Height and width of the latent image."""
    factor = getattr(pipe, "vae_scale_factor", None) or pipe.vae_scale_factor_spatial
    return height // factor, width // factor
