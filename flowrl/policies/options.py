"""How a diffusers pipeline becomes a policy: the options."""

from dataclasses import dataclass

import torch

from flowrl.errors import require

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class ModelOptions:
    """How a pipeline becomes a policy. Sizes in pixels; the defaults are Flow-GRPO's for SD3.5-Medium (arXiv 2505.05470)."""

    height: int = 512
    width: int = 512
    device: str = "cpu"
    dtype: str = "float32"
    """Precision of the frozen weights and of the network's arithmetic (autocast): float32, bfloat16 or float16. What is trained
    is stored in float32, and velocities, latents and everything computed from them are float32. For training on a GPU take
    bfloat16; float16 needs the loss scaled (the run's `loss_scale`), or small gradients vanish."""
    guidance: float = 1.0
    """Classifier-free guidance s: v = v_neg + s (v_prompt - v_neg), in rollouts and updates alike; 1 = off (half the cost)."""
    negative_prompt: str = ""
    guidance_gradient: str = "both"
    """both, or prompt: v_neg is computed without a gradient (less memory; the values are the same)."""
    train: str = "lora"
    """lora, full (all weights of the transformer) or nothing."""
    rank: int = 32
    alpha: float = 64.0
    targets: tuple[str, ...] = ()
    """Ends of the names of the layers that get a LoRA; empty: the family's own, all attention projections."""
    adapter: str = ""
    """Start from this LoRA: a file or folder that `load_lora_weights` can read."""
    adapter_name: str = "default"
    """What the adapter that is trained is called."""
    frozen_adapters: tuple[str, ...] = ()
    """Further LoRAs, as NAME=PATH or PATH, which are in use while sampling, training and in the reference, but are not
    trained."""
    keep_reference: bool = True
    """Full fine-tuning: keep a frozen copy of the transformer, in `dtype`, for a KL to the base model."""
    checkpointing: bool = False
    """Gradient checkpointing: activations are computed twice instead of stored."""
    text_tokens: int = 0
    """Tokens of the T5 encoder; 0: the family's own."""
    decode_batch: int = 8
    """Latents per call of the image decoder."""
    decode_dtype: str = "float32"
    """Precision of the image decoder; pictures are float32 in any case. bfloat16 is faster and rounds colours a little."""
    compile: str = ""
    """torch.compile of the transformer's blocks by this backend (inductor); empty: off. The first call of every shape takes
    long, and sampling and training are then different programs, so that the ratio of the first update differs from 1 by
    rounding."""
    cached_prompts: int = 2048
    """Prompts whose embeddings are kept in main memory (SD3.5: 2.7 MB each in bfloat16 at 256 T5 tokens; FLUX: 4 MB at 512)."""
    seed: int = 0
    """Draws the LoRA's first matrices."""

    def __post_init__(self) -> None:
        for name in ("height", "width", "rank", "decode_batch", "cached_prompts"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")
        require(self.adapter_name.isidentifier(), "adapter_name", self.adapter_name, "letters, digits and _")
        beside = self.train == "lora" or not self.frozen_adapters
        require(beside, "frozen_adapters", self.frozen_adapters, "left out unless train is lora: make them part of the weights")
        require(self.alpha > 0, "alpha", self.alpha, "above 0")
        require(0 <= self.text_tokens <= 512, "text_tokens", self.text_tokens, "1 to 512, or 0 for the family's own")
        for name in ("dtype", "decode_dtype"):
            require(getattr(self, name) in DTYPES, name, getattr(self, name), f"one of {', '.join(DTYPES)}")
        require(self.guidance >= 1, "guidance", self.guidance, "1 (off) or more")
        for name, choices in (("guidance_gradient", ("both", "prompt")), ("train", ("lora", "full", "nothing"))):
            require(getattr(self, name) in choices, name, getattr(self, name), f"one of {', '.join(choices)}")
