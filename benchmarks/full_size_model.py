"""Pipelines at full size with random weights and small text encoders, as folders; and a reward that
costs nothing.
"""

import gc
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gpu_cases import random_pipeline
from torch import Tensor, nn

from flowrl.run.models.memory import ARCHITECTURES, Architecture
from flowrl.testing.tiny import tiny_flux, tiny_sd3

CLIP_TOKENS, T5_WIDTH = 77, 4096


class Brightness:
    """The mean pixel value."""

    def score(self, images: Tensor, prompts: Any) -> Tensor:
        """One number per image."""
        return images.mean((1, 2, 3))


def fewer_blocks(known: Architecture, share: float) -> Architecture:
    """`known` with this share of its blocks, as wide as before."""
    counts = {
        name: max(1, round(share * known.config[name]))
        for name in ("num_layers", "num_single_layers")
        if name in known.config
    }
    return replace(known, config={**known.config, **counts})


def write_pipeline(name: str, share: float, folder: Path) -> dict[str, Any]:
    """Write the pipeline `name` in bfloat16 to `folder`: that of a published architecture,
    "tiny-sd3" or "tiny-flux"; what it took.
    """
    start = time.perf_counter()
    torch.manual_seed(0)
    if name.startswith("tiny"):
        pipe = tiny_sd3() if name == "tiny-sd3" else tiny_flux()
    else:
        known = fewer_blocks(ARCHITECTURES[name], share)
        pipe = random_pipeline(name, "cpu", torch.bfloat16, known)
        for part, module in small_encoders(name.startswith("sd3")).items():
            pipe.register_modules(**{part: module})
    nn.Module.to(pipe.transformer, torch.bfloat16)  # its table of positions too
    parameters = sum(p.numel() for p in pipe.transformer.parameters())
    built = time.perf_counter()
    pipe.save_pretrained(folder, safe_serialization=True)
    del pipe
    gc.collect()
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return {
        "parameters": parameters,
        "bytes": size,
        "seconds_build": built - start,
        "seconds_write": time.perf_counter() - built,
    }


def small_encoders(sd3: bool) -> dict[str, Any]:
    """Text encoders of one narrow layer whose outputs have the published widths, with tokenizers of
    the published lengths.
    """
    from transformers import (
        CLIPTextConfig,
        CLIPTextModel,
        CLIPTextModelWithProjection,
        T5Config,
        T5EncoderModel,
    )

    tiny = tiny_sd3() if sd3 else tiny_flux()
    clip, t5 = tiny.tokenizer, tiny.tokenizer_3 if sd3 else tiny.tokenizer_2
    clip.model_max_length = CLIP_TOKENS
    layers = {
        "vocab_size": len(clip),
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    special = {
        "bos_token_id": clip.bos_token_id,
        "eos_token_id": clip.eos_token_id,
        "pad_token_id": clip.pad_token_id,
    }
    long = T5Config(
        vocab_size=len(t5),
        d_model=T5_WIDTH,
        d_kv=16,
        d_ff=64,
        num_layers=1,
        num_heads=2,
        feed_forward_proj="gated-gelu",
        pad_token_id=t5.pad_token_id,
        eos_token_id=t5.eos_token_id,
    )
    wide = T5EncoderModel(long).eval()
    if not sd3:
        text = CLIPTextModel(
            CLIPTextConfig(
                **layers, **special, hidden_size=768, max_position_embeddings=CLIP_TOKENS
            )
        ).eval()
        return {"text_encoder": text, "tokenizer": clip, "text_encoder_2": wide, "tokenizer_2": t5}
    encoders: dict[str, Any] = {"text_encoder_3": wide, "tokenizer_3": t5}
    for suffix, width in (("", 768), ("_2", 1280)):
        config = CLIPTextConfig(
            **layers,
            **special,
            hidden_size=32,
            projection_dim=width,
            max_position_embeddings=CLIP_TOKENS,
        )
        encoders |= {
            f"text_encoder{suffix}": CLIPTextModelWithProjection(config).eval(),
            f"tokenizer{suffix}": clip,
        }
    return encoders
