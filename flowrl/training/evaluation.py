"""Evaluation: ODE samples of the averaged weights on fixed held-out prompts and noise, scored in all three forms."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.diagnostics.paired import EVALUATION_SEED
from flowrl.distributed import Distributed
from flowrl.errors import RewardError
from flowrl.protocols import FlowPolicy, RewardModel
from flowrl.rollout import Usage, integrate, score, solve
from flowrl.training.build import make_world, trained_policy
from flowrl.training.heldout import Beside, Sampling
from flowrl.types import Prompt
from flowrl.worlds.base import PolicyOptions, World, world

OWN = "its own"
"""The key of the training's own reward among those of the task."""


@dataclass(frozen=True)
class Evaluation:
    """Mean scores by form, the seconds it took, and the scores and pictures of the first samples.

    `own` is the mean of the reward that training uses where that is not the task's; `image_scores` are then its scores too.
    `beside` is what was measured beside it (`training.heldout`).
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
    distributed: Distributed = Distributed(),
) -> Evaluation:
    """Sample `count` held-out prompts (in turn, repeated where there are fewer) by `steps` ODE steps from fixed noise.

    `reward`: one that is not the task's own, scored in addition. `solver`: see `rollout.solve`. `beside`: what else is measured.
    The processes divide the samples between them; all get the full result (and each measures `beside` by itself).
    Means leave out samples that a reward marked invalid; `RewardError` where it marked all of them.
    """
    started = time.perf_counter()
    heldout = world.prompts(task, "heldout")
    prompts = [heldout[i % len(heldout)] for i in range(count)]
    generator = torch.Generator().manual_seed(EVALUATION_SEED)
    noise = torch.randn((count, *policy.latent_shape), generator=generator).to(policy.device)
    share = distributed.assign(count)
    kept = count if beside is not None else keep
    models = {name: world.reward(name) for name in world.forms}
    if reward is not None:
        models[OWN] = reward

    def work() -> tuple[dict[str, Tensor], Tensor]:
        """The scores of this process's samples, and its pictures of those to be kept."""
        rows = torch.arange(share.first, share.first + share.count, device=policy.device)
        condition = policy.encode(prompts).take(rows)
        latents = solve(solver, policy, policy.schedule(steps), condition, noise[rows], Usage(), max_batch)
        latents = latents[share.own.start - share.first :][: len(share.own)]
        if not share.own:
            return {name: torch.empty(0) for name in models}, torch.empty(0)
        images = torch.cat([policy.decode(part) for part in latents.split(max_batch)])
        texts = prompts[share.own.start : share.own.stop]
        scores = {name: score(model, images, texts, invalid=True).cpu() for name, model in models.items()}
        mine = images[: max(0, kept - share.own.start)]
        return scores, mine if distributed.world_size == 1 else mine.cpu()

    with distributed.shared_errors():
        part = work()
    parts = distributed.gather(part)
    scores = {name: torch.cat([some[name] for some, _ in parts]) for name in models}
    images = torch.cat([pictures for _, pictures in parts if len(pictures)])
    own = None if reward is None else _mean(scores[OWN], type(reward).__name__)
    means = {name: _mean(scores[name], name) for name in world.forms}
    seconds = time.perf_counter() - started
    trained = scores[form if reward is None else OWN]
    found: dict[str, Any] = {}
    if beside is not None:
        found = beside.measure(images.to(policy.device), prompts, trained, Sampling(policy, heldout, steps, solver, max_batch))
    return Evaluation(means, seconds, images[:keep].cpu(), trained[:keep], prompts[:keep], own, found)


def _mean(scores: Tensor, name: str) -> float:
    """The mean over valid samples."""
    if bool(scores.isnan().all()):
        raise RewardError(f"evaluation: the reward {name} marked all {len(scores)} samples invalid")
    return float(scores.nanmean())


@dataclass(frozen=True)
class Grid:
    """`images` [prompt, count, channel, height, width], their soft scores [prompt, count], and the prompts' texts."""

    images: Tensor
    scores: Tensor
    prompts: tuple[str, ...]


def sample_grid(prompts: Sequence[str], weights: Path | None, world_name: str, count: int, steps: int, seed: int) -> Grid:
    """`count` ODE samples per prompt; the same seed gives every model the same noise. Unknown words raise `ConfigError`."""
    max_batch = 1024
    if weights is None:
        chosen = world(world_name)
        parsed = [chosen.parse(text) for text in prompts]
        policy = chosen.policy(PolicyOptions())
    else:
        policy, config = trained_policy(weights)
        here = config.replace(device=str(policy.device))  # not that of the training, which may not exist here
        chosen, max_batch = make_world(here), config.rollout.max_batch
        parsed = [chosen.parse(text) for text in prompts]
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn((len(parsed) * count, *policy.latent_shape), generator=generator).to(policy.device)
    everyone = [prompt for prompt in parsed for _ in range(count)]
    latents = integrate(policy, policy.schedule(steps), policy.encode(everyone), noise, Usage(), max_batch)
    images = policy.decode(latents)
    scores = score(chosen.reward("soft"), images, everyone)
    return Grid(images.cpu().unflatten(0, (len(parsed), count)), scores.cpu().view(len(parsed), count), tuple(prompts))
