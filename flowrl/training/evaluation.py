"""Evaluation: ODE samples of the averaged weights on fixed held-out prompts and noise, scored in all three forms."""

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flowrl.builtin import World
from flowrl.errors import RewardError
from flowrl.protocols import FlowPolicy, RewardModel
from flowrl.rollout import Usage, score, solve
from flowrl.training.beside import Beside, Sampling
from flowrl.types import Prompt

EVALUATION_SEED = 20240


@dataclass(frozen=True)
class Evaluation:
    """Mean scores by form, the seconds it took, and the scores and pictures of the first samples.

    `own` is the mean of the reward that training uses where that is not the task's; `image_scores` are then its scores too.
    `beside` is what was measured beside it (`training.beside`).
    """

    scores: dict[str, float]
    seconds: float
    images: Tensor
    image_scores: Tensor
    prompts: list[Prompt]
    own: float | None = None
    beside: dict[str, Any] = field(default_factory=dict)

    @property
    def incomplete(self) -> bool:
        """Whether something beside the reward could not be measured."""
        return None in (*self.beside.get("heldout", {}).values(), self.beside.get("diversity", 0.0))

    def row(self, form: str) -> dict[str, Any]:
        """What a metrics line records; "reward" is what training maximises: the score in its form, or a reward of its own."""
        scores = {"reward": self.scores[form], **self.scores, "seconds": self.seconds, **self.beside}
        return scores if self.own is None else {**scores, "reward": self.own}


def evaluate(
    policy: FlowPolicy,
    world: World,
    task: str,
    form: str,
    count: int,
    steps: int,
    max_batch: int = 256,
    keep: int = 8,
    reward: RewardModel | None = None,
    solver: str = "euler",
    beside: Beside | None = None,
) -> Evaluation:
    """Sample `count` held-out prompts (in turn, repeated where there are fewer) by `steps` ODE steps from fixed noise.

    `reward`: one that is not the task's own, scored in addition. `solver`: see `rollout.solve`. `beside`: what else is measured.
    Means leave out samples that a reward marked invalid; `RewardError` where it marked all of them.
    """
    started = time.perf_counter()
    heldout = world.prompts(task, "heldout")
    prompts = [heldout[i % len(heldout)] for i in range(count)]
    generator = torch.Generator().manual_seed(EVALUATION_SEED)
    noise = torch.randn((count, *policy.latent_shape), generator=generator).to(policy.device)
    latents = solve(solver, policy, policy.schedule(steps), policy.encode(prompts), noise, Usage(), max_batch)
    images = torch.cat([policy.decode(part) for part in latents.split(max_batch)])
    by_form = {name: score(world.reward(name), images, prompts, invalid=True).cpu() for name in world.forms}
    means = {name: _mean(values, name) for name, values in by_form.items()}
    own = None if reward is None else score(reward, images, prompts, invalid=True).cpu()
    seconds = time.perf_counter() - started
    mean = None if own is None else _mean(own, type(reward).__name__)
    trained = by_form[form] if own is None else own
    found = (
        {} if beside is None else beside.measure(images, prompts, trained, Sampling(policy, heldout, steps, solver, max_batch))
    )
    return Evaluation(means, seconds, images[:keep].cpu(), trained[:keep], prompts[:keep], mean, found)


def _mean(scores: Tensor, name: str) -> float:
    """The mean over valid samples."""
    if bool(scores.isnan().all()):
        raise RewardError(f"evaluation: the reward {name} marked all {len(scores)} samples invalid")
    return float(scores.nanmean())
