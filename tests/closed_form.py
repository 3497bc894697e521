"""A 2-D setting whose values have a closed form: one mode, so that the velocity is affine."""

import torch
from rollouts import AllButLast

from flowrl.bench.gradients import Setting
from flowrl.core.types import Prompt
from flowrl.flow import uniform_schedule
from flowrl.flow.mixture import GaussianMixture
from flowrl.policies.mixture import MixturePolicy
from flowrl.probes import LatentReward
from flowrl.samplers import FlowSDE
from flowrl.worlds.mixture import WIDTH, DirectionReward, angle_of, ring, target

PROMPTS = [Prompt(f"towards {angle} degrees") for angle in (0, 100, 200)]


def gaussian_setting(sampler=None, steps=6):
    """One mode: the velocity is affine in x, so that the finished point given any node is exactly
    Gaussian.
    """
    one = GaussianMixture(torch.tensor([[1.2, 0.4]]), 0.6, torch.ones(1))
    policy = MixturePolicy(one, angle_of)
    return Setting(
        policy,
        sampler or AllButLast(FlowSDE(0.7)),
        uniform_schedule(steps),
        DirectionReward("soft"),
        PROMPTS,
    )


def exact_values(setting, nodes, members):
    """V [sample, node] in closed form: x_T | x_j ~ N(a x_j + b, s^2 I), and E exp(-|x_T - y|^2 / (2
    w^2)) of a Gaussian.
    """
    schedule = setting.schedule
    condition = setting.policy.encode(PROMPTS[:1]).repeat(2)
    corners = torch.stack([torch.zeros(2, 1, 1), torch.ones(2, 1, 1)])
    goals = torch.tensor([target(prompt) for prompt in PROMPTS for _ in range(members)])
    slope, offset, variance = 1.0, torch.zeros(2), 0.0
    columns = []
    for node in reversed(range(schedule.steps + 1)):
        if node < schedule.steps:
            velocity = setting.policy.velocity(
                corners, schedule.network_timesteps[node].expand(2), condition
            )
            step = setting.sampler.transition(corners, velocity, schedule, torch.full((2,), node))
            mean = step.mean.flatten(1).detach()
            own = float((mean[1] - mean[0])[0])
            offset = slope * mean[0] + offset
            variance += slope**2 * float(step.std[0]) ** 2
            slope *= own
        gap = (slope * nodes[:, node].flatten(1) + offset - goals).square().sum(1)
        total = WIDTH**2 + variance
        columns.append(WIDTH**2 / total * torch.exp(-gap / (2 * total)))
    return torch.stack(columns[::-1], 1)


class ExactValue(LatentReward):
    """V of a noisy state under the data: E[bump | x_t] = E[bump] p_t(x | tilted data) / p_t(x)."""

    def score(self, latents, times, prompts):
        data, x, values = ring(), latents.flatten(1), torch.zeros(len(prompts))
        for text in {prompt.text for prompt in prompts}:
            goal = torch.tensor(target(Prompt(text)))
            change = data.tilted(goal, WIDTH).log_marginal(x, times) - data.log_marginal(x, times)
            own = torch.tensor([prompt.text == text for prompt in prompts])
            values = torch.where(own, data.expected_bump(goal, WIDTH) * change.exp(), values)
        return values
