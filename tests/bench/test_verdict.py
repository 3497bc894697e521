"""The verdict: outcomes at equal budgets in closed form, its questions, its runs and its command."""

from dataclasses import replace

import pytest
import torch
from bench_lines import fake_line

from flowrl.bench import verdict_runs
from flowrl.bench.judging import BETTER, FEWEST, UNDECIDED, WORSE
from flowrl.bench.verdict import (
    ORACLE,
    PER_EVALUATION,
    PER_SECOND,
    PER_UPDATE,
    QUESTIONS,
    Verdicts,
)
from flowrl.bench.verdict_page import costs_figure, leads_figure
from flowrl.bench.verdict_runs import CAMPAIGNS, SAMPLED, UNIFORM, Campaign, Study
from flowrl.cli.main import main
from flowrl.compare.bounds import CREDIT
from flowrl.core.experience import Decisions
from flowrl.run.parts.registry import build

LINE = [i / 20 for i in range(11)]


def made(arms, seeds=6, spread=0.01):
    """Two tasks whose arms have these rewards and costs, with noise by seed; half of the reward in
    the second.
    """
    noise = [spread * (-1) ** seed for seed in range(seeds)]
    return Verdicts(
        {
            task: [
                {
                    arm: fake_line([0.0, *(scale * (r + n) for r in curve[1:])], nfe=cost)
                    for arm, (curve, cost) in {UNIFORM: (LINE, 1.0), **arms}.items()
                    for n in [noise[seed] if arm != UNIFORM else 0.0]
                }
                for seed in range(seeds)
            ]
            for task, scale in (("one", 1.0), ("two", 0.5))
        }
    )


def test_outcomes_at_equal_budgets_in_closed_form():
    """Rewards 0 to .5 in a straight line. Twice as dear with the same curve: at equal updates no
    lead, at equal evaluations the mean over half of the run, .125 instead of .25, of .5.
    """
    verdicts = made({"dear": (LINE, 2.0)}, spread=0.0)
    assert list(verdicts.gains.values()) == pytest.approx([0.5, 0.25])
    assert verdicts.lead("dear", UNIFORM, PER_UPDATE).value == pytest.approx(0.0)
    for budget in (PER_EVALUATION, PER_SECOND):
        assert verdicts.lead("dear", UNIFORM, budget).value == pytest.approx(-0.25)
        assert verdicts.lead(UNIFORM, "dear", budget).value == pytest.approx(0.25)
    arm = verdicts.arm("dear")
    assert arm.costs == pytest.approx({PER_EVALUATION: 2.0, PER_SECOND: 2.0})
    assert arm.ratios[PER_UPDATE].value == pytest.approx(1.0)
    for budget in (PER_EVALUATION, PER_SECOND):
        assert arm.ratios[budget].value == pytest.approx(2.0)
    assert (arm.runs, arm.collapses) == (12, 0)
    assert arm.final == pytest.approx(0.375)


def test_verdicts_need_seeds_and_are_drawn():
    """Exact values gain a fifth of what can be gained, TempFlow loses as much; one seed fewer than
    allowed gives no verdict. Arms without runs are not asked about.
    """
    arms = {
        ORACLE: ([2 * r for r in LINE], 1.0),
        "tempflow-grpo": ([r / 2 for r in LINE], 1.0),
    }
    verdicts = made(arms)
    assert {q.arm: c.verdict for q, c in verdicts.answers()} == {
        ORACLE: BETTER,
        "tempflow-grpo": WORSE,
    }
    few = made(arms, FEWEST - 1).answers()
    assert {answer.verdict for _, answer in few} == {UNDECIDED}
    assert leads_figure({"points": verdicts}).axes and costs_figure(verdicts, "").axes
    assert verdicts.ratio("tempflow-grpo", PER_UPDATE).text() == "> 1.00"
    assert len(QUESTIONS) <= 20


@pytest.mark.parametrize("name", CAMPAIGNS)
def test_campaigns_have_the_arms_of_the_questions(name):
    campaign = CAMPAIGNS[name]
    arms = next(iter(campaign.tasks.values())).arms(campaign.iterations)
    asked = {arm for question in QUESTIONS for arm in (question.arm, question.than)}
    assert asked - set(arms) == ({ORACLE} if name == "images" else set())


def test_arms_of_a_task_differ_in_credit_alone(tmp_path):
    """The oracle is trained without the noise that it knows to have mean 0, and shares its search
    with the task without noise.
    """
    study = Study(CAMPAIGNS["points"], tmp_path / "runs.jsonl")
    trial = ((0, 0, 0), 9000)
    for name, task in study.tasks.items():
        uniform, oracle = (study.searches[name, arm].config(trial) for arm in (UNIFORM, ORACLE))
        noise = task.changes.get("reward_noise", 0)
        assert oracle.replace(credit="", reward_noise=noise) == uniform
        assert task.is_exact != (oracle.algorithm.credit == SAMPLED)
    searches = {(name, arm): search.arm.name for (name, arm), search in study.searches.items()}
    assert searches["noise-0.3", ORACLE] == "oracle, default"
    assert searches["noise-0.3", UNIFORM] == "uniform, noise-0.3"
    assert len({search.budget for search in study.searches.values()}) == 1


@pytest.mark.parametrize(
    "spec", dict.fromkeys([CREDIT, *(t.oracle for t in CAMPAIGNS["points"].tasks.values())])
)
def test_oracles_give_all_decisions_the_same_scale(spec):
    """Gains of the first decision 1,000 times as small as those of the second."""
    gains = torch.randn(3, 12, 2, dtype=torch.float64) * torch.tensor([1e-2, 10.0])
    values = torch.cat([torch.zeros(3, 12, 1), gains.cumsum(-1)], -1)
    stds = build("credit", spec).assign(values, Decisions.like(values)).std(1, correction=0)
    torch.testing.assert_close(stds, torch.ones_like(stds), atol=0.05, rtol=0)


def test_the_command_makes_runs_and_writes_tables(tmp_path, monkeypatch, capsys):
    """A campaign of three arms and two seeds; the same command makes nothing again. With a seed
    missing there is no verdict.
    """
    small = {"groups": 2, "group_size": 3, "num_steps": 5, "window": "0:3", "eval_samples": 6}
    task = replace(CAMPAIGNS["points"].tasks["default"], changes=small)
    monkeypatch.setattr(verdict_runs, "ARMS", {"random credit": verdict_runs.ARMS["random credit"]})
    campaigns = {"points": Campaign("2-D world", {"default": task}, 2, 2, iterations=2)}
    monkeypatch.setattr(verdict_runs, "CAMPAIGNS", campaigns)
    monkeypatch.setattr("flowrl.bench.verdict_page.CAMPAIGNS", campaigns)
    words = ["bench", "verdict", "--points", str(tmp_path / "points.jsonl"), "--images", "none"]
    words += ["--out", str(tmp_path / "out"), "--workers", "1"]
    assert main([*words, "--run", "points"]) == 0
    assert "exact values against Flow-GRPO, per update" in capsys.readouterr().out
    rows = (tmp_path / "out/arms.csv").read_text().splitlines()
    assert len(rows) == 1 + 2 * 3 and rows[1].startswith("points,all,Flow-GRPO,")
    assert "no verdict: too few seeds" in (tmp_path / "out/questions.csv").read_text()
    assert main([*words, "--run", "points"]) == 0
    assert "search" not in capsys.readouterr().out
    lines = (tmp_path / "points.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "points.jsonl").write_text("".join(lines[:-1]))
    assert main(words) == 2
    shown = capsys.readouterr()
    assert "2-D world: skipped, because only 1 of 2 seeds" in shown.out
    assert "every run of at least one world" in shown.err
