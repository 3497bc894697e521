"""The true advantage of each decision of a trajectory by continuations, and a rule's credit on the
same trajectories.

The truth is A*(k) = Q(x, x') - V(x) = V(x') - V(x) of the transition x -> x' that decision k draws:
V(x) is the expected final reward when the *stochastic* sampler continues from x under the current
policy. V is estimated by Monte Carlo continuation, so every A* has a standard error, and
correlations are corrected for it (`flowrl.bench.true_advantage`).

In a branched tree (`flowrl.core.tree`) the truth belongs to the edge into each state that was
drawn: A* = V(child) - V(parent). A distinct state is continued once, however many members pass it,
and
an edge counts in the agreement as it does in the update.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from flowrl.bench.gradients import Setting, assigned
from flowrl.core.errors import require
from flowrl.core.experience import CreditTable, Decisions, ValueTable
from flowrl.core.protocols import CreditAssigner, RewardModel
from flowrl.core.tree import Tree
from flowrl.probes import NoProbe, Probe
from flowrl.rollout import Groups, Rollout, Usage, Walk, score

MAX_BATCH = 8192
"""Latents per network call."""


@dataclass(frozen=True)
class TrueAdvantages:
    """`values` [prompt, member, decision] estimates A*, `errors` are its standard errors; `steps`
    are the decisions' steps.

    `state_values` [prompt, member, decision+1] estimates V with standard errors `state_errors` (0
    for the finished image's reward); NaN for states of a tree from which no decision starts.
    `weights` [prompt, member, decision] are the counts of the decisions: in a branched tree 0 if a
    member's transition was not drawn, else 1 (weight "leaf") or 1 / the members that share the edge
    ("edge"). None: every decision once.
    """

    values: CreditTable
    errors: CreditTable
    state_values: ValueTable
    state_errors: ValueTable
    steps: tuple[int, ...]
    weights: CreditTable | None = None


def true_advantages(
    setting: Setting,
    trajectories: Rollout,
    continuations: int = 128,
    seed: int = 0,
    usage: Usage | None = None,
) -> TrueAdvantages:
    """A* of every decision of `trajectories` by `continuations` independent stochastic
    continuations from each one's start.

    V of a state is the mean reward of its continuations, with standard error std /
    sqrt(continuations); after the last decision it is the reward itself. The two states of a
    decision have separate continuations, so their squared errors add. In a branched tree distinct
    states are continued, those that a decision starts from or leads to. Raises `ConfigError` for
    fewer than two continuations.
    """
    if trajectories.trajectories.tree.branched:
        _require_two(continuations)
        return _on_a_tree(setting, trajectories, continuations, seed, usage or Usage())
    rewards = continuation_rewards(
        setting, trajectories, continuations, setting.reward, seed, usage
    )
    return from_continuations(rewards, trajectories)


def _require_two(continuations: int) -> None:
    require(
        continuations >= 2,
        "continuations",
        continuations,
        "2 or more: a standard error needs a spread",
    )


def walk_of(setting: Setting, groups: Groups, seed: int, usage: Usage | None) -> Walk:
    """The sampler on the groups, which continues from any state."""
    condition, generator = setting.policy.encode(setting.prompts), torch.Generator()
    return Walk(
        setting.policy,
        setting.sampler,
        setting.schedule,
        setting.stds.cpu(),
        condition,
        groups,
        generator.manual_seed(seed),
        usage or Usage(),
        MAX_BATCH,
    )


def continuation_rewards(
    setting: Setting,
    trajectories: Rollout,
    continuations: int,
    reward: RewardModel,
    seed: int = 0,
    usage: Usage | None = None,
) -> Float[Tensor, "sample column continuation"]:
    """Scores of `continuations` stochastic continuations from every decision's start.

    In the last column, all entries are the score of the finished image. Not for branched trees.
    Raises `ConfigError` for fewer than two continuations.
    """
    _require_two(continuations)
    groups, path, policy = trajectories.groups, trajectories.trajectories, setting.policy
    prompts = [prompt for prompt in setting.prompts for _ in range(groups.members)]
    owners = [prompt for prompt in prompts for _ in range(continuations)]
    walk, steps = walk_of(setting, groups, seed, usage), path.tree.drawn_steps
    scores = torch.zeros(groups.samples, len(steps) + 1, continuations)
    with policy.frozen(), torch.no_grad():
        scores[:, -1] = score(reward, policy.decode(path.images_latent), prompts).total[:, None]
        for column, step in reversed(list(enumerate(steps))):
            images = policy.decode(
                walk.continued(path.at(step), step, continuations, walk.generator)
            )
            scores[:, column] = score(reward, images, owners).total.view(-1, continuations)
    return scores


def from_continuations(
    rewards: Float[Tensor, "sample column continuation"], trajectories: Rollout
) -> TrueAdvantages:
    """A* from the scores of continuations, as `continuation_rewards` returns them.

    Also for 0/1 rewards: p (1 - p) / n is then the error of V squared, and the sample variance
    estimates it without bias.
    """
    shape = trajectories.groups.prompts, trajectories.groups.members, -1
    values, errors = rewards.mean(2), rewards.std(2) / math.sqrt(rewards.shape[2])
    values[:, -1], errors[:, -1] = rewards[:, -1, 0], 0.0
    both = (errors[:, 1:].square() + errors[:, :-1].square()).sqrt()
    tables = (table.view(shape) for table in (values.diff(dim=1), both, values, errors))
    return TrueAdvantages(*tables, steps=tuple(trajectories.trajectories.tree.drawn_steps))


def _on_a_tree(
    setting: Setting, result: Rollout, continuations: int, seed: int, usage: Usage
) -> TrueAdvantages:
    """`true_advantages` of a branched tree. A state after the last stochastic step is continued
    once, without error.
    """
    tree, count = result.trajectories.tree, result.groups.prompts
    assert isinstance(tree, Tree)
    last, walk = (
        int(setting.stds.nonzero().max()),
        walk_of(setting, result.groups, seed, usage),
    )
    into, parent = tree.drawn.nonzero().flatten(), tree.parent[tree.drawn]
    needed = torch.zeros(tree.units, dtype=torch.bool)
    needed[torch.cat([into, parent, tree.paths[:, -1]])] = True
    values, errors = torch.full((2, count, tree.units), torch.nan)
    with setting.policy.frozen(), torch.no_grad():
        for node in sorted(set(tree.node[needed].tolist())):
            units = (needed & (tree.node == node)).nonzero().flatten()
            repeats = continuations if node <= last else 1
            states = result.trajectories.states[:, units].flatten(0, 1)
            latents = walk.continued(states, node, repeats, walk.generator)
            owners = [prompt for prompt in setting.prompts for _ in range(len(units) * repeats)]
            rewards = score(setting.reward, setting.policy.decode(latents), owners).total.view(
                count, len(units), repeats
            )
            values[:, units] = rewards.mean(2)
            errors[:, units] = rewards.std(2) / math.sqrt(repeats) if repeats > 1 else 0.0
    advantages, both = torch.zeros(2, count, tree.units)
    advantages[:, into] = values[:, into] - values[:, parent]
    both[:, into] = (errors[:, into].square() + errors[:, parent].square()).sqrt()
    shares = torch.ones(tree.units) if tree.weight == "leaf" else 1 / tree.leaves
    return TrueAdvantages(
        tree.decision_table(advantages),
        tree.decision_table(both),
        tree.value_table(values),
        tree.value_table(errors),
        tuple(tree.drawn_steps),
        tree.decision_table(shares.expand(count, -1)),
    )


@dataclass(frozen=True)
class Look:
    """Groups of trajectories of one policy and one seed, to which all rules are applied.

    Rules with shared initial noise get other trajectories than the rest; within either kind, all
    rules get the same.
    """

    setting: Setting
    members: int = 12
    seed: int = 0

    def trajectories(
        self, shared_noise: bool, probe: Probe = NoProbe(), usage: Usage | None = None
    ) -> Rollout:
        """The rollout, with states scored by `probe`; only a probe that branches changes the
        trajectories.
        """
        groups = Groups(len(self.setting.prompts), self.members, shared_noise)
        return self.setting.rollout(
            groups, torch.Generator().manual_seed(self.seed), probe, usage, MAX_BATCH
        )

    def credit(
        self, rule: CreditAssigner, shared_noise: bool, reward: RewardModel | None = None
    ) -> "LookCredit":
        """The rule's advantages on these trajectories, computed from `reward` instead of the true
        one if it is given.

        Raises `CreditError` if the rule fails or breaks its contract.
        """
        usage = Usage()
        result = self.trajectories(shared_noise, rule.probe, usage)
        experience = self.setting.experience(result, usage, reward)
        advantages = assigned(rule, experience).advantages
        return LookCredit(advantages, usage.nfe / result.groups.samples, experience.decisions)


@dataclass(frozen=True)
class LookCredit:
    """A rule's advantages [prompt, member, decision], and the network evaluations for sampling and
    scoring a trajectory.
    """

    advantages: CreditTable
    nfe_per_trajectory: float
    decisions: Decisions
