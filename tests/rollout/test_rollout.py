"""Rollouts: the counters prove the minimum of network evaluations, and batching changes nothing."""

import pytest
import torch
from all_but_last import AllButLast

from flowrl.core.errors import ConfigError, RewardError
from flowrl.flow.gaussian import log_prob
from flowrl.probes import Completion, NoProbe, Substeps, Tweedie
from flowrl.rewards import FunctionReward
from flowrl.rollout import Groups, Usage, integrate, rollout, score, score_rollout
from flowrl.samplers import CPS, ODE, FlowSDE, Windowed
from flowrl.worlds.base import world

PROMPTS = [world("mixture").parse(f"towards {angle} degrees") for angle in (0, 90, 180)]
MEMBERS, STEPS = 4, 10


def run(
    policy,
    probe,
    shared=False,
    sampler=None,
    max_batch=10_000,
    seed=0,
    members=MEMBERS,
    prompts=PROMPTS,
):
    groups, usage = Groups(len(prompts), members, shared), Usage()
    generator = torch.Generator().manual_seed(seed)
    noise = groups.noise(policy.latent_shape, generator)
    sampler = sampler or AllButLast(FlowSDE(0.7))
    schedule, condition = policy.schedule(STEPS), policy.encode(prompts)
    result = rollout(
        policy, sampler, schedule, condition, noise, generator, groups, probe, usage, max_batch
    )
    return result, usage


@pytest.mark.parametrize(
    ("probe", "shared", "nfe", "calls"),
    [
        (NoProbe(), False, 10, 10),
        (NoProbe(), True, 10 - (1 - 1 / MEMBERS), 10),
        (Tweedie(), False, 10, 10),
        (Substeps(5), False, 46, 14),
        (Substeps(5), True, 46 - 5 * (1 - 1 / MEMBERS), 14),
        (Completion(), False, 55, 10),
        (Completion(), True, 55 - 10 * (1 - 1 / MEMBERS), 10),
    ],
)
def test_network_evaluations_are_the_minimum(mixture_policy, probe, shared, nfe, calls):
    """The last step is an ODE step, so nothing is estimated from its state."""
    _, usage = run(mixture_policy, probe, shared)
    assert usage.nfe / (len(PROMPTS) * MEMBERS) == pytest.approx(nfe)
    assert usage.calls == calls


def test_shapes_world_counts_the_same(shapes_policy):
    prompts = [world("shapes").parse("three red circles")]
    for probe, nfe in ((NoProbe(), 10), (Substeps(5), 46), (Completion(), 55)):
        _, usage = run(shapes_policy, probe, prompts=prompts, members=2)
        assert usage.nfe == 2 * nfe


def sequential_completion(policy, result, node, sample):
    """The remaining ODE steps from one node of one trajectory, one call at a time."""
    schedule = result.trajectories.schedule
    x = result.trajectories.nodes[sample : sample + 1, node]
    condition = policy.encode(PROMPTS).take(torch.tensor([sample // MEMBERS]))
    with torch.no_grad():
        for i in range(node, STEPS):
            x = x - schedule.deltas[i] * policy.velocity(
                x, schedule.network_timesteps[i].expand(1), condition
            )
    return x[0]


def sequential_substeps(policy, result, node, sample, count):
    """`count` Euler steps on an even grid from one node of one trajectory."""
    x = result.trajectories.nodes[sample : sample + 1, node]
    condition = policy.encode(PROMPTS).take(torch.tensor([sample // MEMBERS]))
    start = float(result.trajectories.schedule.times[node])
    with torch.no_grad():
        for k in range(count):
            x = x - start / count * policy.velocity(
                x, torch.tensor([1000 * start * (1 - k / count)]), condition
            )
    return x[0]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("sampler", [AllButLast(FlowSDE(0.7)), Windowed(CPS(0.7), range(3, 7))])
def test_batched_estimates_equal_sequential_ones(mixture_policy, shared, sampler):
    for parameter in mixture_policy.trainable().values():
        torch.nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(1))
    for probe, reference in (
        (Completion(), sequential_completion),
        (Substeps(3), lambda *a: sequential_substeps(*a, 3)),
    ):
        result, _ = run(mixture_policy, probe, shared, sampler)
        assert list(result.estimates) == result.trajectories.tree.drawn_steps
        for node, found in result.estimates.items():
            estimates = found.latents
            if len(estimates) == len(PROMPTS):
                estimates = estimates.repeat_interleave(MEMBERS, dim=0)
            for sample in (0, 5, 11):
                expected = reference(mixture_policy, result, node, sample)
                torch.testing.assert_close(estimates[sample], expected, atol=2e-5, rtol=1e-4)


def test_maximum_batch_bounds_memory_and_changes_nothing(mixture_policy):
    sizes = []
    original = mixture_policy.velocity
    mixture_policy.velocity = lambda x, t, c: sizes.append(len(x)) or original(x, t, c)
    small, _ = run(mixture_policy, Completion(), max_batch=7)
    assert max(sizes) <= 7
    large, _ = run(mixture_policy, Completion())
    torch.testing.assert_close(small.trajectories.nodes, large.trajectories.nodes)
    for node in range(STEPS - 1):
        torch.testing.assert_close(small.estimates[node].latents, large.estimates[node].latents)


def test_same_seed_same_numbers_and_shared_noise_is_shared(mixture_policy):
    first, second = run(mixture_policy, NoProbe(), True)[0], run(mixture_policy, NoProbe(), True)[0]
    assert torch.equal(first.trajectories.nodes, second.trajectories.nodes)
    start = first.trajectories.nodes[:, 0].view(len(PROMPTS), MEMBERS, -1)
    assert torch.equal(start, start[:, :1].expand_as(start))
    assert not torch.equal(start[0, 0], start[1, 0])
    end = first.trajectories.nodes[:, -1].view(len(PROMPTS), MEMBERS, -1)
    assert not torch.equal(end[:, 0], end[:, 1])


def test_deterministic_steps_draw_nothing(mixture_policy):
    result, _ = run(mixture_policy, NoProbe(), sampler=Windowed(FlowSDE(0.7), range(2, 5)))
    path = result.trajectories
    for step in (0, 1, 5, 9):
        expected = path.nodes[:, step] - path.schedule.deltas[step] * path.velocities[:, step]
        torch.testing.assert_close(path.nodes[:, step + 1], expected)
    assert (path.stds > 0).tolist() == [step in (2, 3, 4) for step in range(STEPS)]
    assert path.tree.drawn_steps == [2, 3, 4]


def test_table_has_nan_only_where_nobody_asked(mixture_policy):
    reward = world("mixture").reward("soft")
    table = score_rollout(mixture_policy, reward, run(mixture_policy, NoProbe())[0], PROMPTS).total
    assert table.shape == (3, MEMBERS, STEPS)
    assert bool(table[..., :-1].isnan().all()) and bool(table[..., -1].isfinite().all())
    usage = Usage()
    table = score_rollout(
        mixture_policy, reward, run(mixture_policy, Completion(), True)[0], PROMPTS, usage
    ).total
    assert bool(table.isfinite().all())
    assert torch.equal(table[:, :1, 0].expand(-1, MEMBERS), table[..., 0])
    # node 0 once a group; nodes 1 to 8, and the image
    assert usage.reward_calls == 3 + 3 * MEMBERS * 9


def test_splitting_the_rewards_batch_changes_nothing(mixture_policy):
    result, _ = run(mixture_policy, Completion())
    reward = world("mixture").reward("soft")
    whole = score_rollout(mixture_policy, reward, result, PROMPTS).total
    torch.testing.assert_close(
        score_rollout(mixture_policy, reward, result, PROMPTS, max_batch=5).total, whole
    )


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (
            lambda images, prompts: torch.full((len(images),), float("nan")),
            "not finite.*sample 0.*towards 0",
        ),
        (lambda images, prompts: torch.zeros(len(images) + 1), r"shape \(13,\) for 12 images"),
        (lambda images, prompts: [0.0] * len(images), "returned a list"),
    ],
)
def test_rewards_that_break_their_contract_are_named(mixture_policy, function, words):
    result, _ = run(mixture_policy, NoProbe())
    with pytest.raises(RewardError, match=words):
        score_rollout(mixture_policy, FunctionReward(function), result, PROMPTS)


def test_bad_arguments_are_named(mixture_policy):
    with pytest.raises(ConfigError, match="probe"):
        run(mixture_policy, "tweedie")
    with pytest.raises(ConfigError, match="max_batch"):
        run(mixture_policy, NoProbe(), max_batch=0)


def test_stored_trajectory_gives_the_behaviour_log_probability(shapes_policy):
    """Network calls in another batch shape move the log-probability by less than a tenth of the
    smallest clip in use.
    """
    prompts = [world("shapes").parse("two blue squares")]
    sampler = AllButLast(FlowSDE(0.7))
    result, _ = run(shapes_policy, NoProbe(), sampler=sampler, prompts=prompts, members=3)
    path, step = result.trajectories, torch.tensor([4, 4, 4])
    condition = shapes_policy.encode(prompts).repeat(3)
    timestep = path.schedule.network_timesteps[step]
    with torch.no_grad():
        new = sampler.transition(
            path.nodes[:, 4],
            shapes_policy.velocity(path.nodes[:, 4], timestep, condition),
            path.schedule,
            step,
        )
        old = sampler.transition(path.nodes[:, 4], path.velocities[:, 4], path.schedule, step)
    drift = (log_prob(new, path.nodes[:, 5]) - log_prob(old, path.nodes[:, 5])).abs().max()
    assert float(drift) < 1e-5


def test_evaluation_sampling_is_the_ode(mixture_policy):
    noise = torch.randn(3, 2, 1, 1, generator=torch.Generator().manual_seed(0))
    schedule, condition = mixture_policy.schedule(6), mixture_policy.encode(PROMPTS)
    end = integrate(mixture_policy, schedule, condition, noise, Usage())
    generator = torch.Generator()
    path = rollout(
        mixture_policy, ODE(), schedule, condition, noise, generator, Groups(3, 1)
    ).trajectories
    torch.testing.assert_close(path.images_latent, end)
    assert score(world("mixture").reward("soft"), end, PROMPTS).shape == (3,)


def test_a_rewards_own_weights_get_no_gradients(mixture_policy):
    """A network without `no_grad` would else be differentiated, and its activations kept, with the
    policy.
    """
    weight = torch.nn.Parameter(torch.ones(()))

    class Parts:
        def parts(self, images, prompts):
            return {"one": images.mean((1, 2, 3)) * weight}

        def total(self, parts):
            return 2 * weight * parts["one"]

        def score(self, images, prompts):
            return self.total(self.parts(images, prompts))

    result, _ = run(mixture_policy, NoProbe())
    for reward in (
        FunctionReward(lambda images, prompts: images.mean((1, 2, 3)) * weight),
        Parts(),
    ):
        assert not score_rollout(mixture_policy, reward, result, PROMPTS).total.requires_grad
    assert not score(
        FunctionReward(lambda i, p: weight * torch.ones(len(p))), torch.zeros(3, 1, 1, 1), PROMPTS
    ).requires_grad
