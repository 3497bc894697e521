"""The true advantage of each step of a trajectory, and the agreement of a rule's credit with it.

The truth is A*(i) = Q(x_i, x_{i+1}) - V(x_i) = V(x_{i+1}) - V(x_i): V(x) is the expected final reward when the *stochastic*
sampler continues from x under the current policy. V is estimated by Monte Carlo continuation, so every A* has a standard error,
and correlations are corrected for it. Deterministic steps have A* = 0, since nothing is decided there; they are left out.

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

from flowrl.diagnostics.statistics import Estimate
from flowrl.errors import require
from flowrl.flow import sample as draw
from flowrl.probes import NoProbe, Probe
from flowrl.protocols import CreditAssigner, RewardModel
from flowrl.rollout import Groups, Rollout, Usage, Walkers, attach_stds, continued, reward_table, score
from flowrl.types import Schedule
from flowrl_bench.gradients import Setting, assigned, credit_schedule

RESOLVED = 2.0
"""A true advantage counts as resolved if it is more than this many standard errors away from 0."""

LEAST_RELIABILITY = 0.1
"""The smallest reliability that the correction of a correlation uses."""


@dataclass(frozen=True)
class TrueAdvantages:
    """`values` [prompt, member, step] estimates A*, `errors` are its standard errors; `steps` are the stochastic steps.

    `state_values` [prompt, member, node] estimates V, `state_errors` likewise (0 if V is the finished image's reward).
    `weights` [prompt, member, step] say how often each step counts: in a branched tree 0 where a member's step is no decision,
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
    require(continuations >= 2, "continuations", continuations, "2 or more: a standard error needs a spread")
    if trajectories.trajectories.tree.branched:
        return _on_a_tree(setting, trajectories, continuations, seed, usage or Usage(), max_batch)
    groups, usage = trajectories.groups, usage or Usage()
    schedule = attach_stds(setting.schedule, setting.sampler)
    decisions = schedule.stochastic.nonzero().flatten().tolist()
    prompts = [prompt for prompt in setting.prompts for _ in range(groups.members)]
    owners = [prompt for prompt in prompts for _ in range(continuations)]
    condition = setting.policy.encode(setting.prompts).repeat(groups.members)
    next_nodes = partial(draw, generator=torch.Generator().manual_seed(seed))
    walkers = Walkers(setting.policy, setting.sampler, schedule, next_nodes, usage, max_batch)
    nodes = trajectories.trajectories.nodes
    values = torch.zeros(groups.samples, schedule.steps + 1)
    errors = torch.zeros_like(values)
    with setting.policy.frozen(), torch.no_grad():
        values[:, -1] = score(setting.reward, setting.policy.decode(nodes[:, -1]), prompts)
        for node in reversed(range(schedule.steps)):
            if node in decisions:
                latents = continued(walkers, nodes[:, node], node, condition, continuations)
                rewards = score(setting.reward, setting.policy.decode(latents), owners).view(-1, continuations)
                values[:, node] = rewards.mean(1)
                errors[:, node] = rewards.std(1) / math.sqrt(continuations)
            else:
                values[:, node], errors[:, node] = values[:, node + 1], errors[:, node + 1]
    step_errors = (errors[:, 1:].square() + errors[:, :-1].square()).sqrt() * schedule.stochastic
    shape = (groups.prompts, groups.members, -1)
    advantages = values.diff(dim=1) * schedule.stochastic
    return TrueAdvantages(
        advantages.view(shape), step_errors.view(shape), values.view(shape), errors.view(shape), tuple(decisions)
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


@dataclass(frozen=True)
class Look:
    """The groups of trajectories that all rules are applied to: one policy, one seed.

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
        """The rule's advantages on these trajectories; `reward`: the one that the rule sees instead of the true one.

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


@dataclass(frozen=True)
class Agreement:
    """Agreement of a rule's credit with the true advantage, over the steps of all groups, or at one step.

    `correlation`: Pearson, divided by the root of `reliability`, which corrects for the Monte Carlo noise of the
    truth (`raw_correlation` does not), within [-1, 1]. `slope`: cov(credit, A*) / var(A*), the variance corrected likewise.
    `sign`: fraction of the *resolved* steps (|A*| above two standard errors) whose credit has the sign of A* (credit 0 counts
    as half); `resolved` is their fraction of all. `bias`: the mean credit of a step over all outcomes, root mean square over
    steps, in units of the credit's std; the true one is 0, since E[A* | x_i] = 0. `unexplained`: fraction of the credit's
    variance that is not proportional to A*, 1 - correlation^2.
    """

    correlation: Estimate
    raw_correlation: float
    reliability: float
    sign: Estimate
    resolved: float
    bias: Estimate
    unexplained: float
    count: int
    slope: Estimate


@dataclass(frozen=True)
class CreditReport:
    """`overall`, and by stochastic step `per_step`."""

    overall: Agreement
    steps: tuple[int, ...]
    per_step: tuple[Agreement, ...]


def compare_credit(credit: Tensor, truth: TrueAdvantages, draws: int = 1000, seed: int = 0) -> CreditReport:
    """Compare a rule's `credit` [prompt, member, step] with the truth; intervals by bootstrap over groups. Steps count as the
    truth's `weights` say.

    Several looks can be concatenated along the first axis (`pooled`). Raises `ConfigError` for credit of another shape than the
    truth's, or not finite.
    """
    return credit_report(credit_sums(credit, truth), truth.steps, draws, seed)


def credit_sums(credit: Tensor, truth: TrueAdvantages) -> Float[Tensor, "group step 9"]:
    """The sums over members from which `credit_report` computes all statistics. Raises `ConfigError` as `compare_credit` does."""
    shape, wanted = tuple(credit.shape), tuple(truth.values.shape)
    require(shape == wanted, "credit of shape", shape, f"[prompt, member, step] = {wanted}, as the true advantages")
    bad = int((~torch.isfinite(credit)).sum())
    require(bad == 0, "credit: values that are not finite", bad, "none")
    steps = list(truth.steps)
    weights = None if truth.weights is None else truth.weights[..., steps].double()
    return _sums(credit[..., steps].double(), truth.values[..., steps].double(), truth.errors[..., steps].double(), weights)


def credit_report(sums: Float[Tensor, "group step 9"], steps: Sequence[int], draws: int = 1000, seed: int = 0) -> CreditReport:
    """The agreement in `credit_sums`; intervals by bootstrap over groups."""
    by_step = _resampled(sums, draws, seed)
    per_step = tuple(_agreement(by_step[:, i : i + 1]) for i in range(len(steps)))
    return CreditReport(_agreement(by_step), tuple(steps), per_step)


def correlation_difference(sums: Tensor, others: Tensor, draws: int = 1000, seed: int = 0) -> Estimate:
    """The correlation in `sums` [group, step, 9] minus that in `others`, of the same groups, which are drawn together."""
    require(len(sums) == len(others), "groups", (len(sums), len(others)), "equally many, the same for both rules")
    one, other = (_corrected(_moments(_resampled(table, draws, seed))) for table in (sums, others))
    return _measured(one - other)


def _resampled(sums: Tensor, draws: int, seed: int) -> Tensor:
    """Sums over groups [draw, step, 9]: of the data, then of `draws` bootstrap draws."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.ones(1, len(sums), dtype=sums.dtype)
    picks = torch.randint(0, len(sums), (draws, len(sums)), generator=generator)
    resampled = torch.zeros(draws, len(sums), dtype=sums.dtype).scatter_add_(1, picks, torch.ones_like(picks, dtype=sums.dtype))
    return torch.einsum("dg,gsk->dsk", torch.cat([weights, resampled]), sums)


def pooled(truths: Sequence[TrueAdvantages]) -> TrueAdvantages:
    """The true advantages of several looks, concatenated along the first axis."""
    columns = [
        torch.cat([getattr(truth, name) for truth in truths]) for name in ("values", "errors", "state_values", "state_errors")
    ]
    weights = [truth.weights for truth in truths if truth.weights is not None]
    return TrueAdvantages(*columns, steps=truths[0].steps, weights=torch.cat(weights) if weights else None)


def _sums(credit: Tensor, truth: Tensor, errors: Tensor, weights: Tensor | None = None) -> Tensor:
    """The sums over members from which all statistics are computed, [group, step, 9]."""
    resolved = (truth.abs() > RESOLVED * errors).to(truth)
    agrees = torch.where(credit == 0, 0.5, (credit.sign() == truth.sign()).to(truth))
    one = torch.ones_like(truth)
    columns = [one, credit, truth, credit.square(), truth.square(), credit * truth, errors.square(), resolved, resolved * agrees]
    table = torch.stack(columns, dim=-1)
    return (table if weights is None else table * weights[..., None]).sum(1)


@dataclass(frozen=True)
class _Moments:
    """Of credit and truth, [draw]."""

    count: Tensor
    variance_a: Tensor
    variance_t: Tensor
    covariance: Tensor
    reliability: Tensor


def _moments(sums: Tensor) -> _Moments:
    n, a, t, aa, tt, at, noise = sums.sum(1).unbind(-1)[:7]
    n = n.clamp(min=1e-30)  # a step without a decision
    variance_a, variance_t = (aa / n - (a / n).square()).clamp(min=0), (tt / n - (t / n).square()).clamp(min=1e-30)
    covariance = at / n - a * t / n.square()
    reliability = (1 - noise / n / variance_t).clamp(min=LEAST_RELIABILITY, max=1.0)
    return _Moments(n, variance_a, variance_t, covariance, reliability)


def _raw(m: _Moments) -> Tensor:
    found = m.covariance / (m.variance_a * m.variance_t).clamp(min=1e-60).sqrt()
    return torch.where(m.variance_a > 0, found, torch.zeros_like(m.count))


def _corrected(m: _Moments) -> Tensor:
    return (_raw(m) / m.reliability.sqrt()).clamp(-1.0, 1.0)


def _agreement(sums: Tensor) -> Agreement:
    """Statistics of sums [draw, step, 9]; the first draw is the data itself, the others are bootstrap draws."""
    moments, (resolved, agrees) = _moments(sums), sums.sum(1).unbind(-1)[7:]
    corrected = _corrected(moments)
    sign = agrees / resolved.clamp(min=1)
    bias = _mean_credit(sums[..., 1] / sums[..., 0].clamp(min=1e-30)) / moments.variance_a.clamp(min=1e-30).sqrt()
    return Agreement(
        correlation=_measured(corrected),
        raw_correlation=float(_raw(moments)[0]),
        reliability=float(moments.reliability[0]),
        sign=_measured(sign),
        resolved=float(resolved[0] / moments.count[0]),
        bias=_measured(bias),
        unexplained=max(0.0, 1 - float(corrected[0]) ** 2),
        count=round(float(moments.count[0])),
        slope=_measured(moments.covariance / (moments.variance_t * moments.reliability)),
    )


def _mean_credit(by_step: Tensor) -> Tensor:
    """Root mean square over steps of the mean credit [draw, step], corrected for the sampling noise of those means; [draw]."""
    noise = (by_step[1:] - by_step[:1]).square().mean(0)
    times = torch.full_like(by_step[:, 0], 2.0)
    times[0] = 1.0  # a bootstrap draw has the noise of the data and its own
    return (by_step.square() - times[:, None] * noise).mean(1).clamp(min=0).sqrt()


def _measured(draws: Tensor) -> Estimate:
    """The data's own value and the 2.5 and 97.5 percentiles of the bootstrap draws."""
    low, high = torch.quantile(draws[1:], torch.tensor([0.025, 0.975], dtype=draws.dtype)).tolist()
    return Estimate(float(draws[0]), low, high)
