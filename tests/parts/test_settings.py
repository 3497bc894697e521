"""Defaults, limits and doors of every part: what a published setting is, where it ends, and that
nothing changes afterwards.
"""

import dataclasses
import math
from typing import Literal

import pytest
import torch
from small_run import TINY_RUN

from flowrl.core.errors import ConfigError
from flowrl.core.options import Count, Positive, check_ranges, checked_options
from flowrl.core.policy_options import PolicyOptions
from flowrl.credit import (
    GDPO,
    MovingAverageGain,
    StepwiseGain,
    TurningPoint,
    Uniform,
    ValueTracker,
    Weighted,
)
from flowrl.flow import (
    DrawnSteps,
    LateSteps,
    LogitNormalTimes,
    PermutedTimes,
    StratifiedTimes,
    UniformTimes,
    uniform_schedule,
)
from flowrl.flow.mixture import GaussianMixture
from flowrl.losses import (
    AWM,
    CRD,
    DGPO,
    ClippedLoss,
    DiffusionNFT,
    FlowDPPO,
    GRPOGuard,
    PolicyGradientLoss,
    RewardAscent,
)
from flowrl.probes import Substeps
from flowrl.run.config import RunConfig, load_config
from flowrl.run.io import write_json
from flowrl.samplers import (
    CPS,
    DDIMSDE,
    ODE,
    DanceSDE,
    ExponentialSDE,
    FixedWindow,
    FlowSDE,
    RandomWindow,
    SlidingWindow,
    Windowed,
)

UNSET = {
    **{"window": "", "reward": "", "clip_range": 0.0, "width": 0, "train_guidance_scale": 0.0},
    **dict.fromkeys(("initial_noise", "overlap_rewards", "compile", "micro_batch"), "auto"),
}


def test_settings_that_are_not_set_are_none_in_python_and_typed_in_files(tmp_path):
    run = RunConfig.of(**UNSET)
    assert {name: run.flat()[name] for name in UNSET} == dict.fromkeys(UNSET)
    assert {name: run.typed()[name] for name in UNSET} == UNSET
    write_json(tmp_path / "config.json", run.as_dict())
    assert load_config(tmp_path / "config.json") == run
    older = {"rollout": {"chunk": 2, "overlap_rewards": "true"}, "optim": {"weight_decay": 0.0}}
    kept = RunConfig.from_dict(older)
    assert kept.rollout.overlap_rewards is True and kept.optim.weight_decay == 0
    with pytest.raises(ConfigError, match=r"width = -1 .*a whole number in \[1, 16384\] or 0$"):
        RunConfig.of(width=-1)


def test_options_of_a_policy_are_checked_and_sized():
    assert PolicyOptions(resolution=64).size == (64, 64)
    assert PolicyOptions(resolution=64, width=32).size == (64, 32)
    assert PolicyOptions(frozen_adapters="a=x,y").frozen == ("a=x", "y")
    assert PolicyOptions(fixed=True).trained is None and PolicyOptions().trained == "lora"
    with pytest.raises(ConfigError, match=r"PolicyOptions\.lora_rank = 0 is not allowed"):
        PolicyOptions(lora_rank=0)


DEFAULTS = {
    Uniform: "std='group', clamp=5.0, limit='clamp', probe=NoProbe(), all_failed='zero'",
    Weighted: "weights='noise', rule=Uniform(std='group', clamp=5.0, limit='clamp', probe=NoProbe(), all_failed='zero')",
    StepwiseGain: (
        "normalise='joint', lam=0.0, gamma=1.0, pool='prompt', clamp=5.0, probe=Substeps(count=5)"
    ),
    MovingAverageGain: "decay=0.9, clamp=5.0, probe=Substeps(count=5)",
    ValueTracker: "decay=0.9, std='prompt', clamp=5.0",
    TurningPoint: (
        "consistent=True, balance='aggregate', balance_scope='batch', first_step=True, "
        "normalise='step', combine='replace', clamp=5.0, probe=Completion()"
    ),
    GDPO: "rule=Uniform(std='group', clamp=5.0, limit='clamp', probe=NoProbe(), all_failed='zero'), weights=None, batch=True",
    FlowSDE: "noise_level=0.7",
    DanceSDE: "noise_level=0.3",
    CPS: "noise_level=0.7",
    DDIMSDE: "noise_level=0.7",
    ExponentialSDE: "noise_level=0.7",
    ODE: "",
    ClippedLoss: "kl_weight=0.0, kl='exact', clip_range=0.0001, log_prob='exact'",
    GRPOGuard: "kl_weight=0.0, kl='exact', clip_range=0.0001",
    FlowDPPO: "kl_weight=0.0, kl='exact', bound=1e-05",
    PolicyGradientLoss: "kl_weight=0.0, kl='exact'",
    DiffusionNFT: (
        "beta=1.0, advantage_clip=5.0, kl_weight=0.0001, error='normalised', mode='all', "
        "decay=(0, 0.001, 0.5), times=PermutedTimes(shared=False, fraction=0.99), noise='each'"
    ),
    AWM: (
        "weight='ghuber', power=0.25, clip=1.0, trust='clip', ratio='exp_first', "
        "advantage_clip=5.0, advantage_scale=1.0, kl_weight=0.001, average_weight=1.0, kl='uniform', "
        "off_policy=False, decay=(0, 0.001, 0.3), times=StratifiedTimes(shared=False, count=6, "
        "fraction=0.9), noise='each'"
    ),
    DGPO: (
        "beta_dpo=100.0, clip=0.01, clip_kl=False, kl_weight=0.02, anchor='reference', "
        "decay=(1, 0.001, 0.3), sample_from=200, times=DrawnSteps(shared=True, count=4, "
        "steps=7), noise='group'"
    ),
    CRD: (
        "beta=1.0, advantage_clip=5.0, form='mse', error='velocity', kl_weight=0.1, kl='reward', "
        "decay=(0, 0.001, 0.5), sampling_decay=(0, 0.001, 0.5), "
        "times=PermutedTimes(shared=True, fraction=0.99), noise='group'"
    ),
    PermutedTimes: "shared=False, fraction=0.99",
    StratifiedTimes: "shared=False, count=6, fraction=0.9",
    UniformTimes: "shared=False, count=6, low=0.2, high=1.0, shift=3.0",
    LogitNormalTimes: "shared=False, count=6, mean=0.0, std=1.0, shift=3.0",
    DrawnSteps: "shared=True, count=4, steps=7",
    LateSteps: "shared=False, count=1, last=None, power=0.0",
    RewardAscent: (
        "latent_reward=None, through='image', weight=1.0, target=None, rescale=0.0, kl_weight=0.0, "
        "times=LateSteps(shared=False, count=3, last=None, power=2.0), noise='path'"
    ),
}


@pytest.mark.parametrize("part", DEFAULTS, ids=lambda part: part.__name__)
def test_defaults_are_the_documented_ones(part):
    assert repr(part()) == f"{part.__name__}({DEFAULTS[part]})"


def test_parts_are_values_that_cannot_be_changed():
    parts = [kind() for kind in DEFAULTS if kind not in (MovingAverageGain, ValueTracker)]
    windows = [FixedWindow(1), RandomWindow(1), SlidingWindow(1)]
    for part in [*parts, *windows, Windowed(CPS(), range(1)), GaussianMixture.ring()]:
        with pytest.raises(dataclasses.FrozenInstanceError):
            part.anything = 1


def refused(part, option, value):
    with pytest.raises(ConfigError, match=rf"{part.__name__}\.{option} = .* is not allowed"):
        part(**{option: value})


LIMITS = [
    (
        [0.0, 10.0],
        [-1e-6],
        {
            **dict.fromkeys((FlowSDE, DanceSDE, DDIMSDE, ExponentialSDE), "noise_level"),
            **dict.fromkeys((ClippedLoss, GRPOGuard, FlowDPPO, PolicyGradientLoss), "kl_weight"),
            **dict.fromkeys((DiffusionNFT, DGPO, CRD, RewardAscent), "kl_weight"),
            AWM: "kl_weight average_weight",
        },
    ),
    (
        [1e-9, 10.0],
        [0.0, -1.0],
        {
            FlowDPPO: "bound",
            DiffusionNFT: "beta advantage_clip",
            CRD: "beta advantage_clip",
            RewardAscent: "weight",
            AWM: "power clip advantage_clip advantage_scale",
            DGPO: "beta_dpo",
            UniformTimes: "shift",
            LogitNormalTimes: "std shift",
        },
    ),
    (
        [0.0, 1.0],
        [-1e-6, 1 + 1e-6],
        {StepwiseGain: "lam gamma", CPS: "noise_level", RewardAscent: "rescale"},
    ),
    ([0.0, 1.0], [-1e-6, 1.1], {ValueTracker: "decay"}),
    ([0.0, 0.999], [1.0, -1e-6], {MovingAverageGain: "decay"}),
    ([1e-9, 0.999], [0.0, 1.0], dict.fromkeys((ClippedLoss, GRPOGuard), "clip_range")),
    ([1e-6, 1.0], [0.0, 1.1], dict.fromkeys((PermutedTimes, StratifiedTimes), "fraction")),
    (
        [None, 1e-6],
        [0.0, -1.0],
        dict.fromkeys((Uniform, StepwiseGain, MovingAverageGain, TurningPoint), "clamp"),
    ),
    ([None, 1e-6], [0.0], {ValueTracker: "clamp", DGPO: "clip"}),
    (["noise", (1.0,), (0.0, -1.0)], [(), (math.nan,), "equal", [1.0]], {Weighted: "weights"}),
    ([1, 50], [0, -1], {Substeps: "count"}),
    ([1, 7], [8], {DrawnSteps: "count"}),
    ([None, 1, 7], [0], {LateSteps: "last"}),
    (
        [DrawnSteps(), PermutedTimes(shared=True)],
        [PermutedTimes(), "steps"],
        {DGPO: "times", CRD: "times"},
    ),
    ([1e-6, 0.5], [0.0, 1.0], {UniformTimes: "low"}),
    ([0.3, 1.0], [0.2, 1.1], {UniformTimes: "high"}),
]


@pytest.mark.parametrize(("inside", "outside", "options"), LIMITS)
def test_options_end_where_they_should(inside, outside, options):
    for part, names in options.items():
        for option in names.split():
            for value in inside:
                assert getattr(part(**{option: value}), option) == value
            for value in outside:
                refused(part, option, value)


@checked_options
@dataclasses.dataclass(frozen=True)
class Sized:
    """Options of every form."""

    size: Count | Literal["all"] | None = None
    scale: float | None = 0.5
    sizes: tuple[Count, ...] = ()


@dataclasses.dataclass(frozen=True)
class Command:
    """A command with a group of options."""

    group: Sized = Sized()
    seconds: Positive = math.inf


@pytest.mark.parametrize(
    ("option", "inside", "outside"),
    [
        ("size", [1, "all", None], [0, "none", 1.0, True]),
        ("scale", [2, 0.5, None], [math.nan, -math.inf, True, "2"]),
        ("sizes", [(), (1, 2)], [(1, 0), [1], (1, True), 1]),
    ],
)
def test_bounds_hold_in_every_form_of_an_option(option, inside, outside):
    for value in inside:
        assert getattr(Sized(**{option: value}), option) == value
        check_ranges(Command(Sized(**{option: value})))
    for value in outside:
        refused(Sized, option, value)
        group = Sized()
        object.__setattr__(group, option, value)  # as a parser makes it, which knows no ranges
        with pytest.raises(ConfigError, match=f"^{option} = "):
            check_ranges(Command(group))
    with pytest.raises(ConfigError, match=r"Sized\.size = 0"):
        Sized(0)


def test_windows_end_where_they_should():
    generator, x = torch.Generator(), torch.zeros(4, 2)
    for make in (
        lambda: Windowed(CPS(), [-1]),
        lambda: Windowed(CPS(), range(0)),
        lambda: Windowed(CPS(), range(1, 5)).transition(x, x, uniform_schedule(4), torch.arange(4)),
        lambda: RandomWindow(0),
        lambda: RandomWindow(1, low=-1),
        lambda: RandomWindow(3, low=1, high=3).steps(4, generator),
        lambda: RandomWindow(1, high=5).steps(4, generator),
        lambda: RandomWindow(4, low=1).steps(4, generator),
    ):
        with pytest.raises(ConfigError, match="is not allowed"):
            make()


def test_trajectories_that_cannot_fit_are_refused_with_their_size():
    from flowrl.run.build import make_trainer

    config = TINY_RUN.replace(groups=10**6, group_size=10**4)
    with pytest.raises(
        ConfigError, match=r"groups = 1000000 is not allowed; .* trajectories take [\d.e+]+ GB"
    ):
        make_trainer(config)
