"""The family of tasks, the verdicts on them, and an instrument that shows faults: uniform credit
under another name has no headroom, random credit less.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bench_lines import fake_line
from flowrl_bench.headroom import (
    CANNOT,
    SAMPLED,
    TASKS,
    TELLS,
    UNCLEAR,
    HeadroomStudy,
    Size,
    row_of,
    verdict,
)
from flowrl_bench.headroom_page import headroom_page, methods, opening, sentence, table
from flowrl_bench.worlds import CENTRES, SCALE, PlaneReward, Points, data
from flowrl_compare.bounds import CREDIT
from flowrl_compare.statistics import Estimate
from flowrl_testing import check_world
from seeded import randn

from flowrl.cli.main import main
from flowrl.core.experience import Decisions
from flowrl.core.types import Prompt
from flowrl.parts.registry import build
from flowrl.worlds import mixture

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.mark.parametrize("world", [Points(), Points(16), Points(nested=True)])
def test_worlds_keep_their_promises(world):
    findings = check_world(world)
    assert findings.ok and not findings.marked("advice"), str(findings)


def test_further_coordinates_are_independent_of_the_modes():
    """The base flow moves the plane as in two dimensions, and each other coordinate as N(0, s^2)
    alone.
    """
    x, t = randn(50, 5), torch.linspace(0, 1, 50)
    velocity, ring = data(5, False).velocity(x, t), mixture.ring()
    torch.testing.assert_close(velocity[:, :2], ring.velocity(x[:, :2], t))
    variance = (1 - t).square() * ring.std**2 + t.square()
    alone = (t - (1 - t) * ring.std**2) / variance
    torch.testing.assert_close(velocity[:, 2:], alone[:, None] * x[:, 2:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", Points().forms)
def test_the_parts_of_a_nested_reward(form):
    """On the target's ring both parts count; on the opposite ring only the fine part; with its
    inverted position only the coarse one.
    """
    prompt, target = Prompt("towards 0 degrees"), CENTRES[0]
    inner, far = SCALE * target, CENTRES[2]
    points = torch.stack([target + inner, far + inner, target - inner])[..., None, None]
    both, fine, coarse = PlaneReward(form, True).score(points, [prompt] * 3).tolist()
    alone = mixture.DirectionReward(form).score(points, [prompt] * 3).tolist()
    assert both == pytest.approx((alone[0] + 1) / 2, abs=1e-6)
    assert fine == pytest.approx((alone[1] + 1) / 2, abs=1e-3)
    assert coarse == pytest.approx(alone[2] / 2, abs=1e-3)


@pytest.mark.parametrize(
    ("headroom", "expected"),
    [
        (Estimate(0.03, 0.02, 0.039), CANNOT),
        (Estimate(-0.2, -0.3, -0.1), CANNOT),
        (Estimate(0.03, 0.02, 0.04), UNCLEAR),
        (Estimate(0.079, 0.07, 0.09), UNCLEAR),
        (Estimate(0.08, 0.01, 0.15), TELLS),
        (Estimate(0.08, -0.01, 0.17), UNCLEAR),
    ],
)
def test_verdicts(headroom, expected):
    """With a margin of 0.04."""
    assert verdict(headroom, 0.04, True) == expected
    assert verdict(headroom, 0.04, False) == (UNCLEAR if expected == CANNOT else expected)


def made(name, oracle_curve=(0.2, 1.0, 1.0), spread=0.1):
    """An oracle with these rewards; uniform credit ends `spread` below and above 0.7."""
    oracle, ends = fake_line(oracle_curve), (0.7 - spread, 0.7 + spread)
    pairs = [{"uniform": fake_line([0.2, 0.4, end]), "oracle": oracle} for end in ends]
    return row_of(name, TASKS[name], pairs, {"uniform": {}, "oracle": {}})


def test_an_oracle_that_is_no_bound_rules_nothing_out():
    """An oracle below uniform credit says that a task cannot tell rules apart only if its values
    are exact and it never collapsed.
    """
    steady, falls = [0.2, 0.3, 0.3], [0.2, 0.3, 0.0]
    assert made("default", steady, 0.01).label == CANNOT
    assert made("default", falls, 0.01).label == UNCLEAR
    assert made("16-dimensions", steady, 0.01).label == UNCLEAR


def test_a_row_and_its_page(tmp_path):
    row = made("default")
    assert (row.uniform, row.oracle, row.start, row.best) == pytest.approx((0.55, 1.0, 0.2, 1.0))
    assert row.headroom.value == pytest.approx(0.45) and row.margin == pytest.approx(0.04)
    assert row.headroom.high == pytest.approx(0.45 + 12.706 * 0.05, rel=1e-4)
    rows = [row, made("16-dimensions")]
    page = headroom_page(rows, Size(), "flowrl bench headroom")
    written = [path.read_text() for path in page.write(tmp_path, "headroom")]
    assert all(row.task.label in text and "or more" in text for text in written)
    assert (tmp_path / "headroom.png").read_bytes().startswith(b"\x89PNG")
    assert "best known, at least" in sentence(rows[1]) and "at least" not in sentence(row)
    first, verdicts = opening([row, made("strict", [0.2, 0.3, 0.3], 0.01)]).split(". In ")
    assert "can be gained in one task" in first
    assert f"and 56% in another ({row.task.label})" in first
    assert verdicts.startswith("0 of 2 tasks") and "in 1 it is too small, and in 1" in verdicts
    assert table(rows).splitlines()[1] == (
        "default,0.55,1,0.2,1,0.04,0.45,-0.18531,1.0853,2,unclear,exact"
    )


def test_a_method_with_fewer_evaluations_is_found():
    """The same rewards as uniform credit at 90% of its evaluations: no lead, and a cost of 0.9. A
    run that falls by more than 0.1 collapsed.
    """
    bound = fake_line([0.2, 1.0, 1.0])
    pairs = [
        {"uniform": fake_line(curve), "oracle": bound, "cheaper": fake_line(curve, nfe=90.0)}
        for curve in ([0.2, 0.6, 0.9], [0.2, 0.9, 0.7])
    ]
    row = row_of("default", TASKS["default"], pairs, {})
    cheaper, oracle = row.arms["cheaper"], row.arms["oracle"]
    assert cheaper.costs["forwards"] == pytest.approx(0.9)
    assert cheaper.lead.value == cheaper.lead.high == 0.0
    assert (cheaper.collapses, oracle.collapses) == (1, 0)
    assert oracle.final_lead.value == pytest.approx(0.2) and oracle.lead == row.headroom
    text = methods([row]).markdown("")
    assert "cheaper | 0.775 | +0.000 [+0.000, +0.000] | 0.800" in text and "1 of 2 | 0.90" in text


def test_arms_of_a_task_differ_in_credit_alone(tmp_path):
    """The oracle is trained without the noise that it knows to have mean 0, and shares its search
    with the task without noise.
    """
    study = HeadroomStudy(TASKS, tmp_path / "runs.jsonl")
    trial = ((0, 0, 0), 9000)
    for name, task in TASKS.items():
        uniform, oracle = (study.searches[name, arm].config(trial) for arm in ("uniform", "oracle"))
        noise = task.changes.get("reward_noise", 0)
        assert oracle.replace(credit="", reward_noise=noise) == uniform
        assert task.is_exact != (oracle.algorithm.credit == SAMPLED)
    searches = {(name, arm): search.arm.name for (name, arm), search in study.searches.items()}
    assert searches["noise-0.3", "oracle"] == "oracle, default"
    assert searches["noise-0.3", "uniform"] == "uniform, noise-0.3"
    assert len({search.budget for search in study.searches.values()}) == 1


@pytest.mark.parametrize("spec", dict.fromkeys([CREDIT, *(task.oracle for task in TASKS.values())]))
def test_oracles_give_all_decisions_the_same_scale(spec):
    """Gains of the first decision 1,000 times as small as those of the second."""
    gains = torch.randn(3, 12, 2, dtype=torch.float64) * torch.tensor([1e-2, 10.0])
    values = torch.cat([torch.zeros(3, 12, 1), gains.cumsum(-1)], -1)
    stds = build("credit", spec).assign(values, Decisions.like(values)).std(1, correction=0)
    torch.testing.assert_close(stds, torch.ones_like(stds), atol=0.05, rtol=0)


def test_published_controls_at_tuned_settings():
    """In a task with headroom and credit at all steps but the last, exact credit leads, random
    credit trails, and neither uniform credit nor the oracle collapses.
    """
    size, name = Size(seeds=10, sets=("published",)), "noise-0.3-9-of-10"
    path = RESULTS / "headroom-methods.jsonl"
    [row] = HeadroomStudy({name: TASKS[name]}, path, size).rows()
    oracle, random = row.arms["oracle"], row.arms["random credit"]
    assert row.seeds == 10 and row.label == TELLS and oracle.lead.low > 0 > random.lead.high
    assert oracle.collapses == row.arms["uniform"].collapses == 0


@pytest.mark.slow
def test_controls_have_no_headroom(tmp_path):
    """Uniform credit under another name cannot lead, random credit must trail; finished runs are
    not made again.
    """
    size, name = Size(iterations=6, budget=3, seeds=3), "9-of-10"
    for credit in ("uniform", "random(seed=0)"):
        tasks = {name: replace(TASKS[name], oracle=credit)}
        study = HeadroomStudy(tasks, tmp_path / "runs.jsonl", size, workers=1)
        assert study.execute("test", lambda *words, **more: None)
        [row] = study.rows()
        assert row.label == UNCLEAR and row.headroom.low <= 0
        assert (row.headroom.high < 0) == (credit != "uniform")
    assert len(study.tuning.unchecked()) == len(study.results.unchecked()) == 3 * 3


def test_an_unknown_task_is_refused_in_one_line(capsys, tmp_path):
    out = ["--out", str(tmp_path / "runs.jsonl")]
    assert main(["bench", "headroom", "--tasks", "nothing", *out]) == 2
    assert "tasks = 'nothing' is not allowed; allowed: one of default, 9" in capsys.readouterr().err
