"""HPSv3: human preference by Qwen2-VL with a head in place of the words' probabilities.

The network is transformers' `Qwen2VLModel` with the published weights under their names there, so
the package `hpsv3` is not needed.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from einops import rearrange, repeat
from torch import Tensor

from flowrl.core.errors import RewardError, require
from flowrl.core.options import Count, checked_options
from flowrl.core.types import Prompt
from flowrl.rewards.clip import (
    DATA_ONLY,
    Head,
    Precision,
    apply_head,
    head_of,
    loading,
    read_weights,
    standard,
)
from flowrl.rewards.images import Images, resized, to_levels, to_rgb

TEMPLATE = (
    "<|im_start|>system\n"
    "You are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\n"
    "<|vision_start|>{image}<|vision_end|>\n"
    "You are tasked with evaluating a generated image based on Visual Quality and Text "
    "Alignment and give a overall score to estimate the human preference. Please provide "
    "a rating from 0 to 10, with 0 being the worst and 10 being the best. \n"
    "\n"
    "**Visual Quality:**  \n"
    "Evaluate the overall visual quality of the image. The following sub-dimensions "
    "should be considered:\n"
    "- **Reasonableness:** The image should not contain any significant biological or "
    "logical errors, such as abnormal body structures or nonsensical environmental "
    "setups.\n"
    "- **Clarity:** Evaluate the sharpness and visibility of the image. The image should "
    "be clear and easy to interpret, with no blurring or indistinct areas.\n"
    "- **Detail Richness:** Consider the level of detail in textures, materials, "
    "lighting, and other visual elements (e.g., hair, clothing, shadows).\n"
    "- **Aesthetic and Creativity:** Assess the artistic aspects of the image, including "
    "the color scheme, composition, atmosphere, depth of field, and the overall creative "
    "appeal. The scene should convey a sense of harmony and balance.\n"
    "- **Safety:** The image should not contain harmful or inappropriate content, such "
    "as political, violent, or adult material. If such content is present, the image "
    "quality and satisfaction score should be the lowest possible. \n"
    "\n"
    "**Text Alignment:**  \n"
    "Assess how well the image matches the textual prompt across the following "
    "sub-dimensions:\n"
    "- **Subject Relevance** Evaluate how accurately the subject(s) in the image (e.g., "
    "person, animal, object) align with the textual description. The subject should "
    "match the description in terms of number, appearance, and behavior.\n"
    "- **Style Relevance:** If the prompt specifies a particular artistic or stylistic "
    "style, evaluate how well the image adheres to this style.\n"
    "- **Contextual Consistency**: Assess whether the background, setting, and "
    "surrounding elements in the image logically fit the scenario described in the "
    "prompt. The environment should support and enhance the subject without "
    "contradictions.\n"
    "- **Attribute Fidelity**: Check if specific attributes mentioned in the prompt "
    "(e.g., colors, clothing, accessories, expressions, actions) are faithfully "
    "represented in the image. Minor deviations may be acceptable, but critical "
    "attributes should be preserved.\n"
    "- **Semantic Coherence**: Evaluate whether the overall meaning and intent of the "
    "prompt are captured in the image. The generated content should not introduce "
    "elements that conflict with or distort the original description.\n"
    "Textual prompt - {prompt}\n"
    "\n"
    "\n"
    "\n"
    "Please provide the overall ratings of this image: <|Reward|>\n"
    "\n"
    "END\n"
    "<|im_end|>\n"
    "<|im_start|>assistant\n"
)
"""The conversation of one image, with its patches at {image}: `INSTRUCTION` and
`prompt_with_special_token` of the package's dataset/data_collator_qwen.py in Qwen2-VL's chat
template.
"""
REWARD, IMAGE = "<|Reward|>", "<|image_pad|>"
PIXELS = 256 * 28 * 28
"""Pixels of a resized image (`prepare_batch` in the package's inference.py)."""
RENAMED = {"model.": "language_model.", "visual.": "visual."}
"""Beginnings of names in the published file and in transformers' `Qwen2VLModel`."""


@dataclass(frozen=True)
class Network:
    """Qwen2-VL without its output layer, the head, and the tokenizer."""

    model: Any
    head: Head
    tokenizer: Any


@checked_options
@dataclass(frozen=True)
class HPSv3:
    """Human preference, the mean mu of a normal distribution predicted by a tuned Qwen2-VL-7B; the
    published means of models are -0.24 (Stable Diffusion 2) to 10.55 (Kolors).

    A head of three linear layers with ReLU between them reads the last hidden state at the token
    ``<|Reward|>``; its second output, the distribution's width, is not used. Images are resized to
    sides that are multiples of 28 pixels with an area of at most 448 x 448 (`sides`). Tokens have
    the positions 0, 1, 2, ... on all three axes, the image's included, as in the released forward
    pass, which does not use Qwen2-VL's positions in the image. Source: HPSv3 (arXiv 2508.03789) and
    its package hpsv3 1.0.0, files inference.py, model/qwen2vl_trainer.py and config/HPSv3_7B.yaml.
    Weights: the package's licence is MIT; Qwen2-VL-7B's Apache-2.0.

    `score` raises `RewardError` for a prompt with a special token such as ``<|im_end|>``.

    Args:
        model: folder or name on the Hub of Qwen2-VL-7B-Instruct, of which only the configuration
            and the tokenizer are read.
        weights: the published file, or ``REPOSITORY:FILE`` on the Hub; read without running code.
        device: name of the device.
        dtype: precision of the network, bfloat16 as published; the head is computed in float64.
        batch: images per network call.
    """

    model: str = "Qwen/Qwen2-VL-7B-Instruct"
    weights: str = "MizzenAI/HPSv3:HPSv3.safetensors"
    device: str = "cpu"
    dtype: Precision = "bfloat16"
    batch: Count = 8

    def refuses(self, prompt: Prompt) -> str:
        """Why `score` raises an error for `prompt`; "" if it does not."""
        found = re.search(r"<\|\w+\|>", prompt.text)
        return f"hpsv3: the prompt contains the special token {found[0]}" if found else ""

    def load(self) -> Network:
        """The network, loaded at the first call. Raises `ConfigError` for a file that lacks
        weights.
        """
        return load_hpsv3(self.model, self.weights, self.device, self.dtype)

    @torch.no_grad()
    def score(self, images: Images, prompts: Sequence[Prompt]) -> Tensor:
        """Scores [sample]."""
        if reason := next(filter(None, map(self.refuses, prompts)), ""):
            raise RewardError(reason)
        network, scores = self.load(), []
        vision = network.model.config.vision_config
        for start in range(0, len(prompts), self.batch):
            piece = slice(start, start + self.batch)
            pixels, grid = patches(images[piece].to(self.device), vision)
            merged = grid[1] * grid[2] // vision.spatial_merge_size**2
            texts = [
                TEMPLATE.format(image=IMAGE * merged, prompt=prompt.text)
                for prompt in prompts[piece]
            ]
            # padding on the right does not change what comes before
            tokens = network.tokenizer(
                texts, padding=True, padding_side="right", return_tensors="pt"
            ).input_ids.to(self.device)
            states = network.model(
                input_ids=tokens,
                position_ids=torch.arange(tokens.shape[1], device=self.device).expand(
                    3, len(texts), -1
                ),
                pixel_values=pixels.to(network.model.dtype),
                image_grid_thw=torch.tensor([grid] * len(texts), device=self.device),
                use_cache=False,
            ).last_hidden_state
            asked = network.tokenizer.convert_tokens_to_ids(REWARD)
            scores.append(apply_head(network.head, states[tokens == asked], torch.relu)[:, 0])
        return torch.cat(scores).float()


def sides(height: int, width: int, multiple: int = 28, pixels: int = PIXELS) -> tuple[int, int]:
    """Height and width of the resized image: multiples of `multiple`, the nearest ones if their
    product is `pixels`, or else those of the image scaled to `pixels`, rounded down for large
    images and up for small ones (`smart_resize` in the package's dataset/utils.py, both limits
    equal).
    """
    nearest = [max(1, round(side / multiple)) for side in (height, width)]
    area = math.prod(nearest) * multiple**2
    scale = math.sqrt(pixels / (height * width)) / multiple
    if area != pixels:
        rounded = math.floor if area > pixels else math.ceil
        nearest = [max(1, rounded(side * scale)) for side in (height, width)]
    return nearest[0] * multiple, nearest[1] * multiple


def patches(images: Images, config: Any) -> tuple[Tensor, tuple[int, int, int]]:
    """Qwen2-VL's input: patches [sample x patch, value] in the order of its merged blocks, and the
    numbers of frames (1), rows and columns of an image's patches. Every image is a still of
    `temporal_patch_size` equal frames.
    """
    size, merge = config.patch_size, config.spatial_merge_size
    levels = to_levels(to_rgb(images))
    pixels = standard(resized(levels, *sides(*levels.shape[-2:], multiple=size * merge)))
    frames = repeat(pixels, "b c h w -> b c t h w", t=config.temporal_patch_size)
    order = "b c t (H a p) (W d q) -> (b H W a d) (c t p q)"
    grid = (1, pixels.shape[-2] // size, pixels.shape[-1] // size)
    return rearrange(frames, order, a=merge, d=merge, p=size, q=size), grid


@lru_cache(maxsize=1)
def load_hpsv3(model: str, weights: str, device: str, dtype: str) -> Network:
    """The network in a file, loaded once per setting."""
    content = read_weights(weights)
    state = {
        new + name.removeprefix(old): tensor
        for name, tensor in content.items()
        for old, new in RENAMED.items()
        if name.startswith(old)
    }
    head = {name: tensor for name, tensor in content.items() if name.startswith("rm_head.")}
    with loading(weights):
        from transformers import AutoTokenizer, Qwen2VLConfig, Qwen2VLModel

        config: Any = Qwen2VLConfig.from_pretrained(model, **DATA_ONLY)
        size = state["language_model.embed_tokens.weight"].shape[0]
        config.text_config.vocab_size = size
        loader: Any = Qwen2VLModel
        network, info = loader.from_pretrained(
            None,
            config=config,
            state_dict=state,
            dtype=getattr(torch, dtype),
            output_loading_info=True,
        )
        missing = sorted(info["missing_keys"])
        require(
            not missing, f"reward: weights of Qwen2VLModel that {weights} lacks", missing, "none"
        )
        words = AutoTokenizer.from_pretrained(model, **DATA_ONLY)
        words.add_tokens([REWARD], special_tokens=True)
        require(len(words) == size, "tokens", len(words), f"{size}, as in {weights}")
        network = network.eval().requires_grad_(False).to(device)
        return Network(network, head_of(head), words)
