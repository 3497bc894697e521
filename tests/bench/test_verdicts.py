"""Numbers read from runs, and the rules that turn them into verdicts."""

import json
import math

import numpy as np
import pytest
from bench_lines import FAST, FLAT, SLOW, fake_evidence, fake_line, small_run
from flowrl_bench.calibration import TRUTHS, Pool, alarms, comparisons, rate_comparisons
from flowrl_bench.evidence import MEASURES, Evidence, spent
from flowrl_bench.measurements import CURVE, measure
from flowrl_bench.verdicts import (
    ALIKE,
    ALPHA,
    BARELY_BETTER,
    BETTER,
    FEWEST,
    UNDECIDED,
    WORSE,
    Compare,
    Interaction,
    Level,
    by_seed,
    gain,
    judge_family,
)
from flowrl_compare.costs import PICKSCORE, RATE, SD35_MEDIUM
from loading import ROOT

from flowrl.core.errors import ConfigError

SD35 = SD35_MEDIUM[512]
LEAD = Compare("fast", "slow")
IMAGES = {"config": {"environment": {"world": "shapes"}}}


def judged(rule, evidence):
    """A family of one; 0.7 can be gained, so that 0.035 matters."""
    return judge_family([rule.compare(evidence, 0.7)])[0]


def test_measures_by_hand():
    evidence = fake_evidence(2, slow=SLOW, fast=FAST)

    for arm, name, expected in (
        # of the piecewise linear curve 0, .2, .4, .6
        ("slow", "area", 0.3),
        ("slow", "early", 0.075),  # up to 0.75 updates
        ("fast", "final", 0.7),
        ("fast", "strict area", (0.25 + 0.55 + 0.65) / 6),
        ("slow", "drop", 0.0),
        ("slow", "collapse", 0.0),
        ("fast", "early gains", 2.0),
        ("fast", "turning points over null", 0.5),
    ):
        assert evidence.values(arm, name)[0, 0] == pytest.approx(expected), name
    # levels .3, .42, .54: slow after 1.5, 2.1, 2.7; fast after its first evaluation at most
    # (1), 1, 1.4
    shift = np.log([1 / 1.5, 1 / 2.1, 1.4 / 2.7]).mean()
    for name, expected in {
        "final": 0.1,
        "updates": shift,
        "forwards": shift,
        "reward at equal forwards": (0.25 + 0.55 + 0.65) / 3 - 0.3,
        "quality at equal reward": 0.0,  # minus the reward in both arms
    }.items():
        difference = evidence.differences("fast", "slow", name)[0, 0]
        assert difference == pytest.approx(expected, abs=1e-9), name
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
    assert spent({**line, **IMAGES}, "world seconds")[-1] == pytest.approx(seconds / RATE)
    assert spent(line, "world seconds")[-1] == row["seconds"]  # the 2-D world as it is
    for weight, share in ((0.0, 1.0), (0.1, 0.5)):
        older = {**line, "config": small_run(kl_weight=weight).as_dict()}
        older["curve"] = [row[: CURVE.index("probe_nfe")] for row in line["curve"]]
        assert spent(older, "forwards")[-1] == nfe + gradient * (1 + 2 * share)


def test_every_measure_reads_a_real_line():
    line = {**measure(small_run()), "samples": fake_line(SLOW)["samples"]}
    line["gains"] = [[0.2, 0.1, 0.1], [0.1, 0.1, 0.1]]
    evidence = Evidence({"a": {"direction": [line, line]}}, (0, 1))
    for name in MEASURES:
        assert np.allclose(evidence.differences("a", "a", name), np.zeros((2, 1))), name


@pytest.mark.parametrize(
    ("rule", "verdict"),
    [
        (LEAD, BETTER),
        (Compare("flat", "slow"), WORSE),
        (Compare("slow", "slow"), ALIKE),
        (Compare("slow", "falling", "collapse"), BETTER),
        (Compare("falling", "slow", "collapse"), WORSE),
        (Compare("fast", "slow", "updates"), BETTER),
        (Compare("flat", "slow", "updates"), WORSE),
        (Level("slow", "early gains"), BETTER),
        (Interaction("fast", "flat", "slow", "flat"), BETTER),
    ],
    ids=str,
)
def test_clear_cases(rule, verdict):
    evidence = fake_evidence(12, slow=SLOW, fast=FAST, flat=FLAT, falling=[0.0, 0.5, 0.6, 0.3])
    assert judged(rule, evidence).verdict == verdict and rule.words()


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
    assert gain("mixture", Evidence({"a": {"direction": []}}, ())) == pytest.approx(0.7906)
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


def test_tasks_are_averaged_within_the_seed():
    """Two tasks with opposite effects that cancel in every seed: the unit is the seed, so
    nothing differs.
    """
    low, other = ([fake_line([0.0, 0.1 * s + add]) for s in range(5)] for add in (0.0, 0.2))
    evidence = Evidence({"a": {"x": low, "y": other}, "b": {"x": other, "y": low}}, tuple(range(5)))
    comparison = judged(Compare("a", "b", "final"), evidence)
    assert comparison.verdict == ALIKE and comparison.estimate.high == pytest.approx(0.0, abs=1e-12)


def test_committed_rates():
    """At most 5% of families have a wrong verdict, of every label and of any."""
    calibration = json.loads((ROOT / "benchmarks/results/calibration.json").read_text())
    assert (calibration["alpha"], calibration["family"]) == (ALPHA, 20)
    assert calibration["experiments"] >= 1000
    rates = [row["any"] for row in calibration["families"]]
    assert len(rates) > 200 and max(rates) <= 0.05


@pytest.mark.parametrize("truth", TRUTHS)
def test_false_alarms(truth):
    """Runs of which a fifth collapse; 100 families: at most 5% and three standard errors."""
    values = np.append(np.linspace(0.90, 0.93, 12), [0.55, 0.7, 0.4])
    table = np.subtract.outer(values, values)
    pool = Pool("mixture", "direction", "a", "area", 0.04, table)
    rates = alarms(pool, 10, truth, 100)
    assert rates["any"] <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 100)


def test_simulated_p_values_are_those_of_the_rules():
    evidence = fake_evidence(8, spread=0.2, slow=SLOW, fast=FAST, falling=[0.0, 0.5, 0.6, 0.3])
    runs = by_seed(evidence.differences("fast", "slow", "area"))
    collapses = [evidence.values(arm, "collapse").T for arm in ("falling", "slow")]
    for rule, (simulated,) in (
        (Compare("fast", "slow"), comparisons(runs[None], 0.5, "area")),
        (Compare("slow", "slow", "collapse"), rate_comparisons(collapses[1], collapses[1], 0.1)),
        (Compare("falling", "slow", "collapse"), rate_comparisons(*collapses, 0.1)),
    ):
        expected = rule.compare(evidence, 10.0)
        assert simulated.estimate.p == pytest.approx(expected.estimate.p)
        assert simulated.outside == pytest.approx(expected.outside) or expected.outside == 1.0
