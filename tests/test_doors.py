"""Tensors of the wrong shape are refused where they enter a room, with a message that names the
axis.
"""

import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from loss_rows import loss_rows

from flowrl.core.checks import CHECKS_ON
from flowrl.core.errors import FlowrlError
from flowrl.core.experience import Decisions
from flowrl.core.tree import plain_tree
from flowrl.core.types import Gaussian, Schedule, Trajectories
from flowrl.credit import StepwiseGain, Uniform
from flowrl.flow import uniform_schedule
from flowrl.samplers import CPS

GRID = uniform_schedule(10)
TREE, STDS = plain_tree(4, 10, tuple(range(10))), torch.ones(10)
TEN = Decisions.like(torch.zeros(2, 3, 11))
PAIR = Gaussian(torch.zeros(4, 2), torch.ones(4))
STEP = torch.zeros(4, dtype=torch.long)


def path(states=44, velocities=40, prompts=1, stds=STDS):
    return Trajectories(
        torch.zeros(1, states, 2), torch.zeros(prompts, velocities, 2), GRID, TREE, stds
    )


def batch(**changes):
    return loss_rows(PAIR, PAIR, **changes)


DOORS = {
    "a state missing": (
        lambda: path(states=43),
        r"states, velocities.* = \[43, 40, .* allowed: \[44, 40, 10, 10\]",
    ),
    "prompts differ": (lambda: path(prompts=2), r"outputs = .*prompt=1"),
    "stds for nodes": (lambda: path(stds=torch.ones(11)), r"allowed: \[44, 40, 10, 10\]"),
    "no member axis": (
        lambda: Uniform().assign(torch.zeros(3, 11), TEN),
        r"values = torch.float32 \[3, 11\] .*'prompt member column'",
    ),
    "no decision": (
        lambda: Decisions.like(torch.zeros(2, 3, 1)),
        r"value table = \(2, 3, 1\) is not allowed",
    ),
    "values and decisions differ": (
        lambda: StepwiseGain().assign(torch.rand(2, 3, 10), TEN),
        r"\[prompt, member, decision\+1\] = \(2, 3, 11\).* got torch.float32 \(2, 3, 10\)",
    ),
    "a mask of other decisions": (
        lambda: replace(TEN, mask=torch.ones(2, 3, 9).bool()),
        r"mask = torch.* is not allowed.*decision=10",
    ),
    "std per element": (
        lambda: Gaussian(torch.zeros(4, 2), torch.ones(4, 2)),
        r"std = torch.* is not allowed.*'sample'",
    ),
    "a mask for weights": (
        lambda: batch(weight=torch.ones(4, dtype=torch.bool)),
        r"weight = torch.* is not allowed.*Float",
    ),
    "other latents": (
        lambda: batch(next_node=torch.zeros(4, 3)),
        r"loss batch: mean = \(4, 2\) .*\(4, 3\), as next_node",
    ),
    "velocity of other samples": (
        lambda: CPS().transition(torch.zeros(4, 2), torch.zeros(3, 2), GRID, STEP),
        r"velocity = torch.* is not allowed.*sample=4",
    ),
    "timesteps for nodes": (
        lambda: Schedule(GRID.times, timesteps=torch.ones(11)),
        r"timesteps = 11 is not allowed; allowed: 10 steps",
    ),
    "times that rise": (
        lambda: Schedule(GRID.times.flip(0)),
        r"schedule.times.*strictly decreasing",
    ),
}


@pytest.mark.skipif(not CHECKS_ON, reason="shape checks are switched off")
@pytest.mark.parametrize("name", DOORS)
def test_wrong_shapes_are_refused_by_axis(name):
    enter, words = DOORS[name]
    with pytest.raises(FlowrlError) as caught:
        enter()
    assert re.search(words, str(caught.value)), str(caught.value)


CONFORMANCE = """
from flowrl.credit import GDPO, MovingAverageGain, StepwiseGain, TurningPoint, Uniform, ValueTracker, Weighted
from flowrl.flow import DrawnSteps, LateSteps, LogitNormalTimes, PermutedTimes, StratifiedTimes, UniformTimes
from flowrl.losses import AWM, CRD, DGPO, GSPO, ClippedLoss, DiffusionNFT, FlowDPPO, GRPOGuard, KLPenalty, PolicyGradientLoss, RewardAscent
from flowrl.policies.mixture import MixturePolicy
from flowrl.policies.small_sd3 import SmallSD3Policy
from flowrl.core.protocols import (
    CreditAssigner, FlowPolicy, ForwardLoss, GroupReward, MultistepSolver, PolicyLoss, RewardModel, Sampler,
    Stateful, TimeDraw, Window,
)
from flowrl.rewards import FunctionReward, GroupSum, WeightedSum, WinRate
from flowrl.samplers import CPS, DDIMSDE, ODE, DanceSDE, ExponentialSDE, FixedWindow, FlowSDE, Multistep, RandomWindow, SlidingWindow, Windowed
from flowrl.worlds.mixture import DirectionReward
from flowrl.worlds.verifier import ShapesReward

rules: list[CreditAssigner] = [Uniform(), Weighted(), StepwiseGain(), TurningPoint(), MovingAverageGain(), GDPO(), ValueTracker()]
remembers: list[Stateful] = [MovingAverageGain(), ValueTracker()]
kernels: list[Sampler] = [ODE(), FlowSDE(), DanceSDE(), CPS(), DDIMSDE(), ExponentialSDE(), Windowed(CPS(), range(1))]
windows: list[Window] = [FixedWindow(), RandomWindow(1), SlidingWindow(1)]
solvers: list[MultistepSolver] = [Multistep(), Multistep("sa", tau=0.4)]
losses: list[PolicyLoss] = [ClippedLoss(), GRPOGuard(), FlowDPPO(), PolicyGradientLoss(), GSPO(), KLPenalty()]
forward: list[ForwardLoss] = [DiffusionNFT(), AWM(), DGPO(), CRD(), RewardAscent()]
times: list[TimeDraw] = [PermutedTimes(), StratifiedTimes(), UniformTimes(), LogitNormalTimes(), DrawnSteps(), LateSteps()]
rewards: list[RewardModel] = [ShapesReward(), DirectionReward(), FunctionReward(lambda images, prompts: images), WeightedSum({})]
compared: list[GroupReward] = [WinRate(DirectionReward()), GroupSum({})]


def policies(one: MixturePolicy, other: SmallSD3Policy) -> list[FlowPolicy]:
    return [one, other]
"""


NO_RULE = """
from flowrl.core.protocols import CreditAssigner
from flowrl.losses import ClippedLoss
rule: CreditAssigner = ClippedLoss()
"""


def test_parts_conform_to_their_protocols_statically(tmp_path):
    """basedpyright accepts every built-in part as its protocol, and refuses parts of another
    kind.
    """
    pytest.importorskip("basedpyright")
    (tmp_path / "good.py").write_text(CONFORMANCE)
    (tmp_path / "bad.py").write_text(NO_RULE)
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "standard"}')
    options = f"-m basedpyright --pythonpath {sys.executable} -p {tmp_path}"
    command = [sys.executable, *options.split()]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "bad.py:4" in done.stdout, done.stdout
    assert '"assign" is not present' in done.stdout
    assert "good.py:" not in done.stdout, done.stdout
