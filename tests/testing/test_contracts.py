"""Every built-in part keeps the promises that `flowrl.testing` holds other people's parts to."""

import random
from typing import Any

import pytest
import torch
from all_but_last import AllButLast
from flowrl_bench.pretrain_pairs import draw_layout

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
from flowrl.probes import Branch, Comb, Completion, Tweedie
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
from flowrl.testing import (
    check_forward_loss,
    check_sampler,
    credit,
    forward_loss,
    group_reward,
    loss,
    reward,
    sampler,
    window,
)
from flowrl.testing.findings import INAPPLICABLE, maker, name_of
from flowrl.worlds.base import world
from flowrl.worlds.render import render

FOUR = Weighted((1.8, 1.0, 0.0, 1.3), Uniform(std="batch"))
RULES = [
    Uniform(),
    Uniform(std="batch"),
    Uniform(clamp=None),
    Weighted("noise"),
    FOUR,
    Weighted(weights=torch.sqrt),
    StepwiseGain(),
    StepwiseGain(normalise="step", lam=0.5, gamma=0.9, probe=Completion()),
    StepwiseGain(lam=0.9, pool="batch", clamp=None, probe=Tweedie()),
    StepwiseGain(lam=1.0),
    MovingAverageGain(),
    MovingAverageGain(decay=0.0, clamp=None),
    ValueTracker(),
    ValueTracker(decay=1.0, std="batch", clamp=None),
    TurningPoint(),
    TurningPoint(consistent=False, balance="trend", balance_scope="prompt", first_step=False),
    TurningPoint(balance=None, normalise="joint", combine="add"),
    GDPO(),
    GDPO(TurningPoint(), batch=False),
    GDPO(StepwiseGain(pool="batch")),
    build("credit", "dense-gain"),
    Uniform(probe=Branch((2, 2))),
    StepwiseGain(probe=Comb(2, count=1)),
    TurningPoint(probe=Branch({0: 2, 2: 2})),
    MovingAverageGain(probe=Branch((3,), mean="child")),
    SiblingRelative(),
    SiblingRelative(leave_one_out=True, probe=Branch(2)),
    SiblingRelative(normalise=False, clamp=None, probe=Comb(3)),
    SiblingRelative(probe=Comb(3, count=1, strides=(1, 2, 3))),
    DepthRelative(),
    DepthRelative("tree", "sample", probe=Branch({0: 2, 3: 2, 6: 2, 9: 2})),
    DepthRelative(backup="softmax", probe=Branch((2, 1, 3))),
    DepthRelative(probe=Comb(2, count=2)),
    BackedUp(probe=Branch((3, 2))),
    BackedUp("mean", clamp=None),
    Weighted(rule=SiblingRelative(probe=Comb(2, count=1))),
    GDPO(Weighted(rule=DepthRelative())),
    GDPO(BackedUp()),
    Weighted(rule=GDPO()),
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
REWARDS = [f"{name} {form}" for name in ("shapes", "mixture") for form in world(name).forms]


@pytest.mark.parametrize("promise", credit.CONTRACT.promises, ids=lambda p: p.name)
@pytest.mark.parametrize("part", RULES, ids=name_of)
def test_credit_rules(part: Any, promise: Any) -> None:
    decisions = 4 if part is FOUR else None
    assert promise.check(credit.Case(maker(part)(), decisions)) in (None, INAPPLICABLE), "advice"


@pytest.mark.parametrize("promise", sampler.CONTRACT.promises, ids=lambda p: p.name)
@pytest.mark.parametrize("part", SAMPLERS, ids=name_of)
def test_samplers(part: Any, promise: Any) -> None:
    promise.check(sampler.Case(maker(part)()))


@pytest.mark.parametrize("promise", window.CONTRACT.promises, ids=lambda p: p.name)
@pytest.mark.parametrize("part", WINDOWS, ids=name_of)
def test_windows(part: Any, promise: Any) -> None:
    promise.check(window.Case(part))


def test_samplers_without_noise_keep_all_promises_but_that_of_decisions() -> None:
    """ODE steps are for evaluation; noise 0 is the ODE."""
    for part in (ODE(), FlowSDE(0.0), CPS(0.0)):
        assert check_sampler(part).broken == ["makes_decisions"]
        assert check_sampler(part, without=("makes_decisions",)).ok


def test_samplers_work_on_short_grids() -> None:
    for part in (FlowSDE(), DanceSDE(), AllButLast(FlowSDE()), Windowed(CPS(), range(1))):
        assert check_sampler(part, steps=2).ok
    for part in (FlowSDE(), DanceSDE(), Windowed(FlowSDE(), range(1))):
        assert check_sampler(part, steps=1).ok


@pytest.mark.parametrize("promise", loss.CONTRACT.promises, ids=lambda p: p.name)
@pytest.mark.parametrize("part", LOSSES, ids=name_of)
def test_losses(part: Any, promise: Any) -> None:
    promise.check(maker(part)())


@pytest.mark.parametrize("promise", forward_loss.CONTRACT.promises, ids=lambda p: p.name)
@pytest.mark.parametrize("part", FORWARD_LOSSES, ids=name_of)
def test_forward_losses(part: Any, promise: Any) -> None:
    promise.check(maker(part)())


@pytest.mark.parametrize("mode", ["positive_only", "negative_only", "one_only", "binary"])
def test_modes_that_select_advantages_are_not_proportional_to_them(mode: Any) -> None:
    assert check_forward_loss(DiffusionNFT(mode=mode)).broken == ["starts_along_the_advantage"]


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


def brightness(images: torch.Tensor, prompts: Any) -> torch.Tensor:
    return images.flatten(1).mean(1)


@pytest.mark.parametrize("promise", reward.CONTRACT.promises, ids=lambda p: p.name)
@pytest.mark.parametrize("name", [*REWARDS, "sum", "function"])
def test_rewards(name: str, promise: Any) -> None:
    chosen, _, form = name.partition(" ")
    bright, red = (
        FunctionReward(brightness),
        FunctionReward(lambda images, prompts: images[:, 0].flatten(1).mean(1)),
    )
    general = {"sum": WeightedSum({"bright": bright, "red": red}, {"red": 2.0}), "function": bright}
    part = general[chosen] if chosen in general else world(chosen).reward(form)
    images, prompts = reward.default_examples() if chosen in general else world_examples(chosen)
    promise.check(reward.Case(part, images, tuple(prompts)))


@pytest.mark.parametrize("promise", group_reward.CONTRACT.promises, ids=lambda p: p.name)
@pytest.mark.parametrize("name", ["win rate", "sum"])
def test_group_rewards(name: str, promise: Any) -> None:
    bright, red = (
        FunctionReward(brightness),
        FunctionReward(lambda images, prompts: images[:, 0].flatten(1).mean(1)),
    )
    part = (
        WinRate(bright)
        if name == "win rate"
        else GroupSum({"bright": WinRate(bright), "red": red}, {"red": 2.0})
    )
    assert promise.check(group_reward.Case(part, *group_reward.default_examples())) in (
        None,
        INAPPLICABLE,
    ), "advice"


@pytest.mark.parametrize("kind", ["credit", "sampler", "window", "loss"])
def test_every_built_in_name_is_held_to_its_contract(kind: str) -> None:
    """A part added to the registry must be added here."""
    held = {
        "credit": RULES,
        "sampler": [*SAMPLERS, ODE(), Multistep()],
        "window": WINDOWS,
        "loss": [*LOSSES, *FORWARD_LOSSES],
    }[kind]
    size = "(size=2)" if kind == "window" else ""
    specs = [f"{name}{size}" if name != "fixed" else name for name in KINDS[kind].built_in]
    assert {type(build(kind, spec)) for spec in specs} <= {type(part) for part in held}


def test_weights_of_the_table_are_told_apart() -> None:
    """The fixed weights above differ, so that a rule that ignored them would be seen in its own
    tests.
    """
    assert len(set(FOUR.weights)) == 4
