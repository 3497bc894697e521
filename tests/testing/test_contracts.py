"""Every built-in part, and parts as users write them, keep the promises of `flowrl_testing`."""

import random
from dataclasses import dataclass, replace
from types import MappingProxyType

import pytest
import torch
from all_but_last import AllButLast
from contract_parts import DIRECTIONS, Brightness, Own, dense, mixture_policy, tree_rule
from flowrl_bench.pretrain_pairs import draw_layout, render
from flowrl_bench.probes import SomeMembers
from flowrl_testing import (
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
    tiny_sd3,
    tiny_sd3_policy,
)

from flowrl.core.errors import RewardError
from flowrl.core.experience import Credit
from flowrl.core.types import Prompt
from flowrl.credit import (
    GDPO,
    BackedUp,
    DepthRelative,
    MovingAverageGain,
    SiblingRelative,
    StepwiseGain,
    TurningPoint,
    Uniform,
    ValueTracker,
    Weighted,
    group_zscore,
    zscore,
)
from flowrl.flow import LogitNormalTimes, UniformTimes
from flowrl.losses import (
    AWM,
    DGPO,
    GSPO,
    ClippedLoss,
    DiffusionNFT,
    FlowDPPO,
    GRPOGuard,
    KLPenalty,
    PolicyGradientLoss,
)
from flowrl.parts.registry import KINDS, build
from flowrl.probes import Branch, Comb, Completion, Continuation, NoProbe, Probe, Substeps, Tweedie
from flowrl.rewards import FunctionReward, GroupSum, WeightedSum, WinRate
from flowrl.samplers import (
    CPS,
    DDIMSDE,
    ODE,
    DanceSDE,
    FixedWindow,
    FlowSDE,
    Multistep,
    RandomWindow,
    SlidingWindow,
    Windowed,
)
from flowrl.worlds import MixtureWorld, ModelWorld, PolicyOptions, ShapesWorld
from flowrl.worlds.base import world
from flowrl.worlds.mixture import DirectionReward

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

    def credit(self, shown):
        return Credit(dense(shown.values, shown.decisions))


FOUR = Weighted((1.8, 1.0, 0.0, 1.3), Uniform(std="batch"))
RULES = [
    Expanded(),
    OfRecords(),
    tree_rule(lambda values, tree: group_zscore(values, tree.parent)),
    Uniform(clamp=None),
    Uniform(std="batch"),
    FOUR,
    Weighted(weights=torch.sqrt),
    StepwiseGain(normalise="step", lam=0.5, gamma=0.9, probe=Completion()),
    StepwiseGain(lam=0.9, pool="batch", clamp=None, probe=Tweedie()),
    MovingAverageGain(),
    ValueTracker(),
    ValueTracker(decay=1.0, std="batch", clamp=None),
    TurningPoint(),
    TurningPoint(consistent=False, balance="trend", balance_scope="prompt", first_step=False),
    TurningPoint(balance=None, normalise="joint", combine="add"),
    GDPO(TurningPoint(), batch=False),
    GDPO(Weighted(rule=StepwiseGain(pool="batch"))),
    build("credit", "dense-gain"),
    Uniform(probe=Branch((2, 2))),
    StepwiseGain(probe=Comb(2, count=1)),
    MovingAverageGain(probe=Branch((3,), mean="child")),
    SiblingRelative(leave_one_out=True, probe=Branch((2, 2, 2))),
    SiblingRelative(normalise=False, clamp=None, probe=Comb(3)),
    SiblingRelative(probe=Comb(3, count=1, strides=(1, 2, 3))),
    DepthRelative("tree", "sample", probe=Branch({0: 2, 3: 2, 6: 2, 9: 2})),
    DepthRelative(backup="softmax", probe=Branch((2, 1, 3))),
    DepthRelative(probe=Comb(2, count=2)),
    BackedUp(probe=Branch((3, 2))),
    BackedUp("mean", clamp=None),
    Weighted(rule=GDPO(BackedUp())),
]
SAMPLERS = [
    FlowSDE(0.7),
    FlowSDE(2.0),
    DanceSDE(0.3),
    CPS(0.9),
    CPS(1.0),
    DDIMSDE(0.7),
    DDIMSDE(3.0),
    AllButLast(FlowSDE(0.7)),
    Windowed(CPS(0.5), range(2, 7)),
    Windowed(FlowSDE(), range(10)),
]
SOLVERS = [
    Multistep(),
    Multistep("unipc"),
    Multistep("sa"),
    Multistep("sa", tau=0.4),
    Multistep("sa", tau=1.0),
]
WINDOWS = [
    FixedWindow(),
    FixedWindow(-3),
    RandomWindow(3),
    RandomWindow(2, 4, 6, 0.5),
    SlidingWindow(4, 2),
]
LOSSES = [
    ClippedLoss(),
    ClippedLoss(clip_range=1e-5, kl_weight=0.1, kl="without_delta"),
    ClippedLoss(log_prob="released_cps"),
    GRPOGuard(),
    GRPOGuard(kl_weight=0.1),
    FlowDPPO(),
    FlowDPPO(bound=1e-3, kl_weight=0.1),
    PolicyGradientLoss(),
    PolicyGradientLoss(kl_weight=0.1, kl="without_delta"),
    GSPO(),
    GSPO(clip_range=0.02, kl_weight=0.1),
    KLPenalty(),
    KLPenalty(coefficient=30.0, kl_weight=0.1),
]
FORWARD_LOSSES = [
    DiffusionNFT(),
    DiffusionNFT(beta=0.1, decay=(75, 0.0075, 0.999), kl_weight=0.0),
    DiffusionNFT(error="velocity", advantage_clip=8.0),
    AWM(),
    *(
        AWM(weight=weight, kl_weight=0.0, average_weight=0.0)
        for weight in ("uniform", "t", "t2", "huber")
    ),
    AWM(ratio="sum_first", clip=0.01, times=UniformTimes()),
    AWM(off_policy=True, kl="elbo", power=0.5, times=LogitNormalTimes()),
    DGPO(),
    DGPO(clip=None, anchor="old", beta_dpo=2000.0),
    DGPO(clip_kl=True, kl_weight=1.0),
]


BRIGHT, RED = Brightness(), Brightness(1)
REWARDS = [
    BRIGHT,
    FunctionReward(BRIGHT.score),
    WeightedSum({"bright": BRIGHT, "red": RED}, {"red": 2.0}),
]
GROUP_REWARDS = [WinRate(BRIGHT), GroupSum({"bright": WinRate(BRIGHT), "red": RED}, {"red": 2.0})]


PROBES = [
    NoProbe(),
    Tweedie(),
    Substeps(3),
    Substeps(3, solver="dpm++", every=2),
    SomeMembers(Substeps(2)),
    Completion(),
    SomeMembers(Completion(every=2, solver="unipc"), control="uniform"),
    Completion(dtype="bfloat16"),
    Continuation(2),
    Branch({0: 2, 2: 2}),
    Comb(2, count=2),
    Own(),
]


def small_sd3():
    return ShapesWorld().policy(PolicyOptions(lora_rank=4))


def guided_sd3():
    return tiny_sd3_policy(replace(TINY, guidance_scale=3.0))


def narrow_sd3():
    return tiny_sd3_policy(replace(TINY, dtype="bfloat16"))


def whole_flux():
    return tiny_flux_policy(replace(TINY, tuning="full"))


class TwoTasks(MixtureWorld):
    """A world with a quality that refuses one of its tasks."""

    tasks = ("direction", "other")

    class OneTask(DirectionReward):
        def score(self, images: torch.Tensor, prompts) -> torch.Tensor:
            if prompts[0].metadata["task"] == "other":
                raise RewardError("another task")
            return super().score(images, prompts)

    qualities = MappingProxyType({"q": OneTask})

    def prompts(self, task: str, part: str) -> list[Prompt]:
        known = MixtureWorld().prompts("direction", part)
        return [Prompt(prompt.text, {"task": task}) for prompt in known]


PARTS = [
    *((check_credit, part, {"decisions": 4 if part is FOUR else None}) for part in RULES),
    *((check_sampler, part, {}) for part in SAMPLERS),
    *(
        (check_sampler, part, {"steps": 2})
        for part in (FlowSDE(), DanceSDE(), Windowed(CPS(), range(1)))
    ),
    *((check_sampler, part, {"steps": 1}) for part in (FlowSDE(), Windowed(FlowSDE(), range(1)))),
    *((check_solver, part, {}) for part in SOLVERS),
    *((check_window, part, {}) for part in WINDOWS),
    *((check_loss, part, {}) for part in (*LOSSES, ClippedLoss)),
    *((check_forward_loss, part, {}) for part in FORWARD_LOSSES),
    *((check_reward, part, {}) for part in REWARDS),
    *((check_group_reward, part, {}) for part in GROUP_REWARDS),
    *((check_probe, part, {}) for part in PROBES),
    (check_policy, small_sd3, {"prompts": SHAPES}),
    (check_policy, tiny_sd3_policy, {}),
    (check_policy, guided_sd3, {}),
    (check_policy, narrow_sd3, {"tolerance": 2e-2}),
    (check_policy, tiny_flux_policy, {}),
    (check_policy, whole_flux, {}),
    (check_world, MixtureWorld, {}),
    (check_world, TwoTasks, {}),
    pytest.param(check_world, ShapesWorld, {}, marks=pytest.mark.slow),
    pytest.param(check_probe, Substeps(4, guidance="off"), {"members": 2}, marks=pytest.mark.slow),
]


def name(value) -> str:
    return (
        ""
        if isinstance(value, dict) or hasattr(value, "__wrapped__")
        else getattr(value, "__name__", type(value).__name__)
    )


@pytest.mark.parametrize(("check", "part", "options"), PARTS, ids=name)
def test_a_part_keeps_its_promises(check, part, options):
    findings = check(part, **options)
    assert findings.ok and not findings.marked("advice"), str(findings)


@pytest.mark.parametrize("part", [ODE(), FlowSDE(0.0), CPS(0.0)], ids=name)
def test_samplers_without_noise_keep_all_promises_but_that_of_decisions(part):
    """ODE steps are for evaluation; noise 0 is the ODE."""
    assert check_sampler(part).broken == ["makes_decisions"]


@pytest.mark.parametrize("mode", ["positive_only", "negative_only", "one_only", "binary"])
def test_modes_that_select_advantages_are_not_proportional_to_them(mode):
    assert check_forward_loss(DiffusionNFT(mode=mode)).broken == ["starts_along_the_advantage"]


def test_the_points_of_the_mixture_are_no_images():
    findings = check_policy(mixture_policy(), DIRECTIONS)
    assert findings.ok and findings.marked("advice") == ["decodes_images"]


def world_examples(name: str) -> tuple[torch.Tensor, list[Prompt]]:
    """Pictures of what each prompt asks for, every other one spoiled a little; or random points."""
    tasks = world(name).tasks
    prompts = [p for task in tasks for p in world(name).prompts(task, "heldout")[:3]]
    generator = torch.Generator().manual_seed(0)
    if name == "mixture":
        return torch.randn(len(prompts), 2, 1, 1, generator=generator), prompts
    rng = random.Random(0)
    images = render(torch.tensor([draw_layout(p.metadata["request"], rng) for p in prompts]))
    images[::2] += 0.2 * torch.rand(images[::2].shape, generator=generator)
    return images.clamp(0, 1), prompts


@pytest.mark.parametrize(
    "form", [(name, form) for name in ("shapes", "mixture") for form in world(name).forms]
)
def test_rewards_of_the_worlds(form):
    name, text = form
    findings = check_reward(world(name).reward(text), world_examples(name))
    assert findings.ok, str(findings)


@pytest.mark.parametrize("kind", ["credit", "sampler", "window", "loss"])
def test_every_built_in_name_is_held_to_its_contract(kind):
    """A part added to the registry must be added here."""
    held = {type(part) for _, part, *_ in (p if isinstance(p, tuple) else p.values for p in PARTS)}
    size = "(size=2)" if kind == "window" else ""
    specs = [f"{name}{size}" if name != "fixed" else name for name in KINDS[kind].built_in]
    assert {type(build(kind, spec)) for spec in specs} <= held | {ODE}


@pytest.mark.slow
def test_the_world_of_a_model(tmp_path):
    tiny_sd3().save_pretrained(tmp_path / "model")
    (tmp_path / "prompts.txt").write_text("a red fox\na red car\n")
    (tmp_path / "held.txt").write_text("a red hat\n")
    red = "class Red:\n    def score(self, images, prompts):\n        return images[:, 0].mean((1, 2))"
    (tmp_path / "r.py").write_text(red)
    files = (str(tmp_path / name) for name in ("model", "prompts.txt", "held.txt", "r.py:Red"))
    findings = check_world(ModelWorld(*files, options=TINY))
    assert findings.ok, str(findings)
