"""The pages of the claims: answers, symbols, tables and figures, from complete, partial and missing
runs.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from bench_lines import FAST, FLAT, SLOW, fake_line
from flowrl_bench.arms import ARMS
from flowrl_bench.catalogue import CLAIMS
from flowrl_bench.claims import SEEDS, Claim
from flowrl_bench.claims_details import details_page
from flowrl_bench.claims_figures import (
    leads,
    survival_levels,
    survivals,
)
from flowrl_bench.claims_page import (
    Inputs,
    by_world,
    cell,
    claims_page,
    default_lines,
    mixed_seeds,
    provenance,
    read_calibration,
)
from flowrl_bench.default_settings import survival_table
from flowrl_bench.digest import config_id
from flowrl_bench.leads import LEADS, UNIFORM
from flowrl_bench.main_comparison import answers, arms_of, choice, lead_table
from flowrl_bench.page import Document, Image, Table
from flowrl_bench.results_file import ResultsFile, SamplesFile, joined, make_line
from flowrl_bench.suite import needed
from flowrl_bench.tables import (
    MISSING,
    Judged,
    by_task,
    judge_all,
    judge_together,
    levels,
)
from flowrl_bench.verdicts import BETTER, Compare, each
from matplotlib.figure import Figure

from flowrl.core.errors import ConfigError

ROOT = Path(__file__).parents[2]
A, B, C = (
    {"arm": "uniform"},
    {"arm": "uniform", "learning_rate": 1e-3},
    {"arm": "uniform", "learning_rate": 2e-3},
)
FALLEN = [0.0, 0.6, 0.7, 0.1]
STAMP = {
    "golden": [],
    "code": "c",
    "rules": "r",
    "commit": "1",
    "versions": {"python": "3"},
    "hardware": "one core of 2 (AMD EPYC)",
}


def made(
    claim: Claim,
    world: str,
    curves: Mapping[str, list[float]],
    seeds: tuple[int, ...],
    cost: Mapping[str, float] | None = None,
) -> dict[str, dict]:
    """Lines of a claim's runs with made-up learning curves by arm; a hundredth of reward tells the
    seeds apart. `cost`: network evaluations per update.
    """
    lines = {}
    for arm, _, seed, config in claim.configs(world, seeds):
        line = fake_line(
            [0.0, *(r + 0.002 * (seed % 10) for r in curves[arm][1:])],
            nfe=(cost or {}).get(arm, 100.0),
        )
        lines[config_id(config)] = {**make_line(config, line, "-", made=STAMP), **line}
    return lines


def compared(
    curve: Callable[[str], list[float]],
    world: str = "mixture",
    cost: Mapping[str, float] | None = None,
) -> dict[str, dict]:
    """Lines of the main comparison in a world: the arm's learning curve by its name."""
    lines = {}
    for claim in LEADS:
        if world in claim.worlds:
            lines |= made(
                claim, world, {arm: curve(arm) for arm in claim.arms}, tuple(range(100, 108)), cost
            )
    return lines


def judged_of(lines: Mapping[str, dict]) -> list[Judged]:
    found = [Judged(claim, world, lines) for claim in LEADS for world in claim.worlds]
    judge_together(found)
    return found


class TestMainComparison:
    def test_a_known_winner_is_better_and_chosen(self) -> None:
        lines = compared(lambda arm: FAST if arm == "branch-grpo" else SLOW)
        judged = judged_of(lines)
        arms = arms_of(judged, "mixture")
        assert list(arms)[:2] == [UNIFORM, "branch-grpo"] and set(arms) == set(ARMS)
        rows = {row[0]: row for row in lead_table(arms).rows}
        assert all(
            re.fullmatch(r"▲\s\+0\.1\d\d \[0\.\d+,\s0\.\d+\]", text)
            for text in rows["branch-grpo"][3:6]
        )
        assert all(text.startswith("=") for text in rows["turning points"][3:6])
        assert rows["uniform"][3:6] == ("-",) * 3 and rows["uniform"][1] == "8"
        best = choice(arms)
        assert best is not None and best.name == "branch-grpo"
        said = [line.replace("\N{NO-BREAK SPACE}", " ") for line in answers(judged)]
        assert len(said) == 5 and "branch-grpo has the largest lead (▲ +0.1" in said[0]
        assert "Of all 13 methods, 1 leads, 12 do not differ" in said[0]
        assert said[0].count("2-D world: stepwise gains do not differ (= +0.000") == 1
        assert "2-D world: branch-grpo (▲ +0.1" in said[4] and "collapsed runs: 0 of 8" in said[4]
        assert all("Image world: too few runs yet." in line for line in said)

    def test_papers_rules_that_lead_and_a_rule_that_costs_more(self) -> None:
        """Ahead per update, behind per evaluation: better in the first answer, worse in the second,
        and not taken.
        """
        papers = ("stepwise gains", "turning points")
        judged = judged_of(
            compared(
                lambda arm: FAST if arm in papers else SLOW, cost=dict.fromkeys(papers, 1000.0)
            )
        )
        said = [line.replace("\N{NO-BREAK SPACE}", " ") for line in answers(judged)]
        assert (
            "2-D world: stepwise gains lead (▲ +0.1" in said[0]
            and "Of all 13 methods, 2 lead, 11" in said[0]
        )
        assert "2-D world: stepwise gains trail (▼ -0.2" in said[1]
        assert "2-D world: uniform credit, because no method leads it per evaluation" in said[4]

    def test_a_collapse_is_visible_and_not_taken(self) -> None:
        lines = compared(lambda arm: [0.0, 0.9, 0.95, 0.7] if arm == "dgpo" else SLOW)
        arms = arms_of(judged_of(lines), "mixture")
        row = next(row for row in lead_table(arms).rows if row[0] == "dgpo")
        assert row[6].split() == ["8", "of", "8"] and row[3].startswith("▲")
        assert choice(arms) is None


class TestPage:
    def test_full_pages(self, tmp_path: Path) -> None:
        """Answers and a figure come first, then tables; every claim has a row and a section of the
        details; it is short.
        """
        lines = {}
        for claim in CLAIMS.values():
            for world in claim.worlds:
                curves = {arm: FAST if arm == "turning points" else SLOW for arm in claim.arms}
                lines |= {
                    k: v
                    for k, v in made(claim, world, curves, tuple(range(100, 103))).items()
                    if k not in lines
                }
        rates = {
            str(seeds): {"better or worse, mean reward over training": 0.02} for seeds in (3, 10)
        }
        calibration = {
            "false alarms": {"a law": rates},
            "families": {"a law": {"3": 0.01, "10": 0.03}},
        }
        inputs = Inputs(
            judge_all(CLAIMS, lines), lines, tmp_path / "claims.jsonl", calibration=calibration
        )
        page, details = claims_page(inputs), details_page(inputs)
        kinds = [block.kind for block in page.blocks]
        assert kinds[:2] == ["items", "image"] and kinds.index("image") < kinds.index("table")
        written = [
            *page.write(tmp_path, "claims", "claims"),
            *details.write(tmp_path / "claims", "details"),
        ]
        text, html, behind, _ = (path.read_text() for path in written)
        for claim in CLAIMS.values():
            assert f"\n### {claim.id}\n" in behind and claim.rule.words() in behind
            assert (
                claim in LEADS
                or f"| [{claim.id}](claims/details.md#{claim.id}) | {claim.says} |" in text
            )
        assert (
            '<a href="claims/details.html#tuning">tuning</a>' in html
            and '<h3 id="tuning">' in written[3].read_text()
        )
        assert (
            "2-D world (3 seeds): 2.0% (2.0%) of single comparisons, 1.0% (1.0%) of families of 20"
            in text
        )
        assert MISSING not in text.partition("## What survives")[0]
        words = [
            word
            for word in re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text.replace("|", " ")).split()
        ]
        assert len(words) <= 3000
        images = [block for block in (*page.blocks, *details.blocks) if isinstance(block, Image)]
        assert {
            "leads-mixture",
            "leads-shapes",
            "survival-mixture",
            "curves-shapes",
            "frontier",
        } <= {image.name for image in images}
        assert all(len(image.alt) > 60 for image in images)

    @pytest.mark.slow
    def test_the_published_runs_are_those_of_the_present_claims(self) -> None:
        """A changed arm or default would leave published runs without a claim, or ask for
        others.
        """
        wanted = needed(CLAIMS, "all", SEEDS)
        assert ResultsFile(ROOT / "benchmarks/results/claims.jsonl").read(wanted, any_code=True)

    @pytest.mark.slow
    def test_the_published_page_is_generated(self) -> None:
        path = ROOT / "benchmarks/results/claims.jsonl"
        samples = SamplesFile(path.with_name("claims-samples.json")).read(any_code=True)
        lines = joined(ResultsFile(path).read(any_code=True), samples)
        defaults = ResultsFile(default_lines(path)).read(any_code=True)
        inputs = Inputs(judge_all(CLAIMS, lines), lines, path, defaults, read_calibration(path))
        assert claims_page(inputs).markdown("claims") == (ROOT / "docs/claims.md").read_text()

    def test_cells_have_symbols(self) -> None:
        seeds = (100, 101, 102)
        claim = Claim(
            "c", "A beats b.", "-", "-", {"a": A, "b": B}, Compare("a", "b", expects=BETTER)
        )
        assert cell(Judged(claim, "mixture", {}, seeds)) == MISSING
        good = Judged(
            claim, "mixture", made(claim, "mixture", {"a": FAST, "b": SLOW}, seeds), seeds
        )
        assert cell(good) == "✓ holds here, +0.18 [+0.18, +0.18]"
        bad = Judged(claim, "mixture", made(claim, "mixture", {"a": SLOW, "b": FAST}, seeds), seeds)
        assert cell(bad).startswith("✗ does not hold here, -0.18")
        ask = Claim(
            "q", "Which?", "-", "-", {"a": A, "b": B, "c": C}, each(("b", "c"), "a"), asks=True
        )
        several = Judged(
            ask, "mixture", made(ask, "mixture", {"a": SLOW, "b": FAST, "c": SLOW}, seeds), seeds
        )
        assert cell(several) == "b ▲, c ="
        ratio = Claim(
            "r", "Faster.", "-", "-", {"a": A, "b": B}, Compare("a", "b", "updates", BETTER)
        )
        assert "✓ holds here, ratio 0." in cell(
            Judged(ratio, "mixture", made(ratio, "mixture", {"a": FAST, "b": SLOW}, seeds), seeds)
        )
        table = by_world([good, several])
        assert [row[2:] for row in table.rows] == [(cell(good), "-"), (cell(several), "-")]


class TestDefaultSettings:
    @pytest.fixture(scope="class")
    def lines(self) -> dict[str, dict]:
        file = ResultsFile(ROOT / "benchmarks" / "results" / "claims-default-settings.jsonl")
        return {line["id"]: line for line in file.unchecked()}

    def test_runs_of_the_question_replace_those_of_the_file(self, lines: dict[str, dict]) -> None:
        """A lead at default settings that is gone at tuned settings."""
        tuning, lead = CLAIMS["tuning"], CLAIMS["lead-stepwise-gains"]
        curves = {arm: FAST if arm == "stepwise, defaults" else SLOW for arm in tuning.arms}
        new = made(tuning, "mixture", curves, (100, 101, 102)) | made(
            lead, "mixture", dict.fromkeys(lead.arms, SLOW), (100, 101, 102)
        )
        rows = survival_table(judge_all(CLAIMS, new), lines).rows
        assert rows[0][2] == "3 / 3" and rows[0][3].startswith("▲") and rows[0][5].startswith("=")


class TestProvenance:
    def test_one_kind_of_processor_per_seed(self) -> None:
        lines = made(LEADS[0], "mixture", dict.fromkeys(LEADS[0].arms, SLOW), (100, 101))
        assert mixed_seeds(lines) == {}
        said = provenance(lines, Path("x.jsonl"))
        assert (
            "AMD EPYC (4 runs)" in said[0]
            and "commits `1` (4 runs)" in said[0]
            and "code `c` (4 runs)" in said[0]
        )
        assert said[1] == "All arms of one seed ran on one kind of processor."
        next(line for line in lines.values() if line["seed"] == 101)["hardware"] = (
            "one core of 4 (Intel(R) Xeon(R))"
        )
        assert mixed_seeds(lines) == {("mixture", 101): ["AMD EPYC", "Intel(R) Xeon(R)"]}
        said = provenance(lines, Path("x.jsonl"))
        assert (
            said[1].startswith("Warning")
            and "2-D world, seed 101 (AMD EPYC, Intel(R) Xeon(R))" in said[1]
        )


class TestFigures:
    def test_every_arm_has_a_row_and_a_panel(self) -> None:
        arms = arms_of(
            judged_of(compared(lambda arm: FLAT if arm == "random credit" else FAST)), "mixture"
        )
        for axes in leads(arms, "2-D world").axes:
            symbols = [text.get_text() for text in axes.texts if text.get_text() in "▲▼=?"]
            assert len(symbols) == len(ARMS) - 1 and symbols.count("▼") == 1
        assert survival_levels(arms) == [0.35, 0.49, 0.64]
        panels = {
            axes.get_title(loc="left"): axes
            for axes in survivals(arms).axes
            if axes.get_title(loc="left")
        }
        assert len(panels) == len(ARMS) - 1
        ends = [
            np.asarray(line.get_ydata())[-1] for line in panels["random credit (control)"].lines
        ]
        assert ends == [1, 1, 1, 0, 0, 0]  # uniform credit arrives, random credit never does


class TestTables:
    def test_tasks_alone_and_levels(self) -> None:
        claim = Claim(
            "c",
            "A beats b.",
            "-",
            "-",
            {"a": A, "b": B},
            Compare("a", "b", expects=BETTER),
            tasks=("compositional", "text"),
        )
        one = Judged(
            claim, "shapes", made(claim, "shapes", {"a": FAST, "b": SLOW}, (0, 1, 2)), (0, 1, 2)
        )
        alone = by_task(one)
        assert [c.text.rpartition(", ")[2] for c in alone] == ["compositional alone", "text alone"]
        assert all(c.estimate.value == pytest.approx(1.1 / 6) for c in alone)
        assert levels(one) == "Mean reward over training: a 0.485, b 0.302; before training 0.000."
        assert (
            by_task(
                Judged(claim, "mixture", made(claim, "mixture", {"a": FAST, "b": SLOW}, (0,)), (0,))
            )
            == []
        )


class TestDocument:
    def test_documents_say_the_same_twice(self, tmp_path: Path) -> None:
        page = Document("A title")
        page.text("Before <any> section, `code`, [a link](other.md#part).")
        page.items(["first", "second"])
        page.heading("One")
        page.blocks.append(Table(("what", "x"), [("a | b", "1"), ("good", "2")], ("what",)))
        markdown, html = (path.read_text() for path in page.write(tmp_path, "page"))
        assert (
            markdown
            == "# A title\n\nBefore <any> section, `code`, [a link](other.md#part).\n\n1. first\n2."
            " second\n\n## One\n\n| what | x |\n| --- | --- |\n| a / b | 1 |\n| good | 2 |\n"
        )
        assert (
            "&lt;any&gt;" in html
            and "<code>code</code>" in html
            and '<a href="other.html#part">a link</a>' in html
        )
        assert (
            html.count("<section>") == html.count("</section>") <= 1
            and "<ol><li>first</li><li>second</li></ol>" in html
        )
        assert "addEventListener" in html  # tables can be sorted

    def test_a_page_replaces_its_own_files_only(self, tmp_path: Path) -> None:
        """Before anything is written; figures of pages from before they were marked count as named
        by the page.
        """
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
            with pytest.raises(
                ConfigError, match=rf"page: .*{path.name} exists and is not from this command"
            ):
                page.write(tmp_path, "page", "images")
            path.write_bytes(data)
        page.blocks.append(Image("photo", Figure((1, 1)), "A photo"))
        (tmp_path / "images" / "photo.png").write_bytes(b"mine")
        with pytest.raises(ConfigError, match=r"page: .*photo.png exists"):
            page.write(tmp_path, "page", "images")
        assert (
            written[0].read_bytes() == before
            and (tmp_path / "images" / "photo.png").read_bytes() == b"mine"
        )
