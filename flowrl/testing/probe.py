"""The promises of a probe."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from flowrl.core.protocols import FlowPolicy
from flowrl.core.types import Prompt, whole
from flowrl.flow.mixture import GaussianMixture
from flowrl.policies.mixture import MixturePolicy
from flowrl.probes import Branching, NetworkUse, NoProbe, Probe, Shape
from flowrl.rewards import FunctionReward
from flowrl.rollout import Groups, Rollout, Usage, predicted, rollout, score_rollout
from flowrl.samplers import FlowSDE, Windowed
from flowrl.testing.contract import INAPPLICABLE, Contract, basic, expect, promise, same, twice
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

    @property
    def traces(self) -> Mapping[str, Tensor]:
        """What a probe must not change."""
        states, reward = self.rollout.trajectories.states, self.table[..., -1]
        return {"states": states, "reward": reward, "generator": self.generator}


@dataclass(frozen=True)
class ProbeContract(Contract):
    """The contract of a probe (`flowrl.probes.Probe`).

    Args:
        part: the probe: an object (copied for every promise), a class, or a function that makes it.
        policy: the policy for the test; None for a small one that satisfies the probe.
        members: members per group; a `Branching` probe may require another number.
        without: names of promises that the part breaks on purpose.
    """

    policy: FlowPolicy | None = None
    members: int = 4

    @cached_property
    def network(self) -> FlowPolicy:
        """The policy."""
        return self.policy or small_policy(self.part.network)

    @property
    def layouts(self) -> Sequence[range]:
        """The stochastic steps to try; trees have all."""
        return DECISIONS[:1] if isinstance(self.part, Branching) else DECISIONS

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
            probe or self.part,
            usage,
            max_batch,
            prompts=prompts,
        )
        values = score_rollout(policy, REWARD, result, prompts, usage)
        table = predicted(probe or self.part, values)
        return Trial(result, table, usage, generator.get_state())

    @basic
    def is_a_probe(self) -> None:
        """It is an object of a class derived from flowrl.probes.Probe."""
        expect(isinstance(self.part, Probe), f"it is {self.part!r}; write an object, with brackets")

    @basic
    def estimates_final_latents(self) -> None:
        """`estimate` returns final latents by node, of its `nodes`, and changes nothing that it is
        given.
        """
        for decisions in self.layouts:
            for key, latents in self.run(decisions).rollout.estimates.items():
                expect(latents.isfinite().all(), f"the estimate of {key!r} is not finite")

    @promise
    def fills_what_it_says(self) -> None:
        """The value table has values in the columns that `fills` names and in the last, and only
        there.
        """
        for decisions in self.layouts:
            known = self.run(decisions).table.isfinite().flatten(0, 1)
            last = known.shape[1] - 1
            expected = torch.zeros(last + 1).bool()
            expected[[*self.part.fills(last), last]] = True
            what = f"by `fills({last})`, whether a member has a value [member, column]"
            same(known, expected.expand_as(known), what)

    @promise
    def leaves_the_rollout_alone(self) -> str | None:
        """Trajectories, rewards and later draws are the same, bit for bit, with and without it, and
        later rollouts too.

        Work on copies, draw from `run.rand` or `run.draw`, and leave the policy as it was.
        """
        if isinstance(self.part, Branching):
            return INAPPLICABLE
        for decisions in self.layouts:
            plain, probed = self.run(decisions, NoProbe()), self.run(decisions)
            after, ahead = self.run(decisions, NoProbe()), self.part.ahead(probed.rollout.nodes)
            for name, expected in plain.traces.items():
                limit = 1e-5 if ahead else 0.0
                same(probed.traces[name], expected, f"with the probe, the {name}", limit)
                same(after.traces[name], expected, f"after a rollout with the probe, the {name}")
        return None

    @promise
    def is_deterministic(self) -> None:
        """The same rollout gives the same rewards.

        Draw from `run.rand` or `run.draw`.
        """
        for decisions in self.layouts:
            first, second = twice(lambda decisions=decisions: self.run(decisions).table)
            same(second, first, "in a second rollout, the value table")

    @promise
    def does_not_depend_on_chunks(self) -> None:
        """The value table does not depend on which groups are rolled out together, nor on how many
        latents a network call has.

        Means over all rows mix groups; random numbers need `run.rand`.
        """
        for decisions in self.layouts:
            together, single = self.run(decisions).table, range(len(PROMPTS))
            alone = [self.run(decisions, rows=range(group, group + 1)).table for group in single]
            same(torch.cat(alone), together, "group by group, the value table", 1e-3)
            split = self.run(decisions, max_batch=5).table
            same(split, together, "with max_batch = 5, the value table", 1e-3)

    @promise
    def costs_what_it_declares(self) -> None:
        """`cost` is what a rollout counts: network evaluations, sequential calls and scored
        images.
        """
        for decisions in self.layouts:
            trial = self.run(decisions)
            path, usage = trial.rollout.trajectories, trial.usage
            cost = self.part.cost(
                Shape(len(PROMPTS), path.schedule, path.tree, trial.rollout.nodes)
            )
            expect(cost is not None, "`cost` returns None, so `flowrl train --plan` cannot count")
            evaluations = usage.nfe - len(path.states) * sum(path.tree.counts[:-1])
            images = usage.reward_calls - len(path.images_latent)
            counted = (whole(evaluations), usage.calls - path.schedule.steps, images)
            declared = (cost.nfe, sum(call.step is None for call in cost.calls), cost.images)
            names = "network evaluations, calls and scored images"
            what = f"a rollout has {counted} {names} of the probe's, `cost` declares {declared}"
            expect(np.allclose(counted, declared), what)


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
