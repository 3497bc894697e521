"""ImageReward: human preference by BLIP, whose text encoder reads the prompt and attends to the
image.

The networks are transformers' `BlipVisionModel` and `BlipTextModel` with the published weights
under their names there, so the package `image-reward` is not needed.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from flowrl.core.errors import require
from flowrl.core.options import Count, checked_options
from flowrl.core.types import Prompt
from flowrl.rewards.clip import (
    DATA_ONLY,
    Head,
    Precision,
    apply_head,
    clip_pixels,
    head_of,
    loading,
    read_weights,
)
from flowrl.rewards.images import Images

TOKENS = 35
MEAN, STD = 0.16717362830052426, 1.0333394966054072
"""Of the head's output on the training data: `ImageReward.__init__` in the package."""
HEAD_WIDTH = 64
"""Features per attention head in both networks."""
VISION_NAMES = {
    "cls_token": "embeddings.class_embedding",
    "pos_embed": "embeddings.position_embedding",
    "patch_embed.proj": "embeddings.patch_embedding",
    "blocks": "encoder.layers",
    "attn.proj": "self_attn.projection",
    "attn.qkv": "self_attn.qkv",
    "norm1": "layer_norm1",
    "norm2": "layer_norm2",
    "norm": "post_layernorm",
}
"""Names in BLIP's file and in transformers' `BlipVisionModel`; those of the text encoder agree."""


@dataclass(frozen=True)
class Network:
    """The parts of ImageReward."""

    vision: Any
    text: Any
    head: Head
    tokenizer: Any


@checked_options
@dataclass(frozen=True)
class ImageReward:
    """Human preference for an image of a prompt, (head(BLIP) - 0.16717) / 1.03334: mean 0 and
    standard deviation 1 over the training data, in practice about -2 to 2.

    BLIP is a ViT-L/16 and a BERT-base encoder with cross-attention to the patches; the head is five
    linear layers without activations on the feature of the first token. Images are resized to
    224 x 224 and cropped as for CLIP (`flowrl.rewards.clip.clip_pixels`), and prompts are truncated
    to 35 tokens. Source: ImageReward (arXiv 2304.05977) and its package image-reward 1.5, files
    ImageReward.py and models/BLIP. Weights: Apache-2.0.

    Args:
        weights: the published file, or ``REPOSITORY:FILE`` on the Hub; read without running code.
        tokenizer: folder or name on the Hub of BERT's tokenizer.
        device: name of the device.
        dtype: precision of the two encoders; the head is computed in float64.
        batch: images per network call.
    """

    weights: str = "THUDM/ImageReward:ImageReward.pt"
    tokenizer: str = "google-bert/bert-base-uncased"
    device: str = "cpu"
    dtype: Precision = "float32"
    batch: Count = 32

    def load(self) -> Network:
        """The network, loaded at the first call. Raises `ConfigError` for a file that lacks weights
        and for a tokenizer of another model.
        """
        return load_image_reward(self.weights, self.tokenizer, self.device, self.dtype)

    @torch.no_grad()
    def score(self, images: Images, prompts: Sequence[Prompt]) -> Tensor:
        """Scores [sample]."""
        network, scores = self.load(), []
        for start in range(0, len(prompts), self.batch):
            piece = slice(start, start + self.batch)
            pixels = clip_pixels(images[piece].to(self.device), network.vision.config.image_size)
            patches = network.vision(pixel_values=pixels.to(network.vision.dtype))
            tokens = network.tokenizer(
                [prompt.text for prompt in prompts[piece]],
                padding="max_length",
                truncation=True,
                max_length=TOKENS,
                return_tensors="pt",
            ).to(self.device)
            states = network.text(
                input_ids=tokens.input_ids,
                attention_mask=tokens.attention_mask,
                encoder_hidden_states=patches.last_hidden_state,
            ).last_hidden_state
            scores.append(apply_head(network.head, states[:, 0]))
        return ((torch.cat(scores).squeeze(1) - MEAN) / STD).float()


@lru_cache(maxsize=2)
def load_image_reward(weights: str, tokenizer: str, device: str, dtype: str) -> Network:
    """The network in a file, loaded once per setting. Its sizes are those of the weights."""
    content = read_weights(weights)
    vision, text, head = (
        {name.removeprefix(start): t for name, t in content.items() if name.startswith(start)}
        for start in ("blip.visual_encoder.", "blip.text_encoder.", "mlp.")
    )
    with loading(weights):
        from transformers import AutoTokenizer, BlipTextModel, BlipVisionModel

        renamed = {_vision_name(name): tensor for name, tensor in vision.items()}
        seeing, reading = (
            _filled(network, state, weights).to(device, getattr(torch, dtype))
            for network, state in (
                (BlipVisionModel(_vision_config(renamed)), renamed),
                (BlipTextModel(_text_config(text), add_pooling_layer=False), text),
            )
        )
        layers = head_of(head)
    with loading(tokenizer):
        words = AutoTokenizer.from_pretrained(tokenizer, **DATA_ONLY)
    # BLIP added two tokens that the prompts do not contain
    size = reading.config.vocab_size
    fits = size - 2 <= len(words) <= size
    require(fits, "tokenizer", tokenizer, f"one of {size - 2} tokens, not {len(words)}")
    return Network(seeing, reading, layers, words)


def _filled(network: Any, state: Mapping[str, Tensor], place: str) -> Any:
    """The network with all of its weights from the file; others in the file are not used."""
    missing = network.load_state_dict(state, strict=False).missing_keys
    kind = type(network).__name__
    require(not missing, f"reward: weights of {kind} that {place} lacks", missing[:3], "none")
    return network.eval().requires_grad_(False)


def _vision_name(name: str) -> str:
    for old, new in VISION_NAMES.items():
        pattern = rf"(^|\.){re.escape(old)}(?=\.|$)"
        name = re.sub(pattern, rf"\1{new}", name)
    return name


def _depth(state: Mapping[str, Tensor], prefix: str) -> int:
    return len({name.split(".")[2] for name in state if name.startswith(prefix)})


def _vision_config(state: Mapping[str, Tensor]) -> Any:
    """Of timm's ViT: LayerNorm with 1e-6, exact GELU (models/BLIP/vit.py)."""
    from transformers import BlipVisionConfig

    patch = state["embeddings.patch_embedding.weight"].shape[-1]
    _, tokens, width = state["embeddings.position_embedding"].shape
    return BlipVisionConfig(
        hidden_size=width,
        intermediate_size=state["encoder.layers.0.mlp.fc1.weight"].shape[0],
        num_hidden_layers=_depth(state, "encoder.layers."),
        num_attention_heads=width // HEAD_WIDTH,
        image_size=patch * math.isqrt(tokens - 1),
        patch_size=patch,
        layer_norm_eps=1e-6,
    )


def _text_config(state: Mapping[str, Tensor]) -> Any:
    """Of BERT with cross-attention in every layer (models/BLIP/med.py, med_config.json)."""
    from transformers import BlipTextConfig

    vocabulary, width = state["embeddings.word_embeddings.weight"].shape
    return BlipTextConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        encoder_hidden_size=state["encoder.layer.0.crossattention.self.key.weight"].shape[1],
        intermediate_size=state["encoder.layer.0.intermediate.dense.weight"].shape[0],
        num_hidden_layers=_depth(state, "encoder.layer."),
        num_attention_heads=width // HEAD_WIDTH,
        max_position_embeddings=state["embeddings.position_embeddings.weight"].shape[0],
    )
