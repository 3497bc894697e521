"""Numbers read from runs, and the rules that turn them into verdicts."""

import pytest
from bench_lines import FAST, FLAT, SLOW, fake_evidence, small_run
from flowrl_bench.evidence import Evidence, spent
from flowrl_bench.judging import (
    ALIKE,
    BARELY_BETTER,
    BETTER,
    FEWEST,
    UNDECIDED,
    WORSE,
    Compare,
    gain,
    judge_family,
)
from flowrl_bench.measurements import CURVE, measure
from flowrl_compare.costs import RATE
from flowrl_compare.costs import SD35_MEDIUM as SD35

from flowrl.core.errors import ConfigError
from flowrl.training.plan import CLIP_H

LEAD = Compare("fast", "slow")


def judged(rule, evidence):
    """A family of one; 0.7 can be gained, so that 0.035 matters."""
    return judge_family([rule.compare(evidence, 0.7)])[0]


def test_measures_by_hand():
    evidence = fake_evidence(2, slow=SLOW, fast=FAST)

    # of the piecewise linear curve 0, .2, .4, .6
    assert evidence.values("slow", "area")[0] == pytest.approx(0.3)
    assert evidence.values("slow", "collapse")[0] == 0.0
    difference = evidence.differences("fast", "slow", "reward at equal forwards")[0]
    assert difference == pytest.approx((0.25 + 0.55 + 0.65) / 3 - 0.3)
    with pytest.raises(ConfigError, match="no arm"):
        evidence.values("other", "area")


def test_budgets_by_hand():
    """An evaluation with a gradient counts three."""
    line = {**measure(small_run()), "config": small_run().as_dict()}
    row = dict(zip(CURVE, line["curve"][-1], strict=True))
    nfe, gradient = 2 * 3 * 5, row["gradient_nfe"]
    assert (row["nfe"], row["probe_nfe"], row["train_nfe"]) == (nfe, 0, gradient)
    assert 0 < gradient <= 2 * 3 * 3 and row["decodes"] == row["reward_calls"] == 6
    assert spent(line, "forwards")[-1] == nfe + 3 * gradient
    seconds = 2 * nfe * SD35["forward"] + 2 * gradient * SD35["gradient"]
    seconds += 6 * (SD35["decode"] + CLIP_H)
    assert spent(line, "stated seconds")[-1] == pytest.approx(seconds / RATE)
    assert spent(line, "seconds")[-1] == row["seconds"]


@pytest.mark.parametrize(
    ("rule", "verdict"),
    [
        (LEAD, BETTER),
        (Compare("flat", "slow"), WORSE),
        (Compare("slow", "slow"), ALIKE),
        (Compare("fast", "slow", "reward at equal forwards"), BETTER),
    ],
    ids=str,
)
def test_clear_cases(rule, verdict):
    evidence = fake_evidence(12, slow=SLOW, fast=FAST, flat=FLAT, falling=[0.0, 0.5, 0.6, 0.3])
    assert judged(rule, evidence).verdict == verdict


def test_too_few_seeds_decide_nothing():
    for seeds, verdict in ((FEWEST - 1, UNDECIDED), (FEWEST, BETTER)):
        assert judged(LEAD, fake_evidence(seeds, slow=SLOW, fast=FAST)).verdict == verdict


@pytest.mark.parametrize(("size", "verdict"), [(0.01, BARELY_BETTER), (0.04, BETTER)])
def test_a_small_difference_is_not_called_none(size, verdict):
    """Known in sign and in size: better, by less than matters. The margin is 0.035."""
    evidence = fake_evidence(8, slow=SLOW, more=[r + size for r in SLOW])
    assert judged(Compare("more", "slow"), evidence).verdict == verdict


def test_the_margin_is_a_fraction_of_the_gain():
    evidence = fake_evidence(8, slow=SLOW, more=[r + 0.04 for r in SLOW])
    (verdict,) = judge_family([Compare("more", "slow").compare(evidence, 1.0)])
    assert verdict.verdict == BARELY_BETTER
    assert gain("mixture", Evidence({"a": []}, ())) == pytest.approx(0.7906)
    assert gain("own", evidence) == pytest.approx(0.64 - 0.02)  # best final minus mean start


def test_equivalence_is_corrected_too():
    """One comparison shows that a difference is small; it does not among 2000."""
    evidence = fake_evidence(10, spread=0.02, slow=SLOW, same=SLOW)
    rule = Compare("same", "slow")
    assert judged(rule, evidence).verdict == ALIKE
    family = judge_family([rule.compare(evidence, 0.7)] * 2000)
    assert {comparison.verdict for comparison in family} == {UNDECIDED}


def test_a_family_decides_less_than_its_parts():
    evidence = fake_evidence(10, spread=0.35, slow=SLOW, fast=[r + 0.1 for r in FAST])
    assert judged(LEAD, evidence).verdict == BETTER
    family = judge_family([LEAD.compare(evidence, 0.7)] * 2000)
    assert {comparison.verdict for comparison in family} == {UNDECIDED}
