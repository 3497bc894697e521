"""The built-in model families as tiny random pipelines of the real classes, and their own plain
pipelines' images.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from seeded import randn, seeded

from flowrl import PolicyOptions
from flowrl.core.types import Prompt
from flowrl.policies import SD3, Flux, PipelinePolicy, QwenImage, Wan
from flowrl.rewards import FunctionReward
from flowrl.rollout import Usage, solve
from flowrl.run.build import build_trainer, make_method
from flowrl.run.config import preset
from flowrl.run.models.weights import given_weights
from flowrl.testing.tiny import TINY, TINY_VIDEO, tiny_flux, tiny_qwen_image, tiny_sd3, tiny_wan

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
    """A family, its tiny pipeline, and the plain pipeline's name for classifier-free guidance."""

    make: Any
    family: Any
    scale: str = "true_cfg_scale"
    plain: dict[str, Any] = field(default_factory=dict)
    options: PolicyOptions = TINY

    def policy(self, pipe=None, **changes):
        pipe, options = pipe or self.make(), replace(self.options, **changes)
        return PipelinePolicy(pipe, self.family, options, **given_weights(pipe, options))

    def picture(self, pipe, noise, guidance=1.0, steps=STEPS, **changes):
        """The plain pipeline's own images or videos."""
        pipe.set_progress_bar_config(disable=True)
        settings = dict(height=16, width=16, max_sequence_length=24, output_type="pt")
        settings |= dict(negative_prompt=["blurry"] * 2, num_inference_steps=steps)
        settings |= {**self.plain, self.scale: guidance, **changes}
        output = pipe(TEXTS, latents=noise, **settings)
        return output.frames if hasattr(output, "frames") else output.images


CASES = {
    "sd3": Case(tiny_sd3, SD3(), "guidance_scale"),
    "flux": Case(tiny_flux, Flux(), plain={"guidance_scale": 3.5}),
    "qwen-image": Case(tiny_qwen_image, QwenImage()),
    "wan": Case(tiny_wan, Wan(), "guidance_scale", {"num_frames": 5}, TINY_VIDEO),
}


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
