"""Counts the FLOPs behind `flowrl.run.costs`: forward, backward, decoding and scoring.

    python benchmarks/flops.py

prints a table and writes benchmarks/results/flops.json, and the counts of the presets that
`flowrl train --plan` reads (flowrl/data/counts.json). --counts writes only these; --rewards and --ocr
only print the counts of the rewards, and the measured seconds of a score by OCR. Networks of
published size are built on PyTorch's "meta" device, so nothing is downloaded and two minutes of one
core are enough. Matrix
products, convolutions and attention are counted; a multiplication and an addition count as two.
"update" is a forward with its backward pass over the forward pass of sampling, for which
a LoRA is merged into the weights.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from flowrl import PolicyOptions
from flowrl.run.build import make_trainer, make_world, policy_options
from flowrl.run.config import preset
from flowrl.run.io import write_json
from flowrl.run.models.memory import ARCHITECTURES, architecture_of, count, counts_key
from flowrl.run.presets import combinations

COUNTS = Path(__file__).parents[1] / "flowrl" / "data" / "counts.json"
RESULTS = Path(__file__).parent / "results" / "flops.json"
RANK = 32


def flops(call: Callable[[], Any]) -> tuple[int, int]:
    """FLOPs of a call, and of the backward pass from the sum of its result, if it has one."""
    with FlopCounterMode(display=False) as counter:
        result = call()
        forward = counter.get_total_flops()
        if isinstance(result, Tensor) and result.requires_grad:
            result.sum().backward()
    return forward, counter.get_total_flops() - forward


def world(name: str) -> dict[str, int]:
    """A built-in world: its policy for one latent, decoding and scoring."""
    config = preset("default").apply(world=name)
    policy, made = make_trainer(config).policy, make_world(config)
    prompts = made.prompts(config.environment.task, "train")[:1]
    condition, latent = policy.encode(prompts), torch.zeros(1, *policy.latent_shape)
    velocity = partial(policy.velocity, latent, torch.full((1,), 500.0), condition)
    update, backward = flops(velocity)
    with policy.frozen(), torch.no_grad():
        forward, _ = flops(velocity)
    reward, image = made.reward(config.environment.reward_form), policy.decode(latent)
    return {
        "forward": forward,
        "gradient": update + backward,
        "decode": flops(partial(policy.decode, latent))[0],
        "reward": flops(partial(reward.score, image, prompts))[0],
    }


def sd35_medium() -> dict[str, dict[str, int]]:
    """SD3.5-Medium for one latent of 512 x 512 pixels, with a LoRA and with all weights trained."""
    options = PolicyOptions(lora_rank=RANK)
    counts = {
        (tuning, on): count(
            ARCHITECTURES["sd3.5-medium"],
            replace(options, tuning=tuning, gradient_checkpointing=on),
        )
        for tuning in ("lora", "full")
        for on in (False, True)
    }
    # also with a LoRA, which is merged for sampling
    forward = counts["full", False].rollout.flops
    table = {}
    for (tuning, on), counted in counts.items():
        name = f"sd3.5-medium 512, {tuning}, {'' if on else 'no '}checkpointing"
        row = {"forward": forward, "gradient": counted.update.flops, "decode": counted.decode.flops}
        table[name] = {part: round(number) for part, number in row.items()}
    return table


CLIPS = {  # width, layers and heads of the text and of the image encoder, patch, features
    "ViT-H/14": ((1024, 24, 16), (1280, 32, 16), 14, 1024),
    "ViT-L/14": ((768, 12, 12), (1024, 24, 16), 14, 768),
    "ViT-B/32": ((512, 12, 8), (768, 12, 12), 32, 512),
}
QWEN_TOKENS = 800
"""Of HPSv3: 786 without the prompt, for an image of 448 x 448 pixels and Qwen's vocabulary."""


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor without values."""
    return torch.empty(shape, dtype=dtype, device="meta")


def clip(name: str) -> tuple[int, int]:
    """CLIP for an image of 224 x 224 pixels, and for a prompt of 77 tokens."""
    from transformers import CLIPConfig, CLIPModel

    *encoders, patch, features = CLIPS[name]
    text, vision = (
        {
            "hidden_size": width,
            "intermediate_size": 4 * width,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
        }
        for width, layers, heads in encoders
    )
    config: Any = CLIPConfig(
        text_config=text, vision_config={**vision, "patch_size": patch}, projection_dim=features
    )
    with torch.device("meta"):
        model: Any = CLIPModel(config).requires_grad_(False)
    image, tokens = meta(1, 3, 224, 224), meta(1, 77, dtype=torch.long)
    return (
        flops(lambda: model.get_image_features(pixel_values=image))[0],
        flops(lambda: model.get_text_features(input_ids=tokens))[0],
    )


def image_reward() -> int:
    """BLIP for an image of 224 x 224 pixels and a prompt of 35 tokens, without the head."""
    from transformers import BlipTextConfig, BlipTextModel, BlipVisionConfig, BlipVisionModel

    seeing = BlipVisionConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=24,
        num_attention_heads=16,
        image_size=224,
        patch_size=16,
    )
    # BERT-base
    reading = BlipTextConfig(
        vocab_size=30524, encoder_hidden_size=1024, num_attention_heads=12, num_hidden_layers=12
    )
    with torch.device("meta"), torch.no_grad():
        vision, text = BlipVisionModel(seeing), BlipTextModel(reading, add_pooling_layer=False)
        tokens, patches = torch.zeros(1, 35, dtype=torch.long), meta(1, 197, 1024)
        read = partial(text, input_ids=tokens, encoder_hidden_states=patches)
        return flops(lambda: vision(pixel_values=meta(1, 3, 224, 224)))[0] + flops(read)[0]


def hpsv3() -> int:
    """Qwen2-VL-7B without the output layer, for an image of 448 x 448 pixels."""
    from transformers import Qwen2VLConfig, Qwen2VLModel

    words = {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 151658,
        "rope_parameters": {
            "rope_type": "default",
            "mrope_section": [16, 24, 24],
            "rope_theta": 1e6,
        },
    }
    config: Any = Qwen2VLConfig(text_config=words, vision_config={"hidden_size": 3584})
    with torch.device("meta"):
        model: Any = Qwen2VLModel(config).requires_grad_(False)
    side = 448 // config.vision_config.patch_size
    see = partial(
        model.visual,
        meta(side**2, 3 * config.vision_config.temporal_patch_size * (448 // side) ** 2),
        grid_thw=torch.tensor([[1, side, side]]),
        position_ids=meta(side**2, 2),
    )
    read = partial(
        model.language_model,
        inputs_embeds=meta(1, QWEN_TOKENS, words["hidden_size"]),
        position_ids=meta(3, 1, QWEN_TOKENS, dtype=torch.long),
        use_cache=False,
    )
    return flops(see)[0] + flops(read)[0]


def detector() -> int:
    """Mask2Former with Swin-S for an image of 384 x 384 pixels: GenEval's detector, on the CPU
    because its attention needs values.
    """
    from transformers import Mask2FormerConfig, Mask2FormerForUniversalSegmentation, SwinConfig

    swin = SwinConfig(
        embed_dim=96,
        depths=[2, 2, 18, 2],
        num_heads=[3, 6, 12, 24],
        window_size=7,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )
    config: Any = Mask2FormerConfig(backbone_config=swin, num_labels=80)
    model: Any = Mask2FormerForUniversalSegmentation(config).eval().requires_grad_(False)
    return flops(lambda: model(pixel_values=torch.zeros(1, 3, 384, 384)))[0]


def rewards() -> dict[str, dict[str, int]]:
    """A score of each reward with a network, and the part of it for the prompt; for GenEval also
    the parts for the detector and an object with a colour.
    """
    from flowrl.rewards.geneval import TEMPLATES
    from flowrl.rewards.geneval_requests import COLOURS

    table = {}
    for name, size in (
        ("pickscore", "ViT-H/14"),
        ("hpsv2.1", "ViT-H/14"),
        ("clipscore", "ViT-B/32"),
    ):
        image, prompt = clip(size)
        table[name] = {"reward": image + prompt, "prompt": prompt}
    image, prompt = clip("ViT-L/14")
    parts = {
        "detector": detector(),
        "object": image,
        "prompt": prompt * len(COLOURS) * len(TEMPLATES),
    }
    return {
        **table,
        "aesthetic": {"reward": image},
        "image-reward": {"reward": image_reward()},
        "hpsv3": {"reward": hpsv3()},
        "geneval": {"reward": sum(parts.values()), **parts},
    }


def ocr_seconds() -> float:
    """Processor seconds of a score of RapidOCR on one core: a line of text in 512 x 512 pixels."""
    from PIL import Image, ImageDraw

    from flowrl import Prompt
    from flowrl.run.parts.registry import build

    picture = Image.new("RGB", (512, 512), (40, 120, 90))
    ImageDraw.Draw(picture).text((60, 200), "OPEN ALL DAY", font_size=60, fill="white")
    pixels = torch.from_numpy(np.asarray(picture).copy()).permute(2, 0, 1).float() / 255
    reward, prompts = build("reward", "ocr(threads=1)"), [Prompt('a sign "OPEN ALL DAY"')] * 8
    images, seconds = pixels.expand(8, -1, -1, -1), []
    for _ in range(4):  # the first loads the recogniser
        began = time.process_time()
        reward.score(images, prompts)
        seconds.append((time.process_time() - began) / len(images))
    return min(seconds)


def counted() -> dict[str, dict[str, int]]:
    """All counts by model."""
    table = {name: world(name) for name in ("mixture", "shapes")}
    return {**table, **sd35_medium(), **rewards()}


def preset_counts() -> dict[str, list[Any]]:
    """Memory, FLOPs and operations of the presets' models, with and without checkpointing."""
    table = {}
    for name in combinations():
        config = preset(name).apply(planned=True)
        known = architecture_of(config.policy.model)
        if ",flow-grpo," not in name or known is None:
            continue
        for on in (False, True):
            options = replace(policy_options(config), gradient_checkpointing=on)
            key = counts_key(known, options)
            if key not in table:  # the same for every task
                table[key] = list(astuple(count(known, options)))
    return table


def show(by_model: dict[str, dict[str, int]]) -> None:
    """Print counts by model."""
    for model, row in by_model.items():
        update = f"{row['gradient'] / row['forward']:.3f}" if "gradient" in row else "-"
        print(
            f"{model:42s} update {update:>6s}  " + "  ".join(f"{k} {v:,}" for k, v in row.items())
        )


if __name__ == "__main__":
    if "--ocr" in sys.argv:
        print(f"{ocr_seconds():.2f} s")
        sys.exit()
    if "--rewards" in sys.argv:
        show(rewards())
        sys.exit()
    rows = [f' "{key}": {json.dumps(row)}' for key, row in preset_counts().items()]
    COUNTS.write_text("{\n" + ",\n".join(rows) + "\n}\n")
    if "--counts" in sys.argv:
        sys.exit()
    by_model = counted()
    write_json(RESULTS, by_model)
    show(by_model)
