"""Rollouts of two prompts with few arguments."""

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from seeded import seeded

from flowrl.core.experience import Credit, Decisions
from flowrl.core.protocols import Sampler
from flowrl.core.types import Condition, Prompt
from flowrl.flow import uniform_schedule
from flowrl.probes import NoProbe
from flowrl.rewards import FunctionReward
from flowrl.rollout import Groups, Usage, rollout, score_rollout, transition_weights
from flowrl.run.worlds import world
from flowrl.samplers import FlowSDE, Windowed
from flowrl.trainer import Trainer


@dataclass(frozen=True)
class AllButLast:
    """`sampler` on every step but the last, which is an ODE step, for schedules of any length."""

    sampler: Sampler

    def transition(self, latent, velocity, schedule, step):
        """The Gaussian over node `step + 1`."""
        window = Windowed(self.sampler, range(schedule.steps - 1))
        return window.transition(latent, velocity, schedule, step)


PROMPTS = [Prompt("0"), Prompt("90")]
SQUARES = FunctionReward(lambda images, prompts: (images.flatten(1) - 0.3).square().mean(1))
SDE = AllButLast(FlowSDE(0.7))
DIRECTIONS = [world("mixture").parse(f"towards {angle} degrees") for angle in (0, 90, 180)]
SOFT = world("mixture").reward("soft")


class Straight:
    """v depends on the prompt only: the ODE's paths are straight lines, exact by any solver."""

    latent_shape, device = (2, 1, 1), torch.device("cpu")

    def schedule(self, steps):
        return uniform_schedule(steps)

    def encode(self, prompts):
        return Condition({"slope": torch.tensor([float(p.text) / 90 - 0.3 for p in prompts])})

    def velocity(self, latent, timestep, condition):
        return condition.tensors["slope"].view(-1, 1, 1, 1).expand_as(latent).clone()

    def decode(self, latent):
        return latent

    def frozen(self):
        return nullcontext()


def rolled(
    policy,
    probe=NoProbe(),
    members=4,
    steps=10,
    sampler=SDE,
    shared=False,
    prompts=PROMPTS,
    seed=0,
    generator=None,
    **options,
):
    """A rollout, and the usage of its network; `steps` may be a schedule."""
    groups, usage = Groups(len(prompts), members, shared), Usage()
    generator = (generator or torch.Generator()).manual_seed(seed)
    noise, condition = groups.noise(policy.latent_shape, generator), policy.encode(prompts)
    grid = policy.schedule(steps) if isinstance(steps, int) else steps
    given = policy, sampler, grid, condition, noise, generator, groups, probe, usage
    return rollout(*given, **options), usage


def valued(policy, probe, reward=SQUARES, **options):
    """The value table of a rollout."""
    return score_rollout(policy, reward, rolled(policy, probe, **options)[0], PROMPTS).values


def tree_weights(tree, stds, valid):
    """The weights of all transitions [prompt, member, decision], with equal factors."""
    decisions = Decisions.of(uniform_schedule(len(stds)), stds, tree, valid)
    return transition_weights(Credit(torch.ones(decisions.mask.shape)), decisions)


def disturbed(policy):
    """`policy` with other weights than the initial ones."""
    for parameter in policy.trainable().values():
        torch.nn.init.normal_(parameter, std=0.2, generator=seeded(1))
    return policy


class Compared(Trainer):
    """Before each optimizer step, compares the gradient with that of one loss over all rows of the
    mini-batch, each with a network evaluation of its own.
    """

    def objective(self, *arguments):
        self.weights, self.tree = arguments[-1], arguments[1].trajectories.tree
        self.made = super().objective(*arguments)
        self.rows, minibatches = [], self.made.minibatches

        def kept(*given):
            self.rows = minibatches(*given)
            self.left = list(self.rows)
            return self.rows

        self.made.minibatches = kept
        return self.made

    def optimizer_step(self, minibatch, check, metrics):
        rows = self.left.pop(0)
        self.made.prepare([])
        loss = self.method.loss.loss(self.made.batch(rows)).loss
        share = rows.evaluated / rows.total
        expected = torch.autograd.grad(loss * share, [*self.parameters.values()])
        for parameter, gradient in zip(self.parameters.values(), expected, strict=True):
            scale = max(float(gradient.abs().max()), 1e-6)
            actual, wanted = parameter.grad / scale, gradient / scale
            torch.testing.assert_close(actual, wanted, atol=2e-5, rtol=1e-4)
        assert abs(sum(micro.share for micro in minibatch) - share) < 1e-6
        super().optimizer_step(minibatch, check, metrics)
