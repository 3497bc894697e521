"""The search for each method's settings: equal budgets, a grid that grows, and a log that it can go
on from.
"""

import json
from operator import itemgetter

import pytest
from bench_lines import here
from hypothesis import given
from hypothesis import strategies as st

from flowrl.bench import tune
from flowrl.bench.arms import ARMS, Arm
from flowrl.bench.measurements import CURVE
from flowrl.bench.results_file import ResultsFile
from flowrl.bench.tune import (
    SEEDS,
    Search,
    best,
    choices,
    chosen,
    proposals,
    score_of,
)
from flowrl.core.errors import TrainingError
from flowrl.run.build import check


def run(score, knobs=3, budget=24):
    scores = {}
    while (trial := next(proposals(scores, knobs, budget), None)) is not None:
        assert trial not in scores
        scores[trial] = score(trial)
    return scores


def hill(top, slope=1.0):
    return lambda trial: -slope * sum((a - b) ** 2 for a, b in zip(trial[0], top, strict=True))


@given(st.integers(1, 40), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_every_method_gets_exactly_its_budget(budget, knobs, seed):
    """Whatever the scores are."""
    assert len(run(lambda trial: hash((trial, seed)) % 1000, knobs, budget)) == budget


@given(st.integers(-5, 5))
def test_an_optimum_at_an_edge_widens_the_grid(top):
    assert best(run(hill((top,)), knobs=1)) == (top,)


def test_half_of_the_budget_confirms_two_finalists_with_further_seeds():
    repeats = [trial for trial in run(hill((3, 0, 0))) if trial[1] != SEEDS[0]]
    points, seeds = map(set, zip(*repeats, strict=True))
    assert len(repeats) == 12 and len(points) == 2 and seeds == set(SEEDS[1:7])


def near(trial):
    """Highest at (1, 0, 0), and nowhere much lower."""
    return 0.9 + hill((1, 0, 0), 0.01)(trial)


def test_settings_that_collapse_are_not_chosen():
    """Two points that win with the first seed and collapse in a third of the others lose to a
    steady one, which is repeated once they have fallen behind it. By the first seed it was third.
    """

    def score(trial):
        point, seed = trial
        if point in ((2, 0, 0), (2, 1, 0)):
            return 0.5 if seed in SEEDS[3::3] else 1.0
        return near(trial)

    assert best(run(score)) == (1, 0, 0)


def test_a_lucky_seed_is_not_chosen():
    """The best point of the first seed loses to the second once both have three seeds."""
    lucky = (2, 0, 0)
    scores = run(lambda trial: 1.4 if trial == (lucky, SEEDS[0]) else near(trial))
    assert (lucky, SEEDS[1]) in scores and best(scores) == (1, 0, 0)
    points = {(0,): (1.0, 0.0), (1,): (0.0, 0.1)}
    scores = {
        (p, seed): s for p, pair in points.items() for seed, s in zip(SEEDS, pair, strict=False)
    }
    assert best(scores) == (1,)


def test_a_larger_budget_tries_every_point_with_more_seeds():
    """A point that collapses in every sixth further run is not chosen, though its lower quartile is
    the highest.
    """

    def score(trial):
        point, seed = trial
        fallen = point == (2, 0, 0) and seed in SEEDS[8::6]
        return near(trial) + 0.03 * (point == (2, 0, 0)) - 0.3 * fallen

    scores = run(score, budget=72)
    assert best(scores, each=3) == (1, 0, 0)
    assert all((point, seed) in scores for point, _ in scores for seed in SEEDS[:3])


@pytest.mark.parametrize("name", ARMS)
def test_every_arm_can_be_built_at_every_neighbour(name):
    arm = ARMS[name]
    for world in arm.worlds:
        for knob in arm.knobs:
            for level in (-1, 0, 1):
                config = arm.run(world, arm.values(world, {knob: level}))
                check(config)
                assert config.environment.world == world


def test_a_run_that_ends_low_scores_its_end():
    for rewards, score in (((0.1, 0.9, 0.9, 0.2), 0.2), ((0.1, 0.5, 0.7, 0.9), 0.7)):
        line = {"curve": [[reward] * len(CURVE) for reward in rewards]}
        assert score_of(line) == pytest.approx(score)


@pytest.fixture
def short(monkeypatch):
    """Searches with runs of one iteration, in this process."""
    small = {"iterations": 1, "eval_every": 1, "eval_samples": 18, "groups": 2}
    monkeypatch.setitem(tune.SHORT, "mixture", small)
    monkeypatch.setattr(tune, "run_jobs", here)


def test_a_run_that_diverges_has_the_lowest_score(short, tmp_path, monkeypatch):
    """The search goes on, and its file can be read."""
    measured = tune.measure

    def measure(config, *more):
        if config.optim.learning_rate > 0.02:
            raise TrainingError("the gradient is not finite")
        return measured(config, *more)

    monkeypatch.setattr(tune, "measure", measure)
    knobs = {"learning_rate": ARMS["uniform"].knobs["learning_rate"]}
    search = Search(Arm("mine", {"loss": "policy-gradient"}, knobs), "mixture", 3)
    assert tune.tune([search], tmp_path / "tuning.jsonl", "-")
    lines = [*ResultsFile(tmp_path / "tuning.jsonl").read().values()]
    assert [line.get("diverged", "") for line in lines] == ["", "the gradient is not finite", ""]
    assert chosen(search, lines)["learning_rate"] <= 0.02


def test_the_log_is_complete_and_goes_on(short, tmp_path):
    log = tmp_path / "tuning.jsonl"
    search = Search(Arm("uniform", {"method": "flow-grpo"}), "mixture", 4)

    def tuned():
        assert tune.tune([search], log, "flowrl bench tune")
        return [json.loads(text) for text in log.read_text().splitlines()]

    lines = tuned()
    assert len(lines) == 4 and {line["command"] for line in lines} == {"flowrl bench tune"}
    log.write_text("".join(json.dumps(line) + "\n" for line in lines[:2]))
    assert chosen(search, lines[:2]) is None and chosen(search, []) is None
    assert "2 of 4 runs are missing" in choices([search], log)
    numbers = itemgetter("point", "seed", "score")
    assert [*map(numbers, tuned())] == [*map(numbers, lines)] and chosen(search, lines) is not None
