"""Rollouts: the counters prove the minimum of network evaluations, and batching changes nothing."""

import pytest
import torch
from rollouts import DIRECTIONS, SDE, disturbed, rolled
from seeded import seeded
from torch.testing import assert_close

from flowrl.core.errors import ConfigError
from flowrl.flow import shifted_schedule
from flowrl.probes import Completion, NoProbe, Substeps
from flowrl.rewards import FunctionReward, WeightedSum
from flowrl.rollout import Groups, rollout, score
from flowrl.rollout.rollout import chunk_size
from flowrl.samplers import CPS, ODE, FlowSDE, Windowed

MEMBERS, STEPS = 4, 10


def run(policy, probe=NoProbe(), **options):
    return rolled(policy, probe, prompts=DIRECTIONS, **options)


def test_same_seed_same_numbers_and_shared_noise_is_shared(mixture_policy):
    first, second = (run(mixture_policy, shared=True)[0].trajectories for _ in range(2))
    assert torch.equal(first.nodes, second.nodes)
    start, end = (first.at(node).view(len(DIRECTIONS), MEMBERS, -1) for node in (0, STEPS))
    assert torch.equal(start, start[:, :1].expand_as(start))
    assert not torch.equal(start[0, 0], start[1, 0]) and not torch.equal(end[:, 0], end[:, 1])


@pytest.mark.parametrize(
    ("probe", "sampler", "shared"),
    [(Completion(), SDE, True), (Substeps(3), Windowed(CPS(0.7), range(3, 7)), False)],
)
def test_batched_estimates_equal_sequential_ones(mixture_policy, probe, sampler, shared):
    """The ODE from one node of one trajectory, one call at a time."""
    options = dict(shared=shared, sampler=sampler, steps=shifted_schedule(STEPS))
    result, _ = run(disturbed(mixture_policy), probe, **options)
    path, condition = result.trajectories, mixture_policy.encode(DIRECTIONS)
    assert list(result.estimates) == path.tree.drawn_steps
    for node, latents in result.estimates.items():
        ends = latents.unflatten(0, (len(DIRECTIONS), -1)).expand(-1, MEMBERS, -1, -1, -1)
        grid = probe.grid(path.schedule, node)
        for sample in (0, 5, 11):
            x, prompt = path.at(node)[sample : sample + 1], torch.tensor([sample // MEMBERS])
            for delta, timestep in zip(grid.lengths, grid.timesteps, strict=True):
                velocity = mixture_policy.velocity(x, timestep[None], condition.take(prompt))
                x = x - delta * velocity.detach()
            assert_close(ends.flatten(0, 1)[sample], x[0], atol=2e-5, rtol=1e-4)


def test_deterministic_steps_draw_nothing(mixture_policy):
    path = run(mixture_policy, sampler=Windowed(FlowSDE(0.7), range(2, 5)))[0].trajectories
    for step in (0, 1, 5, 9):
        following = path.at(step) - path.schedule.deltas[step] * path.velocities[:, step]
        assert_close(path.at(step + 1), following)
    assert (path.stds > 0).nonzero().flatten().tolist() == path.tree.drawn_steps == [2, 3, 4]
    generator, of_noise = torch.Generator(), seeded()
    run(mixture_policy, sampler=ODE(), generator=generator)
    Groups(len(DIRECTIONS), MEMBERS).noise(mixture_policy.latent_shape, of_noise)
    assert torch.equal(generator.get_state(), of_noise.get_state())


def test_low_precision_noise_gives_trajectories_in_float32(mixture_policy):
    groups, generator = Groups(3, MEMBERS), torch.Generator()
    noise = groups.noise(mixture_policy.latent_shape, generator).bfloat16()
    grid, condition = mixture_policy.schedule(4), mixture_policy.encode(DIRECTIONS)
    path = rollout(mixture_policy, SDE, grid, condition, noise, generator, groups).trajectories
    assert path.states.dtype == path.outputs.dtype == torch.float32


@pytest.mark.parametrize(("options", "words"), [({"max_batch": 0}, "max_batch")])
def test_bad_arguments_are_named(mixture_policy, options, words):
    with pytest.raises(ConfigError, match=words):
        run(mixture_policy, **options)


def test_a_rewards_own_weights_get_no_gradients():
    """A network without `no_grad` would else be differentiated with the policy, and its activations
    kept.
    """
    weight, modes = torch.nn.Parameter(torch.ones(())), []

    def weighted(images, prompts):
        modes.append(torch.is_grad_enabled())
        return images.mean((1, 2, 3)) * weight

    reward, images = FunctionReward(weighted), torch.zeros(3, 3, 1, 1)
    for model in (reward, WeightedSum({"a": reward, "b": reward})):
        scores = score(model, images, DIRECTIONS)
        assert not any(table.requires_grad for table in (scores.total, *scores.parts.values()))
    assert modes == [False] * 3


@pytest.mark.parametrize(
    ("groups", "members", "max_batch", "size"),
    [(4, 24, 16, 2), (6, 24, 24, 1), (6, 24, 18, 3), (6, 24, 64, 2), (3, 8, 512, 3), (5, 4, 3, 3)],
)
def test_automatic_chunks_need_no_further_calls(groups, members, max_batch, size):
    """5 groups of 4 in calls of 3: 7 calls, 8 in chunks of 2 groups (3 + 3 + 2)."""
    assert chunk_size(groups, members, max_batch) == size
