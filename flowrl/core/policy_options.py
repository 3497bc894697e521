"""The options of a policy: one data class, which is also the group `policy` of a run's settings."""

import re
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

from flowrl.core.errors import require
from flowrl.core.options import (
    Count,
    NonNegative,
    Positive,
    Seed,
    Text,
    Unset,
    Whole,
    checked_options,
)

Precision = Literal["float32", "bfloat16", "float16"]
Pixels = Annotated[int, Ge(1), Le(2**14)]
Switch = Annotated[bool | None, Unset("auto")]
Batch = Annotated[Count | None, Unset("auto")]
MADE_BY_RUN = "made by the run"
"""Marks options that no user sets: a run computes them from its other settings."""


def _made_by_run(default: Any) -> Any:
    return field(default=default, metadata={MADE_BY_RUN: True})


@checked_options
@dataclass(frozen=True)
class PolicyOptions:
    """The trained network."""

    model: Text = None
    """Train this model instead of a built-in one: the folder of a diffusers pipeline, its name on
    the Hub, or a single .safetensors file with a transformer (then give `original`).
    """
    original: Text = None
    """If `model` is a single file: the folder or Hub name of the diffusers pipeline that it was
    trained from, for the configs, the tokenizers and the parts that the file does not contain.
    """
    base_weights: Text = None
    """Base weights for the world's policy instead of its own; `flowrl pretrain` makes them for
    the image worlds.
    """
    reference: Text = None
    """Run (RUN, RUN@000010, RUN@best) whose averaged weights replace the base model as the
    reference: the teacher in distillation, or the reference of the KL penalty.
    """
    device: str = "cpu"
    """cpu, cuda or cuda:NUMBER."""
    dtype: Precision = "float32"
    """Precision of the network: float32, bfloat16 or float16 (transition mathematics is always
    float32).
    """
    tuning: Literal["lora", "full"] = "lora"
    """Trained weights of `model`: lora or full."""
    lora_rank: Annotated[int, Ge(1), Le(2**14)] = 8
    """Rank of the LoRA."""
    lora_alpha: Positive = 16.0
    """Alpha of the LoRA: its matrix product is scaled by alpha / rank."""
    lora_targets: tuple[str, ...] = ()
    """Suffixes of the names of the layers of `model` that get a LoRA, as in attn.to_q; none: the
    attention layers.
    """
    adapter: Text = None
    """Weights that training of `model` starts from: a LoRA of any program (file, folder or name on
    the Hub) of at most rank `lora_rank`, a run or a checkpoint of it (RUN, RUN@000010, RUN@best),
    or a folder with a transformer, which is then also the reference.
    """
    frozen_adapters: Text = None
    """LoRAs of `model` that are active but not trained, separated by commas: what `adapter`
    accepts, as PATH, NAME=PATH or with a weight as NAME=PATH:0.8.
    """
    resolution: Pixels = 512
    """Height of the images or videos of `model` in pixels, and their width unless `width` is given.
    """
    width: Annotated[Pixels | None, Unset(0)] = None
    """Width in pixels; 0 = `resolution`."""
    sizes: tuple[str, ...] = ()
    """Sizes of the samples of `model` that iterations of training have in turn, WIDTHxHEIGHT or the
    side of a square in pixels, as in 512 768x512; none: that of `resolution` and `width`, which
    evaluations have without `eval_resolution`.
    """
    num_frames: Annotated[int, Ge(1), Le(2**12)] = 1
    """Frames of the videos of `model`; 1 for images."""
    guidance_scale: Annotated[float, Ge(1)] = 1.0
    """Classifier-free guidance of `model` in sampling, training and, without `eval_guidance`,
    evaluation; 1 = off.
    """
    train_guidance_scale: Annotated[NonNegative | None, Unset(0.0)] = None
    """Guidance of the velocities in a forward-process loss; 1 = off (conditional velocities); 0 =
    `guidance_scale`.
    """
    reference_guidance_scale: Annotated[NonNegative | None, Unset(0.0)] = None
    """Guidance of the base model's velocity in a forward-process loss; 0 = `train_guidance_scale`.
    """
    negative_prompt: str = ""
    """Negative prompt for the guidance of `model`."""
    guidance_gradient: Literal["both", "prompt"] = "both"
    """Branches of the guidance that the gradient flows through: both, or prompt (not the branch of
    the negative prompt).
    """
    max_sequence_length: Annotated[Annotated[int, Ge(1), Le(512)] | None, Unset(0)] = None
    """Prompt length of the T5 encoder of `model`, or of its only encoder, in tokens; 0 = the
    pipeline's default.
    """
    prompt_cache: Count = 2048
    """Number of prompt embeddings of `model` kept in main memory; the others are read from disk."""
    gradient_checkpointing: Switch = False
    """Recompute activations of `model` in the backward pass: less memory, one more forward pass.
    True, False or auto: whichever is measured to be faster.
    """
    attention_backend: Text = None
    """Attention kernels of `model` by their name in diffusers, as in _native_cudnn or flash; empty:
    diffusers' default.
    """
    decode_batch: Batch = 8
    """Latents of `model` per call of its image decoder; auto: measured at the start."""
    decode_tiling: bool = False
    """Decode an image of `model` in overlapping tiles whose seams are blended: less memory,
    slightly different images.
    """
    quantize: Literal["none", "int8", "nf4"] = "none"
    """Precision of the frozen weights of the linear layers of `model` under a LoRA: int8 (needs
    torchao), nf4 (needs bitsandbytes and a GPU), or none: the precision in `dtype`.
    """
    decode_dtype: Precision = "float32"
    """Precision of the image decoder of `model`."""
    compile: Switch = False
    """Compile the network's blocks with torch.compile: a minute or more at the start, faster calls
    afterwards. True, False or auto: on a GPU, if compilation is measured to be faster and
    velocities are the same with and without gradients.
    """
    seed: Seed = _made_by_run(0)
    """Seed of the initial values of what is trained."""
    fixed: bool = _made_by_run(False)
    """Nothing is trained: the network stays as it is."""
    rows: Whole = _made_by_run(0)
    """Rows of every call of the transformer: more are split, and fewer are filled up with copies,
    so that sampling and training compute with the same kernels; 0: as many as there are.
    """
    keep_reference: bool = _made_by_run(True)
    """Full fine-tuning: keep a frozen copy of the transformer in `dtype`, for a KL to the base
    model.
    """
    load_to: Literal["device", "cpu", "meta"] = _made_by_run("device")
    """Where the transformer's weights are loaded. Those that will be sharded over the processes
    (`flowrl.run.distributed.shard`): cpu in the main process, and meta, without reading them, in
    all others.
    """

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the images in pixels."""
        return self.resolution, self.width or self.resolution

    @property
    def training_sizes(self) -> tuple[tuple[int, int], ...]:
        """Heights and widths of `sizes`; that of `size` without them. Raises `ConfigError` for a
        text of another form.
        """
        for text in self.sizes:
            fits = re.fullmatch(r"\d{1,5}(x\d{1,5})?", text) is not None
            require(
                fits, "sizes", text, "WIDTHxHEIGHT in pixels, or the side, as in 768x512 or 512"
            )
        pairs = [[int(side) for side in text.split("x")] for text in self.sizes]
        return tuple((pair[-1], pair[0]) for pair in pairs) or (self.size,)

    @property
    def trained(self) -> Literal["lora", "full"] | None:
        """`tuning`; None if nothing is trained."""
        return None if self.fixed else self.tuning

    @property
    def frozen(self) -> tuple[str, ...]:
        """The LoRAs in `frozen_adapters`."""
        return tuple(filter(None, (self.frozen_adapters or "").split(",")))
