"""The promises of a probe."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from flowrl.core.protocols import FlowPolicy, Sampler
from flowrl.core.types import Prompt
from flowrl.flow.mixture import GaussianMixture
from flowrl.policies.mixture import MixturePolicy
from flowrl.probes import Branching, Cost, NetworkUse, NoProbe, Probe, Shape, whole
from flowrl.rewards import FunctionReward
from flowrl.rollout import Groups, Rollout, Usage, rollout, score_rollout
from flowrl.samplers import FlowSDE, Windowed
from flowrl.testing.findings import INAPPLICABLE, Contract, ContractBroken, expect, name_of, same
from flowrl.testing.tiny import TINY, tiny_sd3_policy

CONTRACT = Contract("probe")
promise = CONTRACT.promise

PROMPTS = tuple(Prompt(text) for text in ("0", "90", "200"))
REWARD = FunctionReward(lambda images, prompts: (images.flatten(1) - 0.3).square().mean(1))
STEPS = 6


@dataclass(frozen=True)
class Trial:
    """One rollout: the result, the value table, the costs, and the final states of the
    generators.
    """

    result: Rollout
    table: Tensor
    usage: Usage
    generator: Tensor
    everyones: Tensor

    @property
    def added(self) -> Usage:
        """The costs of the probe alone."""
        path = self.result.trajectories
        own = len(path.states) * sum(path.tree.counts[:-1])
        images = self.usage.reward_calls - len(path.images_latent)
        return Usage(whole(self.usage.nfe - own), self.usage.calls - path.schedule.steps, images)


@dataclass(frozen=True)
class Layout:
    """A sampler and whether groups share their noise."""

    sampler: Sampler
    shared: bool


@dataclass(frozen=True)
class Case:
    """A probe, the policy for its rollouts (None: a small one that the probe supports), and the
    members of a group.
    """

    probe: Any
    policy: FlowPolicy | None = None
    members: int = 4

    def __repr__(self) -> str:
        return name_of(self.probe)

    @cached_property
    def network(self) -> FlowPolicy:
        """The policy."""
        return self.policy or small_policy(self.probe.network)

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The samplers to try: all steps but the last stochastic, and three steps in the middle
        with shared noise.
        """
        first = Layout(Windowed(FlowSDE(0.7), range(STEPS - 1)), False)
        return (
            (first,)
            if isinstance(self.probe, Branching)
            else (first, Layout(Windowed(FlowSDE(0.7), range(1, 4)), True))
        )

    def run(
        self,
        layout: Layout,
        probe: Probe | None = None,
        first: int = 0,
        count: int = len(PROMPTS),
        max_batch: int = 10_000,
    ) -> Trial:
        """A rollout of `count` groups, with the probe or another one."""
        policy, generator, usage = self.network, torch.Generator().manual_seed(5), Usage()
        groups = Groups(len(PROMPTS), self.members, layout.shared).part(first, count)
        noise, prompts = (
            groups.noise(policy.latent_shape, generator),
            PROMPTS[first : first + count],
        )
        result = rollout(
            policy,
            layout.sampler,
            policy.schedule(STEPS),
            policy.encode(prompts),
            noise.to(policy.device),
            generator,
            groups,
            probe or self.probe,
            usage,
            max_batch,
        )
        table = score_rollout(policy, REWARD, result, prompts, usage).total
        return Trial(result, table, usage, generator.get_state(), torch.get_rng_state())


def small_policy(use: NetworkUse) -> FlowPolicy:
    """A mixture of Gaussians with a small network; for probes without guidance a tiny SD3 with
    guidance.
    """
    if use.guidance == "off":
        return tiny_sd3_policy(replace(TINY, guidance_scale=2.0))
    policy = MixturePolicy(
        GaussianMixture(torch.tensor([[1.0, 0.0], [-1.0, 0.5]]), 0.2, torch.tensor([0.4, 0.6])),
        float,
    )
    generator = torch.Generator().manual_seed(0)
    for parameter in policy.trainable().values():
        parameter.data.normal_(std=0.2, generator=generator)
    return policy


def cost_of(case: Case, trial: Trial) -> Cost:
    """The cost that the probe declares for a trial."""
    path = trial.result.trajectories
    cost = case.probe.cost(Shape(len(PROMPTS), path.schedule, path.tree, trial.result.nodes))
    if cost is None:
        raise ContractBroken(
            "`cost` returns None, so `flowrl train --plan` cannot count the evaluations"
        )
    return cost


@promise("it is an object of a class derived from flowrl.probes.Probe", basic=True)
def is_a_probe(case: Case) -> None:
    hint = " Write an object, with brackets." if isinstance(case.probe, type) else ""
    expect(isinstance(case.probe, Probe), f"it is {case.probe!r}.{hint}")


@promise(
    "`estimate` returns final latents by node, of its `nodes`, and changes nothing that it is"
    " given",
    basic=True,
)
def estimates_final_latents(case: Case) -> None:
    for layout in case.layouts:
        result = case.run(layout).result
        for key, estimate in result.estimates.items():
            expect(
                bool(estimate.latents.isfinite().all()), f"the estimate of {key!r} is not finite"
            )


@promise(
    "the value table has values in the columns that `fills` names and in the last, and only there"
)
def fills_what_it_says(case: Case) -> None:
    for layout in case.layouts:
        table = case.run(layout).table
        last = table.shape[-1] - 1
        expected = sorted({*case.probe.fills(last), last})
        found = [k for k in range(last + 1) if bool(table[..., k].isfinite().all())]
        expect(
            found == expected,
            f"the columns {found} have values, `fills({last})` and the last are {expected}",
        )
        odd = [
            k for k in range(last + 1) if k not in found and not bool(table[..., k].isnan().all())
        ]
        expect(not odd, f"the columns {odd} have values for some members only")


@promise(
    "trajectories, rewards and later draws are the same, bit for bit, with and without it, and"
    " later rollouts too"
)
def leaves_the_rollout_alone(case: Case) -> str | None:
    if isinstance(case.probe, Branching):
        return INAPPLICABLE
    for layout in case.layouts:
        plain, probed, after = (
            case.run(layout, NoProbe()),
            case.run(layout),
            case.run(layout, NoProbe()),
        )
        tolerance = 1e-5 if case.probe.ahead(probed.result.nodes) else 0.0
        for name, trial in (("with the probe", probed), ("after a rollout with the probe", after)):
            limit = tolerance if trial is probed else 0.0
            hint = (
                "Work on copies, draw from `run.rand` or `run.draw`, and undo what is done to the"
                " policy."
            )
            for part in ("states", "outputs"):
                got, expected = (
                    getattr(found.result.trajectories, part) for found in (trial, plain)
                )
                same(got, expected, f"{name}, the trajectories' {part}", hint, limit)
            same(trial.table[..., -1], plain.table[..., -1], f"{name}, the reward", hint, limit)
            expect(
                torch.equal(trial.generator, plain.generator),
                f"{name}, the trajectories' generator is elsewhere. {hint}",
            )


@promise("the same rollout gives the same rewards, and torch's global generator is not used")
def is_deterministic(case: Case) -> None:
    for layout in case.layouts:
        before = torch.get_rng_state()
        first, second = case.run(layout), case.run(layout)
        hint = "Draw from `run.rand` or `run.draw`."
        same(
            second.table.nan_to_num(),
            first.table.nan_to_num(),
            "in a second rollout, the value table",
            hint,
        )
        expect(torch.equal(second.everyones, before), f"torch's global generator was used. {hint}")


@promise("the values of a group do not depend on which groups are rolled out with it")
def does_not_depend_on_chunks(case: Case) -> None:
    for layout in case.layouts:
        together = case.run(layout).table
        alone = torch.cat(
            [case.run(layout, first=group, count=1).table for group in range(len(PROMPTS))]
        )
        hint = "Means over all rows mix groups; random numbers need `run.rand`."
        same(
            alone.nan_to_num(), together.nan_to_num(), "group by group, the value table", hint, 1e-3
        )


@promise("the value table does not depend on how many latents a network call has")
def does_not_depend_on_max_batch(case: Case) -> None:
    for layout in case.layouts:
        together, split = case.run(layout).table, case.run(layout, max_batch=5).table
        same(
            split.nan_to_num(),
            together.nan_to_num(),
            "with max_batch = 5, the value table",
            "",
            1e-3,
        )


@promise("`cost` is what a rollout counts: network evaluations, sequential calls and scored images")
def costs_what_it_declares(case: Case) -> None:
    for layout in case.layouts:
        trial = case.run(layout)
        added, cost = trial.added, cost_of(case, trial)
        calls = sum(call.step is None for call in cost.calls)
        for name, found, declared in (
            ("network evaluations", added.nfe, cost.nfe),
            ("calls", added.calls, calls),
            ("scored images", added.reward_calls, cost.images),
        ):
            expect(
                abs(found - declared) < 1e-3,
                f"a rollout has {found:g} {name} of the probe's, `cost` declares {declared:g}",
            )
