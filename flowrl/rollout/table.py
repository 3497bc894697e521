"""From estimated final images to the reward table [prompt, member, node]."""

from collections.abc import Sequence

import torch
from torch import Tensor

from flowrl.errors import RewardError
from flowrl.protocols import FlowPolicy, RewardModel
from flowrl.rollout.rollout import Rollout
from flowrl.rollout.usage import Usage
from flowrl.types import Prompt


def score(reward: RewardModel, images: Tensor, prompts: Sequence[Prompt], usage: Usage | None = None) -> Tensor:
    """Scores [sample] in float32, checked: one finite number per image, or a `RewardError` that says what came instead."""
    name = type(reward).__name__
    scores = reward.score(images, prompts)
    if not isinstance(scores, Tensor):
        raise RewardError(f"{name}.score returned a {type(scores).__name__}; a torch.Tensor of shape [sample] is required")
    if scores.shape != (len(prompts),):
        raise RewardError(
            f"{name}.score returned shape {tuple(scores.shape)} for {len(prompts)} images; allowed: ({len(prompts)},)"
        )
    bad = ~torch.isfinite(scores)
    if bool(bad.any()):
        first = int(bad.nonzero()[0])
        raise RewardError(
            f"{name}.score returned {int(bad.sum())} of {len(prompts)} values that are not finite, the first at sample {first} "
            f"(prompt {prompts[first].text!r}); scores must be finite"
        )
    if usage is not None:
        usage.reward_calls += len(prompts)
    return scores.float()


def reward_table(
    policy: FlowPolicy,
    reward: RewardModel,
    result: Rollout,
    prompts: Sequence[Prompt],
    usage: Usage | None = None,
    max_batch: int = 512,
) -> Tensor:
    """R [prompt, member, node]: R_j scores the estimate at node j, NaN where none was made. `prompts`: one per group."""
    groups = result.groups
    steps = result.trajectories.schedule.steps
    table = torch.full((groups.prompts, groups.members, steps + 1), float("nan"))
    everyone = [prompt for prompt in prompts for _ in range(groups.members)]
    nodes = sorted(result.estimates)
    distinct = {id(result.estimates[node]): result.estimates[node] for node in nodes}
    latents = list(distinct.values())
    owners = [p for latent in latents for p in (everyone if len(latent) == groups.samples else prompts)]
    flat = torch.cat(latents)
    pieces = []
    for piece in torch.arange(len(flat)).split(max_batch):
        images = policy.decode(flat[piece.to(flat.device)])
        pieces.append(score(reward, images, [owners[i] for i in piece.tolist()], usage).cpu())
    scores = dict(zip(distinct, torch.cat(pieces).split([len(latent) for latent in latents]), strict=True))
    for node in nodes:
        table[:, :, node] = scores[id(result.estimates[node])].view(groups.prompts, -1)
    return table
