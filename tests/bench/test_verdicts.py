"""Numbers read from runs, and the rules that turn them into verdicts."""

import numpy as np
import pytest
from bench_lines import FAST, FLAT, SLOW, fake_evidence, fake_line, small_run
from flowrl_bench.evidence import MEASURES, NEVER, Evidence
from flowrl_bench.measurements import measure
from flowrl_bench.statistics import level
from flowrl_bench.verdicts import (
    ALIKE,
    BETTER,
    FAILS,
    HOLDS,
    UNDECIDED,
    WORSE,
    Above,
    Alike,
    All,
    Answer,
    Beats,
    Best,
    Needs,
    NoWorse,
    WidensBy,
)
from hypothesis import given
from hypothesis import strategies as st

from flowrl.diagnostics.curves import first_reached
from flowrl.errors import ConfigError


class TestEvidence:
    def test_measures_by_hand(self) -> None:
        found = fake_evidence(2, slow=SLOW, fast=FAST)

        def one(arm: str, name: str, baseline: str = "") -> float:
            return float(found.values(arm, name, baseline)[0][0])

        assert one("slow", "area") == pytest.approx(0.4)
        assert one("fast", "final") == pytest.approx(0.7)
        assert one("fast", "strict area") == pytest.approx(0.3)
        assert one("slow", "drop") == 0.0
        assert one("fast", "updates", "slow") == pytest.approx(2 / 3)  # 0.6 after 2 of 3
        assert one("slow", "updates", "slow") == pytest.approx(1.0)
        assert one("slow", "updates", "fast") == NEVER  # it never gets to 0.7
        assert one("fast", "nfe", "slow") == pytest.approx(2 / 3)
        assert one("fast", "reward at equal nfe", "slow") == pytest.approx(0.55)  # after 1.5 iterations
        assert one("fast", "early gains") == pytest.approx(2.0)
        assert one("fast", "turning points over null") == pytest.approx(0.5)
        assert one("fast", "quality at equal reward", "slow") == pytest.approx(-0.54)
        with pytest.raises(ConfigError, match="no arm"):
            found.values("other", "area")

    def test_every_measure_reads_a_real_line(self) -> None:
        line = {**measure(small_run()), "samples": fake_line(SLOW)["samples"]}
        line["gains"] = [[0.2, 0.1, 0.1], [0.1, 0.1, 0.1]]
        found = Evidence({"a": {"direction": [line, line]}}, (0, 1))
        for name in MEASURES:
            assert np.isfinite(found.values("a", name, "a")[0]).all(), name


class TestBudgetRatio:
    """The fraction of a baseline's budget, and an interval that includes the error of the target."""

    @given(
        st.lists(st.floats(0, 1), min_size=2, max_size=8), st.floats(0, 1), st.floats(0.5, 40),
    )  # fmt: skip
    def test_the_crossing_is_that_of_one_curve(self, rewards: list[float], target: float, whole: float) -> None:
        runs = {"mine": {"task": [fake_line(rewards)]}, "base": {"task": [fake_line([0.0] * int(whole) + [0.0, target])]}}
        found = Evidence(runs, (0,)).budget_ratio("mine", "updates", "base").value
        there = float(first_reached(list(range(len(rewards))), rewards, target))
        assert found == pytest.approx(min(NEVER, there / (int(whole) + 1)), abs=1e-9)

    @pytest.mark.parametrize("axis", ["updates", "nfe", "seconds"])
    def test_the_value_is_the_measures(self, axis: str) -> None:
        found = fake_evidence(10, 0.05, slow=SLOW, fast=FAST)
        assert found.budget_ratio("fast", axis, "slow").value == pytest.approx(level(found.values("fast", axis, "slow")).value)

    def test_the_interval_includes_the_error_of_the_target(self) -> None:
        """A baseline whose final rewards differ widely, and a rule whose runs are all alike: only the target is uncertain."""
        runs = {
            "fast": {"task": [fake_line([0.0, 0.5, 1.0]) for _ in range(10)]},
            "slow": {"task": [fake_line([0.0, 0.2, 0.3 + 0.06 * seed]) for seed in range(10)]},
        }
        found = Evidence(runs, tuple(range(10)))
        fixed, right = level(found.values("fast", "updates", "slow")), found.budget_ratio("fast", "updates", "slow")
        assert fixed.high - fixed.low == 0.0
        assert right.low < right.value - 0.05 and right.high > right.value + 0.05

    def test_it_never_leaves_its_range(self) -> None:
        never = fake_evidence(4, slow=SLOW, flat=FLAT).budget_ratio("flat", "updates", "slow")
        assert (never.value, never.low, never.high) == (NEVER, NEVER, NEVER)
        at_once = fake_evidence(4, 0.3, slow=FLAT, fast=FAST).budget_ratio("fast", "updates", "slow")
        assert 0.0 <= at_once.low <= at_once.high <= NEVER

    def test_coverage_where_the_truth_is_known(self) -> None:
        """Straight lines with random ends: 200 experiments of 10 seeds; the interval must hold the true share in 95% of them.

        Between 0.88 and 0.995 passes: a true 0.95 falls below in fewer than one of 10,000 times (binomial).
        """
        generator, inside, trials = np.random.default_rng(0), 0, 200
        for _ in range(trials):
            ends = 0.5 + 0.05 * generator.normal(size=10)
            runs = {
                "base": {"task": [fake_line([0.0, end]) for end in ends]},
                "mine": {"task": [fake_line([0.0, 1.0]) for _ in ends]},
            }
            found = Evidence(runs, tuple(range(10))).budget_ratio("mine", "updates", "base")
            inside += found.low <= 0.5 <= found.high
        assert 0.88 <= inside / trials <= 0.995


class TestVerdicts:
    @pytest.mark.parametrize(
        ("rule", "verdict"),
        [
            (Beats("fast", "slow"), HOLDS),
            (Beats("slow", "fast"), FAILS),
            (Beats("slow", "slow"), FAILS),  # no difference is less than `least`
            (Beats("slow", "fast", "drop"), FAILS),
            (NoWorse("slow", "slow"), HOLDS),
            (NoWorse("flat", "slow"), FAILS),
            (Alike(("slow", "slow")), HOLDS),
            (Alike(("slow", "slow", "fast")), FAILS),
            (Needs("fast", "slow"), HOLDS),
            (Needs("fast", "slow", at_most=0.5), FAILS),
            (Needs("flat", "slow"), FAILS),
            (Best("fast", ("slow", "flat")), HOLDS),
            (Best("slow", ("fast", "flat")), FAILS),
            (Above("slow", "early gains"), HOLDS),
            (Above("slow", "early gains", 3.0), FAILS),
            (WidensBy("fast", "flat", "slow", "flat"), HOLDS),
            (WidensBy("slow", "flat", "fast", "flat"), FAILS),
            (All((Beats("fast", "slow"), Beats("slow", "flat"))), HOLDS),
            (All((Beats("fast", "slow"), Beats("flat", "slow"))), FAILS),
            (Answer(("fast",), "slow"), BETTER),
            (Answer(("flat",), "slow"), WORSE),
            (Answer(("slow",), "slow"), ALIKE),
        ],
        ids=lambda x: str(x)[:60],
    )
    def test_clear_cases(self, rule, verdict: str) -> None:
        found = rule.judge(fake_evidence(slow=SLOW, fast=FAST, flat=FLAT))
        assert found.verdict == verdict
        assert found.main in found.comparisons and rule.words()

    @pytest.mark.parametrize(
        "rule",
        [
            Beats("fast", "slow"),
            NoWorse("slow", "fast"),
            Alike(("fast", "slow")),
            Needs("fast", "slow"),
            Best("fast", ("slow",)),
            Answer(("fast",), "slow"),
            WidensBy("fast", "slow", "slow", "fast"),
            All((Beats("fast", "slow"),)),
        ],
        ids=lambda x: type(x).__name__,
    )
    def test_few_noisy_seeds_decide_nothing(self, rule) -> None:
        assert rule.judge(fake_evidence(3, spread=0.6, slow=SLOW, fast=FAST)).verdict == UNDECIDED

    def test_one_seed_decides_nothing(self) -> None:
        assert Beats("fast", "slow").judge(fake_evidence(1, slow=SLOW, fast=FAST)).verdict == UNDECIDED

    def test_less_is_better_where_it_is(self) -> None:
        found = Beats("steady", "falling", "drop").judge(fake_evidence(steady=[0, 0.5, 0.5], falling=[0, 0.9, 0.3]))
        assert found.verdict == HOLDS and found.main.estimate.value == pytest.approx(0.6)


def test_needs_uses_the_interval_of_both() -> None:
    found = fake_evidence(10, 0.05, slow=SLOW, fast=FAST)
    assert Needs("fast", "slow").judge(found).main.estimate == found.budget_ratio("fast", "updates", "slow")
