"""The page of the claims: verdicts and costs as tables, and figures."""

import math
from pathlib import Path

import pytest
from bench_lines import FAST, SLOW, fake_line
from flowrl_bench.catalogue import CLAIMS
from flowrl_bench.claims import METHODS, Claim
from flowrl_bench.claims_page import claims_page
from flowrl_bench.digest import config_id
from flowrl_bench.page import Document, Image, Table
from flowrl_bench.results_file import make_line
from flowrl_bench.tables import DEPENDS, Judged, by_task, count, judge_all, level_table, levels, summary
from flowrl_bench.verdicts import ALIKE, BETTER, FAILS, HOLDS, UNDECIDED, Compare, each
from matplotlib.figure import Figure

from flowrl.errors import ConfigError


def test_the_page_is_made_from_lines(tmp_path: Path) -> None:
    lines = {}
    for key in ("stepwise-updates", "tp-updates", "random-points"):
        for arm, _, seed, config in CLAIMS[key].configs("mixture", (0, 1, 2)):
            base = SLOW if arm == "uniform" else FAST
            line = fake_line([r + 0.01 * seed for r in base])
            lines[config_id(config)] = {**make_line(config, line, "-"), **line}
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
    assert "GenEval .87 against .72" in text and "seeds won" in text


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
    assert "&lt;any&gt;" in html and "<code>code</code>" in html and '<span class="label good">good</span>' in html
    assert html.count("<section>") == html.count("</section>") == 1


def made(claim: Claim, world: str, curves: dict[str, list[float]], seeds: tuple[int, ...], **extra: float) -> dict[str, dict]:
    """Lines of a claim's runs with made-up learning curves by arm; seeds are told apart by a hundredth of reward."""
    lines = {}
    for arm, _, seed, config in claim.configs(world, seeds):
        line = fake_line([0.0, *(r + 0.01 * seed for r in curves[arm][1:])], **extra)
        lines[config_id(config)] = {**make_line(config, line, "-"), **line}
    return lines


class TestTables:
    def test_a_question_says_what_each_arm_does(self) -> None:
        claim = Claim(
            "q",
            "Which?",
            "-",
            "-",
            {"a": {}, "b": {"learning_rate": 1e-3}, "c": {"learning_rate": 2e-3}},
            each(("b", "c"), "a"),
            asks=True,
        )
        lines = made(claim, "mixture", {"a": SLOW, "b": FAST, "c": SLOW}, (0, 1, 2))
        one = Judged(claim, "mixture", lines, (0, 1, 2))
        assert one.label == DEPENDS
        row = summary([one], "answer").rows[0]
        assert row[0] == "`q` Which?" and "(better); c minus a +0.000 [+0.000, +0.000], p 1.000 (no difference)" in row[2]
        same = Judged(claim, "mixture", made(claim, "mixture", {"a": SLOW, "b": SLOW, "c": SLOW}, (0, 1, 2)), (0, 1, 2))
        assert same.label == ALIKE

    def test_a_failure_says_whether_the_effect_is_too_small(self) -> None:
        claim = Claim("c", "A beats b.", "-", "-", {"a": {}, "b": {"learning_rate": 1e-3}}, Compare("a", "b", expects=BETTER))
        small = Judged(claim, "mixture", made(claim, "mixture", {"a": SLOW, "b": SLOW}, (0, 1, 2)), (0, 1, 2))
        turned = Judged(claim, "mixture", made(claim, "mixture", {"a": SLOW, "b": FAST}, (0, 1, 2)), (0, 1, 2))
        assert small.label == turned.label == FAILS
        assert summary([small], "verdict").rows[0][2].endswith("(does not hold: too small to matter)")
        assert summary([turned], "verdict").rows[0][2].endswith("(does not hold)")

    def test_the_self_test_is_no_claim(self) -> None:
        claim = Claim("c", "A beats b.", "-", "-", {"a": {}, "b": {"learning_rate": 1e-3}}, Compare("a", "b", expects=BETTER))
        check = Claim(
            "d", "As known.", "self-test", "-", {"a": {}, "b": {"learning_rate": 1e-3}}, Compare("a", "b", expects=BETTER)
        )
        lines = made(claim, "mixture", {"a": FAST, "b": SLOW}, (0, 1, 2))
        assert count([Judged(c, "mixture", lines, (0, 1, 2)) for c in (claim, check)]).startswith(
            "1 claims, some in two worlds (1 lines): 1 holds"
        )

    def test_tasks_alone_and_levels(self) -> None:
        claim = Claim(
            "c",
            "A beats b.",
            "-",
            "-",
            {"a": {}, "b": {"learning_rate": 1e-3}},
            Compare("a", "b", expects=BETTER),
            tasks=("compositional", "text"),
        )
        lines = made(claim, "shapes", {"a": FAST, "b": SLOW}, (0, 1, 2))
        one = Judged(claim, "shapes", lines, (0, 1, 2))
        alone = by_task(one)
        assert [c.text.rpartition(", ")[2] for c in alone] == ["compositional alone", "text alone"]
        assert all(math.isnan(c.adjusted) and c.estimate.value == pytest.approx(1.1 / 6) for c in alone)
        assert levels(one) == "Mean reward over training: a 0.492, b 0.308; before training 0.000."
        assert by_task(Judged(claim, "mixture", made(claim, "mixture", {"a": FAST, "b": SLOW}, (0,)), (0,))) == []

    def test_turning_points_are_told_before_and_after(self) -> None:
        claim = CLAIMS["point-density"]
        one = Judged(claim, "mixture", made(claim, "mixture", {"turning points": FAST}, (0, 1, 2)), (0, 1, 2))
        assert levels(one).startswith("Turning points per trajectory: before training 2.50, with random signs 2.00 (+0.500")


def test_what_a_level_costs() -> None:
    """Straight learning curves: the level 0.60 is reached at known updates, so that all prices and ratios are known."""
    fast = {arm: [0.0, 0.6, 0.6] for arm in METHODS}
    slow = fast | {"uniform": [0.0, 0.3, 0.6]}
    arms = dict(METHODS)
    lines = made(Claim("d", "-", "-", "-", arms, Compare("uniform", "uniform", expects=BETTER)), "mixture", slow, (0,))
    assert level_table(lines) is None  # the other clip range is missing
    wide = {arm: {**of, "clip_range": 2e-2} for arm, of in arms.items()}
    lines |= made(Claim("w", "-", "-", "-", wide, Compare("uniform", "uniform", expects=BETTER)), "mixture", fast, (0,))
    table = level_table(lines)
    assert table is not None
    rows = {(row[2], row[3]): row for row in table.rows}
    assert {row[1] for row in table.rows} == {"0.60"}
    assert rows["0.002", "uniform"][5] == "2.0" and rows["0.002", "turning points"][5] == "1.0"
    assert rows["0.002", "turning points"][8:] == ("0.73", "0.73", "0.73")  # (1 / (1 * 1.4 * 1.8))^(1/3), one evaluation at least
    assert rows["0.02", "turning points"][8:] == ("1.00", "1.00", "1.00") and rows["0.02", "uniform"][8:] == ("1", "1", "1")


def test_an_unfinished_world_is_left_out() -> None:
    assert level_table({}) is None
    assert {one.label for one in judge_all(CLAIMS, {})} == {"no runs yet"}
    assert UNDECIDED not in count(judge_all(CLAIMS, {}))


def test_a_page_replaces_its_own_files_only(tmp_path: Path) -> None:
    """Before anything is written; figures of pages from before they were marked count as named by the page."""
    page = Document("Of a rule against the others", kind=" against the others")
    page.blocks.append(Image("curve", Figure((1, 1)), "A curve"))
    page.write(tmp_path, "page", "images")
    (tmp_path / "images" / "curve.png").write_bytes(b"an earlier figure")
    page.title = "Another rule against the others"
    written = page.write(tmp_path, "page", "images")
    before = written[0].read_bytes()
    page.title = "A third rule against the others"
    for path in (written[0], written[1]):
        data = path.read_bytes()
        path.write_text("mine, against the others")
        with pytest.raises(ConfigError, match=rf"page: .*{path.name} exists and is not from this command"):
            page.write(tmp_path, "page", "images")
        path.write_bytes(data)
    page.blocks.append(Image("photo", Figure((1, 1)), "A photo"))
    (tmp_path / "images" / "photo.png").write_bytes(b"mine")
    with pytest.raises(ConfigError, match=r"page: .*photo.png exists"):
        page.write(tmp_path, "page", "images")
    assert written[0].read_bytes() == before and (tmp_path / "images" / "photo.png").read_bytes() == b"mine"
