"""Sweeps: grids as typed, the results of a small one, and its figures."""

import csv
from collections import Counter
from pathlib import Path

import pytest
from small_run import flowrl_

from flowrl.compare.arms import grid_arms, parse_grid, parse_seeds, require_apart
from flowrl.compare.results import Comparison, load_comparison
from flowrl.compare.sweep import Sweep
from flowrl.core.errors import ConfigError
from flowrl.run.config import load_config
from flowrl.run.records import RunRecord


def test_grids_and_seeds_as_typed():
    spec = "pruned(rule='stepwise-gain(probe=branch(children=(1, 2), weight=edge))'),uniform"
    grid = parse_grid(f"learning_rate=1e-4, 3e-4  window=1:3,2:4 credit={spec}")
    assert grid == {
        "learning_rate": [1e-4, 3e-4],
        "window": ["1:3", "2:4"],
        "credit": [
            "pruned(rule='stepwise-gain(probe=branch(children=(1, 2), weight=edge))')",
            "uniform",
        ],
    }
    tuned = {"clip_range": 0.1, "learning_rate": 0.2}
    arms, points = grid_arms({"a": tuned}, {"learning_rate": [1, 2], "betas": [3]})
    assert arms == {
        "a learning_rate=1 betas=3": {"clip_range": 0.1, "learning_rate": 1, "betas": 3},
        "a learning_rate=2 betas=3": {"clip_range": 0.1, "learning_rate": 2, "betas": 3},
    }
    assert points["a learning_rate=2 betas=3"] == {"arm": "a", "learning_rate": 2, "betas": 3}
    assert parse_seeds(["7", "0-2"]) == (7, 0, 1, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lerning_rate=1", "grid: unknown setting 'lerning_rate' .did you mean 'learning_rate'"),
        ("window=[", "grid = .* cannot be read: expected ',' or ']'"),
        ("learning_rate", "allowed: 'setting=value,value,... setting=value,...'"),
        ("learning_rate=1 learning_rate=2", "allowed: learning_rate once"),
        ("learning_rate=1e-3,0.001", "grid: learning_rate = '1e-3,0.001' is not allowed"),
    ],
)
def test_grids_that_are_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_grid(text)


def test_what_else_is_refused():
    with pytest.raises(ConfigError, match=r"grid = 'task' is not allowed; .* that a leaves"):
        require_apart({"a": {"task": "text"}}, {"task": ["text"]})
    with pytest.raises(ConfigError, match=r"grid = '1001 points' is not allowed; .* at most 1000"):
        grid_arms({"a": {}}, {"learning_rate": range(1001)})
    for text in ("a", "4-2", "-1", "0-9999999999"):
        with pytest.raises(ConfigError, match=r"seeds = .* or a range such as 0-4"):
            parse_seeds([text])


def test_a_small_sweep(tmp_path, capsys):
    out = tmp_path / "out"
    command = f"sweep --world mixture --preset tiny --seeds 0-1 --iterations 2 --out {out}"
    grid = "--grid 'learning_rate=0.01,0.05 clip_range=0.02'"
    assert flowrl_(f"{command} --workers 1 --arm flow-grpo --arm 'b: loss=gspo' {grid}") == 0
    comparison = load_comparison(out)
    runs = {(run.arm, run.seed): run for run in comparison.runs}
    rows = list(csv.DictReader((out / "sweep.csv").open()))
    assert len(rows) == len(runs) == 2 * 2 * 2
    finals, point = {}, "learning_rate={learning_rate} clip_range={clip_range}".format_map
    for row in rows:
        run = runs[f"{row['arm']} {point(row)}", int(row["seed"])]
        assert float(row["learning_rate"]) == run.config["optim"]["learning_rate"]
        curve = run.curve("iteration")[1]
        assert (float(row["before"]), float(row["after"])) == (curve[0], curve[-1])
        assert float(row["forwards"]) == run.costs()[-1].total and row["finished"] == "True"
        finals.setdefault(row["arm"], Counter())[point(row)] += curve[-1]
    for arm in ("flow-grpo", "b"):
        ((best, _),) = finals[arm].most_common(1)
        assert point(load_config(out / f"best-{arm}.yaml").flat()) == best
    shown = capsys.readouterr().out
    assert "Best of flow-grpo: learning_rate=" in shown and "(2 seeds: lowest " in shown
    assert "Grid of settings" in (out / "report.html").read_text()
    assert (out / "paper" / "sweep.pdf").exists()
    before = (out / "sweep.csv").read_bytes()
    assert flowrl_(f"sweep --resume {out}") == 0
    assert (out / "sweep.csv").read_bytes() == before
    assert flowrl_(f"sweep --resume {out} {grid}") == 2


def fake(finals, *names):
    """A sweep whose points, the values of `names` in the keys of `finals`, ended at these rewards."""

    def run(arm, seed, reward):
        rows = [{"iteration": k, "evaluation": {"reward": r}} for k, r in enumerate((0.1, reward))]
        return RunRecord(arm, seed, Path(), tuple(rows), True)

    points = {
        f"{arm} {values}": {"arm": arm, **dict(zip(names, values, strict=True))}
        for arm, *values in finals
    }
    runs = [
        run(name, seed, reward)
        for name, rewards in zip(points, finals.values(), strict=True)
        for seed, reward in enumerate(rewards)
    ]
    return Sweep(Comparison(Path(), {"points": points, "run": {}}, tuple(runs)))


def test_figures_by_the_number_of_settings():
    one = fake({("a", 1): [0.5, 0.7], ("a", 2): [0.2, 0.4], ("b", 1): [0.1]}, "x").figure()
    lines = [line.get_ydata() for line in one.axes[0].lines if line.get_marker() != "."]
    assert [*map(list, lines)] == [pytest.approx([0.6, 0.3]), [0.1]]

    finals = {("a", 1, "u"): [0.5, 0.7], ("a", 2, "v"): [0.9], ("a", 1, "v"): [0.8, 0.8]}
    two = fake(finals, "x", "y")
    assert [point.values["y"] for point in two.ranking("a")] == ["v", "u"]  # with most seeds
    (text,) = two.best_texts()
    assert text.startswith("Best of a: x=1, y=v; final held-out reward 0.800 ± 0.000 (2 seeds")
    heat = two.figure().axes[0]
    cells = {text.get_position(): text.get_text().split()[0] for text in heat.texts}
    assert cells == {(0, 0): "0.600", (1, 1): "0.900", (1, 0): "0.800"}
    assert (heat.get_xlabel(), heat.get_ylabel()) == ("y", "x")

    three = fake({("a", 1, 2, 3): [0.5], ("a", 1, 4, 3): [0.9]}, "x", "y", "z").figure()
    lines = [line for line in three.axes[0].lines if len(line.get_ydata()) == 4]
    assert [line.get_ydata()[-1] for line in lines] == [0, 1]
    assert sorted(text.get_text() for text in three.axes[0].texts) == ["1", "2", "3", "4"]
    assert fake({}).figure() is None
