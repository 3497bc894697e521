"""Branching rollouts: the minimum of network evaluations, plain groups as special cases, and
updates that share a parent's evaluation.
"""

import pytest
import torch
from rollouts import SDE, Compared, disturbed, rolled

from flowrl.core.errors import ConfigError
from flowrl.core.experience import Credit, Decisions
from flowrl.core.tree import plain_tree, tree_of
from flowrl.credit import StepwiseGain, Uniform
from flowrl.flow import uniform_schedule
from flowrl.flow.gaussian import log_prob
from flowrl.losses import ClippedLoss
from flowrl.methods import Method
from flowrl.probes import Branch, Comb, Completion, NoProbe
from flowrl.rewards import FunctionReward
from flowrl.rollout import log_probs, minibatch_rows, score_rollout, transition_weights
from flowrl.samplers import FixedWindow, FlowSDE, Windowed
from flowrl.training.config import preset
from flowrl.training.trainer import Trainer
from flowrl.worlds.base import PolicyOptions, world

PROMPTS = [world("mixture").parse(f"towards {angle} degrees") for angle in (0, 90, 180)]
REWARD = world("mixture").reward("soft")
ALL = FlowSDE(0.7)


def run(policy, probe, members, steps, sampler=ALL, shared=False):
    options = dict(sampler=sampler, shared=shared, prompts=PROMPTS[:2], seed=3)
    return rolled(policy, probe, members, steps, **options)


COSTS = {
    "branch steps only": (Branch({2: 2, 4: 2, 6: 2}), 24, 10, ALL, 117, 141, 21),
    "BranchGRPO": (Branch({0: 2, 3: 2, 6: 2, 9: 2}), 16, 20, ALL, 203, 219, 203),
    "TreeGRPO": (Branch(3), 27, 10, Windowed(FlowSDE(0.7), range(3)), 202, 229, 13),
    "TempFlow-GRPO": (Comb(6), 60, 10, ALL, 280, 340, 10),
    "Granular-GRPO": (Comb(12, high=8, strides=(1, 2, 3)), 288, 16, ALL, 1892, 2180, 8),
}


@pytest.mark.parametrize("case", COSTS)
def test_every_state_is_stored_and_evaluated_once_in_as_many_calls_as_steps(mixture_policy, case):
    probe, members, steps, sampler, nfe, nodes, training = COSTS[case]
    result, usage = run(mixture_policy, probe, members, steps, sampler)
    path = result.trajectories
    assert (usage.nfe, usage.calls) == (2 * nfe, steps)
    assert (path.states.shape[1], path.outputs.shape[1]) == (nodes, nfe)
    steps = [2, 4, 6] if case == "branch steps only" else None
    valid = torch.ones(2, members, dtype=torch.bool)
    decisions = Decisions.of(path.schedule, path.stds, path.tree, valid, steps)
    weights = decisions.mask.flatten(0, 1).float()
    (rows,) = minibatch_rows([torch.arange(2 * members)], weights, path.tree)
    assert rows.evaluations == 2 * training
    table = score_rollout(mixture_policy, REWARD, result, PROMPTS[:2], usage).total
    assert usage.reward_calls == 2 * members and bool(table.isfinite().all())


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("sampler", [SDE, Windowed(FlowSDE(0.7), range(2, 5))])
def test_plain_groups_and_shared_noise_are_trees_bit_for_bit(mixture_policy, sampler, shared):
    disturbed(mixture_policy)
    plain, spent = run(mixture_policy, NoProbe(), 4, 10, sampler, shared)
    tree, usage = run(mixture_policy, Branch({}), 4, 10, sampler, shared)
    assert torch.equal(plain.trajectories.nodes, tree.trajectories.nodes)
    assert torch.equal(plain.trajectories.velocities, tree.trajectories.velocities)
    assert (spent.nfe, spent.calls) == (usage.nfe, usage.calls)
    path = run(mixture_policy, Completion(), 4, 6, SDE, shared)[0].trajectories
    expected = plain_tree(4, 6, (0, 1, 2, 3, 4), shared)
    assert torch.equal(path.tree.paths, expected.paths) and not path.tree.branched


def test_a_comb_follows_the_ode_from_the_states_it_branches_from(mixture_policy):
    """A member draws once, at its step; before and after it, there are ODE steps."""
    path = run(disturbed(mixture_policy), Comb(1), 10, 10)[0].trajectories
    nodes, velocities = (table.unflatten(0, (2, 10)) for table in (path.nodes, path.velocities))
    for step, delta in enumerate(path.schedule.deltas):
        following = nodes[:, :, step] - delta * velocities[:, :, step]
        off = (nodes[:, :, step + 1] - following).flatten(2).norm(dim=2) > 1e-4
        assert off.nonzero()[:, 1].tolist() == [step, step]


def test_strides_skip_nodes(mixture_policy):
    probe = Comb(2, count=1, low=1, high=2, strides=(1, 3))
    path = run(mixture_policy, probe, 4, 9)[0].trajectories
    tree, times = path.tree, path.schedule.times
    assert tree.node[tree.paths[1]].tolist() == [0, 1, 2, 2, 2, 5, 5, 5, 8, 9]
    assert tree.node[tree.paths[0]].tolist() == list(range(10))
    states, outputs = path.states[:, tree.paths[1]], path.outputs[:, tree.paths[1, :-1]]
    for start, end in ((2, 5), (5, 8), (8, 9)):
        following = states[:, start] - (times[start] - times[end]) * outputs[:, start]
        torch.testing.assert_close(states[:, end], following)
    assert tree.decisions.nonzero().tolist() == [[member, 1] for member in range(4)]


def test_values_are_means_over_the_leaves_behind_a_state(mixture_policy):
    result, _ = run(mixture_policy, Branch({0: 2, 3: 3}), 12, 6)
    table = score_rollout(mixture_policy, REWARD, result, PROMPTS[:2]).total
    final = table[..., -1].view(2, 2, 2, 3)
    for column, axes in ((0, (2, 3)), (2, 3)):
        expected = final.mean(axes, keepdim=True).expand_as(final).reshape(2, 12)
        torch.testing.assert_close(table[..., column], expected)
    assert torch.equal(table[..., 4], table[..., -1])


def test_an_invalid_leaf_is_left_out_of_its_ancestors(mixture_policy):
    def some_invalid(images, prompts):
        scores = REWARD.score(images, prompts)
        scores[5] = float("nan")
        return scores

    reward = FunctionReward(some_invalid, marks_invalid=True)
    result, _ = run(mixture_policy, Branch({0: 2, 3: 3}), 12, 6)
    complete = score_rollout(mixture_policy, REWARD, result, PROMPTS[:2]).total
    found = score_rollout(mixture_policy, reward, result, PROMPTS[:2])
    assert (~found.valid).nonzero().tolist() == [[0, 5]] and bool(found.total[0, 5].isnan().all())
    final = complete[0, :, -1]
    torch.testing.assert_close(found.total[0, 3:5, 2], final[3:5].mean().expand(2))
    torch.testing.assert_close(found.total[0, 0, 0], final[[0, 1, 2, 3, 4]].mean())
    assert torch.equal(found.total[1], complete[1])


METHODS = {
    "gains": StepwiseGain(probe=Branch({0: 2, 3: 3})),
    "edges": StepwiseGain(probe=Branch({0: 2, 3: 3}, weight="edge")),
    "every step": StepwiseGain(probe=Branch(2)),
    "comb": StepwiseGain(probe=Comb(3, count=2, strides=(1, 2))),
}
CONFIG = preset("tiny").apply(
    world="mixture", groups=3, group_size=12, num_steps=6, iterations=3, minibatches=2
)


def trainer_of(rule, config=CONFIG, window=FixedWindow(stop=-1), kind=Trainer):
    method = Method("own", FlowSDE(0.7), window, rule, ClippedLoss())
    return kind(world("mixture").policy(PolicyOptions()), method, REWARD, PROMPTS, config)


def trainer_for(case, config=CONFIG, kind=Trainer):
    window = FixedWindow(1, 3) if case == "every step" else FixedWindow(stop=-1)
    return trainer_of(METHODS[case], config, window, kind)


def trained(trainer, iterations=2):
    rows = [trainer.iteration() for _ in range(iterations)]
    return rows, torch.cat([parameter.detach().flatten() for parameter in trainer.parameters])


@pytest.mark.parametrize("case", METHODS)
def test_neither_chunks_nor_micro_batches_nor_main_memory_change_what_is_trained(case):
    rows, expected = trained(trainer_for(case))
    all_in_chunks = dict(max_batch=7, chunk=2, offload=True, overlap_rewards=True)
    for changes in (dict(micro_batch=5), dict(chunk=1), all_in_chunks):
        again, weights = trained(trainer_for(case, CONFIG.replace(**changes)))
        torch.testing.assert_close(weights, expected, atol=2e-6, rtol=1e-4)
        assert again[0]["reward_mean"] == pytest.approx(rows[0]["reward_mean"], abs=1e-6)
        assert again[0]["nfe"] == rows[0]["nfe"]


@pytest.mark.parametrize("case", ["comb"])
def test_a_run_goes_on_from_a_checkpoint_bit_for_bit(case):
    _, expected = trained(trainer_for(case), 3)
    first, second = trainer_for(case), trainer_for(case)
    trained(first, 1)
    second.restore(first.state())
    assert torch.equal(trained(second, 2)[1], expected)


@pytest.mark.parametrize("case", ["edges", "comb"])
def test_the_update_evaluates_every_parent_once_and_says_so(case):
    trainer = trainer_for(case, CONFIG.replace(minibatches=1))
    rows, original = [], trainer.policy.velocity

    def counted(latent, timestep, condition):
        if torch.is_grad_enabled():
            rows.append(torch.cat([latent.flatten(1), timestep[:, None]], 1))
        return original(latent, timestep, condition)

    trainer.policy.velocity = counted
    row = trainer.iteration()
    seen = torch.cat(rows)
    assert len(seen) == row["train_nfe"] == len(seen.unique(dim=0))
    assert row["train_nfe"] < {"edges": 3 * 12 * 5, "comb": 36}[case]


@pytest.mark.parametrize("case", METHODS)
def test_shared_evaluations_give_the_gradient_of_separate_ones(case):
    """Of one loss over all rows of the mini-batch, each with an evaluation of its own. Every
    decision of every member is in exactly one mini-batch, all of a state's in the same.
    """
    trainer = trainer_for(case, CONFIG.replace(micro_batch=7), Compared)
    row, tree = trainer.iteration(), trainer.tree
    decisions = int((tree.drawn if case == "edges" else tree.decisions).sum())
    assert sum(rows.total for rows in trainer.rows) == pytest.approx(3 * decisions)
    pairs = torch.cat([torch.stack([rows.sample, rows.column], 1) for rows in trainer.rows])
    assert len(pairs) == len(pairs.unique(dim=0))
    assert len(pairs) + row["zero_rows"] == 3 * int(tree.decisions.sum())
    first, second = ({*rows.unit.tolist()} for rows in trainer.rows)
    assert trainer.rows[0].shared and not first & second


def test_on_a_tree_without_branches_the_update_is_the_plain_one():
    plain, tree = (trained(trainer_of(rule)) for rule in (Uniform(), Uniform(probe=Branch({}))))
    torch.testing.assert_close(plain[1], tree[1], atol=1e-7, rtol=1e-5)
    assert plain[0][0]["train_nfe"] == tree[0][0]["train_nfe"] == 36 * 5


class OnlyTheFirstDecision(Uniform):
    def credit(self, experience):
        advantages = self.assign(experience.values, experience.decisions)
        weights = torch.zeros_like(advantages)
        weights[..., 0] = 1.0
        return Credit(advantages, weights)


def test_a_rule_may_leave_transitions_out_of_the_update():
    row = trainer_of(OnlyTheFirstDecision(probe=Branch({0: 2, 3: 3}))).iteration()
    assert row["train_nfe"] == 3 * 2  # of each group the two roots
    assert [share > 0 for share in row["step_shares"]] == [True, False, False, False, False, False]


@pytest.mark.parametrize(
    ("probe", "members", "message"),
    [
        (Branch({0: 2, 2: 2}), 6, "group_size = 6 is not allowed; allowed: a multiple of 4"),
        (Branch({0: 2, 7: 2}), 8, r"Branch.children at steps = \[7\] is not allowed"),
        (Comb(4, count=2), 12, "group_size = 12 is not allowed; allowed: a multiple of 8"),
        (Comb(4, low=6), 12, r"1 or more stochastic steps within \[6, 6\)"),
    ],
)
def test_trees_that_do_not_fit_are_refused(mixture_policy, probe, members, message):
    with pytest.raises(ConfigError, match=message):
        run(mixture_policy, probe, members, 6)


def test_child_means_weigh_children_alike():
    visits = [[(0, 0), (1, "a"), (2, 0)], [(0, 0), (1, "a"), (2, 1)], [(0, 0), (1, "b"), (2, 2)]]
    rewards = torch.tensor([[1.0, 2.0, 6.0]])
    leaf, child = (tree_of(visits, lambda *_: True, mean) for mean in ("leaf", "child"))
    assert leaf.values(rewards)[0].tolist() == [3.0, 1.5, 6.0, 1.0, 2.0, 6.0]
    assert child.values(rewards)[0].tolist() == [3.75, 1.5, 6.0, 1.0, 2.0, 6.0]


@pytest.mark.parametrize("probe", [Branch({0: 2, 3: 3}), Comb(3, count=2), NoProbe()])
def test_log_probabilities_are_those_of_the_draws(mixture_policy, probe):
    path = run(mixture_policy, probe, 12, 6, SDE)[0].trajectories
    found = log_probs(SDE, path)
    assert found.shape == (2, 12, len(path.tree.drawn_steps))
    for column, step in enumerate(path.tree.drawn_steps):
        index, drawn = torch.full((24,), step), path.tree.decisions[:, step]
        given = path.nodes[:, step], path.velocities[:, step], path.schedule, index
        density = log_prob(SDE.transition(*given), path.nodes[:, step + 1]).view(2, 12)
        torch.testing.assert_close(found[:, drawn, column], density[:, drawn])
        assert bool(found[:, ~drawn, column].isnan().all())


@pytest.mark.parametrize(
    "probe", [Branch((1, 1, 2, 1, 2)), Branch((1, 2, 2), weight="edge"), Comb(6, count=1), Comb(4)]
)
def test_minibatches_of_trees_have_about_equally_many_rows_of_all_depths(probe):
    """Most parents are passed by some sample of the first mini-batch; they do not all belong to
    it.
    """
    generator, groups, parts = torch.Generator().manual_seed(0), 400, 4
    branches = isinstance(probe, Branch)
    tree = probe.tree(5, range(5 if branches else 3), 12, branches, generator)
    stds, valid = torch.zeros(5), torch.ones(groups, tree.members, dtype=torch.bool)
    stds[tree.drawn_steps] = 0.5
    decisions = Decisions.of(uniform_schedule(5), stds, tree, valid)
    weights = transition_weights(Credit(torch.ones(decisions.mask.shape)), decisions).flatten(0, 1)
    order = torch.randperm(len(weights), generator=generator)
    rows = minibatch_rows(order.chunk(parts), weights, tree)
    sizes = torch.tensor([len(part) for part in rows]).double()
    assert float((sizes - sizes.mean()).abs().max()) <= 12
    counts = [torch.bincount(part.column, minlength=len(decisions)) for part in rows]
    depths = torch.stack(counts) / sizes.mean()
    assert float((depths - depths.mean(0)).abs().max()) < 0.08
