"""The package as a whole: what importing costs, the typed doors, static promises."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
import yaml
from jaxtyping import TypeCheckError

import flowrl
from flowrl.credit import StepwiseGain, TurningPoint, Uniform, Weighted
from flowrl.losses import ClippedLoss, GRPOGuard
from flowrl.protocols import CreditAssigner, FlowPolicy, PolicyLoss, RandomSampler, RewardModel, Sampler
from flowrl.samplers import CPS, DDIMSDE, ODE, AllButLast, DanceSDE, FlowSDE, RandomWindow, Window
from flowrl.types import CHECKS_ON
from flowrl.worlds.mixture import DirectionReward
from flowrl.worlds.shapes.verifier import ShapesReward


def python(code, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_the_version_is_written_once():
    root = Path(__file__).parents[1]
    assert tomllib.loads((root / "pyproject.toml").read_text())["tool"]["hatch"]["version"]["path"] == "flowrl/__init__.py"
    assert yaml.safe_load((root / "CITATION.cff").read_text())["version"] == flowrl.__version__


def test_importing_costs_little_beyond_torch():
    """Processor seconds, so that a busy machine does not matter."""
    code = "import torch, time, sys; t = time.process_time(); import flowrl; first = time.process_time() - t; "
    code += "import flowrl.samplers, flowrl.credit, flowrl.losses; print(first, time.process_time() - t, "
    code += "*[m for m in ('diffusers', 'transformers', 'peft', 'matplotlib') if m in sys.modules])"
    runs = [python(code) for _ in range(2)]
    assert all(heavy == [] for _, _, *heavy in runs)
    assert min(float(first) for first, *_ in runs) < 0.1
    assert min(float(rooms) for _, rooms, *_ in runs) < 1.0


def test_parts_keep_their_protocols(mixture_policy, shapes_policy):
    kernels = [ODE(), FlowSDE(), DanceSDE(), CPS(), DDIMSDE(), AllButLast(FlowSDE()), Window(CPS(), 0, 2)]
    for part in kernels:
        assert isinstance(part, Sampler)
    assert isinstance(RandomWindow(FlowSDE(), 2), RandomSampler)
    for part in (Uniform(), Weighted(), StepwiseGain(), TurningPoint()):
        assert isinstance(part, CreditAssigner)
    for part in (ClippedLoss(), GRPOGuard()):
        assert isinstance(part, PolicyLoss)
    for part in (ShapesReward(), DirectionReward()):
        assert isinstance(part, RewardModel)
    for part in (mixture_policy, shapes_policy):
        assert isinstance(part, FlowPolicy)


@pytest.mark.skipif(not CHECKS_ON, reason="shape checks are switched off in this environment")
def test_wrong_axes_are_refused_at_the_door():
    from flowrl.flow import uniform_schedule

    schedule, step = uniform_schedule(4), torch.zeros(3, dtype=torch.long)
    with pytest.raises(TypeCheckError, match="sample"):
        FlowSDE().transition(torch.zeros(3, 2), torch.zeros(4, 2), schedule, step)
    with pytest.raises(TypeCheckError, match="prompt member node"):
        Uniform().assign(torch.zeros(3, 5), None)


def test_the_switch_turns_the_checks_off():
    code = "import torch; from flowrl.types import Gaussian; print(type(Gaussian(torch.zeros(2, 3), torch.zeros(5))).__name__)"
    assert python(code, FLOWRL_TYPECHECK="0") == ["Gaussian"]
    with pytest.raises(subprocess.CalledProcessError):
        python(code, FLOWRL_TYPECHECK="1")
