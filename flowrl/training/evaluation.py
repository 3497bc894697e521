"""Evaluation: ODE samples of the averaged weights on fixed held-out prompts and noise, scored in all three forms."""

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.builtin import World
from flowrl.protocols import FlowPolicy
from flowrl.rollout import Usage, integrate, score
from flowrl.types import Prompt

EVALUATION_SEED = 20240


@dataclass(frozen=True)
class Evaluation:
    """Mean scores by form, the seconds it took, and the scores and pictures of the first samples."""

    scores: dict[str, float]
    seconds: float
    images: Tensor
    image_scores: Tensor
    prompts: list[Prompt]

    def row(self, form: str) -> dict[str, float]:
        """What a metrics line records; "reward" is the score in the form that training uses."""
        return {"reward": self.scores[form], **self.scores, "seconds": self.seconds}


def evaluate(
    policy: FlowPolicy, world: World, task: str, form: str, count: int, steps: int, max_batch: int = 256, keep: int = 8
) -> Evaluation:
    """Sample `count` held-out prompts (in turn, repeated where there are fewer) by `steps` ODE steps from fixed noise."""
    started = time.perf_counter()
    heldout = world.prompts(task, "heldout")
    prompts = [heldout[i % len(heldout)] for i in range(count)]
    generator = torch.Generator().manual_seed(EVALUATION_SEED)
    noise = torch.randn((count, *policy.latent_shape), generator=generator).to(policy.device)
    latents = integrate(policy, policy.schedule(steps), policy.encode(prompts), noise, Usage(), max_batch)
    images = torch.cat([policy.decode(part) for part in latents.split(max_batch)])
    by_form = {name: score(world.reward(name), images, prompts).cpu() for name in world.forms}
    means = {name: float(values.mean()) for name, values in by_form.items()}
    return Evaluation(means, time.perf_counter() - started, images[:keep].cpu(), by_form[form][:keep], prompts[:keep])
