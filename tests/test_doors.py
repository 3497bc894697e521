"""Tensors of the wrong shape are refused where they enter a room, with a message that names the axis."""

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from jaxtyping import TypeCheckError

from flowrl.credit import StepwiseGain, TurningPoint, Uniform, Weighted, check_advantages
from flowrl.errors import FlowrlError
from flowrl.flow import uniform_schedule
from flowrl.samplers import CPS
from flowrl.tree import plain_tree
from flowrl.types import CHECKS_ON, Gaussian, LossBatch, Schedule, Trajectories

GRID = uniform_schedule(10)
PATHS = replace(GRID, tree=plain_tree(4, 10, tuple(range(10))))
PAIR = Gaussian(torch.zeros(4, 2), torch.ones(4))
STEP = torch.zeros(4, dtype=torch.long)


def batch(**changes) -> LossBatch:
    good = {"new": PAIR, "behaviour": PAIR, "next_node": torch.zeros(4, 2), "advantages": torch.zeros(4), "weight": torch.ones(4)}
    places = {"sample": STEP, "group": STEP, "step": STEP, "time": torch.ones(4)}
    return LossBatch(**{**good, "delta": torch.ones(4), **places, **changes})


DOORS: dict[str, tuple[Callable[[], object], str]] = {
    "a state missing": (
        lambda: Trajectories(torch.zeros(1, 43, 2), torch.zeros(1, 40, 2), PATHS),
        r"43 states and 40 velocities.*44 states, 40 velocities and 10 steps",
    ),
    "a velocity too many": (lambda: Trajectories(torch.zeros(1, 44, 2), torch.zeros(1, 41, 2), PATHS), r"40 velocities"),
    "prompts differ": (
        lambda: Trajectories(torch.zeros(1, 44, 2), torch.zeros(2, 40, 2), PATHS),
        r"outputs[\s\S]*prompt=1",
    ),
    "no member axis": (lambda: Uniform().assign(torch.zeros(3, 11), GRID), r"rewards[\s\S]*prompt member node"),
    "an axis too many": (lambda: TurningPoint().assign(torch.zeros(2, 3, 11, 1), GRID), r"rewards[\s\S]*prompt member node"),
    "one node": (lambda: StepwiseGain().assign(torch.zeros(2, 3, 1), GRID), r"2 or more nodes"),
    "table and schedule differ": (
        lambda: Weighted().assign(torch.rand(2, 3, 10), Schedule(GRID.times, stds=torch.ones(10))),
        r"schedule of 10 steps, but the table has 9 steps",
    ),
    "nodes for steps": (
        lambda: check_advantages(torch.zeros(2, 3, 11), torch.zeros(2, 3, 11), "Mine"),
        r"\[prompt, member, step\] = \(2, 3, 10\).*step = node - 1",
    ),
    "prompt and member swapped": (
        lambda: check_advantages(torch.zeros(3, 2, 10), torch.zeros(2, 3, 11), "Mine"),
        r"Mine.assign returned shape \(3, 2, 10\), not \[prompt, member, step\] = \(2, 3, 10\)",
    ),
    "std per element": (lambda: Gaussian(torch.zeros(4, 2), torch.ones(4, 2)), r"'std'[\s\S]*'sample'"),
    "std of other samples": (lambda: Gaussian(torch.zeros(4, 2), torch.ones(3)), r"'std'[\s\S]*sample=4"),
    "advantages per step": (lambda: batch(advantages=torch.zeros(4, 10)), r"'advantages'[\s\S]*'sample'"),
    "a mask for weights": (lambda: batch(weight=torch.ones(4, dtype=torch.bool)), r"'weight'[\s\S]*Float"),
    "other latents": (lambda: batch(next_node=torch.zeros(4, 3)), r"new.mean.*\[sample, \*latent\] = \(4, 3\)"),
    "velocity of other samples": (
        lambda: CPS().transition(torch.zeros(4, 2), torch.zeros(3, 2), GRID, STEP),
        r"'velocity'[\s\S]*sample=4",
    ),
    "step of other samples": (
        lambda: CPS().transition(torch.zeros(4, 2), torch.zeros(4, 2), GRID, STEP[:3]),
        r"'step'[\s\S]*sample=4",
    ),
    "stds for nodes": (lambda: Schedule(GRID.times, stds=torch.ones(11)), r"stds = 11 is not allowed; allowed: 10 steps"),
    "times that rise": (lambda: Schedule(GRID.times.flip(0)), r"schedule.times.*strictly decreasing"),
}


@pytest.mark.skipif(not CHECKS_ON, reason="shape checks are switched off")
@pytest.mark.parametrize("name", DOORS)
def test_wrong_shapes_are_refused_by_axis(name: str) -> None:
    enter, words = DOORS[name]
    with pytest.raises((TypeCheckError, FlowrlError)) as caught:
        enter()
    assert re.search(words, str(caught.value)), str(caught.value)


CONFORMANCE = """
from flowrl.credit import GDPO, MovingAverageGain, StepwiseGain, TurningPoint, Uniform, ValueTracker, Weighted
from flowrl.flow import DrawnSteps, LogitNormalTimes, PermutedTimes, StratifiedTimes, UniformTimes
from flowrl.losses import AWM, DGPO, GSPO, ClippedLoss, DiffusionNFT, FlowDPPO, GRPOGuard, KLPenalty, PolicyGradientLoss
from flowrl.policies.mixture import MixturePolicy
from flowrl.policies.small_sd3 import SmallSD3Policy
from flowrl.protocols import (
    CompositeGroupReward, CompositeReward, CreditAssigner, FlowPolicy, ForwardLoss, GroupReward, OneAdvantage,
    PartsCreditAssigner, PolicyLoss, PooledLoss, PromptCreditAssigner, RandomSampler, RewardModel, Sampler, Stateful, TimeDraw,
)
from flowrl.rewards import FunctionReward, GroupSum, WeightedSum, WinRate
from flowrl.samplers import CPS, DDIMSDE, ODE, AllButLast, DanceSDE, FlowSDE, RandomWindow, SlidingWindow, Window
from flowrl.worlds.mixture import DirectionReward
from flowrl.worlds.shapes.verifier import ShapesReward

rules: list[CreditAssigner] = [Uniform(), Weighted(), StepwiseGain(), TurningPoint(), MovingAverageGain(), GDPO()]
parts_rule: PartsCreditAssigner = GDPO()
remembers: list[Stateful] = [MovingAverageGain(), ValueTracker()]
by_prompt: PromptCreditAssigner = ValueTracker()
kernels: list[Sampler] = [ODE(), FlowSDE(), DanceSDE(), CPS(), DDIMSDE(), AllButLast(CPS()), Window(CPS(), 0, 1)]
drawn: list[RandomSampler] = [RandomWindow(CPS(), 1), SlidingWindow(CPS(), 1)]
losses: list[PolicyLoss] = [ClippedLoss(), GRPOGuard(), FlowDPPO(), PolicyGradientLoss(), GSPO(), KLPenalty()]
forward: list[ForwardLoss] = [DiffusionNFT(), AWM(), DGPO()]
pooled: list[PooledLoss] = [AWM(), DGPO(), GSPO()]
one_advantage: list[OneAdvantage] = [GSPO()]
times: list[TimeDraw] = [PermutedTimes(), StratifiedTimes(), UniformTimes(), LogitNormalTimes(), DrawnSteps()]
rewards: list[RewardModel] = [ShapesReward(), DirectionReward(), FunctionReward(lambda images, prompts: images), WeightedSum({})]
sums: CompositeReward = WeightedSum({})
compared: list[GroupReward] = [WinRate(DirectionReward())]
compared_sums: CompositeGroupReward = GroupSum({})


def policies(one: MixturePolicy, other: SmallSD3Policy) -> list[FlowPolicy]:
    return [one, other]
"""


def test_parts_conform_to_their_protocols_statically(tmp_path: Path) -> None:
    """basedpyright accepts every built-in part as its protocol, and refuses parts of another kind."""
    pytest.importorskip("basedpyright")
    good, bad = tmp_path / "good.py", tmp_path / "bad.py"
    good.write_text(CONFORMANCE)
    imports = ["from flowrl.losses import ClippedLoss", "from flowrl.protocols import CreditAssigner"]
    bad.write_text("\n".join([*imports, "rule: CreditAssigner = ClippedLoss()", ""]))
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "standard"}')
    check = [sys.executable, "-m", "basedpyright", "--pythonpath", sys.executable, "-p", str(tmp_path)]
    done = subprocess.run(check, capture_output=True, text=True)
    assert "bad.py:3" in done.stdout, done.stdout
    assert '"assign" is not present' in done.stdout
    assert "good.py:" not in done.stdout, done.stdout
