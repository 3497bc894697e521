"""Cheap probes: what they cost, closed forms, and that only values of unfinished states depend on
them.
"""

from dataclasses import replace

import pytest
import torch
from rollouts import PROMPTS, SDE, rolled, valued
from seeded import rand
from torch.testing import assert_close

from flowrl.bench.probes import SomeMembers
from flowrl.core.errors import ConfigError, ProbeError
from flowrl.credit import gains
from flowrl.probes import Completion, NetworkUse, NoProbe, Probe, Scored, Substeps
from flowrl.samplers import FlowSDE, Windowed
from flowrl.testing import TINY, tiny_sd3_policy
from flowrl.testing.probe import small_policy


@pytest.fixture
def policy():
    return small_policy(NetworkUse())


@pytest.mark.parametrize(
    ("probe", "sampler", "count"),
    [(Substeps(3), SDE, 9), (Completion(), Windowed(FlowSDE(0.7), (1, 2, 4, 5, 8)), 5)],
    ids=repr,
)
def test_gains_of_every_second_decision_are_split_evenly(policy, probe, sampler, count):
    complete, thin = (
        valued(policy, replace(probe, every=every), sampler=sampler) for every in (1, 2)
    )
    assert complete.shape[-1] == thin.shape[-1] == count + 1
    scored = [*range(0, count, 2), count]
    assert_close(thin[..., scored], complete[..., scored], atol=2e-6, rtol=1e-5)
    first, second = gains(thin)[..., : count - count % 2].unflatten(-1, (-1, 2)).unbind(-1)
    assert_close(first, second, atol=1e-6, rtol=0)


@pytest.mark.parametrize("control", ["tweedie", "uniform"])
def test_the_mean_over_all_orders_of_the_members_is_the_full_table(policy, control):
    """Unbiased exactly: each of 5 members is equally often among the first 2. A perfect control has
    no variance; the uniform one grows evenly over the decisions. A shared state is scored for all.
    """
    full, cheap = rand(2, 3, 5, 7).double()
    probe, nodes = SomeMembers(Substeps(3), fraction=0.4, control=control), (1, 2, 4, 5, 8, 9)

    def table(full, cheap):
        rewards = {("some", node): full[:, :2, k] for k, node in enumerate(nodes)}
        rewards |= {("control", node): cheap[..., k] for k, node in enumerate(nodes)}
        values = probe.rewards(Scored(rewards, full[..., -1], nodes))
        return torch.stack([*(values[node] for node in nodes), full[..., -1]], -1)

    tables = [table(full.roll(n, 1), cheap.roll(n, 1)).roll(-n, 1) for n in range(5)]
    assert_close(torch.stack(tables).mean(0), full, atol=1e-12, rtol=0)
    if control == "tweedie":
        assert_close(table(full, full), full)
    else:
        full[..., :-1] = 0  # of members 0 and 1; the others rise to their final reward
        mean, steps = full[..., -1:].mean(1, keepdim=True), torch.arange(6) / 6
        expected = mean + (full[:, 2:, -1:] - mean) * steps
        assert_close(table(full, cheap)[:, 2:, :6], expected)
    latents = rolled(policy, replace(probe, fraction=0.01), shared=True)[0].estimates
    assert len(latents[0]) == len(latents["some", 1]) == len(PROMPTS)  # 1 of 4 members


def test_probes_without_guidance_take_the_unguided_velocity():
    policy = tiny_sd3_policy(replace(TINY, guidance_scale=3.0))
    result, usage = rolled(policy, Substeps(2, guidance="off"), members=2, steps=3)
    path, half = result.trajectories, result.trajectories.schedule.times[1] / 2
    x, condition = path.at(1) - half * path.velocities[:, 1], policy.encode(PROMPTS).repeat(2)
    with policy.frozen(), policy.guided(1.0):
        expected = x - half * policy.velocity(x, (1000 * half).expand(4), condition)
    assert_close(result.estimates[1], expected, atol=1e-5, rtol=1e-4)
    assert usage.nfe == 4 * (3 + 2 * 0.5)  # two decisions


@pytest.mark.parametrize("name", ["mixture", "sd3"])
def test_guidance_that_a_policy_does_not_have_is_refused_before_the_first_call(name, policy):
    policy = policy if name == "mixture" else tiny_sd3_policy(TINY)
    setattr(policy, "velocity", None)  # noqa: B010
    with pytest.raises(ConfigError, match="samples without guidance"):
        rolled(policy, Substeps(guidance="off"))


class Own(Probe):
    """Estimates by a function of the probe's input."""

    def __init__(self, estimate):
        self.estimate = estimate


def test_draws_differ_between_groups_and_iterations_and_move_no_generator(policy):
    """The order of an iteration's mini-batches, drawn next, is the same for every probe."""
    draws, states, before = [], [], torch.get_rng_state()
    for probe in (NoProbe(), Own(lambda run: draws.append(run.rand(8)) or {})):
        for seed in (0, 1):
            generator = torch.Generator()
            rolled(policy, probe, steps=3, generator=generator, seed=seed)
            states.append(generator.get_state())
    assert len(torch.cat(draws).unique(dim=0)) == 2 * len(PROMPTS)
    assert torch.equal(torch.stack(states[:2]), torch.stack(states[2:]))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (lambda run: {10: run.final}, r"for 10; allowed: .*nodes \[0, 1, 2, 3, 4, 5, 6, 7, 8\]"),
        (lambda run: {3: [run.final]}, "list for 3; allowed: latents of"),
        (lambda run: {3: run.final[1:]}, "7, 2, 1, 1.* for 3; .*2, 2.*8, 2"),
    ],
)
def test_probes_that_break_their_contract_are_named(policy, fault, words):
    with pytest.raises(ProbeError, match=words):
        rolled(policy, Own(fault))


def test_bfloat16_changes_the_probe_only():
    policy = tiny_sd3_policy(TINY)
    wide, narrow = (
        rolled(policy, Substeps(2, dtype=dtype), members=2, steps=2)[0].estimates[0]
        for dtype in ("own", "bfloat16")
    )
    assert 1e-5 < (wide - narrow).abs().max() < 0.1 and narrow.dtype == torch.float32
    assert {parameter.dtype for parameter in policy.transformer.parameters()} == {torch.float32}
