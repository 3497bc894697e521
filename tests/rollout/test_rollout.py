"""Rollouts: the counters prove the minimum of network evaluations, and batching changes nothing."""

import pytest
import torch
from rollouts import SDE, disturbed, rolled

from flowrl.core.errors import ConfigError
from flowrl.probes import Completion, NoProbe, Substeps
from flowrl.rewards import FunctionReward
from flowrl.rollout import Groups, Usage, integrate, rollout, score, score_rollout
from flowrl.samplers import CPS, ODE, FlowSDE, Windowed
from flowrl.worlds.base import world

PROMPTS = [world("mixture").parse(f"towards {angle} degrees") for angle in (0, 90, 180)]
REWARD = world("mixture").reward("soft")
MEMBERS, STEPS = 4, 10


def run(policy, probe=NoProbe(), **options):
    return rolled(policy, probe, prompts=PROMPTS, **options)


@pytest.mark.parametrize(
    ("probe", "nfe", "saved", "calls"),
    [(NoProbe(), 10, 1, 10), (Substeps(5), 46, 5, 14), (Completion(), 55, 10, 10)],
)
def test_network_evaluations_are_the_minimum(mixture_policy, probe, nfe, saved, calls):
    """A state that a group shares is evaluated once; nothing is estimated from the state of the
    last step, an ODE step.
    """
    for shared in (False, True):
        usage = run(mixture_policy, probe, shared=shared)[1]
        expected = nfe - shared * saved * (1 - 1 / MEMBERS)
        assert usage.nfe / (len(PROMPTS) * MEMBERS) == pytest.approx(expected)
        assert usage.calls == calls


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("sampler", [SDE, Windowed(CPS(0.7), range(3, 7))])
@pytest.mark.parametrize("probe", [Completion(), Substeps(3)])
def test_batched_estimates_equal_sequential_ones(mixture_policy, shared, sampler, probe):
    """The ODE from one node of one trajectory, one call at a time."""
    result, _ = run(disturbed(mixture_policy), probe, shared=shared, sampler=sampler)
    path, schedule = result.trajectories, result.trajectories.schedule
    assert list(result.estimates) == path.tree.drawn_steps
    for node, estimate in result.estimates.items():
        latents = estimate.latents.unflatten(0, (len(PROMPTS), -1)).expand(-1, MEMBERS, -1, -1, -1)
        grid = probe.grid(schedule, node)
        for sample in (0, 5, 11):
            x = path.nodes[sample : sample + 1, node]
            condition = mixture_policy.encode(PROMPTS[sample // MEMBERS :][:1])
            for delta, timestep in zip(grid.lengths, grid.timesteps, strict=True):
                x = x - delta * mixture_policy.velocity(x, timestep[None], condition).detach()
            found = latents.flatten(0, 1)[sample]
            torch.testing.assert_close(found, x[0], atol=2e-5, rtol=1e-4)


def test_the_maximum_batch_bounds_calls_and_changes_nothing(mixture_policy):
    sizes, original = [], mixture_policy.velocity
    mixture_policy.velocity = lambda x, t, c: sizes.append(len(x)) or original(x, t, c)
    small, usage = run(mixture_policy, Completion(), max_batch=7)
    assert max(sizes) <= 7 and usage.calls == STEPS
    large = run(mixture_policy, Completion())[0]
    torch.testing.assert_close(small.trajectories.nodes, large.trajectories.nodes)
    complete = score_rollout(mixture_policy, REWARD, large, PROMPTS).total
    pieces = score_rollout(mixture_policy, REWARD, small, PROMPTS, max_batch=5).total
    torch.testing.assert_close(pieces, complete)


def test_same_seed_same_numbers_and_shared_noise_is_shared(mixture_policy):
    first, second = (run(mixture_policy, shared=True)[0].trajectories.nodes for _ in range(2))
    assert torch.equal(first, second)
    start, end = (first[:, node].view(len(PROMPTS), MEMBERS, -1) for node in (0, -1))
    assert torch.equal(start, start[:, :1].expand_as(start))
    assert not torch.equal(start[0, 0], start[1, 0]) and not torch.equal(end[:, 0], end[:, 1])


def test_deterministic_steps_draw_nothing(mixture_policy):
    paths = [
        run(mixture_policy, sampler=Windowed(FlowSDE(0.7), steps))[0].trajectories
        for steps in (range(2, 5), range(2, 3))
    ]
    path = paths[0]
    for step in (0, 1, 5, 9):
        expected = path.nodes[:, step] - path.schedule.deltas[step] * path.velocities[:, step]
        torch.testing.assert_close(path.nodes[:, step + 1], expected)
    assert (path.stds > 0).nonzero().flatten().tolist() == path.tree.drawn_steps == [2, 3, 4]
    assert torch.equal(paths[0].at(3), paths[1].at(3))


def test_evaluation_sampling_is_the_ode(mixture_policy):
    path = run(mixture_policy, members=1, sampler=ODE())[0].trajectories
    condition = mixture_policy.encode(PROMPTS)
    end = integrate(mixture_policy, path.schedule, condition, path.at(0), Usage())
    torch.testing.assert_close(path.images_latent, end)


def test_low_precision_noise_gives_trajectories_in_float32(mixture_policy):
    groups, generator = Groups(3, MEMBERS), torch.Generator().manual_seed(0)
    noise = groups.noise(mixture_policy.latent_shape, generator).bfloat16()
    grid, condition = mixture_policy.schedule(4), mixture_policy.encode(PROMPTS)
    path = rollout(mixture_policy, SDE, grid, condition, noise, generator, groups).trajectories
    assert path.states.dtype == path.outputs.dtype == torch.float32


def test_the_table_has_nan_only_where_nobody_asked(mixture_policy):
    table = score_rollout(mixture_policy, REWARD, run(mixture_policy)[0], PROMPTS).total
    assert table.shape == (3, MEMBERS, STEPS)
    assert bool(table[..., :-1].isnan().all()) and bool(table[..., -1].isfinite().all())
    usage, result = Usage(), run(mixture_policy, Completion(), shared=True)[0]
    table = score_rollout(mixture_policy, REWARD, result, PROMPTS, usage).total
    assert bool(table.isfinite().all())
    assert torch.equal(table[:, :1, 0].expand(-1, MEMBERS), table[..., 0])
    # node 0 once a group; nodes 1 to 8, and the image
    assert usage.reward_calls == 3 + 3 * MEMBERS * 9


def test_bad_arguments_are_named(mixture_policy):
    with pytest.raises(ConfigError, match=r"flowrl\.probes\.Probe"):
        run(mixture_policy, "tweedie")
    with pytest.raises(ConfigError, match="max_batch"):
        run(mixture_policy, max_batch=0)


def test_a_rewards_own_weights_get_no_gradients(mixture_policy):
    """A network without `no_grad` would else be differentiated with the policy, and its activations
    kept.
    """
    weight = torch.nn.Parameter(torch.ones(()))

    class Parts:
        def parts(self, images, prompts):
            return {"one": images.mean((1, 2, 3)) * weight}

        def total(self, parts):
            return 2 * weight * parts["one"]

        def score(self, images, prompts):
            return self.total(self.parts(images, prompts))

    seen = []

    def watched(images, prompts):
        seen.append(torch.is_grad_enabled())
        return images.mean((1, 2, 3)) * weight

    result = run(mixture_policy)[0]
    for reward in (FunctionReward(watched), Parts()):
        assert not score_rollout(mixture_policy, reward, result, PROMPTS).total.requires_grad
        assert not score(reward, torch.zeros(3, 3, 1, 1), PROMPTS).requires_grad
    assert not any(seen)
