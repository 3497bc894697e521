"""Branching rollouts: the minimum of network evaluations, plain groups as special cases, and
updates that share a parent's evaluation.
"""

import pytest
import torch
from all_but_last import AllButLast

from flowrl.core.errors import ConfigError
from flowrl.core.experience import Credit, Decisions
from flowrl.core.tree import plain_tree, tree_of
from flowrl.credit import StepwiseGain, Uniform
from flowrl.distributed import Distributed
from flowrl.flow import uniform_schedule
from flowrl.flow.gaussian import log_prob
from flowrl.losses import ClippedLoss, PolicyGradientLoss
from flowrl.methods import Method
from flowrl.probes import Branch, Comb, Completion, NoProbe
from flowrl.rewards import FunctionReward
from flowrl.rollout import (
    Groups,
    LossBatches,
    Usage,
    log_probs,
    minibatch_rows,
    rollout,
    score_rollout,
    transition_weights,
)
from flowrl.rollout.batches import _micro_batch
from flowrl.rollout.collector import Collector
from flowrl.samplers import FixedWindow, FlowSDE, Windowed
from flowrl.training.config import preset
from flowrl.training.trainer import Trainer
from flowrl.worlds.base import PolicyOptions, world

PROMPTS = [world("mixture").parse(f"towards {angle} degrees") for angle in (0, 90, 180)]
REWARD = world("mixture").reward("soft")
ALL = FlowSDE(0.7)


def run(policy, probe, members, steps, sampler=ALL, shared=False, prompts=2, max_batch=10_000):
    groups, usage = Groups(prompts, members, shared), Usage()
    generator = torch.Generator().manual_seed(3)
    noise = groups.noise(policy.latent_shape, generator)
    schedule, condition = policy.schedule(steps), policy.encode(PROMPTS[:prompts])
    return (
        rollout(
            policy, sampler, schedule, condition, noise, generator, groups, probe, usage, max_batch
        ),
        usage,
    )


def disturbed(policy):
    for parameter in policy.trainable().values():
        torch.nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(1))
    return policy


COSTS = {
    "three roots": (Branch({2: 2, 4: 2, 6: 2}), 24, 10, ALL, 117, 141, 117),
    "branch steps only": (Branch({2: 2, 4: 2, 6: 2}), 24, 10, ALL, 117, 141, 21),
    "BranchGRPO": (Branch({0: 2, 3: 2, 6: 2, 9: 2}), 16, 20, ALL, 203, 219, 203),
    "TreeGRPO": (Branch(3), 27, 10, Windowed(FlowSDE(0.7), range(3)), 202, 229, 13),
    "shared noise": (Branch({0: 24}), 24, 10, ALL, 217, 241, 217),
    "comb of one branch": (Comb(1), 10, 10, ALL, 55, 65, 10),
    "TempFlow-GRPO": (Comb(6), 60, 10, ALL, 280, 340, 10),
    "Granular-GRPO": (Comb(12, high=8), 96, 16, ALL, 1112, 1208, 8),
    "Granular-GRPO, three strides": (
        Comb(12, high=8, strides=(1, 2, 3)),
        288,
        16,
        ALL,
        1892,
        2180,
        8,
    ),
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


def test_plain_groups_and_shared_noise_are_trees_bit_for_bit(mixture_policy):
    disturbed(mixture_policy)
    for sampler in (AllButLast(FlowSDE(0.7)), Windowed(FlowSDE(0.7), range(2, 5))):
        for shared, probe in ((False, Branch({})), (True, Branch({}))):
            plain, spent = run(mixture_policy, NoProbe(), 4, 10, sampler, shared)
            tree, usage = run(mixture_policy, probe, 4, 10, sampler, shared)
            assert torch.equal(plain.trajectories.nodes, tree.trajectories.nodes)
            assert torch.equal(plain.trajectories.velocities, tree.trajectories.velocities)
            assert (spent.nfe, spent.calls) == (usage.nfe, usage.calls)


def test_a_comb_with_one_branch_a_step_has_the_completions_of_the_states_it_branches_from(
    mixture_policy,
):
    disturbed(mixture_policy)
    comb = run(mixture_policy, Comb(1), 10, 10)[0]
    path, schedule = comb.trajectories, comb.trajectories.schedule
    rows = mixture_policy.encode(PROMPTS[:2])
    with torch.no_grad():
        for member in range(10):
            x = path.nodes.unflatten(0, (2, 10))[:, member, member + 1]
            for i in range(member + 1, 10):
                x = x - schedule.deltas[i] * mixture_policy.velocity(
                    x, schedule.network_timesteps[i].expand(2), rows
                )
            torch.testing.assert_close(
                path.at(10).unflatten(0, (2, 10))[:, member], x, atol=2e-5, rtol=1e-4
            )
        trunk = path.nodes.unflatten(0, (2, 10))[:, 9]  # the last member follows the trunk longest
        for i in range(9):
            velocity = mixture_policy.velocity(
                trunk[:, i], schedule.network_timesteps[i].expand(2), rows
            )
            torch.testing.assert_close(
                trunk[:, i + 1], trunk[:, i] - schedule.deltas[i] * velocity, atol=2e-5, rtol=1e-4
            )


def test_strides_skip_nodes(mixture_policy):
    path = run(mixture_policy, Comb(2, count=1, low=1, high=2, strides=(1, 3)), 4, 9)[
        0
    ].trajectories
    tree, schedule = path.tree, path.schedule
    by_three = tree.node[tree.paths[1]].tolist()
    assert by_three == [0, 1, 2, 2, 2, 5, 5, 5, 8, 9] and tree.node[tree.paths[0]].tolist() == list(
        range(10)
    )
    states, outputs = path.states[:, tree.paths[1]], path.outputs[:, tree.paths[1, :-1]]
    for start, end in ((2, 5), (5, 8), (8, 9)):
        length = schedule.times[start] - schedule.times[end]
        torch.testing.assert_close(states[:, end], states[:, start] - length * outputs[:, start])
    assert tree.decisions.nonzero().tolist() == [[member, 1] for member in range(4)]


def test_values_are_means_over_the_leaves_behind_a_state(mixture_policy):
    result, _ = run(mixture_policy, Branch({0: 2, 3: 3}), 12, 6)
    table = score_rollout(mixture_policy, REWARD, result, PROMPTS[:2]).total
    final = table[..., -1].view(2, 2, 2, 3)
    expected = final.mean((2, 3), keepdim=True).expand_as(final).reshape(2, 12)
    torch.testing.assert_close(table[..., 0], expected)
    torch.testing.assert_close(
        table[..., 2], final.mean(3, keepdim=True).expand_as(final).reshape(2, 12)
    )
    assert torch.equal(table[..., 4], table[..., -1])


def test_an_invalid_leaf_is_left_out_of_its_ancestors(mixture_policy):
    def some_invalid(images, prompts):
        scores = REWARD.score(images, prompts)
        scores[5] = float("nan")
        return scores

    reward = FunctionReward(some_invalid, marks_invalid=True)
    result, _ = run(mixture_policy, Branch({0: 2, 3: 3}), 12, 6)
    whole = score_rollout(mixture_policy, REWARD, result, PROMPTS[:2]).total
    found = score_rollout(mixture_policy, reward, result, PROMPTS[:2])
    assert (~found.valid).nonzero().tolist() == [[0, 5]] and bool(found.total[0, 5].isnan().all())
    final = whole[0, :, -1]
    torch.testing.assert_close(found.total[0, 3:5, 2], final[3:5].mean().expand(2))
    torch.testing.assert_close(found.total[0, 0, 0], final[[0, 1, 2, 3, 4]].mean())
    assert torch.equal(found.total[1], whole[1])


METHODS = {
    "gains": StepwiseGain(probe=Branch({0: 2, 3: 3})),
    "uniform": Uniform(probe=Branch({0: 2, 3: 3})),
    "edges": StepwiseGain(probe=Branch({0: 2, 3: 3}, weight="edge")),
    "every step": StepwiseGain(probe=Branch(2)),
    "comb": StepwiseGain(probe=Comb(3, count=2, strides=(1, 2))),
}
CONFIG = preset("tiny").apply(
    world="mixture",
    task="direction",
    groups=3,
    group_size=12,
    num_steps=6,
    iterations=3,
    minibatches=2,
)


def trainer_for(case, config=CONFIG, reward=REWARD, loss=None):
    window = FixedWindow(1, 3) if case == "every step" else FixedWindow(stop=-1)
    method = Method(case, FlowSDE(0.7), window, METHODS[case], loss or ClippedLoss())
    policy = world("mixture").policy(PolicyOptions())
    return Trainer(policy, method, reward, PROMPTS, config)


def trained(trainer, iterations=2):
    rows = [trainer.iteration() for _ in range(iterations)]
    return rows, torch.cat([parameter.detach().flatten() for parameter in trainer.parameters])


@pytest.mark.parametrize("case", METHODS)
def test_neither_chunks_nor_micro_batches_nor_main_memory_change_what_is_trained(case):
    _, expected = trained(trainer_for(case))
    for changes in (
        dict(micro_batch=5),
        dict(chunk=1),
        dict(max_batch=7, chunk=2, offload=True, overlap_rewards=True),
    ):
        _, found = trained(trainer_for(case, CONFIG.replace(**changes)))
        torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("case", METHODS)
def test_a_run_goes_on_from_a_checkpoint_bit_for_bit(case):
    _, expected = trained(trainer_for(case), 3)
    first, second = trainer_for(case), trainer_for(case)
    trained(first, 1)
    second.restore(first.state())
    assert torch.equal(trained(second, 2)[1], expected)


@pytest.mark.parametrize("case", METHODS)
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
    assert row["train_nfe"] < {"every step": 72, "comb": 36}.get(case, 3 * 12 * 5)


@pytest.mark.parametrize("case", METHODS)
def test_shared_evaluations_give_the_gradient_of_separate_ones(case, mixture_policy):
    disturbed(mixture_policy)
    trainer = trainer_for(case)
    groups, generator = trainer.groups, torch.Generator().manual_seed(0)
    noise = groups.noise(mixture_policy.latent_shape, generator)
    condition = mixture_policy.encode(PROMPTS)
    result = rollout(
        mixture_policy,
        trainer.draw_sampler(),
        trainer.schedule,
        condition,
        noise,
        generator,
        groups,
        trainer.method.credit.probe,
    )
    tree = result.trajectories.tree
    path, valid = result.trajectories, torch.ones(3, 12, dtype=torch.bool)
    decisions = Decisions.of(path.schedule, path.stds, tree, valid)
    advantages = torch.randn(3, 12, len(decisions), generator=generator)
    weights = transition_weights(Credit(advantages), decisions).flatten(0, 1)
    batches = LossBatches(
        mixture_policy, trainer.draw_sampler(), result, condition, advantages.flatten(0, 1), weights
    )
    order = torch.randperm(36, generator=generator)
    parts = minibatch_rows(order.chunk(2), weights, tree)

    def gradient(weighted):
        loss = sum(weight * PolicyGradientLoss().loss(batch).loss for weight, batch in weighted)
        return torch.cat(
            [
                g.flatten()
                for g in torch.autograd.grad(loss, list(mixture_policy.trainable().values()))
            ]
        )

    shared, separate = [], []
    for rows in parts:
        for piece in rows.pieces(7):
            micro = _micro_batch(piece, 0, piece.evaluated / rows.total)
            assert piece.evaluations <= 7 and len(micro.shared[0]) == piece.evaluations
            shared.append((micro.weight, batches.of(micro.sample, micro.column, micro.shared)))
        separate.append((1.0, batches.of(rows.sample, rows.column)))
    torch.testing.assert_close(gradient(shared), gradient(separate), atol=1e-6, rtol=1e-4)
    # Every decision of every member is in exactly one mini-batch; in "edges" those of a state weigh
    # 1 together.
    pairs = torch.cat([torch.stack([p.sample, p.column], 1) for p in parts])
    assert len(pairs) == len(pairs.unique(dim=0)) == 3 * int(tree.decisions.sum())
    total = sum(one.total for one in parts)
    assert total == pytest.approx(
        3 * int((tree.drawn if case == "edges" else tree.decisions).sum())
    )
    parents = [
        set(
            (
                tree.paths[p.sample % 12, decisions.step[p.column]] + tree.units * (p.sample // 12)
            ).tolist()
        )
        for p in parts
    ]
    assert not parents[0] & parents[1]


def test_on_a_tree_without_branches_the_update_is_the_plain_one():
    rows, expected = trained(trainer_for("gains", CONFIG, loss=ClippedLoss()), 1)
    plain = Trainer(
        world("mixture").policy(PolicyOptions()),
        Method("plain", FlowSDE(0.7), FixedWindow(stop=-1), Uniform(), ClippedLoss()),
        REWARD,
        PROMPTS,
        CONFIG,
    )
    tree = Trainer(
        world("mixture").policy(PolicyOptions()),
        Method(
            "tree", FlowSDE(0.7), FixedWindow(stop=-1), Uniform(probe=Branch({})), ClippedLoss()
        ),
        REWARD,
        PROMPTS,
        CONFIG,
    )
    first, second = trained(plain), trained(tree)
    torch.testing.assert_close(first[1], second[1], atol=1e-7, rtol=1e-5)
    assert first[0][0]["train_nfe"] == second[0][0]["train_nfe"] == 36 * 5
    assert rows[0]["train_nfe"] < 36 * 5 and not torch.equal(expected, second[1])


class OnlyTheFirstDecision(Uniform):
    def credit(self, experience):
        advantages = self.assign(experience.values, experience.decisions)
        weights = torch.zeros_like(advantages)
        weights[..., 0] = 1.0
        return Credit(advantages, weights)


def test_a_rule_may_leave_transitions_out_of_the_update():
    rule = OnlyTheFirstDecision(probe=Branch({0: 2, 3: 3}))
    method = Method("first", FlowSDE(0.7), FixedWindow(stop=-1), rule, ClippedLoss())
    trainer = Trainer(world("mixture").policy(PolicyOptions()), method, REWARD, PROMPTS, CONFIG)
    row = trainer.iteration()
    assert row["train_nfe"] == 3 * 2  # of each group the two roots
    assert [share > 0 for share in row["step_shares"]] == [True, False, False, False, False, False]


def test_the_steps_of_a_comb_are_drawn_once_for_all_groups_and_chunks(mixture_policy):
    probe, members = Comb(2, count=1), 4
    seen = []
    for chunk in (0, 1, 2):
        groups, generator = Groups(3, members), torch.Generator().manual_seed(0)
        noise = groups.noise(mixture_policy.latent_shape, generator)
        collector = Collector(
            mixture_policy,
            REWARD,
            mixture_policy.schedule(6),
            groups,
            probe,
            Distributed(),
            100,
            chunk,
        )
        condition = mixture_policy.encode(PROMPTS)
        found = collector.collect(
            PROMPTS, condition, noise, ALL, generator, Usage(), lambda phase: None
        )
        seen.append(
            (
                found.rollout.trajectories.nodes,
                found.values.total,
                found.rollout.trajectories.tree.paths,
            )
        )
    for other in seen[1:]:
        assert torch.equal(seen[0][2], other[2])
        torch.testing.assert_close(seen[0][0], other[0])
        torch.testing.assert_close(seen[0][1], other[1])


WRONG = {
    "group size": (
        Branch({0: 2, 2: 2}),
        6,
        r"group_size = 6 is not allowed; allowed: a multiple of 4",
    ),
    "step": (
        Branch({0: 2, 7: 2}),
        8,
        r"Branch.children at steps = \[7\] is not allowed; allowed: stochastic steps",
    ),
    "comb's size": (
        Comb(4, count=2),
        12,
        r"group_size = 12 is not allowed; allowed: a multiple of 8",
    ),
    "comb's steps": (Comb(4, low=6), 12, r"1 or more stochastic steps within \[6, 6\)"),
}


@pytest.mark.parametrize("case", WRONG)
def test_trees_that_do_not_fit_are_refused(mixture_policy, case):
    probe, members, message = WRONG[case]
    with pytest.raises(ConfigError, match=message):
        run(mixture_policy, probe, members, 6)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Branch({0: 0}),
        lambda: Branch(0),
        lambda: Branch({-1: 2}),
        lambda: Branch(weight="leaves"),
        lambda: Comb(0),
        lambda: Comb(high=0),
        lambda: Comb(strides=()),
        lambda: Comb(strides=(1, 1)),
        lambda: Comb(count=0),
    ],
)
def test_bad_options_are_refused(make):
    with pytest.raises(ConfigError, match=r"Branch|Comb"):
        make()


def test_child_means_weigh_children_alike():
    visits = [[(0, 0), (1, "a"), (2, 0)], [(0, 0), (1, "a"), (2, 1)], [(0, 0), (1, "b"), (2, 2)]]
    rewards = torch.tensor([[1.0, 2.0, 6.0]])
    leaf, child = (tree_of(visits, lambda *_: True, mean) for mean in ("leaf", "child"))
    assert leaf.values(rewards)[0].tolist() == [3.0, 1.5, 6.0, 1.0, 2.0, 6.0]
    assert child.values(rewards)[0].tolist() == [3.75, 1.5, 6.0, 1.0, 2.0, 6.0]


def test_probes_other_than_branches_keep_the_plain_tree(mixture_policy):
    for shared in (False, True):
        path = run(mixture_policy, Completion(), 4, 6, AllButLast(FlowSDE(0.7)), shared)[
            0
        ].trajectories
        expected = plain_tree(4, 6, (0, 1, 2, 3, 4), shared)
        assert torch.equal(path.tree.paths, expected.paths) and not path.tree.branched


def test_log_probabilities_are_those_of_the_draws(mixture_policy):
    for probe in (Branch({0: 2, 3: 3}), Comb(3, count=2), NoProbe()):
        result, _ = run(mixture_policy, probe, 12, 6, AllButLast(FlowSDE(0.7)))
        path, sampler = result.trajectories, AllButLast(FlowSDE(0.7))
        found = log_probs(sampler, path)
        assert found.shape == (2, 12, len(path.tree.drawn_steps))
        for column, step in enumerate(path.tree.drawn_steps):
            index = torch.full((24,), step)
            gaussian = sampler.transition(
                path.nodes[:, step], path.velocities[:, step], path.schedule, index
            )
            density = log_prob(gaussian, path.nodes[:, step + 1]).view(2, 12)
            drawn = path.tree.decisions[:, step]
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
    tree = probe.tree(
        5, range(3 if isinstance(probe, Comb) else 5), 12, isinstance(probe, Branch), generator
    )
    stds = torch.zeros(5)
    stds[tree.drawn_steps] = 0.5
    valid = torch.ones(groups, tree.members, dtype=torch.bool)
    decisions = Decisions.of(uniform_schedule(5), stds, tree, valid)
    weights = transition_weights(Credit(torch.ones(decisions.mask.shape)), decisions).flatten(0, 1)
    order = torch.randperm(len(weights), generator=generator)
    rows = minibatch_rows(order.chunk(parts), weights, tree)
    sizes = torch.tensor([len(one) for one in rows]).double()
    assert float((sizes - sizes.mean()).abs().max()) <= 12
    depths = (
        torch.stack([torch.bincount(one.column, minlength=len(decisions)) for one in rows])
        / sizes.mean()
    )
    assert float((depths - depths.mean(0)).abs().max()) < 0.08
