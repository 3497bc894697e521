"""Statistics: tests with a stated error, numbers read from runs, and the rules that turn them into
verdicts.
"""

import math

import numpy as np
import pytest
from bench_lines import FAST, SLOW, fake_evidence, small_run

from flowrl.bench.evidence import spent
from flowrl.bench.judging import (
    BETTER,
    FEWEST,
    UNDECIDED,
    Compare,
    judge_family,
)
from flowrl.bench.measurements import CURVE, measure
from flowrl.bench.statistics import (
    Curve,
    detectable,
    holm,
    mean_until,
    outside,
)
from flowrl.core.errors import ConfigError
from flowrl.run.costs import RATE, REWARD_FLOPS
from flowrl.run.costs import SD35_MEDIUM as SD35
from flowrl.run.statistics import mean

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
    seconds += 6 * (SD35["decode"] + REWARD_FLOPS["pickscore"])
    assert spent(line, "stated seconds")[-1] == pytest.approx(seconds / RATE)
    assert spent(line, "seconds")[-1] == row["seconds"]


def test_too_few_seeds_decide_nothing():
    for seeds, verdict in ((FEWEST - 1, UNDECIDED), (FEWEST, BETTER)):
        assert judged(LEAD, fake_evidence(seeds, slow=SLOW, fast=FAST)).verdict == verdict


@pytest.mark.parametrize("count", [3, 6, 10])
@pytest.mark.parametrize("alpha", [0.05, 0.05 / 18])
def test_power_by_simulation(count, alpha):
    """20,000 experiments: a power of 0.8 is found within 0.01 with probability 0.9996."""
    draws = np.random.default_rng(count).normal(detectable(2.0, count, alpha), 2.0, (20_000, count))
    significant = [mean(row).p < alpha for row in draws[:300]]
    t = draws.mean(1) / (draws.std(1, ddof=1) / math.sqrt(count))
    from scipy import stats

    power = 2 * stats.t.sf(np.abs(t), count - 1) < alpha
    assert power[:300].tolist() == significant
    assert power.mean() == pytest.approx(0.8, abs=0.01)


@pytest.mark.parametrize(("middle", "p"), [(0.0, 0.0275), (0.02, 0.0741), (-0.02, 0.0741)])
def test_two_one_sided_tests_by_hand(middle, p):
    """t = (0.06 - |mean|) / error with 4 degrees of freedom; error 0.05 / sqrt(5)."""
    values = middle + 0.05 * np.array([-1.0, -1.0, 0.0, 1.0, 1.0])
    assert outside(lambda null: mean(values, null), 0.06) == pytest.approx(p, abs=1e-4)


def test_beyond_the_margin():
    assert outside(lambda null: mean([0.1, 0.1, 0.1], null), 0.06) == 1.0
    assert outside(lambda null: mean([0.01] * 3, null), 0.06) == 0.0


def test_holm_by_hand():
    expected = pytest.approx([0.03, 0.06, 0.06, math.nan, 0.02], nan_ok=True)
    assert holm([0.01, 0.04, 0.03, math.nan, 0.005]) == expected


def test_mean_until_by_hand():
    curve = Curve([0.0, 2.0, 4.0], [0.0, 1.0, 1.0])
    for until, expected in ((4.0, 0.75), (1.0, 0.25), (3.0, 2 / 3)):
        assert mean_until(curve, until) == pytest.approx(expected)
