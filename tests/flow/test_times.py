"""Training times: ranges, strata, permutations, and that they depend on the generator alone."""

import pytest
import torch
from seeded import seeded
from torch.testing import assert_close

from flowrl.core.errors import ConfigError
from flowrl.core.protocols import TimeDraw
from flowrl.core.types import Schedule
from flowrl.flow import (
    DrawnSteps,
    LogitNormalTimes,
    PermutedTimes,
    StratifiedTimes,
    UniformTimes,
    shifted_schedule,
    uniform_schedule,
)

KINDS = [
    PermutedTimes(0.5, shared=True),
    StratifiedTimes(),
    UniformTimes(shift=1.0, shared=True),
    LogitNormalTimes(count=2, mean=1.0, std=2.0),
    DrawnSteps(),
    DrawnSteps(count=7, shared=False),
]
GRID = shifted_schedule(10)


def drawn(kind, samples=50, seed=0, schedule=GRID):
    return kind.draw(schedule, samples, seeded(seed))


@pytest.mark.parametrize("kind", KINDS, ids=repr)
def test_times_are_in_range_and_repeatable(kind):
    times = drawn(kind)
    assert isinstance(kind, TimeDraw) and times.dtype == torch.float32
    assert times.shape == (50, kind.draws(GRID))
    assert ((times > 0) & (times <= 1)).all()
    assert torch.equal(times, drawn(kind)) and not torch.equal(times, drawn(kind, seed=1))
    assert torch.equal(times, times[:1].expand_as(times)) == kind.shared
    if not isinstance(kind, UniformTimes | LogitNormalTimes):  # distinct times of the grid
        assert torch.isclose(times[..., None], GRID.times[:-1], atol=1e-6).any(-1).all()
        assert all(len(row.unique()) == len(row) for row in times)


def counts(kind, samples=4000):
    """How often each step of the grid is drawn, per sample."""
    times = drawn(kind, samples)
    return torch.isclose(times[..., None], GRID.times[:-1], atol=1e-6).sum((0, 1)) / samples


@pytest.mark.parametrize(
    ("kind", "shares"),
    [
        (PermutedTimes(), [0.9] * 10),
        (DrawnSteps(shared=False), [4 / 7] * 7 + [0] * 3),
        # steps 1 to 8 in 6 parts: edges 1, 2, 3, 5, 6, 7, 9
        (StratifiedTimes(), [0, 1, 1, 0.5, 0.5, 1, 1, 0.5, 0.5, 0]),
    ],
)
def test_every_step_has_its_probability(kind, shares):
    """Tolerance: five standard deviations of a share of 4,000 samples."""
    close = dict(rtol=0.0, atol=5 * 0.5 / 4000**0.5)
    assert_close(counts(kind), torch.tensor(shares), **close)


def test_strata_and_shift():
    numbers, options = torch.tensor([[0.0, 0.5, 0.999]]), dict(count=3, low=0.1, high=0.7)
    even, shifted = (
        UniformTimes(**options, shift=shift).times(numbers, GRID) for shift in (1.0, 3.0)
    )
    assert_close(even, torch.tensor([[0.1, 0.4, 0.6998]]))
    assert_close(shifted, 3 * even / (1 + 2 * even))
    middle = LogitNormalTimes(count=1, mean=0.3, shift=1.0).times(torch.tensor([[0.5]]), GRID)
    assert_close(middle, torch.sigmoid(torch.tensor([[0.3]])))
    median = LogitNormalTimes(count=1).times(torch.tensor([[0.5]]), GRID)  # 3 (1/2) / (1 + 2 / 2)
    assert float(median) == 0.75 and LogitNormalTimes().count == UniformTimes().count == 6


def test_the_smallest_uniform_number_gives_a_time_above_0():
    times = LogitNormalTimes(count=2).times(torch.zeros(1, 2), GRID)
    assert 0 < times.min() < 0.05


def test_times_are_what_the_network_is_told():
    """A scheduler whose time steps are not 1000 sigma."""
    schedule = Schedule(GRID.times, timesteps=torch.arange(999, 0, -100).float())
    times = drawn(DrawnSteps(), schedule=schedule)[0]
    assert set(times.mul(1000).round().tolist()) <= set(range(399, 1000, 100))


@pytest.mark.parametrize(
    ("kind", "steps", "words"),
    [
        (StratifiedTimes(), 6, "StratifiedTimes.count = 6 .* 4 or fewer for a grid of 6 steps"),
        (DrawnSteps(), 5, "DrawnSteps.steps = 7 .* at most the grid's 5 steps"),
    ],
)
def test_a_grid_with_too_few_steps_is_named(kind, steps, words):
    with pytest.raises(ConfigError, match=words):
        drawn(kind, schedule=uniform_schedule(steps))
