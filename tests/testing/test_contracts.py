"""Every built-in part, and parts as users write them, keep the promises of `flowrl.testing`."""

import random
import re
from dataclasses import dataclass, replace
from types import MappingProxyType

import pytest
import torch
from contract_parts import DIRECTIONS, Brightness, Own, dense, mixture_policy, tree_rule
from rollouts import AllButLast
from seeded import rand
from small_run import model_files

from flowrl.bench.probes import SomeMembers
from flowrl.core.errors import RewardError
from flowrl.core.experience import Credit, Needs
from flowrl.core.types import Prompt
from flowrl.credit import Uniform, Weighted, group_zscore, zscore
from flowrl.losses import ClippedLoss, DiffusionNFT, Distillation, RewardAscent
from flowrl.probes import Completion, LatentReward, NoProbe, Probe, Substeps
from flowrl.rewards import FunctionReward, GroupSum, WeightedSum, WinRate
from flowrl.run.parts.registry import KINDS, build
from flowrl.run.worlds import ModelWorld
from flowrl.samplers import CPS, DDIMSDE, ODE, DanceSDE, ExponentialSDE, FlowSDE, Windowed
from flowrl.testing import (
    TINY,
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
    tiny_flux_policy,
    tiny_sd3_policy,
)
from flowrl.worlds import MixtureWorld, PolicyOptions, ShapesWorld
from flowrl.worlds.mixture import DirectionReward
from flowrl.worlds.pretrain_pairs import draw_layout, render

SHAPES = ["three red circles", "two blue squares", 'text "K72"']


def repeated(values, decisions):
    """The same credit at every decision, without a copy of it."""
    members = decisions.mask.any(-1, keepdim=True)
    return zscore(values[..., -1:], over=("member",), mask=members).expand_as(decisions.mask)


@dataclass(frozen=True)
class Expanded:
    probe: Probe = NoProbe()

    def assign(self, values, decisions):
        return repeated(values, decisions)


@dataclass(frozen=True)
class OfRecords:
    probe: Probe = Completion()

    needs = Needs(fields=("log_probs",))

    def assign(self, values, decisions, record):
        return Credit(dense(values, decisions) + 0 * record.log_probs)


class Average(LatentReward):
    def score(self, latents, times, prompts):
        return (latents.flatten(1) ** 2).mean(1) * (1 + times)


FOUR = {"decisions": 4}
RULES = [
    "uniform(clamp=none)",
    "uniform(std=batch)",
    "stepwise-gain(normalise=step, lam=0.5, gamma=0.9, probe=completion)",
    "stepwise-gain(lam=0.9, pool=batch, clamp=none, probe=tweedie)",
    "dense-gain",
    "calibrated-gain(cross_fit=true)",
    "moving-average-gain",
    "value-tracker",
    "value-tracker(decay=1.0, std=batch, clamp=none)",
    "turning-point",
    "turning-point(consistent=false, balance=trend, balance_scope=prompt, first_step=false)",
    "turning-point(balance=none, normalise=joint, combine=add)",
    "gdpo(rule=turning-point, batch=false)",
    "gdpo(rule=weighted(rule=stepwise-gain(pool=batch)))",
    "uniform(probe=branch(children=(2, 2)))",
    "stepwise-gain(probe=comb(branches=2, count=1))",
    "moving-average-gain(probe=branch(children=(3,), mean=child))",
    "sibling-relative(leave_one_out=true, probe=branch(children=(2, 2, 2)))",
    "sibling-relative(normalise=false, clamp=none, probe=comb(branches=3))",
    "sibling-relative(probe=comb(branches=3, count=1, strides=(1, 2, 3)))",
    "depth-relative(scope=tree, std=sample, probe=branch(children={0: 2, 3: 2, 6: 2, 9: 2}))",
    "depth-relative(backup=softmax, probe=branch(children=(2, 1, 3)))",
    "depth-relative(probe=comb(branches=2, count=2))",
    "backed-up(probe=branch(children=(3, 2)))",
    "backed-up(backup=mean, clamp=none)",
    "weighted(rule=gdpo(rule=backed-up))",
]
SAMPLERS = [
    "flow-sde(noise_level=0.7)",
    "flow-sde(noise_level=2.0)",
    "dance-sde(noise_level=0.3)",
    "cps(noise_level=0.9)",
    "cps(noise_level=1.0)",
    "ddim-sde(noise_level=0.7)",
    "ddim-sde(noise_level=3.0)",
    "exponential-sde(noise_level=0.7)",
    "exponential-sde(noise_level=2.0)",
]
SOLVERS = [
    "multistep",
    "multistep(solver=unipc)",
    "multistep(solver=sa)",
    "multistep(solver=sa, tau=0.4)",
    "multistep(solver=sa, tau=1.0)",
]
WINDOWS = [
    "fixed",
    "fixed(start=-3)",
    "random(size=3)",
    "random(size=2, low=4, high=6, geometric=0.5)",
    "sliding(size=4, stride=2)",
]
LOSSES = [
    "clipped",
    "clipped(clip_range=1e-5, kl_weight=0.1, kl=without_delta)",
    "clipped(log_prob=released_cps)",
    "grpo-guard",
    "grpo-guard(kl_weight=0.1)",
    "flow-dppo",
    "flow-dppo(bound=1e-3, kl_weight=0.1)",
    "policy-gradient",
    "policy-gradient(kl_weight=0.1, kl=without_delta)",
    "policy-gradient(kl_weight=0.1, kl=velocity)",
    "gspo",
    "gspo(clip_range=0.02, kl_weight=0.1)",
    "kl-penalty",
    "kl-penalty(coefficient=30.0, kl_weight=0.1)",
    "gspo(chunks=(2, 1))",
    "rsm",
    "rsm(fair=true, kl_weight=0.1)",
    "step-nft(kl_weight=0.1)",
]
FORWARD_LOSSES = [
    "diffusion-nft",
    "diffusion-nft(beta=0.1, decay=(75, 0.0075, 0.999), kl_weight=0.0)",
    "diffusion-nft(error=velocity, advantage_clip=8.0)",
    "awm",
    "awm(weight=uniform, kl_weight=0.0, average_weight=0.0)",
    "awm(weight=t, kl_weight=0.0, average_weight=0.0)",
    "awm(weight=t2, kl_weight=0.0, average_weight=0.0)",
    "awm(weight=huber, kl_weight=0.0, average_weight=0.0)",
    "awm(weight=normalised)",
    "awm(trust=quadratic, clip=0.03)",
    "awm(ratio=sum_first, clip=0.01, times=uniform)",
    "awm(off_policy=true, kl=elbo, power=0.5, times=logit-normal)",
    "dgpo",
    "dgpo(clip=none, anchor=old, beta_dpo=2000.0)",
    "dgpo(clip_kl=true, kl_weight=1.0)",
    "crd",
    "crd(form=bce, error=normalised, kl=uniform, sampling_decay=none)",
]


BRIGHT, RED = Brightness(), Brightness(1)
PROBES = [
    "none",
    "tweedie",
    "substeps:3",
    "substeps(count=3, solver=dpm++, every=2)",
    "completion",
    "completion(dtype=bfloat16)",
    "completion(together=false, solver=heun)",
    "continuation:2",
    "critic(reads=hidden)",
    "critic(base=zero)",
    "branch(children={0: 2, 2: 2})",
    "comb(branches=2, count=2)",
]


def small_sd3():
    return ShapesWorld().policy(PolicyOptions(lora_rank=4))


def guided_sd3():
    return tiny_sd3_policy(replace(TINY, guidance_scale=3.0))


def narrow_sd3():
    return tiny_sd3_policy(replace(TINY, dtype="bfloat16"))


def full_flux():
    return tiny_flux_policy(replace(TINY, tuning="full"))


class TwoTasks(MixtureWorld):
    """A world with a quality that refuses one of its tasks."""

    tasks = ("direction", "other")

    class OneTask(DirectionReward):
        def score(self, images, prompts):
            if prompts[0].metadata["task"] == "other":
                raise RewardError("another task")
            return super().score(images, prompts)

    qualities = MappingProxyType({"q": OneTask})

    def prompts(self, task, part):
        known = MixtureWorld().prompts("direction", part)
        return [Prompt(prompt.text, {"task": task}) for prompt in known]


OBJECTS = {
    check_credit: [
        Expanded(),
        OfRecords(),
        Weighted(weights=torch.sqrt),
        tree_rule(lambda values, tree: group_zscore(values, tree.parent)),
    ],
    check_sampler: [
        AllButLast(FlowSDE(0.7)),
        Windowed(CPS(0.5), range(2, 7)),
        Windowed(FlowSDE(), range(10)),
    ],
    check_loss: [ClippedLoss],
    check_probe: [
        SomeMembers(Substeps(2)),
        SomeMembers(Completion(every=2, solver="unipc"), control="uniform"),
        Own(),
    ],
    check_reward: [
        BRIGHT,
        FunctionReward(BRIGHT.score),
        WeightedSum({"bright": BRIGHT, "red": RED}, {"red": 2.0}),
    ],
    check_group_reward: [
        WinRate(BRIGHT),
        GroupSum({"bright": WinRate(BRIGHT), "red": RED}, {"red": 2.0}),
    ],
    check_policy: [tiny_sd3_policy, guided_sd3, tiny_flux_policy, full_flux],
    check_world: [MixtureWorld, TwoTasks],
}
SPECS = {
    check_credit: ("credit", RULES),
    check_sampler: ("sampler", SAMPLERS),
    check_solver: ("sampler", SOLVERS),
    check_window: ("window", WINDOWS),
    check_loss: ("loss", LOSSES),
    check_forward_loss: ("loss", FORWARD_LOSSES),
    check_probe: ("probe", PROBES),
}
PARTS = [
    *((check, part, {}) for check, parts in OBJECTS.items() for part in parts),
    *((check, spec, {}) for check, (_, specs) in SPECS.items() for spec in specs),
    (check_credit, "weighted(weights=(1.8, 1.0, 0.0, 1.3), rule=uniform(std=batch))", FOUR),
    *((check_sampler, part, {"steps": 2}) for part in ("flow-sde", "dance-sde")),
    (check_sampler, Windowed(CPS(), range(1)), {"steps": 2}),
    (check_sampler, "flow-sde", {"steps": 1}),
    (check_sampler, Windowed(FlowSDE(), range(1)), {"steps": 1}),
    (check_policy, small_sd3, {"prompts": SHAPES}),
    (check_policy, narrow_sd3, {"tolerance": 2e-2}),
    pytest.param(check_world, ShapesWorld, {}, marks=pytest.mark.slow),
    pytest.param(
        check_probe, "substeps(count=4, guidance=off)", {"members": 2}, marks=pytest.mark.slow
    ),
]


def name(value):
    """A spec or the name of a class; nothing for checks and options."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict) or hasattr(value, "__wrapped__"):
        return ""
    return getattr(value, "__name__", type(value).__name__)


def part_of(check, part):
    """A new part from its spec, or the part itself."""
    return build(SPECS[check][0], part) if isinstance(part, str) else part


@pytest.mark.parametrize(("check", "part", "options"), PARTS, ids=name)
def test_a_part_keeps_its_promises(check, part, options):
    findings = check(part_of(check, part), **options)
    assert findings.ok and not findings.marked("advice"), str(findings)


@pytest.mark.parametrize(
    "part",
    [ODE(), FlowSDE(0.0), CPS(0.0), DanceSDE(0.0), DDIMSDE(0.0), ExponentialSDE(0.0)],
    ids=name,
)
def test_samplers_without_noise_keep_all_promises_but_that_of_decisions(part):
    """ODE steps are for evaluation; noise 0 is the ODE."""
    assert check_sampler(part).broken == ["makes_decisions"]


@pytest.mark.parametrize("mode", ["positive_only", "negative_only", "one_only", "binary"])
def test_modes_that_select_advantages_are_not_proportional_to_them(mode):
    assert check_forward_loss(DiffusionNFT(mode=mode)).broken == ["starts_along_the_advantage"]
    assert check_loss(Distillation()).broken == ["starts_along_the_advantage"]
    for loss in (RewardAscent(Average()), RewardAscent(target=0.1), RewardAscent(kl_weight=0.1)):
        broken = ["starts_along_the_advantage", "trains_zero_advantages_as_declared"]
        assert check_forward_loss(loss).broken == broken


@pytest.mark.parametrize("all_failed", ["zero", "keep"])
def test_advantages_divided_by_the_mean_reward_depend_on_its_zero(all_failed):
    rule = Uniform(std="mean", clamp=None, all_failed=all_failed)
    assert check_credit(rule).broken == ["ignores_a_constant", "gives_a_silent_group_zero"]


def test_the_points_of_the_mixture_are_no_images():
    findings = check_policy(mixture_policy(), DIRECTIONS)
    assert findings.ok and findings.marked("advice") == ["decodes_images"]


@pytest.mark.parametrize("form", ShapesWorld.forms)
def test_rewards_of_the_worlds(form):
    """Pictures of what each prompt asks for, every other one spoiled a little."""
    world, rng = ShapesWorld(), random.Random(0)
    prompts = [p for task in world.tasks for p in world.prompts(task, "heldout")[:3]]
    images = render(torch.tensor([draw_layout(p.metadata["request"], rng) for p in prompts]))
    images[::2] += 0.2 * rand(*images[::2].shape)
    findings = check_reward(world.reward(form), (images.clamp(0, 1), prompts))
    assert findings.ok, str(findings)


@pytest.mark.parametrize("kind", ["credit", "sampler", "window", "loss", "probe"])
def test_every_built_in_name_is_held_to_its_contract(kind):
    """A part added to the registry must be added here."""
    specs = [spec for known, specs in SPECS.values() if known == kind for spec in specs]
    tested = {re.split("[(:]", spec)[0] for spec in specs}
    built_in = {name for name, at in KINDS[kind].built_in.items() if "flowrl.bench" not in at}
    assert built_in <= tested | {"ode", "distillation", "ascent"}


@pytest.mark.slow
def test_the_world_of_a_model(tmp_path):
    model_files(tmp_path)
    (tmp_path / "held.txt").write_text("a red hat\n")
    names = ("model", "prompts.txt", "held.txt", "reward.py:Redness")
    files = (str(tmp_path / name) for name in names)

    class TinyWorld(ModelWorld):
        def policy(self, options):
            return super().policy(TINY)

    findings = check_world(TinyWorld(*files))
    assert findings.ok, str(findings)
