"""The contest: what is fixed, what a budget pays, and the search for Flow-GRPO's cheapest settings."""

import csv

import pytest
import search_baseline
from bench_lines import fake_line
from loading import ROOT

from flowrl.bench.contest import CONTESTS, iteration_seconds
from flowrl.bench.evidence import spent
from flowrl.bench.results_file import ResultsFile
from flowrl.core.errors import ConfigError

IMAGES = CONTESTS["images"]
RESULTS = ROOT / "benchmarks/results"


@pytest.mark.parametrize("world", CONTESTS)
def test_targets_and_settings_are_those_of_the_verdicts_flow_grpo(world):
    contest = CONTESTS[world]
    with (RESULTS / "verdict-arms.csv").open(newline="") as file:
        rows = {row["task"]: row for row in csv.DictReader(file) if row["arm"] == "Flow-GRPO"}
    assert contest.tasks.keys() == contest.targets.keys() == contest.settings.keys()
    for task, target in contest.targets.items():
        assert float(rows[task]["final"]) == target
        known = dict(pair.split("=") for pair in rows[task]["settings"].split(", "))
        assert {name: contest.settings[task][name] for name in known} == {
            name: float(value) for name, value in known.items()
        }


@pytest.mark.parametrize("share", [1, 0.25])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"groups": 6},
        {"method": "tp-grpo"},
        {"groups": 4, "group_size": 24, "window": "0:9", "minibatches": 2},
        {"credit": "calibrated-gain(gain_weight=0)"},
    ],
)
def test_every_entry_spends_the_budget(settings, share):
    """At most, and less by no more than an iteration."""
    for task in IMAGES.tasks:
        run = IMAGES.run(task, settings, 1, share)
        seconds = iteration_seconds(run)
        rest = share * IMAGES.budget - run.iterations * seconds
        assert -1e-6 * IMAGES.budget <= rest < seconds
        assert (run.seed, run.evaluation.eval_samples) == (1, 384)
    assert IMAGES.run("text", {}, 1).iterations == 24


@pytest.mark.parametrize("settings", [{"eval_steps": 5}, {"task": "text"}, {"start_from": "run"}])
def test_what_the_contest_fixes(settings):
    with pytest.raises(ConfigError, match="allowed: those that the contest does not fix"):
        IMAGES.run("text", settings, 1)


@pytest.mark.satellite
def test_planned_seconds_are_those_that_runs_count():
    """Of a committed run of the same settings."""
    lines = ResultsFile(RESULTS / "verdict-images.jsonl").unchecked()
    run = IMAGES.run("compositional", {}, 7000)
    wanted = run.replace(iterations=12, eval_every=2)
    (line,) = (
        line
        for line in lines
        if line["config"]["algorithm"]["method"] == "flow-grpo"
        and line["seed"] == 7000
        and ResultsFile(RESULTS).settings(line) == wanted
    )
    assert spent(line, "stated seconds")[-1] == pytest.approx(12 * iteration_seconds(run))


def test_points_of_the_search_are_distinct_and_begin_with_the_verdicts():
    drawn = search_baseline.points("images", 12)
    assert drawn[0] == {} and len({str(point) for point in drawn}) == 12
    assert (
        search_baseline.points("images", 5) == drawn[:5]
    )  # more points do not change the first ones
    for point in drawn[1:]:
        for name, values in search_baseline.SPACE.items():
            assert point[name] in values


def test_scores_and_the_best():
    lines = {
        (task, seed): fake_line([0.5, 0.6, 0.5 + gain])
        for task, gain in (("compositional", 0.3483), ("text", 0.1815), ("preference", 0.0))
        for seed in (1, 2)
    }
    assert search_baseline.progress_to_target(IMAGES, lines) == pytest.approx((1 + 0.5 + 0) / 3)
    assert search_baseline.best([0.1, 0.3, 0.3, 0.2], 3) == [1, 2, 3]
