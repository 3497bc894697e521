"""Randomly initialised pipelines of the real diffusers and transformers classes, small enough for
tests and lessons.

Their images are noise, but tokenizers, text encoders, transformer, image decoder and scheduler are
of the real classes: they can be saved, loaded and get a LoRA like the published models. Nothing is
downloaded. The libraries are imported on use, because that takes seconds.

For a small pipeline of another family: `make_t5`, `make_tokenizer`, `make_decoder`,
`make_scheduler`, within `seeded`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from flowrl import PolicyOptions
from flowrl.policies.families import (
    SD3,
    Flux,
    Flux2Klein,
    FluxKontext,
    QwenImage,
    QwenImage21,
    QwenImageEdit,
    Sana,
    Wan,
    ZImage,
)
from flowrl.policies.pipeline import PipelinePolicy

TINY = PolicyOptions(resolution=16, lora_rank=4, lora_alpha=8.0, max_sequence_length=24)
"""Options that fit the tiny pipelines."""
TINY_CHAT = replace(TINY, max_sequence_length=48)
"""Options that fit `tiny_flux2_klein` and `tiny_z_image`, whose prompts are in a chat template."""
TINY_LARGE = replace(TINY, resolution=32)
"""Options that fit `tiny_sana`, whose sizes are multiples of 32."""
TINY_UNCUT = replace(TINY_LARGE, max_sequence_length=None)
"""Options that fit `tiny_qwen_image21`, whose pipeline does not cut prompts."""
TINY_VIDEO = replace(TINY, num_frames=5)
"""Options that fit `tiny_wan`."""
CLIP_TOKENS = 40
PICTURE_TOKENS = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
"""Of the tokenizers of Qwen's encoders that read pictures."""
WIDTH = 32
ATTENTION = {"attention_head_dim": 16, "num_attention_heads": 2}
VIDEO_DECODER = {
    "base_dim": 8,
    "z_dim": 4,
    "num_res_blocks": 1,
    "latents_mean": (-0.8, 0.1, -0.2, 1.0),
    "latents_std": (2.8, 1.5, 2.3, 1.2),
}
"""Of Qwen-Image and of Wan."""
TEMPLATE_WORDS = [
    "system",
    "user",
    "assistant",
    "Describe",
    "Ġthe",
    "Ġimage",
    "Ġby",
    "Ġdetailing",
    "Ġcolor",
    "Ġshape",
    "Ġsize",
    "Ġtexture",
    "Ġquantity",
    "Ġtext",
    "Ġspatial",
    "Ġrelationships",
    "Ġof",
    "Ġobjects",
    "Ġand",
    "Ġbackground",
]
"""Words of Qwen-Image's template; Ġ is a space before the word, in byte-level tokenizers."""


def tiny_sd3(seed: int = 0) -> Any:
    """A `StableDiffusion3Pipeline` with a two-layer transformer, 2 x 2 patches and shift 3.

    As in SD3.5-Medium, queries and keys are normalised, and the first layer has a second
    self-attention of the image.

    Args:
        seed: seed of the random weights.

    Returns:
        The pipeline.
    """
    diffusers: Any = import_module("diffusers")

    with seeded(seed):
        transformer = diffusers.SD3Transformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            joint_attention_dim=2 * WIDTH,
            caption_projection_dim=32,
            pooled_projection_dim=2 * WIDTH,
            pos_embed_max_size=16,
            qk_norm="rms_norm",
            dual_attention_layers=(0,),
            **ATTENTION,
        )
        return diffusers.StableDiffusion3Pipeline(
            transformer=transformer,
            scheduler=make_scheduler(shift=3.0),
            vae=make_decoder(4),
            text_encoder=_clip("CLIPTextModelWithProjection"),
            tokenizer=make_tokenizer(clip=True),
            text_encoder_2=_clip("CLIPTextModelWithProjection"),
            tokenizer_2=make_tokenizer(clip=True),
            text_encoder_3=make_t5(2 * WIDTH),
            tokenizer_3=make_tokenizer(clip=False),
        )


def tiny_flux(seed: int = 0, distilled: bool = True) -> Any:
    """A `FluxPipeline` with one double and one single block, dynamic shifting as FLUX.1-dev.

    Args:
        seed: seed of the random weights.
        distilled: give the transformer an input for a guidance scale, as in FLUX.1-dev
            (FLUX.1-schnell has none).

    Returns:
        The pipeline.
    """
    return _tiny_flux("FluxPipeline", seed, distilled)


def tiny_flux_kontext(seed: int = 0) -> Any:
    """A `FluxKontextPipeline` with the networks of `tiny_flux`."""
    return _tiny_flux("FluxKontextPipeline", seed)


def _tiny_flux(kind: str, seed: int, distilled: bool = True) -> Any:
    diffusers: Any = import_module("diffusers")

    with seeded(seed):
        transformer = diffusers.FluxTransformer2DModel(
            patch_size=1,
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            joint_attention_dim=WIDTH,
            pooled_projection_dim=WIDTH,
            guidance_embeds=distilled,
            axes_dims_rope=(4, 6, 6),
            **ATTENTION,
        )
        return getattr(diffusers, kind)(
            transformer=transformer,
            scheduler=make_scheduler(use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15),
            vae=make_decoder(4),
            text_encoder=_clip("CLIPTextModel"),
            tokenizer=make_tokenizer(clip=True),
            text_encoder_2=make_t5(WIDTH),
            tokenizer_2=make_tokenizer(clip=False),
        )


def tiny_flux2_klein(seed: int = 0, distilled: bool = False) -> Any:
    """A `Flux2KleinPipeline` with one double and one single block, and Qwen3 with 27 layers, of
    which the pipeline reads three.

    Args:
        seed: seed of the random weights.
        distilled: mark the pipeline as distilled to few steps without guidance.

    Returns:
        The pipeline.
    """
    diffusers: Any = import_module("diffusers")

    with seeded(seed):
        transformer = diffusers.Flux2Transformer2DModel(
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            joint_attention_dim=3 * WIDTH,
            timestep_guidance_channels=32,
            guidance_embeds=False,
            axes_dims_rope=(4, 4, 4, 4),
            **ATTENTION,
        )
        decoder = diffusers.AutoencoderKLFlux2(
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            block_out_channels=(8, 16),
            latent_channels=4,
            norm_num_groups=4,
            layers_per_block=1,
            sample_size=16,
        )
        decoder.bn.running_mean.normal_(std=0.5)
        decoder.bn.running_var.uniform_(0.5, 2.0)
        tokenizer = _qwen_tokenizer()
        return diffusers.Flux2KleinPipeline(
            scheduler=make_scheduler(use_dynamic_shifting=True),
            vae=decoder.eval(),
            text_encoder=_qwen3("Qwen3ForCausalLM", len(tokenizer), layers=27),
            tokenizer=tokenizer,
            transformer=transformer,
            is_distilled=distilled,
        )


def tiny_z_image(seed: int = 0) -> Any:
    """A `ZImagePipeline` with two blocks, a refiner of each stream, and shift by resolution."""
    diffusers: Any = import_module("diffusers")

    with seeded(seed):
        transformer = diffusers.ZImageTransformer2DModel(
            in_channels=4,
            dim=WIDTH,
            n_layers=2,
            n_refiner_layers=1,
            n_heads=2,
            n_kv_heads=2,
            cap_feat_dim=WIDTH,
            axes_dims=[4, 6, 6],
            axes_lens=[128, 32, 32],
        )
        for pad in (transformer.x_pad_token, transformer.cap_pad_token):
            torch.nn.init.normal_(pad)
        tokenizer = _qwen_tokenizer()
        return diffusers.ZImagePipeline(
            scheduler=make_scheduler(use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15),
            vae=make_decoder(4),
            text_encoder=_qwen3("Qwen3Model", len(tokenizer), layers=3),
            tokenizer=tokenizer,
            transformer=transformer,
        )


def tiny_qwen_image(seed: int = 0) -> Any:
    """A `QwenImagePipeline` with two blocks and Qwen-Image's shifts: by resolution, and to .02 as
    the last time before 0.
    """
    return _tiny_qwen("QwenImagePipeline", seed)


def tiny_qwen_image_edit(seed: int = 0, plus: bool = False) -> Any:
    """A `QwenImageEditPipeline`, or with `plus` a `QwenImageEditPlusPipeline`, with the networks of
    `tiny_qwen_image`. It can be saved where torchvision is installed, which the processor of
    pictures needs.
    """
    return _tiny_qwen(f"QwenImageEdit{'Plus' * plus}Pipeline", seed)


def _tiny_qwen(kind: str, seed: int) -> Any:
    diffusers: Any = import_module("diffusers")
    edits = "Edit" in kind

    with seeded(seed):
        transformer = diffusers.QwenImageTransformer2DModel(
            patch_size=2,
            in_channels=16,
            out_channels=4,
            num_layers=2,
            joint_attention_dim=WIDTH,
            axes_dims_rope=(4, 6, 6),
            **ATTENTION,
        )
        decoder = diffusers.AutoencoderKLQwenImage(
            dim_mult=[1, 2], temperal_downsample=[False], **VIDEO_DECODER
        )
        scheduler = make_scheduler(
            use_dynamic_shifting=True,
            base_shift=0.5,
            max_shift=0.9,
            max_image_seq_len=8192,
            shift_terminal=0.02,
        )
        names = PICTURE_TOKENS if edits else ()
        tokenizer = _qwen_tokenizer(*names)
        encoder = _qwen_vl(len(tokenizer), pictures=edits)
        parts = {"processor": _qwen_processor(tokenizer, "Qwen2VL")} if edits else {}
        return getattr(diffusers, kind)(
            scheduler=scheduler,
            vae=decoder.eval(),
            text_encoder=encoder,
            tokenizer=tokenizer,
            transformer=transformer,
            **parts,
        )


def tiny_qwen_image21(seed: int = 0, channels: int = 4) -> Any:
    """A `QwenImage21Pipeline` with two blocks. It can be saved where torchvision is installed,
    which its processor needs for pictures.

    Args:
        seed: seed of the random weights.
        channels: channels of its images; the fourth is the opacity.

    Returns:
        The pipeline.
    """
    diffusers: Any = import_module("diffusers")

    with seeded(seed):
        transformer = diffusers.QwenImage21Transformer2DModel(
            in_channels=4,
            out_channels=4,
            num_layers=2,
            context_in_dim=WIDTH,
            axes_dims_rope=(4, 6, 6),
            **ATTENTION,
        )
        decoder = diffusers.AutoencoderKLQwenImage21(
            **VIDEO_DECODER | {"base_dim": 4},
            decoder_base_dim=4,
            dim_mult=[1, 1, 1, 1, 1],
            in_channels=channels,
            out_channels=channels,
        )
        tokenizer = _qwen_tokenizer(*PICTURE_TOKENS)
        processor = _qwen_processor(tokenizer)
        encoder = _qwen_vl(len(tokenizer), "Qwen3VL")
        scheduler = make_scheduler(use_dynamic_shifting=True)
        return diffusers.QwenImage21Pipeline(
            scheduler, decoder.eval(), encoder, processor, transformer
        )


def tiny_wan(seed: int = 0, boundary: float | None = None, patches: bool = False) -> Any:
    """A `WanPipeline` with transformers of two blocks, shift 3, a video decoder that halves each
    side twice, and four frames per latent frame.

    Args:
        seed: seed of the random weights.
        boundary: the time below which there is a second transformer, as in Wan 2.2 A14B.
        patches: a time per token, and a decoder of 2 x 2 patches that halves each side once, as in
            Wan 2.2 5B.

    Returns:
        The pipeline.
    """
    diffusers: Any = import_module("diffusers")

    def transformer() -> Any:
        return diffusers.WanTransformer3DModel(
            patch_size=(1, 2, 2),
            in_channels=4,
            out_channels=4,
            num_layers=2,
            attention_head_dim=12,
            num_attention_heads=2,
            text_dim=WIDTH,
            freq_dim=32,
            ffn_dim=32,
        )

    with seeded(seed):
        first = transformer()
        channels = 12 if patches else 3
        decoder = diffusers.AutoencoderKLWan(
            dim_mult=[1, 2, 2] if patches else [1, 1, 2],
            temperal_downsample=[True, True],
            scale_factor_temporal=4,
            scale_factor_spatial=8 if patches else 4,
            patch_size=2 if patches else None,
            is_residual=patches,
            in_channels=channels,
            out_channels=channels,
            **VIDEO_DECODER,
        )
        encoder, scheduler = make_t5(WIDTH, "UMT5"), make_scheduler(shift=3.0)
        return diffusers.WanPipeline(
            make_tokenizer(clip=False),
            encoder,
            decoder.eval(),
            scheduler,
            first,
            transformer() if boundary is not None else None,
            boundary_ratio=boundary,
            expand_timesteps=patches,
        )


def tiny_sana(seed: int = 0) -> Any:
    """A `SanaPipeline` with two blocks, shift 3, and a decoder that doubles each side twice."""
    diffusers: Any = import_module("diffusers")
    transformers: Any = import_module("transformers")

    with seeded(seed):
        transformer = diffusers.SanaTransformer2DModel(
            in_channels=4,
            out_channels=4,
            num_layers=2,
            num_cross_attention_heads=2,
            cross_attention_head_dim=16,
            cross_attention_dim=WIDTH,
            caption_channels=WIDTH,
            sample_size=8,
            **ATTENTION,
        )
        channels = (8, 8, 8)
        decoder = diffusers.AutoencoderDC(
            latent_channels=4,
            encoder_block_out_channels=channels,
            decoder_block_out_channels=channels,
            encoder_layers_per_block=(1, 1, 1),
            decoder_layers_per_block=(1, 1, 1),
            encoder_qkv_multiscales=((), (), ()),
            decoder_qkv_multiscales=((), (), ()),
            scaling_factor=0.41407,
        )
        tokenizer = make_tokenizer(clip=False)
        config = transformers.Gemma2Config(
            vocab_size=len(tokenizer),
            hidden_size=WIDTH,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
        )
        encoder = transformers.Gemma2Model(config).eval()
        scheduler = make_scheduler(shift=3.0)
        return diffusers.SanaPipeline(tokenizer, encoder, decoder.eval(), transformer, scheduler)


def _policy(make: Callable[[int], Any], family: Any, default: PolicyOptions) -> Any:
    """A maker of policies over the pipelines of `make`."""

    def policy(options: PolicyOptions = default, seed: int = 0) -> PipelinePolicy:
        return PipelinePolicy(make(seed), family(), options)

    return policy


tiny_sd3_policy = _policy(tiny_sd3, SD3, TINY)
"""A policy with options and a seed over `tiny_sd3` with this seed."""
tiny_flux_policy = _policy(tiny_flux, Flux, TINY)
"""Likewise over `tiny_flux`."""
tiny_flux2_klein_policy = _policy(tiny_flux2_klein, Flux2Klein, TINY_CHAT)
"""Likewise over `tiny_flux2_klein`."""
tiny_z_image_policy = _policy(tiny_z_image, ZImage, TINY_CHAT)
"""Likewise over `tiny_z_image`."""
tiny_qwen_image_policy = _policy(tiny_qwen_image, QwenImage, TINY)
"""Likewise over `tiny_qwen_image`."""
tiny_qwen_image21_policy = _policy(tiny_qwen_image21, QwenImage21, TINY_UNCUT)
"""Likewise over `tiny_qwen_image21`."""
tiny_flux_kontext_policy = _policy(tiny_flux_kontext, FluxKontext, TINY)
"""Likewise over `tiny_flux_kontext`."""
tiny_qwen_image_edit_policy = _policy(tiny_qwen_image_edit, QwenImageEdit, TINY_UNCUT)
"""Likewise over `tiny_qwen_image_edit`."""
tiny_sana_policy = _policy(tiny_sana, Sana, TINY_LARGE)
"""Likewise over `tiny_sana`."""
tiny_wan_policy = _policy(tiny_wan, Wan, TINY_VIDEO)
"""Likewise over `tiny_wan`."""


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def make_scheduler(**settings: Any) -> Any:
    """A flow-matching Euler scheduler with these settings."""
    return import_module("diffusers").FlowMatchEulerDiscreteScheduler(**settings)


def make_decoder(channels: int) -> Any:
    """An image decoder that halves each side."""
    decoder = import_module("diffusers").AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 16),
        latent_channels=channels,
        norm_num_groups=4,
        sample_size=16,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=1.5305,
        shift_factor=0.0609,
    )
    return decoder.eval()


def _clip(name: str) -> Any:
    transformers: Any = import_module("transformers")

    tokens = make_tokenizer(clip=True)
    config = transformers.CLIPTextConfig(
        vocab_size=len(tokens),
        hidden_size=WIDTH,
        intermediate_size=64,
        projection_dim=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=CLIP_TOKENS,
        bos_token_id=tokens.bos_token_id,
        eos_token_id=tokens.eos_token_id,
        pad_token_id=tokens.pad_token_id,
    )
    return getattr(transformers, name)(config).eval()


def make_t5(width: int, name: str = "T5") -> Any:
    """A text encoder of the kind T5 for `make_tokenizer(clip=False)`."""
    transformers: Any = import_module("transformers")

    tokens = make_tokenizer(clip=False)
    config = getattr(transformers, f"{name}Config")(
        vocab_size=len(tokens),
        d_model=width,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_heads=2,
        feed_forward_proj="gated-gelu",
        pad_token_id=tokens.pad_token_id,
        eos_token_id=tokens.eos_token_id,
    )
    return getattr(transformers, f"{name}EncoderModel")(config).eval()


def make_tokenizer(clip: bool) -> Any:
    """One token per byte, so that any text has tokens and different texts differ."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    start, end = ("<|startoftext|>", "<|endoftext|>") if clip else ("<pad>", "</s>")
    tokens = [start, end, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer: Any = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    frame = f"{start} $A {end}" if clip else f"$A {end}"
    pairs = [(start, 0), (end, 1)]
    tokenizer.post_processor = processors.TemplateProcessing(single=frame, special_tokens=pairs)
    other = end if clip else start  # padding and unknown tokens
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=start if clip else None,
        eos_token=end,
        pad_token=other,
        unk_token=other,
        model_max_length=CLIP_TOKENS if clip else 512,
    )


def _qwen_vl(vocabulary: int, name: str = "Qwen2_5_VL", pictures: bool = False) -> Any:
    """A text encoder; with `pictures` it knows the tokens of pictures in `_qwen_tokenizer`."""
    transformers: Any = import_module("transformers")

    text = {
        "vocab_size": vocabulary,
        "hidden_size": WIDTH,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "bos_token_id": None,
        "eos_token_id": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
    }
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": WIDTH,
    }
    if name == "Qwen3VL":
        text |= {"head_dim": 16}
        vision |= {"deepstack_visual_indexes": (0,), "num_position_embeddings": 16}
    # behind the three special tokens of every tokenizer
    given = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    known = {token: number for number, token in enumerate(given, 3)} if pictures else {}
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=vision, **known)
    return getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()


def _qwen_processor(tokenizer: Any, name: str = "Qwen3VL") -> Any:
    """The processor of texts and pictures; without torchvision one that reads no videos, which
    cannot be saved.
    """
    transformers: Any = import_module("transformers")
    kind = getattr(transformers, f"{name}Processor")

    class Unchecked(kind):
        def check_argument_for_proper_class(self, *given: Any) -> None: ...

    template, sizes = {"chat_template": tokenizer.chat_template}, {"min_pixels": 56 * 56}
    if find_spec("torchvision") is None:
        pictures = transformers.Qwen2VLImageProcessorPil(**sizes)
        return Unchecked(pictures, tokenizer, None, **template)
    pictures = transformers.Qwen2VLImageProcessor(**sizes)
    videos = getattr(transformers, f"{name}VideoProcessor")()
    return kind(pictures, tokenizer, videos, **template)


def _qwen3(name: str, vocabulary: int, layers: int) -> Any:
    transformers: Any = import_module("transformers")

    config = transformers.Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )
    return getattr(transformers, name)(config).eval()


CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content if message.content is string else message.content[0].text }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""What Qwen3's chat template makes of a prompt."""


def _qwen_tokenizer(*more: str) -> Any:
    """A token per byte, one per word of the pipeline's template, and the special tokens `more`.

    The template then has 34 tokens before the prompt, as with the published vocabulary; the
    pipeline drops this number of tokens.
    """
    from tokenizers import pre_tokenizers

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *more]
    prefixes = {word[:end]: None for word in TEMPLATE_WORDS for end in range(2, len(word) + 1)}
    tokens = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet()), *prefixes]
    return import_module("transformers").Qwen2Tokenizer(
        {token: number for number, token in enumerate(tokens)},
        [(prefix[:-1], prefix[-1]) for prefix in prefixes],
        additional_special_tokens=special[1:],
        model_max_length=2048,
        chat_template=CHAT,
    )
