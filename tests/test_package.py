"""The package as a whole: what importing costs, the typed doors, static promises."""

import ast
import inspect
import os
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch
import yaml

import flowrl
from flowrl.core.calls import CHECKS_ON
from flowrl.core.errors import ArgumentError
from flowrl.core.protocols import (
    CreditAssigner,
    ExperienceCredit,
    FlowPolicy,
    PolicyLoss,
    RewardModel,
    Sampler,
    Window,
)
from flowrl.credit import GDPO, StepwiseGain, TurningPoint, Uniform, ValueTracker, Weighted
from flowrl.losses import ClippedLoss, GRPOGuard
from flowrl.samplers import (
    CPS,
    DDIMSDE,
    ODE,
    DanceSDE,
    FixedWindow,
    FlowSDE,
    RandomWindow,
    SlidingWindow,
    Windowed,
)
from flowrl.worlds.mixture import DirectionReward
from flowrl.worlds.verifier import ShapesReward


def python(code, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


def test_the_version_is_written_once():
    root = Path(__file__).parents[1]
    assert (
        tomllib.loads((root / "pyproject.toml").read_text())["tool"]["hatch"]["version"]["path"]
        == "flowrl/__init__.py"
    )
    assert yaml.safe_load((root / "CITATION.cff").read_text())["version"] == flowrl.__version__


def test_the_repository_has_one_address():
    root = Path(__file__).parents[1]
    address = tomllib.loads((root / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
    assert yaml.safe_load((root / "CITATION.cff").read_text())["repository-code"] == address
    assert f"({address})" in (root / "README.md").read_text()


def test_the_lowest_versions_are_the_lower_bounds():
    """constraints-lowest.txt, which `nox -s lowest` installs; of torch only one version has a CPU
    build everywhere.
    """
    root = Path(__file__).parents[1]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    bounds = [
        *project["dependencies"],
        *(bound for extra in project["optional-dependencies"].values() for bound in extra),
    ]
    lowest = {
        tuple(line.split("=="))
        for line in (root / "constraints-lowest.txt").read_text().split("\n")
        if "==" in line
    }
    assert {tuple(bound.split(">=")) for bound in bounds if ">=" in bound} - lowest == {
        ("torch", "2.11")
    }
    assert "torch==2.13.0" in (root / "constraints.txt").read_text()


def test_importing_costs_little_beyond_torch():
    """Processor seconds, so that a busy machine does not matter."""
    code = (
        "import torch, time, sys; t = time.process_time(); import flowrl; first ="
        " time.process_time() - t; "
    )
    code += (
        "import flowrl.samplers, flowrl.credit, flowrl.losses; print(first, time.process_time()"
        " - t, "
    )
    code += "*[m for m in ('diffusers', 'transformers', 'peft', 'matplotlib') if m in sys.modules])"
    runs = [python(code) for _ in range(2)]
    assert all(heavy == [] for _, _, *heavy in runs)
    assert min(float(first) for first, *_ in runs) < 0.1
    assert min(float(rooms) for _, rooms, *_ in runs) < 1.0


def test_parts_keep_their_protocols(mixture_policy, shapes_policy):
    kernels = [ODE(), FlowSDE(), DanceSDE(), CPS(), DDIMSDE(), Windowed(CPS(), range(2))]
    for part in kernels:
        assert isinstance(part, Sampler)
    for part in (FixedWindow(), RandomWindow(2), SlidingWindow(2)):
        assert isinstance(part, Window)
    for part in (Uniform(), Weighted(), StepwiseGain(), TurningPoint()):
        assert isinstance(part, CreditAssigner)
    for part in (GDPO(), ValueTracker()):
        assert isinstance(part, ExperienceCredit)
    for part in (ClippedLoss(), GRPOGuard()):
        assert isinstance(part, PolicyLoss)
    for part in (ShapesReward(), DirectionReward()):
        assert isinstance(part, RewardModel)
    for part in (mixture_policy, shapes_policy):
        assert isinstance(part, FlowPolicy)


@pytest.mark.skipif(not CHECKS_ON, reason="shape checks are switched off in this environment")
def test_wrong_axes_are_refused_at_the_door():
    from flowrl.core.experience import Decisions
    from flowrl.flow import uniform_schedule

    schedule, step = uniform_schedule(4), torch.zeros(3, dtype=torch.long)
    with pytest.raises(ArgumentError, match="sample"):
        FlowSDE().transition(torch.zeros(3, 2), torch.zeros(4, 2), schedule, step)
    with pytest.raises(ArgumentError, match="prompt member column"):
        Uniform().assign(torch.zeros(3, 5), Decisions.like(torch.zeros(2, 3, 5)))


def test_the_switch_turns_the_checks_off():
    code = (
        "import torch; from flowrl.core.types import Gaussian; print(type(Gaussian(torch.zeros(2, 3),"
        " torch.zeros(5))).__name__)"
    )
    assert python(code, FLOWRL_TYPECHECK="0") == ["Gaussian"]
    with pytest.raises(subprocess.CalledProcessError):
        python(code, FLOWRL_TYPECHECK="1")


ROOT = Path(__file__).parents[1]
ROOMS = (
    "flow",
    "samplers",
    "credit",
    "losses",
    "rewards",
    "policies",
    "worlds",
    "rollout",
    "testing",
)


def documented_constants(room):
    """The names that are assigned at the top of a room's modules and followed by a string, alone or
    in a run of assignments.
    """
    found = set()
    for path in (ROOT / "flowrl" / room).rglob("*.py"):
        waiting = set()
        for statement in ast.parse(path.read_text()).body:
            if isinstance(statement, ast.Assign | ast.AnnAssign):
                targets = (
                    statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                )
                waiting |= {target.id for target in targets if isinstance(target, ast.Name)}
            elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                found |= waiting
            else:
                waiting = set()
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_public_names_exist_and_are_documented(room):
    module = import_module(f"flowrl.{room}")
    constants = documented_constants(room)
    for name in module.__all__:
        thing = getattr(module, name)
        own = inspect.isclass(thing) or inspect.isroutine(thing) or isinstance(thing, ModuleType)
        # as data classes make it
        documented = own and thing.__doc__ and not thing.__doc__.startswith(f"{name}(")
        assert documented or name in constants, (
            f"flowrl.{room}.{name} has no docstring, and no string below it"
        )


def test_the_names_of_a_room_do_not_load_heavy_packages():
    code = f"import sys, {', '.join(f'flowrl.{room}' for room in ROOMS)}; "
    code += (
        "print(*[m for m in ('diffusers', 'transformers', 'peft', 'matplotlib', 'datasets',"
        " 'scipy') if m in sys.modules])"
    )
    assert python(code) == []


SATELLITES = (
    "flowrl/serving",
    "benchmarks/package",
    "tutorials/package",
    "packages/flowrl_rewards",
)


@pytest.mark.parametrize("folder", SATELLITES)
def test_satellites_use_public_names(folder):
    """Whatever module of a room they import a name from, the room lists it."""
    private = []
    for path in (ROOT / folder).rglob("*.py"):
        for statement in ast.walk(ast.parse(path.read_text())):
            parts = (getattr(statement, "module", None) or "").split(".")
            if (
                isinstance(statement, ast.ImportFrom)
                and parts[0] == "flowrl"
                and parts[1:2]
                and parts[1] in ROOMS
            ):
                packages = [
                    import_module(".".join(parts[:depth])) for depth in range(2, len(parts) + 1)
                ]
                public = {name for package in packages for name in getattr(package, "__all__", ())}
                private += [
                    f"{path.name}: {statement.module}.{a.name}"
                    for a in statement.names
                    if a.name not in public
                ]
    assert not private
