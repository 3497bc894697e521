"""The true advantage of each step of a trajectory by continuations, and a rule's credit on the same trajectories.

The truth is A*(i) = Q(x_i, x_{i+1}) - V(x_i) = V(x_{i+1}) - V(x_i): V(x) is the expected final reward when the *stochastic*
sampler continues from x under the current policy. V is estimated by Monte Carlo continuation, so every A* has a standard error,
and correlations are corrected for it (`flowrl_bench.true_advantage`). Deterministic steps, which have A* = 0, are left out.

In a branched tree (`flowrl.tree`) the truth belongs to the edge into each state that was drawn: A* = V(child) - V(parent). A
distinct state is continued once, however many members pass it, and an edge counts in the agreement as it does in the update.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from flowrl.errors import require
from flowrl.flow import sample as draw
from flowrl.probes import NoProbe, Probe
from flowrl.protocols import CreditAssigner, RewardModel
from flowrl.rollout import Groups, Rollout, Usage, Walkers, attach_stds, continued, reward_table, score
from flowrl.types import Schedule
from flowrl_bench.gradients import Setting, assigned, credit_schedule


@dataclass(frozen=True)
class TrueAdvantages:
    """`values` [prompt, member, step] estimates A*, `errors` are its standard errors; `steps` are the stochastic steps.

    `state_values` [prompt, member, node] estimates V with standard errors `state_errors` (0 if V is the finished image's reward).
    `weights` [prompt, member, step] are the counts of the steps: in a branched tree 0 if a member's step is no decision,
    else 1 (weight "leaf") or 1 / the members that share the edge ("edge"). None: every stochastic step once.
    """

    values: Float[Tensor, "prompt member step"]
    errors: Float[Tensor, "prompt member step"]
    state_values: Float[Tensor, "prompt member node"]
    state_errors: Float[Tensor, "prompt member node"]
    steps: tuple[int, ...]
    weights: Float[Tensor, "prompt member step"] | None = None

    @property
    def reliability(self) -> float:
        """Fraction of the variance of the estimated A* at decisions that is not Monte Carlo noise."""
        found, errors = self.values[..., list(self.steps)], self.errors[..., list(self.steps)]
        if self.weights is not None:
            counted = self.weights[..., list(self.steps)] > 0
            found, errors = found[counted], errors[counted]
        noise = float(errors.square().mean())
        return max(0.0, 1.0 - noise / max(float(found.var()), 1e-30))


def true_advantages(
    setting: Setting,
    trajectories: Rollout,
    continuations: int = 128,
    seed: int = 0,
    usage: Usage | None = None,
    max_batch: int = 8192,
) -> TrueAdvantages:
    """A* of every step of `trajectories` by `continuations` independent stochastic continuations from every decision's node.

    V of a node is the mean reward of its continuations, with standard error std / sqrt(continuations); after the last stochastic
    step it is the reward itself. The two nodes of a step have separate continuations, so their squared errors add. In a
    branched tree distinct states are continued instead of nodes, those that a decision starts from or leads to.
    Raises `ConfigError` for fewer than two continuations.
    """
    if trajectories.trajectories.tree.branched:
        _require_two(continuations)
        return _on_a_tree(setting, trajectories, continuations, seed, usage or Usage(), max_batch)
    rewards = continuation_rewards(setting, trajectories, continuations, [setting.reward], seed, usage, max_batch)
    return from_continuations(rewards[0], trajectories)


def _require_two(continuations: int) -> None:
    require(continuations >= 2, "continuations", continuations, "2 or more: a standard error needs a spread")


def continuation_rewards(
    setting: Setting,
    trajectories: Rollout,
    continuations: int,
    rewards: Sequence[RewardModel],
    seed: int = 0,
    usage: Usage | None = None,
    max_batch: int = 8192,
) -> Float[Tensor, "reward sample node continuation"]:
    """Scores, by each of `rewards`, of the same `continuations` stochastic continuations from every decision's node.

    At the last node, all entries are the score of the finished image. A node whose step is deterministic has the entries of the
    next node. Not for branched trees. Raises `ConfigError` for fewer than two continuations.
    """
    _require_two(continuations)
    groups, usage, policy = trajectories.groups, usage or Usage(), setting.policy
    schedule = attach_stds(setting.schedule, setting.sampler)
    prompts = [prompt for prompt in setting.prompts for _ in range(groups.members)]
    owners = [prompt for prompt in prompts for _ in range(continuations)]
    condition = policy.encode(setting.prompts).repeat(groups.members)
    next_nodes = partial(draw, generator=torch.Generator().manual_seed(seed))
    walkers = Walkers(policy, setting.sampler, schedule, next_nodes, usage, max_batch)
    nodes = trajectories.trajectories.nodes
    found = torch.zeros(len(rewards), groups.samples, schedule.steps + 1, continuations)
    with policy.frozen(), torch.no_grad():
        images = policy.decode(nodes[:, -1])
        found[:, :, -1] = torch.stack([score(reward, images, prompts) for reward in rewards])[..., None]
        for node in reversed(range(schedule.steps)):
            if node in schedule.decisions:
                images = policy.decode(continued(walkers, nodes[:, node], node, condition, continuations))
                for row, reward in enumerate(rewards):
                    found[row, :, node] = score(reward, images, owners).view(-1, continuations)
            else:
                found[:, :, node] = found[:, :, node + 1]
    return found


def from_continuations(rewards: Float[Tensor, "sample node continuation"], trajectories: Rollout) -> TrueAdvantages:
    """A* from the scores of continuations, as `continuation_rewards` returns them for one reward.

    Also for 0/1 rewards: p (1 - p) / n is then the error of V squared, and the sample variance estimates it without bias.
    """
    groups, schedule = trajectories.groups, trajectories.trajectories.schedule
    values, errors = rewards.mean(2), rewards.std(2) / math.sqrt(rewards.shape[2])
    known = torch.tensor([not any(step >= node for step in schedule.decisions) for node in range(schedule.steps + 1)])
    errors[:, known] = 0.0
    values[:, known] = rewards[:, known, 0]
    step_errors = (errors[:, 1:].square() + errors[:, :-1].square()).sqrt() * schedule.stochastic
    shape, advantages = (groups.prompts, groups.members, -1), values.diff(dim=1) * schedule.stochastic
    return TrueAdvantages(
        advantages.view(shape), step_errors.view(shape), values.view(shape), errors.view(shape), tuple(schedule.decisions)
    )


def _on_a_tree(setting: Setting, result: Rollout, continuations: int, seed: int, usage: Usage, max_batch: int) -> TrueAdvantages:
    """`true_advantages` of a branched tree. A state after the last stochastic step is continued once, without error."""
    tree, schedule = result.trajectories.tree, result.trajectories.schedule
    condition, count = setting.policy.encode(setting.prompts), result.groups.prompts
    next_nodes = partial(draw, generator=torch.Generator().manual_seed(seed))
    walkers = Walkers(setting.policy, setting.sampler, schedule, next_nodes, usage, max_batch)
    needed = tree.drawn.clone()
    needed[tree.parent[tree.drawn]] = True
    values, errors = torch.zeros(count, tree.units), torch.zeros(count, tree.units)
    with setting.policy.frozen(), torch.no_grad():
        for node in sorted(set(tree.node[needed].tolist())):
            units = (needed & (tree.node == node)).nonzero().flatten()
            repeats = continuations if any(step >= node for step in schedule.decisions) else 1
            states = result.trajectories.states[:, units].flatten(0, 1)
            latents = continued(walkers, states, node, condition.repeat(len(units)), repeats)
            owners = [prompt for prompt in setting.prompts for _ in range(len(units) * repeats)]
            rewards = score(setting.reward, setting.policy.decode(latents), owners).view(count, len(units), repeats)
            values[:, units] = rewards.mean(2)
            if repeats > 1:
                errors[:, units] = rewards.std(2) / math.sqrt(repeats)
    into, parent = tree.drawn.nonzero().flatten(), tree.parent[tree.drawn]
    advantages, step_errors = torch.zeros_like(values), torch.zeros_like(values)
    advantages[:, into] = values[:, into] - values[:, parent]
    step_errors[:, into] = (errors[:, into].square() + errors[:, parent].square()).sqrt()
    shares = torch.ones(tree.units) if tree.weight == "leaf" else 1 / tree.leaves
    return TrueAdvantages(
        tree.step_table(advantages), tree.step_table(step_errors), tree.node_table(values), tree.node_table(errors),
        tuple(schedule.decisions), tree.step_table(shares.expand(count, -1)),
    )  # fmt: skip


def pooled(truths: Sequence[TrueAdvantages]) -> TrueAdvantages:
    """The true advantages of several looks, concatenated along the first axis."""
    columns = [
        torch.cat([getattr(truth, name) for truth in truths]) for name in ("values", "errors", "state_values", "state_errors")
    ]
    weights = [truth.weights for truth in truths if truth.weights is not None]
    return TrueAdvantages(*columns, steps=truths[0].steps, weights=torch.cat(weights) if weights else None)


@dataclass(frozen=True)
class Look:
    """Groups of trajectories of one policy and one seed, to which all rules are applied.

    Rules with shared initial noise get other trajectories than the rest; within either kind, all rules get the same.
    """

    setting: Setting
    members: int = 12
    seed: int = 0
    max_batch: int = 8192

    def trajectories(self, shared_noise: bool, probe: Probe = NoProbe(), usage: Usage | None = None) -> Rollout:
        """The rollout, with states scored by `probe`; only a probe that branches changes the trajectories."""
        groups = Groups(len(self.setting.prompts), self.members, shared_noise)
        return self.setting.rollout(groups, torch.Generator().manual_seed(self.seed), probe, usage, self.max_batch)

    def credit(self, rule: CreditAssigner, shared_noise: bool, reward: RewardModel | None = None) -> "Credit":
        """The rule's advantages on these trajectories, computed from `reward` instead of the true one if it is given.

        Raises `CreditError` if the rule fails or breaks its contract.
        """
        usage = Usage()
        result = self.trajectories(shared_noise, rule.probe, usage)
        table = reward_table(self.setting.policy, reward or self.setting.reward, result, self.setting.prompts, usage)
        schedule = credit_schedule(result)
        return Credit(assigned(rule, table, schedule), usage.nfe / result.groups.samples, schedule)


@dataclass(frozen=True)
class Credit:
    """A rule's advantages [prompt, member, step], and the network evaluations for sampling and scoring a trajectory."""

    advantages: Float[Tensor, "prompt member step"]
    nfe_per_trajectory: float
    schedule: Schedule
