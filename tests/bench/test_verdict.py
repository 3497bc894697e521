"""The main comparison: outcomes at equal budgets in closed form, and its verdicts."""

from types import SimpleNamespace

import pytest
from bench_lines import fake_line
from flowrl_bench import verdict
from flowrl_bench.command import Verdict
from flowrl_bench.verdict import (
    CAMPAIGNS,
    EXACT,
    PER_EVALUATION,
    PER_SECOND,
    PER_UPDATE,
    QUESTIONS,
    UNIFORM,
    Verdicts,
)
from flowrl_bench.verdict_page import leads_figure
from flowrl_bench.verdicts import BETTER, FEWEST, UNDECIDED, WORSE

from flowrl.core.errors import ConfigError

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
    assert (arm.runs, arm.collapses) == (12, 0)
    assert arm.final == pytest.approx(0.375)


def test_verdicts_need_seeds_and_are_drawn():
    """Exact values gain a fifth of what can be gained, TempFlow loses as much; one seed fewer than
    allowed gives no verdict. Arms without runs are not asked about.
    """
    arms = {
        EXACT: ([2 * r for r in LINE], 1.0),
        "tempflow-grpo": ([r / 2 for r in LINE], 1.0),
    }
    verdicts = made(arms)
    assert {q.arm: c.verdict for q, c in verdicts.answers()} == {
        EXACT: BETTER,
        "tempflow-grpo": WORSE,
    }
    few = made(arms, FEWEST - 1).answers()
    assert {answer.verdict for _, answer in few} == {UNDECIDED}
    assert leads_figure({"points": verdicts}).axes
    assert len(QUESTIONS) <= 20


@pytest.mark.parametrize("name", CAMPAIGNS)
def test_campaigns_have_the_arms_of_the_questions(name):
    campaign = CAMPAIGNS[name]
    arms = next(iter(campaign.tasks.values())).arms(campaign.size)
    asked = {arm for question in QUESTIONS for arm in (question.arm, question.than)}
    assert asked - set(arms) == ({EXACT} if name == "images" else set())


def test_a_world_with_missing_runs_has_no_verdict(tmp_path, monkeypatch, capsys):
    pairs, path = {"one": [{}] * 4, "two": [{}] * 6}, tmp_path / "images.jsonl"
    study = SimpleNamespace(size=SimpleNamespace(seeds=6), pairs=lambda any_code: pairs)
    campaign = SimpleNamespace(label="image world", study=lambda path: study)
    monkeypatch.setattr(verdict, "CAMPAIGNS", {"images": campaign})
    path.touch()
    with pytest.raises(ConfigError, match="every run of at least one world"):
        Verdict(tmp_path / "none.jsonl", path, tmp_path / "page").main()
    assert "image world: skipped, because only 10 of 12 seeds" in capsys.readouterr().out
