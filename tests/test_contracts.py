"""Every built-in part keeps the promises that `flowrl.testing` holds other people's parts to."""

import random

import pytest
import torch

from flowrl.builtin import world
from flowrl.credit import GDPO, MovingAverageGain, StepwiseGain, TurningPoint, Uniform, Weighted
from flowrl.losses import ClippedLoss, FlowDPPO, GRPOGuard, PolicyGradientLoss
from flowrl.registry import build
from flowrl.rewards import FunctionReward, WeightedSum
from flowrl.samplers import CPS, DDIMSDE, AllButLast, DanceSDE, FlowSDE, RandomWindow, SlidingWindow, Window
from flowrl.testing import credit, loss, reward, sampler
from flowrl.testing.findings import maker
from flowrl.types import Completion, Tweedie
from flowrl.worlds.shapes.render import render
from flowrl.worlds.shapes.scene import draw_layout

RULES = [
    Uniform(),
    Uniform(std="batch"),
    Weighted("noise"),
    StepwiseGain(),
    StepwiseGain(normalise="step", probe=Completion()),
    StepwiseGain(lam=0.9, gamma=0.9, pool="batch", probe=Tweedie()),
    StepwiseGain(lam=1.0),
    MovingAverageGain(),
    TurningPoint(),
    TurningPoint(consistent=False, balance="trend", first_step=False),
    TurningPoint(balance=None, normalise="joint", combine="add"),
    TurningPoint(balance_scope="prompt", min_size=0.1, confidence=0.5),
    TurningPoint(where="random"),
    TurningPoint(where="none"),
    GDPO(),
    GDPO(TurningPoint(), batch=False),
    build("credit", "dense-gain"),
]
SAMPLERS = [
    FlowSDE(0.7),
    DanceSDE(0.3),
    CPS(0.9),
    DDIMSDE(0.7),
    AllButLast(FlowSDE(0.7)),
    Window(CPS(0.5), 2, 5),
    RandomWindow(FlowSDE(0.7), 3),
    SlidingWindow(DanceSDE(0.5), 4, 2),
]
LOSSES = [
    ClippedLoss(),
    ClippedLoss(clip=1e-5, kl_weight=0.1, kl="without_delta"),
    ClippedLoss(log_prob="released_cps"),
    GRPOGuard(),
    GRPOGuard(kl_weight=0.1),
    FlowDPPO(),
    FlowDPPO(kl_weight=0.1),
    PolicyGradientLoss(),
    PolicyGradientLoss(kl_weight=0.1),
]


@pytest.mark.parametrize("promise", credit.CONTRACT.promises, ids=lambda p: p.name)
@pytest.mark.parametrize("part", RULES, ids=repr)
def test_credit_rules(part, promise) -> None:
    promise.check(maker(part)())


@pytest.mark.parametrize("promise", sampler.CONTRACT.promises, ids=lambda p: p.name)
@pytest.mark.parametrize("part", SAMPLERS, ids=repr)
def test_samplers(part, promise) -> None:
    promise.check(maker(part)())


@pytest.mark.parametrize("promise", loss.CONTRACT.promises, ids=lambda p: p.name)
@pytest.mark.parametrize("part", LOSSES, ids=repr)
def test_losses(part, promise) -> None:
    promise.check(maker(part)())


@pytest.mark.parametrize("promise", reward.CONTRACT.promises, ids=lambda p: p.name)
@pytest.mark.parametrize("name", ["shapes strict", "shapes graded", "shapes soft", "mixture soft", "mixture strict", "sum"])
def test_rewards(name: str, promise) -> None:
    if name == "sum":
        bright = FunctionReward(lambda images, prompts: images.flatten(1).mean(1))
        red = FunctionReward(lambda images, prompts: images[:, 0].flatten(1).mean(1))
        images, prompts = reward.default_examples()
        promise.check(reward.Case(WeightedSum({"bright": bright, "red": red}, {"red": 2.0}), images, prompts))
        return
    chosen, form = name.split()
    tasks = world(chosen).tasks
    prompts = tuple(p for task in tasks for p in world(chosen).prompts(task, "heldout")[:3])
    if chosen == "shapes":
        rng = random.Random(0)
        layouts = torch.tensor([draw_layout(p.metadata["request"], rng) for p in prompts])
        images = render(layouts)
        images[::2] += 0.2 * torch.rand(images[::2].shape, generator=torch.Generator().manual_seed(0))
        images = images.clamp(0, 1)
    else:
        images = torch.randn(len(prompts), 2, 1, 1, generator=torch.Generator().manual_seed(0))
    promise.check(reward.Case(world(chosen).reward(form), images, prompts))
