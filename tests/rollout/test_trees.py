"""Branching rollouts: the minimum of network evaluations, plain groups as special cases, and
updates that share a parent's evaluation.
"""

from dataclasses import replace

import pytest
import torch
from rollouts import DIRECTIONS, SDE, SOFT, Compared, disturbed, rolled
from seeded import seeded
from small_run import TINY_RUN, trainer_of
from torch.testing import assert_close

from flowrl.core.errors import ConfigError
from flowrl.core.experience import Decisions
from flowrl.credit import StepwiseGain
from flowrl.flow import uniform_schedule
from flowrl.flow.gaussian import log_prob
from flowrl.losses import ClippedLoss
from flowrl.methods import Method
from flowrl.probes import Branch, Comb, NoProbe
from flowrl.rewards import FunctionReward
from flowrl.rollout import Groups, log_probs, minibatch_rows, score_rollout
from flowrl.samplers import FixedWindow, FlowSDE, Windowed

ALL = FlowSDE(0.7)


def run(policy, probe, members, steps, sampler=ALL, shared=False):
    options = dict(sampler=sampler, shared=shared, prompts=DIRECTIONS[:2], seed=3)
    return rolled(policy, probe, members, steps, **options)


COSTS = {
    "BranchGRPO": (Branch({0: 2, 3: 2, 6: 2, 9: 2}), 16, 20, ALL, 203, 219, 203),
    "TreeGRPO": (Branch((3, 3, 3)), 27, 10, Windowed(FlowSDE(0.7), range(3)), 202, 229, 13),
    "Granular-GRPO": (Comb(12, high=8, strides=(1, 2, 3)), 288, 16, ALL, 1892, 2180, 8),
}


@pytest.mark.parametrize("case", COSTS)
def test_every_state_is_stored_and_evaluated_once_in_as_many_calls_as_steps(mixture_policy, case):
    probe, members, steps, sampler, nfe, nodes, training = COSTS[case]
    result, usage = run(mixture_policy, probe, members, steps, sampler)
    path = result.trajectories
    assert (usage.nfe, usage.calls) == (2 * nfe, steps)
    assert (path.states.shape[1], path.outputs.shape[1]) == (nodes, nfe)
    valid = torch.ones(2, members, dtype=torch.bool)
    decisions = Decisions.of(path.schedule, path.stds, path.tree, valid)
    weights = decisions.mask.flatten(0, 1).float()
    (rows,) = minibatch_rows([torch.arange(2 * members)], weights, path.tree)
    assert rows.evaluations == 2 * training
    table = score_rollout(mixture_policy, SOFT, result, DIRECTIONS[:2], usage).values
    assert usage.reward_calls == 2 * members and table.isfinite().all()


@pytest.mark.parametrize("sampler", [SDE, Windowed(FlowSDE(0.7), range(2, 5))])
@pytest.mark.parametrize("shared", [False, True])
def test_plain_groups_and_shared_noise_are_trees_bit_for_bit(mixture_policy, sampler, shared):
    disturbed(mixture_policy)
    (plain, spent), (tree, usage) = (
        run(mixture_policy, probe, 4, 6, sampler, shared) for probe in (NoProbe(), Branch({}))
    )
    assert torch.equal(plain.trajectories.nodes, tree.trajectories.nodes)
    assert torch.equal(plain.trajectories.velocities, tree.trajectories.velocities)
    assert spent == usage and not plain.trajectories.tree.branched


@pytest.mark.parametrize("share", [0.25, 0.995])
def test_the_members_noise_has_the_share_in_common(share):
    """Correlation of 4,000 pairs; 4.5 standard errors. Every part of the groups has the same."""
    groups, generator = Groups(4000, 2, share), seeded()
    noise = groups.noise((1,), generator)
    part = groups.part(7, 3).noise((1,), seeded())
    assert torch.equal(part, noise[14:20]) and not groups.one_start
    correlation = torch.corrcoef(noise.view(-1, 2).T)[0, 1]
    assert abs(correlation - share) < 4.5 * (1 - share**2) / 4000**0.5
    assert noise.std() == pytest.approx(1.0, abs=0.05)
    with pytest.raises(ConfigError, match=r"shared_noise = 1\.5 is not allowed"):
        replace(groups, shared_noise=1.5)


def test_strides_skip_nodes(mixture_policy):
    """Both members draw at step 1 only; the second one is finished by ODE steps over 3 nodes."""
    probe = Comb(2, count=1, low=1, high=2, strides=(1, 3))
    path = run(mixture_policy, probe, 4, 9)[0].trajectories
    tree, times = path.tree, path.schedule.times
    assert tree.node[tree.paths[0]].tolist() == list(range(10))
    assert tree.node[tree.paths[1]].tolist() == [0, 1, 2, 2, 2, 5, 5, 5, 8, 9]
    states, outputs = path.states[:, tree.paths[1]], path.outputs[:, tree.paths[1, :-1]]
    for start, end in ((0, 1), (2, 5), (5, 8), (8, 9)):
        following = states[:, start] - (times[start] - times[end]) * outputs[:, start]
        assert_close(states[:, end], following)
    assert tree.decisions.nonzero().tolist() == [[member, 1] for member in range(4)]


def test_values_are_means_over_the_valid_leaves_behind_a_state(mixture_policy):
    result, _ = run(mixture_policy, Branch({0: 2, 3: 3}), 12, 6)
    complete = score_rollout(mixture_policy, SOFT, result, DIRECTIONS[:2]).values
    final = complete[..., -1].view(2, 2, 2, 3)
    for column, axes in ((0, (2, 3)), (2, 3)):
        expected = final.mean(axes, keepdim=True).expand_as(final).reshape(2, 12)
        assert_close(complete[..., column], expected)
    invalid = torch.zeros(24).index_fill(0, torch.tensor(5), torch.nan)
    reward = FunctionReward(lambda *given: SOFT.score(*given) + invalid, marks_invalid=True)
    values = score_rollout(mixture_policy, reward, result, DIRECTIONS[:2])
    assert (~values.valid).nonzero().tolist() == [[0, 5]]
    assert values.values[0, 5].isnan().all() and torch.equal(values.values[1], complete[1])
    assert_close(values.values[0, 0, 0], complete[0, :5, -1].mean())


METHODS = {
    "gains": StepwiseGain(probe=Branch({0: 2, 3: 3})),
    "edges": StepwiseGain(probe=Branch({0: 2, 3: 3}, weight="edge")),
    "comb": StepwiseGain(probe=Comb(3, count=2, strides=(1, 2))),
}
CONFIG = TINY_RUN.replace(groups=3, group_size=12, num_steps=6, minibatches=2, micro_batch=7)


@pytest.mark.parametrize("case", METHODS)
def test_shared_evaluations_give_the_gradient_of_separate_ones(case):
    """Of one loss over all rows of the mini-batch, each with an evaluation of its own. Every
    decision of every member is in exactly one mini-batch, all of a state's in the same.
    """
    method = Method("own", ALL, FixedWindow(stop=-1), METHODS[case], ClippedLoss())
    trainer = trainer_of(CONFIG, method, SOFT, kind=Compared)
    row, tree = trainer.iteration(), trainer.tree
    decisions = int((tree.drawn if case == "edges" else tree.decisions).sum())
    assert sum(rows.total for rows in trainer.rows) == pytest.approx(3 * decisions)
    pairs = torch.cat([torch.stack([rows.sample, rows.column], 1) for rows in trainer.rows])
    assert len(pairs) == len(pairs.unique(dim=0))
    assert len(pairs) + row["zero_rows"] == 3 * int(tree.decisions.sum())
    first, second = ({*rows.unit.tolist()} for rows in trainer.rows)
    assert not first & second


def test_a_comb_without_a_step_is_refused(mixture_policy):
    with pytest.raises(ConfigError, match=r"1 or more stochastic steps within \[6, 6\)"):
        run(mixture_policy, Comb(4, low=6), 12, 6)


@pytest.mark.parametrize("probe", [Branch({0: 2, 3: 3}), Comb(3, count=2)])
def test_log_probabilities_are_those_of_the_draws(mixture_policy, probe):
    path = run(mixture_policy, probe, 12, 6, SDE)[0].trajectories
    densities = log_probs(SDE, path)
    for column, step in enumerate(path.tree.drawn_steps):
        given = path.nodes[:, step], path.velocities[:, step], path.schedule
        gaussian = SDE.transition(*given, torch.full((24,), step))
        drawn = path.tree.decisions[:, step].expand(2, -1)
        expected = log_prob(gaussian, path.at(step + 1)).view(2, 12).where(drawn, torch.nan)
        assert_close(densities[..., column], expected, equal_nan=True)


@pytest.mark.parametrize(("probe", "shared"), [(Branch((1, 1, 2, 1, 2)), True), (Comb(4), False)])
def test_minibatches_of_trees_have_about_equally_many_rows_of_all_depths(probe, shared):
    """Most parents are passed by some sample of the first mini-batch; they do not all belong to
    it.
    """
    generator, groups = seeded(), 400
    tree = probe.tree(5, range(5 if shared else 3), 12, shared, generator)
    stds, valid = torch.zeros(5), torch.ones(groups, tree.members, dtype=torch.bool)
    stds[tree.drawn_steps] = 0.5
    weights = Decisions.of(uniform_schedule(5), stds, tree, valid).mask.flatten(0, 1).float()
    order = torch.randperm(len(weights), generator=generator)
    rows = minibatch_rows(order.chunk(4), weights, tree)
    mean = sum(map(len, rows)) / 4
    assert all(abs(len(part) - mean) <= 12 for part in rows)
    counts = [torch.bincount(part.column, minlength=weights.shape[1]) for part in rows]
    depths = torch.stack(counts) / mean
    assert (depths - depths.mean(0)).abs().max() < 0.08
    # and rows of most groups
    assert all(len((part.sample // tree.members).unique()) > groups / 2 for part in rows)
