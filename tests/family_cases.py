"""The built-in model families as tiny random pipelines of the real classes, and their own plain
pipelines' images.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from seeded import randn, seeded

from flowrl import PolicyOptions
from flowrl.core.types import Prompt
from flowrl.policies import (
    SD3,
    Flux,
    Flux2Klein,
    PipelinePolicy,
    QwenImage,
    QwenImage21,
    Sana,
    Wan,
    ZImage,
)
from flowrl.rewards import FunctionReward
from flowrl.rollout import Usage, solve
from flowrl.run.build import build_trainer, make_method
from flowrl.run.config import preset
from flowrl.run.models.weights import given_weights
from flowrl.testing.tiny import (
    TINY,
    TINY_CHAT,
    TINY_LARGE,
    TINY_UNCUT,
    TINY_VIDEO,
    tiny_flux,
    tiny_flux2_klein,
    tiny_qwen_image,
    tiny_qwen_image21,
    tiny_sana,
    tiny_sd3,
    tiny_wan,
    tiny_z_image,
)

TEXTS = ["three red circles", "a dog"]
PROMPTS = [Prompt(text) for text in TEXTS]
TIME = torch.full((2,), 600.0)
STEPS = 4
REDNESS = FunctionReward(
    lambda images, prompts: (2 * images[..., 0, :, :] - images.sum(-3)).flatten(1).mean(1)
)
"""Of images or videos: red minus the sum of green and blue."""


@dataclass(frozen=True)
class Case:
    """A family, its tiny pipeline, further arguments of a call, and a negative prompt."""

    make: Any
    family: Any
    plain: dict[str, Any] = field(default_factory=dict)
    options: PolicyOptions = TINY
    negative: str = "blurry"

    def policy(self, pipe=None, **changes):
        pipe, options = pipe or self.make(), replace(self.options, **changes)
        return PipelinePolicy(pipe, self.family, options, **given_weights(pipe, options))

    def picture(self, pipe, noise, guidance=1.0, steps=STEPS, **changes):
        """The plain pipeline's own images or videos; of prompts one by one if it puts a batch
        behind the longest, and on white if they have an opacity.
        """
        pipe.set_progress_bar_config(disable=True)
        side, tokens = self.options.resolution, self.options.max_sequence_length
        settings = dict(height=side, width=side, output_type="pt", num_inference_steps=steps)
        settings |= dict(max_sequence_length=tokens) if tokens else {}
        settings |= self.plain | changes
        size, pictures = 1 if self.family.pipeline == "QwenImage21Pipeline" else 2, []
        for i in range(0, 2, size):
            guided = self.family.guidance_arguments(guidance, [self.negative] * size)
            given = dict(prompt=TEXTS[i : i + size], latents=noise[i : i + size])
            output = pipe(**given, **guided | settings)
            pictures.append(output.frames if hasattr(output, "frames") else output.images)
        made = torch.cat(pictures)
        if made.ndim == 5 or made.shape[1] == 3:
            return made
        return made[:, 3:] * made[:, :3] + 1 - made[:, 3:]


CASES = {
    "sd3": Case(tiny_sd3, SD3()),
    "flux": Case(tiny_flux, Flux()),
    "flux2-klein": Case(tiny_flux2_klein, Flux2Klein(), options=TINY_CHAT, negative=""),
    "z-image": Case(tiny_z_image, ZImage(), options=TINY_CHAT),
    "qwen-image": Case(tiny_qwen_image, QwenImage()),
    "qwen-image-2.1": Case(tiny_qwen_image21, QwenImage21(), options=TINY_UNCUT),
    "wan": Case(tiny_wan, Wan(), {"num_frames": 5}, TINY_VIDEO),
    "wan-2.2": Case(partial(tiny_wan, boundary=0.55), Wan(), {"num_frames": 5}, TINY_VIDEO),
    "sana": Case(tiny_sana, Sana(), {"use_resolution_binning": False}, TINY_LARGE, ""),
    "wan-2.2-5b": Case(partial(tiny_wan, patches=True), Wan(), {"num_frames": 5}, TINY_VIDEO),
}


def can_save(case):
    """Whether the tiny pipeline of `case` can be saved: a processor may need torchvision."""
    return case.family.pipeline != "QwenImage21Pipeline" or find_spec("torchvision") is not None


def saved(case, folder):
    """`folder`, with the tiny pipeline of `case`."""
    if not can_save(case):
        pytest.skip("its processor needs torchvision")
    case.make().save_pretrained(folder)
    return folder


def noise_of(policy, count=2):
    return randn(count, *policy.latent_shape)


def velocity(policy):
    return policy.velocity(noise_of(policy), TIME, policy.encode(PROMPTS))


def draw(policy, noise=None, steps=STEPS):
    noise = noise_of(policy) if noise is None else noise
    given = policy.schedule(steps), policy.encode(PROMPTS), noise, Usage()
    return policy.decode(solve(policy, *given))


def fill(policy, seed=1, std=0.15):
    """`policy` with an adapter that shows in an image."""
    generator = seeded(seed)
    for parameter in policy.trainable().values():
        torch.nn.init.normal_(parameter, std=std, generator=generator)
    return policy


def config_of(**changes):
    usual = dict(minibatches=1, learning_rate=1e-2, clip_range=1e-2, kl_weight=0.1)
    return preset("tiny").apply(**{**usual, **changes})


def trainer_of(policy, **changes):
    config = config_of(**changes)
    return build_trainer(config, policy, make_method(config), REDNESS, PROMPTS)
