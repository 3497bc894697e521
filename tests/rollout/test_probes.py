"""Cheap probes: what they cost, closed forms, and that only rewards of unfinished states depend on
them.
"""

import math
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import combinations

import pytest
import torch
from all_but_last import AllButLast
from flowrl_bench.probes import SomeMembers

import flowrl.rollout.probing as probing
from flowrl.core.errors import ConfigError, ProbeError
from flowrl.core.types import Condition, Prompt
from flowrl.credit import gains
from flowrl.flow import uniform_schedule
from flowrl.probes import (
    Completion,
    Estimate,
    Key,
    NetworkUse,
    NoProbe,
    Probe,
    Scored,
    Shape,
    Substeps,
    Tweedie,
)
from flowrl.rewards import FunctionReward
from flowrl.rollout import Groups, Usage, group_tree, rollout, score_rollout
from flowrl.samplers import FlowSDE, Windowed, transition_stds
from flowrl.testing import TINY, tiny_sd3_policy
from flowrl.testing.probe import small_policy

PROMPTS = [Prompt("0"), Prompt("90")]
REWARD = FunctionReward(lambda images, prompts: (images.flatten(1) - 0.3).square().mean(1))


class Straight:
    """v depends on the prompt only: the ODE's paths are straight lines."""

    latent_shape, device = (2, 1, 1), torch.device("cpu")

    def schedule(self, steps):
        return uniform_schedule(steps)

    def encode(self, prompts):
        return Condition(
            {"slope": torch.tensor([float(prompt.text) / 90 - 0.3 for prompt in prompts])}
        )

    def velocity(self, latent, timestep, condition):
        return condition.tensors["slope"].view(-1, 1, 1, 1).expand_as(latent).clone()

    def decode(self, latent):
        return latent

    def trainable(self):
        return {}

    def reference(self):
        return nullcontext()

    def frozen(self):
        return nullcontext()


def run(policy, probe, members=4, steps=10, shared=False, sampler=AllButLast(FlowSDE(0.7)), seed=0):
    groups, usage, generator = (
        Groups(len(PROMPTS), members, shared),
        Usage(),
        torch.Generator().manual_seed(seed),
    )
    noise = groups.noise(policy.latent_shape, generator)
    schedule, condition = policy.schedule(steps), policy.encode(PROMPTS)
    return (
        rollout(policy, sampler, schedule, condition, noise, generator, groups, probe, usage),
        usage,
    )


def table_of(policy, probe, **options):
    return score_rollout(policy, REWARD, run(policy, probe, **options)[0], PROMPTS).total


def shape_of(steps=10, members=1, sampler=AllButLast(FlowSDE(0.7)), shared=False):
    schedule = uniform_schedule(steps)
    stds = transition_stds(sampler, schedule)
    tree = group_tree(stds, Groups(1, members, shared), NoProbe(), torch.Generator())
    return Shape(1, schedule, tree, tree.drawn_steps)


@pytest.mark.parametrize(
    ("probe", "nfe", "calls", "images"),
    [
        (NoProbe(), 10, 0, 0),
        (Tweedie(), 10, 0, 9),
        (Substeps(5), 46, 4, 9),
        (Substeps(3, solver="dpm++"), 28, 2, 9),
        (Substeps(5, solver="heun"), 46, 4, 9),
        (Substeps(5, every=2), 30, 4, 5),
        (Substeps(5, every=2, dtype="bfloat16"), 30, 4, 5),
        (Substeps(5, guidance="off"), 28, 4, 9),
        (Completion(), 55, 0, 9),
        (Completion(together=False), 55, 9, 9),
        (Completion(every=2), 35, 0, 5),
        (Completion(solver="unipc", every=2), 35, 9, 5),
        (Completion(solver="heun"), 10 + 2 * 45, 18, 9),
    ],
    ids=repr,
)
def test_costs_of_one_trajectory_of_ten_steps(probe, nfe, calls, images):
    cost = probe.cost(shape_of())
    assert 10 + cost.nfe == pytest.approx(nfe) and cost.images == images
    assert sum(call.step is None for call in cost.calls) == calls


@pytest.mark.parametrize(
    ("probe", "nfe", "images"),
    [
        (SomeMembers(Substeps(5), fraction=0.25), 80 + 2 * 36, 18 + 72),
        (SomeMembers(Substeps(5), fraction=0.25, control="uniform"), 80 + 2 * 36, 18),
        (SomeMembers(Completion()), 80 + 4 * 45, 36 + 72),
        (SomeMembers(Completion(every=3), fraction=0.01), 80 + 9 + 6 + 3, 3 + 24),
    ],
    ids=repr,
)
def test_costs_of_some_members_of_eight(probe, nfe, images):
    cost = probe.cost(shape_of(members=8))
    assert 80 + cost.nfe == nfe and cost.images == images


@pytest.mark.parametrize("solver", ["euler", "heun", "dpm++", "unipc"])
def test_straight_lines_are_exact_for_every_solver(solver):
    policy = Straight()
    for probe in (
        Substeps(3, solver=solver),
        Completion(solver=solver, together=False),
        Completion(solver=solver, every=2),
    ):
        found = run(policy, probe)[0]
        slope = policy.encode(PROMPTS).tensors["slope"].repeat_interleave(4).view(-1, 1, 1, 1)
        assert list(found.estimates) == [*range(9)][:: probe.every]
        for node, end in found.estimates.items():
            assert isinstance(node, int)
            expected = found.trajectories.at(node) - found.trajectories.schedule.times[node] * slope
            torch.testing.assert_close(end.latents, expected, atol=5e-5, rtol=0)


def test_solvers_converge_with_their_order():
    """Mean distances at 3, 33 and 129 evaluations from one node to the end of 2,049: Euler .145
    .0141 .0037, Heun .162 .0041 .0003, DPM-Solver++ .110 .0024 .0004, UniPC .104 .0013 .0001.
    Slopes of log error from 33 to 129: 0.97, 1.97, 1.27, 1.64.
    """
    policy, node = small_policy(NetworkUse()), 3
    for parameter in policy.trainable().values():
        parameter.data.zero_()

    def end(solver, count):
        return (
            run(policy, Substeps(count, solver=solver, every=node), members=32)[0]
            .estimates[node]
            .latents
        )

    exact = end("heun", 2049)
    errors = {
        (solver, count): float((end(solver, count) - exact).flatten(1).norm(dim=1).mean())
        for solver in ("euler", "heun", "dpm++", "unipc")
        for count in (3, 33, 129)
    }
    for solver, low, high in (
        ("euler", 0.9, 1.1),
        ("heun", 1.8, 2.2),
        ("dpm++", 1.1, 2.2),
        ("unipc", 1.4, 2.3),
    ):
        assert (
            low < math.log2(errors[solver, 33] / errors[solver, 129]) / math.log2(129 / 33) < high
        ), (solver, errors)
        assert solver == "euler" or errors[solver, 129] < 0.2 * errors["euler", 129]
    assert (
        max(errors["dpm++", 3], errors["unipc", 3]) < 0.8 * errors["euler", 3] < errors["heun", 3]
    )


def test_the_solution_of_dpm_starts_with_a_step_of_order_one():
    """Two evaluations make two steps of order 1, the same as Euler's: the rollout's previous node
    is not used as history.
    """
    policy = small_policy(NetworkUse())
    euler, multistep = (
        run(policy, Substeps(2, solver=solver))[0].estimates for solver in ("euler", "dpm++")
    )
    for node in range(1, 9):
        torch.testing.assert_close(
            multistep[node].latents, euler[node].latents, atol=1e-4, rtol=1e-4
        )


@pytest.mark.parametrize("probe", [Substeps(3), Completion()], ids=repr)
@pytest.mark.parametrize(
    "sampler",
    [
        AllButLast(FlowSDE(0.7)),
        Windowed(FlowSDE(0.7), range(2, 7)),
        Windowed(FlowSDE(0.7), (1, 2, 4, 5, 8)),
    ],
)
@pytest.mark.parametrize("shared", [False, True])
def test_gains_of_every_second_decision_are_split_evenly(probe, sampler, shared):
    policy = small_policy(NetworkUse())
    options = {"sampler": sampler, "shared": shared}
    whole, thin = (
        table_of(policy, probe, **options),
        table_of(policy, replace(probe, every=2), **options),
    )
    count = whole.shape[-1] - 1
    assert count == (9 if isinstance(sampler, AllButLast) else 5)
    scored = [*range(0, count, 2), count]
    torch.testing.assert_close(thin[..., scored], whole[..., scored], atol=2e-6, rtol=1e-5)
    got = gains(thin)
    torch.testing.assert_close(got.sum(-1), thin[..., -1] - thin[..., 0], atol=1e-5, rtol=0)
    for first in range(0, count - 1, 2):
        torch.testing.assert_close(got[..., first], got[..., first + 1], atol=1e-6, rtol=0)


def scored_subset(full, control, chosen, probe):
    """The values of a probe from tables [prompt, member, decision+1], if `chosen` [prompt, chosen]
    were drawn.

    Decision k starts from node k.
    """
    count = full.shape[-1] - 1
    rewards: dict[Key, torch.Tensor] = {
        node: full[..., node].gather(1, chosen) for node in range(count)
    }
    if probe.control == "tweedie":
        rewards |= {("control", node): control[..., node] for node in range(count)}
    found = probe.rewards(
        Scored(rewards, full[..., -1], range(count), dict.fromkeys(range(count), chosen))
    )
    return torch.stack([*(found[node] for node in range(count)), full[..., -1]], -1)


@pytest.mark.parametrize("control", ["tweedie", "uniform"])
def test_the_mean_over_all_subsets_is_the_full_table(control):
    """Unbiased exactly: every subset of 2 of 5 members is equally likely."""
    generator = torch.Generator().manual_seed(0)
    full, cheap = torch.rand(2, 3, 5, 7, generator=generator, dtype=torch.float64)
    cheap[..., -1] = full[..., -1]
    probe = SomeMembers(Substeps(3), fraction=0.4, control=control)
    subsets = [torch.tensor([subset] * 3) for subset in combinations(range(5), 2)]
    tables = torch.stack([scored_subset(full, cheap, subset, probe) for subset in subsets])
    torch.testing.assert_close(gains(tables.mean(0)), gains(full), atol=1e-12, rtol=0)
    assert torch.equal(tables[..., -1], full[..., -1].expand(len(subsets), -1, -1))
    torch.testing.assert_close(gains(tables[0]).sum(-1), full[..., -1] - tables[0][..., 0])
    same = torch.stack(
        [
            scored_subset(full, full, subset, SomeMembers(Substeps(3), fraction=0.4))
            for subset in subsets
        ]
    )
    torch.testing.assert_close(same, full.expand_as(same))  # a perfect control has no variance


def test_the_uniform_control_grows_evenly_over_the_decisions():
    final, chosen, nodes = torch.tensor([[0.0, 1.0, 2.0, 5.0]]), torch.tensor([[0, 1]]), (1, 2, 6)
    scored = Scored(
        {node: torch.zeros(1, 2) for node in nodes}, final, nodes, dict.fromkeys(nodes, chosen)
    )
    found = SomeMembers(Substeps(3), fraction=0.5, control="uniform").rewards(scored)
    for place, node in enumerate(nodes):  # members 2 and 3 were not drawn; the group's mean is 2
        assert found[node][0, 2:].tolist() == pytest.approx([2.0, 2.0 + place / 3 * 3.0])


def test_drawn_subsets_are_unbiased(monkeypatch):
    """Mean gains of 300 draws against those of all members: 48 z-scores below 6, a false alarm of
    1e-7; the weights matter.
    """
    policy, draws = small_policy(NetworkUse()), 300
    expected = gains(table_of(policy, Substeps(2), steps=6))
    tables = []
    for seed in range(draws):
        monkeypatch.setattr(
            probing, "own_generator", lambda g, seed=seed: torch.Generator().manual_seed(seed)
        )
        tables.append(table_of(policy, SomeMembers(Substeps(2), fraction=0.5), steps=6))
    found = gains(torch.stack(tables))
    error = found.std(0) / draws**0.5
    assert float(((found.mean(0) - expected).abs() / (error + 1e-6)).max()) < 6
    assert float((found[0] - expected).abs().max()) > 1e-3


def test_draws_differ_between_groups_and_iterations():
    probe, policy = SomeMembers(Substeps(2), fraction=0.5), small_policy(NetworkUse())
    members = [run(policy, probe, members=16, seed=seed)[0].estimates[3].members for seed in (0, 1)]
    assert members[0].shape == (2, 8)
    assert not torch.equal(members[0][0], members[0][1]) and not torch.equal(members[0], members[1])


def test_states_that_a_group_shares_are_scored_for_all():
    policy = small_policy(NetworkUse())
    found = run(policy, SomeMembers(Substeps(2), fraction=0.5), shared=True)[0].estimates
    assert (
        found[0].members is None and len(found[0].latents) == 2 and len(found[1].latents) == 2 * 2
    )


CHEAP = [
    Substeps(5),
    Substeps(3, solver="dpm++", every=2),
    Substeps(3, solver="unipc"),
    Substeps(3, dtype="bfloat16"),
    Substeps(4, guidance="off"),
    SomeMembers(Substeps(4), fraction=0.5),
    Completion(guidance="off"),
    SomeMembers(Completion(dtype="bfloat16", solver="heun")),
]


@pytest.mark.parametrize("guidance_gradient", ["both", "prompt"])
def test_trajectories_and_final_rewards_are_the_same_bit_for_bit(guidance_gradient):
    """On SD3's transformer with guidance, for every option; and the network afterwards is what it
    was.
    """
    policy = tiny_sd3_policy(replace(TINY, guidance_scale=3.0, guidance_gradient=guidance_gradient))
    for parameter in policy.trainable().values():
        torch.nn.init.normal_(parameter, std=0.05, generator=torch.Generator().manual_seed(1))
    plain = run(policy, NoProbe(), members=2, steps=4)[0]
    final = score_rollout(policy, REWARD, plain, PROMPTS).total[..., -1]
    x, t, condition = (
        torch.randn(2, *policy.latent_shape),
        torch.full((2,), 500.0),
        policy.encode(PROMPTS),
    )
    trained = policy.velocity(x, t, condition)
    for probe in CHEAP if guidance_gradient == "both" else CHEAP[-4:]:
        found = run(policy, probe, members=2, steps=4)[0]
        for part in ("states", "outputs"):
            assert torch.equal(
                getattr(found.trajectories, part), getattr(plain.trajectories, part)
            ), (probe, part)
        assert torch.equal(score_rollout(policy, REWARD, found, PROMPTS).total[..., -1], final), (
            probe
        )
        assert torch.equal(policy.velocity(x, t, condition), trained), probe
    assert policy.guidance_scale == 3.0


def test_probes_without_guidance_take_the_unguided_velocity():
    policy = tiny_sd3_policy(replace(TINY, guidance_scale=3.0))
    found, usage = run(policy, Substeps(2, guidance="off"), members=2, steps=3)
    path, schedule = found.trajectories, found.trajectories.schedule
    x = path.at(1) - schedule.times[1] / 2 * path.velocities[:, 1]
    with policy.frozen(), policy.guided(1.0):
        velocity = policy.velocity(
            x, (500 * schedule.times[1]).expand(4), policy.encode(PROMPTS).repeat(2)
        )
    torch.testing.assert_close(
        found.estimates[1].latents, x - schedule.times[1] / 2 * velocity, atol=1e-5, rtol=1e-4
    )
    assert usage.nfe == 4 * (3 + 2 * 0.5)  # two decisions


@pytest.mark.parametrize(
    ("probe", "policy", "words"),
    [
        (
            Substeps(guidance="off"),
            "mixture",
            "not applicable, MixturePolicy samples without guidance",
        ),
        (
            Substeps(guidance="off"),
            "sd3",
            "not applicable, PipelinePolicy samples without guidance",
        ),
    ],
)
def test_what_a_policy_does_not_have_is_refused_before_the_first_call(probe, policy, words):
    policy = small_policy(NetworkUse()) if policy == "mixture" else tiny_sd3_policy(TINY)
    setattr(policy, "velocity", None)  # noqa: B010
    with pytest.raises(ConfigError, match=words):
        run(policy, probe)


class InPlace(Probe):
    """Changes what it is given, or returns what is not an estimate."""

    def __init__(self, fault):
        self.fault = fault

    def estimate(self, run):
        return self.fault(run)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (
            lambda run: run.trajectories.states.add_(1.0) is None or {},
            "InPlace.estimate changed its input in place",
        ),
        (
            lambda run: run.trajectories.outputs.mul_(0.9) is None or {},
            "changed its input in place",
        ),
        (lambda run: {0: Estimate(run.final.clamp_(0, 1))}, "changed its input in place"),
        (
            lambda run: {10: Estimate(run.final)},
            (
                r"an estimate of 10; allowed: its nodes, from which decisions start: \[0, 1, 2, 3,"
                r" 4, 5, 6, 7, 8\]"
            ),
        ),
        (lambda run: {"first": Estimate(run.final)}, "an estimate of 'first'"),
        (lambda run: {3: run.final}, "a Tensor for node 3; allowed: Estimate"),
        (lambda run: {3: Estimate(run.final[1:])}, "7, 2, 1, 1.*for node 3; allowed: 2 or 8 rows"),
        (lambda run: {3: Estimate(run.final.flatten(1))}, "8, 2.*for node 3"),
    ],
)
def test_probes_that_break_their_contract_are_named(fault, words):
    with pytest.raises(ProbeError, match=words):
        run(small_policy(NetworkUse()), InPlace(fault))


def test_only_probes_are_probes():
    with pytest.raises(ConfigError, match=r"flowrl\.probes\.Probe"):
        run(small_policy(NetworkUse()), "tweedie")


def test_bfloat16_changes_the_probe_only():
    policy = tiny_sd3_policy(TINY)
    wide, narrow = (
        run(policy, probe, members=2, steps=3)[0]
        for probe in (Substeps(3), Substeps(3, dtype="bfloat16"))
    )
    difference = float((wide.estimates[0].latents - narrow.estimates[0].latents).abs().max())
    assert 1e-5 < difference < 0.1 and narrow.estimates[0].latents.dtype == torch.float32
    assert {parameter.dtype for parameter in policy.transformer.parameters()} == {torch.float32}


@contextmanager
def torch_state():
    before = torch.get_rng_state()
    yield
    assert torch.equal(torch.get_rng_state(), before)


def test_a_probes_draws_move_no_generator():
    """The order of an iteration's mini-batches, drawn next, is the same for every probe."""
    policy, states = small_policy(NetworkUse()), []
    for probe in (NoProbe(), SomeMembers(Substeps(2), fraction=0.5)):
        groups, generator = Groups(2, 4), torch.Generator().manual_seed(3)
        noise = groups.noise(policy.latent_shape, generator)
        with torch_state():
            rollout(
                policy,
                AllButLast(FlowSDE(0.7)),
                policy.schedule(4),
                policy.encode(PROMPTS),
                noise,
                generator,
                groups,
                probe,
            )
        states.append(generator.get_state())
    assert torch.equal(*states)
