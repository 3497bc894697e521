"""Fixed, random and sliding windows, and the steps of them that are trained."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from seeded import seeded

from flowrl.core.errors import ConfigError
from flowrl.run import build
from flowrl.samplers import (
    FixedWindow,
    Multistep,
    RandomWindow,
    SlidingWindow,
    trained_steps,
    windowed,
)


def steps_of(window, count=10, iteration=0, seed=0):
    return list(window.steps(count, seeded(seed), iteration))


def starts(window, iterations):
    windows = [steps_of(window, iteration=i) for i in range(iterations)]
    assert all(steps == list(range(steps[0], steps[0] + window.size)) for steps in windows)
    return [steps[0] for steps in windows]


ENDS = st.none() | st.integers(-12, 12)


@given(ENDS, ENDS, st.integers(1, 10))
def test_a_fixed_window_is_a_slice_of_the_steps(start, stop, count):
    """Within the schedule; ends beyond it are refused."""
    expected = list(range(count))[start:stop]
    if all(-count <= end <= count for end in (start or 0, stop or 0)) and expected:
        assert steps_of(FixedWindow(start, stop), count) == expected
    else:
        with pytest.raises(ConfigError, match=rf"window = .*within the schedule's {count} steps"):
            steps_of(FixedWindow(start, stop), count)


def test_a_sliding_window_moves_to_the_end_and_restarts():
    assert starts(SlidingWindow(4), 9) == [0, 1, 2, 3, 4, 5, 6, 0, 1]
    assert starts(SlidingWindow(4, stride=4, every=2), 8) == [0, 0, 4, 4, 6, 6, 0, 0]
    assert starts(SlidingWindow(10), 3) == [0, 0, 0]


def test_a_random_window_is_reproducible_and_covers_every_place():
    """100 draws over 4 places miss one of them with probability below 1e-11."""
    window = RandomWindow(size=3, low=1, high=7)

    def drawn(window):
        generator = seeded()
        return [tuple(window.steps(8, generator)) for _ in range(100)]

    assert {*drawn(window)} == {(1, 2, 3), (2, 3, 4), (3, 4, 5), (4, 5, 6)}
    for geometric in (None, 0.5):
        assert len({str(drawn(replace(window, geometric=geometric))) for _ in range(2)}) == 1
    assert steps_of(RandomWindow(10)) == list(range(10))
    for iteration in (1, 50):
        assert steps_of(window, iteration=iteration, seed=7) == steps_of(window, seed=7)


def test_a_multistep_solver_has_no_window():
    generator = seeded()
    before = generator.get_state()
    assert windowed(Multistep(), RandomWindow(2), 10, generator) == Multistep()
    assert torch.equal(generator.get_state(), before)


def chosen(spec, stds, seed=0):
    return trained_steps(build.steps_of(spec), torch.tensor(stds), seeded(seed)).tolist()


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (":", [1, 2, 3, 5]),
        (":-1", [1, 2, 3]),
        ("0:3", [1, 2]),
        ("2:6", [2, 3, 5]),
        ("-3:", [3, 5]),
        ("3:5", [3]),
        ("random(fraction=1)", [1, 2, 3, 5]),
    ],
)
def test_only_steps_with_noise_are_trained(spec, expected):
    assert chosen(spec, [0.0, 0.1, 0.2, 0.3, 0.0, 0.4]) == expected


def test_a_random_share_is_drawn_evenly_and_again_from_the_same_state():
    """0.6 of 9 steps are 5 (DanceGRPO's floor); 500 draws: a step's count has standard deviation
    11.1; five are allowed.
    """
    draws = [chosen("random(fraction=0.6)", [0.1] * 9 + [0.0], seed) for seed in range(500)]
    assert all(len(steps) == 5 and steps == sorted(set(steps)) for steps in draws)
    counts = torch.tensor(draws).flatten().bincount(minlength=10)
    assert counts[9] == 0 and (counts[:9] - 500 * 5 / 9).abs().max() < 5 * 11.2
    assert chosen("random(fraction=0.6)", [0.1] * 9 + [0.0], 7) == draws[7]
    assert len(chosen("random(fraction=0.01)", [0.1] * 9)) == 1


@pytest.mark.parametrize(
    "spec", ["3", "1:2:3", "random", "random(fraction=nan)", "random(size=3)", "all(fraction=0.5)"]
)
def test_other_words_for_trained_steps_are_refused(spec):
    with pytest.raises(ConfigError, match=r"^trained_steps = .*allowed: a slice START:STOP"):
        chosen(spec, [0.1, 0.1])


@pytest.mark.parametrize("spec", ["0:3", "-3:", ":-4", "2:"])
def test_trained_steps_outside_the_schedule_are_refused(spec):
    with pytest.raises(ConfigError, match=rf"^trained_steps = '{spec}' .*(2 steps|one of the sto)"):
        chosen(spec, [0.1, 0.1])


def test_a_geometric_start_is_drawn_with_its_probabilities():
    """Chi-squared over 5 starts; 1000 draws; the false-alarm rate is 0.1% (critical value 18.5 at 4
    degrees of freedom).
    """
    window = RandomWindow(3, low=1, high=8, geometric=0.5)
    generator = seeded(1)
    starts = torch.tensor([window.steps(9, generator)[0] for _ in range(1000)])
    expected = 1000 * 0.5 ** torch.arange(5) / sum(0.5**i for i in range(5))
    counts = torch.bincount(starts, minlength=6)
    assert counts[0] == 0 and len(counts) == 6
    assert ((counts[1:] - expected) ** 2 / expected).sum() < 18.5
