"""The window that moves along the trajectory, and the steps of it that are trained."""

from dataclasses import replace

import pytest
import torch

from flowrl.errors import ConfigError
from flowrl.flow import shifted_schedule, uniform_schedule
from flowrl.methods import make_sampler
from flowrl.protocols import RandomSampler
from flowrl.samplers import CPS, FlowSDE, RandomWindow, SlidingWindow, trained_steps, transition_stds
from flowrl.training.build import make_method, make_world, policy_options
from flowrl.training.config import preset
from flowrl.training.trainer import Trainer

SCHEDULE = shifted_schedule(10)


def starts(window: SlidingWindow, iterations: int) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    return [window.draw(SCHEDULE, generator, i).start for i in range(iterations)]


def test_it_moves_by_its_stride_and_starts_over() -> None:
    assert starts(SlidingWindow(CPS(), 4), 9) == [0, 1, 2, 3, 4, 5, 6, 0, 1]
    assert starts(SlidingWindow(CPS(), 4, stride=4, every=2), 8) == [0, 0, 4, 4, 6, 6, 0, 0]
    assert starts(SlidingWindow(CPS(), 10), 3) == [0, 0, 0]


def test_it_may_stay_at_the_end_instead() -> None:
    assert starts(SlidingWindow(CPS(), 4, at_end="stay"), 9) == [0, 1, 2, 3, 4, 5, 6, 6, 6]
    assert starts(SlidingWindow(CPS(), 4, stride=4, every=2, at_end="stay"), 8) == [0, 0, 4, 4, 6, 6, 6, 6]


@pytest.mark.parametrize(("size", "stride"), [(1, 1), (3, 2), (4, 4), (7, 5), (10, 1)])
def test_one_pass_trains_every_step(size: int, stride: int) -> None:
    window = SlidingWindow(CPS(), size, stride)
    places = window.starts(10)
    assert {start + i for start in places for i in range(size)} == set(range(10))
    assert starts(window, len(places) + 1) == [*places, 0]


def test_a_random_window_does_not_depend_on_the_iteration() -> None:
    def drawn(iteration: int) -> int:
        return RandomWindow(CPS(), 3).draw(SCHEDULE, torch.Generator().manual_seed(7), iteration).start

    assert drawn(0) == drawn(1) == drawn(50)


def test_nothing_is_drawn_and_only_the_window_is_stochastic() -> None:
    generator = torch.Generator().manual_seed(0)
    before = generator.get_state()
    window = SlidingWindow(FlowSDE(), 3, stride=2)
    assert isinstance(window, RandomSampler)
    stds = transition_stds(window.draw(SCHEDULE, generator, 2), SCHEDULE)
    assert torch.equal(generator.get_state(), before)
    assert (stds > 0).nonzero().flatten().tolist() == [4, 5, 6]


def test_by_word_and_in_the_trainer() -> None:
    assert make_sampler("cps", 0.3, "sliding:4") == SlidingWindow(CPS(0.3), 4)
    assert make_sampler("cps", 0.3, "sliding:4:2:25") == SlidingWindow(CPS(0.3), 4, 2, 25)
    config = preset("tiny").apply(world="mixture", window="sliding:2:1:1", iterations=3)
    chosen = make_world(config)
    policy = chosen.policy(policy_options(config))
    run = Trainer(policy, make_method(config), chosen.reward("soft"), chosen.prompts("direction", "train"), config)
    seen = []
    for _ in range(4):
        seen.append(run.draw_sampler().start)  # pyright: ignore[reportAttributeAccessIssue]
        run.iteration() if run.done < 3 else None
    assert seen == [0, 1, 2, 0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: SlidingWindow(CPS(), 0),
        lambda: SlidingWindow(CPS(), 1, stride=0),
        lambda: SlidingWindow(CPS(), 1, every=0),
        lambda: SlidingWindow(CPS(), 1, at_end="bounce"),  # pyright: ignore[reportArgumentType]
        lambda: SlidingWindow(CPS(), 11).starts(10),
        lambda: SlidingWindow(RandomWindow(CPS(), 2), 2),
        lambda: SlidingWindow(CPS(), 2).transition(torch.zeros(1, 2), torch.zeros(1, 2), SCHEDULE, torch.zeros(1).long()),
        lambda: make_sampler("cps", 0.3, "sliding:4:2:1:1"),
        lambda: make_sampler("cps", 0.3, "sliding"),
        lambda: make_sampler("cps", 0.3, "sliding:x"),
        lambda: make_sampler("cps", 0.3, "first:3"),
        lambda: make_sampler("cps", 0.3, "random:3:2"),
        lambda: make_sampler("cps", 0.3, "random:1:2:3"),
    ],
)
def test_bad_settings_are_refused(make) -> None:
    with pytest.raises(ConfigError, match=r"Sliding|[Ww]indow|sampler"):
        make()


def chosen(spec: str, stds: list[float], seed: int = 0) -> list[int]:
    schedule = replace(uniform_schedule(len(stds)), stds=torch.tensor(stds))
    return trained_steps(spec, schedule, torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize(
    ("spec", "expected"),
    [("all", [1, 2, 3, 5]), ("all-but-last", [1, 2, 3]), ("0:3", [1, 2]), ("2:9", [2, 3, 5]), ("random:1", [1, 2, 3, 5])],
)
def test_only_steps_with_noise_are_trained(spec: str, expected: list[int]) -> None:
    assert chosen(spec, [0.0, 0.1, 0.2, 0.3, 0.0, 0.4]) == expected


def test_a_random_share_is_drawn_evenly_and_again_from_the_same_state() -> None:
    """0.6 of 9 steps are 5 (DanceGRPO's floor); 2,000 draws: a step's count has standard deviation 22; five are allowed."""
    draws = [chosen("random:0.6", [0.1] * 9 + [0.0], seed) for seed in range(2000)]
    assert {len(steps) for steps in draws} == {5} and all(steps == sorted(set(steps)) for steps in draws)
    counts = torch.tensor(draws).flatten().bincount(minlength=10)
    assert counts[9] == 0 and (counts[:9] - 2000 * 5 / 9).abs().max() < 5 * 22.3
    assert chosen("random:0.6", [0.1] * 9 + [0.0], 7) == draws[7] and len(chosen("random:0.01", [0.1] * 9)) == 1


@pytest.mark.parametrize("spec", ["", "some", "3", "1:x", "-1:2", "random", "random:0", "random:1.5", "random:nan", "all:3"])
def test_other_words_for_trained_steps_are_refused(spec: str) -> None:
    with pytest.raises(ConfigError, match=r"trained_steps = .* is not allowed; allowed: all, all-but-last, START:SIZE"):
        chosen(spec, [0.1, 0.1])


@pytest.mark.parametrize("spec", ["all-but-last", "0:3", "1:0"])
def test_a_loss_without_steps_is_refused(spec: str) -> None:
    with pytest.raises(ConfigError, match=r"at least one of the stochastic steps \[3\]"):
        chosen(spec, [0.0, 0.0, 0.0, 0.1])
    with pytest.raises(ConfigError, match="no stochastic step on this schedule"):
        chosen(spec, [0.0, 0.0])
    with pytest.raises(ConfigError, match="all or random:FRACTION"):
        make_method(preset("tiny").apply(trained_steps=spec, window="random:1"))


def test_a_geometric_start_is_drawn_with_its_probabilities() -> None:
    """Chi-squared over 5 starts; 4000 draws; the false-alarm rate is 0.1% (critical value 18.5 at 4 degrees of freedom)."""
    window, schedule, generator = (
        RandomWindow(CPS(), 3, low=1, high=8, geometric=0.5),
        uniform_schedule(9),
        torch.Generator().manual_seed(1),
    )
    starts = torch.tensor([window.draw(schedule, generator).start for _ in range(4000)])
    expected = 4000 * 0.5 ** torch.arange(5) / sum(0.5**i for i in range(5))
    counts = torch.bincount(starts, minlength=6)
    assert counts[0] == 0 and len(counts) == 6
    assert float(((counts[1:] - expected) ** 2 / expected).sum()) < 18.5


def test_a_window_spec_may_have_a_ratio() -> None:
    assert make_sampler("cps", 0.5, "random:3:0.5") == RandomWindow(CPS(0.5), 3, geometric=0.5)
    assert make_sampler("cps", 0.5, "random:3") == RandomWindow(CPS(0.5), 3)
    for spec in ("random:3:0.5:1", "random:3:much", "random:3:1.0", "random:3:0"):
        with pytest.raises(ConfigError, match=r"RATIO|geometric|high"):
            make_sampler("cps", 0.5, spec)
