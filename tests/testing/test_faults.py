"""`flowrl.testing` finds what is broken: planted faults, each named by the promise that it breaks."""

import copy
import random
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from contract_parts import DIRECTIONS, Brightness, Own, dense, mixture_policy, tree_rule
from seeded import randn

import flowrl.testing as testing
from flowrl.core.errors import ConfigError, RewardError
from flowrl.core.experience import Credit, Needs
from flowrl.core.forward import WeightCopy
from flowrl.core.types import Condition, Gaussian, LossResult, Prompt, Schedule, unit_means
from flowrl.credit import (
    MovingAverageGain,
    StepwiseGain,
    Uniform,
    Weighted,
    gains,
    group_zscore,
    zscore,
)
from flowrl.credit.table import masked_std
from flowrl.flow import expand
from flowrl.flow.gaussian import log_prob
from flowrl.losses import DGPO, GSPO, ClippedLoss
from flowrl.policies import SD3, PipelinePolicy
from flowrl.probes import Branch, Call, Completion, Cost, NoProbe, Probe
from flowrl.rewards import win_rates
from flowrl.samplers import FlowSDE, Multistep, Windowed
from flowrl.testing import (
    check_credit,
    check_forward_loss,
    check_group_reward,
    check_loss,
    check_policy,
    check_probe,
    check_reward,
    check_sampler,
    check_solver,
    check_window,
    check_world,
    credit_contract,
)
from flowrl.testing.tiny import TINY, tiny_sd3
from flowrl.worlds import MixtureWorld
from flowrl.worlds.mixture import DirectionReward


def methods(check):
    """The promises of a kind of part."""
    return check.__wrapped__.promises()


def rule(wrong, probe=Completion(), **extra):
    """A rule whose assign is `wrong(values, decisions)`."""
    body = {"assign": lambda self, values, decisions: wrong(values, decisions), "probe": probe}
    return type("Rule", (), {**body, **extra})()


class Remembers:
    """Multiplies by a number per prompt that it remembers, by text or by place."""

    probe, needs = Completion(), Needs(fields=("prompts",))

    def __init__(self, by_place=False):
        self.by_place, self.known = by_place, {}

    def assign(self, values, decisions, record):
        texts = [prompt.text for prompt in record.prompts]
        keys = list(range(len(texts))) if self.by_place else texts
        factor = torch.tensor([self.known.get(key, 1.0) for key in keys])
        final = values[..., -1].mean(1).tolist()
        self.known |= {key: 1.0 + value for key, value in zip(keys, final, strict=True)}
        return Credit(dense(values, decisions) * factor[:, None, None])


class Forgets(Remembers):
    """Leaves its memory out of its state."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def by_members(self, values, decisions):
    """Takes the members for those of the probe's own tree, in order."""
    final = values[..., -1].masked_fill(~decisions.mask.any(-1), torch.nan)
    pairs = final[:, : 2 * (values.shape[1] // 2)].unflatten(1, (-1, 2))
    advantages = torch.zeros_like(values[..., 1:])
    centred = (pairs - pairs.nanmean(2, keepdim=True)).flatten(1).nan_to_num()
    advantages[:, : centred.shape[1], 0] = centred
    return advantages


def by_components(self, values, decisions, record):
    """Leaves out prompts if the reward has components."""
    return dense(values, decisions)[: 3 - len(record.parts)]


def in_place(values, decisions):
    values -= values.clone().mean(1, keepdim=True)
    return dense(values, decisions)


def place(axis, values):
    return 1.0 + torch.arange(values.shape[axis]).view(-1, *[1] * (2 - axis))


def steep(values, decisions):
    """Z divided once more by the std, without a constant."""
    spread = masked_std(gains(values), ("member",), decisions.mask)
    return dense(values, decisions) / (spread - 1e-7).clamp(min=0)


RULES = {
    "declares_a_probe": [rule(dense, "completion"), type("Rule", (), {"probe": NoProbe()})()],
    "leaves_its_input_alone": [
        rule(in_place),
        rule(lambda v, d: dense(v, d) * ~d.mask.logical_not_()),
        tree_rule(lambda v, tree: group_zscore(v, tree.parent) + 0 * tree.node.sub_(1)),
    ],
    "returns_advantages_per_decision": [
        rule(lambda v, d: dense(v, d).transpose(0, 1)),
        rule(lambda v, d: Credit(dense(v, d), 2.0 * d.mask)),
        rule(None, needs=Needs(fields=("parts",)), assign=by_components),
    ],
    "reads_only_what_its_probe_fills": [rule(dense, NoProbe())],
    "is_deterministic": [rule(lambda v, d: dense(v, d) + 1e-3 * torch.randn(1))],
    "reads_nothing_outside_the_mask": [
        rule(lambda v, d: zscore(gains(v).nan_to_num(), over=("member",))),
        rule(lambda v, d: dense(v, d) * v[..., :1].nanmean(), needs=StepwiseGain().needs),
        rule(lambda v, d: dense(v, d) * d.mask.any(-1).float().mean()),
    ],
    "ignores_a_constant": [rule(lambda v, d: v[..., 1:] - 0.5)],
    "treats_members_alike": [
        rule(lambda v, d: dense(v, d) * place(1, v)),
        rule(None, Branch((2, 2)), assign=by_members),
    ],
    "treats_prompts_alike": [
        rule(lambda v, d: dense(v, d) * place(0, v)),
        Remembers(by_place=True),
    ],
    "gives_a_silent_group_zero": [
        rule(lambda v, d: zscore(gains(v), over=("prompt", "member", "decision"), mask=d.mask))
    ],
    "survives_extremes": [rule(steep)],
    "keeps_its_memory": [Remembers(), Forgets()],
    "pays_the_better_member": [rule(lambda v, d: -dense(v, d))],
}


def sampler(change):
    """A sampler with `change(good, latent, velocity, times at the ends of the steps)`."""

    class Altered:
        def transition(self, latent, velocity, schedule, step):
            kernel = Windowed(FlowSDE(0.7), range(1, 8))
            moved = kernel.transition(latent, velocity, schedule, step)
            return change(moved, latent, velocity, schedule.times[step + 1])

    return Altered()


def mean(change):
    return sampler(lambda g, x, v, s: Gaussian(g.mean + change(g.mean, v), g.std))


def std(change):
    return sampler(lambda g, x, v, s: Gaussian(g.mean, change(g.std, x, s)))


SAMPLERS = {
    "returns_a_gaussian_per_sample": [
        sampler(lambda g, *rest: Gaussian(g.mean, expand(g.std, g.mean)))
    ],
    "is_finite_at_every_step": [
        std(lambda std, x, s: torch.where(s == 0, torch.nan, std)),
        std(lambda std, x, s: std.clamp(min=1e-8)),
    ],
    "moves_along_the_path": [mean(lambda mean, v: 0.01 * v)],
    "computes_in_float32": [
        sampler(lambda g, x, v, s: Gaussian((x - 0.1 * v).float() + 0.1 * v + g.mean - x, g.std))
    ],
    "treats_samples_separately": [mean(lambda mean, v: 0.01 * mean.detach().mean(0))],
    "has_one_std_per_step": [std(lambda std, x, s: std * (1 + 0.1 * (x.flatten(1).mean(1) > 0)))],
    "is_pure": [mean(lambda mean, v: 1e-3 * torch.randn(1))],
    "passes_gradient_through_the_mean": [
        sampler(lambda g, *rest: Gaussian(g.mean.detach(), g.std))
    ],
    "makes_decisions": [std(lambda std, x, s: torch.zeros_like(std))],
}


class Midpoints:
    """Euler's method, and after the first step the slope at the middle of the step,
    extrapolated.
    """

    def __init__(self, fault=""):
        self.fault = fault

    def grid(self, schedule):
        skip = 2 if self.fault == "keeps_the_number_of_steps" else 1
        return type(schedule)(schedule.times[::skip])

    def solution(self, schedule, draw):
        times, fault, slopes = schedule.times, self.fault, []
        self.last = []

        def step(number, velocity, x):
            history = self.last if fault == "starts_anew" else slopes
            length, slope = times[number] - times[number + 1], velocity
            if history:
                ratio = length / (times[number - 1] - times[number])
                slope = velocity + 0.5 * ratio * (velocity - history[-1])
            if fault == "treats_samples_separately":
                slope = slope + 0.01 * (slope - slope.mean(0)) * (number < 5)
            if fault == "ends_at_the_predicted_image":
                slope = 1.01 * slope
            if fault == "converges":
                slope = slope + 0.1 * (velocity - history[0] if history else 0)
            history.append(velocity)
            end = x.sub_(length * slope) if fault == "in place" else x - length * slope
            return end.double() if fault == "returns_states" else end

        return step


class OwnNoise(Multistep):
    """Draws from torch's global generator."""

    def solution(self, schedule, draw):
        return super().solution(schedule, torch.randn_like)


SOLVERS = {p.__name__: [Midpoints(p.__name__)] for p in methods(check_solver)}
SOLVERS["starts_anew"] += [OwnNoise("sa", tau=0.4)]
SOLVERS["returns_states"] += [Midpoints("in place")]


class FaultyWindow:
    def __init__(self, step=1, seeded=True):
        self.step, self.seeded = step, seeded

    def steps(self, count, generator, iteration=0):
        start = int(torch.randint(1, count - 1, (), generator=generator if self.seeded else None))
        return [start, start + self.step]


WINDOWS = {
    "returns_steps": [FaultyWindow(step=-1)],
    "draws_reproducibly": [FaultyWindow(seeded=False)],
}


def brightness(images):
    return images.flatten(1).mean(1)


@dataclass
class WithoutParts:
    change: Any = lambda scores, images: scores

    def score(self, images, prompts):
        return self.change(brightness(images), images)


@dataclass
class FaultyReward(WithoutParts):
    factor: float = 1.0

    def parts(self, images, prompts):
        return {"bright": brightness(images)}

    def total(self, parts):
        return self.factor * parts["bright"]


REWARDS = {
    "gives_one_number_per_image": [
        WithoutParts(lambda s, images: s[:, None]),
    ],
    "is_pure": [WithoutParts(lambda s, images: s + 0 * images.mul_(0.5).sum())],
    "treats_samples_separately": [
        WithoutParts(lambda s, images: s.sort().values),
        WithoutParts(lambda s, images: s - s.mean()),
    ],
    "adds_up_its_parts": [FaultyReward(factor=2.0)],
}


@dataclass
class FaultyGroupReward:
    change: Any = lambda rates, scores: rates
    evaluation: Any = Brightness()

    def score_groups(self, images, prompts):
        scores = images.flatten(2).mean(2)
        return self.change(win_rates(scores), scores)


@dataclass
class Doubled(FaultyGroupReward):
    """Its components add up to twice the score."""

    def group_parts(self, images, prompts):
        return {"bright": self.score_groups(images, prompts)}

    def total(self, parts):
        return 2.0 * parts["bright"]


def ranks(rates, scores):
    return scores.argsort(dim=1, stable=True).argsort(dim=1).float()


GROUP_REWARDS = {
    "gives_one_number_per_image": [FaultyGroupReward(lambda rates, s: rates.flatten())],
    "names_an_evaluation_reward": [FaultyGroupReward(evaluation="brightness")],
    "treats_members_alike": [
        FaultyGroupReward(lambda rates, s: rates / (s.shape[1] > 2)),
        FaultyGroupReward(lambda rates, s: rates + 0.01 * (s > s[:, :1])),
    ],
    "treats_samples_separately": [
        FaultyGroupReward(lambda rates, s: win_rates(s.view(1, -1)).view_as(s))
    ],
    "gives_equal_images_equal_scores": [FaultyGroupReward(ranks)],
    "adds_up_its_parts": [Doubled()],
}


@dataclass(frozen=True)
class FaultyLoss:
    """A clipped loss, changed by `change(batch, loss, mean)`, where `mean` is the weighted mean."""

    change: Any = lambda batch, loss, mean: loss
    reported: Any = lambda batch: {}
    needs_reference: bool = False
    trains_zero_advantages: bool = False
    unit: str = "transition"

    def loss(self, batch):
        loss = ClippedLoss(clip_range=0.5, kl_weight=0.0).loss(batch).loss
        counts = (batch.weight > 0) & (batch.behaviour.std > 0)
        weight = torch.where(counts, batch.weight, 0.0)

        def mean(terms):
            terms = torch.where(counts, terms, 0.0)
            return (weight * terms).sum() / weight.sum().clamp(min=1e-9)

        return LossResult(self.change(batch, loss, mean), self.reported(batch))


def distance(batch):
    return (batch.new.mean - batch.behaviour.mean.detach()).square().flatten(1).mean(1)


def unmasked(batch, loss, mean):
    return loss + 0.0 * (batch.weight * batch.advantages).sum()


def still(batch, loss, mean):
    return loss + 0.1 * (batch.weight * distance(batch) * (batch.behaviour.std == 0)).mean()


@dataclass(frozen=True)
class FaultyUnits:
    """GSPO with a changed batch."""

    change: Any = lambda batch: batch
    unit: str = "trajectory"
    row_terms: Any = GSPO().row_terms
    needs_reference: bool = False
    trains_zero_advantages: bool = False

    def loss(self, batch):
        return GSPO(clip_range=0.02).loss(self.change(batch))


def means_without_weights(batch):
    terms, units = GSPO().row_terms(batch), batch.units("trajectory")
    means = unit_means(terms, units, (batch.weight > 0).float())
    return batch if batch.pooled is not None else replace(batch, pooled=means)


LOSSES = {
    "declares_what_it_needs": [FaultyLoss(unit="pair"), FaultyLoss(unit="group")],
    "returns_a_scalar": [FaultyLoss(lambda batch, loss, mean: loss / 0)],
    "is_pure": [FaultyLoss(lambda batch, loss, mean: loss * (1 + 1e-3 * torch.randn(())))],
    "ignores_rows_of_weight_0": [FaultyLoss(unmasked)],
    "ignores_deterministic_rows": [FaultyLoss(still)],
    "survives_weights_of_0": [
        FaultyLoss(lambda batch, loss, mean: loss * batch.weight.sum() / batch.weight.sum()),
        FaultyLoss(reported=lambda batch: {"mean": batch.new.mean.mean()}),
    ],
    "starts_at_ratio_one": [FaultyLoss(reported=lambda batch: {"ratio_mean": torch.tensor(1.1)})],
    "starts_along_the_advantage": [FaultyLoss(lambda batch, loss, mean: -loss)],
    "trains_zero_advantages_as_declared": [
        FaultyLoss(lambda batch, loss, mean: loss + mean(distance(batch))),
        FaultyLoss(trains_zero_advantages=True),
    ],
    "is_a_weighted_mean": [
        FaultyLoss(lambda batch, loss, mean: loss * len(batch.weight)),
        FaultyUnits(lambda batch: replace(batch, pooled=None)),
        FaultyUnits(unit="group"),
        FaultyUnits(row_terms=lambda batch: log_prob(batch.new, batch.next_node)),
        FaultyUnits(means_without_weights),
    ],
    "does_not_depend_on_resolution": [
        FaultyLoss(lambda batch, loss, mean: loss * batch.new.mean[0].numel())
    ],
    "differentiates_the_new_policy_only": [
        FaultyLoss(
            lambda batch, loss, mean: loss + 1e-9 * mean(batch.behaviour.mean.flatten(1).sum(1))
        )
    ],
    "needs_what_it_declares": [
        FaultyLoss(lambda batch, loss, mean: loss + 0 * batch.reference.std.sum()),
        FaultyLoss(needs_reference=True),
    ],
}


class FaultyTimes:
    """Times that leave (0, 1]."""

    def draws(self, schedule):
        return 3

    def draw(self, schedule, samples, generator):
        return torch.rand(samples, 3, generator=generator) - 0.5


class FaultyForwardLoss:
    """DGPO's policy term in a few lines, with one fault; like the others, without a penalty."""

    needs_reference, unit = True, "group"

    def __init__(self, fault=""):
        self.fault = fault
        self.copies = {"average": WeightCopy()} if fault == "needs_what_it_declares" else {}
        self.times = FaultyTimes() if fault == "draws_times" else DGPO().times
        self.noise = "all" if fault == "declares_what_it_needs" else "group"

    def row_terms(self, batch):
        with torch.no_grad():
            reference = batch.velocity_of("reference", self)
            gap = self.error(batch, batch.new) - self.error(batch, reference)
            return 50.0 * batch.advantages.masked_fill(batch.weight == 0, 0.0) * gap

    def error(self, batch, velocity):
        mask = (batch.weight > 0)[:, None, None]
        return torch.where(mask, velocity - batch.target.detach(), 0.0).square().flatten(1).mean(1)

    def loss(self, batch):
        pooled = batch.pooled
        if pooled is None:
            pooled = unit_means(self.row_terms(batch), batch.units("group"), batch.weight)
        sign = -1.0 if self.fault == "starts_along_the_advantage" else 1.0
        scale = torch.sigmoid(pooled).detach() * batch.advantages.masked_fill(batch.weight == 0, 0)
        total = (batch.weight * sign * scale * self.error(batch, batch.new)).sum()
        return LossResult(total / batch.weight.sum().clamp(min=1e-9), {})


# the other promises are those of policy losses
FORWARD_FAULTS = "declares_what_it_needs needs_what_it_declares draws_times"
FORWARD_FAULTS += " starts_along_the_advantage"
FORWARD_LOSSES = {name: [FaultyForwardLoss(name)] for name in FORWARD_FAULTS.split()}


class FaultyPolicy:
    """The mixture's policy with one member replaced; the others see the replacement only where they
    call it through `self`.
    """

    def __init__(self, **faults):
        self.inner, self.faults = mixture_policy(), faults

    def __getattr__(self, name):
        fault = self.faults.get(name)
        if name not in self.faults:
            return getattr(self.inner, name)
        return (lambda *given: fault(self.inner, *given)) if callable(fault) else fault


@contextmanager
def stays_in_reference(inner):
    inner._base_only = True
    with torch.no_grad():
        yield
    inner._base_only = False


@contextmanager
def rounds_weights(inner):
    with torch.no_grad():
        yield
        for parameter in inner.net.parameters():
            parameter.copy_(parameter.half().float())


@contextmanager
def merges_badly(inner):
    with torch.no_grad():
        inner.net[-1].bias += 0.1
        yield
        inner.net[-1].bias -= 0.1


def velocity(change):
    return FaultyPolicy(velocity=lambda p, *given: change(p.velocity(*given)))


def grid(*ends):
    return FaultyPolicy(schedule=lambda p, steps: Schedule(torch.linspace(*ends, steps + 1)))


def trained(change):
    return FaultyPolicy(trainable=lambda p: {n: change(q) for n, q in p.trainable().items()})


def by_size(p, prompts):
    return Condition({"direction": p.encode(prompts).tensors["direction"] * len(prompts)})


def family(**methods):
    """Makes a policy over the tiny SD3 whose family has these faulty functions."""
    return lambda: PipelinePolicy(tiny_sd3(), type("Faulty", (SD3,), methods)(), TINY)


def negated(self, *given):
    return -SD3.velocity(self, *given)


def from_data_to_noise(self, transformer, latent, timestep, *given):
    return SD3.velocity(self, transformer, latent, 1000 - timestep, *given)


def without_shift(self, pipe, latent, size):
    return pipe.vae.decode(latent / pipe.vae.config.scaling_factor, return_dict=False)[0]


def even_grid(self, scheduler, steps, *given):
    scheduler.set_timesteps(sigmas=[1 - step / steps for step in range(steps)])


def without_pooled(self, *given):
    return [row | {"pooled": 0 * row["pooled"]} for row in SD3.encode(self, *given)]


POLICIES = {
    "agrees_with_its_pipeline": [
        family(velocity=negated),
        family(velocity=from_data_to_noise),
        family(decode=without_shift),
        family(set_timesteps=even_grid),
        family(encode=without_pooled),
    ],
    "has_all_members": [FaultyPolicy(decode=None)],
    "has_a_schedule": [grid(1, 0.01), grid(0.5, 0)],
    "gives_velocities": [
        FaultyPolicy(encode=lambda p, prompts: p.encode(prompts[:1])),
        velocity(lambda v: v.bfloat16()),
        velocity(lambda v: v / 0),
    ],
    "treats_samples_separately": [
        velocity(lambda v: v - v.mean(0)),
        FaultyPolicy(
            velocity=lambda p, x, t, condition: p.velocity(x, t[:1].expand(len(x)), condition)
        ),
    ],
    "conditions_can_be_rearranged": [
        FaultyPolicy(
            encode=by_size,
            velocity=lambda p, x, t, condition: (
                p.velocity(x, t, condition) + condition.tensors["direction"][..., None, None]
            ),
        )
    ],
    "decodes_images": [
        FaultyPolicy(decode=lambda p, latent: latent.flatten(1)),
        FaultyPolicy(decode=lambda p, x: x * p.net[0].bias.sum()),
    ],
    "names_what_is_trained": [
        FaultyPolicy(trainable=lambda p: {}),
        trained(lambda q: torch.nn.Parameter(q.detach().clone())),
    ],
    "carries_a_gradient": [velocity(lambda v: v.detach())],
    "has_a_reference": [
        FaultyPolicy(reference=lambda p: torch.no_grad()),
        FaultyPolicy(reference=stays_in_reference),
    ],
    "may_be_frozen": [
        FaultyPolicy(frozen=lambda p: nullcontext()),
        FaultyPolicy(frozen=rounds_weights),
        FaultyPolicy(frozen=merges_badly),
    ],
}


def faulty_probe(**methods):
    return type("Faulty", (Own,), methods)()


def estimator(change):
    """A probe whose estimates are `change(latents, run)`."""
    return faulty_probe(
        estimate=lambda self, run: {node: change(run.start(node)[0], run) for node in run.nodes},
        rewards=Probe.rewards,
    )


def changes_weights(self, run):
    next(iter(run.walk.policy.trainable().values())).data.add_(0.01)
    return Own.estimate(self, run)


def own_noise(x, run):
    return x + 0.3 * randn(*x.shape)


def half(self, scored):
    return {node: values for node, values in Own.rewards(self, scored).items() if node % 2}


def costs(call):
    return faulty_probe(cost=lambda self, shape: Cost([call(shape.rows[n]) for n in shape.nodes]))


PROBES = {
    "is_a_probe": ["tweedie"],
    "estimates_final_latents": [
        estimator(lambda x, run: x / 0),
    ],
    "fills_what_it_says": [
        faulty_probe(rewards=half),
        faulty_probe(fills=lambda self, steps: range(2)),
    ],
    "leaves_the_rollout_alone": [
        faulty_probe(estimate=changes_weights),
        estimator(lambda x, run: x + run.trajectories.states.add_(1).sum()),
    ],
    "is_deterministic": [estimator(lambda x, run: x + 0.1 * torch.randn_like(x))],
    "does_not_depend_on_chunks": [estimator(own_noise), estimator(lambda x, run: x - x.mean(0))],
    "costs_what_it_declares": [costs(lambda rows: Call(10)), costs(lambda rows: Call(rows, 0.5))],
}


class FaultyWorld(MixtureWorld):
    """The mixture with some members replaced."""

    def __init__(self, **faults: Any):
        for name, fault in faults.items():
            setattr(self, name, fault)


mixture = MixtureWorld()


def shuffled(task, part):
    prompts = mixture.prompts(task, part)
    return [prompts[number] for number in torch.randperm(len(prompts))]


def with_part(task, part):
    return [Prompt(prompt.text, {"part": part}) for prompt in mixture.prompts(task, part)]


class ReadsMetadata(DirectionReward):
    """A reward that needs what only the world's prompts have."""

    def score(self, images, prompts):
        known = [float("part" in prompt.metadata) for prompt in prompts]
        return super().score(images, prompts) + torch.tensor(known)


class OverBatch(DirectionReward):
    """A reward that is normalised over the batch."""

    def score(self, images, prompts):
        scores = super().score(images, prompts)
        return scores - scores.mean()


class Refuses:
    def score(self, images, prompts):
        raise RewardError("no colours")


SHARED = mixture_policy()


def world_with(change):
    """The mixture's world with a changed policy."""

    def made(options):
        model = mixture.policy(options)
        change(model)
        return model

    return FaultyWorld(policy=made)


WORLDS = {
    "has_all_members": [FaultyWorld(parse=None)],
    "gives_prompts": [FaultyWorld(prompts=shuffled)],
    "makes_equal_policies": [
        world_with(lambda model: torch.nn.init.normal_(model.net[0].weight)),
        world_with(lambda model: setattr(model, "net", SHARED.net)),
    ],
    "parses_its_prompts": [
        FaultyWorld(parse=lambda text: Prompt(text.upper())),
        FaultyWorld(prompts=with_part, reward=ReadsMetadata),
    ],
    "policy_keeps_its_promises": [
        world_with(lambda model: setattr(model, "reference", torch.no_grad))
    ],
    "rewards_keep_their_promises": [
        FaultyWorld(reward=OverBatch),
        FaultyWorld(qualities={"q": OverBatch}),
        FaultyWorld(qualities={"q": Refuses}),
    ],
}
FAULTS = {
    check_credit: RULES,
    check_sampler: SAMPLERS,
    check_solver: SOLVERS,
    check_window: WINDOWS,
    check_reward: REWARDS,
    check_group_reward: GROUP_REWARDS,
    check_loss: LOSSES,
    check_forward_loss: FORWARD_LOSSES,
    check_policy: POLICIES,
    check_probe: PROBES,
    check_world: WORLDS,
}
NAMES = {getattr(testing, name): name for name in testing.__all__ if name.startswith("check_")}
CASES = [
    pytest.param(check, promise, part, id=f"{NAMES[check]}-{promise}")
    for check, faults in FAULTS.items()
    for promise, parts in faults.items()
    for part in parts
]


@pytest.mark.parametrize(("check", "promise", "part"), CASES)
def test_a_fault_breaks_its_promise(check, promise, part):
    random.seed(3)
    options = {"prompts": DIRECTIONS} if check is check_policy else {}
    findings = check((lambda: part) if check is check_credit else part, **options)
    assert promise in findings.broken, str(findings)
    assert len(findings.broken) <= 3, str(findings)


def test_every_promise_has_a_fault():
    """Kinds share some promises, such as `is_pure`; a fault in a part of one kind is enough."""
    planted = {
        promise
        for check, faults in FAULTS.items()
        for promise in methods(check)
        if promise.__name__ in faults
    }
    assert not {promise for check in FAULTS for promise in methods(check)} - planted


@pytest.mark.parametrize(
    ("check", "part"),
    [
        (check_solver, Midpoints()),
        (check_loss, FaultyLoss()),
        (check_loss, FaultyUnits()),
        (check_forward_loss, FaultyForwardLoss()),
    ],
)
def test_the_parts_without_a_fault_keep_every_promise(check, part):
    findings = check(part)
    assert findings.ok, str(findings)


def upside_down(values, decisions):
    return -dense(values, decisions) - 2.0 * dense(values, decisions).square()


@pytest.mark.parametrize(
    ("check", "part", "promise"),
    [
        (check_credit, rule(upside_down), "pays_the_better_member"),
        (
            check_world,
            FaultyWorld(prompts=lambda task, part: mixture.prompts(task, "train")),
            "gives_prompts",
        ),
    ],
)
def test_odd_parts_get_advice(check, part, promise):
    findings = check(part)
    assert findings.ok and findings.marked("advice") == [promise]
    assert f"advice   {promise}" in str(findings)


@dataclass(frozen=True)
class Surprise:
    """A rule around log-probabilities, whose mean is over the mask unless it is `wrong`."""

    wrong: bool = False
    probe = NoProbe()
    needs = Needs(fields=("log_probs",))

    def assign(self, values, decisions, record):
        mask = torch.ones_like(decisions.mask) if self.wrong else decisions.mask
        logs = record.log_probs.to(values).nan_to_num(0.0).where(mask, 0.0)
        weights = (logs.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)).sigmoid()
        weights = weights.expand(mask.shape).where(decisions.mask, 0.0)
        return Credit(Uniform().assign(values, decisions), weights)


def test_log_probabilities_outside_the_mask_are_not_read():
    assert check_credit(Surprise()).ok
    findings = check_credit(Surprise(wrong=True))
    assert findings.marked("BROKEN") == ["reads_nothing_outside_the_mask"]


def test_findings_are_counted_by_mark():
    findings, total = check_credit(Uniform()), len(methods(check_credit))
    assert f": {total} kept\n" in str(findings)
    broken = str(check_credit(rule(lambda v, d: dense(v, d).transpose(0, 1))))
    assert f": 2 kept, 1 BROKEN, {total - 3} untried\nkept" in broken
    drawn = check_solver(Multistep("sa", tau=0.4))
    assert drawn.ok and drawn.marked("n/a") == ["converges"] and ", 1 n/a\n" in str(drawn)


def test_an_exception_of_the_part_is_told_with_its_promise():
    def fails(values, decisions):
        raise RuntimeError("no such node")

    findings = check_credit(rule(fails))
    message = next(finding.message for finding in findings if finding.mark == "BROKEN")
    assert (
        "'returns_advantages_per_decision'" in message and "RuntimeError: no such node" in message
    )


def test_every_promise_gets_a_fresh_part():
    """A part that counts its calls, and breaks after some, keeps all promises."""
    part = Weighted(weights=(1.8, 1.0, 0.0, 1.3))
    used = copy.deepcopy(part)
    assert check_credit(part, decisions=4).ok and part == used
    assert not check_credit(part).ok, "it is tried with other numbers of decisions"
    memory = MovingAverageGain()
    assert check_credit(memory).ok and not memory.baseline
    model = mixture_policy()
    before = copy.deepcopy(dict(model.trainable()))
    check_policy(model, DIRECTIONS)
    torch.testing.assert_close(dict(model.trainable()), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: check_credit(Uniform(), without=("pays_rent",)), "without = .*declares_a_probe"),
        (lambda: check_reward(FaultyReward(), (torch.rand(3, 3, 8, 8), [])), "examples"),
        (lambda: check_policy(mixture_policy(), ["one", "one"]), "two or more different prompts"),
    ],
)
def test_options_are_checked(call, words):
    with pytest.raises(ConfigError, match=words):
        call()


def test_a_probe_whose_trees_fit_no_table_is_named():
    part = rule(None, Branch({0: 97}), assign=lambda self, values, decisions: values[..., 1:])
    assert "fit no group of up to 97" in str(check_credit(part))


negated = rule(lambda values, decisions: -dense(values, decisions))
test_a_rule_with_pytest = credit_contract(negated, without=("pays_the_better_member",))
