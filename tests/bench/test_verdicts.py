"""Numbers read from runs, and the rules that turn them into verdicts."""

import math

import numpy as np
import pytest
from bench_lines import FAST, FLAT, SLOW, fake_evidence, fake_line, small_run
from flowrl_bench.calibration import CASES, LAWS, alarms
from flowrl_bench.evidence import MEASURES, Evidence, spent
from flowrl_bench.measurements import CURVE, measure
from flowrl_bench.verdicts import (
    ALIKE,
    BETTER,
    FAILS,
    HOLDS,
    NO_WORSE,
    UNDECIDED,
    WORSE,
    Compare,
    Interaction,
    Level,
    Parts,
    each,
    judge,
    judge_family,
)
from flowrl_compare.costs import PICKSCORE, RATE, SD35_MEDIUM

from flowrl.core.errors import ConfigError

SD35 = SD35_MEDIUM[512]
LEAD = Compare("fast", "slow", expects=BETTER)


def test_measures_by_hand():
    evidence = fake_evidence(2, slow=SLOW, fast=FAST)

    def one(arm, name):
        return float(evidence.values(arm, name)[0, 0])

    def between(name):
        return float(evidence.differences("fast", "slow", name)[0, 0])

    # of the piecewise linear curve 0, .2, .4, .6
    assert one("slow", "area") == pytest.approx(0.3)
    assert one("slow", "early") == pytest.approx(0.075)  # up to 0.75 updates
    assert one("fast", "final") == pytest.approx(0.7)
    assert one("fast", "strict area") == pytest.approx((0.25 + 0.55 + 0.65) / 6)
    assert one("slow", "drop") == one("slow", "collapse") == 0.0
    assert one("fast", "early gains") == pytest.approx(2.0)
    assert one("fast", "turning points over null") == pytest.approx(0.5)
    assert between("final") == pytest.approx(0.1)
    # levels .3, .42, .54: slow after 1.5, 2.1, 2.7; fast after its first evaluation at most
    # (1), 1, 1.4
    assert between("updates") == pytest.approx(np.log([1 / 1.5, 1 / 2.1, 1.4 / 2.7]).mean())
    assert between("forwards") == pytest.approx(between("updates"))
    assert between("reward at equal forwards") == pytest.approx((0.25 + 0.55 + 0.65) / 3 - 0.3)
    # minus the reward in both arms
    assert between("quality at equal reward") == pytest.approx(0.0, abs=1e-9)
    with pytest.raises(ConfigError, match="no arm"):
        evidence.values("other", "area")
    with pytest.raises(ConfigError, match="compares two runs"):
        evidence.values("fast", "updates")


def test_budgets_by_hand_of_new_and_older_lines():
    """An evaluation with a gradient counts three. Older lines lack it: the settings tell that
    one evaluation of two is the reference's.
    """
    line = {**measure(small_run()), "config": small_run().as_dict()}
    row = dict(zip(CURVE, line["curve"][-1], strict=True))
    nfe, gradient = 2 * 3 * 5, row["gradient_nfe"]
    assert (row["nfe"], row["probe_nfe"], row["train_nfe"]) == (nfe, 0, gradient)
    assert 0 < gradient <= 2 * 3 * 3 and row["decodes"] == row["reward_calls"] == 6
    assert spent(line, "forwards")[-1] == nfe + 3 * gradient
    seconds = 2 * nfe * SD35["forward"] + 2 * gradient * SD35["gradient"]
    seconds += 6 * (SD35["decode"] + PICKSCORE)
    assert spent(line, "stated seconds")[-1] == pytest.approx(seconds / RATE)
    for weight, share in ((0.0, 1.0), (0.1, 0.5)):
        older = {**line, "config": small_run(kl_weight=weight).as_dict()}
        older["curve"] = [row[: CURVE.index("probe_nfe")] for row in line["curve"]]
        assert spent(older, "forwards")[-1] == nfe + gradient * (1 + 2 * share)


def test_an_arm_with_a_tenth_fewer_evaluations_is_found():
    """A planted fault: uniform credit whose iterations cost less. The cost differs and nothing
    else does.
    """
    found = fake_evidence(8, 0.01, uniform=SLOW, cheaper=SLOW)
    found.runs["cheaper"]["task"][:] = [
        {**line, "curve": [[row[0], 0.9 * row[1], *row[2:]] for row in line["curve"]]}
        for line in found.runs["uniform"]["task"]
    ]
    verdicts = {
        axis: judge(Compare("cheaper", "uniform", axis), found).comparisons[0]
        for axis in ("area", "updates", "forwards", "stated seconds")
    }
    assert [one.verdict for one in verdicts.values()] == [ALIKE, ALIKE, BETTER, BETTER]
    assert verdicts["forwards"].estimate.value == pytest.approx(0.9)


def test_every_measure_reads_a_real_line():
    line = {**measure(small_run()), "samples": fake_line(SLOW)["samples"]}
    line["gains"] = [[0.2, 0.1, 0.1], [0.1, 0.1, 0.1]]
    evidence = Evidence({"a": {"direction": [line, line]}}, (0, 1))
    for name in MEASURES:
        assert evidence.differences("a", "a", name) == pytest.approx(np.zeros((2, 1)), abs=1e-12), (
            name
        )


@pytest.mark.parametrize(
    ("rule", "verdict"),
    [
        (LEAD, HOLDS),
        (Compare("slow", "slow", expects=BETTER), FAILS),  # no difference that matters
        (Compare("slow", "falling", "collapse", BETTER), HOLDS),
        (Compare("slow", "slow", expects=NO_WORSE), HOLDS),
        (Compare("flat", "slow", expects=NO_WORSE), FAILS),
        (each(("slow", "slow"), "slow", expects=ALIKE), HOLDS),
        (each(("slow", "fast"), "slow", expects=ALIKE), "1 of 2 parts hold"),
        (Compare("fast", "slow", "updates", BETTER), HOLDS),
        (Compare("fast", "slow", "updates", BETTER, at_most=0.5), FAILS),
        (Compare("flat", "slow", "updates", BETTER), FAILS),
        (Level("slow", "early gains"), HOLDS),
        (Interaction("fast", "flat", "slow", "flat"), HOLDS),
        (Parts((LEAD, Compare("flat", "slow", expects=BETTER))), "1 of 2 parts hold"),
        (each(("flat",), "slow"), WORSE),
        (each(("slow", "fast"), "slow"), "depends on the arm"),
    ],
    ids=lambda x: str(x)[:60],
)
def test_clear_cases(rule, verdict):
    evidence = fake_evidence(12, slow=SLOW, fast=FAST, flat=FLAT, falling=[0.0, 0.5, 0.6, 0.3])
    assert judge(rule, evidence).verdict == verdict and rule.words()


@pytest.mark.parametrize(
    "rule",
    [
        LEAD,
        Compare("slow", "fast", expects=NO_WORSE),
        Compare("fast", "slow", expects=ALIKE),
        Compare("fast", "slow", "updates"),
        Interaction("fast", "slow", "slow", "fast"),
    ],
    ids=str,
)
@pytest.mark.parametrize("seeds", [1, 3])
def test_few_noisy_seeds_decide_nothing(rule, seeds):
    assert judge(rule, fake_evidence(seeds, spread=0.6, slow=SLOW, fast=FAST)).verdict == UNDECIDED


def test_a_small_significant_difference_does_not_matter():
    evidence = fake_evidence(8, slow=SLOW, same=[r + 0.01 for r in SLOW])
    (comparison,) = judge(Compare("same", "slow"), evidence).comparisons
    assert comparison.adjusted < 0.001 and comparison.verdict == ALIKE


def test_a_family_decides_less_than_its_parts():
    evidence = fake_evidence(10, spread=0.35, slow=SLOW, fast=[r + 0.1 for r in FAST])
    rule = Compare("fast", "slow")
    assert judge(rule, evidence).verdict == BETTER
    family = judge_family([rule.compare(evidence)] * 2000)
    assert {verdict.verdict for verdict in family} == {UNDECIDED}


def test_tasks_are_averaged_within_the_seed():
    """Two tasks with opposite effects that cancel in every seed: the unit is the seed, so
    nothing differs.
    """
    low, other = (
        [fake_line([0.0, 0.1 * s]) for s in range(5)],
        [fake_line([0.0, 0.1 * s + 0.2]) for s in range(5)],
    )
    evidence = Evidence({"a": {"x": low, "y": other}, "b": {"x": other, "y": low}}, tuple(range(5)))
    (comparison,) = judge(Compare("a", "b", "final"), evidence).comparisons
    assert comparison.verdict == ALIKE and comparison.estimate.high == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("law", LAWS)
def test_false_alarms(law):
    """A quick version of `python -m flowrl_bench.calibration`, with fixed draws: in 60 experiments of 10
    seeds at most 5% and three standard errors (13.4%) for every case.
    """
    rates = alarms(CASES, LAWS[law], 10, 60, seed=10_000)
    assert max(rates.values()) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 60), rates
