"""The page of the claims: verdicts as tables, what stands beside them, and pictures."""

from pathlib import Path

import numpy as np
import pytest
from bench_lines import FAST, FLAT, SLOW, fake_evidence, fake_line
from flowrl_bench.catalogue import CLAIMS
from flowrl_bench.claims import Claim
from flowrl_bench.claims_page import claims_page
from flowrl_bench.costs import LEVELS, level_table
from flowrl_bench.document import Document, Table
from flowrl_bench.evidence import NEVER, Evidence
from flowrl_bench.post_hoc import LATER, NOTES
from flowrl_bench.records import config_hash, make_line
from flowrl_bench.runner import needed
from flowrl_bench.tables import DEPENDS, Judged, by_task, count, judge_all, levels, summary
from flowrl_bench.verdicts import ALIKE, FAILS, HOLDS, UNDECIDED, Answer, Beats, Needs
from hypothesis import given
from hypothesis import strategies as st

from flowrl.diagnostics.statistics import level
from flowrl.training.results import reaches


def test_the_page_is_made_from_lines(tmp_path: Path) -> None:
    lines = {}
    for key in ("stepwise-updates", "tp-updates", "random-points"):
        for arm, _, seed, config in CLAIMS[key].configs("mixture", (0, 1, 2)):
            base = SLOW if arm == "uniform" else FAST
            line = fake_line([r + 0.01 * seed for r in base])
            lines[config_hash(config)] = {**make_line(config, line, "-"), **line}
    judged = judge_all(CLAIMS, lines)
    labels = {(one.claim.id, one.world): one.label for one in judged}
    assert labels["stepwise-updates", "mixture"] == HOLDS
    assert labels["tp-updates", "mixture"] == FAILS  # two thirds of the updates are more than 0.304
    assert labels["random-points", "mixture"] == ALIKE
    assert labels["stepwise-updates", "shapes"] == "no runs yet"
    written = claims_page(judged, lines, tmp_path / "claims.jsonl").write(tmp_path, "claims", "claims")
    text, html = (path.read_text() for path in written)
    for claim in CLAIMS.values():
        assert claim.says in text
        assert claim.rule.words() in text
    assert "2 holds here; 1 does not hold here" in text
    assert html.count("<img") == text.count("](claims/") == 4
    assert "GenEval .87 against .72" in text and "P(first beats second)" in text


def test_documents_say_the_same_twice(tmp_path: Path) -> None:
    page = Document("A title")
    page.text("Before <any> section, `code`.")
    page.heading("One")
    page.blocks.append(Table(("what", "x"), [("a | b", "1"), ("good", "2")], ("what",), {"good": "good"}))
    markdown, html = (path.read_text() for path in page.write(tmp_path, "page"))
    assert (
        markdown
        == "# A title\n\nBefore <any> section, `code`.\n\n## One\n\n| what | x |\n| --- | --- |\n| a / b | 1 |\n| good | 2 |\n"
    )
    assert "&lt;any&gt;" in html and "<code>code</code>" in html and '<span class="pill good">good</span>' in html
    assert html.count("<section>") == html.count("</section>") == 1


def made(claim: Claim, world: str, curves: dict[str, list[float]], seeds: tuple[int, ...], **extra: float) -> dict[str, dict]:
    """Lines of a claim's runs with made-up learning curves by arm; seeds are told apart by a hundredth of reward."""
    lines = {}
    for arm, _, seed, config in claim.configs(world, seeds):
        line = fake_line([0.0, *(r + 0.01 * seed for r in curves[arm][1:])], **extra)
        lines[config_hash(config)] = {**make_line(config, line, "-"), **line}
    return lines


class TestShares:
    """Shares of a baseline's budget: the vectorised crossing, and an interval that knows that the target is measured."""

    @given(
        st.lists(st.floats(0, 1), min_size=2, max_size=8), st.floats(0, 1), st.floats(0.5, 40),
    )  # fmt: skip
    def test_the_crossing_is_that_of_one_curve(self, rewards: list[float], target: float, whole: float) -> None:
        runs = {"mine": {"task": [fake_line(rewards)]}, "base": {"task": [fake_line([0.0] * int(whole) + [0.0, target])]}}
        found = Evidence(runs, (0,)).share("mine", "updates", "base").value
        there = reaches(list(range(len(rewards))), rewards, target)
        length = int(whole) + 1
        assert found == pytest.approx(NEVER if there is None else min(NEVER, there / length), abs=1e-9)

    @pytest.mark.parametrize("axis", ["updates", "nfe", "seconds"])
    def test_the_value_is_the_measures(self, axis: str) -> None:
        found = fake_evidence(10, 0.05, slow=SLOW, fast=FAST)
        assert found.share("fast", axis, "slow").value == pytest.approx(level(found.values("fast", axis, "slow")).value)

    def test_the_interval_knows_that_the_target_is_measured(self) -> None:
        """A baseline whose final rewards differ widely, and a rule whose runs are all alike: only the target is uncertain."""
        runs = {
            "fast": {"task": [fake_line([0.0, 0.5, 1.0]) for _ in range(10)]},
            "slow": {"task": [fake_line([0.0, 0.2, 0.3 + 0.06 * seed]) for seed in range(10)]},
        }
        found = Evidence(runs, tuple(range(10)))
        fixed, right = level(found.values("fast", "updates", "slow")), found.share("fast", "updates", "slow")
        assert fixed.high - fixed.low == 0.0
        assert right.low < right.value - 0.05 and right.high > right.value + 0.05

    def test_it_never_leaves_its_range(self) -> None:
        never = fake_evidence(4, slow=SLOW, flat=FLAT).share("flat", "updates", "slow")
        assert (never.value, never.low, never.high) == (NEVER, NEVER, NEVER)
        at_once = fake_evidence(4, 0.3, slow=FLAT, fast=FAST).share("fast", "updates", "slow")
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
            found = Evidence(runs, tuple(range(10))).share("mine", "updates", "base")
            inside += found.low <= 0.5 <= found.high
        assert 0.88 <= inside / trials <= 0.995


class TestTables:
    def test_a_question_says_what_each_arm_does(self) -> None:
        claim = Claim(
            "q",
            "Which?",
            "-",
            "-",
            {"a": {}, "b": {"learning_rate": 1e-3}, "c": {"learning_rate": 2e-3}},
            Answer(("b", "c"), "a"),
            asks=True,
        )
        lines = made(claim, "mixture", {"a": SLOW, "b": FAST, "c": SLOW}, (0, 1, 2))
        one = Judged(claim, "mixture", lines, (0, 1, 2))
        assert one.label == DEPENDS
        row = summary([one], "answer").rows[0]
        assert row[0] == "`q` Which?" and "(better); c minus a +0.000 [+0.000, +0.000] (no difference)" in row[2]
        same = Judged(claim, "mixture", made(claim, "mixture", {"a": SLOW, "b": SLOW, "c": SLOW}, (0, 1, 2)), (0, 1, 2))
        assert same.label == ALIKE

    def test_a_failure_says_whether_the_effect_is_too_small(self) -> None:
        claim = Claim("c", "A beats b.", "-", "-", {"a": {}, "b": {"learning_rate": 1e-3}}, Beats("a", "b"))
        small = Judged(claim, "mixture", made(claim, "mixture", {"a": SLOW, "b": SLOW}, (0, 1, 2)), (0, 1, 2))
        turned = Judged(claim, "mixture", made(claim, "mixture", {"a": SLOW, "b": FAST}, (0, 1, 2)), (0, 1, 2))
        assert small.label == turned.label == FAILS
        assert summary([small], "verdict").rows[0][2].endswith("(does not hold: too small to count)")
        assert summary([turned], "verdict").rows[0][2].endswith("(does not hold)")

    def test_the_self_test_is_no_claim(self) -> None:
        claim = Claim("c", "A beats b.", "-", "-", {"a": {}, "b": {"learning_rate": 1e-3}}, Beats("a", "b"))
        check = Claim("d", "As known.", "self-test", "-", {"a": {}, "b": {"learning_rate": 1e-3}}, Beats("a", "b"))
        lines = made(claim, "mixture", {"a": FAST, "b": SLOW}, (0, 1, 2))
        assert count([Judged(c, "mixture", lines, (0, 1, 2)) for c in (claim, check)]).startswith(
            "1 claims, some in two worlds (1 lines): 1 holds"
        )

    def test_tasks_alone_and_levels(self) -> None:
        claim = Claim(
            "c", "A beats b.", "-", "-", {"a": {}, "b": {"learning_rate": 1e-3}}, Beats("a", "b"), tasks=("compositional", "text")
        )
        lines = made(claim, "shapes", {"a": FAST, "b": SLOW}, (0, 1, 2))
        one = Judged(claim, "shapes", lines, (0, 1, 2))
        alone = by_task(one)
        assert [c.text.rpartition(", ")[2] for c in alone] == ["compositional alone", "text alone"]
        assert all(c.verdict == "" and c.estimate.value == pytest.approx(0.2) for c in alone)
        assert levels(one) == "Mean reward over training: a 0.610, b 0.410; before training 0.000."
        assert by_task(Judged(claim, "mixture", made(claim, "mixture", {"a": FAST, "b": SLOW}, (0,)), (0,))) == []

    def test_turning_points_are_told_before_and_after(self) -> None:
        claim = CLAIMS["point-density"]
        one = Judged(claim, "mixture", made(claim, "mixture", {"turning points": FAST}, (0, 1, 2)), (0, 1, 2))
        assert levels(one).startswith("Turning points per trajectory: before training 2.50, random signs give 2.00 (+0.500")


class TestAfterwards:
    def test_they_need_no_runs_of_their_own(self) -> None:
        seeds = {"mixture": (0, 1), "shapes": (0,)}
        for world in seeds:
            assert set(needed(LATER, world, seeds)) <= set(needed(CLAIMS, world, seeds))

    def test_names(self) -> None:
        assert not set(LATER) & set(CLAIMS)
        assert set(NOTES) <= set(CLAIMS)
        assert all(claim.asks for claim in LATER.values())


def test_what_a_level_costs() -> None:
    """Straight learning curves: the level 0.60 is reached at known updates, so that all prices and ratios are known."""
    fast = {arm: [0.0, 0.6, 0.6] for arm in LEVELS}
    slow = fast | {"uniform": [0.0, 0.3, 0.6]}
    arms = dict(LEVELS)
    lines = made(Claim("d", "-", "-", "-", arms, Beats("uniform", "uniform")), "mixture", slow, (0,))
    assert level_table(lines) is None  # the other clip is missing
    wide = {arm: {**of, "clip": 2e-2} for arm, of in arms.items()}
    lines |= made(Claim("w", "-", "-", "-", wide, Beats("uniform", "uniform")), "mixture", fast, (0,))
    table = level_table(lines)
    assert table is not None
    rows = {(row[2], row[3]): row for row in table.rows}
    assert {row[1] for row in table.rows} == {"0.60"}
    assert rows["0.002", "uniform"][5] == "2.0" and rows["0.002", "turning points"][5] == "1.0"
    assert rows["0.002", "turning points"][8:] == ("0.50", "0.50", "0.50")
    assert rows["0.02", "turning points"][8:] == ("1.00", "1.00", "1.00") and rows["0.02", "uniform"][8:] == ("1", "1", "1")


def test_an_unfinished_world_is_left_out() -> None:
    assert level_table({}) is None
    assert {one.label for one in judge_all(CLAIMS, {})} == {"no runs yet"}
    assert UNDECIDED not in count(judge_all(CLAIMS, {}))


def test_needs_uses_the_interval_of_both() -> None:
    found = fake_evidence(10, 0.05, slow=SLOW, fast=FAST)
    assert Needs("fast", "slow").judge(found).main.estimate == found.share("fast", "updates", "slow")
