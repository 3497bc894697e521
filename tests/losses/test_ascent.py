"""Direct gradients of a reward: reductions between the published forms, the exact gradient, closed
forms, and rewards without a gradient.
"""

from dataclasses import dataclass

import pytest
import torch
from closed_form import ExactValue
from rollouts import disturbed, rolled
from seeded import seeded
from small_run import TINY_RUN, trainer_of
from torch.testing import assert_close

from flowrl.core.errors import ConfigError, ProbeError, RewardError
from flowrl.core.experience import Decisions
from flowrl.core.policy_options import PolicyOptions
from flowrl.flow import LateSteps, PermutedTimes, uniform_schedule
from flowrl.losses import RewardAscent
from flowrl.policies.mixture import MixturePolicy
from flowrl.rewards import FunctionReward, WinRate
from flowrl.rollout import ForwardObjective, Rows
from flowrl.rollout.ascent import reward_slopes
from flowrl.samplers import ODE, FlowSDE, Multistep
from flowrl.testing.tiny import tiny_sd3_policy
from flowrl.worlds.built_in import ShapesWorld
from flowrl.worlds.mixture import DirectionReward, angle_of, ring, split

STEPS, MEMBERS = 5, 3
TWO = split("direction")["train"][:2]
EVERY = PermutedTimes(1.0)
LAST = LateSteps(last=1)


class Drift(MixturePolicy):
    """A velocity that depends on the prompt and the time, not on the state."""

    def velocity(self, latent, timestep, condition):
        return super().velocity(torch.ones_like(latent), timestep, condition)


def policy_of(kind=MixturePolicy):
    return disturbed(kind(ring(), angle_of))


def objective_of(loss, policy, sampler=ODE(), reward=DirectionReward("soft"), seed=0):
    """The loss on a rollout of two prompts in five steps; all samples count."""
    path = rolled(policy, members=MEMBERS, steps=STEPS, sampler=sampler, prompts=TWO, seed=seed)[0]
    states, valid = path.trajectories, torch.ones(2, MEMBERS, dtype=torch.bool)
    decisions = Decisions.of(states.schedule, states.stds, states.tree, valid)
    credit = torch.ones(decisions.mask.shape)
    return ForwardObjective(
        policy,
        loss,
        path,
        decisions,
        0 * credit,
        credit,
        sampler,
        generator=seeded(1),
        prompts=TWO,
        reward=reward,
    )


def gradients(loss, policy, **options):
    """Loss and gradient of the parameters over all rows, and the batch."""
    objective = objective_of(loss, policy, **options)
    draws = objective.steps.shape[1]
    sample = torch.arange(2 * MEMBERS).repeat_interleave(draws)
    batch = objective.batch(Rows.of(sample, torch.arange(draws).repeat(2 * MEMBERS)))
    value = loss.loss(batch).loss
    parameters = [*policy.trainable().values()]
    slopes = torch.autograd.grad(value, parameters, materialize_grads=True, allow_unused=True)
    return value.detach(), torch.cat([slope.flatten() for slope in slopes]), batch


def through_sampling(policy, first):
    """The gradient of minus the mean reward through the ODE's steps from `first` on."""
    path = rolled(policy, members=MEMBERS, steps=STEPS, sampler=ODE(), prompts=TWO)[0].trajectories
    grid, condition = path.schedule, policy.encode(TWO).repeat(MEMBERS)
    x = path.at(first)
    for i in range(first, STEPS):
        timestep = grid.network_timesteps[i].expand(len(x))
        x = x - grid.deltas[i] * policy.velocity(x, timestep, condition)
    prompts = [prompt for prompt in TWO for _ in range(MEMBERS)]
    value = -DirectionReward("soft").score(x, prompts).mean()
    return value.detach(), torch.cat(
        [g.flatten() for g in torch.autograd.grad(value, [*policy.trainable().values()])]
    )


def test_the_last_step_alone_is_draft_1_and_refl():
    """S = {last}: the image is x_k - t_k v_k, so both forms are the exact gradient of the last
    step.
    """
    policy = policy_of()
    value, exact = through_sampling(policy, STEPS - 1)
    for through in ("image", "estimate"):
        got, slope, _ = gradients(RewardAscent(through=through, times=LAST), policy)
        assert_close(got, value)
        assert_close(slope, exact, atol=1e-7, rtol=1e-5)
    rescaled = gradients(RewardAscent(times=LAST, rescale=1.0), policy)[1]
    assert_close(rescaled, STEPS * exact, atol=1e-6, rtol=1e-5)  # sum of Delta / Delta_last


def test_all_steps_are_the_exact_gradient_if_the_velocity_ignores_the_state():
    policy = policy_of(Drift)
    value, exact = through_sampling(policy, 0)
    for loss in (RewardAscent(times=EVERY), RewardAscent(times=EVERY, rescale=1.0)):
        got, slope, _ = gradients(loss, policy)
        assert_close(got, value)
        assert_close(slope, exact, atol=1e-7, rtol=1e-5)
    assert_close(gradients(RewardAscent(times=EVERY, weight=0.5), policy)[1], exact / 2)
    curved = policy_of()
    gap = gradients(RewardAscent(times=EVERY), curved)[1] - through_sampling(curved, 0)[1]
    assert gap.abs().max() > 1e-3  # the products of Jacobians that are left out


def test_drawn_steps_of_an_ode_by_hand():
    """dr/dv_k = -Delta_k |S| dr/dx_0; with y = 1 all are divided by the sum of Delta over S."""
    policy = policy_of()
    times = LateSteps(count=2, last=4, power=2.0)
    for y in (0.0, 1.0):
        batch = gradients(RewardAscent(times=times, rescale=y), policy)[2]
        objective = objective_of(RewardAscent(times=times, rescale=y), policy)
        images = objective.images.clone().requires_grad_()
        prompts = [prompt for prompt in TWO for _ in range(MEMBERS)]
        rewards = DirectionReward("soft").score(images, prompts)
        (slopes,) = torch.autograd.grad(rewards.sum(), images)
        deltas = torch.full((2 * MEMBERS, 2), 1 / STEPS)
        scale = 2 * (1 + y * (1 / deltas.sum(1) - 1))
        share = (deltas * scale[:, None]).flatten()[:, None, None, None]
        assert_close(batch.slope, -share * slopes.repeat_interleave(2, 0))
        assert_close(batch.reward, rewards.detach().repeat_interleave(2, 0))
    targets = RewardAscent(times=times, weight=0.5, target=float(rewards[0].detach()))
    value = gradients(targets, policy)[0]
    assert_close(value, 0.5 * (targets.target - rewards.detach()).clamp(min=0).mean())


def test_copies_of_the_image_are_scored_after_one_step():
    """Re-noised at the last time: r(x - t v) of the current velocity."""
    policy, loss = policy_of(), RewardAscent(through="estimate", noise="each", times=LAST)
    batch = gradients(loss, policy)[2]
    objective = objective_of(loss, policy)
    time = batch.time[:, None, None, None]
    state = objective.images + time * batch.target
    assert not torch.allclose(state, objective.rollout.trajectories.at(STEPS - 1))
    clean = (state - time * batch.new).detach().requires_grad_()
    prompts = [prompt for prompt in TWO for _ in range(MEMBERS)]
    rewards = DirectionReward("soft").score(clean, prompts)
    (slopes,) = torch.autograd.grad(rewards.sum(), clean)
    assert_close(batch.reward, rewards.detach())
    assert_close(batch.slope, -time * slopes)


class Detached(ExactValue):
    def score(self, latents, times, prompts):
        return super().score(latents.detach(), times, prompts)


@pytest.mark.parametrize("sampler", [ODE(), FlowSDE(0.7)], ids=repr)
def test_a_latent_reward_is_that_of_the_next_node(sampler):
    """PRFL: dr/dv = (d mu / d v) grad V at the next node, moved by the change of the velocity."""
    policy, loss = policy_of(), RewardAscent(ExactValue(), times=LateSteps(count=4))
    objective = objective_of(loss, policy, sampler)
    for parameter in policy.trainable().values():
        torch.nn.init.normal_(parameter, std=0.1, generator=seeded(3))
    rows = Rows.of(torch.arange(2 * MEMBERS), torch.arange(2 * MEMBERS) % 4)
    batch = objective.batch(rows)
    path, step = objective.rollout.trajectories, objective.steps[rows.sample, rows.column]
    grid, prompts = path.schedule, [prompt for prompt in TWO for _ in range(MEMBERS)]
    x = path.nodes[rows.sample, step]
    before, now = (
        sampler.transition(x, v, grid, step).mean
        for v in (path.velocities[rows.sample, step], batch.new.detach())
    )
    moved = (path.nodes[rows.sample, step + 1] + now - before).requires_grad_()
    values = ExactValue().score(moved, grid.times[step + 1], prompts)
    (uphill,) = torch.autograd.grad(values.sum(), moved)
    unit = sampler.transition(0 * x, torch.ones_like(x), grid, step).mean
    assert_close(batch.reward, values.detach())
    assert_close(batch.slope, unit * uphill, atol=1e-6, rtol=1e-4)
    if isinstance(sampler, ODE):
        assert_close(unit.flatten(1)[:, 0], -grid.deltas[step])
    with pytest.raises(ProbeError, match=r"Detached.score must return .* with a gradient"):
        objective_of(RewardAscent(Detached(), times=LateSteps(count=4)), policy).batch(rows)


def shapes_policy():
    return ShapesWorld().policy(PolicyOptions())


@pytest.mark.parametrize(
    "make", [tiny_sd3_policy, pytest.param(shapes_policy, marks=pytest.mark.satellite)]
)
def test_rewards_of_images_have_gradients_through_the_decoder(make):
    """Against a central difference along the gradient; without a gradient in the latents the
    decoder makes no graph.
    """
    policy, red = make(), FunctionReward(lambda images, prompts: images[:, 0].square().mean((1, 2)))
    latents = 0.3 * torch.randn(2, *policy.latent_shape, generator=seeded())
    assert not policy.decode(latents).requires_grad
    rewards, slopes = reward_slopes(policy, red, latents, TWO)
    assert not rewards.requires_grad and slopes.flatten(1).norm(dim=1).min() > 0
    step = 1e-2 * slopes / slopes.flatten(1).norm(dim=1).view(-1, *[1] * (slopes.ndim - 1))
    ahead, behind = (red.score(policy.decode(latents + s * step), TWO) for s in (1, -1))
    expected = 2 * (step * slopes).flatten(1).sum(1)
    assert_close(ahead - behind, expected, rtol=0.05, atol=1e-5)


class Blind(MixturePolicy):
    def decode(self, latent):
        return latent.detach()


NUMPY = FunctionReward(lambda images, prompts: torch.from_numpy(images.flatten(1).numpy()[:, 0]))


@dataclass
class Constant:
    """Requires a gradient, which does not depend on the images."""

    def score(self, images, prompts):
        return torch.ones(len(images), requires_grad=True)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"reward": DirectionReward("strict")}, RewardError, r"DirectionReward\.score has no grad"),
        ({"reward": NUMPY}, RewardError, r"FunctionReward\.score has no gradient"),
        ({"reward": Constant()}, RewardError, r"Constant\.score has no gradient"),
        (
            {"reward": WinRate(DirectionReward())},
            ConfigError,
            r"WinRate.* a reward of single samples",
        ),
        ({"kind": Blind}, ConfigError, r"Blind\.decode has no gradient"),
        ({"sampler": Multistep()}, ConfigError, r"Multistep.* single steps: ode"),
    ],
)
def test_what_has_no_gradient_is_named(options, error, words):
    policy = policy_of(options.pop("kind", MixturePolicy))
    with pytest.raises(error, match=words):
        gradients(RewardAscent(), policy, **options)


def test_a_run_with_such_a_reward_ends_before_its_first_rollout():
    config = TINY_RUN.replace(loss="ascent", sampler="ode", reward_form="strict")
    with pytest.raises(RewardError, match=r"DirectionReward\.score has no gradient"):
        trainer_of(config)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"latent_reward": ExactValue(), "through": "estimate"}, "image with a latent_reward"),
        ({"noise": "each"}, "path unless through is estimate"),
        ({"through": "estimate", "rescale": 0.5}, "0 unless r is that of the image"),
        ({"latent_reward": ExactValue(), "rescale": 0.5}, "0 unless r is that of the image"),
    ],
)
def test_options_that_do_not_fit_each_other(options, words):
    with pytest.raises(ConfigError, match=words):
        RewardAscent(**options)


def test_late_steps_have_their_weights():
    """One of five steps with weights (k + 1)^2 / 55; five standard deviations of 4,000 draws."""
    grid = uniform_schedule(STEPS)
    times = LateSteps(power=2.0).draw(grid, 4000, seeded())
    shares = torch.isclose(times, grid.times[:-1]).float().mean(0)
    assert_close(shares, torch.tensor([1, 4, 9, 16, 25]) / 55, rtol=0.0, atol=0.04)
