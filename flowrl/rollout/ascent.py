"""The gradients of rewards with respect to velocities, for losses that ascend a reward."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flowrl.core.errors import ConfigError, ProbeError, RewardError, part_call, require
from flowrl.core.protocols import FlowPolicy, RewardModel, Sampler
from flowrl.core.types import Prompt, expand, to_device
from flowrl.rewards.contract import check_scores, marks_invalid
from flowrl.rollout.batches import Objective, Rows


def reward_slopes(
    policy: FlowPolicy, reward: Any, latents: Tensor, prompts: Sequence[Prompt]
) -> tuple[Tensor, Tensor]:
    """The rewards of latents [sample] and their gradients [sample, *latent], through the decoder.

    Args:
        policy: the policy, which decodes latents.
        reward: a differentiable reward of single samples.
        latents: clean latents [sample, *latent].
        prompts: one prompt per latent.

    Returns:
        Rewards and gradients, float32 and detached.

    Raises:
        ConfigError: the policy's `decode` has no gradient, or the reward compares samples.
        RewardError: the reward has no gradient with respect to its images.
    """
    kind, coder = type(reward).__name__, type(policy).__name__
    allowed = "a reward of single samples: this loss follows its gradient"
    require(isinstance(reward, RewardModel), "reward", kind, allowed)
    name = f"{kind}.score"
    lacks = (
        f"reward: {name} has no gradient with respect to the images, which this loss ascends;"
        " allowed: a differentiable reward (no rounding, NumPy, detach or torch.no_grad)"
    )
    with torch.enable_grad():
        latents = latents.detach().requires_grad_()
        images = policy.decode(latents)
        if not images.requires_grad:
            raise ConfigError(f"{coder}.decode has no gradient, which this loss ascends")
        try:
            with part_call(name):
                scores = reward.score(images, prompts)
        except Exception as error:
            if "requires grad" in f"{error} {error.__cause__}":  # as PyTorch refuses `numpy()`
                raise RewardError(lacks) from error
            raise
        check_scores(scores, prompts, name, marks_invalid(reward))
        if not scores.requires_grad:
            raise RewardError(lacks)
        (slopes,) = torch.autograd.grad(scores.sum(), latents, allow_unused=True)
    if slopes is None:
        raise RewardError(lacks)
    return scores.detach().float(), slopes.float()


def latent_slopes(
    model: Any, latents: Tensor, times: Tensor, prompts: Sequence[Prompt]
) -> tuple[Tensor, Tensor]:
    """The rewards of noisy latents by a `flowrl.probes.LatentReward` [row], and their gradients
    [row, *latent]. Raises `ProbeError` unless they are one number per row with a gradient.
    """
    slopes = None
    with torch.enable_grad(), part_call(f"{type(model).__name__}.score"):
        latents = latents.detach().requires_grad_()
        scores = model.score(latents, times, prompts)
        if getattr(scores, "shape", None) == times.shape and scores.requires_grad:
            (slopes,) = torch.autograd.grad(scores.sum(), latents, allow_unused=True)
    if slopes is None:
        raise ProbeError(
            f"{type(model).__name__}.score must return one number per latent, with a gradient with"
            " respect to the latents (no detach, no torch.no_grad)"
        )
    return scores.detach().float(), slopes.float()


class Ascent:
    """The reward that each row of an `objective` ascends, as its loss declares (`ascends`), and its
    gradient with respect to the row's velocity: of the finished images, computed once for each; of
    the rows' estimates of them; or of the nodes after their steps.

    Raises `ConfigError` for a sampler without single steps, unless estimates are ascended.
    """

    def __init__(self, objective: Objective, images: Tensor) -> None:
        self.objective, self.images = objective, images
        self.kind = objective.loss.ascends
        if self.kind == "estimate":
            return
        sampler, schedule = objective.sampler, objective.rollout.trajectories.schedule
        name, allowed = f"sampler of {type(objective.loss).__name__}", "one of single steps: ode"
        require(isinstance(sampler, Sampler), name, type(sampler).__name__, allowed)
        assert isinstance(sampler, Sampler)
        steps = objective.steps
        step = torch.arange(schedule.steps, device=steps.device)
        none = torch.zeros(len(step), 1, device=step.device)
        # d x_{k+1} / d v_k of every step
        unit = sampler.transition(none, torch.ones_like(none), schedule.to(step.device), step)
        self.moves, length = unit.mean[:, 0], unit.mean[:, 0].abs()
        if self.kind == "image":
            scale = length.sum() / length[steps].sum(1, keepdim=True) - 1.0
            scale = 1.0 + objective.loss.rescale * scale
            self.shares = self.moves[steps] * scale * steps.shape[1]
            self.measured = set[int]()
            self.slopes = torch.zeros_like(images)
            self.scores = torch.zeros(len(images), device=images.device)

    def of(self, rows: Rows, state: Tensor, time: Tensor, new: Tensor) -> dict[str, Tensor]:
        """`ForwardBatch.reward` and `slope` of `rows` with these states and times, where the
        current velocity is `new`.
        """
        objective, new = self.objective, new.detach()
        members = objective.rollout.groups.members
        prompts = [objective.prompts[number // members] for number in rows.sample.tolist()]
        sample, column = objective.place(rows.sample, rows.column)
        if self.kind == "image":
            self._measure(sample, prompts)
            slope = self.slopes[sample]
            slope = objective.on_device(expand(self.shares[sample, column], slope) * slope)
            return {"reward": objective.on_device(self.scores[sample]), "slope": slope}
        if self.kind == "estimate":
            factor = -expand(time, state)
            given = objective.policy, objective.reward, state + factor * new, prompts
            reward, slope = reward_slopes(*given)
            return {"reward": reward, "slope": factor * slope}
        path, step = objective.rollout.trajectories, objective.steps[sample, column]
        units, group = to_device(path.tree.paths, step.device)[sample % members], sample // members
        row = torch.arange(len(step), device=step.device)
        sampled = objective.on_device(path.outputs[group, units[row, step]])
        node = objective.on_device(path.states[group, units[row, step + 1]])
        factor = expand(objective.on_device(self.moves[step]), node)
        times = objective.on_device(to_device(path.schedule.times, step.device)[step + 1]).float()
        moved = node + factor * (new - sampled)
        reward, slope = latent_slopes(objective.loss.latent_reward, moved, times, prompts)
        return {"reward": reward, "slope": factor * slope}

    def _measure(self, sample: Tensor, prompts: Sequence[Prompt]) -> None:
        """Compute rewards and gradients of the finished images of `sample` that have none yet."""
        first = dict(zip(sample.tolist(), prompts, strict=True))
        new = [number for number in first if number not in self.measured]
        if not new:
            return
        objective, place = self.objective, torch.tensor(new, device=self.images.device)
        images, given = objective.on_device(self.images[place]), [first[n] for n in new]
        scores, slopes = reward_slopes(objective.policy, objective.reward, images, given)
        self.scores[place], self.slopes[place] = scores.to(self.scores), slopes.to(self.slopes)
        self.measured.update(new)
