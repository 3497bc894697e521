"""Defaults, limits and doors of every part: what a published setting is, where it ends, and that
nothing changes afterwards.
"""

import dataclasses
import inspect
import math
from typing import Any

import pytest
import torch
from jaxtyping import TypeCheckError

from flowrl.core.errors import ConfigError, CreditError
from flowrl.core.experience import Decisions
from flowrl.core.types import CHECKS_ON, Schedule
from flowrl.credit import (
    GDPO,
    MovingAverageGain,
    StepwiseGain,
    TurningPoint,
    Uniform,
    ValueTracker,
    Weighted,
    balanced,
    generalised_gains,
    process_rewards,
    turning_points,
)
from flowrl.credit.table import zscore
from flowrl.flow import (
    DrawnSteps,
    LogitNormalTimes,
    PermutedTimes,
    StratifiedTimes,
    UniformTimes,
    shifted_schedule,
    uniform_schedule,
)
from flowrl.flow.mixture import GaussianMixture
from flowrl.losses import (
    AWM,
    DGPO,
    ClippedLoss,
    DiffusionNFT,
    FlowDPPO,
    GRPOGuard,
    PolicyGradientLoss,
)
from flowrl.probes import Completion, NoProbe, Substeps, Tweedie
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

DEFAULTS: dict[type, dict[str, Any]] = {
    Uniform: {"std": "group", "clamp": 5.0, "probe": NoProbe()},
    Weighted: {"weights": "noise", "rule": Uniform()},
    StepwiseGain: {
        "normalise": "joint",
        "lam": 0.0,
        "gamma": 1.0,
        "pool": "prompt",
        "clamp": 5.0,
        "probe": Substeps(5),
    },
    MovingAverageGain: {"decay": 0.9, "clamp": 5.0, "probe": Substeps(5)},
    ValueTracker: {"decay": 0.9, "std": "prompt", "clamp": 5.0},
    TurningPoint: {
        "consistent": True,
        "balance": "aggregate",
        "balance_scope": "batch",
        "first_step": True,
        "normalise": "step",
        "combine": "replace",
        "clamp": 5.0,
        "probe": Completion(),
    },
    GDPO: {"rule": Uniform(), "weights": None, "batch": True},
    FlowSDE: {"noise_level": 0.7},
    DanceSDE: {"noise_level": 0.3},
    CPS: {"noise_level": 0.7},
    DDIMSDE: {"noise_level": 0.7},
    ODE: {},
    ClippedLoss: {"clip_range": 1e-4, "kl_weight": 0.0, "kl": "exact", "log_prob": "exact"},
    GRPOGuard: {"clip_range": 1e-4, "kl_weight": 0.0, "kl": "exact"},
    FlowDPPO: {"bound": 1e-5, "kl_weight": 0.0, "kl": "exact"},
    PolicyGradientLoss: {"kl_weight": 0.0, "kl": "exact"},
    DiffusionNFT: {
        "beta": 1.0,
        "advantage_clip": 5.0,
        "kl_weight": 1e-4,
        "error": "normalised",
        "mode": "all",
        "decay": (0, 0.001, 0.5),
        "times": PermutedTimes(0.99),
        "noise": "each",
    },
    AWM: {
        "weight": "ghuber",
        "power": 0.25,
        "clip": 1.0,
        "ratio": "exp_first",
        "advantage_clip": 5.0,
        "advantage_scale": 1.0,
        "kl_weight": 1e-3,
        "average_weight": 1.0,
        "kl": "uniform",
        "off_policy": False,
        "decay": (0, 0.001, 0.3),
        "times": StratifiedTimes(6, 0.9),
        "noise": "each",
    },
    DGPO: {
        "beta_dpo": 100.0,
        "clip": 0.01,
        "clip_kl": False,
        "kl_weight": 0.02,
        "anchor": "reference",
        "decay": (1, 0.001, 0.3),
        "sample_from": 200,
        "times": DrawnSteps(4, 7),
        "noise": "group",
    },
    PermutedTimes: {"fraction": 0.99, "shared": False},
    StratifiedTimes: {"count": 6, "fraction": 0.9, "shared": False},
    UniformTimes: {"count": 6, "low": 0.2, "high": 1.0, "shift": 3.0, "shared": False},
    LogitNormalTimes: {"count": 6, "mean": 0.0, "std": 1.0, "shift": 3.0, "shared": False},
    DrawnSteps: {"count": 4, "steps": 7, "shared": True},
}


@pytest.mark.parametrize("part", DEFAULTS, ids=lambda part: part.__name__)
def test_defaults_are_the_documented_ones(part: type) -> None:
    made = part()
    assert {name: getattr(made, name) for name in inspect.signature(part).parameters} == DEFAULTS[
        part
    ]


def test_defaults_of_windows_and_functions() -> None:
    window = SlidingWindow(2)
    assert (window.stride, window.every) == (1, 1)
    assert list(window.steps(4, torch.Generator())) == [0, 1]
    assert (RandomWindow(2).low, RandomWindow(2).high) == (0, None)
    assert (FixedWindow().start, FixedWindow().stop) == (None, None)
    for function, expected in (
        (turning_points, {"consistent": True, "first_step": True}),
        (balanced, {"by": "aggregate", "scope": "batch"}),
        (process_rewards, {"add": False}),
        (generalised_gains, {"lam": 0.0, "gamma": 1.0}),
        (shifted_schedule, {"shift": 3.0}),
        (zscore, {"std_over": None, "clamp": 5.0, "mask": None}),
        (GaussianMixture.ring, {"modes": 8, "radius": 2.0, "std": 0.25}),
    ):
        parameters = inspect.signature(function).parameters.items()
        assert {
            n: p.default for n, p in parameters if p.default is not inspect.Parameter.empty
        } == expected


@pytest.mark.parametrize(
    "part",
    [
        *(kind() for kind in DEFAULTS if kind not in (MovingAverageGain, ValueTracker)),
        Windowed(CPS(), range(1)),
        FixedWindow(1),
        RandomWindow(1),
        SlidingWindow(1),
        GaussianMixture.ring(),
    ],
    ids=lambda part: type(part).__name__,
)
def test_parts_are_values_that_cannot_be_changed(part: Any) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        part.anything = 1


LIMITS: list[tuple[type, str, list[Any], list[Any]]] = [
    (StepwiseGain, "lam", [0.0, 1.0], [-1e-6, 1 + 1e-6]),
    (StepwiseGain, "gamma", [0.0, 1.0], [-1e-6, 1 + 1e-6]),
    (StepwiseGain, "clamp", [None, 1e-6], [0.0, -1.0, math.inf, math.nan]),
    (StepwiseGain, "pool", ["prompt", "batch"], ["member"]),
    (StepwiseGain, "normalise", ["joint", "step"], ["both"]),
    (Uniform, "clamp", [None, 1e-6], [0.0, -1.0, math.inf, math.nan]),
    (Uniform, "std", ["group", "batch"], ["all"]),
    (Weighted, "weights", ["noise", (1.0,), (0.0, -1.0)], [(), (math.nan,), "equal", [1.0]]),
    (MovingAverageGain, "decay", [0.0, 0.999], [1.0, -1e-6]),
    (MovingAverageGain, "clamp", [None, 1e-6], [0.0, math.inf]),
    (ValueTracker, "decay", [0.0, 1.0], [1.1, -1e-6]),
    (ValueTracker, "clamp", [None, 1e-6], [0.0, math.inf]),
    (TurningPoint, "clamp", [None, 1e-6], [0.0, math.inf]),
    (TurningPoint, "balance", ["aggregate", "trend", None], ["size"]),
    (TurningPoint, "balance_scope", ["prompt", "batch"], ["member"]),
    (TurningPoint, "normalise", ["step", "joint"], ["both"]),
    (TurningPoint, "combine", ["replace", "add"], ["mean"]),
    (FlowSDE, "noise_level", [0.0, 3.0], [-1e-6, math.inf, math.nan]),
    (DanceSDE, "noise_level", [0.0, 3.0], [-1e-6, math.inf, math.nan]),
    (DDIMSDE, "noise_level", [0.0, 3.0], [-1e-6, math.inf, math.nan]),
    (CPS, "noise_level", [0.0, 1.0], [-1e-6, 1 + 1e-6, math.nan]),
    (ClippedLoss, "clip_range", [1e-9, 0.999], [0.0, 1.0, -0.1]),
    (ClippedLoss, "kl_weight", [0.0, 10.0], [-1e-6, math.inf, math.nan]),
    (ClippedLoss, "log_prob", ["exact", "released_cps"], ["sum"]),
    (GRPOGuard, "clip_range", [1e-9, 0.999], [0.0, 1.0, -0.1]),
    (GRPOGuard, "kl_weight", [0.0, 10.0], [-1e-6, math.inf]),
    (FlowDPPO, "bound", [1e-12, 10.0], [0.0, -1.0, math.inf, math.nan]),
    (FlowDPPO, "kl_weight", [0.0, 10.0], [-1e-6, math.inf]),
    (PolicyGradientLoss, "kl_weight", [0.0, 10.0], [-1e-6, math.inf]),
    (Substeps, "count", [1, 50], [0, -1]),
    (DiffusionNFT, "beta", [1e-6, 10.0], [0.0, -1.0, math.inf, math.nan]),
    (DiffusionNFT, "advantage_clip", [1e-6, 10.0], [0.0, math.inf]),
    (DiffusionNFT, "kl_weight", [0.0, 10.0], [-1e-6, math.inf]),
    (DiffusionNFT, "error", ["normalised", "velocity"], ["x0"]),
    (DiffusionNFT, "mode", ["all", "binary"], ["none"]),
    (AWM, "weight", ["uniform", "t", "t2", "huber", "ghuber"], ["t3"]),
    (AWM, "power", [1e-3, 2.0], [0.0, -1.0, math.inf]),
    (AWM, "clip", [1e-5, 1.0], [0.0, math.inf]),
    (AWM, "advantage_clip", [1e-6, 10.0], [0.0, math.inf]),
    (AWM, "advantage_scale", [1e-6, 10.0], [0.0, math.inf]),
    (AWM, "kl_weight", [0.0, 10.0], [-1e-6, math.inf]),
    (AWM, "average_weight", [0.0, 10.0], [-1e-6, math.inf]),
    (DGPO, "beta_dpo", [1e-6, 5000.0], [0.0, math.inf]),
    (DGPO, "clip", [None, 1e-5, 2.0], [0.0, -1.0, math.inf]),
    (DGPO, "kl_weight", [0.0, 10.0], [-1e-6, math.inf]),
    (DGPO, "anchor", ["reference", "old"], ["average"]),
    (DGPO, "times", [DrawnSteps(), PermutedTimes(shared=True)], [PermutedTimes(), "steps"]),
    (PermutedTimes, "fraction", [1e-6, 1.0], [0.0, 1.1, math.nan]),
    (StratifiedTimes, "fraction", [1e-6, 1.0], [0.0, 1.1]),
    (UniformTimes, "low", [1e-6, 0.5], [0.0, 1.0, math.nan]),
    (UniformTimes, "high", [0.3, 1.0], [0.2, 1.1]),
    (UniformTimes, "shift", [0.5, 3.0], [0.0, math.inf]),
    (LogitNormalTimes, "mean", [-2.0, 2.0], [math.inf, math.nan]),
    (LogitNormalTimes, "std", [1e-3, 2.0], [0.0, math.inf]),
    (LogitNormalTimes, "shift", [0.5, 3.0], [0.0, math.inf]),
    (DrawnSteps, "count", [1, 7], [8]),
]


@pytest.mark.parametrize(
    ("part", "option", "allowed", "refused"), LIMITS, ids=lambda x: getattr(x, "__name__", None)
)
def test_options_end_where_they_should(
    part: type, option: str, allowed: list[Any], refused: list[Any]
) -> None:
    for value in allowed:
        assert getattr(part(**{option: value}), option) == value
    for value in refused:
        with pytest.raises(ConfigError, match=rf"{part.__name__}\.{option} = .* is not allowed"):
            part(**{option: value})


def test_windows_end_where_they_should() -> None:
    schedule = uniform_schedule(4)
    generator = torch.Generator()
    x, step = torch.zeros(4, 2), torch.arange(4)
    assert (Windowed(FlowSDE(), range(4)).transition(x, x, schedule, step).std > 0).all()
    assert (Windowed(FlowSDE(), range(3, 4)).transition(x, x, schedule, step).std > 0).tolist() == [
        False,
        False,
        False,
        True,
    ]
    assert list(RandomWindow(2, low=1, high=3).steps(4, generator)) == [1, 2]
    assert list(RandomWindow(4).steps(4, generator)) == [0, 1, 2, 3]
    assert list(RandomWindow(1, low=3).steps(4, generator)) == [3]
    assert SlidingWindow(4).starts(4) == [0]
    assert list(FixedWindow(stop=-1).steps(2, generator)) == [0]
    assert list(FixedWindow(-4, 4).steps(4, generator)) == [0, 1, 2, 3]
    for make in (
        lambda: Windowed(CPS(), [-1]),
        lambda: Windowed(CPS(), range(0)),
        lambda: Windowed(CPS(), range(1, 5)).transition(x, x, schedule, step),
        lambda: RandomWindow(0),
        lambda: RandomWindow(1, low=-1),
        lambda: RandomWindow(3, low=1, high=3).steps(4, generator),
        lambda: RandomWindow(1, high=5).steps(4, generator),
        lambda: RandomWindow(4, low=1).steps(4, generator),
        lambda: FixedWindow(stop=-1).steps(1, generator),
        lambda: FixedWindow(1, 5).steps(4, generator),
        lambda: FixedWindow(-5).steps(4, generator),
    ):
        with pytest.raises(ConfigError, match="is not allowed"):
            make()


@pytest.mark.skipif(not CHECKS_ON, reason="shape checks are switched off")
@pytest.mark.parametrize(
    "kind",
    [kind for kind in DEFAULTS if not hasattr(kind, "draws")],
    ids=lambda kind: kind.__name__,
)
def test_every_part_checks_its_door(kind: type) -> None:
    """A tensor without the axes that a part needs is refused before any arithmetic."""
    part, flat = kind(), torch.zeros(3)

    def enter() -> None:
        if hasattr(part, "assign"):
            part.assign(flat, Decisions.like(torch.zeros(2, 3, 4)))
        elif hasattr(part, "loss"):
            part.loss(flat)
        else:
            part.transition(
                torch.zeros(3, 2), torch.zeros(2, 2), uniform_schedule(3), torch.zeros(3).long()
            )

    inner = Uniform if kind in (Weighted, GDPO) else kind
    with pytest.raises((TypeCheckError, CreditError), match=inner.__name__):
        enter()


@pytest.mark.skipif(not CHECKS_ON, reason="shape checks are switched off")
def test_windowed_checks_its_door() -> None:
    with pytest.raises(TypeCheckError, match="Windowed"):
        Windowed(CPS(), range(1)).transition(
            torch.zeros(3, 2), torch.zeros(2, 2), uniform_schedule(3), torch.zeros(3).long()
        )


def test_missing_values_are_named_by_column() -> None:
    values = torch.rand(2, 3, 5)
    decisions = Decisions.like(values)
    values[1, 2, 3] = math.nan
    with pytest.raises(
        CreditError,
        match=(
            r"needs a finite value in column 3 of 0\.\.4: roll out with the probe"
            r" Substeps\(count=5\)"
        ),
    ):
        StepwiseGain().assign(values, decisions)
    values[0, 0, 0] = math.inf
    with pytest.raises(
        CreditError, match=r"in column 0, 3 of 0\.\.4: roll out with the probe Completion"
    ):
        TurningPoint().assign(values, decisions)
    with pytest.raises(CreditError, match=r"Uniform needs a finite value in column 4 of 0\.\.4"):
        Uniform().assign(torch.full((2, 3, 5), math.nan), decisions)


def test_noise_larger_than_there_is_leaves_no_old_noise() -> None:
    """DDIM's sigma is capped at s: the share of old noise is then 0."""
    schedule, x = Schedule(torch.tensor([1.0, 0.5, 0.3, 0.0])), torch.ones(1, 1)
    found = DDIMSDE(9.0).transition(x, 2 * x, schedule, torch.tensor([1]))
    clean = 1.0 - 0.5 * 2.0
    torch.testing.assert_close(found.mean, torch.tensor([[0.7 * clean]]))
    assert float(found.std) == pytest.approx(0.3)


def test_one_step_estimates_are_one_substep() -> None:
    assert Tweedie() == Substeps(1)


def test_trajectories_that_cannot_fit_are_refused_with_their_size():
    from flowrl.training.build import make_trainer
    from flowrl.training.config import preset

    config = preset("tiny").apply(world="mixture", groups=10**6, group_size=10**5)
    with pytest.raises(
        ConfigError,
        match=r"groups = 1000000 is not allowed; .* trajectories take [\d.e+]+ GB",
    ):
        make_trainer(config)
