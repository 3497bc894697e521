"""Counts the FLOPs behind `flowrl.run.costs`: forward, backward, decoding and scoring.

    python benchmarks/flops.py

prints a table and writes benchmarks/results/flops.json, and the counts of the presets that
`flowrl train --plan` reads (flowrl/data/counts.json; --counts: only these; --ocr: only the measured
seconds of a score by OCR). Networks of published size are built on
PyTorch's "meta" device, so nothing is downloaded and two minutes of one core are enough. Matrix
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


def pickscore() -> int:
    """CLIP-H for an image and a prompt of 77 tokens."""
    from transformers import CLIPConfig, CLIPModel

    shared = {"projection_dim": 1024, "num_attention_heads": 16}
    text = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, **shared}
    vision = {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, **shared}
    config: Any = CLIPConfig(text_config=text, vision_config={**vision, "patch_size": 14})
    with torch.device("meta"):
        clip: Any = CLIPModel(config).requires_grad_(False)
    image = torch.empty(1, 3, 224, 224, device="meta")
    tokens = torch.zeros(1, 77, dtype=torch.long, device="meta")
    return sum(
        flops(call)[0]
        for call in (
            lambda: clip.get_image_features(pixel_values=image),
            lambda: clip.get_text_features(input_ids=tokens),
        )
    )


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
    return {**table, **sd35_medium(), "pickscore": {"reward": pickscore()}}


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


if __name__ == "__main__":
    if "--ocr" in sys.argv:
        print(f"{ocr_seconds():.2f} s")
        sys.exit()
    rows = [f' "{key}": {json.dumps(row)}' for key, row in preset_counts().items()]
    COUNTS.write_text("{\n" + ",\n".join(rows) + "\n}\n")
    if "--counts" in sys.argv:
        sys.exit()
    by_model = counted()
    write_json(RESULTS, by_model)
    for model, row in by_model.items():
        update = f"{row['gradient'] / row['forward']:.3f}" if "gradient" in row else "-"
        print(
            f"{model:42s} update {update:>6s}  " + "  ".join(f"{k} {v:,}" for k, v in row.items())
        )
