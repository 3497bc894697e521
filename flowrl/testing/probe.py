"""The promises of a probe."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from flowrl.core.errors import require
from flowrl.core.protocols import FlowPolicy
from flowrl.core.types import Prompt
from flowrl.flow.mixture import GaussianMixture
from flowrl.policies.mixture import MixturePolicy
from flowrl.probes import Branching, NetworkUse, NoProbe, Probe, Shape, whole
from flowrl.rewards import FunctionReward
from flowrl.rollout import Groups, Rollout, Usage, rollout, score_rollout
from flowrl.samplers import FlowSDE, Windowed
from flowrl.testing.contract import INAPPLICABLE, Contract, expect, maker, same
from flowrl.testing.tiny import TINY, tiny_sd3_policy

PROMPTS = [Prompt(text) for text in ("0", "90", "200")]
REWARD = FunctionReward(lambda images, prompts: (images.flatten(1) - 0.3).square().mean(1))
STEPS = 6
DECISIONS = (range(STEPS - 1), range(1, 4))
"""The stochastic steps to try: all but the last, and three in the middle with shared noise."""


@dataclass(frozen=True)
class Trial:
    """One rollout: the result, the value table, the costs, and the generator's last state."""

    rollout: Rollout
    table: Tensor
    usage: Usage
    generator: Tensor


@dataclass(frozen=True)
class Case:
    """A probe, the policy for its rollouts (None: a small one that the probe supports), and the
    members of a group.
    """

    probe: Any
    policy: FlowPolicy | None
    members: int

    @cached_property
    def network(self) -> FlowPolicy:
        """The policy."""
        return self.policy or small_policy(self.probe.network)

    @property
    def layouts(self) -> Sequence[range]:
        """The stochastic steps to try; trees have all."""
        return DECISIONS[:1] if isinstance(self.probe, Branching) else DECISIONS

    def run(
        self,
        decisions: range,
        probe: Probe | None = None,
        rows: range = range(len(PROMPTS)),
        max_batch: int = 10_000,
    ) -> Trial:
        """A rollout of the groups `rows`, with the probe or another one."""
        policy, generator, usage = self.network, torch.Generator().manual_seed(5), Usage()
        shared = decisions.start > 0
        groups = Groups(len(PROMPTS), self.members, shared).part(rows.start, len(rows))
        prompts = PROMPTS[rows.start : rows.stop]
        result = rollout(
            policy,
            Windowed(FlowSDE(0.7), decisions),
            policy.schedule(STEPS),
            policy.encode(prompts),
            groups.noise(policy.latent_shape, generator).to(policy.device),
            generator,
            groups,
            probe or self.probe,
            usage,
            max_batch,
        )
        table = score_rollout(policy, REWARD, result, prompts, usage).total
        return Trial(result, table, usage, generator.get_state())


def small_policy(use: NetworkUse) -> FlowPolicy:
    """A mixture of Gaussians with a small network; for probes without guidance a tiny SD3 with
    guidance.
    """
    if use.guidance == "off":
        return tiny_sd3_policy(replace(TINY, guidance_scale=2.0))
    means, weights = torch.tensor([[1.0, 0.0], [-1.0, 0.5]]), torch.tensor([0.4, 0.6])
    policy = MixturePolicy(GaussianMixture(means, 0.2, weights), float)
    generator = torch.Generator().manual_seed(0)
    for parameter in policy.trainable().values():
        parameter.data.normal_(std=0.2, generator=generator)
    return policy


def is_a_probe(case: Case) -> None:
    """It is an object of a class derived from flowrl.probes.Probe."""
    expect(isinstance(case.probe, Probe), f"it is {case.probe!r}; write an object, with brackets")


def estimates_final_latents(case: Case) -> None:
    """`estimate` returns final latents by node, of its `nodes`, and changes nothing that it is
    given.
    """
    for decisions in case.layouts:
        for key, latents in case.run(decisions).rollout.estimates.items():
            expect(latents.isfinite().all(), f"the estimate of {key!r} is not finite")


def fills_what_it_says(case: Case) -> None:
    """The value table has values in the columns that `fills` names and in the last, and only
    there.
    """
    for decisions in case.layouts:
        known = case.run(decisions).table.isfinite().flatten(0, 1)
        last = known.shape[1] - 1
        expected = sorted({*case.probe.fills(last), last})
        filled = known.all(0).nonzero().flatten().tolist()
        what = f"the columns {filled} have values, `fills({last})` and the last are {expected}"
        expect(filled == expected, what)
        odd = (known.any(0) & ~known.all(0)).nonzero().flatten().tolist()
        expect(not odd, f"the columns {odd} have values for some members only")


def leaves_the_rollout_alone(case: Case) -> str | None:
    """Trajectories, rewards and later draws are the same, bit for bit, with and without it, and
    later rollouts too.
    """
    if isinstance(case.probe, Branching):
        return INAPPLICABLE
    hint = "Work on copies, draw from `run.rand` or `run.draw`, and leave the policy as it was."
    for decisions in case.layouts:
        plain = case.run(decisions, NoProbe())
        probed, after = case.run(decisions), case.run(decisions, NoProbe())
        ahead = 1e-5 if case.probe.ahead(probed.rollout.nodes) else 0.0
        for name, trial, limit in (("with", probed, ahead), ("after a rollout with", after, 0.0)):
            states, expected = trial.rollout.trajectories.states, plain.rollout.trajectories.states
            same(states, expected, f"{name} the probe, the states", hint, limit)
            reward, expected = trial.table[..., -1], plain.table[..., -1]
            same(reward, expected, f"{name} the probe, the reward", hint, limit)
            same(trial.generator, plain.generator, f"{name} the probe, the generator", hint)


def is_deterministic(case: Case) -> None:
    """The same rollout gives the same rewards, and torch's global generator is not used."""
    for decisions in case.layouts:
        before = torch.get_rng_state()
        first, second = case.run(decisions).table, case.run(decisions).table
        hint = "Draw from `run.rand` or `run.draw`."
        same(second, first, "in a second rollout, the value table", hint)
        same(torch.get_rng_state(), before, "the state of torch's global generator", hint)


def does_not_depend_on_chunks(case: Case) -> None:
    """The value table does not depend on which groups are rolled out together, nor on how many
    latents a network call has.
    """
    hint = "Means over all rows mix groups; random numbers need `run.rand`."
    for decisions in case.layouts:
        together, single = case.run(decisions).table, range(len(PROMPTS))
        alone = [case.run(decisions, rows=range(group, group + 1)).table for group in single]
        same(torch.cat(alone), together, "group by group, the value table", hint, 1e-3)
        split = case.run(decisions, max_batch=5).table
        same(split, together, "with max_batch = 5, the value table", hint, 1e-3)


def costs_what_it_declares(case: Case) -> None:
    """`cost` is what a rollout counts: network evaluations, sequential calls and scored images."""
    for decisions in case.layouts:
        trial = case.run(decisions)
        path, usage = trial.rollout.trajectories, trial.usage
        cost = case.probe.cost(Shape(len(PROMPTS), path.schedule, path.tree, trial.rollout.nodes))
        expect(cost is not None, "`cost` returns None, so `flowrl train --plan` cannot count")
        counted = {
            "network evaluations": whole(usage.nfe - len(path.states) * sum(path.tree.counts[:-1])),
            "calls": usage.calls - path.schedule.steps,
            "scored images": usage.reward_calls - len(path.images_latent),
        }
        declared = (cost.nfe, sum(call.step is None for call in cost.calls), cost.images)
        for (name, count), told in zip(counted.items(), declared, strict=True):
            what = f"a rollout has {count:g} {name} of the probe's, `cost` declares {told:g}"
            expect(abs(count - told) < 1e-3, what)


BASIC = (is_a_probe, estimates_final_latents)
OTHERS = (
    fills_what_it_says,
    leaves_the_rollout_alone,
    is_deterministic,
    does_not_depend_on_chunks,
    costs_what_it_declares,
)


def contract(
    part: Any, policy: FlowPolicy | None = None, members: int = 4, without: Sequence[str] = ()
) -> Contract:
    """The contract of a probe (`flowrl.probes.Probe`).

    Args:
        part: the probe: an object (copied for every promise), a class, or a function that makes it.
        policy: the policy for the test; None for a small one that satisfies the probe.
        members: members per group; a `Branching` probe may require another number.
        without: names of promises that the part breaks on purpose.
    """
    require(members >= 1, "members", members, "1 or more")
    case = lambda probe: Case(probe, policy, members)  # noqa: E731
    return Contract("probe", BASIC, OTHERS, maker(part), case, without)
