"""Counts the FLOPs behind `flowrl_compare.costs`: forward, backward, decoding and scoring.

    python benchmarks/flops.py

prints a table and writes benchmarks/results/flops.json, and the counts of the presets that
`flowrl train --plan` reads (flowrl/data/counts.json; --counts: only these; --ocr: only the measured
seconds of a score by OCR). Networks of published size are built on
PyTorch's "meta" device, so nothing is downloaded and two minutes of one core are enough. Matrix
products, convolutions and attention are counted (`FlopCounterMode`); a multiplication and an addition
count as two. The recogniser of text runs in onnxruntime, whose profile has the shapes of its
operations. "update" is a forward with its backward pass over the forward pass of sampling, for which
a LoRA is merged into the weights.
"""

import json
import math
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

from flowrl.io import write_json
from flowrl.policies import ARCHITECTURES, LORA_TARGETS, Adapters
from flowrl.policies.memory import count, counts_key
from flowrl.policies.small_sd3 import SmallSD3
from flowrl.training.build import make_trainer, make_world, model_options
from flowrl.training.config import preset
from flowrl.training.presets import shipped

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


def small_sd3(checkpointing: bool) -> dict[str, int]:
    """The network of the shapes world with all weights trained."""
    network = SmallSD3(100, 8).requires_grad_(True)
    if checkpointing:
        network.transformer.enable_gradient_checkpointing()
    network.train()
    words = torch.zeros(1, 8, 64)
    forward, backward = flops(
        lambda: network.velocity(torch.zeros(1, 8, 4, 4), torch.zeros(1), words)
    )
    return {"forward": forward, "gradient": forward + backward}


def sd35_medium(resolution: int, tuning: str, checkpointing: bool) -> int:
    """An evaluation of the transformer, with its backward pass unless `tuning` is ""."""
    known = ARCHITECTURES["sd3.5-medium"]
    network: Any = known.build("meta").requires_grad_(tuning == "full")
    if tuning == "lora":
        Adapters(network, RANK, 2 * RANK, LORA_TARGETS, 0)
    if checkpointing:
        network.enable_gradient_checkpointing()
    network.train(checkpointing)
    side, empty = resolution // 8, partial(torch.empty, device="meta")
    return sum(
        flops(
            lambda: network(
                hidden_states=empty(1, 16, side, side),
                encoder_hidden_states=empty(1, known.text_tokens, known.text_width),
                pooled_projections=empty(1, 2048),
                timestep=empty(1),
                return_dict=False,
            )[0]
        )
    )


def decoder(resolution: int) -> int:
    """SD3.5's image decoder."""
    side = resolution // 8
    vae = ARCHITECTURES["sd3.5-medium"].build_decoder().to("meta").requires_grad_(False)
    return flops(lambda: vae.decode(torch.empty(1, 16, side, side, device="meta")))[0]


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


def ocr() -> int:
    """The detector at 736 x 736, and the recogniser for one line of 48 x 320."""
    import rapidocr

    folder = Path(str(rapidocr.__file__)).parent / "models"
    shapes = {"det": (1, 3, 736, 736), "rec": (1, 3, 48, 320)}
    return sum(
        onnx_flops(next(folder.glob(f"PP-OCR*_{part}_*.onnx")), shape)
        for part, shape in shapes.items()
    )


def ocr_seconds() -> float:
    """Processor seconds of a score of RapidOCR on one core: a line of text in 512 x 512 pixels."""
    from PIL import Image, ImageDraw

    from flowrl import Prompt
    from flowrl.parts.registry import build

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


def onnx_flops(path: Path, shape: tuple[int, ...]) -> int:
    """FLOPs of convolutions and matrix products, from the shapes in onnxruntime's profile."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.enable_profiling = True
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    session.run(None, {session.get_inputs()[0].name: torch.rand(shape).numpy()})
    profile, total = Path(session.end_profiling()), 0
    for event in json.loads(profile.read_text()):
        known = event.get("args", {})
        if known.get("op_name") in ("Conv", "ConvTranspose", "MatMul", "Gemm"):
            inputs, outputs = (
                [next(iter(entry.values())) for entry in known[f"{side}_type_shape"]]
                for side in ("input", "output")
            )
            total += operation(known["op_name"], inputs, outputs[0])
    profile.unlink()
    return total


def operation(name: str, inputs: list[list[int]], output: list[int]) -> int:
    """FLOPs of one operation from its shapes."""
    if name == "Conv":  # weight [channel, channel of the group, height, width]
        return 2 * math.prod(output) * math.prod(inputs[1][1:])
    if name == "ConvTranspose":  # kernels of 2 x 2 with stride 2, the only ones of PP-OCR
        return 2 * math.prod(inputs[0]) * output[1] * 4
    return 2 * math.prod(output) * inputs[0][-1]


def counted() -> dict[str, dict[str, int]]:
    """All counts by model."""
    table = {name: world(name) for name in ("mixture", "shapes")}
    table |= {
        f"shapes, full, {'' if on else 'no '}checkpointing": small_sd3(on) for on in (False, True)
    }
    for resolution in (512, 1024):
        forward = sd35_medium(resolution, "", False)
        for tuning in ("lora", "full"):
            for on in (False, True):
                name = f"sd3.5-medium {resolution}, {tuning}, {'' if on else 'no '}checkpointing"
                table[name] = {
                    "forward": forward,
                    "gradient": sd35_medium(resolution, tuning, on),
                    "decode": decoder(resolution),
                }
    return {**table, "pickscore": {"reward": pickscore()}, "ocr": {"reward": ocr()}}


def preset_counts() -> dict[str, list[Any]]:
    """Memory, FLOPs and operations of the presets' models, with and without checkpointing."""
    table = {}
    for model in shipped()["models"]:
        config = preset(f"{model},flow-grpo,ocr").apply(planned=True)
        for on in (False, True):
            options = replace(model_options(config), gradient_checkpointing=on)
            known = ARCHITECTURES[model]
            key = counts_key(known, options)
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
